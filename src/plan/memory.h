// Memory on the host or on a CUDA device, for what owns operands of plans.
#pragma once
#include <cstddef>
#include <string_view>

#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern {

inline bool on_host(Device device) { return device == Device{}; }

// Whether the device is there; if not, what is missing, after `owner`.
Status expect_device(std::string_view owner, Device device);

// A copy within one device's memory, or from the host to it, in the order of the stream. The source
// on the host may change once the call returns.
Status copy_on(Device device, void* to, const void* from, std::size_t bytes, Stream stream);
// A copy from anywhere to anywhere; what is under way on either device is waited for by the caller
// (wait_for), before and after.
Status transfer(Device to_device, void* to, Device from_device, const void* from,
                std::size_t bytes);
Status wait_for(Device device);

class Memory {
 public:
  explicit Memory(Device device = {}) : device_(device) {}
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory() { release(); }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // Makes it larger, if it is smaller. The bytes that it has stay, those that are new are anything.
  // A call that fails, or throws, changes nothing.
  Status grow(std::size_t bytes, Stream stream);

 private:
  void release() noexcept;
  Device device_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace bittern
