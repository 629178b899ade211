// What inspect_model and compare_models share.
#pragma once
#include "bittern/convert.h"
#include "formats/checkpoint.h"

namespace bittern {

ModelDescription describe(const Checkpoint& checkpoint);

}  // namespace bittern
