// Environment variables that more than one part of the library reads.
#pragma once
#include <cstdlib>
#include <string>
#include <utility>

#include "bittern/status.h"
#include "core/guarded.h"

namespace bittern {

// BITTERN_CUDA_PLUGIN; null where it is not set.
inline Result<const char*> cuda_plugin_variable() {
  const char* given = std::getenv("BITTERN_CUDA_PLUGIN");
  if (given == nullptr || given[0] == '/') return given;
  return invalid(std::string("BITTERN_CUDA_PLUGIN: ") + (given[0] != '\0' ? given : "empty") +
                 ", expected an absolute path");
}

// Whether it is one, as it was when first asked.
inline Status check_cuda_plugin_variable() {
  static const Status* const read = [] {
    Status status = cuda_plugin_variable().status();
    throw_if_out_of_memory(status);
    return new Status(std::move(status));
  }();
  return *read;
}

}  // namespace bittern
