// Memory, clocks and limits of the device a benchmark runs on.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern::cli {

double median(std::vector<double> values);

// What an op is compared with: so many bytes moved, or operations done.
enum class Limit { copy, read, f32_peak, bf16_peak, int8_peak };

class Meter {
 public:
  virtual ~Meter() = default;
  Device device() const { return device_; }
  // How many bytes a copy reads; it writes as many.
  std::size_t copy_bytes() const { return copy_bytes_; }
  // What is timed goes here.
  virtual Stream stream() const { return {}; }

  // Memory for an operand; lives as long as the meter or until release_all().
  virtual Result<void*> allocate(std::size_t bytes) = 0;
  virtual void release_all() = 0;
  // Host data to the device; only when host() is false.
  virtual Status upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual bool host() const = 0;

  // Calls take turns with this many sets of operands of `bytes` bytes each, so that none finds its
  // own in the cache.
  virtual int sets(std::size_t bytes, Limit limit) const = 0;
  // How many calls of `seconds` seconds make a sample.
  virtual int calls(double seconds) const = 0;
  // Seconds per call of work(0), work(1), ... work(calls - 1), or its error.
  using Work = std::function<Status(int call)>;
  virtual Result<double> time(const Work& work, int calls) = 0;
  // How much a second of this limit does, measured now: GB/s (of a copy, read plus written) or
  // GFLOP/s. A copy is made by the better of the ways this device has. Unsupported if the device
  // cannot measure it.
  virtual Result<double> rate(Limit limit) = 0;
  virtual double seconds(Limit limit) const = 0;  // about how long that takes

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
  double gemm_gflop_s = 0;       // of f32; 0: built without oneDNN
  double gemm_bf16_gflop_s = 0;  // 0: this CPU multiplies no bf16
  // Of instructions on registers, twice the multiply-adds. 0: this CPU has no AVX2; of bf16, no
  // AVX512_BF16.
  double f32_gflop_s = 0, bf16_gflop_s = 0, int8_gflop_s = 0;
};

// Measures copies of `copy_bytes` bytes and GEMMs of size n^3, `repeat` times each.
Result<std::unique_ptr<Meter>> cpu_meter(std::size_t copy_bytes, int gemm_size, int repeat,
                                         CpuLimits& limits);

struct CudaLimits {
  std::string name;
  int multiprocessors = 0;
  std::size_t l2_bytes = 0;
  double memcpy_gb_s = 0;        // cudaMemcpyAsync
  double kernel_gb_s = 0;        // a copy kernel
  double gemm_bf16_gflop_s = 0;  // 0: not measured, for this reason
  std::string no_gemm;
};

// Measures copies of `caches` times the device's L2 and a GEMM of size n^3, `repeat` times each.
Result<std::unique_ptr<Meter>> cuda_meter(int index, int caches, int gemm_size, int repeat,
                                          CudaLimits& limits);

}  // namespace bittern::cli
