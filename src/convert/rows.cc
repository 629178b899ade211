#include "convert/rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "bittern/ops/gguf_quantize.h"
#include "bittern/ops/qdq_affine_init.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string of_tensor(const std::string& name) { return "tensor " + name + ": "; }

template <class Op>
Status run_op(const typename Op::Desc& desc, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(desc);
  if (!plan) return plan.status();
  std::vector<std::byte> scratch(plan->workspace_bytes() + 64);
  void* aligned = scratch.data();
  std::size_t space = scratch.size();
  std::align(64, plan->workspace_bytes(), aligned, space);
  return plan->run(args, {}, {aligned, plan->workspace_bytes()});
}

// f(begin, end) over [0, count) on all threads; f writes what is its own.
template <class F>
void in_parallel(std::int64_t count, F&& f) {
  constexpr std::int64_t kPiece = 1 << 16;
  const std::int64_t pieces = (count + kPiece - 1) / kPiece;
#pragma omp parallel for num_threads(num_threads()) schedule(static) if (pieces > 1)
  for (std::int64_t i = 0; i < pieces; ++i) f(i * kPiece, std::min(count, (i + 1) * kPiece));
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

float mapped(ValueMap map, float x) {
  switch (map) {
    case ValueMap::same: return x;
    case ValueMap::plus_one: return x + 1;
    case ValueMap::minus_one: return x - 1;
    case ValueMap::negative_exp: return static_cast<float>(-std::exp(double{x}));
    case ValueMap::log_negative: return static_cast<float>(std::log(-double{x}));
  }
  return x;
}

// Each row's equal blocks in another order.
template <class T>
void move_blocks(std::vector<T>& rows, std::int64_t count, const std::vector<std::int64_t>& order) {
  if (order.empty() || count == 0) return;
  const std::size_t row = rows.size() / at(count), block = row / order.size();
  std::vector<T> moved(row);
  for (std::size_t r = 0; r < at(count); ++r) {
    T* const begin = rows.data() + r * row;
    for (std::size_t b = 0; b < order.size(); ++b)
      std::copy_n(begin + at(order[b]) * block, block, moved.data() + b * block);
    std::copy(moved.begin(), moved.end(), begin);
  }
}

// What cannot be cut: columns that share a block, a scale or a word of codes.
std::int64_t unit_columns(const Storage& storage) {
  if (storage.kind == Storage::Kind::blocks) return info(storage.type).block;
  if (storage.kind == Storage::Kind::affine) return std::lcm(storage.group, 32);
  return 1;
}

}  // namespace

Result<RowBytes> row_bytes(const Storage& storage, std::int64_t columns) {
  const auto all = storage.bytes(Shape{1, columns});
  if (!all) return all.status();
  if (storage.kind != Storage::Kind::affine) return RowBytes{.data = *all};
  const auto params =
      static_cast<std::uint64_t>(columns / storage.group * bits_of(storage.dtype) / 8);
  return RowBytes{.data = *all - 2 * params, .scales = params, .biases = params};
}

// ---- RowReader ----

Result<RowReader> RowReader::open(const Checkpoint& source, const Recipe& recipe) {
  const auto refuse = [&](const std::string& tensor, const std::string& what) {
    return invalid(source.path() + ": " + of_tensor(tensor) + what + " to make " + recipe.name);
  };
  RowReader reader;
  reader.name_ = recipe.name;
  reader.columns_ = recipe.width > 0         ? recipe.width
                    : recipe.shape.rank == 0 ? 1
                                             : recipe.shape[recipe.shape.rank - 1];
  reader.rows_ = reader.columns_ == 0 ? 0 : recipe.shape.numel() / reader.columns_;
  reader.column_block_ = recipe.column_block;
  reader.order_ = recipe.columns;
  reader.map_ = recipe.map;
  for (const std::string& name : recipe.sources) {
    const CheckpointTensor* found = source.find(name);
    if (found == nullptr) return refuse(name, "not there, expected");
    CheckpointTensor& tensor = reader.sources_.emplace_back(*found);
    // A conv weight [C, 1, K] and its [C, K] or [C, K, 1] are the same numbers.
    if (tensor.columns() != reader.columns_ && !tensor.storage.quantized() && reader.columns_ > 0 &&
        tensor.shape.numel() % reader.columns_ == 0)
      tensor.shape = {tensor.shape.numel() / reader.columns_, reader.columns_};
    if (tensor.columns() != reader.columns_) {
      return refuse(name, "rows of " + std::to_string(tensor.columns()) + ", expected " +
                              std::to_string(reader.columns_));
    }
    if (tensor.storage != reader.storage()) {
      return refuse(name, tensor.storage.str() + ", expected " + reader.storage().str() + " like " +
                              recipe.sources[0]);
    }
  }
  if (recipe.sources.empty()) {
    if (static_cast<std::int64_t>(recipe.values.size()) != recipe.shape.numel())
      return Status{Code::internal, of_tensor(recipe.name) + "made from nothing"};
    reader.sources_.push_back({.name = recipe.name,
                               .shape = recipe.shape,
                               .storage = Storage::plain(SafeDType::f32),
                               .data = std::as_bytes(std::span(recipe.values)),
                               .scales = {},
                               .biases = {},
                               .group_index = {}});
  }
  std::vector<RowRun> runs = recipe.rows;
  if (runs.empty()) runs.push_back({.source = 0, .first = 0, .count = reader.sources_[0].rows()});
  std::int64_t row = 0;
  for (const RowRun& run : runs) {
    const std::int64_t there = reader.sources_[run.source].rows();
    const std::int64_t last = run.first + (run.count - 1) * run.step;
    if (run.count < 0 || run.first < 0 || (run.count > 0 && (last < 0 || last >= there)) ||
        run.first > there) {
      return refuse(reader.sources_[run.source].name,
                    std::to_string(there) + " rows, expected at least " +
                        std::to_string(std::max(run.first, last) + 1));
    }
    if (run.count == 0) continue;
    reader.runs_.push_back({{run}, row});
    row += run.count;
  }
  if (row != reader.rows_) {
    return refuse(reader.sources_[0].name,
                  std::to_string(row) + " rows, expected " + std::to_string(reader.rows_));
  }
  return reader;
}

