#include "formats/json_tree.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/guarded.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

class TreeEvents : public JsonEvents {
 public:
  TreeEvents(const std::string& where, std::size_t most_values)
      : JsonEvents(where, where + ": not valid JSON"), where_(where), most_values_(most_values) {}

  OrderedJson take() { return std::move(root_); }

 private:
  Status begin(bool object) override {
    OrderedJson* value = nullptr;
    BITTERN_TRY(add(object ? OrderedJson::object() : OrderedJson::array(), value));
    open_.push_back(value);
    return {};
  }

  Status key(const std::string& text) override {
    // Not operator[], which would look through all keys for each. A parent does not grow while a
    // child is open, so the pointers of open_ hold.
    auto& object = open_.back()->get_ref<OrderedJson::object_t&>();
    object.emplace_back(text, nullptr);
    return {};
  }

  Status scalar(const JsonScalar& value) override {
    OrderedJson* added = nullptr;
    switch (value.kind) {
      case JsonScalar::null: return add(nullptr, added);
      case JsonScalar::boolean: return add(value.truth, added);
      case JsonScalar::natural: return add(value.number, added);
      case JsonScalar::negative: return add(value.integer, added);
      case JsonScalar::fraction: return add(value.real, added);
      case JsonScalar::text: return add(*value.string, added);
    }
    return {};
  }

  Status end() override {
    const OrderedJson& value = *open_.back();
    open_.pop_back();
    if (!value.is_object()) return {};
    const OrderedJson::object_t::Container& object = value.get_ref<const OrderedJson::object_t&>();
    std::vector<std::uint32_t> order(object.size());
    std::iota(order.begin(), order.end(), 0u);
    std::sort(order.begin(), order.end(),
              [&](auto a, auto b) { return object[a].first < object[b].first; });
    const auto twice = std::adjacent_find(order.begin(), order.end(), [&](auto a, auto b) {
      return object[a].first == object[b].first;
    });
    if (twice == order.end()) return {};
    return invalid(where_ + ": " + in_quotes(object[*twice].first) +
                   ": given twice, expected once");
  }

  // Puts a value where the text has it: the root, the next of a list, or that of the last key.
  Status add(OrderedJson value, OrderedJson*& added) {
    if (++values_ > most_values_) {
      return invalid(where_ + ": more than " + std::to_string(most_values_) +
                     " values, expected fewer");
    }
    if (open_.empty()) {
      root_ = std::move(value);
      added = &root_;
    } else if (open_.back()->is_array()) {
      auto& list = open_.back()->get_ref<OrderedJson::array_t&>();
      list.push_back(std::move(value));
      added = &list.back();
    } else {
      auto& object = open_.back()->get_ref<OrderedJson::object_t&>();
      object.back().second = std::move(value);
      added = &object.back().second;
    }
    return {};
  }

  std::string where_;
  OrderedJson root_;
  std::vector<OrderedJson*> open_;
  std::size_t values_ = 0, most_values_;
};

}  // namespace

std::string shown(const OrderedJson& value) {
  if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number()) return value.dump();
  if (value.is_null()) return "null";
  return value.is_object() ? "an object" : "a list";
}

Result<OrderedJson> parse_json_tree(const std::string& where, std::span<const std::byte> text,
                                    std::size_t most_bytes, std::size_t most_values) {
  if (text.size() > most_bytes) {
    return invalid(where + ": " + std::to_string(text.size()) + " bytes, expected at most " +
                   std::to_string(most_bytes));
  }
  try {
    TreeEvents events(where, most_values);
    BITTERN_TRY(events.parse(text));
    return events.take();
  } catch (...) {
    return caught(where);
  }
}

}  // namespace bittern
