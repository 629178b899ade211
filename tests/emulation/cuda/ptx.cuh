// What src/cuda/ptx.cuh does with instructions, done in plain C++.
#pragma once
#include <cstdint>

#include "bittern/dtype.h"
#include "emulation.h"

namespace bittern::cuda {

inline void pin(std::uint32_t&) {}
inline uint4 load_here(const uint4* p) { return *p; }
inline void prefetch_l2(const void*) {}
inline float ordinary_reciprocal(float x) { return 1.0f / x; }

inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(static_cast<const std::byte*>(p) -
                               static_cast<const std::byte*>(emulation::dynamic_shared()));
}
template <class T>
inline T load_shared(unsigned address) {
  T x;
  std::memcpy(&x, static_cast<const std::byte*>(emulation::dynamic_shared()) + address, sizeof x);
  return x;
}

inline void copy_async_16(void* shared, const void* global, int bytes = 16) {
  std::memcpy(shared, global, static_cast<std::size_t>(bytes));
  std::memset(static_cast<std::byte*>(shared) + bytes, 0, static_cast<std::size_t>(16 - bytes));
}
inline void copy_async_4(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void copy_async_commit() {}
template <int kPending>
inline void copy_async_wait() {}

inline constexpr bool kHasBulkCopies = true;
inline void fence_shared() {}
inline void bulk_copies_commit() {}
inline void bulk_copy_out(void* global, const void* shared, int bytes) {
  std::memcpy(global, shared, static_cast<std::size_t>(bytes));
}
template <int kPending = 0>
inline void bulk_copy_out_wait() {}
inline void arrival_init(std::uint64_t*) {}
inline void arrival_expect(std::uint64_t*, int) {}
inline void arrival_wait(std::uint64_t*, std::uint32_t) {}
struct BulkCopiesIn {
  explicit BulkCopiesIn(std::uint64_t*) {}
  void expect(int) const {}
  void start(void* shared, const void* global, int bytes) const {
    std::memcpy(shared, global, static_cast<std::size_t>(bytes));
  }
  void wait() const {}
};

inline void barrier_wait(int barrier, int threads) {
  emulation::named_barrier(barrier, threads, true);
}
inline void barrier_arrive(int barrier, int threads) {
  emulation::named_barrier(barrier, threads, false);
}

inline void begin_next_kernel() {}
inline void wait_for_last_kernel() {}

// As wrong as the instructions may be, now up, now down.
inline float approximate_exp2(float x) {
  if (std::fabs(x) < 0x1p-126f) return 1;
  const double error = __float_as_uint(x) % 3 * 0x1p-22 - 0x1p-22;
  const auto y = static_cast<float>(std::exp2(static_cast<double>(x)) * (1 + error));
  return y < 0x1p-126f ? 0.0f : y;
}
inline float approximate_log2(float x) {
  if (std::fabs(x) < 0x1p-126f) return -std::numeric_limits<float>::infinity();
  const double y = std::log2(static_cast<double>(x));
  const double error = __float_as_uint(x) % 3 * 0x1p-22 - 0x1p-22;
  return static_cast<float>(y + error * std::max(std::fabs(y), 1.0));
}
inline float approximate_reciprocal(float x) {
  const float y = 1 / x;
  const unsigned bits = __float_as_uint(x);
  if (bits << 9 == 0 || !(y >= 0x1p-126f)) return y >= 0x1p-126f ? y : 0.0f * y;
  return __uint_as_float(__float_as_uint(y) + bits % 3 - 1);
}

inline std::uint32_t opaque(std::uint32_t x) { return x; }
template <class T>
inline T* opaque(T* p) {
  return p;
}

inline int uniform(int x) { return x; }
inline bool elected() { return emulation::lane() == 0; }

namespace emulated {

inline void load_tiles(std::uint32_t (&to)[4], const void* row, bool transposed) {
  const emulation::Slot* slots = emulation::exchange(~0u, &row, sizeof row);
  const int lane = emulation::lane(), r = lane / 4, c = 2 * (lane % 4);
  for (int tile = 0; tile < 4; ++tile) {
    const auto element = [&](int i, int j) {
      const std::uint16_t* address;
      std::memcpy(&address, slots[8 * tile + i].bytes, sizeof address);
      return static_cast<std::uint32_t>(address[j]);
    };
    to[tile] = transposed ? element(c, r) | element(c + 1, r) << 16
                          : element(r, c) | element(r, c + 1) << 16;
  }
  __syncwarp();  // the caller may overwrite the tiles only when every lane has read them
}

// A sum as wrong as tensor cores may make it: within 10.5 * 2^-24 of the sizes, now up, now down.
class Sum {
 public:
  explicit Sum(float first) : exact_(first), size_(std::fabs(first)) {}
  void add(double term) {
    exact_ += term;
    size_ += std::fabs(term);
  }
  float rounded() const {
    if (!std::isfinite(size_)) return static_cast<float>(exact_);
    const auto nearest = static_cast<float>(exact_);
    const double error = (__float_as_uint(nearest) * 2654435761u >> 30) % 3 - 1.0;
    return static_cast<float>(exact_ + error * 10 * 0x1p-24 * size_);
  }

 private:
  double exact_, size_;
};

template <class T>
void multiply(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  std::uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const emulation::Slot* slots = emulation::exchange(~0u, mine, sizeof mine);
  const auto half = [&](int lane, int word, int high) -> float {
    std::uint32_t bits;
    std::memcpy(&bits, slots[lane].bytes + 4 * word, sizeof bits);
    return to_f32(T{static_cast<std::uint16_t>(bits >> 16 * high)});
  };
  const int lane = emulation::lane(), r = lane / 4, c = 2 * (lane % 4);
  for (int i = 0; i < 4; ++i) {
    const int row = r + 8 * (i / 2), column = c + i % 2;
    Sum sum(d[i]);
    for (int k = 0; k < 16; ++k) {
      const float x = half(row % 8 * 4 + k % 8 / 2, row / 8 + 2 * (k / 8), k % 2);
      const float y = half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      sum.add(static_cast<double>(x) * static_cast<double>(y));
    }
    d[i] = sum.rounded();
  }
}

// address(k, n): where an element of b lies.
template <class T, int kCount, class F>
void warpgroup_multiply(float (&d)[kCount], const std::uint32_t (&a)[4], bool add, F&& address) {
  const emulation::Slot* slots = emulation::exchange(~0u, a, sizeof a);
  const auto element = [](const std::byte* at) {
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return static_cast<double>(to_f32(T{bits}));
  };
  const int lane = emulation::lane(), r = lane / 4, c = 2 * (lane % 4);
  for (int i = 0; i < kCount; ++i) {
    const int row = r + 8 * (i / 2 % 2), column = 8 * (i / 4) + c + i % 2;
    Sum sum(add ? d[i] : 0);
    for (int k = 0; k < 16; ++k) {
      const std::byte* x = slots[row % 8 * 4 + k % 8 / 2].bytes + 4 * (row / 8 + 2 * (k / 8));
      const auto* y = reinterpret_cast<const std::byte*>(address(k, column));
      sum.add(element(x + k % 2 * 2) * element(y));
    }
    d[i] = sum.rounded();
  }
}

// The lane's part of a [64, 16] in shared memory, by rows.
inline void load_left(std::uint32_t (&to)[4], std::uintptr_t a) {
  const int lane = emulation::lane(), warp = static_cast<int>(threadIdx.x) / 32 % 4;
  for (int i = 0; i < 4; ++i) {
    const auto row = static_cast<unsigned>(16 * warp + lane / 4 + i % 2 * 8);
    const std::uintptr_t place = (a % 128 / 16 + static_cast<unsigned>(i / 2)) ^ row % 8;
    std::memcpy(
        &to[i],
        reinterpret_cast<const std::byte*>(a / 128 * 128 + row * 128 + place * 16) + lane % 4 * 4,
        sizeof to[i]);
  }
}

// b by columns: see WarpgroupMatrix.
template <class T, int kCount>
void warpgroup_multiply_columns(float (&d)[kCount], const std::uint32_t (&a)[4], std::uintptr_t b,
                                bool add) {
  const std::uintptr_t columns = b / 128 * 128, piece = b % 128 / 16;
  warpgroup_multiply<T>(d, a, add, [&](int k, int n) {
    const std::uintptr_t place =
        (piece + static_cast<unsigned>(k / 8)) ^ static_cast<unsigned>(n % 8);
    return columns + static_cast<unsigned>(n) * 128 + place * 16 + static_cast<unsigned>(k % 8 * 2);
  });
}
// b by rows, in parts of 64 columns.
template <class T, int kPart, int kCount>
void warpgroup_multiply_rows(float (&d)[kCount], const std::uint32_t (&a)[4], std::uintptr_t b,
                             bool add = true) {
  warpgroup_multiply<T>(d, a, add, [&](int k, int n) {
    const auto place = static_cast<unsigned>((n % 64 / 8) ^ (k % 8));
    return b + static_cast<unsigned>(n / 64 * kPart + k * 128 + n % 8 * 2) + place * 16;
  });
}

}  // namespace emulated

inline void load_tiles(std::uint32_t (&to)[4], const void* row) {
  emulated::load_tiles(to, row, false);
}
inline void load_tiles_transposed(std::uint32_t (&to)[4], const void* row) {
  emulated::load_tiles(to, row, true);
}
inline std::uint32_t add_zero_times_bf16(std::uint32_t x, std::uint32_t y) {
  const auto half = [](std::uint32_t a, std::uint32_t b) -> std::uint32_t {
    return to_bf16(to_f32(bf16{static_cast<std::uint16_t>(a)}) +
                   0.0f * to_f32(bf16{static_cast<std::uint16_t>(b)}))
        .bits;
  };
  return half(x, y) | half(x >> 16, y >> 16) << 16;
}
inline std::uint32_t add_zero_times_f16(std::uint32_t x, std::uint32_t y) {
  const auto half = [](std::uint32_t a, std::uint32_t b) -> std::uint32_t {
    return to_f16(to_f32(f16{static_cast<std::uint16_t>(a)}) +
                  0.0f * to_f32(f16{static_cast<std::uint16_t>(b)}))
        .bits;
  };
  return half(x, y) | half(x >> 16, y >> 16) << 16;
}
inline std::uint32_t transpose_tile(std::uint32_t x) {
  const emulation::Slot* slots = emulation::exchange(~0u, &x, sizeof x);
  const int lane = emulation::lane(), r = lane / 4, c = 2 * (lane % 4);
  const auto element = [&](int i, int j) {
    std::uint32_t pair;
    std::memcpy(&pair, slots[4 * i + j / 2].bytes, sizeof pair);
    return pair >> 16 * (j % 2) & 0xffff;
  };
  return element(c, r) | element(c + 1, r) << 16;
}
inline void store_tiles_transposed(void* row, const std::uint32_t (&from)[4]) {
  struct {
    std::uint16_t* row;
    std::uint32_t from[4];
  } mine = {static_cast<std::uint16_t*>(row), {from[0], from[1], from[2], from[3]}};
  const emulation::Slot* slots = emulation::exchange(~0u, &mine, sizeof mine);
  const int lane = emulation::lane(), tile = lane / 8, i = lane % 8;  // the row this lane writes
  for (int j = 0; j < 8; ++j) {
    std::memcpy(&mine, slots[4 * j + i / 2].bytes, sizeof mine);
    static_cast<std::uint16_t*>(row)[j] = static_cast<std::uint16_t>(mine.from[tile] >> i % 2 * 16);
  }
  __syncwarp();
}
inline void store_tiles(void* row, const std::uint32_t (&from)[4]) {
  const emulation::Slot* slots = emulation::exchange(~0u, from, sizeof from);
  const int lane = emulation::lane(), tile = lane / 8, i = lane % 8;  // the row this lane writes
  for (int j = 0; j < 4; ++j)
    std::memcpy(static_cast<std::byte*>(row) + 4 * j, slots[4 * i + j].bytes + 4 * tile, 4);
  __syncwarp();
}
inline void multiply_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulated::multiply<bf16>(d, a, b);
}
inline void multiply_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulated::multiply<f16>(d, a, b);
}
template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}
inline void warpgroup_begin() {}
inline void warpgroup_end() {}
inline void warpgroup_commit() {}
template <int kPending>
void warpgroup_wait() {}
template <int kCount>
void warpgroup_hold(float (&)[kCount]) {}
struct WarpgroupMatrix {
  std::uintptr_t address;
  WarpgroupMatrix at(int bytes) const { return {address + static_cast<unsigned>(bytes)}; }
};
inline WarpgroupMatrix warpgroup_matrix(const void* b) {
  return {reinterpret_cast<std::uintptr_t>(b)};
}
inline void warpgroup_multiply_bf16(float (&d)[32], const std::uint32_t (&a)[4], WarpgroupMatrix b,
                                    bool add = true) {
  emulated::warpgroup_multiply_columns<bf16>(d, a, b.address, add);
}
template <int kCount>
void warpgroup_multiply_f16(float (&d)[kCount], const std::uint32_t (&a)[4], WarpgroupMatrix b,
                            bool add = true) {
  emulated::warpgroup_multiply_columns<f16>(d, a, b.address, add);
}
template <int kPart>
void warpgroup_multiply_rows_bf16(float (&d)[64], const std::uint32_t (&a)[4], WarpgroupMatrix b) {
  emulated::warpgroup_multiply_rows<bf16, kPart>(d, a, b.address);
}
template <int kPart>
void warpgroup_multiply_rows_f16(float (&d)[64], const std::uint32_t (&a)[4], WarpgroupMatrix b) {
  emulated::warpgroup_multiply_rows<f16, kPart>(d, a, b.address);
}

