// Finds outputs that would change an input, or each other. Device and inode decide, so links and
// other spellings of a name hide nothing.
#pragma once
#include <span>
#include <string>

#include "bittern/status.h"

namespace bittern {

struct OutputName {
  std::string flag, path;  // of a file or folder, which need not be there yet
};

// Refuses an output that is an input, is inside a folder of the inputs, or contains an input; and
// two outputs of which one is the other or inside it.
Status check_apart(std::span<const OutputName> outputs, std::span<const std::string> inputs);

}  // namespace bittern
