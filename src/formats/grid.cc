#include "formats/grid.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <type_traits>

#include "bittern/ops/pack_codes.h"
#include "bittern/ops/unpack_codes.h"
#include "core/blocks.h"
#include "core/guarded.h"
#include "formats/decode.h"
#include "formats/stored_rows.h"

namespace bittern {
namespace {

constexpr int kBlockGroup = 32;  // of every block format that has a grid
constexpr int kMostGroups = 8;   // of a block

std::string number(float x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(x));
  return text;
}

// The place of a group, for messages.
std::string place(std::int64_t row, std::int64_t column, std::int64_t group) {
  return "row " + std::to_string(row) + ", columns " + std::to_string(column) + ".." +
         std::to_string(column + group - 1) + ": ";
}

// Calls f with the format as a constant, so that its layout is folded into the loops.
template <class F>
void with_type(BlockType type, F&& f) {
  using enum BlockType;
  switch (type) {
    case q4_0: return f(std::integral_constant<BlockType, q4_0>());
    case q4_1: return f(std::integral_constant<BlockType, q4_1>());
    case q5_0: return f(std::integral_constant<BlockType, q5_0>());
    case q5_1: return f(std::integral_constant<BlockType, q5_1>());
    case q8_0: return f(std::integral_constant<BlockType, q8_0>());
    case q4_k: return f(std::integral_constant<BlockType, q4_k>());
    case q5_k: return f(std::integral_constant<BlockType, q5_k>());
    case iq4_nl: return f(std::integral_constant<BlockType, iq4_nl>());
    case iq4_xs: return f(std::integral_constant<BlockType, iq4_xs>());
    case mxfp4: return f(std::integral_constant<BlockType, mxfp4>());
    case q2_k:
    case q3_k:
    case q6_k: return;  // groups of 16
  }
}

// Whether codes look up a table. Its values are integers, so the codes of a grid are the values.
constexpr bool has_table(BlockType type) {
  return type == BlockType::iq4_nl || type == BlockType::iq4_xs || type == BlockType::mxfp4;
}

constexpr int bits_of(BlockType type) {
  switch (type) {
    case BlockType::q8_0:
    case BlockType::iq4_nl:
    case BlockType::iq4_xs: return 8;
    case BlockType::q5_0:
    case BlockType::q5_1:
    case BlockType::q5_k:
    case BlockType::mxfp4: return 5;
    default: return 4;
  }
}

// Whether codes stand for code - 2^(bits - 1), times d.
constexpr bool is_signed(BlockType type) {
  return type == BlockType::q4_0 || type == BlockType::q5_0 || type == BlockType::q8_0 ||
         has_table(type);
}
constexpr int zero_of(BlockType type) { return is_signed(type) ? 1 << (bits_of(type) - 1) : 0; }

// ---- out of a storage ----

template <BlockType type>
void read_block(const std::uint8_t* block, std::uint8_t* codes, float* scales, float* biases) {
  constexpr BlockSize size = block_size(type);
  for (int i = 0; i < size.weights / kBlockGroup; ++i) {
    const GroupGrid grid = block_grid(type, block, i * kBlockGroup);
    scales[i] = grid.s;
    biases[i] = is_signed(type) ? -grid.s * static_cast<float>(zero_of(type)) : -grid.m;
  }
  for (int j = 0; j < size.weights; ++j)
    codes[j] = static_cast<std::uint8_t>(block_code(type, block, j) + zero_of(type));
}

void read_blocks(BlockType type, std::span<const std::byte> blocks, GridRows& out) {
  const BlockSize size = block_size(type);
  const auto bytes = static_cast<std::size_t>(size.bytes);
  const auto weights = static_cast<std::size_t>(size.weights);
  with_type(type, [&](auto constant) {
    for (std::size_t i = 0; i < blocks.size() / bytes; ++i) {
      read_block<constant.value>(reinterpret_cast<const std::uint8_t*>(blocks.data()) + i * bytes,
                                 out.codes.data() + i * weights,
                                 out.scales.data() + i * weights / kBlockGroup,
                                 out.biases.data() + i * weights / kBlockGroup);
    }
  });
}

Status read_affine(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   GridRows& out) {
  const PackDesc desc{
      .outer_size = count, .axis_size = tensor.columns(), .bits = tensor.storage.bits};
  const auto row_words = static_cast<std::size_t>(desc.packed_shape()[1]);
  const AlignedRows<std::uint32_t> words(rows_of(tensor.data, 4 * row_words, first, count));
  const auto plan = Plan<UnpackCodes>::select(desc);
  if (!plan) return plan.status();
  BITTERN_TRY(plan->run(
      {view(words.data(), desc.packed_shape()), view(out.codes.data(), desc.code_shape())}));
  const auto row_bytes = static_cast<std::size_t>(tensor.columns() / tensor.storage.group *
                                                  bits_of(tensor.storage.dtype) / 8);
  BITTERN_TRY(
      widen(tensor.storage.dtype, rows_of(tensor.scales, row_bytes, first, count), out.scales));
  return widen(tensor.storage.dtype, rows_of(tensor.biases, row_bytes, first, count), out.biases);
}

Status read_zero_points(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                        GridRows& out) {
  ZeroPointRows rows;
  BITTERN_TRY(unpack_zero_points(tensor, first, count, rows));
  if (!rows.in_order) {
    return unsupported(of_tensor(tensor) +
                       "the columns of a group lie apart (g_idx), expected side by side");
  }
  const std::size_t groups = static_cast<std::size_t>(tensor.columns() / tensor.storage.group);
  for (std::size_t i = 0; i < rows.scales.size(); ++i) {
    const float scale = rows.scales[i], zero = rows.zeros[i], bias = -zero * scale;
    if (std::isfinite(bias) &&
        static_cast<double>(bias) != -static_cast<double>(zero) * static_cast<double>(scale)) {
      const auto column = static_cast<std::int64_t>(i % groups) * tensor.storage.group;
      return unsupported(
          of_tensor(tensor) +
          place(first + static_cast<std::int64_t>(i / groups), column, tensor.storage.group) +
          "scale " + number(scale) + " times zero point " + number(zero) +
          ", expected a product that F32 holds");
    }
    out.biases[i] = bias;
  }
  out.codes = std::move(rows.codes);
  out.scales = std::move(rows.scales);
  return {};
}

Status check_finite(const CheckpointTensor& tensor, const GridRows& grid) {
  const auto groups = static_cast<std::size_t>(tensor.columns() / grid.group);
  for (std::size_t i = 0; i < grid.scales.size(); ++i) {
    if (std::isfinite(grid.scales[i]) && std::isfinite(grid.biases[i])) continue;
    return invalid(of_tensor(tensor) +
                   place(grid.first + static_cast<std::int64_t>(i / groups),
                         static_cast<std::int64_t>(i % groups) * grid.group, grid.group) +
                   "scale " + number(grid.scales[i]) + " and bias " + number(grid.biases[i]) +
                   ", expected finite ones");
  }
  return {};
}

Status read_grid(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                 GridRows& out) {
  const auto grid = grid_of(tensor.storage);
  if (!grid) {
    return unsupported(
        of_tensor(tensor) + tensor.storage.str() +
        (tensor.storage.kind == Storage::Kind::plain ? " has no codes" : " has no affine grid") +
        ", expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, IQ4_NL, IQ4_XS, MXFP4 or affine "
        "groups");
  }
  const auto codes = static_cast<std::size_t>(count * tensor.columns());
  out.bits = grid->bits;
  out.group = grid->group;
  out.first = first;
  out.codes.resize(codes);
  out.scales.resize(codes / static_cast<std::size_t>(grid->group));
  out.biases.resize(out.scales.size());
  if (codes == 0) return {};
  if (tensor.storage.kind == Storage::Kind::blocks) {
    const BlockType type = *block_type(tensor.storage.type);
    const BlockSize size = block_size(type);
    const auto row_bytes = static_cast<std::size_t>(tensor.columns() / size.weights * size.bytes);
    read_blocks(type, rows_of(tensor.data, row_bytes, first, count), out);
  } else if (has_zero_points(tensor)) {
    BITTERN_TRY(read_zero_points(tensor, first, count, out));
  } else {
    BITTERN_TRY(read_affine(tensor, first, count, out));
  }
  return check_finite(tensor, out);
}

// ---- into a storage ----

bool is_f16(float x) { return to_f32(to_f16(x)) == x; }
bool is_bf16(float x) { return to_f32(to_bf16(x)) == x; }

void put_f16(std::uint8_t* at, float x) {
  const f16 half = to_f16(x);
  std::memcpy(at, &half, sizeof half);
}

// Finds d in f16 and 0 <= k[i] <= 63 with d * k[i] == x[i]. Among several such d it takes the
// smallest in magnitude, which has the largest k: ggml makes the largest k 63, so its own
// super-blocks come back.
struct SuperScale {
  float d = 0;
  std::array<int, kMostGroups> k{};
};
std::optional<SuperScale> super_scale(const std::array<float, kMostGroups>& x) {
  SuperScale found;
  double largest = 0;
  for (const float v : x)
    if (std::abs(static_cast<double>(v)) > std::abs(largest)) largest = static_cast<double>(v);
  if (largest == 0) return found;
  for (int most = 63; most >= 1; --most) {
    // The quotient is exact or it is not d: d * most has at most 17 bits.
    const double d = largest / most;
    found.d = static_cast<float>(d);
    if (static_cast<double>(found.d) != d || !is_f16(found.d) || d * most != largest) continue;
    const bool all = std::equal(x.begin(), x.end(), found.k.begin(), [&](float v, int& k) {
      const double ratio = static_cast<double>(v) / d;  // at most 63 in magnitude
      k = static_cast<int>(std::nearbyint(ratio));
      return k >= 0 && d * k == static_cast<double>(v);
    });
    if (all) return found;
  }
  return std::nullopt;
}

// The inverse of packed_scale_min, into zeros.
void put_scale_min(std::uint8_t scales[12], int i, int scale, int min) {
  const auto put = [&](int at, int bits) {
    scales[at] = static_cast<std::uint8_t>(scales[at] | bits);
  };
  if (i < 4) {
    put(i, scale);
    put(i + 4, min);
  } else {
    put(i + 4, (scale & 15) | (min & 15) << 4);
    put(i - 4, scale >> 4 << 6);
    put(i, min >> 4 << 6);
  }
}

struct BlockParams {
  std::array<float, kMostGroups> scales{}, biases{};
  int shift = 0;  // what codes are to be raised by
};

// Writes a block's scales and minima, into zeros, or says why not.
template <BlockType type>
Status put_params(std::uint8_t* block, BlockParams& params) {
  const auto refuse = [&](const std::string& what, const std::string& expected) {
    return unsupported(what + ", expected " + expected + " for " +
                       std::string(kBlockTypeNames[static_cast<std::size_t>(type)]));
  };
  if constexpr (type == BlockType::q4_k || type == BlockType::q5_k) {
    std::array<float, kMostGroups> minima;
    std::transform(params.biases.begin(), params.biases.end(), minima.begin(), std::negate<>());
    const auto d = super_scale(params.scales), dmin = super_scale(minima);
    if (!d || !dmin) {
      std::string list;
      for (const float x : d ? params.biases : params.scales)
        list.append(list.empty() ? "" : " ").append(number(x));
      return refuse((d ? "biases " : "scales ") + list,
                    std::string(d ? "-dmin" : "d") + " in F16 times 0..63");
    }
    put_f16(block, d->d);
    put_f16(block + 2, dmin->d);
    for (int i = 0; i < kMostGroups; ++i) {
      const auto at = static_cast<std::size_t>(i);
      put_scale_min(block + 4, i, d->k[at], dmin->k[at]);
    }
  } else {
    const float scale = params.scales[0], bias = params.biases[0];
    if (!is_f16(scale)) return refuse("scale " + number(scale), "one that F16 holds");
    put_f16(block, scale);
    if constexpr (is_signed(type)) {
      // bias = -zero * scale for a whole zero: codes move until it is the format's.
      constexpr int own = zero_of(type);
      const auto s = static_cast<double>(scale), b = static_cast<double>(bias);
      const double zero = s == 0 ? own : -b / s;
      if (zero * s != -b || zero != std::nearbyint(zero) || std::abs(zero) > 512) {
        return refuse("scale " + number(scale) + " and bias " + number(bias),
                      "a bias of -" + std::to_string(own) + " times the scale");
      }
      params.shift = own - static_cast<int>(zero);
    } else {
      if (!is_f16(bias)) return refuse("bias " + number(bias), "one that F16 holds");
      put_f16(block + 2, bias);
    }
  }
  return {};
}

template <BlockType type>
Status write_blocks(const GridRows& grid, std::int64_t columns, std::span<std::byte> out) {
  constexpr BlockSize size = block_size(type);
  constexpr int groups = size.weights / kBlockGroup, most = (1 << bits_of(type)) - 1;
  auto* block = reinterpret_cast<std::uint8_t*>(out.data());
  const std::uint8_t* codes = grid.codes.data();
  const auto rows = static_cast<std::int64_t>(grid.codes.size()) / columns;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; column += size.weights) {
      BlockParams params;
      for (std::int64_t i = 0; i < groups; ++i) {
        const auto from = static_cast<std::size_t>(row * (columns / grid.group) +
                                                   (column + i * kBlockGroup) / grid.group);
        params.scales[static_cast<std::size_t>(i)] = grid.scales[from];
        params.biases[static_cast<std::size_t>(i)] = grid.biases[from];
      }
      if (Status status = put_params<type>(block, params); !status.ok()) {
        return {status.code(),
                place(grid.first + row, column, size.weights) + std::string(status.message())};
      }
      for (int j = 0; j < size.weights; ++j) {
        const int code = codes[j] + params.shift;
        if (code < 0 || code > most) {
          return unsupported(
              place(grid.first + row, column + j / kBlockGroup * kBlockGroup, kBlockGroup) +
              "code " + std::to_string(code) + ", expected 0.." + std::to_string(most) + " for " +
              std::string(kBlockTypeNames[static_cast<std::size_t>(type)]));
        }
        put_unsigned_code(type, block, j, code);
      }
      block += size.bytes;
      codes += size.weights;
    }
  }
  return {};
}

