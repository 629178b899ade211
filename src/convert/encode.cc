#include "convert/encode.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "bittern/ops/gguf_quantize.h"
#include "bittern/ops/qdq_affine_init.h"
#include "convert/zero_points.h"
#include "core/blocks.h"
#include "core/scratch.h"
#include "cpu/parallel.h"
#include "formats/decode.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

template <class Op>
Status run_op(const typename Op::Desc& desc, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(desc);
  if (!plan) return plan.status();
  AlignedScratch scratch(plan->workspace_bytes());
  return plan->run(args, {}, scratch.workspace());
}

// f(begin, end) over [0, count) on all threads; f writes what is its own.
template <class F>
void in_parallel(std::int64_t count, F&& f) {
  cpu::parallel(count, cpu::kGrain, f);
}

// The same numbers, each rounded once.
template <class To>
void convert(const RowNumbers& numbers, std::int64_t count, To* to) {
  const auto from_type = [&]<class From>(const From* from) {
    in_parallel(count, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) to[i] = from_math<To>(to_math(from[i]));
    });
  };
  switch (numbers.dtype) {
    case DType::f16: return from_type(static_cast<const f16*>(numbers.data));
    case DType::bf16: return from_type(static_cast<const bf16*>(numbers.data));
    default: return from_type(static_cast<const float*>(numbers.data));
  }
}

Status cast_numbers(const RowNumbers& numbers, std::int64_t count, DType dtype,
                    std::vector<std::byte>& out) {
  out.resize(at(count) * size_of(dtype));
  if (numbers.dtype == dtype) {
    std::memcpy(out.data(), numbers.data, out.size());
    return {};
  }
  switch (dtype) {
    case DType::f32: convert(numbers, count, reinterpret_cast<float*>(out.data())); return {};
    case DType::f16: convert(numbers, count, reinterpret_cast<f16*>(out.data())); return {};
    case DType::bf16: convert(numbers, count, reinterpret_cast<bf16*>(out.data())); return {};
    default:
      return unsupported(std::string("numbers as ") + name(dtype) + ", expected f32, f16 or bf16");
  }
}

template <class Void>
View<Void> dense(Void* data, DType dtype, const Shape& shape) {
  return {data, dtype, {}, shape, shape.dense_strides()};
}

