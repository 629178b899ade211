// What callers ask an open GGUF file.
#include "formats/gguf.h"

#include <algorithm>

#include "core/guarded.h"
#include "formats/gguf_detail.h"

namespace bittern {

using namespace gguf_detail;

namespace {

// The item of this name, given the order of names.
template <class T, class Name>
const T* look_up(const std::vector<T>& items, const std::vector<std::uint32_t>& order,
                 std::string_view wanted, Name&& name) {
  const auto at =
      std::lower_bound(order.begin(), order.end(), wanted,
                       [&](std::uint32_t i, std::string_view x) { return name(items[i]) < x; });
  return at != order.end() && name(items[*at]) == wanted ? &items[*at] : nullptr;
}

}  // namespace

const GgufValue* GgufFile::find(std::string_view key) const {
  const GgufKey* found = look_up(keys_, keys_by_name_, key, key_of);
  return found != nullptr ? &found->value : nullptr;
}

const GgufTensor* GgufFile::tensor(std::string_view name) const {
  return look_up(tensors_, tensors_by_name_, name, name_of);
}

namespace {

// The file that holds the metadata: of a split one, the first part.
std::string of_key_in(const GgufFile& file, std::string_view key) {
  return (file.parts().empty() ? file.path() : file.parts()[0].path()) + ": " + of_key(key);
}

Status mismatch(const GgufFile& file, std::string_view key, const GgufValue* value,
                const std::string& expected) {
  return invalid(of_key_in(file, key) + (value != nullptr ? found(*value) : "missing") +
                 ", expected " + expected);
}

template <class T>
Result<T> get(const GgufFile& file, std::string_view key, std::optional<T> (GgufValue::*as)() const,
              const char* expected) {
  const GgufValue* value = file.find(key);
  if (value != nullptr) {
    if (const auto x = (value->*as)()) return *x;
  }
  return mismatch(file, key, value, expected);
}

}  // namespace

Result<std::uint64_t> GgufFile::uint(std::string_view key) const {
  return get(*this, key, &GgufValue::as_uint, "an unsigned integer");
}
Result<std::int64_t> GgufFile::integer(std::string_view key) const {
  return get(*this, key, &GgufValue::as_integer, "an integer within s64");
}
Result<double> GgufFile::number(std::string_view key) const {
  return get(*this, key, &GgufValue::as_number, "a number");
}
Result<bool> GgufFile::boolean(std::string_view key) const {
  return get(*this, key, &GgufValue::as_bool, "a bool");
}
Result<std::string_view> GgufFile::string(std::string_view key) const {
  return get(*this, key, &GgufValue::as_string, "a string");
}

Result<GgufValue> GgufFile::array_of(std::string_view key, const char* expected,
                                     bool (*fits)(GgufType)) const {
  const GgufValue* value = find(key);
  if (value == nullptr || value->type() != GgufType::array || !fits(value->element()))
    return mismatch(*this, key, value, expected);
  return *value;
}

Result<GgufValue> GgufFile::array(std::string_view key) const {
  return array_of(key, "an array", [](GgufType) { return true; });
}

Result<std::vector<std::string_view>> GgufFile::strings(std::string_view key) const {
  const auto array =
      array_of(key, "an array of string", [](GgufType t) { return t == GgufType::string; });
  if (!array) return array.status();
  try {
    std::vector<std::string_view> out;
    out.reserve(array->size());
    array->each([&](const GgufValue& x) { out.push_back(*x.as_string()); });
    return out;
  } catch (...) {
    return caught(key);
  }
}

namespace {

// One byte of a file may become eight here, so the count is bounded.
template <class T>
Result<std::vector<T>> convert(const GgufFile& file, std::string_view key, const GgufValue& array,
                               std::optional<T> (GgufValue::*as)() const, const char* expected) {
  if (array.size() > kGgufMostElements) {
    return invalid(of_key_in(file, key) + dec(array.size()) + " elements, expected at most " +
                   dec(kGgufMostElements));
  }
  try {
    std::vector<T> out;
    out.reserve(array.size());
    for (std::uint64_t i = 0; i < array.size(); ++i) {
      const GgufValue value = array.at(i);
      const auto x = (value.*as)();
      if (!x) return mismatch(file, key, &value, expected);
      out.push_back(*x);
    }
    return out;
  } catch (...) {
    return caught(key);
  }
}

}  // namespace

Result<std::vector<std::int64_t>> GgufFile::integers(std::string_view key) const {
  const auto array = array_of(key, "an array of integers", is_integer);
  if (!array) return array.status();
  return convert(*this, key, *array, &GgufValue::as_integer, "integers within s64");
}

Result<std::vector<double>> GgufFile::numbers(std::string_view key) const {
  const auto array = array_of(key, "an array of numbers", is_number);
  if (!array) return array.status();
  return convert(*this, key, *array, &GgufValue::as_number, "numbers");
}

}  // namespace bittern
