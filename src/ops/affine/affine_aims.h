#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// The same for the affine ops: groups of 2 3 5 32 48 64 80 96 128 1000 1024, bits and bins,
// storages.
std::vector<AffineDesc> affine_cases();

}  // namespace bittern::oracle
