// Inside Conversion::plan: from the options to what every tensor and file becomes.
// conversion.cc walks the steps; policy.cc, decide.cc, measure.cc and lay_out.cc hold one each.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "convert/architecture.h"
#include "convert/conversion.h"
#include "convert/encode.h"
#include "convert/mix.h"
#include "convert/row_reader.h"
#include "formats/checkpoint.h"

namespace re2 {
class RE2;
}

namespace bittern {

inline constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
inline constexpr int kGroups[] = {32, 64, 128};

struct WrittenType {
  GgmlType type;
  std::uint32_t file_type;  // general.file_type of a file whose matrices are of it
};
// What can be written, least bits first, and what llama.cpp calls such a file.
inline constexpr WrittenType kWritten[] = {
    {GgmlType::q2_k, 10}, {GgmlType::q3_k, 11}, {GgmlType::q4_0, 2},  {GgmlType::q4_k, 14},
    {GgmlType::q4_1, 3},  {GgmlType::q5_0, 8},  {GgmlType::q5_k, 16}, {GgmlType::q5_1, 9},
    {GgmlType::q6_k, 18}, {GgmlType::q8_0, 7},  {GgmlType::f16, 1},   {GgmlType::bf16, 32},
    {GgmlType::f32, 0}};
bool is_written(GgmlType type);
std::string written_names();
std::string mix_names();  // of those whose type is written
Status check_bits(int bits, const std::string& where);

// Why a tensor of this name is not quantised by default, or null.
const char* delicate(std::string_view name);
bool is_matrix(const Recipe& recipe);
// Whether MLX's quantisation in config.json has a key of its own under the name of this tensor's
// module: "bits", "group_size" or "mode".
bool hides_a_key(std::string_view name);
std::string module_of(std::string_view name);  // X of X.weight
// A rule's pattern as notes and errors show it: cut where it is long.
std::string pattern_text(const TensorRule& rule);
const std::string& source_of(const Recipe& recipe);

class ConversionPlanner {
 public:
  ConversionPlanner(const Checkpoint& source, const ConversionOptions& options,
                    const std::string& out, const ModelProgressFunction& progress)
      : source_(source), options_(options), out_(out), progress_(progress) {}

  Result<Conversion> make();

 private:
  using Json = nlohmann::ordered_json;

  Status refuse(const std::string& what) const { return invalid(source_.path() + ": " + what); }
  // Adds the file's name to an error of code that only knows names and configs.
  Status of_source(const Status& status) const {
    const std::string message(status.message());
    if (message.starts_with(source_.path())) return status;
    return {status.code(), source_.path() + ": " + message};
  }
  void note(std::string text) { conversion_.notes_.push_back(std::move(text)); }

  Status check_options();  // options.cc

  // Where names and importance come from.
  Status make_recipes();
  SafeDType folder_dtype() const;
  Status read_importance();
  std::uint64_t fingerprint() const;

  // policy.cc
  Status check_group(int group, const std::string& where) const;
  Status compile_rules();
  bool matches(std::size_t rule, const Recipe& recipe) const;
  const TensorRule* rule_for(const Recipe& recipe) const;

  // decide.cc
  static GgmlType type_of_bits(int bits);
  static GgmlType fitting(GgmlType type, std::int64_t columns);
  Result<bool> fits_f16(const RowReader& reader) const;
  Result<GgmlType> type_that_fits(const RowReader& reader, GgmlType type) const;
  std::optional<std::string> why_kept(const Recipe& recipe) const;
  const char* not_compressed(const Recipe& recipe) const;
  GgmlType type_for(const OutputTensor& tensor, const TensorRule* rule) const;
  Status decide(OutputTensor& tensor);
  Storage kept(const OutputTensor& tensor) const;
  // Affine groups as the format and @{zero_points} have them.
  Storage affine(int bits, int group, SafeDType params) const;
  SafeDType scale_dtype(const Storage& from) const;
  bool casts_only() const;  // --dtype alone: nothing is quantised
  Status decide_transcode(OutputTensor& tensor, const RowReader& reader);
  Status decide_compressed(OutputTensor& tensor, const RowReader& reader,
                           const std::optional<Grid>& grid);
  Status keep_plain(OutputTensor& tensor, const RowReader& reader, const std::string& why);
  static Status try_transcode(const RowReader& reader, const Storage& to);
  static Status note_beyond_f32(OutputTensor& tensor, const RowReader& reader);
  Status settle(OutputTensor& tensor);

  // choose.cc
  Result<MixModel> mix_model() const;
  std::vector<GgmlType> types_of(const Mix& mix, const MixModel& model) const;
  Status try_rows();
  bool mixes_types() const;
  const char* in_vain(const TensorRule& rule, const Recipe& recipe) const;
  void note_unused();
  void note_importance();
  bool is_output(const Recipe& recipe) const;
  bool is_of_experts(const Recipe& recipe) const;
  bool is_embedding(const Recipe& recipe) const;
  std::optional<GgmlType> fixed_type(const Recipe& recipe) const;

  // measure.cc
  Result<std::vector<Storage>> uniform_choices(const OutputTensor& tensor, const RowReader& reader,
                                               std::span<const GgmlType> types) const;
  Result<std::vector<std::vector<GgmlType>>> uniform_types() const;
  const std::vector<float>* importance_of(const OutputTensor& tensor) const;
  RowEncoder encoder_of(const Storage& storage) const;
  bool any_group(const TensorRule* rule) const;
  Status meet_target();

  // lay_out.cc
  Status lay_out_gguf();
  std::string part_stem() const;
  std::string part_name(std::size_t part, std::size_t parts) const;
  void note_other_parts(std::size_t parts);
  std::vector<std::size_t> part_ends();
  std::string model_name() const;
  std::uint32_t file_type() const;
  Status lay_out_folder();
  Status check_packed() const;
  Status write_quantization(Json& config) const;
  void write_compression(Json& config) const;

  const Checkpoint& source_;
  ConversionOptions options_;
  std::string out_;
  const ModelProgressFunction& progress_;
  Conversion conversion_;
  std::vector<std::shared_ptr<const re2::RE2>> patterns_;  // of the rules
  std::vector<NamedShape> shapes_;                         // of the source
  World from_ = World::hf;
  Json config_, written_config_;           // of the source, of the output
  std::vector<OutputTensor*> adjustable_;  // those whose storage --target-bpw chooses
  bool free_groups_ = false;               // --target-bpw chooses groups, too: none was asked for
  std::vector<GgmlType> mixed_;            // of the tensors, by the mix; empty without one
  bool tied_ = false;                      // there is no head but the embedding
  bool importance_used_ = false;
};

}  // namespace bittern
