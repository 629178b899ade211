// Names in messages: lists of them, and the one that was probably meant.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace bittern {

// "a, b or c"
std::string either(std::span<const std::string_view> names);

// The name in `known` that differs from `given` by a typing mistake or begins with it; "" if none.
std::string_view nearest(std::string_view given, std::span<const std::string_view> known);

// "no field grop_size (did you mean group_size?), expected one of outer_size axis_size ..."
std::string unknown_name(std::string_view kind, std::string_view given,
                         std::span<const std::string_view> known);

}  // namespace bittern
