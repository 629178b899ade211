#include "model/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>
#include <string_view>

namespace bittern {
namespace {
constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr std::size_t kLine = 64;

Status no_memory(std::size_t bytes) {
  return {Code::out_of_memory, "no memory for " + std::to_string(bytes) + " bytes"};
}
std::byte* map(std::size_t bytes) {
  void* const start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : static_cast<std::byte*>(start);
}
}  // namespace

Result<LargePages> LargePages::make(std::size_t bytes) {
  LargePages pages;
  if (bytes == 0) return pages;
  if (bytes < kLargePage) {
    pages.data_ = map(bytes);
    if (pages.data_ == nullptr) return no_memory(bytes);
    pages.bytes_ = bytes;
    return pages;
  }
  // A mapping begins on a small page: one large page more leaves room for a large page's border.
  const std::size_t size = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  std::byte* const first = map(size + kLargePage);
  if (first == nullptr) return no_memory(bytes);
  const std::size_t skip =
      (kLargePage - reinterpret_cast<std::uintptr_t>(first) % kLargePage) % kLargePage;
  if (skip > 0) munmap(first, skip);
  if (skip < kLargePage) munmap(first + skip + size, kLargePage - skip);
  pages.data_ = first + skip;
  pages.bytes_ = size;
  (void)madvise(pages.data_, size, MADV_HUGEPAGE);  // without it, small pages do
  return pages;
}

LargePages::~LargePages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::byte* Scratch::take(std::size_t bytes) {
  bytes = (bytes + kLine - 1) / kLine * kLine;
  while (at_.block < blocks_.size() && blocks_[at_.block].bytes() - at_.used < bytes)
    at_ = {at_.block + 1, 0};
  if (at_.block == blocks_.size()) {
    constexpr std::size_t kLeast = std::size_t{1} << 20;
    auto block = LargePages::make(std::max(bytes, kLeast));
    if (!block) throw std::bad_alloc();
    blocks_.push_back(std::move(*block));
  }
  std::byte* const data = blocks_[at_.block].data() + at_.used;
  at_.used += bytes;
  return data;
}

std::optional<std::uint64_t> available_memory() {
  std::optional<std::uint64_t> bytes;
  std::ifstream system("/proc/meminfo");
  for (std::string line; std::getline(system, line);) {
    constexpr std::string_view kName = "MemAvailable:";
    if (line.starts_with(kName))
      bytes = std::strtoull(line.c_str() + kName.size(), nullptr, 10) << 10;
  }
  std::ifstream container("/sys/fs/cgroup/memory.max");  // "max" where there is no limit
  if (std::uint64_t limit = 0; container >> limit) bytes = std::min(limit, bytes.value_or(limit));
  return bytes;
}

}  // namespace bittern
