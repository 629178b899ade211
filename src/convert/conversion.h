// From a model on disk to another: first a plan, which says what becomes of every tensor and fails
// where it must; then the run, which streams rows from mapped files through the ops into the
// output. Messages and notes name options by marks (convert/option_names.h). bittern/convert.h is
// what users call.
//
// A tensor goes one of four ways:
//   copy       its rows move as they are stored
//   cast       plain numbers of another dtype
//   quantize   numbers to codes, by the method asked for
//   transcode  codes to the same codes in another storage: every number keeps its bits
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bittern/affine_desc.h"
#include "bittern/convert.h"
#include "bittern/status.h"
#include "convert/recipe.h"
#include "formats/checkpoint.h"

namespace bittern {

struct Mix;
class MatrixCoder;

enum class ModelFormat { mlx, gguf, safetensors, compressed_tensors };
const char* name(ModelFormat format);

// A rule of a policy: what the tensors whose name matches the pattern become.
struct TensorRule {
  std::string pattern;      // a regular expression, found anywhere in the name
  bool keep = false;        // as it is stored
  int bits = 0, group = 0;  // 0: what the model gets
  std::optional<GgmlType> type{};
};

struct ConversionOptions {
  ModelFormat format = ModelFormat::mlx;
  int bits = 0, group = 0;         // 0: not asked for
  std::optional<GgmlType> type{};  // of a GGUF file: all matrices alike
  const Mix* mix = nullptr;        // or as llama-quantize mixes them (convert/mix.h)
  // Of the head and of the embedding in a GGUF file; they come before rules.
  std::optional<GgmlType> output_type{}, embedding_type{};
  bool leave_output = false;             // do not quantise the head
  std::optional<AffineMethod> method{};  // lsq; for GGUF the type's own
  std::optional<bool> integer_zeros{};   // zero points are integers
  std::vector<TensorRule> rules{};       // the first that matches decides
  double target_bpw = 0;                 // 0: none; bits per weight of the whole model
  bool pure = false;                     // quantise also what is kept by default
  bool allow_requantize = false;
  bool transcode = false;
  bool lossy = false;  // quantise again what cannot be exact, clamp what is too large
  std::optional<SafeDType> dequantize{};   // all plain, of this dtype
  std::optional<SafeDType> scale_dtype{};  // of scales and biases
  // Of plain tensors, and of scales where scale_dtype says nothing. Alone it quantises nothing.
  std::optional<SafeDType> dtype{};
  std::string imatrix{};  // path of an importance matrix
  MatrixCoder* coder =
      nullptr;             // of matrices (convert/matrix_coder.h); the others are fitted by lsq
  Ranks* ranks = nullptr;  // as in QuantizeOptions
  // A GGUF file in parts, each of at most so many bytes of tensors, or so many tensors; 0: one
  // file.
  std::uint64_t split_bytes = 0, split_tensors = 0;
  bool splits() const { return split_bytes > 0 || split_tensors > 0; }
};

// A JSON file: {"bits": 4, "group_size": 64, "rules": [{"match": "lm_head", "bits": 8}, ...]}.
// Sets what the options do not set; its rules come after theirs.
Status read_policy(const std::string& path, ConversionOptions& options) noexcept;

struct OutputTensor {
  enum class Way { copy, cast, quantize, transcode };
  Recipe recipe;
  Storage from{}, to{};
  Storage through{};  // when it is quantised: `to` holds the plain numbers it makes
  Way way = Way::copy;
  bool coded = false;       // by ConversionOptions::coder
  std::string note{};       // why it is not what was asked for; often empty
  std::uint64_t bytes = 0;  // in the output
  // Its first tensor in the layout: codes, then scales, biases or zero points, and beside the
  // latter the shape.
  std::size_t part = 0;
  int parts() const {
    if (to.kind != Storage::Kind::affine) return 1;
    return to.zeros == Storage::Zeros::packed ? 4 : 3;
  }
};

// A file of the output that is text: config.json, the index, what is copied through.
struct OutputText {
  std::string name, text;
};

class Conversion {
 public:
  // `source` outlives the conversion. `out` decides nothing but names, and notes about what is
  // beside it.
  static Result<Conversion> plan(const Checkpoint& source, const ConversionOptions& options,
                                 const std::string& out,
                                 const ModelProgressFunction& progress) noexcept;

  const std::vector<OutputTensor>& tensors() const { return tensors_; }
  const std::vector<std::string>& notes() const { return notes_; }  // about the model as a whole
  std::uint64_t weights() const;                                    // numbers in all tensors
  std::uint64_t bytes() const;                                      // of all files
  double bits_per_weight() const;
  // What run makes: OUT, or its parts.
  std::vector<std::string> outputs(const std::string& out) const;

  struct RunOptions {
    bool force = false, resume = false;
  };
  struct RunReport {
    std::size_t resumed = 0;      // tensors that were whole already
    double scale_change = 0;      // the largest relative change of a scale or bias that was rounded
    std::uint64_t saturated = 0;  // numbers beyond the range of their dtype, clamped by `lossy`
    // Seconds. Making and writing are means over the threads.
    double making = 0, writing = 0, syncing = 0;
  };
  Result<RunReport> run(const std::string& out, const RunOptions& how,
                        const ModelProgressFunction& progress) const noexcept;

 private:
  friend class ConversionPlanner;
  const Checkpoint* source_ = nullptr;
  ConversionOptions options_;
  std::vector<OutputTensor> tensors_;
  std::vector<std::vector<float>> importance_;  // of tensors_: empty, or [matrices, columns]
  std::vector<std::string> notes_;
  OutputLayout layout_;
  std::vector<OutputText> texts_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace bittern
