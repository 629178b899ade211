// Model files: quantise one or convert it to another format, say what it holds, compare two.
// docs/quantize.md and docs/inspect.md explain every option; the command `bittern` is written on
// these calls. Link bittern::convert.
//
//   auto report = quantize_model("model", "model-4bit", {.bits = 4});
//   if (!report) return report.status();   // "bits: 7, expected 2, 3, 4, 5, 6 or 8"
//   report->bits_per_weight;
//
// A model is a .gguf file (any part of a split one), a .safetensors file, or a folder of Hugging
// Face or MLX. Files are mapped and streamed: memory does not grow with the model. Results are the
// same bytes for any number of threads.
//
// Errors name the fields they are about. Codes: invalid_argument (an option, or a file that is
// malformed), unsupported, unavailable (a file that is not there, an output in use), io_error (a
// disk that is full), cancelled.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/ranks.h"
#include "bittern/status.h"

namespace bittern {

// ---- progress and cancellation ----

struct ModelProgress {
  // "planning", "measuring", "checking" (what an earlier run wrote), "calibrating", "writing" or
  // "comparing"
  std::string_view doing{};
  std::string_view tensor{};  // the one at hand
  // Weights, or bytes that are checked. It never falls while `doing` is the same, and ends at
  // `total`.
  std::uint64_t done = 0;
  std::uint64_t total = 0;
  double source_bpw = 0;  // bits per weight of the source: done * source_bpw / 8 bytes are read
};

// Returns whether to go on: false ends the call with Code::cancelled. It is called on the thread
// that made the call, never by two threads at once. If it throws, the call is cancelled, too.
using ModelProgressFunction = std::function<bool(const ModelProgress&)>;

// ---- quantize_model ----

// What becomes of the tensors whose name matches: `keep`, `bits` with or without a group, or
// `type`.
struct QuantizeRule {
  std::string match;  // a regular expression of RE2, found anywhere in the name
  bool keep = false;  // leave the tensor as it is stored
  std::optional<int> bits{}, group_size{};
  std::optional<std::string> type{};  // of GGUF
};

struct QuantizeReport;

// The words of `bittern quantize`. An option that could have no effect beside the others is an
// error; so is one that is out of range. At least one of bits, type, target_bpw, transcode,
// dequantize, dtype, quantize and policy says what to do.
struct QuantizeOptions {
  std::optional<int> bits{};        // per weight: 2, 3, 4, 5, 6 or 8
  std::optional<int> group_size{};  // weights that share a scale: 32, 64 (default) or 128
  // "minmax", "mlx" or "lsq" (default; in GGUF the type's own). "gptq" runs the model on a text:
  // quantize_calibrated of bittern/distill.h takes it, quantize_model does not.
  std::optional<std::string> method{};
  std::optional<std::string> data{};      // path of that text
  std::optional<std::int64_t> pieces{};   // of it that are read, at most; default 128
  std::optional<std::int64_t> context{};  // tokens of a piece; default 512
  bool fisher = false;                    // its tokens count by what their errors cost
  // "mlx", "gguf", "safetensors" or "compressed-tensors"; default: by `out`
  std::optional<std::string> format{};
  // "real" (default): any bias. "integer": w = scale * (code - zero point) with the zero point a
  // code itself; always so in compressed-tensors.
  std::optional<std::string> zero_points{};
  std::optional<std::string> type{};  // of a GGUF file, with llama-quantize's mix: "Q4_K_M"
  std::optional<std::string> output_tensor_type{}, token_embedding_type{};  // GGUF types
  bool leave_output_tensor = false;
  std::optional<double> target_bpw{};    // most bits per weight of the whole model, 1 to 32
  std::vector<QuantizeRule> rules{};     // the first that matches decides
  std::optional<std::string> policy{};   // path of a JSON file with bits, group_size, type, rules
  std::optional<std::string> imatrix{};  // path of an importance matrix of llama.cpp
  bool transcode = false;                // keep every number exactly
  bool lossy = false;                    // clamp, or quantise again, what cannot be exact
  std::optional<std::string> dequantize{};   // plain numbers: "f32", "f16" or "bf16"
  std::optional<std::string> dtype{};        // of what is not quantised
  std::optional<std::string> scale_dtype{};  // of scales and biases in a folder
  bool pure = false;                         // one type for every matrix
  bool allow_requantize = false;             // accept a model that is quantised already
  bool quantize = false;                     // 4 bits, unless another option or the policy says how
  std::optional<std::string> split_max_size{};       // GGUF in parts of at most "500M" or "2G"
  std::optional<std::uint64_t> split_max_tensors{};  // or of this many tensors

