// What the tests on a GPU share.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "oracle/oracle_impl.h"
#include "oracle/oracle_test.h"

namespace bittern::gpu_test {

inline constexpr Device kDevice{Device::Type::cuda, 0};

inline const CudaPlugin& gpu() { return **cuda_plugin(0); }

inline bool is_emulated() {
  CudaDeviceInfo info;
  return gpu().info(0, &info).ok() && info.name.find("emulated") != std::string::npos;
}

// Device memory for the length of a test, all zeros.
class Memory {
 public:
  static Result<std::unique_ptr<Memory>> make(std::size_t bytes, bool zeros = true) {
    std::unique_ptr<Memory> memory(new Memory());
    if (Status s = gpu().alloc(0, std::max<std::size_t>(bytes, 1), &memory->data_); !s.ok())
      return s;
    const std::vector<std::byte> nothing(zeros ? bytes : 0);
    if (Status s = gpu().copy(memory->data_, nothing.data(), nothing.size()); !s.ok()) return s;
    return memory;
  }
  ~Memory() {
    if (data_ != nullptr) gpu().release(0, data_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  Memory() = default;
  void* data_ = nullptr;
};

// A stream that does not wait for the default one.
class OwnStream {
 public:
  OwnStream() : status_(gpu().make_stream(0, &stream_)) {}
  ~OwnStream() {
    if (status_.ok()) gpu().end_stream(0, stream_);
  }
  const Status& status() const { return status_; }
  Stream get() const { return stream_; }

 private:
  Stream stream_{};
  Status status_;
};

// visit.operator()<Op>() for each op that has a kernel on the device.
template <class F>
void for_each_cuda_op(F&& visit) {
#define BITTERN_OP(T, f, CPU, CUDA) \
  BITTERN_IF_##CUDA(if (!gpu().f.empty()) visit.template operator()<T>();)
#include "ops/ops.inc"
}

// Every layout of a problem against `ref`; how many were compared.
template <class Op>
std::int64_t compare_with_ref(const typename Op::Desc& d) {
  SCOPED_TRACE(Op::kName);
  const auto report = oracle::parity<Op>(d, {.cpu = false});
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  return report.compared_cuda;
}

}  // namespace bittern::gpu_test
