// Environment variables that more than one part of the library reads.
#pragma once
#include <cstdlib>
#include <string>

#include "bittern/status.h"

namespace bittern {

// BITTERN_CUDA_PLUGIN; null where it is not set.
inline Result<const char*> cuda_plugin_variable() {
  const char* given = std::getenv("BITTERN_CUDA_PLUGIN");
  if (given == nullptr || given[0] == '/') return given;
  return invalid(std::string("BITTERN_CUDA_PLUGIN: ") + (given[0] != '\0' ? given : "empty") +
                 ", expected an absolute path");
}

}  // namespace bittern