Status encode_blocks(const GridRows& grid, std::int64_t columns, BlockType type, EncodedRows& out) {
  const BlockSize size = block_size(type);
  const std::string name(kBlockTypeNames[static_cast<std::size_t>(type)]);
  if (columns % size.weights != 0) {
    return unsupported("rows of " + std::to_string(columns) + ", expected a multiple of " +
                       std::to_string(size.weights) + " for " + name);
  }
  if (grid.group % kBlockGroup != 0) {
    return unsupported("groups of " + std::to_string(grid.group) + ", expected a multiple of " +
                       std::to_string(kBlockGroup) + " for " + name);
  }
  const std::size_t blocks = grid.codes.size() / static_cast<std::size_t>(size.weights);
  out.data.assign(blocks * static_cast<std::size_t>(size.bytes), std::byte{0});
  Status status;
  with_type(type, [&](auto constant) {
    if constexpr (!has_table(constant.value))
      status = write_blocks<constant.value>(grid, columns, out.data);
  });
  return status;
}

// One parameter for each group of the target, in its dtype.
template <class T>
std::vector<std::byte> params_of(const GridRows& grid, std::span<const float> params, int group) {
  std::vector<std::byte> out(grid.codes.size() / static_cast<std::size_t>(group) * sizeof(T));
  const int times = grid.group / group;
  std::byte* to = out.data();
  for (const float x : params) {
    const T stored = from_math<T>(x);
    for (int i = 0; i < times; ++i, to += sizeof stored) std::memcpy(to, &stored, sizeof stored);
  }
  return out;
}

