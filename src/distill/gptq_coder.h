// Codes by what the layers see: convert's MatrixCoder of method gptq (distill/rounding.h).
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "convert/matrix_coder.h"
#include "distill/calibration_text.h"
#include "distill/layer_inputs.h"

namespace bittern {

class GptqCoder : public MatrixCoder {
 public:
  // The model's path, that of the text, and how much of it is read.
  // fisher: tokens count by what their errors cost (distill/token_weights.h).
  // ranks: processes that share pieces, sums and rows; `take` is called in process 0.
  GptqCoder(std::string model, std::string data, std::int64_t pieces, std::int64_t context,
            bool fisher, Ranks* ranks = nullptr)
      : model_(std::move(model)),
        data_(std::move(data)),
        pieces_(pieces),
        context_(context),
        fisher_(fisher),
        ranks_(ranks) {}

  // The same with a text that is read already. preference: that of the model that is run.
  GptqCoder(std::string model, CalibrationText text, bool fisher, Ranks* ranks = nullptr,
            Preference preference = Preference::exact)
      : model_(std::move(model)),
        pieces_(text.pieces()),
        context_(text.context),
        fisher_(fisher),
        ranks_(ranks),
        preference_(preference),
        text_(std::move(text)) {}

  std::string_view method() const override { return "gptq"; }
  Status prepare(const Checkpoint& source) override;
  std::optional<std::string> declines(const OutputTensor& tensor) const override;
  std::uint64_t fingerprint() const override;
  Result<std::vector<std::size_t>> code(const Checkpoint& source, const std::vector<Task>& tasks,
                                        const Sink& take,
                                        const ModelProgressFunction& progress) override;

 private:
  // Rows of a tensor that have the same inputs.
  struct Input {
    InputPlace place;
    std::vector<std::int64_t> columns;  // the input of each column; empty: in their order
    std::int64_t first = 0, rows = 0;
  };
  // All rows at once; those of experts, expert by expert.
  Result<std::vector<Input>> inputs_of(const OutputTensor& tensor) const;

  std::string model_, data_;
  std::int64_t pieces_, context_;
  bool fisher_;
  Ranks* ranks_;
  Preference preference_ = Preference::exact;
  CalibrationText text_;
  std::int64_t layers_ = 0, experts_ = 0;
  std::vector<Recipe> parts_;  // of the decoder
  // Of each tensor of the source: the parts that are made of it.
  std::map<std::string, std::vector<std::size_t>, std::less<>> made_of_;
};

}  // namespace bittern
