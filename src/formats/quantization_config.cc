#include "formats/quantization_config.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/guarded.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

using Method = QuantizationConfig::Method;
using Module = QuantizationConfig::Module;

// The member of an object, null when it is not there or is JSON's null.
const OrderedJson* find(const OrderedJson& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  for (const auto& [name, value] : object.get_ref<const OrderedJson::object_t&>())
    if (name == key) return value.is_null() ? nullptr : &value;
  return nullptr;
}

// A member that must be one of a few whole numbers.
Result<std::int64_t> one_of(const std::string& where, const OrderedJson& object,
                            std::string_view key, std::span<const std::int64_t> choices) {
  const OrderedJson* value = find(object, key);
  std::string expected = ", expected one of";
  for (const std::int64_t choice : choices) expected += " " + std::to_string(choice);
  if (value == nullptr) return invalid(where + ": no " + std::string(key) + expected);
  // -1 and 2^64 - 1 are equal to nlohmann.
  if (value->is_number_integer()) {
    const bool natural = value->is_number_unsigned();
    for (const std::int64_t choice : choices)
      if ((choice >= 0) == natural && *value == choice) return choice;
  }
  return unsupported(where + ": " + std::string(key) + " " + shown(*value) + expected);
}

Result<std::string_view> text_of(const std::string& where, const OrderedJson& value) {
  if (!value.is_string()) return invalid(where + ": " + shown(value) + ", expected a string");
  return std::string_view(value.get_ref<const std::string&>());
}

// The first of two spellings that the object has.
std::string_view spelling(const OrderedJson& object, std::string_view usual,
                          std::string_view other) {
  return find(object, usual) == nullptr && find(object, other) != nullptr ? other : usual;
}

bool is_any_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
}

// ---- MLX ----

Result<Module> mlx_module(const std::string& where, const OrderedJson& object) {
  if (const OrderedJson* mode = find(object, "mode")) {
    const auto name = text_of(where + ": mode", *mode);
    if (!name) return name.status();
    if (*name != "affine")
      return unsupported(where + ": mode " + in_quotes(*name) + ", expected \"affine\"");
  }
  constexpr std::int64_t kBits[] = {1, 2, 3, 4, 5, 6, 8}, kGroups[] = {32, 64, 128};
  const auto bits = one_of(where, object, "bits", kBits);
  if (!bits) return bits.status();
  const auto group = one_of(where, object, "group_size", kGroups);
  if (!group) return group.status();
  return Module{static_cast<int>(*bits), *group};
}

Result<QuantizationConfig> mlx_config(const std::string& where, const OrderedJson& object) {
  QuantizationConfig config;
  config.method = Method::mlx;
  const auto all = mlx_module(where, object);
  if (!all) return all.status();
  config.all = *all;
  for (const auto& [name, value] : object.get_ref<const OrderedJson::object_t&>()) {
    if (value.is_object()) {
      const auto module = mlx_module(where + ": " + in_quotes(name), value);
      if (!module) return module.status();
      config.modules.emplace(name, *module);
    } else if (value.is_boolean()) {
      config.modules.emplace(name, value.get<bool>() ? std::optional(config.all) : std::nullopt);
    }
  }
  return config;
}

// ---- AWQ and GPTQ ----

Result<QuantizationConfig> awq_config(const std::string& where, const OrderedJson& object) {
  QuantizationConfig config;
  config.method = Method::awq;
  if (const OrderedJson* version = find(object, "version")) {
    const auto name = text_of(where + ": version", *version);
    if (!name) return name.status();
    if (!is_any_case(*name, "gemm"))
      return unsupported(where + ": version " + in_quotes(*name) + ", expected \"gemm\"");
  }
  constexpr std::int64_t kBits[] = {4}, kGroups[] = {-1, 16, 32, 64, 128, 256};
  const auto bits = one_of(where, object, spelling(object, "bits", "w_bit"), kBits);
  if (!bits) return bits.status();
  const auto group = one_of(where, object, spelling(object, "group_size", "q_group_size"), kGroups);
  if (!group) return group.status();
  config.all = {static_cast<int>(*bits), *group};
  return config;
}

Result<QuantizationConfig> gptq_config(const std::string& where, const OrderedJson& object) {
  QuantizationConfig config;
  config.method = Method::gptq;
  constexpr std::int64_t kBits[] = {2, 3, 4, 8}, kGroups[] = {-1, 16, 32, 64, 128, 256, 512, 1024};
  const auto bits = one_of(where, object, "bits", kBits);
  if (!bits) return bits.status();
  const auto group = one_of(where, object, "group_size", kGroups);
  if (!group) return group.status();
  config.all = {static_cast<int>(*bits), *group};
  if (const OrderedJson* format = find(object, "checkpoint_format")) {
    const auto name = text_of(where + ": checkpoint_format", *format);
    if (!name) return name.status();
    if (*name != "gptq" && *name != "gptq_v2") {
      return unsupported(where + ": checkpoint_format " + in_quotes(*name) +
                         ", expected \"gptq\" or \"gptq_v2\"");
    }
    config.zeros_minus_one = *name == "gptq";
  }
  // Rules for single modules, by regular expression; "-:" only says that some are left alone.
  if (const OrderedJson* dynamic = find(object, "dynamic"); dynamic && dynamic->is_object()) {
    for (const auto& [rule, value] : dynamic->get_ref<const OrderedJson::object_t&>()) {
      if (!rule.starts_with("-:")) {
        return unsupported(where + ": dynamic " + in_quotes(rule) +
                           ", expected the same bits and group for all modules");
      }
    }
  }
  return config;
}

