#include "convert/apart.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

namespace bittern {
namespace {

namespace fs = std::filesystem;

struct Identity {
  dev_t device;
  ino_t inode;
  bool operator==(const Identity&) const = default;
};

std::optional<Identity> identity_of(const fs::path& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return Identity{info.st_dev, info.st_ino};
}

// A name and the folders it is in, as it is spelled and as it is without links.
struct Place {
  std::optional<Identity> own;
  std::vector<Identity> above;
  std::vector<std::pair<Identity, fs::path>> not_yet;  // folders above that are still to be made
  std::optional<Identity> parent;
  fs::path name;  // in its parent

  explicit Place(const std::string& text) : own(identity_of(text)) {
    std::error_code error;
    fs::path spelled = fs::absolute(text, error);
    if (!spelled.has_filename()) spelled = spelled.parent_path();
    // `link/..` is the folder above that which the link leads to: no work for lexically_normal.
    if (std::find(spelled.begin(), spelled.end(), "..") == spelled.end()) {
      spelled = spelled.lexically_normal();
    } else {
      const fs::path folder = fs::canonical(spelled.parent_path(), error);
      spelled = (error ? spelled.parent_path() : folder) / spelled.filename();
    }
    name = spelled.filename();
    parent = identity_of(spelled.parent_path());
    fs::path real = fs::canonical(spelled, error);
    if (error) real = fs::canonical(spelled.parent_path(), error) / name;
    for (const fs::path& path : {spelled, real})
      for (fs::path at = path; at.has_relative_path();) {
        at = at.parent_path();
        if (const auto found = identity_of(at)) {
          above.push_back(*found);
        } else if (const auto folder = identity_of(at.parent_path())) {
          not_yet.emplace_back(*folder, at.filename());
        }
      }
  }
  bool is(const Place& other) const {
    if (own || other.own) return own == other.own;
    return parent && parent == other.parent && name == other.name;
  }
  bool is_inside(const Place& other) const {
    if (other.own) return std::find(above.begin(), above.end(), *other.own) != above.end();
    return std::any_of(not_yet.begin(), not_yet.end(), [&](const auto& folder) {
      return folder.first == other.parent && folder.second == other.name;
    });
  }
};

}  // namespace

Status check_apart(std::span<const OutputName> outputs, std::span<const std::string> inputs) {
  std::vector<Place> to, from;
  for (const OutputName& output : outputs) to.emplace_back(output.path);
  for (const std::string& input : inputs) from.emplace_back(input);
  const auto refuse = [&](std::size_t i, const char* what, const std::string& other,
                          const char* expected) {
    return invalid(outputs[i].flag + ": " + outputs[i].path + what + other + ", expected " +
                   expected);
  };
  for (std::size_t i = 0; i < to.size(); ++i) {
    constexpr const char* kOther = "a name apart from what is read";
    for (std::size_t j = 0; j < from.size(); ++j) {
      if (to[i].is(from[j])) return refuse(i, " is the input ", inputs[j], kOther);
      if (to[i].is_inside(from[j])) return refuse(i, " is inside the input ", inputs[j], kOther);
      if (from[j].is_inside(to[i])) return refuse(i, " contains the input ", inputs[j], kOther);
    }
    for (std::size_t j = 0; j < i; ++j) {
      constexpr const char* kApart = "outputs apart from each other";
      if (to[i].is(to[j])) return refuse(i, " is also the output ", outputs[j].path, kApart);
      if (to[i].is_inside(to[j])) return refuse(i, " is inside ", outputs[j].path, kApart);
      if (to[j].is_inside(to[i])) return refuse(i, " contains ", outputs[j].path, kApart);
    }
  }
  return {};
}

}  // namespace bittern
