// --target-bpw: chooses a storage for each tensor so that all fit into a given number of bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bittern {

// A choice for a tensor: its size and its squared error, which is infinite if it is impossible.
struct SizedLoss {
  std::uint64_t bytes = 0;
  double loss = 0;
};

// Returns one choice per tensor, by its number, so that all together have at most `room` bytes and
// a small loss. Every tensor has a finite choice, and the smallest choices of all fit into `room`.
// `uniform` lists whole answers: the result must not be worse than any of them that fits.
//
// Per tensor, the lower convex hull of (bytes, loss) is a chain of steps, each of which gains less
// per byte than the one before. Taking the steps of all tensors by gain per byte gives, after each
// step, the least loss that any answer of that size has. `room` falls between two such answers. The
// candidates in this gap are the smaller one, the uniform answers, and each of these filled up with
// steps that fit into the gap, its half, its quarter, ... This list does not depend on `room`. The
// best candidate that fits is taken. So more room never means more loss: with more room, more of
// the list fits, and no answer inside a gap is better than the one at its end.
std::vector<std::size_t> choose_within(const std::vector<std::vector<SizedLoss>>& choices,
                                       const std::vector<std::vector<std::size_t>>& uniform,
                                       std::uint64_t room);

}  // namespace bittern