std::string value_text(double x) {
  if (std::isnan(x)) return "nan";
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

std::string place(std::int64_t i, std::int64_t first, std::int64_t columns) {
  columns = std::max<std::int64_t>(columns, 1);
  return " at row " + std::to_string(first + i / columns) + ", column " +
         std::to_string(i % columns);
}

// The first number that `is` so: its value and its place.
template <class F>
std::string first_that(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                       F&& is) {
  std::vector<float> values(at(count));
  convert(numbers, count, values.data());
  const auto found = std::find_if(values.begin(), values.end(), is);
  if (found == values.end()) return "a number";
  return value_text(*found) + place(found - values.begin(), numbers.first, columns);
}

Status not_finite(const std::string& what) {
  return invalid("holds infinities or NaN, expected finite numbers (" + what + ")");
}

template <class F>
Status too_large(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                 const std::string& what, F&& is) {
  return unsupported(first_that(numbers, count, columns, [&](float x) { return is(std::abs(x)); }) +
                     what);
}

Status decodes_to_infinity(DType params) {
  return unsupported(
      std::string("with scales of ") + name(params) +
      " its numbers decode to infinities: expected @{scale_dtype} f32, or a rule that "
      "keeps the tensor");
}

// The same numbers, those beyond +-limit at it.
RowNumbers clamped(const RowNumbers& numbers, std::int64_t count, float limit,
                   std::uint64_t& saturated) {
  RowNumbers out;
  out.first = numbers.first;
  out.own.resize(at(count));
  convert(numbers, count, out.own.data());
  for (float& x : out.own) {
    saturated += std::abs(x) > limit;
    x = std::clamp(x, -limit, limit);
  }
  out.data = out.own.data();
  return out;
}

float largest_finite(DType dtype) {
  return dtype == DType::f16    ? kLargestHalf
         : dtype == DType::bf16 ? to_f32(bf16{0x7f7f})
                                : std::numeric_limits<float>::max();
}

// Scales, biases and codes by one of the affine rules. Half weights may have f32 scales; otherwise,
// as in mlx-lm, the weights are first rounded to the dtype of their scales.
Status run_affine(AffineDesc desc, DType params, const RowNumbers& numbers,
                  std::span<const float> importance, std::vector<std::byte>& scales,
                  std::vector<std::byte>& biases, std::vector<std::byte>& codes) {
  const std::int64_t count = desc.outer_size * desc.axis_size;
  desc.f32_scale = params == DType::f32 && numbers.dtype != DType::f32;
  desc.element = desc.f32_scale ? numbers.dtype : params;
  std::vector<std::byte> rounded;
  const void* w = numbers.data;
  if (params != numbers.dtype && !desc.f32_scale) {
    BITTERN_TRY(cast_numbers(numbers, count, params, rounded));
    w = rounded.data();
  }
  desc.expect_finite = true;
  scales.resize(at(desc.param_shape().numel()) * size_of(params));
  biases.resize(scales.size());
  codes.resize(at(desc.code_shape().numel()) * size_of(desc.code_element()));
  const auto out = [](std::vector<std::byte>& bytes, DType dtype, const Shape& shape) {
    return dense(static_cast<void*>(bytes.data()), dtype, shape);
  };
  QdqAffineInit::Args args{.w = dense(w, desc.element, desc.tensor_shape()),
                           .scales = out(scales, params, desc.param_shape()),
                           .biases = out(biases, params, desc.param_shape()),
                           .q = out(codes, desc.code_element(), desc.code_shape())};
  if (desc.method == AffineMethod::lsq && !importance.empty())
    args.importance = view(importance.data(), {desc.axis_size});
  return run_op<QdqAffineInit>(desc, args);
}

AffineDesc affine_desc(const Storage& to, AffineMethod method, std::int64_t count,
                       std::int64_t columns) {
  return {.outer_size = count,
          .axis_size = columns,
          .group_size = to.group,
          .bits = to.bits,
          .storage = CodeStorage::packed,
          .method = method};
}

Status encode_affine(const Storage& to, AffineMethod method, const RowNumbers& numbers,
                     std::int64_t count, std::int64_t columns, std::span<const float> importance,
                     EncodedRows& out) {
  if (to.zeros != Storage::Zeros::biases) {
    const DType params = *to_dtype(to.dtype);
    std::vector<float> w(at(count * columns));
    BITTERN_TRY(as_f32(numbers, w));
    GridRows grid;
    grid.first = numbers.first;
    BITTERN_TRY(fit_zero_points(
        {.bits = to.bits, .group = to.group, .params = params, .method = method}, w.data(), count,
        columns, method == AffineMethod::lsq ? importance : std::span<const float>(), grid));
    if (to.zeros == Storage::Zeros::integers) round_params(grid, to);
    return encode_grid(grid, columns, to, out);
  }
  return run_affine(affine_desc(to, method, count, columns), *to_dtype(to.dtype), numbers,
                    importance, out.scales, out.biases, out.data);
}

// The same if no number is near the end of the scales' range. The scales and biases of minmax and
// mlx show that: |w| is at most |b| + n |s|, except for rounding. False: the numbers must be
// checked.
bool encode_ordinary(const Storage& to, AffineMethod method, const RowNumbers& numbers,
                     std::int64_t count, std::int64_t columns, EncodedRows& out) {
  if (method == AffineMethod::lsq || to.zeros != Storage::Zeros::biases) return false;
  AffineDesc desc = affine_desc(to, method, count, columns);
  desc.expect_finite = true;
  const DType params = *to_dtype(to.dtype);
  if (!run_affine(desc, params, numbers, {}, out.scales, out.biases, out.data).ok()) return false;
  const float n = static_cast<float>(desc.bins() - 1), limit = largest_finite(params) / 8;
  bool ordinary = true;
  (void)visit<float, f16, bf16>(params, [&]<class S>(Type<S>) {
    const auto* s = reinterpret_cast<const S*>(out.scales.data());
    const auto* b = reinterpret_cast<const S*>(out.biases.data());
    for (std::int64_t i = 0; i < desc.param_shape().numel(); ++i)
      ordinary &= std::abs(to_math(b[i])) + n * std::abs(to_math(s[i])) < limit;
    return Status();
  });
  return ordinary;
}

constexpr bool has_minimum(BlockType type) {
  return type == BlockType::q4_1 || type == BlockType::q5_1 || type == BlockType::q4_k ||
         type == BlockType::q5_k;
}

// Super-blocks fitted to a grid. A group of one number has any scale there. Groups of a super-block
// have multiples of one scale, so its own has to disturb no other: 0, or of a number above 0, which
// no bias holds, a part of it.
Status run_fitted(GgufDesc desc, GgufQuantize::Args args, const GridRows& grid) {
  const auto length = static_cast<std::size_t>(grid.group);
  const auto top = static_cast<float>((1 << grid.bits) - 1);
  std::vector<float> scales = grid.scales, biases = grid.biases;
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const auto own = std::span(grid.codes).subspan(g * length, length);
    if (std::any_of(own.begin(), own.end(), [&](std::uint8_t q) { return q != own[0]; })) continue;
    const float value = static_cast<float>(own[0]) * scales[g] + biases[g];
    scales[g] = value > 0 ? value / top : 0;
    biases[g] = value > 0 ? 0 : value;
  }
  desc.given_grid = true;
  args.scales = view(scales.data(), desc.grid_shape());
  args.biases = view(biases.data(), desc.grid_shape());
  return run_op<GgufQuantize>(desc, args);
}