  bool force = false;            // replace an output that bittern wrote
  bool resume = false;           // continue a run that was stopped or cancelled
  bool dry_run = false;          // write nothing; `out` may be empty
  std::optional<int> threads{};  // default: num_threads()
  Ranks* ranks = nullptr;        // processes that share the rows of tensors

  ModelProgressFunction progress{};
  // Called once when all is decided and nothing is written yet, with what dry_run would return.
  // Returns whether to go on.
  std::function<bool(const QuantizeReport&)> planned{};
  // Paths of files that the caller will write, such as a report of its own. One that is an input,
  // the output, or inside of either is refused.
  std::vector<std::string> also_written{};
  // How messages and notes name an option, given its field; default: by the field's name.
  std::function<std::string(std::string_view field)> option_name{};
};

struct QuantizedTensor {
  std::string name;  // in the output
  std::vector<std::int64_t> shape;
  std::vector<std::string> sources;  // the tensors it is made from
  std::string from, to;              // storages: "BF16", "Q4_K", "4 bit, group 64, BF16"
  std::string way;                   // "copied", "cast", "quantised" or "transcoded"
  std::uint64_t bytes = 0;
  std::string note;  // why it is not what was asked for; often empty
};

struct QuantizeReport {
  std::string model, output, format;
  std::vector<std::string> outputs{};  // `output`, or the parts of a split GGUF file
  bool dry_run = false;
  std::uint64_t weights = 0;
  std::uint64_t bytes = 0;     // of all files
  double bits_per_weight = 0;  // of the tensors
  // In all, and of these: reading and encoding, writing (means of the threads), syncing.
  double seconds = 0, seconds_making = 0, seconds_writing = 0, seconds_syncing = 0;
  std::size_t resumed = 0;  // tensors that an earlier run had written
  // The largest relative change of a scale or bias that transcode rounded to scale_dtype; none
  // where nothing was to be rounded.
  std::optional<double> scale_change{};
  std::uint64_t saturated = 0;       // numbers that `lossy` clamped
  std::vector<std::string> notes{};  // about the model as a whole
  std::vector<QuantizedTensor> tensors{};
};

// Writes `out`, a folder or a .gguf file. It grows as out.partial and appears by rename. If the run
// is cancelled or the disk fills up, out.partial is kept for `resume`; after any other error it is
// deleted. The source must not change meanwhile: that is an error that names the file.
Result<QuantizeReport> quantize_model(const std::string& source, const std::string& out,
                                      const QuantizeOptions& options = {}) noexcept;

// ---- inspect_model ----

struct TensorDescription {
  std::string name;
  std::vector<std::uint64_t> shape;  // row major
  std::string storage;               // "BF16", "Q4_K", "4 bit, group 64, BF16"
  std::uint64_t parameters = 0, bytes = 0;
  bool decodable = true;  // whether bittern can turn it into numbers
  std::optional<double> bits_per_weight() const noexcept;
};

struct StorageTotal {
  std::string storage;
  std::uint64_t tensors = 0, parameters = 0, bytes = 0;
};

// What is not known has no value.
struct ModelDescription {
  std::string path;  // as given, or the snapshot of a folder of the Hugging Face cache
  std::string kind;  // "gguf", "huggingface", "mlx" or "safetensors"
  std::string form;  // the same in words: "GGUF file, version 3"
  std::vector<std::string> files;  // those that were read
  std::optional<std::string> architecture{}, model_class{}, name{};
  std::optional<std::uint64_t> layers{}, hidden_size{}, heads{}, key_value_heads{}, experts{},
      vocabulary{}, context{};
  std::optional<std::string> quantization{};       // "4 bit, group 64"
  std::optional<std::string> quantization_json{};  // as config.json has it
  std::vector<TensorDescription> tensors;          // in the files' order
  std::vector<StorageTotal> storages;              // of the tensors, the largest first
  std::vector<std::string> notes;

