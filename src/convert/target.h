// Which storage each tensor takes when all of them share a number of bytes: --target-bpw.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bittern {

// What a tensor may become: its size and the squared error that costs; infinite where it cannot.
struct SizedLoss {
  std::uint64_t bytes = 0;
  double loss = 0;
};

// Of each tensor one choice, by its number, so that all together have at most `room` bytes and
// lose little. Every tensor has a finite choice, and the smallest of all fit into `room`. `uniform`
// lists whole answers that the result must not lose to where they fit.
//
// Per tensor, the lower convex hull of (bytes, loss) is a chain of steps, each of which gains less
// per byte than the one before. Taking the steps of all tensors by gain per byte gives, after each
// step, the least loss that any answer of that size has. `room` falls between two such answers.
// Between them stand the smaller one, the uniform answers, and each of these filled with steps that
// fit into the gap, its half, its quarter, ...: a list that does not depend on `room`. The best
// that fits is taken. So more room never means more loss: inside a gap the list only grows, and no
// answer inside a gap beats the one at its end.
std::vector<std::size_t> choose_within(const std::vector<std::vector<SizedLoss>>& choices,
                                       const std::vector<std::vector<std::size_t>>& uniform,
                                       std::uint64_t room);

}  // namespace bittern