bool RowReader::movable() const {
  if (map_ != ValueMap::same || sources_[0].layout != CheckpointTensor::Layout::rows) return false;
  return order_.empty() || column_block_ % unit_columns(storage()) == 0;
}

std::vector<RowReader::Pick> RowReader::picks(std::int64_t first, std::int64_t count) const {
  std::vector<Pick> picks;
  picks.reserve(at(count));
  auto run = std::upper_bound(runs_.begin(), runs_.end(), first,
                              [](std::int64_t row, const Run& r) { return row < r.at; });
  for (--run; count > 0; ++run) {
    const std::int64_t skipped = first - run->at, n = std::min(count, run->count - skipped);
    for (std::int64_t i = 0; i < n; ++i)
      picks.push_back({run->source, run->first + (skipped + i) * run->step});
    first += n;
    count -= n;
  }
  return picks;
}

// f(tensor, first, count, from, to): rows [first, first + count) of a source hold picks [from, to).
// Rows near each other are one range, so that a permuted head is decoded at once.
template <class F>
Status RowReader::each_range(const std::vector<Pick>& picks, F&& f) const {
  for (std::size_t from = 0; from < picks.size();) {
    std::int64_t low = picks[from].row, high = low;
    std::size_t to = from + 1;
    for (; to < picks.size() && picks[to].source == picks[from].source; ++to) {
      const std::int64_t l = std::min(low, picks[to].row), h = std::max(high, picks[to].row);
      if (h - l > 2 * static_cast<std::int64_t>(to - from) + 1024) break;
      low = l;
      high = h;
    }
    BITTERN_TRY(f(sources_[picks[from].source], low, high - low + 1, from, to));
    from = to;
  }
  return {};
}

Status RowReader::numbers(std::int64_t first, std::int64_t count, RowNumbers& out) const {
  const std::vector<Pick> wanted = picks(first, count);
  const CheckpointTensor& source = sources_[wanted.empty() ? 0 : wanted[0].source];
  const auto dtype = to_dtype(source.storage.dtype);
  const bool in_order = std::adjacent_find(wanted.begin(), wanted.end(), [](Pick a, Pick b) {
                          return a.source != b.source || b.row != a.row + 1;
                        }) == wanted.end();
  const bool float_dtype =
      dtype && (*dtype == DType::f32 || *dtype == DType::f16 || *dtype == DType::bf16);
  if (source.storage.kind == Storage::Kind::plain && float_dtype && in_order && order_.empty() &&
      map_ == ValueMap::same) {
    const std::size_t row = at(columns_) * size_of(*dtype);
    const std::byte* data = source.data.data() + (wanted.empty() ? 0 : at(wanted[0].row) * row);
    if (reinterpret_cast<std::uintptr_t>(data) % size_of(*dtype) == 0) {
      out.dtype = *dtype;
      out.data = data;
      return {};
    }
  }
  out.own.resize(at(count * columns_));
  std::vector<float> range;
  const auto decode = [&](const CheckpointTensor& tensor, std::int64_t low, std::int64_t rows,
                          std::size_t from, std::size_t to) {
    if (in_order)
      return decode_rows(tensor, low, rows,
                         std::span(out.own).subspan(from * at(columns_), at(rows * columns_)));
    range.resize(at(rows * columns_));
    BITTERN_TRY(decode_rows(tensor, low, rows, range));
    for (std::size_t i = from; i < to; ++i)
      std::copy_n(range.data() + (wanted[i].row - low) * columns_, columns_,
                  out.own.data() + at(columns_) * i);
    return Status{};
  };
  BITTERN_TRY(each_range(wanted, decode));
  move_blocks(out.own, count, order_);
  if (map_ != ValueMap::same)
    for (float& x : out.own) x = mapped(map_, x);
  out.dtype = DType::f32;
  out.data = out.own.data();
  return {};
}

