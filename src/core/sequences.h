// Where each sequence begins and ends. Tokens are counted over the whole tensor, batch rows one
// after the other.
#pragma once
#include <cstdint>
#include <vector>

#include "bittern/sequences.h"

namespace bittern {

struct Sequence {
  std::int64_t begin = 0, end = 0;  // tokens
  std::int64_t first_chunk = 0;     // chunks of the sequences before it
};

std::vector<Sequence> sequences_of(const Sequences& s, const ConstView& cu_seqlens);

}  // namespace bittern
