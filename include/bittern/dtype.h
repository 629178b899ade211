// Scalar element types. A packed low-bit code has no address, so packings are not dtypes: they
// belong to an op's descriptor, over u8 or u32 storage.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "bittern/status.h"

namespace bittern {

enum class DType : std::uint8_t { f32, f64, f16, bf16, u8, s8, s32, u32 };
inline constexpr int kDTypeCount = 8;

const char* name(DType dtype) noexcept;
std::size_t size_of(DType dtype) noexcept;

// Storage types; the layout is that of IEEE binary16 and of the upper half of a binary32.
struct f16 {
  std::uint16_t bits;
};
struct bf16 {
  std::uint16_t bits;
};

float to_f32(f16 x) noexcept;
inline float to_f32(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Nearest even; NaN stays NaN (quiet), overflow goes to infinity, subnormals are kept.
f16 to_f16(float x) noexcept;
bf16 to_bf16(float x) noexcept;

// The type arithmetic is done in: f64 for f64, f32 for all else.
template <class T>
using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
Math<T> to_math(T x) {
  if constexpr (std::is_same_v<T, f16> || std::is_same_v<T, bf16>) {
    return to_f32(x);
  } else {
    return static_cast<Math<T>>(x);
  }
}

template <class T>
T from_math(Math<T> x) {
  if constexpr (std::is_same_v<T, f16>) {
    return to_f16(x);
  } else if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(x);
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
struct Type {
  using type = T;
};

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) {
    return DType::f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::f64;
  } else if constexpr (std::is_same_v<T, f16>) {
    return DType::f16;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return DType::bf16;
  } else if constexpr (std::is_same_v<T, std::uint8_t>) {
    return DType::u8;
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    return DType::s8;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return DType::s32;
  } else {
    static_assert(std::is_same_v<T, std::uint32_t>);
    return DType::u32;
  }
}

// Calls f(Type<T>{}) for the T among Ts that `dtype` names. An unlisted dtype is an error, never a
// silent no-op.
template <class... Ts, class F>
Status visit(DType dtype, F&& f) {
  Status status;
  const bool found = ((dtype == dtype_of<Ts>() && (void(status = f(Type<Ts>{})), true)) || ...);
  return found ? std::move(status) : unsupported(std::string("dtype ").append(name(dtype)));
}

// The dtypes an op's float operands may have.
template <class F>
Status visit_float(DType dtype, F&& f) {
  return visit<float, double, f16, bf16>(dtype, static_cast<F&&>(f));
}
constexpr bool is_float(DType t) {
  return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16;
}
constexpr bool is_half(DType t) { return t == DType::f16 || t == DType::bf16; }

}  // namespace bittern
