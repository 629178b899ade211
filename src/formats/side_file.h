// Files beside a model's weights: config, tokeniser, notes. They are copied or parsed into the
// output, so a model from a stranger must not have links among them that lead to files of the user.
// Weights may be links to anywhere: they are what the user named, and hold nothing but numbers.
#pragma once
#include <string>

#include "bittern/status.h"

namespace bittern {

// False only when there is nothing of that name; what cannot be looked at is there.
bool is_there(const std::string& path);

// "FOLDER/", to which the name of a file is added.
std::string with_slash(const std::string& folder);

// Refuses a symbolic link that leads out of its folder, other than into blobs/ of the Hugging Face
// cache the folder is a snapshot of (models--x/snapshots/COMMIT/ -> models--x/blobs/).
Status check_side_file(const std::string& path);

}  // namespace bittern
