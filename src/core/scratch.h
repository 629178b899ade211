// Memory for one run of a plan.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bittern/plan.h"

namespace bittern {

// As many bytes as plan.workspace_bytes() says, from the start of a cache line on.
class AlignedScratch {
 public:
  explicit AlignedScratch(std::size_t bytes) : bytes_(bytes), memory_(bytes + kLine) {}

  Workspace workspace() {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    return {memory_.data() + (kLine - at % kLine) % kLine, bytes_};
  }

 private:
  static constexpr std::size_t kLine = 64;
  std::size_t bytes_;
  std::vector<std::byte> memory_;
};

}  // namespace bittern
