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
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/gguf_desc.h"
#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/gguf.h"
#include "formats/json_tree.h"
#include "formats/safetensors.h"

namespace bittern {

inline constexpr std::size_t kCheckpointMostTensors = std::size_t{1} << 18;

// How a tensor's numbers are, or are to be, stored.
struct Storage {
  enum class Kind : std::uint8_t { plain, blocks, affine };
  Kind kind = Kind::plain;
  SafeDType dtype = SafeDType::f32;  // plain; of scales and biases where affine
  GgmlType type = GgmlType::f32;     // blocks: never a type that is plain numbers
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

// GGUF's type as a storage, and back where it has one.
Storage storage_of(GgmlType type);
std::optional<GgmlType> ggml_type_of(const Storage& storage);

struct CheckpointTensor {
  // How codes, scales and biases lie when affine: MLX's rows; or AWQ's and GPTQ's columns, where
  // scales and packed zero points are [columns / group, rows]. gptq stores zero points less one.
  enum class Layout : std::uint8_t { rows, awq, gptq, gptq_v2 };

  std::string name;  // with its suffix: "model.layers.0.mlp.up_proj.weight"
  Shape shape;       // of the numbers, row major, a vector is one row
  Storage storage;
  Layout layout = Layout::rows;
  std::span<const std::byte> data, scales, biases;  // biases: zero points for awq and gptq
  std::span<const std::byte> group_index;           // gptq: the group of each column, or empty

  std::int64_t columns() const { return shape.rank == 0 ? 1 : shape[shape.rank - 1]; }
  std::int64_t rows() const { return columns() == 0 ? 0 : shape.numel() / columns(); }
  std::uint64_t bytes() const {
    return data.size() + scales.size() + biases.size() + group_index.size();
  }
};

class Checkpoint {
 public:
  // A folder is mlx when its config.json or its files' metadata say so.
  enum class Kind { gguf, hf, mlx, safetensors };

  // A GGUF file (any part of a split one), a safetensors file, a folder with model.safetensors or
  // its index, or a folder of the Hugging Face cache (models--org--name), whose main snapshot it
  // is. A config.json beside a safetensors file says how its tensors are packed.
  static Result<Checkpoint> open(const std::string& path);

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }  // as given, or the snapshot
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }  // in the files' order
  const CheckpointTensor* find(std::string_view name) const;

  const GgufFile* gguf() const { return gguf_ ? &*gguf_ : nullptr; }
  // config.json of a folder; null where there is none.
  const OrderedJson& config() const { return config_; }
  // Files of a folder that go through untouched: tokenizer.json, chat_template.jinja, ...
  const std::vector<std::string>& other_files() const { return other_files_; }
  // Why others of them do not: links out of the folder (formats/side_file.h).
  const std::vector<std::string>& left_out() const { return left_out_; }
  // Weights of a folder that its index does not list, and which are therefore not of the model.
  const std::vector<std::string>& not_read() const { return not_read_; }
  // Paths of all files that are read, of a folder also the folder itself.
  std::vector<std::string> files() const;
  // An error that names a file which is not what it was when the model was opened: it shrank, grew,
  // was written to, replaced or removed. What was read before may be of either state.
  Status unchanged() const;
  // Changes when a file of the model does: sizes, times and headers, not every byte.
  std::uint64_t fingerprint() const { return fingerprint_; }
  // Changes also when a file of weights is written to and given its old time again, or is copied.
  std::uint64_t stamp() const;

 private:
  Checkpoint() = default;
  Status open_gguf();
  Status open_file();
  Status open_folder();
  Status read_config(const std::string& folder);
  template <class Source>
  Status take_tensors(const Source& source, bool whole);
  Status list_other_files();
  void list_not_read();
  Status index_tensors();
  Status take_fingerprint();

  Kind kind_ = Kind::gguf;
  std::string given_, path_, config_path_;
  std::optional<GgufFile> gguf_;
  std::optional<SafetensorsFolder> folder_;
  std::optional<SafetensorsFile> file_;
  OrderedJson config_;
  std::vector<std::string> other_files_, left_out_, not_read_;
  std::vector<std::pair<std::string, FileStamp>> stamps_;  // of files that are not mapped
  std::vector<CheckpointTensor> tensors_;
  std::vector<std::uint32_t> by_name_;
  std::uint64_t fingerprint_ = 0;
};

// ---- numbers out ----

// The block format of gguf_dequantize and gguf_quantize, where they have it.
std::optional<BlockType> block_type(GgmlType type);

// Rows [first, first + count) as f32 [count, columns]: of a GGUF block as the `gguf` package
// computes it, of MLX's groups as mx.dequantize does on the CPU (rounded to the dtype of the
// scales), of AWQ's and GPTQ's (code - zero) * scale in f32. Unsupported types name the tensor.
Status decode_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   std::span<float> out);

// ---- exact transcoding: codes stay what they are ----

// Rows as codes on a grid, w = code * scale + bias.
struct GridRows {
  int bits = 0, group = 0;
  std::int64_t first = 0;             // the number of the first row, for messages
  std::vector<std::uint8_t> codes;    // [count, columns], one a byte
  std::vector<float> scales, biases;  // [count, columns / group]
};

// The grid such a storage has, with codes of `bits` in groups of `group`; nothing for plain
// numbers and for blocks with groups of 16 (Q2_K, Q3_K, Q6_K), which no affine storage has. The
// values of a table (IQ4_NL, IQ4_XS, MXFP4) are integers: they are codes of 8 or 5 bits.
struct Grid {
  int bits, group;
};
std::optional<Grid> grid_of(const Storage& storage);

// Refuses scales and biases that are not finite or, made from zero points, not exact in f32, and
// columns of a group that lie apart (GPTQ's act-order).
Status decode_grid(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   GridRows& out);

// The same grid in another storage, exactly, or why not: a scale that f16 does not hold, a bias
// that is no multiple, scales that no super-block yields, codes too wide, groups that do not fit.
// out.data, scales and biases have the bytes of those rows; blocks are all data.
struct EncodedRows {
  std::vector<std::byte> data, scales, biases;
};
Status encode_grid(const GridRows& grid, std::int64_t columns, const Storage& storage,
                   EncodedRows& out);

// Rounds scales and biases to F16 or BF16: the largest change relative to what it changes, which is
// infinite when something overflows. (F32 changes nothing.)
double round_params(GridRows& grid, SafeDType dtype);

}  // namespace bittern