Status encode_affine(const GridRows& grid, std::int64_t columns, const Storage& storage,
                     EncodedRows& out) {
  if (storage.group < 1 || grid.group % storage.group != 0) {
    return unsupported("groups of " + std::to_string(grid.group) + ", expected a multiple of " +
                       std::to_string(storage.group) + " for " + storage.str());
  }
  const auto rows = static_cast<std::int64_t>(grid.codes.size()) / columns;
  if (const auto size = storage.bytes({rows, columns}); !size) return size.status();
  const auto of_group = [&](std::size_t i) {
    const auto groups = static_cast<std::size_t>(columns / grid.group);
    return place(grid.first + static_cast<std::int64_t>(i / groups),
                 static_cast<std::int64_t>(i % groups) * grid.group, grid.group);
  };
  for (std::size_t i = 0; grid.bits > storage.bits && i < grid.codes.size(); ++i) {
    if (grid.codes[i] >> storage.bits == 0) continue;
    return unsupported(of_group(i / static_cast<std::size_t>(grid.group)) + "code " +
                       std::to_string(grid.codes[i]) + ", expected 0.." +
                       std::to_string((1 << storage.bits) - 1) + " for " + storage.str());
  }
  const auto holds = [&](float x) {
    return storage.dtype == SafeDType::f32 ||
           (storage.dtype == SafeDType::f16 ? is_f16(x) : is_bf16(x));
  };
  const bool packed = storage.zeros == Storage::Zeros::packed;
  const auto times = static_cast<std::size_t>(grid.group / storage.group);
  std::vector<std::uint8_t> zeros;  // one for each group of the target
  for (std::size_t i = 0; i < grid.scales.size(); ++i) {
    const float scale = grid.scales[i], bias = grid.biases[i];
    const auto refuse = [&](const std::string& expected) {
      return unsupported(of_group(i) + "scale " + number(scale) + " and bias " + number(bias) +
                         ", expected " + expected);
    };
    if (!holds(scale) || (!packed && !holds(bias)))
      return refuse("ones that " + std::string(name(storage.dtype)) + " holds");
    if (!packed) continue;
    const auto zero = zero_point_of(scale, bias, storage.bits);
    if (!zero)
      return refuse("a bias of -scale times a zero point 0.." +
                    std::to_string((1 << storage.bits) - 1));
    zeros.insert(zeros.end(), times, static_cast<std::uint8_t>(*zero));
  }

  const PackDesc desc{.outer_size = rows, .axis_size = columns, .bits = storage.bits};
  std::vector<std::uint32_t> words(static_cast<std::size_t>(desc.packed_shape().numel()));
  const auto plan = Plan<PackCodes>::select(desc);
  if (!plan) return plan.status();
  BITTERN_TRY(plan->run(
      {view(grid.codes.data(), desc.code_shape()), view(words.data(), desc.packed_shape())}));
  const auto bytes = std::as_bytes(std::span(words));
  out.data.assign(bytes.begin(), bytes.end());
  const auto encode = [&]<class T>(Type<T>) {
    out.scales = params_of<T>(grid, grid.scales, storage.group);
    out.biases = packed ? pack_zero_points(zeros, static_cast<std::size_t>(columns / storage.group),
                                           storage.bits)
                        : params_of<T>(grid, grid.biases, storage.group);
    return Status();
  };
  return visit<float, f16, bf16>(*to_dtype(storage.dtype), encode);
}