inline void warpgroup_multiply_rows_bf16(float (&d)[32], const std::uint32_t (&a)[4],
                                         WarpgroupMatrix b, bool add) {
  emulated::warpgroup_multiply_rows<bf16, 0>(d, a, b.address, add);
}
inline void warpgroup_multiply_rows_f16(float (&d)[32], const std::uint32_t (&a)[4],
                                        WarpgroupMatrix b, bool add) {
  emulated::warpgroup_multiply_rows<f16, 0>(d, a, b.address, add);
}
inline void warpgroup_multiply_bf16(float (&d)[16], WarpgroupMatrix a, WarpgroupMatrix b,
                                    bool add) {
  std::uint32_t left[4];
  emulated::load_left(left, a.address);
  emulated::warpgroup_multiply_columns<bf16>(d, left, b.address, add);
}
inline void warpgroup_multiply_f16(float (&d)[16], WarpgroupMatrix a, WarpgroupMatrix b, bool add) {
  std::uint32_t left[4];
  emulated::load_left(left, a.address);
  emulated::warpgroup_multiply_columns<f16>(d, left, b.address, add);
}
inline void warpgroup_multiply_rows_bf16(float (&d)[32], WarpgroupMatrix a, WarpgroupMatrix b,
                                         bool add) {
  std::uint32_t left[4];
  emulated::load_left(left, a.address);
  emulated::warpgroup_multiply_rows<bf16, 0>(d, left, b.address, add);
}
inline void warpgroup_multiply_rows_f16(float (&d)[32], WarpgroupMatrix a, WarpgroupMatrix b,
                                        bool add) {
  std::uint32_t left[4];
  emulated::load_left(left, a.address);
  emulated::warpgroup_multiply_rows<f16, 0>(d, left, b.address, add);
}

}  // namespace bittern::cuda
