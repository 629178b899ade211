// Descriptor fields as text and as numbers, through Op::fields(): what the command line, Python,
// the C interface, the oracle's reproducers and the fuzzer share.
#pragma once
#include <charconv>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bittern/bittern.h"
#include "core/guarded.h"

namespace bittern {

// A field's value is an integer, a real number, or one of a list of names (whose index is its
// integer).
inline constexpr std::string_view kDTypeNames[kDTypeCount] = {"f32", "f64", "f16", "bf16",
                                                              "u8",  "s8",  "s32", "u32"};
constexpr auto& enum_names(DType) { return kDTypeNames; }
inline constexpr std::string_view kBoolNames[] = {"false", "true"};
constexpr auto& enum_names(bool) { return kBoolNames; }

template <class T>
inline constexpr bool kIsNamed = std::is_enum_v<T> || std::is_same_v<T, bool>;
template <class T>
inline constexpr bool kIsReal = std::is_same_v<T, double>;

template <class T>
std::span<const std::string_view> field_names() {
  if constexpr (kIsNamed<T>) {
    return enum_names(T{});
  } else {
    return {};
  }
}

// Integers that do not fit the field are an error, never wrapped.
template <class T>
Status assign_field(std::string_view field, T& member, std::int64_t value) {
  const auto names = field_names<T>();
  if constexpr (kIsNamed<T>) {
    if (value < 0 || value >= static_cast<std::int64_t>(names.size())) {
      return invalid(std::string(field) + ": " + std::to_string(value) + ", expected 0.." +
                     std::to_string(names.size() - 1));
    }
  } else if constexpr (kIsReal<T>) {
    member = static_cast<double>(value);
    return {};
  } else if (!std::in_range<T>(value)) {
    if (std::is_unsigned_v<T> && value < 0) {
      return invalid(std::string(field) + ": " + std::to_string(value) + ", expected at least 0");
    }
    return invalid(std::string(field) + ": " + std::to_string(value) + " does not fit " +
                   std::to_string(8 * sizeof(T)) + " bits");
  }
  member = static_cast<T>(value);
  return {};
}

template <class T>
std::string field_text(const T& member) {
  if constexpr (kIsNamed<T>) {
    return std::string(field_names<T>()[static_cast<std::size_t>(member)]);
  } else if constexpr (kIsReal<T>) {
    char text[32];  // the shortest that reads back the same
    const auto [end, error] = std::to_chars(text, text + sizeof text, member);
    return error == std::errc() ? std::string(text, end) : std::string();
  } else {
    return std::to_string(member);
  }
}

template <class T>
Status assign_field(std::string_view field, T& member, double value) {
  if constexpr (kIsReal<T>) {
    if (!std::isfinite(value)) {
      return invalid(std::string(field).append(": ") + field_text(value) +
                     ", expected a finite number");
    }
    member = value;
    return {};
  } else {
    return invalid(std::string(field).append(": ") + field_text(value) +
                   (kIsNamed<T> ? ", expected a name" : ", expected an integer"));
  }
}

template <class T>
Status assign_field(std::string_view field, T& member, std::string_view text) {
  const auto names = field_names<T>();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == text) return assign_field(field, member, static_cast<std::int64_t>(i));
  std::string expected;
  if constexpr (kIsNamed<T>) {
    for (const std::string_view n : names) expected.append(expected.empty() ? "" : " ").append(n);
  } else {
    constexpr bool kUnsigned = std::is_same_v<T, std::uint64_t>;
    using Integer = std::conditional_t<kUnsigned, T, std::int64_t>;
    std::conditional_t<kIsReal<T>, double, Integer> value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size()) {
      if constexpr (kUnsigned) {
        member = value;
        return {};
      } else {
        return assign_field(field, member, value);
      }
    }
    if (error == std::errc::result_out_of_range && end == text.data() + text.size())
      return invalid(std::string(field).append(": ").append(text) + " does not fit 64 bits");
    expected = kIsReal<T> ? "a number" : "an integer";
  }
  return invalid(std::string(field)
                     .append(": ")
                     .append(text.empty() ? "empty" : text)
                     .append(", expected ")
                     .append(expected));
}

// Sets the field called `field`; `value` is a number or text.
template <class Op, class Value>
Status set_field(typename Op::Desc& desc, std::string_view field, const Value& value) {
  bool found = false;
  Status status;
  std::string known;
  Op::fields(desc, [&](const char* n, auto& member, const char*) {
    known.append(known.empty() ? "" : " ").append(n);
    if (field != n) return;
    found = true;
    status = assign_field(field, member, value);
  });
  if (!found) {
    return invalid(
        std::string(Op::kName).append(": no field ").append(field).append(", expected one of ") +
        known);
  }
  throw_if_out_of_memory(status);
  if (!status.ok()) return invalid(std::string(Op::kName).append(": ").append(status.message()));
  return status;
}

// "--outer_size=5 --axis_size=96 ...": what `bittern check OP` takes.
template <class Op>
std::string flags_text(const typename Op::Desc& desc) {
  std::string text;
  Op::fields(desc, [&](const char* n, const auto& member, const char*) {
    text.append(text.empty() ? "--" : " --").append(n).append("=").append(field_text(member));
  });
  return text;
}

}  // namespace bittern
