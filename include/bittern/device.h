// Where an op runs and how many CPU threads it may use.
#pragma once
#include <cstdint>
#include <string>

namespace bittern {

struct Device {
  enum class Type : std::uint8_t { cpu = 1, cuda = 2 };  // DLPack's numbers
  Type type = Type::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

// "cpu", "cuda:0"; without memory for the index, "cuda".
std::string name(Device device) noexcept;

// A CUDA stream for a CUDA plan (null: the default stream). CPU plans run on the calling thread
// and its team and ignore it.
struct Stream {
  void* native = nullptr;
};

// The number of threads CPU kernels use, unless their plan has its own (Plan::select): what was set
// here, else BITTERN_THREADS, else one per core. Results never depend on it. A value below 1
// restores the default.
int num_threads() noexcept;
void set_num_threads(int threads) noexcept;

}  // namespace bittern