// ---- compressed-tensors ----

Result<Module> compressed_module(const std::string& where, const OrderedJson& weights) {
  const auto word = [&](const char* key, std::string_view expected) -> Status {
    const OrderedJson* value = find(weights, key);
    if (value == nullptr) return invalid(where + ": no " + key + ", expected one");
    const auto text = text_of(where + ": " + key, *value);
    if (!text) return text.status();
    if (*text == expected) return {};
    return unsupported(where + ": " + key + " " + in_quotes(*text) + ", expected " +
                       in_quotes(expected));
  };
  BITTERN_TRY(word("type", "int"));
  constexpr std::int64_t kBits[] = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto bits = one_of(where, weights, "num_bits", kBits);
  if (!bits) return bits.status();
  Module module{.bits = static_cast<int>(*bits), .group = -1};
  const OrderedJson* strategy = find(weights, "strategy");
  if (strategy == nullptr || *strategy != "channel") {
    BITTERN_TRY(word("strategy", "group"));
    constexpr std::int64_t kGroups[] = {16, 32, 64, 128, 256, 512, 1024};
    const auto group = one_of(where, weights, "group_size", kGroups);
    if (!group) return group.status();
    module.group = *group;
  }
  const OrderedJson* symmetric = find(weights, "symmetric");
  if (symmetric != nullptr && !symmetric->is_boolean())
    return invalid(where + ": symmetric " + shown(*symmetric) + ", expected true or false");
  module.zero_points = symmetric != nullptr && !symmetric->get<bool>();
  return module;
}

Result<QuantizationConfig> compressed_config(const std::string& where, const OrderedJson& object) {
  QuantizationConfig config;
  // Other formats keep their tensors in other ways, and are shown as they are stored.
  const OrderedJson* format = find(object, "format");
  if (format == nullptr || *format != "pack-quantized") return config;
  config.method = Method::compressed;
  const OrderedJson* groups = find(object, "config_groups");
  if (groups == nullptr || !groups->is_object())
    return invalid(where + ": no config_groups, expected an object of settings");
  for (const auto& [name, group] : groups->get_ref<const OrderedJson::object_t&>()) {
    const std::string in_group = where + ": config_groups: " + in_quotes(name);
    const OrderedJson* weights = find(group, "weights");
    if (weights == nullptr || !weights->is_object())
      return unsupported(in_group + ": no weights, expected an object that says num_bits");
    const auto module = compressed_module(in_group + ": weights", *weights);
    if (!module) return module.status();
    config.choices.push_back(*module);
  }
  if (config.choices.empty())
    return invalid(where + ": empty config_groups, expected at least one");
  config.all = config.choices[0];
  return config;
}

Result<QuantizationConfig> read_config(const std::string& where, const OrderedJson& config) {
  if (config.is_null()) return QuantizationConfig();
  if (!config.is_object()) return invalid(where + ": " + shown(config) + ", expected an object");
  const auto section = [&](const OrderedJson& in, const char* key) -> Result<const OrderedJson*> {
    const OrderedJson* found = find(in, key);
    if (found == nullptr || found->is_object()) return found;
    return invalid(where + ": " + key + ": " + shown(*found) + ", expected an object");
  };
  auto found = section(config, "quantization");
  if (!found) return found.status();
  if (*found != nullptr) return mlx_config(where + ": quantization", **found);

  const std::string inner = where + ": quantization_config";
  found = section(config, "quantization_config");
  if (!found) return found.status();
  // Of a model for text and images, it may stand beside the rest of the text's.
  if (const OrderedJson* text = find(config, "text_config"); *found == nullptr && text) {
    found = section(*text, "quantization_config");
    if (!found) return found.status();
  }
  if (*found == nullptr) return QuantizationConfig();
  const OrderedJson& object = **found;
  const OrderedJson* method = find(object, "quant_method");
  if (method == nullptr) {
    if (find(object, "bits") == nullptr || find(object, "group_size") == nullptr)
      return QuantizationConfig();
    return mlx_config(inner, object);  // MLX writes its config under both names
  }
  const auto name = text_of(inner + ": quant_method", *method);
  if (!name) return name.status();
  if (*name == "awq") return awq_config(inner, object);
  if (*name == "gptq") return gptq_config(inner, object);
  if (*name == "compressed-tensors") return compressed_config(inner, object);
  return QuantizationConfig();
}

}  // namespace

Result<QuantizationConfig> read_quantization_config(const std::string& where,
                                                    const OrderedJson& config) {
  try {
    return read_config(where, config);
  } catch (...) {
    return caught(where);
  }
}

}  // namespace bittern
