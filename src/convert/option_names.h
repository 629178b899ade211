// How messages of a conversion name its options. Messages hold marks, "@{group_size}", and who
// hands them to a user spells the marks: as the fields of QuantizeOptions, or as the flags of a
// command.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "bittern/status.h"

namespace bittern {

using OptionName = std::function<std::string(std::string_view field)>;

// Without a function, the fields' own names.
std::string with_option_names(std::string_view text, const OptionName& name);
Status with_option_names(const Status& status, const OptionName& name);

}  // namespace bittern
