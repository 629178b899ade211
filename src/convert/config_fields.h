// The fields of a config.json, each checked as it is read.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"

namespace bittern::config_detail {

using Json = nlohmann::ordered_json;

inline constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

inline std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 100 ? text.substr(0, 100) + "..." : text;
}

// Above 0, and still so in GGUF.
inline bool f32_holds(double x) {
  return x >= std::numeric_limits<float>::denorm_min() && x <= std::numeric_limits<float>::max();
}

// The first thing wrong is kept; what is read after it does not matter.
class Fields {
 public:
  explicit Fields(const Json& object, std::string path = "") : object_(object), path_(path) {}

  const Json* find(const char* key) const {
    seen_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool is_null(const char* key) const {
    const auto it = object_.find(key);
    return it != object_.end() && it->is_null();
  }
  std::int64_t count(const char* key, std::int64_t least = 1) {
    const Json* value = find(key);
    if (value == nullptr) {
      refuse(key, "missing");
      return least;
    }
    if (value->is_number_integer()) {
      const auto x = value->get<std::int64_t>();  // of a number above 2^63: negative
      if (x >= least && x <= kMost) return x;
    }
    refuse(key, shown(*value) + ", expected a whole number from " + std::to_string(least) + " to " +
                    std::to_string(kMost));
    return least;
  }
  void multiple(const char* key, std::int64_t x, const char* of, std::int64_t y) {
    if (x % y != 0)
      refuse(key,
             std::to_string(x) + ", expected a multiple of " + of + " (" + std::to_string(y) + ")");
  }
  std::int64_t count_or(const char* key, std::int64_t otherwise, std::int64_t least = 1) {
    return find(key) == nullptr ? otherwise : count(key, least);
  }
  // A number above 0.
  double number_or(const char* key, double otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (value->is_number()) {
      const auto x = value->get<double>();
      if (f32_holds(x)) return x;
      if (x > 0) {
        refuse(key, shown(*value) + ", expected a number that f32 holds, as GGUF keeps it");
        return otherwise;
      }
    }
    refuse(key, shown(*value) + ", expected a number above 0");
    return otherwise;
  }
  bool truth_or(const char* key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(key, shown(*value) + ", expected true or false");
    return value->is_boolean() ? value->get<bool>() : otherwise;
  }
  std::string text_or(const char* key, const char* otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse(key, shown(*value) + ", expected a string");
    return value->is_string() ? value->get<std::string>() : otherwise;
  }
  // Above 0, `size` of them.
  std::vector<double> numbers(const char* key, std::int64_t size) {
    const Json* value = find(key);
    std::vector<double> all;
    if (value != nullptr && value->is_array())
      for (const Json& x : *value)
        if (x.is_number() && f32_holds(x.get<double>())) all.push_back(x.get<double>());
    if (value == nullptr) {
      refuse(key, "missing");
    } else if (std::int64_t(all.size()) != size || std::int64_t(value->size()) != size) {
      refuse(key,
             shown(*value) + ", expected a list of " + std::to_string(size) + " numbers above 0");
    }
    return all;
  }
  void refuse(const char* key, const std::string& what) {
    fail(invalid(name(key) + " is " + what));
  }
  void cannot(const char* key, const std::string& what) { fail(unsupported(name(key) + what)); }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  const Status& status() const { return status_; }

  // Keys nobody asked for, but for those about training, files and tokens, and what is off.
  std::vector<std::string> unread() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object_.items()) {
      const bool off = value.is_null() || value == false || value.empty();
      const auto part = [&in = key](const char* text) { return in.find(text) != in.npos; };
      const bool about = part("token_id") || part("token_index") || part("dropout") ||
                         part("pdrop") || part("dtype") || part("_attn_implementation") ||
                         part("mtp_") || part("rope_") || part("router_") || key[0] == '_';
      if (!off && !about && !seen_.contains(key) && !kAside.contains(key)) keys.push_back(key);
    }
    return keys;
  }

 private:
  inline static const std::set<std::string_view> kAside = {
      "architectures", "auto_map",         "cache_implementation", "chunk_size_feed_forward",
      "hidden_act",    "id2label",         "initializer_range",    "is_encoder_decoder",
      "label2id",      "layer_types",      "max_window_layers",    "model_type",
      "name_or_path",  "pretraining_tp",   "quantization",         "quantization_config",
      "return_dict",   "sliding_window",   "transformers_version", "use_cache",
      "vision_config", "attn_output_gate", "text_config",          "num_local_experts",
  };

  std::string name(const char* key) const { return "config.json: \"" + path_ + key + "\""; }

  const Json& object_;
  std::string path_;
  Status status_;
  mutable std::set<std::string, std::less<>> seen_;
};

inline const Json* object_in(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || !it->is_object() ? nullptr : &*it;
}

}  // namespace bittern::config_detail
