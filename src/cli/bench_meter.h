// Memory, clocks and limits of the device a benchmark runs on.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern::cli {

double median(std::vector<double> values);

class Meter {
 public:
  virtual ~Meter() = default;
  Device device() const { return device_; }
  // How many bytes a copy reads; it writes as many.
  std::size_t copy_bytes() const { return copy_bytes_; }

  // Memory for an operand; lives as long as the meter or until release_all().
  virtual Result<void*> allocate(std::size_t bytes) = 0;
  virtual void release_all() = 0;
  // Host data to the device; only when host() is false.
  virtual Status upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual bool host() const = 0;

  // Seconds per call of `work`, or its error.
  virtual Result<double> time(const std::function<Status()>& work) = 0;
  // Seconds for one copy by the better of the ways this device has.
  virtual Result<double> time_copy() = 0;

 protected:
  Meter(Device device, std::size_t copy_bytes) : device_(device), copy_bytes_(copy_bytes) {}
  Device device_;
  std::size_t copy_bytes_;
};

// What the CPU can do at best, measured before the ops.
struct CpuLimits {
  double streaming_gb_s = 0;  // loads and whole-line non-temporal stores
  double memcpy_gb_s = 0;
  double read_gb_s = 0;          // loads alone: what an op that writes next to nothing can reach
  double gemm_gflop_s = 0;       // of f32
  double gemm_bf16_gflop_s = 0;  // 0: this CPU multiplies no bf16
};

// Measures copies of `copy_bytes` bytes and GEMMs of size n^3, `repeat` times each.
Result<std::unique_ptr<Meter>> cpu_meter(std::size_t copy_bytes, int gemm_size, int repeat,
                                         CpuLimits& limits);
Result<std::unique_ptr<Meter>> cuda_meter(int index, std::size_t copy_bytes);

}  // namespace bittern::cli