// By the type's own rule; if a method is given and the type has minima, by that method: Q4_1 and
// Q5_1 are such a grid with f16 scales, and super-blocks are fitted to it.
Status encode_blocks(BlockType type, std::optional<AffineMethod> method, const RowNumbers& numbers,
                     std::int64_t count, std::int64_t columns, std::span<const float> importance,
                     EncodedRows& out) {
  GgufDesc desc{.outer_size = count, .axis_size = columns, .type = type, .element = numbers.dtype};
  out.data.resize(at(count * desc.row_bytes()));
  GgufQuantize::Args args{
      .w = dense(numbers.data, numbers.dtype, desc.tensor_shape()),
      .blocks = dense(static_cast<void*>(out.data.data()), DType::u8, desc.block_shape())};
  const bool super = block_size(type).weights == 256;
  if (super && !importance.empty()) args.importance = view(importance.data(), {columns});
  if (!method || !has_minimum(type)) return run_op<GgufQuantize>(desc, args);
  const AffineDesc affine{.outer_size = count,
                          .axis_size = columns,
                          .group_size = 32,
                          .bits = type == BlockType::q4_1 || type == BlockType::q4_k ? 4 : 5,
                          .method = *method};
  std::vector<std::byte> scales, biases, codes;
  const DType params = super ? DType::f32 : DType::f16;
  BITTERN_TRY(run_affine(affine, params, numbers, importance, scales, biases, codes));
  GridRows grid;
  grid.bits = affine.bits;
  grid.group = 32;
  grid.codes.assign(reinterpret_cast<const std::uint8_t*>(codes.data()),
                    reinterpret_cast<const std::uint8_t*>(codes.data() + codes.size()));
  const auto widen = [&](const std::vector<std::byte>& from, std::vector<float>& to) {
    to.resize(from.size() / (super ? sizeof(float) : sizeof(f16)));
    return as_f32({.dtype = params, .data = from.data(), .own = {}}, to);
  };
  BITTERN_TRY(widen(scales, grid.scales));
  BITTERN_TRY(widen(biases, grid.biases));
  if (super) return run_fitted(desc, args, grid);
  return encode_grid(grid, columns,
                     Storage::blocks(type == BlockType::q4_1 ? GgmlType::q4_1 : GgmlType::q5_1),
                     out);
}

Status decode_finite(const EncodedRows& rows, const Storage& storage, std::int64_t first,
                     std::int64_t count, std::int64_t columns) {
  RowNumbers back;
  back.first = first;
  back.own.resize(at(count * columns));
  BITTERN_TRY(decode_rows(tensor_of(rows, storage, count, columns), 0, count, back.own));
  back.data = back.own.data();
  return expect_finite(back, count * columns, columns);
}

// Row `row` of the grid by itself.
GridRows row_of(const GridRows& grid, std::int64_t row, std::int64_t columns) {
  const auto part = [&](const auto& of, std::int64_t length) {
    return std::remove_cvref_t<decltype(of)>(of.begin() + row * length,
                                             of.begin() + (row + 1) * length);
  };
  const std::int64_t groups = columns / grid.group;
  return {.bits = grid.bits,
          .group = grid.group,
          .first = grid.first + row,
          .codes = part(grid.codes, columns),
          .scales = part(grid.scales, groups),
          .biases = part(grid.biases, groups)};
}

RowNumbers numbers_of(const GridRows& grid) {
  RowNumbers numbers;
  numbers.first = grid.first;
  numbers.own.resize(grid.codes.size());
  for (std::size_t i = 0; i < grid.codes.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(grid.group);
    numbers.own[i] = static_cast<float>(grid.codes[i]) * grid.scales[g] + grid.biases[g];
  }
  numbers.data = numbers.own.data();
  return numbers;
}

