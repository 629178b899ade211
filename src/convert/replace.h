// What exists already at an output's name, and whether it may be replaced. Nothing is removed that
// bittern did not write. The proof is, for a file, its format; for a folder, the list of its files
// in the metadata of model.safetensors.index.json, {"written_by": "bittern", "files": [...]}.
#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "formats/mapped_file.h"

namespace bittern {

inline constexpr const char* kWrittenBy = "bittern";

// What has the name; a symbolic link is not followed.
enum class Thing { nothing, file, folder, link, special };
const char* name(Thing thing);  // "a file"
Result<Thing> thing_at(const std::string& path);

// A rename that replaces nothing.
Status rename_new(const std::string& from, const std::string& to);

// PATH.partial becomes PATH when it is whole and on the disk; what was there is replaced.
Status write_whole(const std::string& path, std::span<const std::byte> bytes);
Status write_whole(const std::string& path, const std::function<Status(WritableFile&)>& write);

// ok when a model may take the place of what is there. `folder`: the model is a folder.
Status check_replaceable(const std::string& path, bool folder);

// ok when the folder has only plain files, and none but of these names.
Status check_only(const std::string& folder, const std::vector<std::string>& names);

// Removes a file, or these files of a folder and then the folder, which is kept with whatever else
// is in it.
void remove_known(const std::string& path, const std::vector<std::string>& names);

// The files a folder of ours lists; empty where it lists none.
std::vector<std::string> listed_files(const std::string& folder);

}  // namespace bittern
