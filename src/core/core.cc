#include <algorithm>
#include <bit>
#include <new>

#include "bittern/device.h"
#include "bittern/tensor.h"
#include "bittern/version.h"

#define BITTERN_STRING_(x) #x
#define BITTERN_STRING(x) BITTERN_STRING_(x)

namespace bittern {

const char* version() noexcept {
  return BITTERN_STRING(BITTERN_VERSION_MAJOR) "." BITTERN_STRING(
      BITTERN_VERSION_MINOR) "." BITTERN_STRING(BITTERN_VERSION_PATCH);
}

const char* name(Code code) noexcept {
  constexpr const char* kNames[] = {"ok",          "invalid_argument", "unsupported",
                                    "unavailable", "out_of_memory",    "device_error",
                                    "io_error",    "internal",         "cancelled"};
  return kNames[static_cast<int>(code)];
}

constinit Status::Rep Status::no_memory_{Code::out_of_memory, "out of memory", 0};

Status Status::out_of_memory() noexcept {
  Status status;
  status.rep_ = &no_memory_;
  return status;
}

// The message follows its Rep in one piece of memory.
Status::Status(Code code, std::string_view message) noexcept {
  if (code == Code::ok) return;
  void* const memory = ::operator new(sizeof(Rep) + message.size(), std::nothrow);
  if (memory == nullptr) {
    rep_ = &no_memory_;
    return;
  }
  char* const text = static_cast<char*>(memory) + sizeof(Rep);
  std::copy(message.begin(), message.end(), text);
  rep_ = new (memory) Rep{code, {text, message.size()}, 1};
}

void Status::hold() const noexcept {
  if (rep_->holders.load(std::memory_order_relaxed) != 0)
    rep_->holders.fetch_add(1, std::memory_order_relaxed);
}

void Status::drop() noexcept {
  if (rep_->holders.load(std::memory_order_relaxed) == 0) return;
  if (rep_->holders.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  rep_->~Rep();
  ::operator delete(rep_);
}

const char* name(DType dtype) noexcept {
  constexpr const char* kNames[kDTypeCount] = {"f32", "f64", "f16", "bf16",
                                               "u8",  "s8",  "s32", "u32"};
  return kNames[static_cast<int>(dtype)];
}

std::size_t size_of(DType dtype) noexcept {
  constexpr std::size_t kSizes[kDTypeCount] = {4, 8, 2, 2, 1, 1, 4, 4};
  return kSizes[static_cast<int>(dtype)];
}

std::string name(Device device) noexcept {
  const bool cpu = device.type == Device::Type::cpu;
  try {
    if (cpu && device.index == 0) return "cpu";  // as far as anyone counts
    return (cpu ? "cpu:" : "cuda:") + std::to_string(device.index);
  } catch (const std::bad_alloc&) {
    return cpu ? "cpu" : "cuda";  // so short that it needs no memory
  }
}

Shape Shape::dense_strides() const noexcept {
  Shape stride = *this;
  std::int64_t step = 1;
  for (int i = rank; i-- > 0;) {
    stride[i] = step;
    step *= (*this)[i];
  }
  return stride;
}

std::string Axes::names_str() const noexcept try {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text.append(i == 0 ? "" : ",").append(name(i));
  return text + "]";
} catch (...) {
  return "[...]";
}

std::string Shape::str() const noexcept try {
  std::string s = "[";
  for (int i = 0; i < rank; ++i) {
    if (i != 0) s += ',';
    s += std::to_string((*this)[i]);
  }
  return s + ']';
} catch (...) {
  return "[...]";
}

float to_f32(f16 x) noexcept {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

f16 to_f16(float x) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const auto make = [&](std::uint32_t bits) {
    return f16{static_cast<std::uint16_t>(sign | bits)};
  };
  if (magnitude > 0x7f800000u) return make(0x7e00u);
  if (magnitude >= 0x477ff000u) return make(0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: the sum with 1/2 rounds to the f16 grid, whose spacing here is 2^-24.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return make(std::bit_cast<std::uint32_t>(sum) - 0x3f000000u);
  }
  return make((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13);
}

bf16 to_bf16(float x) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

}  // namespace bittern
