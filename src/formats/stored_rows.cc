#include "formats/stored_rows.h"

#include <algorithm>
#include <bit>

#include "bittern/ops/unpack_codes.h"
#include "core/guarded.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

using Layout = CheckpointTensor::Layout;

template <class T>
T load(const std::byte* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// to_f32(f16) without branches, for vectors: the exponent's excess is that of a factor 2^112, which
// subnormals need as well; infinities and NaN have the highest exponent there is.
float widened(std::uint16_t bits) {
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const std::uint32_t special = magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(sign | scaled | special);
}

}  // namespace

std::string of_tensor(const CheckpointTensor& tensor) {
  return "tensor " + in_quotes(tensor.name) + ": ";
}

Status check_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count) {
  if (first < 0 || count < 0 || first > tensor.rows() || count > tensor.rows() - first) {
    return invalid(of_tensor(tensor) + std::to_string(count) + " rows from row " +
                   std::to_string(first) + ", expected some of its " +
                   std::to_string(tensor.rows()));
  }
  if (has_zero_points(tensor)) return {};  // checked by unpack_zero_points
  const auto size = tensor.storage.bytes(tensor.shape);
  throw_if_out_of_memory(size.status());
  if (!size) return invalid(of_tensor(tensor) + std::string(size.status().message()));
  if (*size == tensor.bytes() && tensor.scales.size() == tensor.biases.size()) return {};
  return invalid(of_tensor(tensor) + std::to_string(tensor.bytes()) + " bytes, expected " +
                 std::to_string(*size) + " for " + tensor.shape.str() + " of " +
                 tensor.storage.str());
}

Status widen(SafeDType dtype, std::span<const std::byte> bytes, std::span<float> out) {
  const std::byte* from = bytes.data();
  const std::size_t n = out.size();
  switch (dtype) {
    case SafeDType::f32:
      if (n > 0) std::memcpy(out.data(), from, n * sizeof(float));
      return {};
    case SafeDType::f16:
      for (std::size_t i = 0; i < n; ++i) out[i] = widened(load<std::uint16_t>(from + 2 * i));
      return {};
    case SafeDType::bf16:
      for (std::size_t i = 0; i < n; ++i) out[i] = to_f32(load<bf16>(from + 2 * i));
      return {};
    case SafeDType::f64:
      for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(load<double>(from + 8 * i));
      return {};
    default: return unsupported(name(dtype));
  }
}

// ---- zero points ----

bool has_zero_points(const CheckpointTensor& tensor) {
  return tensor.layout != Layout::rows || tensor.storage.zeros == Storage::Zeros::packed;
}

namespace {

// Code j of a bit stream of `bits`-bit codes in words that lie `stride` words apart.
std::uint8_t stream_code(const std::byte* words, std::size_t stride, std::size_t j, unsigned bits) {
  const std::size_t bit = j * bits, word = bit / 32;
  std::uint64_t pair = load<std::uint32_t>(words + 4 * word * stride);
  if (bit % 32 + bits > 32)
    pair |= std::uint64_t{load<std::uint32_t>(words + 4 * (word + 1) * stride)} << 32;
  return static_cast<std::uint8_t>(pair >> bit % 32 & ((1u << bits) - 1));
}

// AWQ has 8 neighbours in a word, in the order 0 2 4 6 1 3 5 7 from its low bits on.
std::uint8_t awq_code(const std::byte* words, std::size_t j) {
  constexpr std::uint8_t kPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const auto word = load<std::uint32_t>(words + j / 8 * 4);
  return static_cast<std::uint8_t>(word >> 4 * kPlace[j % 8] & 15);
}

Status wrong_size(const CheckpointTensor& tensor) {
  return invalid(of_tensor(tensor) + std::to_string(tensor.bytes()) + " bytes, expected those of " +
                 tensor.shape.str() + " of " + tensor.storage.str());
}

// compressed-tensors: codes and scales by rows, zero points a bit stream down each column.
Status unpack_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   ZeroPointRows& out) {
  const auto rows = static_cast<std::size_t>(tensor.rows()), n = static_cast<std::size_t>(count);
  const auto group = static_cast<std::size_t>(tensor.storage.group);
  const auto bits = static_cast<unsigned>(tensor.storage.bits);
  const std::size_t columns = static_cast<std::size_t>(tensor.columns()), groups = columns / group;
  const std::size_t row_scales =
      groups * static_cast<std::size_t>(bits_of(tensor.storage.dtype) / 8);
  const PackDesc desc{
      .outer_size = count, .axis_size = tensor.columns(), .bits = tensor.storage.bits};
  const auto row_words = static_cast<std::size_t>(desc.packed_shape()[1]);
  const std::size_t zero_bytes = (rows * bits + 31) / 32 * groups * 4;
  if (tensor.data.size() != rows * row_words * 4 || tensor.scales.size() != rows * row_scales ||
      (!tensor.biases.empty() && tensor.biases.size() != zero_bytes))
    return wrong_size(tensor);

  out.in_order = true;
  out.group_of.resize(columns);
  for (std::size_t c = 0; c < columns; ++c) out.group_of[c] = static_cast<std::int32_t>(c / group);
  out.scales.resize(n * groups);
  BITTERN_TRY(
      widen(tensor.storage.dtype, rows_of(tensor.scales, row_scales, first, count), out.scales));
  out.zeros.assign(n * groups, static_cast<std::uint8_t>(1u << (bits - 1)));
  for (std::size_t i = 0; !tensor.biases.empty() && i < n * groups; ++i)
    out.zeros[i] = stream_code(tensor.biases.data() + 4 * (i % groups), groups,
                               static_cast<std::size_t>(first) + i / groups, bits);
  out.codes.resize(n * columns);
  const AlignedRows<std::uint32_t> words(rows_of(tensor.data, 4 * row_words, first, count));
  const auto plan = Plan<UnpackCodes>::select(desc);
  if (!plan) return plan.status();
  return plan->run(
      {view(words.data(), desc.packed_shape()), view(out.codes.data(), desc.code_shape())});
}