Status RowReader::grid(std::int64_t first, std::int64_t count, GridRows& out) const {
  const std::vector<Pick> wanted = picks(first, count);
  GridRows range;
  const auto decode = [&](const CheckpointTensor& tensor, std::int64_t low, std::int64_t rows,
                          std::size_t from, std::size_t to) -> Status {
    BITTERN_TRY(decode_grid(tensor, low, rows, range));
    const std::int64_t groups = columns_ / range.group;
    out.bits = range.bits;
    out.group = range.group;
    out.codes.resize(at(count * columns_));
    out.scales.resize(at(count * groups));
    out.biases.resize(at(count * groups));
    for (std::size_t i = from; i < to; ++i) {
      const std::int64_t row = wanted[i].row - low, to_row = static_cast<std::int64_t>(i);
      std::copy_n(range.codes.data() + row * columns_, columns_,
                  out.codes.data() + to_row * columns_);
      std::copy_n(range.scales.data() + row * groups, groups, out.scales.data() + to_row * groups);
      std::copy_n(range.biases.data() + row * groups, groups, out.biases.data() + to_row * groups);
    }
    return {};
  };
  BITTERN_TRY(each_range(wanted, decode));
  if (!order_.empty() && (out.group == 0 || column_block_ % out.group != 0)) {
    return unsupported(of_tensor(name_) + "columns move in blocks of " +
                       std::to_string(column_block_) + ", expected a multiple of its groups of " +
                       std::to_string(out.group));
  }
  move_blocks(out.codes, count, order_);
  move_blocks(out.scales, count, order_);
  move_blocks(out.biases, count, order_);
  return {};
}

Status RowReader::stored(std::int64_t first, std::int64_t count, EncodedRows& out) const {
  const auto row = row_bytes(storage(), columns_);
  if (!row) return row.status();
  out.data.resize(at(count) * row->data);
  out.scales.resize(at(count) * row->scales);
  out.biases.resize(at(count) * row->biases);
  std::size_t i = 0;
  for (const Pick& pick : picks(first, count)) {
    const CheckpointTensor& source = sources_[pick.source];
    const auto copy = [&](std::span<const std::byte> from, std::vector<std::byte>& to,
                          std::uint64_t bytes) {
      if (bytes > 0) std::memcpy(to.data() + i * bytes, from.data() + at(pick.row) * bytes, bytes);
    };
    copy(source.data, out.data, row->data);
    copy(source.scales, out.scales, row->scales);
    copy(source.biases, out.biases, row->biases);
    ++i;
  }
  move_blocks(out.data, count, order_);
  move_blocks(out.scales, count, order_);
  move_blocks(out.biases, count, order_);
  return {};
}

// ---- RowEncoder ----

namespace {

template <class Void>
View<Void> dense(Void* data, DType dtype, const Shape& shape) {
  return {data, dtype, {}, shape, shape.dense_strides()};
}

Status expect_finite(const RowNumbers& numbers, std::int64_t count) {
  if (all_finite(numbers, count)) return {};
  return invalid("holds infinities or NaN, expected finite numbers");
}

// Scales, biases and codes by one of the affine rules. Halves may have f32 scales; otherwise, as
// mlx-lm does, the weights take the dtype of their scales first.
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
  const Status status = run_op<QdqAffineInit>(desc, args);
  if (status.ok()) return {};
  BITTERN_TRY(expect_finite(numbers, count));
  if (rounded.empty() || all_finite({.dtype = params, .data = w, .own = {}}, count)) return status;
  return invalid(std::string("a number beyond the range of ") + name(params) +
                 ", expected scales of f32 for it");
}

Status encode_affine(const Storage& to, AffineMethod method, const RowNumbers& numbers,
                     std::int64_t count, std::int64_t columns, std::span<const float> importance,
                     EncodedRows& out) {
  return run_affine({.outer_size = count,
                     .axis_size = columns,
                     .group_size = to.group,
                     .bits = to.bits,
                     .storage = CodeStorage::packed,
                     .method = method},
                    *to_dtype(to.dtype), numbers, importance, out.scales, out.biases, out.data);
}

