// A model on disk, whatever its form: a GGUF file, a folder of Hugging Face or MLX, one safetensors
// file. Its tensors are numbers with names; how they are stored is theirs to tell:
//
//   plain    numbers of one dtype
//   blocks   a block format of ggml: scales and codes in one run of bytes
//   affine   w = scale * code + bias, codes packed apart from scales and biases (MLX, AWQ, GPTQ)
//
// Nothing is read before it is asked for; tensors are views into mapped files.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/gguf.h"
#include "formats/safetensors.h"

namespace bittern {

using OrderedJson = nlohmann::ordered_json;

// How a tensor's numbers are, or are to be, stored.
struct Storage {
  enum class Kind { plain, blocks, affine };
  Kind kind = Kind::plain;
  SafeDType dtype = SafeDType::f32;  // plain; of scales and biases where affine
  GgmlType type = GgmlType::f32;     // blocks: never F32, F16, BF16 or an integer type
  int bits = 0, group = 0;           // affine

  static Storage plain(SafeDType dtype) { return {.kind = Kind::plain, .dtype = dtype}; }
  static Storage blocks(GgmlType type) { return {.kind = Kind::blocks, .type = type}; }
  static Storage affine(int bits, int group, SafeDType params) {
    return {.kind = Kind::affine, .dtype = params, .bits = bits, .group = group};
  }
  bool operator==(const Storage&) const = default;

  bool quantized() const { return kind != Kind::plain; }
  std::string str() const;  // "BF16", "Q4_K", "4 bit, group 64, BF16"
  // All bytes of a tensor of this shape: codes, scales and biases; or why it cannot be.
  Result<std::uint64_t> bytes(const Shape& shape) const;
};

struct CheckpointTensor {
  // How codes, scales and biases lie when affine: MLX's rows; or AWQ's and GPTQ's columns, where
  // scales and packed zero points are [columns / group, rows].
  enum class Layout { rows, awq, gptq };

  std::string name;  // with its suffix: "model.layers.0.mlp.up_proj.weight"
  Shape shape;       // of the numbers, row major, a vector is one row
  Storage storage;
  Layout layout = Layout::rows;
  std::span<const std::byte> data, scales, biases;  // biases: zero points for awq and gptq
  std::span<const std::byte> group_index;           // gptq with act-order, else empty

  std::int64_t columns() const { return shape.rank == 0 ? 1 : shape[shape.rank - 1]; }
  std::int64_t rows() const { return columns() == 0 ? 0 : shape.numel() / columns(); }
  std::uint64_t bytes() const {
    return data.size() + scales.size() + biases.size() + group_index.size();
  }
};

class Checkpoint {
 public:
  enum class Kind { gguf, hf, mlx, safetensors };  // folders: mlx when config.json says so

  static Result<Checkpoint> open(const std::string& path);

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }  // in the files' order
  const CheckpointTensor* find(std::string_view name) const;

  const GgufFile* gguf() const { return gguf_ ? &*gguf_ : nullptr; }
  // config.json of a folder; null where there is none.
  const OrderedJson& config() const { return config_; }
  // Files of a folder that go through untouched: tokenizer.json, chat_template.jinja, ...
  const std::vector<std::string>& other_files() const { return other_files_; }
  // Changes when a file of the model does: sizes, times and headers, not every byte.
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  Checkpoint() = default;

  Kind kind_ = Kind::gguf;
  std::string path_;
  std::optional<GgufFile> gguf_;
  std::optional<SafetensorsFolder> folder_;
  std::optional<SafetensorsFile> file_;
  OrderedJson config_;
  std::vector<std::string> other_files_;
  std::vector<CheckpointTensor> tensors_;
  std::vector<std::uint32_t> by_name_;
  std::uint64_t fingerprint_ = 0;
};

// ---- numbers out ----

// Rows [first, first + count) as f32 [count, columns]. Unsupported types name the tensor.
Status decode_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   std::span<float> out);

// ---- exact transcoding: codes stay what they are ----

// The numbers as codes on a grid, w = fma(code, scale, bias) exactly as the storage's own
// dequantiser rounds it.
struct GridRows {
  int bits = 0, group = 0;
  std::vector<std::uint8_t> codes;    // [count, columns], one a byte
  std::vector<float> scales, biases;  // [count, columns / group]
};

// The grid such a storage has, with codes of `bits` in groups of `group`; nothing for plain
// numbers and for blocks with groups of 16 (Q2_K, Q3_K, Q6_K), which no affine storage has.
struct Grid {
  int bits, group;
};
std::optional<Grid> grid_of(const Storage& storage);
Status decode_grid(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   GridRows& out);

// The same numbers in another storage, bit for bit, or why not: a scale that f16 does not hold, a
// bias that is no multiple, scales that no super-block yields, codes too wide, groups that do not
// fit. `rows` x `columns`; out.data/scales/biases have the bytes `Storage::bytes` splits into.
struct EncodedRows {
  std::vector<std::byte> data, scales, biases;
};
Status encode_grid(const GridRows& grid, std::int64_t columns, const Storage& storage,
                   EncodedRows& out);

}  // namespace bittern