// AWQ and GPTQ keep a weight [rows, columns] by columns.
Status unpack_columns(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                      ZeroPointRows& out) {
  const auto rows = static_cast<std::size_t>(tensor.rows());
  const auto columns = static_cast<std::size_t>(tensor.columns());
  const auto group = static_cast<std::size_t>(tensor.storage.group);
  const auto bits = static_cast<unsigned>(tensor.storage.bits);
  const std::size_t groups = columns / group, row_words = rows * bits / 32;
  const auto param_bytes = static_cast<std::size_t>(bits_of(tensor.storage.dtype) / 8);
  const bool awq = tensor.layout == Layout::awq;
  if (tensor.data.size() != (awq ? columns * row_words : columns * bits / 32 * rows) * 4 ||
      tensor.scales.size() != groups * rows * param_bytes ||
      tensor.biases.size() != groups * row_words * 4 ||
      (!tensor.group_index.empty() && tensor.group_index.size() != columns * 4))
    return wrong_size(tensor);

  out.in_order = true;
  out.group_of.resize(columns);
  for (std::size_t c = 0; c < columns; ++c) {
    const auto in_order = static_cast<std::int32_t>(c / group);
    const std::int32_t g = tensor.group_index.empty()
                               ? in_order
                               : load<std::int32_t>(tensor.group_index.data() + 4 * c);
    if (g < 0 || static_cast<std::size_t>(g) >= groups) {
      return invalid(of_tensor(tensor) + "g_idx has " + std::to_string(g) + " for column " +
                     std::to_string(c) + ", expected one of its " + std::to_string(groups) +
                     " groups");
    }
    out.in_order &= g == in_order;
    out.group_of[c] = g;
  }

  const auto n = static_cast<std::size_t>(count), from = static_cast<std::size_t>(first);
  out.scales.resize(n * groups);
  out.zeros.resize(n * groups);
  std::vector<float> row(rows == 0 ? 0 : n);
  for (std::size_t g = 0; g < groups; ++g) {
    BITTERN_TRY(widen(tensor.storage.dtype,
                      tensor.scales.subspan((g * rows + from) * param_bytes, n * param_bytes),
                      row));
    const std::byte* zeros = tensor.biases.data() + g * row_words * 4;
    for (std::size_t r = 0; r < n; ++r) {
      out.scales[r * groups + g] = row[r];
      unsigned zero = awq ? awq_code(zeros, from + r) : stream_code(zeros, 1, from + r, bits);
      // A zero point is a code, so that 0 less one is the highest.
      if (tensor.layout == Layout::gptq) zero = (zero + 1) & ((1u << bits) - 1);
      out.zeros[r * groups + g] = static_cast<std::uint8_t>(zero);
    }
  }

  // Some columns at a time, so that what is read and what is written both stay in the cache.
  constexpr std::size_t kTile = 32;
  out.codes.resize(n * columns);
  for (std::size_t begin = 0; begin < columns; begin += kTile) {
    const std::size_t end = std::min(columns, begin + kTile);
    for (std::size_t r = 0; r < n; ++r) {
      std::uint8_t* codes = out.codes.data() + r * columns;
      const std::byte* column = tensor.data.data() + (from + r) * 4;
      for (std::size_t c = begin; c < end; ++c) {
        codes[c] = awq ? awq_code(tensor.data.data() + c * row_words * 4, from + r)
                       : stream_code(column, rows, c, bits);
      }
    }
  }
  return {};
}

}  // namespace

Status unpack_zero_points(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                          ZeroPointRows& out) {
  return tensor.layout == Layout::rows ? unpack_rows(tensor, first, count, out)
                                       : unpack_columns(tensor, first, count, out);
}

std::vector<std::byte> pack_zero_points(std::span<const std::uint8_t> zeros, std::size_t groups,
                                        int bits) {
  const std::size_t count = groups == 0 ? 0 : zeros.size() / groups;
  const auto width = static_cast<std::size_t>(bits);
  std::vector<std::uint32_t> words((count * width + 31) / 32 * groups);
  for (std::size_t i = 0; i < zeros.size(); ++i) {
    const std::size_t bit = i / groups * width, at = bit / 32 * groups + i % groups;
    const std::uint64_t pair = std::uint64_t{zeros[i]} << bit % 32;
    words[at] |= static_cast<std::uint32_t>(pair);
    if (pair >> 32 != 0) words[at + groups] |= static_cast<std::uint32_t>(pair >> 32);
  }
  const auto bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

}  // namespace bittern
