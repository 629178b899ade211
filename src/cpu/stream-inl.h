// Large tensors from and to memory.
//
// Stores that bypass the caches, for outputs that would only evict other data. They must write
// whole 64-byte lines, or the memory controller reads each line first. A range that used them ends
// with hwy::FlushStream().
#if defined(BITTERN_CPU_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_STREAM_INL_H_
#undef BITTERN_CPU_STREAM_INL_H_
#else
#define BITTERN_CPU_STREAM_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// An output of this many bytes is worth streaming.
inline constexpr std::int64_t kStreamBytes = std::int64_t{1} << 20;

// How many bytes after `p` the next line starts.
inline std::size_t ToNextLine(const void* p) {
  return static_cast<std::size_t>(-reinterpret_cast<std::intptr_t>(p) & 63);
}

// Fetches lines beyond p[0, n) of a tensor that is read once from end to end; the hardware alone
// stops at the end of each page. Where memory is read faster from several pages in turn
// (cpu::kPagesInTurn), the lines asked for are those of the next kPages pages, one of each in turn:
// over a long stream, each line once. Elsewhere that is slower than the lines kAhead bytes on.
inline constexpr std::uintptr_t kAhead = 4096;
template <class T>
HWY_INLINE void PrefetchAhead(const T* p, std::int64_t n) {
  const auto at = reinterpret_cast<std::uintptr_t>(p) + kAhead;
  for (std::uintptr_t i = 0; i < static_cast<std::uintptr_t>(n) * sizeof(T); i += 64)
    hwy::Prefetch(reinterpret_cast<const char*>(at + i));
}
template <class T>
HWY_INLINE void PrefetchNext(const T* p, std::int64_t n) {
  if (!cpu::kPagesInTurn) return PrefetchAhead(p, n);
  constexpr std::uintptr_t kLine = 64, kPage = 4096, kPages = 8, kBlock = kPages * kPage;
  const auto from = reinterpret_cast<std::uintptr_t>(p);
  for (std::uintptr_t i = 0; i < static_cast<std::uintptr_t>(n) * sizeof(T); i += kLine) {
    const std::uintptr_t at = from + i, line = at % kBlock / kLine;
    hwy::Prefetch(reinterpret_cast<const char*>(at - at % kBlock + kBlock + line % kPages * kPage +
                                                line / kPages * kLine));
  }
}

// The same for loops that compute more than they load. A line on its way to L1 occupies one of the
// core's few miss buffers until it arrives, and when all are occupied, computing waits for memory.
// So these lines go to L2.
template <class T>
HWY_INLINE void PrefetchBesideWork(const T* p, std::int64_t n) {
  if (cpu::kPagesInTurn) return PrefetchNext(p, n);
  const auto at = reinterpret_cast<std::uintptr_t>(p) + 2 * kAhead;
  for (std::uintptr_t i = 0; i < static_cast<std::uintptr_t>(n) * sizeof(T); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(at + i), 0, 2);
}

// StoreMath past the caches, to aligned addresses.
template <class D>
HWY_INLINE void StreamMath(D d, hn::Vec<D> v, hn::TFromD<D>* p) {
  hn::Stream(v, d, p);
}
template <class D>
HWY_INLINE void StreamMath(D d, hn::Vec<D> v, f16* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  const hn::Rebind<std::uint16_t, D> du;
  hn::Stream(hn::BitCast(du, hn::DemoteTo(dh, v)), du, reinterpret_cast<std::uint16_t*>(p));
}
template <class D>
HWY_INLINE void StreamMath(D d, hn::Vec<D> v, bf16* p) {
  const hn::Rebind<std::uint16_t, D> du;
  hn::Stream(hn::TruncateTo(du, Bf16Bits(d, v)), du, reinterpret_cast<std::uint16_t*>(p));
}

// Where the Store functions of the quantise family stream: a pointer to aligned vectors, each a
// whole line or half of one (the other half follows at once); less than that goes through the
// cache.
template <class T>
struct Streamed {
  T* to;
  HWY_INLINE Streamed operator+(std::int64_t i) const { return {to + i}; }
};
template <class D>
inline constexpr bool kStreams = hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) >= 32;
template <class D, class T>
HWY_INLINE void StoreMath(D d, hn::Vec<D> v, Streamed<T> p) {
  if constexpr (kStreams<D> && std::is_same_v<T, hn::TFromD<D>>) {
    hn::Stream(v, d, p.to);
  } else {
    StoreMath(d, v, p.to);
  }
}

// memcpy, its whole lines streamed if `stream`.
inline void EmitLines(const void* HWY_RESTRICT from, std::size_t bytes, void* HWY_RESTRICT to,
                      bool stream) {
  const std::size_t head = ToNextLine(to);
  if (!stream || bytes < head + 64) {
    std::memcpy(to, from, bytes);
    return;
  }
  const hn::ScalableTag<std::uint8_t> d;
  const auto* source = static_cast<const std::uint8_t*>(from);
  auto* target = static_cast<std::uint8_t*>(to);
  std::memcpy(target, source, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64)
    for (std::size_t j = 0; j < 64; j += hn::Lanes(d))
      hn::Stream(hn::LoadU(d, source + i + j), d, target + i + j);
  std::memcpy(target + i, source + i, bytes - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