constexpr bool has_minimum(BlockType type) {
  return type == BlockType::q4_1 || type == BlockType::q5_1 || type == BlockType::q4_k ||
         type == BlockType::q5_k;
}

// By the type's own rule, or, where a method is given and the type has minima, by that: Q4_1 and
// Q5_1 are such a grid with f16 scales; super-blocks are fitted to it.
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
  if (!method || !has_minimum(type)) {
    BITTERN_TRY(run_op<GgufQuantize>(desc, args));
    return expect_finite(numbers, count * columns);
  }
  const AffineDesc affine{.outer_size = count,
                          .axis_size = columns,
                          .group_size = 32,
                          .bits = type == BlockType::q4_1 || type == BlockType::q4_k ? 4 : 5,
                          .method = *method};
  std::vector<std::byte> scales, biases, codes;
  const DType params = super ? DType::f32 : DType::f16;
  BITTERN_TRY(run_affine(affine, params, numbers, importance, scales, biases, codes));
  if (super) {
    desc.given_grid = true;
    args.scales = dense(static_cast<const void*>(scales.data()), params, affine.param_shape());
    args.biases = dense(static_cast<const void*>(biases.data()), params, affine.param_shape());
    return run_op<GgufQuantize>(desc, args);
  }
  GridRows grid;
  grid.bits = affine.bits;
  grid.group = 32;
  grid.codes.assign(reinterpret_cast<const std::uint8_t*>(codes.data()),
                    reinterpret_cast<const std::uint8_t*>(codes.data() + codes.size()));
  const auto widen = [&](const std::vector<std::byte>& from, std::vector<float>& to) {
    to.resize(from.size() / sizeof(f16));
    return as_f32({.dtype = params, .data = from.data(), .own = {}}, to);
  };
  BITTERN_TRY(widen(scales, grid.scales));
  BITTERN_TRY(widen(biases, grid.biases));
  return encode_grid(grid, columns,
                     Storage::blocks(type == BlockType::q4_1 ? GgmlType::q4_1 : GgmlType::q5_1),
                     out);
}

}  // namespace

Status RowEncoder::encode(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                          std::span<const float> importance, EncodedRows& out) const {
  if (through.quantized()) {
    const RowEncoder inner{.to = through, .method = method, .through = {}};
    EncodedRows codes;
    BITTERN_TRY(inner.encode(numbers, count, columns, importance, codes));
    RowNumbers back;
    back.own.resize(at(count * columns));
    BITTERN_TRY(decode_rows(tensor_of(codes, through, count, columns), 0, count, back.own));
    back.data = back.own.data();
    return cast_numbers(back, count * columns, *to_dtype(to.dtype), out.data);
  }
  switch (to.kind) {
    case Storage::Kind::plain: {
      const auto dtype = to_dtype(to.dtype);
      if (!dtype) return unsupported(std::string("numbers as ") + bittern::name(to.dtype));
      return cast_numbers(numbers, count * columns, *dtype, out.data);
    }
    case Storage::Kind::affine:
      return encode_affine(to, method.value_or(AffineMethod::lsq), numbers, count, columns,
                           importance, out);
    case Storage::Kind::blocks: {
      const auto type = block_type(to.type);
      if (!type) return unsupported(std::string("blocks of ") + info(to.type).name);
      return encode_blocks(*type, method, numbers, count, columns, importance, out);
    }
  }
  return {};
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

std::int64_t rows_at_once(std::int64_t columns) {
  return std::max<std::int64_t>(1, (std::int64_t{1} << 19) / std::max<std::int64_t>(columns, 1));
}

bool all_finite(const RowNumbers& numbers, std::int64_t count) {
  std::atomic<bool> finite = true;
  // All ones in the exponent; OR over a piece needs no branch.
  const auto scan = [&]<class Word>(const Word* bits, Word exponent) {
    in_parallel(count, [&](std::int64_t begin, std::int64_t end) {
      Word bad = 0;
      for (std::int64_t i = begin; i < end; ++i)
        bad |= static_cast<Word>((bits[i] & exponent) == exponent);
      if (bad != 0) finite.store(false, std::memory_order_relaxed);
    });
  };
  if (numbers.dtype == DType::f32)
    scan(static_cast<const std::uint32_t*>(numbers.data), std::uint32_t{0x7f800000});
  else
    scan(static_cast<const std::uint16_t*>(numbers.data),
         static_cast<std::uint16_t>(numbers.dtype == DType::f16 ? 0x7c00 : 0x7f80));
  return finite;
}

Status with_tensor(const Checkpoint& source, const std::string& name, const Status& status) {
  const std::string_view message = status.message();
  const std::string tensor = message.starts_with("tensor ") ? "" : of_tensor(name);
  return {status.code(), source.path() + ": " + tensor + std::string(message)};
}

}  // namespace bittern