Status encode(const GridRows& grid, std::int64_t columns, const Storage& storage,
              EncodedRows& out) {
  const auto n = static_cast<std::int64_t>(grid.codes.size());
  if (columns < 1 || grid.bits < 1 || grid.bits > 8 || grid.group < 1 ||
      columns % grid.group != 0 || n % columns != 0 ||
      static_cast<std::int64_t>(grid.scales.size()) != n / grid.group ||
      grid.biases.size() != grid.scales.size()) {
    return invalid(std::to_string(n) + " codes of " + std::to_string(grid.bits) +
                   " bits in rows of " + std::to_string(columns) + ", " +
                   std::to_string(grid.scales.size()) + " scales and " +
                   std::to_string(grid.biases.size()) + " biases, expected one of each for every " +
                   std::to_string(grid.group) + " codes");
  }
  out = {};
  if (storage.kind == Storage::Kind::affine) return encode_affine(grid, columns, storage, out);
  const auto type = block_type(storage.type);
  if (!grid_of(storage) || has_table(*type)) {
    return unsupported(storage.str() +
                       ", expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or affine groups");
  }
  return encode_blocks(grid, columns, *type, out);
}

}  // namespace

std::optional<Grid> grid_of(const Storage& storage) {
  if (storage.kind == Storage::Kind::plain) return std::nullopt;
  if (storage.kind == Storage::Kind::affine) return Grid{storage.bits, storage.group};
  const auto type = block_type(storage.type);
  if (!type || block_size(*type).group != kBlockGroup) return std::nullopt;
  return Grid{bits_of(*type), kBlockGroup};
}

