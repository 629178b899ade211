#pragma once

#define BITTERN_VERSION_MAJOR 0
#define BITTERN_VERSION_MINOR 1
#define BITTERN_VERSION_PATCH 0

namespace bittern {

const char* version() noexcept;  // "0.1.0"

}  // namespace bittern
