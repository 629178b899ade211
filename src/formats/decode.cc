#include "formats/decode.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "bittern/ops/gguf_dequantize.h"
#include "bittern/ops/qdq_affine_forward.h"
#include "core/guarded.h"
#include "formats/grid.h"
#include "formats/json_events.h"
#include "formats/stored_rows.h"

namespace bittern {
namespace {

// Numbers decoded at once where they need scratch.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;

std::string unsupported_type(const CheckpointTensor& tensor) {
  const std::string quoted = in_quotes(tensor.name);
  return "unsupported type " + tensor.storage.str() + " in tensor " +
         quoted.substr(1, quoted.size() - 2);
}

template <class X>
Status decode_affine(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                     float* out) {
  const AffineDesc desc{.outer_size = count,
                        .axis_size = tensor.columns(),
                        .group_size = tensor.storage.group,
                        .bits = tensor.storage.bits,
                        .element = dtype_of<X>(),
                        .storage = CodeStorage::packed,
                        .rounding = AffineRounding::mlx};
  const auto row_words = static_cast<std::size_t>(desc.code_shape()[1]);
  const auto row_groups = static_cast<std::size_t>(desc.num_groups());
  const AlignedRows<std::uint32_t> words(rows_of(tensor.data, 4 * row_words, first, count));
  const AlignedRows<X> scales(rows_of(tensor.scales, sizeof(X) * row_groups, first, count));
  const AlignedRows<X> biases(rows_of(tensor.biases, sizeof(X) * row_groups, first, count));
  const auto plan = Plan<QdqAffineForward>::select(desc);
  if (!plan) return plan.status();
  const auto run = [&](X* y) {
    return plan->run({view(words.data(), desc.code_shape()),
                      view(scales.data(), desc.param_shape()),
                      view(biases.data(), desc.param_shape()), view(y, desc.tensor_shape())});
  };
  if constexpr (std::is_same_v<X, float>) {
    return run(out);
  } else {
    const auto elements = static_cast<std::size_t>(count * tensor.columns());
    std::vector<X> y(elements);
    BITTERN_TRY(run(y.data()));
    return widen(tensor.storage.dtype, std::as_bytes(std::span(y)), {out, elements});
  }
}

Status decode_zero_points(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                          float* out) {
  ZeroPointRows rows;
  BITTERN_TRY(unpack_zero_points(tensor, first, count, rows));
  const auto columns = static_cast<std::size_t>(tensor.columns());
  const std::size_t groups = columns / static_cast<std::size_t>(tensor.storage.group);
  for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
    for (std::size_t c = 0; c < columns; ++c) {
      const std::size_t g = r * groups + static_cast<std::size_t>(rows.group_of[c]);
      const int difference = rows.codes[r * columns + c] - rows.zeros[g];
      out[r * columns + c] = static_cast<float>(difference) * rows.scales[g];
    }
  }
  if (tensor.storage.zeros != Storage::Zeros::packed) return {};
  const std::span<float> all(out, static_cast<std::size_t>(count) * columns);
  const DType dtype = to_dtype(tensor.storage.dtype).value_or(DType::f32);
  for (float& x : all) x = round_param(x, dtype);
  return {};
}

Status decode_blocks(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                     float* out) {
  const auto type = block_type(tensor.storage.type);
  if (!type) {
    return unsupported(unsupported_type(tensor));
  }
  const GgufDesc desc{.outer_size = count, .axis_size = tensor.columns(), .type = *type};
  const auto blocks =
      rows_of(tensor.data, static_cast<std::size_t>(desc.row_bytes()), first, count);
  const auto plan = Plan<GgufDequantize>::select(desc);
  if (!plan) return plan.status();
  return plan->run({view(reinterpret_cast<const std::uint8_t*>(blocks.data()), desc.block_shape()),
                    view(out, desc.tensor_shape())});
}

Status decode(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count, float* out) {
  const Storage& storage = tensor.storage;
  if (storage.kind == Storage::Kind::blocks) return decode_blocks(tensor, first, count, out);
  if (storage.kind == Storage::Kind::plain) {
    const std::int64_t columns = tensor.columns();
    const auto row_bytes = static_cast<std::size_t>(columns * bits_of(storage.dtype) / 8);
    Status status = widen(storage.dtype, rows_of(tensor.data, row_bytes, first, count),
                          {out, static_cast<std::size_t>(count * columns)});
    if (status.ok()) return status;
    return {
        status.code(),
        unsupported_type(tensor) + ", expected F64, F32, F16 or BF16" +
            (storage.dtype == SafeDType::u32 ? " (or config.json to say how it is packed)" : "")};
  }
  const std::int64_t at_once =
      std::max<std::int64_t>(1, kPieceElements / std::max<std::int64_t>(1, tensor.columns()));
  for (std::int64_t row = 0; row < count; row += at_once) {
    const std::int64_t n = std::min(at_once, count - row);
    float* to = out + row * tensor.columns();
    if (has_zero_points(tensor)) {
      BITTERN_TRY(decode_zero_points(tensor, first + row, n, to));
    } else if (storage.dtype == SafeDType::f32) {
      BITTERN_TRY(decode_affine<float>(tensor, first + row, n, to));
    } else if (storage.dtype == SafeDType::f16) {
      BITTERN_TRY(decode_affine<f16>(tensor, first + row, n, to));
    } else {
      BITTERN_TRY(decode_affine<bf16>(tensor, first + row, n, to));
    }
  }
  return {};
}

}  // namespace

std::optional<BlockType> block_type(GgmlType type) {
  const GgmlTypeInfo* known = ggml_type(static_cast<std::uint32_t>(type));
  if (known == nullptr) return std::nullopt;
  for (std::size_t i = 0; i < std::size(kBlockTypeNames); ++i)
    if (kBlockTypeNames[i] == known->name) return static_cast<BlockType>(i);
  return std::nullopt;
}

Status decode_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   std::span<float> out) {
  BITTERN_TRY(check_rows(tensor, first, count));
  if (out.size() != static_cast<std::size_t>(count * tensor.columns())) {
    return invalid(of_tensor(tensor) + "room for " + std::to_string(out.size()) +
                   " numbers, expected for " + std::to_string(count * tensor.columns()));
  }
  if (out.empty()) return {};
  try {
    return decode(tensor, first, count, out.data());
  } catch (...) {
    return caught(tensor.name);
  }
}

}  // namespace bittern
