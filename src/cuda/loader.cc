// Finds and checks libbittern_cuda.so. The core never links or includes CUDA.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <string>

#include "core/environment.h"
#include "core/guarded.h"
#include "cuda/plugin.h"

namespace bittern {
namespace {

// The directory, with its slash, of the program or library that this code is linked into. It comes
// from the kernel, because the dynamic linker and argv[0] may give a path relative to a directory
// that the program has left since.
std::string own_directory() {
  const auto self = reinterpret_cast<std::uintptr_t>(&own_directory);
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    // begin-end permissions offset device inode path
    std::istringstream fields(line);
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    fields >> std::hex >> begin >> dash >> end;
    if (fields.bad()) throw std::bad_alloc();
    if (!fields || self < begin || self >= end) continue;
    const std::size_t first = line.find('/'), last = line.rfind('/');
    if (first != std::string::npos) return line.substr(first, last + 1 - first);
  }
  if (maps.bad()) throw std::bad_alloc();  // which streams keep to themselves
  return {};
}

Status refuse(const std::string& path, std::string_view why) {
  return unavailable(std::string("cuda: ").append(path).append(": ").append(why));
}

struct Loaded {
  const CudaPlugin* plugin = nullptr;
  int devices = 0;
};

Result<Loaded> load(const std::string& path) {
  // Never unloaded: kernels may still be in flight when the process ends.
  void* const lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) return unavailable(std::string("cuda: ").append(dlerror()));
  const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(lib, kCudaPluginEntry));
  if (entry == nullptr) {
    return refuse(path, std::string("not a bittern plug-in (no ") + kCudaPluginEntry + ")");
  }
  const CudaPlugin* const plugin = entry();
  if (plugin == nullptr || plugin->abi != kCudaPluginAbi) {
    return refuse(path, std::string("from another build, expected bittern ") + version());
  }
  const char* why = "no device";
  const int devices = plugin->device_count(&why);
  if (devices <= 0) return refuse(path, why);
  return Loaded{plugin, devices};
}

Result<const CudaPlugin*> with_device(const Result<Loaded>& loaded, int index) {
  if (!loaded) return loaded.status();
  if (index < 0 || index >= loaded->devices) {
    return unavailable("cuda:" + std::to_string(index) + ": no such device, there are " +
                       std::to_string(loaded->devices));
  }
  return loaded->plugin;
}

Result<Loaded> find_and_load() {
  const auto path = cuda_plugin_path();
  if (!path) return path.status();
  return load(*path);
}

}  // namespace

Result<std::string> cuda_plugin_path() {
  const auto given = cuda_plugin_variable();
  throw_if_out_of_memory(given.status());
  if (!given) return unavailable("cuda: " + std::string(given.status().message()));
  if (*given != nullptr) return std::string(*given);
  const std::string own = own_directory();
  std::string tried;
  for (const std::string& directory :
       {own, own + "bittern/", own + "../" BITTERN_LIBDIR "/bittern/",
        std::string(BITTERN_PLUGIN_DIR "/")}) {
    if (directory[0] != '/') continue;
    const std::string path = directory + "libbittern_cuda.so";
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path;
    tried.append(tried.empty() ? "" : ", ").append(directory);
  }
  return unavailable("cuda: libbittern_cuda.so: no such file in " + tried);
}

Result<const CudaPlugin*> load_cuda_plugin(const std::string& path, int device_index) {
  return with_device(load(path), device_index);
}

Result<const CudaPlugin*> cuda_plugin(int device_index) {
  static const auto* const loaded = [] {
    Result<Loaded> found = find_and_load();
    throw_if_out_of_memory(found.status());
    return new Result<Loaded>(std::move(found));
  }();
  return with_device(*loaded, device_index);
}

}  // namespace bittern
