#include "plan/memory.h"

#include <cstring>
#include <string>
#include <utility>

#include "cuda/plugin.h"

namespace bittern {

namespace {

// Of a device that expect_device has found.
const CudaPlugin& gpu(Device device) { return **cuda_plugin(device.index); }

}  // namespace

Status expect_device(std::string_view owner, Device device) {
  if (on_host(device)) return {};
  const std::string where = std::string(owner).append(": device: ");
  if (device.type == Device::Type::cpu) return invalid(where + name(device) + ", expected cpu");
  if (device.type != Device::Type::cuda) {
    return invalid(where + "type " + std::to_string(static_cast<int>(device.type)) +
                   ", expected that of cpu or cuda");
  }
  const auto plugin = cuda_plugin(device.index);
  if (plugin) return {};
  return {plugin.status().code(), where + std::string(plugin.status().message())};
}

Status copy_on(Device device, void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  if (!on_host(device)) return gpu(device).stream_copy(device.index, stream, to, from, bytes);
  std::memcpy(to, from, bytes);
  return {};
}

Status transfer(Device to_device, void* to, Device from_device, const void* from,
                std::size_t bytes) {
  if (bytes == 0) return {};
  const Device device = on_host(to_device) ? from_device : to_device;
  if (!on_host(device)) return gpu(device).copy(to, from, bytes);
  std::memcpy(to, from, bytes);
  return {};
}

Status wait_for(Device device) {
  return on_host(device) ? Status() : gpu(device).synchronize(device.index);
}

Memory::Memory(Memory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this != &other) {
    release();
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void Memory::release() noexcept {
  if (on_host(device_)) {
    delete[] data_;
  } else if (data_ != nullptr) {
    (void)wait_for(device_);  // a kernel may still use it
    gpu(device_).release(device_.index, data_);
  }
  data_ = nullptr;
  size_ = 0;
}

Status Memory::grow(std::size_t bytes, Stream stream) {
  if (bytes <= size_) return {};
  Memory larger(device_);
  if (on_host(device_)) {
    larger.data_ = new std::byte[bytes];  // what nobody writes to takes no memory
  } else {
    void* memory = nullptr;
    if (Status s = gpu(device_).alloc(device_.index, bytes, &memory); !s.ok()) {
      return {s.code(), "memory: " + std::to_string(bytes) + " bytes on " + name(device_) + ": " +
                            std::string(s.message())};
    }
    larger.data_ = static_cast<std::byte*>(memory);
  }
  larger.size_ = bytes;
  BITTERN_TRY(copy_on(device_, larger.data_, data_, size_, stream));
  *this = std::move(larger);
  return {};
}

}  // namespace bittern
