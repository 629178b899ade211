// Several processes that do one job together (docs/adr/0016). Calls that can share their work take
// a pointer in their options (EvalOptions::ranks, QuantizeOptions::ranks); null: one process.
//
// Every process makes the same call with the same options, on files that all of them see. Process 0
// writes what there is to write, and its report counts. Results have the bits of one process.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// All functions but rank() and count() are collective: each process calls them in the same order,
// from one thread. An implementation may throw std::bad_alloc.
class Ranks {
 public:
  virtual ~Ranks() = default;

  virtual int rank() const noexcept = 0;  // 0 to count() - 1
  virtual int count() const noexcept = 0;

  // The bytes of process 0 replace those of all others. Sizes are the same everywhere.
  virtual Status broadcast(std::span<std::byte> bytes) = 0;
  // The bytes of all processes in the order of their ranks; sizes may differ.
  virtual Status gather(std::span<const std::byte> own,
                        std::vector<std::vector<std::byte>>& all) = 0;
  // The same in process 0 alone; elsewhere `all` becomes empty.
  virtual Status collect(std::span<const std::byte> own,
                         std::vector<std::vector<std::byte>>& all) = 0;

  // Whether to go on: ok if all processes say so, otherwise the error of the first that does not.
  // After an error nothing is exchanged any more: every later call returns it at once, or what is
  // said to it then. So whoever fails, wherever that is, says so here, and meets the others at
  // their next agree().
  Status agree(const Status& own) noexcept;

 private:
  Status ended_;
};

}  // namespace bittern
