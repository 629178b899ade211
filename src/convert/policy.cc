// What a policy file or a flag may ask for, and which rule a tensor falls under.
#include <algorithm>
#include <memory>
#include <utility>

#include <re2/re2.h>

#include "convert/mix.h"
#include "convert/planner.h"
#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/json_tree.h"

namespace bittern {

namespace {

using Json = OrderedJson;

constexpr std::size_t kMostPolicyBytes = std::size_t{4} << 20;

}  // namespace

bool is_written(GgmlType type) {
  return std::any_of(std::begin(kWritten), std::end(kWritten),
                     [&](const WrittenType& t) { return t.type == type; });
}

std::string written_names() {
  std::string names;
  for (const WrittenType& t : kWritten) names += std::string(" ") + info(t.type).name;
  return names;
}

Status read_policy(const std::string& path, ConversionOptions& options) noexcept try {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  const auto parsed = parse_json_tree(path, file->bytes(), kMostPolicyBytes);
  if (!parsed) return parsed.status();
  BITTERN_TRY(file->unchanged());
  const Json& policy = *parsed;
  const auto refuse = [&](const std::string& what) { return invalid(path + ": " + what); };
  if (!policy.is_object()) return refuse("not a JSON object");
  const auto number = [&](const Json& in, const char* key, int& to) -> Status {
    const auto found = in.find(key);
    if (found == in.end()) return {};
    if (!found->is_number_integer() || found->get<std::int64_t>() < 1 ||
        found->get<std::int64_t>() > 1024)
      return refuse(std::string(key) + ": " + shown(*found) + ", expected an integer in 1..1024");
    if (to == 0) to = found->get<int>();
    return {};
  };
  const auto type = [&](const Json& in, std::optional<GgmlType>& to) -> Status {
    const auto found = in.find("type");
    if (found == in.end()) return {};
    const GgmlTypeInfo* known =
        found->is_string() ? ggml_type(std::string_view(found->get_ref<const std::string&>()))
                           : nullptr;
    if (known == nullptr || !is_written(known->type))
      return refuse("type: " + shown(*found) + ", expected one of" + written_names());
    if (!to) to = known->type;
    return {};
  };
  for (const auto& [key, value] : policy.items()) {
    if (key != "bits" && key != "group_size" && key != "type" && key != "rules")
      return refuse(in_quotes(key) + ": unknown, expected bits, group_size, type or rules");
  }
  BITTERN_TRY(number(policy, "bits", options.bits));
  BITTERN_TRY(number(policy, "group_size", options.group));
  if (const auto found = policy.find("type"); found != policy.end()) {
    const Mix* mix = found->is_string() ? find_mix(found->get_ref<const std::string&>()) : nullptr;
    if (mix == nullptr || !is_written(mix->type))
      return refuse("type: " + shown(*found) + ", expected one of" + mix_names());
    if (options.mix == nullptr && !options.type) options.mix = mix;
  }
  const auto rules = policy.find("rules");
  if (rules == policy.end()) return {};
  if (!rules->is_array()) return refuse("rules: expected a list of objects");
  for (const Json& line : *rules) {
    if (!line.is_object() || !line.contains("match") || !line["match"].is_string())
      return refuse("rules: " + shown(line) +
                    ", expected an object with \"match\", a regular expression");
    TensorRule rule{.pattern = line["match"].get<std::string>()};
    for (const auto& [key, value] : line.items()) {
      if (key == "keep" && value.is_boolean()) {
        rule.keep = value.get<bool>();
      } else if (key != "match" && key != "bits" && key != "group_size" && key != "type") {
        return refuse("rules: " + in_quotes(rule.pattern) + ": " + in_quotes(key) + ": " +
                      shown(value) + ", expected match, bits, group_size, type or keep");
      }
    }
    BITTERN_TRY(number(line, "bits", rule.bits));
    BITTERN_TRY(number(line, "group_size", rule.group));
    BITTERN_TRY(type(line, rule.type));
    options.rules.push_back(std::move(rule));
  }
  return {};
} catch (...) {
  return caught(path);
}

Status check_bits(int bits, const std::string& where) {
  if (std::find(std::begin(kBits), std::end(kBits), bits) == std::end(kBits))
    return invalid(where + ": " + std::to_string(bits) + ", expected 2, 3, 4, 5, 6 or 8");
  return {};
}

Status ConversionPlanner::check_group(int group, const std::string& where) const {
  const bool gguf = options_.format == ModelFormat::gguf;
  if (gguf && group != 32)
    return invalid(where + ": " + std::to_string(group) +
                   ": the type decides it in GGUF (32; 16 in Q2_K, Q3_K and Q6_K), expected 32");
  if (std::find(std::begin(kGroups), std::end(kGroups), group) == std::end(kGroups))
    return invalid(where + ": " + std::to_string(group) + ", expected 32, 64 or 128");
  return {};
}

Status ConversionPlanner::compile_rules() {
  RE2::Options quiet;
  quiet.set_log_errors(false);
  for (const TensorRule& rule : options_.rules) {
    auto pattern = std::make_shared<const RE2>(rule.pattern, quiet);
    if (!pattern->ok())  // the reason may repeat a pattern of any length
      return invalid("@{rules}: " + in_quotes(rule.pattern) + ": " +
                     pattern->error().substr(0, 80) + ": RE2 does not accept this pattern");
    patterns_.push_back(std::move(pattern));
  }
  return {};
}

bool ConversionPlanner::matches(std::size_t rule, const Recipe& recipe) const {
  const RE2& pattern = *patterns_[rule];
  return RE2::PartialMatch(recipe.name, pattern) ||
         std::any_of(recipe.sources.begin(), recipe.sources.end(), [&](const std::string& source) {
           return source != recipe.name && RE2::PartialMatch(source, pattern);
         });
}

std::string pattern_text(const TensorRule& rule) {
  constexpr std::size_t kMost = 120;
  if (rule.pattern.size() <= kMost) return rule.pattern;
  return rule.pattern.substr(0, kMost) + "...";
}

const TensorRule* ConversionPlanner::rule_for(const Recipe& recipe) const {
  for (std::size_t i = 0; i < patterns_.size(); ++i)
    if (matches(i, recipe)) return &options_.rules[i];
  return nullptr;
}

}  // namespace bittern