// Rows whose scales, biases or numbers are out of range are quantised again, from numbers clamped
// to the range. Clamping only a scale would move every weight of its group. This is done row by
// row, so that results do not depend on which rows a thread has.
Status encode_saturated(const GridRows& grid, std::int64_t columns, const Storage& to,
                        EncodedRows& out, double& change, std::uint64_t& saturated) {
  const auto count = static_cast<std::int64_t>(grid.codes.size()) / columns;
  const auto dtype = *to_dtype(to.dtype);
  const auto in_range = [&](const std::vector<float>& params) {
    return std::none_of(params.begin(), params.end(),
                        [&](float x) { return overflows(std::abs(x), dtype); });
  };
  const RowEncoder again{.to = to, .method = {}, .through = {}, .saturate = true};
  GridRows all{.bits = grid.bits,
               .group = grid.group,
               .first = grid.first,
               .codes = {},
               .scales = {},
               .biases = {}};
  const auto append = [](const auto& more, auto& all_of) {
    all_of.insert(all_of.end(), more.begin(), more.end());
  };
  for (std::int64_t r = 0; r < count; ++r) {
    GridRows row = row_of(grid, r, columns);
    EncodedRows one;
    bool fits = in_range(row.scales) && in_range(row.biases);
    if (fits) {
      GridRows rounded = row;
      const double changed = round_params(rounded, to);
      BITTERN_TRY(encode_grid(rounded, columns, to, one));
      fits = decode_finite(one, to, row.first, 1, columns).ok();
      if (fits) change = std::max(change, changed);
      if (fits) row = std::move(rounded);
    }
    if (!fits) {
      BITTERN_TRY(again.encode(numbers_of(row), 1, columns, {}, one, saturated));
      BITTERN_TRY(decode_grid(tensor_of(one, to, 1, columns), 0, 1, row));
    }
    append(row.codes, all.codes);
    append(row.scales, all.scales);
    append(row.biases, all.biases);
  }
  return encode_grid(all, columns, to, out);  // rows together: zero points share words
}

}  // namespace

bool is_fitted(const Storage& to) {
  if (to.kind != Storage::Kind::blocks) return to.kind == Storage::Kind::affine;
  const auto type = block_type(to.type);
  return type && has_minimum(*type);
}

bool uses_importance(const Storage& to, std::optional<AffineMethod> method) {
  if (to.kind == Storage::Kind::affine)
    return method.value_or(AffineMethod::lsq) == AffineMethod::lsq;
  const auto type = block_type(to.type);
  if (to.kind != Storage::Kind::blocks || !type) return false;
  return block_size(*type).weights == 256 || (has_minimum(*type) && method == AffineMethod::lsq);
}

bool overflows(float magnitude, DType dtype) {
  return dtype == DType::f16    ? std::isinf(to_f32(to_f16(magnitude)))
         : dtype == DType::bf16 ? std::isinf(to_f32(to_bf16(magnitude)))
                                : std::isinf(magnitude);
}

std::string beyond_f32(const RowNumbers& numbers, std::int64_t columns) {
  return value_text(numbers.beyond.value) + place(numbers.beyond.at, numbers.first, columns) +
         " is beyond the range of f32";
}

Status RowEncoder::encode(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                          std::span<const float> importance, EncodedRows& out,
                          std::uint64_t& saturated) const {
  if (numbers.beyond.count > 0 && !saturate)
    return unsupported(beyond_f32(numbers, columns) + ": expected @{lossy}, which takes " +
                       value_text(std::numeric_limits<float>::max()) + " in its place");
  // What is clamped again counts once.
  std::uint64_t here = 0;
  BITTERN_TRY(encode_within(numbers, count, columns, importance, out, here));
  saturated += std::max(here, numbers.beyond.count);
  return {};
}

