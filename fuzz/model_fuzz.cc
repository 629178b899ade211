// Takes the bytes as the config.json of tiny models. What must hold: nothing crashes, an error is
// one line that begins with the folder's name, and a model that loads takes tokens.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "bittern/model.h"
#include "model/test_model.h"

namespace {

using namespace bittern;
namespace fs = std::filesystem;

void must(bool holds) {
  if (!holds) std::abort();
}

class Folders {
 public:
  Folders() {
    for (const char* model : {"llama", "gemma3", "qwen3_next"}) {
      paths_.push_back(put_tiny_model(root_, model));
      fs::remove(paths_.back() + "/config.json");
      fs::create_symlink("/proc/self/fd/" + std::to_string(fd_), paths_.back() + "/config.json");
    }
  }

  const std::vector<std::string>& paths() const { return paths_; }
  void put(const std::uint8_t* data, std::size_t size) const {
    must(::ftruncate(fd_, static_cast<off_t>(size)) == 0);
    must(::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size));
  }

 private:
  TempFolder root_;
  std::vector<std::string> paths_;
  int fd_ = ::memfd_create("bittern_config", 0);
};

void run(const std::string& folder) {
  const auto model = Model::load(folder);
  if (!model) {
    must(model.status().message().starts_with(folder) &&
         model.status().message().find('\n') == std::string_view::npos);
    return;
  }
  auto session = Session::make(*model, {.context = 16});
  if (!session) return;
  const std::int32_t tokens[] = {3, 50, 7, 7, 90};
  must(session->append(tokens).ok());
  must(session->truncate(2).ok() && session->size() == 2);
  must(session->append(std::span(tokens, 1)).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folders folders;
  if (size == 0) return -1;
  folders.put(data, size);
  for (const std::string& folder : folders.paths()) run(folder);
  return 0;
}
