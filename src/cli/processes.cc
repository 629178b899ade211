#include "cli/processes.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string>

#include "bittern/environment.h"
#include "bittern/version.h"
#include "core/ranks.h"

namespace bittern::cli {
namespace {

Processes* joined = nullptr;

// How many processes Open MPI, or another that speaks PMI, has started; 1: none of them has; 0: one
// of them has, and MPI knows how many.
int started() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* text = std::getenv(name); text != nullptr) return std::max(1, std::atoi(text));
  return std::getenv("PMIX_RANK") != nullptr ? 0 : 1;
}

// Beside the command, or where it is installed.
std::string plugin_path() {
  std::error_code error;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* folder : {"", "../" BITTERN_LIBDIR "/bittern"}) {
    const auto path = own / folder / "libbittern_mpi.so";
    if (std::filesystem::exists(path, error)) return path;
  }
  return {};
}

}  // namespace

Status join_processes() {
  if (started() == 1) return {};
  const auto refuse = [&](const std::string& why) {
    return unavailable("started by mpirun, but " + why);
  };
  const std::string path = plugin_path();
  if (path.empty())
    return refuse("this build has no MPI: libbittern_mpi.so is not beside the command");
  // Global: Open MPI opens plug-ins of its own, which look for its names.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return refuse(dlerror());
  const auto entry = reinterpret_cast<ProcessesEntry>(dlsym(library, kProcessesEntry));
  joined = entry != nullptr ? entry(version()) : nullptr;
  if (joined == nullptr)
    return refuse(fmt::format("{} is of another build, expected bittern {}", path, version()));
  if (joined->count() == 1) {
    joined->finish();
    joined = nullptr;
    return {};
  }
  if (std::getenv("BITTERN_THREADS") == nullptr) {
    const auto cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    set_num_threads(std::clamp(cores / joined->here(), 1, num_threads()));
  }
  if (!speaks())
    if (const int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC); nothing >= 0) {
      dup2(nothing, STDOUT_FILENO);
      close(nothing);
    }
  return {};
}

Processes* processes() { return joined; }

bool speaks() { return rank_of(joined) == 0; }

}  // namespace bittern::cli