Status RowEncoder::encode_within(const RowNumbers& numbers, std::int64_t count,
                                 std::int64_t columns, std::span<const float> importance,
                                 EncodedRows& out, std::uint64_t& saturated) const {
  if (through.quantized()) {
    RowEncoder inner = *this;
    inner.to = std::exchange(inner.through, {});
    EncodedRows codes;
    BITTERN_TRY(inner.encode_within(numbers, count, columns, importance, codes, saturated));
    RowNumbers back;
    back.own.resize(at(count * columns));
    BITTERN_TRY(decode_rows(tensor_of(codes, through, count, columns), 0, count, back.own));
    back.data = back.own.data();
    return cast_numbers(back, count * columns, *to_dtype(to.dtype), out.data);
  }
  if (to.kind == Storage::Kind::affine &&
      encode_ordinary(to, method.value_or(AffineMethod::lsq), numbers, count, columns, out))
    return {};
  const std::int64_t all = count * columns;
  const float most = largest_magnitude(numbers, all);
  if (!std::isfinite(most)) return expect_finite(numbers, all, columns);
  // Once more with every number inside +-limit. What is clamped again counts once.
  const auto within = [&](float limit) {
    std::uint64_t here = 0, again = 0;
    const RowNumbers inside = clamped(numbers, all, limit, here);
    const Status status = encode_within(inside, count, columns, importance, out, again);
    saturated += std::max(here, again);
    return status;
  };
  switch (to.kind) {
    case Storage::Kind::plain: {
      const auto dtype = to_dtype(to.dtype);
      if (!dtype) return unsupported(std::string("numbers as ") + bittern::name(to.dtype));
      if (!overflows(most, *dtype)) return cast_numbers(numbers, all, *dtype, out.data);
      if (saturate) return within(largest_finite(*dtype));
      return too_large(numbers, all, columns,
                       std::string(" is beyond the range of ") + bittern::name(*dtype) +
                           ": expected f32, or @{lossy}, which writes " +
                           value_text(largest_finite(*dtype)),
                       [&](float x) { return overflows(x, *dtype); });
    }
    case Storage::Kind::affine: {
      const DType params = *to_dtype(to.dtype);
      if (overflows(most, params)) {
        if (saturate) return within(largest_finite(params));
        return too_large(numbers, all, columns,
                         std::string(" is beyond the range of ") + bittern::name(params) +
                             ", the dtype of the scales: expected @{scale_dtype} f32, or @{lossy}, "
                             "which takes " +
                             value_text(largest_finite(params)) + " in its place",
                         [&](float x) { return overflows(x, params); });
      }
      // A zero point times its scale must be a number, too.
      constexpr float kMost = std::numeric_limits<float>::max() / 4;
      if (to.zeros != Storage::Zeros::biases && most > kMost)
        return saturate ? within(kMost) : decodes_to_infinity(params);
      BITTERN_TRY(encode_affine(to, method.value_or(AffineMethod::lsq), numbers, count, columns,
                                importance, out));
      // code * scale + bias may leave the range where no weight does.
      if (most < largest_finite(params) / 4 ||
          decode_finite(out, to, numbers.first, count, columns).ok())
        return {};
      return saturate ? within(most / 16 * 15) : decodes_to_infinity(params);
    }
    case Storage::Kind::blocks: {
      const auto type = block_type(to.type);
      if (!type) return unsupported(std::string("blocks of ") + info(to.type).name);
      // Above this the op clamps; below it a weight keeps its value to within a step of its group.
      const float limit = largest_weight(*type);
      if (most <= limit)
        return encode_blocks(*type, method, numbers, count, columns, importance, out);
      if (saturate) return within(limit);
      return too_large(numbers, all, columns,
                       std::string(" is beyond the range of ") + info(to.type).name +
                           ", whose scales are f16: expected a rule that keeps the tensor, or "
                           "@{lossy}, which takes " +
                           value_text(limit) + " in its place",
                       [&](float x) { return x > limit; });
    }
  }
  return {};
}

Status encode_rounded(GridRows& grid, std::int64_t columns, const Storage& to, bool saturate,
                      EncodedRows& out, double& change, std::uint64_t& saturated) {
  const auto dtype = to_dtype(to.dtype);
  if (to.kind != Storage::Kind::affine || !dtype) return encode_grid(grid, columns, to, out);
  const std::int64_t groups = columns / std::max(grid.group, 1);
  float most = 0;
  bool fits = true;
  for (const std::vector<float>* params : {&grid.scales, &grid.biases}) {
    if (params == &grid.biases && to.zeros == Storage::Zeros::packed) continue;  // not stored
    for (std::size_t i = 0; i < params->size(); ++i) {
      const float x = (*params)[i];
      most = std::max(most, std::abs(x));
      if (!overflows(std::abs(x), *dtype)) continue;
      fits = false;
      if (!saturate)
        return unsupported(std::string(params == &grid.scales ? "scale " : "bias ") +
                           value_text(x) + " of row " +
                           std::to_string(grid.first + static_cast<std::int64_t>(i) / groups) +
                           " is beyond the range of " + bittern::name(*dtype) +
                           ": expected @{scale_dtype} f32, or @{lossy}, which quantises the row "
                           "again");
    }
  }
  const bool near = overflows(most * static_cast<float>(1 << grid.bits), *dtype);
  if (saturate && (near || !fits))
    return encode_saturated(grid, columns, to, out, change, saturated);
  change = std::max(change, round_params(grid, to));
  BITTERN_TRY(encode_grid(grid, columns, to, out));
  if (!near) return {};
  const std::int64_t count = static_cast<std::int64_t>(grid.codes.size()) / columns;
  const Status finite = decode_finite(out, to, grid.first, count, columns);
  return finite.ok() || *dtype == DType::f32 ? finite : decodes_to_infinity(*dtype);
}