  std::uint64_t parameters() const noexcept;
  std::uint64_t bytes() const noexcept;  // of the tensors
  std::optional<double> bits_per_weight() const noexcept;
};

// Reads headers alone, so it takes a moment whatever the model's size.
Result<ModelDescription> inspect_model(const std::string& path) noexcept;

// ---- compare_models ----

// Of tensors a and b, as f32; sums are f64. Numbers that are infinite or NaN are left out of them.
struct TensorDifference {
  std::string name;  // in the model
  std::vector<std::int64_t> shape;
  std::string storage, other_storage;
  std::uint64_t different = 0;   // numbers that are not equal; two NaN are
  std::uint64_t not_finite = 0;  // those of them where one is infinite or NaN
  std::uint64_t not_finite_in_model = 0, not_finite_in_other = 0;  // equal or not
  double squared_error = 0, squared_norm = 0;                      // ||a - b||^2, ||a||^2
  double max_abs_error = 0;

  double relative_error()
      const noexcept;  // ||a - b|| / ||a||; infinite when a is zero and b is not
};

// Of a group of kComparedGroup columns: rms(a - b in the group) / rms(a in the whole tensor).
struct GroupDifference {
  std::size_t tensor = 0;  // of ModelComparison::tensors
  std::int64_t row = 0, column = 0;
  double error = 0;
};
inline constexpr std::int64_t kComparedGroup = 32;

struct ModelComparison {
  struct Shapes {
    std::string name;
    std::vector<std::int64_t> shape, other_shape;
  };
  struct Skipped {
    std::string name, reason;
  };
  ModelDescription model, other;
  std::vector<TensorDifference> tensors;      // in the model's order
  std::vector<GroupDifference> worst_groups;  // the worst first; none without an error
  std::vector<std::string> only_in_model, only_in_other;
  std::vector<Shapes> shapes_differ;
  std::vector<Skipped> not_compared;    // what cannot be decoded or put together
  std::vector<std::size_t> not_finite;  // of `tensors`: those with an infinity or NaN in either

  // Of all tensors compared as one vector.
  double relative_error() const noexcept;
  double max_abs_error() const noexcept;
  std::size_t equal() const noexcept;  // tensors that have the same numbers throughout
};

struct CompareOptions {
  std::size_t worst_groups = 10;  // how many to list
  std::optional<int> threads{};   // default: num_threads()
  ModelProgressFunction progress{};
  // As in QuantizeOptions.
  std::vector<std::string> also_written{};
  std::function<std::string(std::string_view field)> option_name{};
};

// How far `other` is from `model`, tensor by tensor. Both may be of different kinds: names and row
// orders are then those of `model` (docs/inspect.md).
Result<ModelComparison> compare_models(const std::string& model, const std::string& other,
                                       const CompareOptions& options = {}) noexcept;

// ---- files that shrink ----

// If another process shrinks a file that is being read, reading it raises SIGBUS, which ends the
// process. After this call it is an error of the call instead. It installs a handler of SIGBUS for
// the whole process, so it is for a program to decide: the functions above do not call it. Faults
// elsewhere go to the handler that was there before.
void guard_mapped_files() noexcept;

}  // namespace bittern
