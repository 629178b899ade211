// Finds and checks libbittern_cuda.so. The core never links or includes CUDA.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "cuda/plugin.h"

namespace bittern {
namespace {

// Beside the program or library that holds this code, then where it is installed; never the current
// directory, which may hold someone else's file.
std::string find_plugin() {
  Dl_info self{};
  std::string directory;
  if (dladdr(reinterpret_cast<const void*>(&find_plugin), &self) != 0 &&
      self.dli_fname != nullptr) {
    directory = self.dli_fname;
    const std::size_t slash = directory.rfind('/');
    directory = slash == std::string::npos ? std::string() : directory.substr(0, slash + 1);
  }
  std::string tried;
  for (const char* below : {"", "bittern/", "../lib/bittern/"}) {
    if (directory.empty()) break;
    const std::string path = directory + below + "libbittern_cuda.so";
    if (void* lib = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL)) {
      dlclose(lib);
      return path;
    }
    if (FILE* file = std::fopen(path.c_str(), "rb")) {
      std::fclose(file);
      return path;
    }
  }
#ifdef BITTERN_PLUGIN_DIR
  return BITTERN_PLUGIN_DIR "/libbittern_cuda.so";
#else
  return directory + "libbittern_cuda.so";
#endif
}

struct Loaded {
  Result<const CudaPlugin*> plugin;
  int devices = 0;
};

Loaded load() {
  const char* given = std::getenv("BITTERN_CUDA_PLUGIN");
  Loaded loaded{load_cuda_plugin(given != nullptr ? given : find_plugin())};
  if (loaded.plugin) {
    const char* why = "no device";
    loaded.devices = (*loaded.plugin)->device_count(&why);
    if (loaded.devices == 0) loaded.plugin = unavailable(std::string("cuda: ").append(why));
  }
  return loaded;
}

}  // namespace

Result<const CudaPlugin*> load_cuda_plugin(const std::string& path) {
  // Never unloaded: kernels may still be in flight when the process ends.
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) return unavailable(std::string("cuda: ").append(dlerror()));
  const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(lib, kCudaPluginEntry));
  if (entry == nullptr) {
    return unavailable("cuda: " + path + ": not a bittern plug-in (no " + kCudaPluginEntry + ")");
  }
  const CudaPlugin* plugin = entry();
  if (plugin == nullptr || plugin->abi != kCudaPluginAbi) {
    return unavailable("cuda: " + path + ": built for another version of bittern, expected " +
                       version());
  }
  return plugin;
}

Result<const CudaPlugin*> cuda_plugin(int device_index) {
  static const auto* const loaded = new Loaded(load());
  if (!loaded->plugin) return loaded->plugin.status();
  if (device_index < 0 || device_index >= loaded->devices) {
    return unavailable("cuda:" + std::to_string(device_index) + ": no such device, there are " +
                       std::to_string(loaded->devices));
  }
  return *loaded->plugin;
}

}  // namespace bittern