Status fit_grid(const GridRows& grid, std::int64_t columns, const Storage& to, EncodedRows& out) {
  const RowNumbers numbers = numbers_of(grid);
  const GgufDesc desc{.outer_size = static_cast<std::int64_t>(grid.codes.size()) / columns,
                      .axis_size = columns,
                      .type = *block_type(to.type),
                      .element = numbers.dtype};
  out = {};
  out.data.resize(at(desc.outer_size * desc.row_bytes()));
  return run_fitted(
      desc,
      {.w = dense(numbers.data, numbers.dtype, desc.tensor_shape()),
       .blocks = dense(static_cast<void*>(out.data.data()), DType::u8, desc.block_shape())},
      grid);
}

Status expect_finite_rows(const EncodedRows& rows, const Storage& storage, std::int64_t first,
                          std::int64_t count, std::int64_t columns) {
  if (storage.kind != Storage::Kind::plain) {
    const Status status = decode_finite(rows, storage, first, count, columns);
    return status.code() == Code::unsupported ? Status{} : status;
  }
  if (storage.dtype == SafeDType::f64) {
    for (std::int64_t i = 0; i < count * columns; ++i) {
      double x;
      std::memcpy(&x, rows.data.data() + at(i) * sizeof x, sizeof x);
      if (!std::isfinite(x)) return not_finite(value_text(x) + place(i, first, columns));
    }
    return {};
  }
  const auto dtype = to_dtype(storage.dtype);
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::f16 && *dtype != DType::bf16)) return {};
  RowNumbers numbers;
  numbers.dtype = *dtype;
  numbers.data = rows.data.data();
  numbers.first = first;
  return expect_finite(numbers, count * columns, columns);
}

CheckpointTensor tensor_of(const EncodedRows& rows, const Storage& storage, std::int64_t count,
                           std::int64_t columns) {
  return {.name = "the quantised rows",
          .shape = {count, columns},
          .storage = storage,
          .data = rows.data,
          .scales = rows.scales,
          .biases = rows.biases,
          .group_index = {}};
}

Status as_f32(const RowNumbers& numbers, std::span<float> out) {
  convert(numbers, static_cast<std::int64_t>(out.size()), out.data());
  return {};
}

float largest_magnitude(const RowNumbers& numbers, std::int64_t count) {
  // Without their sign, the bits of floats are ordered as the numbers are, NaN last.
  const auto largest = [&]<class Word>(const Word* bits, Word magnitude) {
    std::atomic<Word> most = 0;
    in_parallel(count, [&](std::int64_t begin, std::int64_t end) {
      Word here = 0;
      for (std::int64_t i = begin; i < end; ++i)
        here = std::max(here, static_cast<Word>(bits[i] & magnitude));
      Word seen = most.load(std::memory_order_relaxed);
      while (seen < here && !most.compare_exchange_weak(seen, here, std::memory_order_relaxed)) {
      }
    });
    return most.load();
  };
  if (numbers.dtype == DType::f32)
    return std::bit_cast<float>(
        largest(static_cast<const std::uint32_t*>(numbers.data), std::uint32_t{0x7fffffff}));
  const std::uint16_t most =
      largest(static_cast<const std::uint16_t*>(numbers.data), std::uint16_t{0x7fff});
  return numbers.dtype == DType::f16 ? to_f32(f16{most}) : to_f32(bf16{most});
}

Status expect_finite(const RowNumbers& numbers, std::int64_t count, std::int64_t columns) {
  if (std::isfinite(largest_magnitude(numbers, count))) return {};
  return not_finite(first_that(numbers, count, columns, [](float x) { return !std::isfinite(x); }));
}

}  // namespace bittern
