// A model on disk, whatever its form: a GGUF file, a Hugging Face or MLX folder, or one safetensors
// file. Its tensors are numbers with names; each says how it is stored (storage.h).
//
// Nothing is read before it is asked for; tensors are views into mapped files.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/gguf.h"
#include "formats/json_tree.h"
#include "formats/safetensors.h"
#include "formats/storage.h"

namespace bittern {

inline constexpr std::size_t kCheckpointMostTensors = std::size_t{1} << 18;

struct CheckpointTensor {
  // The order of affine codes, scales and biases: MLX's rows; or AWQ's and GPTQ's columns, where
  // scales and packed zero points are [columns / group, rows]. gptq stores zero points minus one.
  enum class Layout : std::uint8_t { rows, awq, gptq, gptq_v2 };

  std::string name;  // with its suffix: "model.layers.0.mlp.up_proj.weight"
  Shape shape;       // of the numbers, row major, a vector is one row
  Storage storage;
  Layout layout = Layout::rows;
  // biases: zero points for awq, gptq and Zeros::packed; of the last, none if all are 2^(bits - 1)
  std::span<const std::byte> data, scales, biases;
  std::span<const std::byte> group_index;  // gptq: the group of each column, or empty

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
  // Other scales, biases and, unless empty, codes of a tensor, as many bytes; they outlive this.
  void replace_grid(std::string_view name, std::span<const std::byte> codes,
                    std::span<const std::byte> scales, std::span<const std::byte> biases);

  const GgufFile* gguf() const { return gguf_ ? &*gguf_ : nullptr; }
  // config.json of a folder; null where there is none.
  const OrderedJson& config() const { return config_; }
  // Files of a folder that are copied unchanged: tokenizer.json, chat_template.jinja, ...
  const std::vector<std::string>& other_files() const { return other_files_; }
  // Why other such files are not copied: links out of the folder (formats/side_file.h).
  const std::vector<std::string>& left_out() const { return left_out_; }
  // Weights of a folder that its index does not list, so they are not part of the model.
  const std::vector<std::string>& not_read() const { return not_read_; }
  // Paths of all files that are read; for a folder also the folder itself.
  std::vector<std::string> files() const;
  // An error if a file changed since the model was opened: it shrank, grew, was written to,
  // replaced or removed. What was read before may come from either state. The error names the file.
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
  Status take_tensors(const SafetensorsFile& file);
  Status take_tensors(const SafetensorsFolder& folder);
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

}  // namespace bittern
