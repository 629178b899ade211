// Non-owning, strided views. Strides count elements, as in DLPack.
#pragma once
#include <array>
#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "bittern/device.h"
#include "bittern/dtype.h"

namespace bittern {

inline constexpr int kMaxRank = 6;

struct Shape {
  int rank = 0;
  std::array<std::int64_t, kMaxRank> dim{};

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) {
    assert(dims.size() <= kMaxRank);
    for (const std::int64_t v : dims) dim[static_cast<std::size_t>(rank++)] = v;
  }
  std::int64_t operator[](int i) const { return dim[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return dim[static_cast<std::size_t>(i)]; }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= (*this)[i];
    return n;
  }
  // The strides of a dense row-major tensor of this shape.
  Shape dense_strides() const noexcept;
  std::string str() const noexcept;  // "[2,128]"; "[...]" without memory for more
  bool operator==(const Shape&) const = default;
};

struct Axis {
  const char* name;
  std::int64_t size;
};

// A shape whose axes have names. An axis that follows from fields of the descriptor is named by
// them: "tokens", "sequences+1", "sequences*kv_heads", "capacity/page_size". A constant is named
// by its digits, and a length that does not tell a field has a name of its own: "words".
struct Axes : Shape {
  std::array<const char*, kMaxRank> names{};

  Axes() = default;
  Axes(std::initializer_list<Axis> axes) {
    assert(axes.size() <= kMaxRank);
    for (const Axis& axis : axes) {
      names[static_cast<std::size_t>(rank)] = axis.name;
      dim[static_cast<std::size_t>(rank++)] = axis.size;
    }
  }
  const char* name(int i) const { return names[static_cast<std::size_t>(i)]; }
  std::string names_str() const noexcept;  // "[rows,words]"; "[...]" without memory for more
};

template <class Void>
struct View {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape;
  Shape stride;

  template <class T>
  auto* as() const {
    assert(data == nullptr || dtype == dtype_of<T>());  // left out: any dtype
    if constexpr (std::is_const_v<Void>) {
      return static_cast<const T*>(data);
    } else {
      return static_cast<T*>(data);
    }
  }
  explicit operator bool() const { return data != nullptr; }
  // A view that may be written can be used as one that is only read.
  template <class Const>
    requires(std::is_const_v<Const> && !std::is_const_v<Void>)
  operator View<Const>() const {
    return {data, dtype, device, shape, stride};
  }
  // The offset, in elements, of the element with these indices of the leading axes.
  template <class... Index>
  std::int64_t at(Index... index) const {
    std::size_t axis = 0;
    std::int64_t offset = 0;
    ((offset += index * stride.dim[axis++]), ...);
    return offset;
  }
  // The distance, in elements, from one index of the first axis to the next.
  std::int64_t row_stride() const { return stride[0]; }
};

using ConstView = View<const void>;  // an input
using MutView = View<void>;          // an output

// A dense view of `data`. Leave an optional operand out by passing {} instead.
template <class T>
auto view(T* data, const Shape& shape, Device device = {}) {
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  return View<Void>{data, dtype_of<std::remove_const_t<T>>(), device, shape, shape.dense_strides()};
}

// The same, with `row_stride` elements between consecutive rows.
template <class T>
auto view(T* data, const Shape& shape, std::int64_t row_stride) {
  auto v = view(data, shape);
  v.stride[0] = row_stride;
  return v;
}

inline ConstView as_const(const MutView& v) { return v; }

}  // namespace bittern
