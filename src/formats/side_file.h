// Files beside a model's weights: config, tokeniser, notes. They are copied or parsed into the
// output. So in a model from a stranger they must not be links that lead to the user's files.
// Weights may be links to anywhere: the user named them, and they hold only numbers.
#pragma once
#include <string>
#include <system_error>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// False only if there is nothing of that name. What cannot be examined counts as existing.
bool is_there(const std::string& path);

// "FOLDER/", to which the name of a file is added.
std::string with_slash(const std::string& folder);

// The names in a folder, sorted. (std::filesystem's iterator ends the process without memory.)
std::error_code list_folder(const std::string& folder, std::vector<std::string>& names);

// Refuses a symbolic link that leads out of its folder, other than into blobs/ of the Hugging Face
// cache the folder is a snapshot of (models--x/snapshots/COMMIT/ -> models--x/blobs/).
Status check_side_file(const std::string& path);

}  // namespace bittern
