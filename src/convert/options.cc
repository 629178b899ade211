// Which options go together. Every option is used or refused: an option that would have no effect
// is an error here, before anything is read.
#include <algorithm>
#include <cmath>
#include <utility>

#include "convert/matrix_coder.h"
#include "convert/mix.h"
#include "convert/planner.h"

namespace bittern {
namespace {

using Options = ConversionOptions;

// What is made of the model: one of these.
enum Way : unsigned { kQuantize = 1, kTranscode = 2, kDequantize = 4, kCast = 8 };

const char* option_of(Way way, const Options& o) {
  switch (way) {
    case kTranscode: return "@{transcode}";
    case kDequantize: return "@{dequantize}";
    case kCast: return "@{dtype} alone";
    case kQuantize: break;
  }
  return o.type || o.mix != nullptr ? "@{type}" : o.bits > 0 ? "@{bits}" : "@{target_bpw}";
}

bool has_type(const Options& o) { return o.type || o.mix != nullptr; }
// A number that is not one counts as given, too.
bool has_target(const Options& o) { return o.target_bpw != 0; }

constexpr unsigned kGguf = 1, kFolders = 2, kAny = 3;

struct Row {
  const char* option;
  bool (*given)(const Options&);
  unsigned ways;             // where it has an effect
  unsigned formats;          // and in which formats
  const char* no_gguf = "";  // why GGUF has none
};
constexpr Row kRows[] = {
    {"@{bits}", [](const Options& o) { return o.bits > 0; }, kQuantize, kAny},
    {"@{type}", has_type, kQuantize, kGguf},
    {"@{target_bpw}", has_target, kQuantize, kAny},
    {"@{group_size}", [](const Options& o) { return o.group > 0; }, kQuantize, kAny},
    {"@{method}", [](const Options& o) { return o.method.has_value() || o.coder != nullptr; },
     kQuantize, kAny},
    {"@{rules}", [](const Options& o) { return !o.rules.empty(); }, kQuantize, kAny},
    {"@{imatrix}", [](const Options& o) { return !o.imatrix.empty(); }, kQuantize, kAny},
    {"@{pure}", [](const Options& o) { return o.pure; }, kQuantize, kAny},
    {"@{allow_requantize}", [](const Options& o) { return o.allow_requantize; }, kQuantize, kAny},
    {"@{lossy}", [](const Options& o) { return o.lossy; },
     kQuantize | kTranscode | kDequantize | kCast, kAny},
    {"@{scale_dtype}", [](const Options& o) { return o.scale_dtype.has_value(); },
     kQuantize | kTranscode, kFolders, " (GGUF's scales are f16)"},
    {"@{zero_points}", [](const Options& o) { return o.integer_zeros.has_value(); }, kQuantize,
     kFolders, " (GGUF's types have minima of their own)"},
    {"@{dtype}", [](const Options& o) { return o.dtype.has_value(); }, kQuantize | kCast, kAny},
    {"@{output_tensor_type}", [](const Options& o) { return o.output_type.has_value(); }, kQuantize,
     kGguf},
    {"@{token_embedding_type}", [](const Options& o) { return o.embedding_type.has_value(); },
     kQuantize, kGguf},
    {"@{leave_output_tensor}", [](const Options& o) { return o.leave_output; }, kQuantize, kAny},
    {"@{split_max_size}", [](const Options& o) { return o.split_bytes > 0; }, ~0U, kGguf},
    {"@{split_max_tensors}", [](const Options& o) { return o.split_tensors > 0; }, ~0U, kGguf},
};

// Two that say the same thing differently.
constexpr std::pair<const char*, const char*> kContradict[] = {
    {"@{type}", "@{bits}"},
    {"@{bits}", "@{target_bpw}"},
    {"@{type}", "@{target_bpw}"},
    {"@{type}", "@{group_size}"},
    {"@{leave_output_tensor}", "@{output_tensor_type}"},
    {"@{split_max_size}", "@{split_max_tensors}"},
};

bool given(const Options& o, std::string_view option) {
  const auto row = std::find_if(std::begin(kRows), std::end(kRows),
                                [&](const Row& r) { return r.option == option; });
  return row->given(o);
}

Status check_written(const std::string& where, GgmlType type) {
  if (is_written(type)) return {};
  return unsupported(where + " " + info(type).name + ": not written, expected one of" +
                     written_names());
}

}  // namespace

Status ConversionPlanner::check_options() {
  const Options& o = options_;
  const bool gguf = o.format == ModelFormat::gguf;
  const std::pair<Way, bool> ways[] = {{kQuantize, o.bits > 0 || has_type(o) || has_target(o)},
                                       {kTranscode, o.transcode},
                                       {kDequantize, o.dequantize.has_value()}};
  std::vector<Way> asked;
  for (const auto& [way, is] : ways)
    if (is) asked.push_back(way);
  if (asked.empty() && o.dtype) asked.push_back(kCast);
  if (asked.empty())
    return invalid(
        "nothing asked for, expected @{bits}, @{type}, @{target_bpw}, @{transcode}, @{dequantize} "
        "or "
        "@{dtype}");
  if (asked.size() > 1)
    return invalid(std::string(option_of(asked[0], o)) + " and " + option_of(asked[1], o) +
                   " exclude each other, expected one");
  for (const Row& row : kRows) {
    if (!row.given(o)) continue;
    if ((row.formats & (gguf ? kGguf : kFolders)) == 0)
      return invalid(
          std::string(row.option) +
          (o.mix != nullptr && row.given == has_type ? std::string(" ") + o.mix->name : "") +
          ": the format is " + name(o.format) + ", expected @{format} " +
          (gguf ? std::string("mlx") + row.no_gguf : "gguf"));
    if ((row.ways & asked[0]) == 0)
      return invalid(std::string(row.option) + ": has no effect with " + option_of(asked[0], o) +
                     "; leave one of them out");
  }
  if (o.splits() && part_stem().empty())
    return invalid("@{out}: " + out_ +
                   ": no name before .gguf, expected one such as model.gguf, whose "
                   "parts are model-00001-of-00002.gguf ...");
  for (const auto& [a, b] : kContradict)
    if (given(o, a) && given(o, b))
      return invalid(std::string(a) + " and " + b + " both given, expected one");
  if (o.type && o.mix != nullptr) return invalid("a type and a mix both given, expected one");
  if (has_target(o) && !(o.target_bpw >= 1 && o.target_bpw <= 32))
    return invalid("@{target_bpw}: " + std::to_string(o.target_bpw) + ", expected 1 to 32");

  if (o.type) BITTERN_TRY(check_written("@{type}", *o.type));
  if (o.mix != nullptr && !is_written(o.mix->type)) {
    return unsupported(std::string("@{type} ") + o.mix->name + ": " + info(o.mix->type).name +
                       " is not written, expected one of" + mix_names());
  }
  if (o.output_type) BITTERN_TRY(check_written("@{output_tensor_type}", *o.output_type));
  if (o.embedding_type) BITTERN_TRY(check_written("@{token_embedding_type}", *o.embedding_type));
  free_groups_ = has_target(o) && o.group == 0 && !gguf;
  if (options_.group == 0) options_.group = gguf ? 32 : 64;
  if (o.bits > 0) BITTERN_TRY(check_bits(o.bits, "@{bits}"));
  BITTERN_TRY(check_group(o.group, "@{group_size}"));
  for (const TensorRule& rule : o.rules) {
    const std::string text = pattern_text(rule);
    if (rule.keep + (rule.bits > 0 || rule.group > 0) + rule.type.has_value() > 1)
      return invalid(text +
                     ": a rule says one of keep, bits (with a group) and type; expected one");
    if (rule.bits > 0) BITTERN_TRY(check_bits(rule.bits, text + ": bits"));
    if (rule.group > 0) BITTERN_TRY(check_group(rule.group, text + ": group_size"));
    if (rule.type && !gguf)
      return invalid(text + ": type " + info(*rule.type).name + " in format " + name(o.format) +
                     ", expected @{format} gguf");
    if (rule.type) BITTERN_TRY(check_written(text + ": type", *rule.type));
  }
  const bool compressed = o.format == ModelFormat::compressed_tensors;
  if (compressed && o.integer_zeros == false)
    return invalid("@{zero_points}: real, expected integer for @{format} compressed-tensors");
  if (compressed && (asked[0] & (kDequantize | kCast)) != 0)
    return invalid(std::string(option_of(asked[0], o)) +
                   " writes plain numbers, expected @{format} safetensors");
  if (compressed && asked[0] == kQuantize) options_.integer_zeros = true;
  if (o.integer_zeros == true && o.method == AffineMethod::mlx)
    return invalid(
        "@{method} mlx: makes biases of its own, expected minmax, lsq or gptq with @{zero_points} "
        "integer");
  if (o.coder != nullptr) {
    const std::string method = "@{method} " + std::string(o.coder->method());
    if (o.format == ModelFormat::safetensors)
      return invalid(method +
                     ": the format is safetensors, expected @{format} mlx, gguf or "
                     "compressed-tensors");
    if (!o.imatrix.empty())
      return invalid("@{imatrix}: " + method +
                     " measures the inputs itself; leave one of them out");
  }
  if (!o.imatrix.empty() && o.method && o.method != AffineMethod::lsq && !gguf)
    return invalid("@{imatrix}: only @{method} lsq uses it, expected @{method} lsq");
  return {};
}

std::string mix_names() {
  std::string names;
  for (const Mix& mix : mixes())
    if (is_written(mix.type)) names += std::string(" ") + mix.name;
  return names;
}

}  // namespace bittern