Status decode_grid(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   GridRows& out) {
  BITTERN_TRY(check_rows(tensor, first, count));
  try {
    return read_grid(tensor, first, count, out);
  } catch (...) {
    return caught(tensor.name);
  }
}

Status encode_grid(const GridRows& grid, std::int64_t columns, const Storage& storage,
                   EncodedRows& out) {
  try {
    return encode(grid, columns, storage, out);
  } catch (...) {
    return caught("encode_grid");
  }
}

std::optional<int> zero_point_of(float scale, float bias, int bits) {
  const auto s = static_cast<double>(scale), b = static_cast<double>(bias);
  const double zero = s == 0 ? 0 : std::nearbyint(-b / s);
  if (zero * s != -b || !(zero >= 0) || zero >= 1 << bits) return std::nullopt;
  return static_cast<int>(zero);
}

float round_param(float x, DType dtype) {
  return dtype == DType::f16 ? to_f32(to_f16(x)) : dtype == DType::bf16 ? to_f32(to_bf16(x)) : x;
}

double round_params(GridRows& grid, const Storage& to) {
  const DType dtype = to_dtype(to.dtype).value_or(DType::f32);
  double largest = 0;
  const auto round = [&](float& x) {
    const float rounded = round_param(x, dtype);
    if (rounded == x) return;
    const double change = std::abs(static_cast<double>(rounded) - static_cast<double>(x));
    largest = std::max(largest, change / std::abs(static_cast<double>(x)));
    x = rounded;
  };
  for (std::size_t i = 0; i < grid.scales.size(); ++i) {
    float &scale = grid.scales[i], &bias = grid.biases[i];
    const auto zero =
        to.zeros == Storage::Zeros::packed ? zero_point_of(scale, bias, to.bits) : std::nullopt;
    round(scale);
    if (zero) {
      bias = 0 - scale * static_cast<float>(*zero);
    } else {
      round(bias);
    }
  }
  return largest;
}

}  // namespace bittern
