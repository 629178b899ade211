// Which inputs a matrix of the decoder is multiplied with.
#pragma once
#include <optional>

#include "bittern/model.h"
#include "convert/naming.h"

namespace bittern {

struct ProductSource {
  ProductPlace place;
  bool experts = false, shared = false;
};
// Those of a quantity's rows; nothing: it is no matrix of a product in a layer.
std::optional<ProductSource> input_of(Q quantity);

}  // namespace bittern
