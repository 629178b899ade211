// Files beside a model's weights: config, tokeniser, notes. They are copied or parsed into the
// output. So in a model from a stranger they must not be links that lead to the user's files.
// Weights may be links to anywhere: the user named them, and they hold only numbers.
#pragma once
#include <string>

#include "bittern/status.h"

namespace bittern {

// False only if there is nothing of that name. What cannot be examined counts as existing.
bool is_there(const std::string& path);

// "FOLDER/", to which the name of a file is added.
std::string with_slash(const std::string& folder);

// Refuses a symbolic link that leads out of its folder, other than into blobs/ of the Hugging Face
// cache the folder is a snapshot of (models--x/snapshots/COMMIT/ -> models--x/blobs/).
Status check_side_file(const std::string& path);

}  // namespace bittern
