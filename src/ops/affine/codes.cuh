// Codes in the two storages of bittern/affine_desc.h, as kernels read them: one per byte, or `bits`
// bits each of a row's stream of u32 words.
#pragma once
#include <cstdint>

#include "bittern/affine_desc.h"
#include "cuda/device.cuh"

namespace bittern::cuda {

// An integer below 2^23 (2^52) as a float, by its place in the significand: no conversion unit.
template <class F>
__device__ inline F small_integer(std::uint32_t x) {
  if constexpr (sizeof(F) == 4) {
    return __uint_as_float(0x4b000000u | x) - 0x1p23f;
  } else {
    return __hiloint2double(0x43300000, static_cast<int>(x)) - 0x1p52;
  }
}

// Byte k of a word, the same way.
template <class F>
__device__ inline F small_byte(std::uint32_t word, int k) {
  if constexpr (sizeof(F) == 4) {
    // The byte below 2^23's upper three.
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u + static_cast<unsigned>(k))) -
           0x1p23f;
  } else {
    return small_integer<F>(word >> 8 * k & 0xffu);
  }
}

// An unsigned integer of kCount bits, as memory has it.
template <int kCount>
using Bits = std::conditional_t<
    kCount == 8, std::uint8_t,
    std::conditional_t<kCount == 16, std::uint16_t,
                       std::conditional_t<kCount == 32, std::uint32_t, unsigned long long>>>;

// One row of codes. They are read in fields: 1, 2 or 4 neighbours in one register, the first
// lowest, 8 or `bits` bits apart. Bits above a field's last code are arbitrary.
template <bool kPacked>
class CodeRow {
 public:
  using Unit = std::conditional_t<kPacked, std::uint32_t, std::uint8_t>;

  __device__ CodeRow(const void* codes, std::int64_t first_unit, int bits)
      : row_(static_cast<const Unit*>(codes) + first_unit), bits_(bits) {}

  // Codes j .. j + N - 1. Bytes must be aligned to N; packed fields may begin at any code, and no
  // word without a code of theirs is read.
  template <int N>
  __device__ std::uint32_t field(std::int64_t j) const {
    if constexpr (kPacked) {
      const std::int64_t bit = j * bits_;
      const std::uint32_t* word = row_ + (bit >> 5);
      const int shift = static_cast<int>(bit & 31);
      const std::uint32_t low = __ldg(word);
      const std::uint32_t high = shift + N * bits_ > 32 ? __ldg(word + 1) : 0;
      return __funnelshift_r(low, high, static_cast<unsigned>(shift));
    } else if constexpr (N == 4) {
      return __ldcs(reinterpret_cast<const unsigned*>(row_ + j));
    } else if constexpr (N == 2) {
      return __ldcs(reinterpret_cast<const unsigned short*>(row_ + j));
    } else {
      static_assert(N == 1);
      return row_[j];
    }
  }

  // Code k of a field.
  template <class F>
  __device__ F value(std::uint32_t field, int k) const {
    if constexpr (kPacked) {
      return small_integer<F>(field >> k * bits_ & ((1u << bits_) - 1));
    } else {
      return small_byte<F>(field, k);
    }
  }

 private:
  const Unit* row_;
  int bits_;
};

// Do rows of codes follow each other without a gap, so that they read as one row?
inline bool codes_dense(const AffineDesc& d, std::int64_t stride) {
  if (d.outer_size <= 1) return true;
  if (d.storage == CodeStorage::u8) return stride == d.axis_size;
  const std::int64_t bits = d.axis_size * d.code_bits();
  return bits % 32 == 0 && stride == bits / 32;
}

// May codes be read (or written) in aligned fields of N?
template <int N>
bool codes_aligned(const AffineDesc& d, const void* data, std::int64_t stride) {
  if (d.storage == CodeStorage::packed) return true;
  return reinterpret_cast<std::uintptr_t>(data) % N == 0 && (d.outer_size <= 1 || stride % N == 0);
}

// ---- 4 codes between bytes and kBits bits each ----

// The low kBits of each byte, closed up: neighbours first, then pairs.
template <int kBits>
__device__ inline std::uint32_t close_up(std::uint32_t bytes) {
  constexpr std::uint32_t kCode = (1u << kBits) - 1, kPair = (1u << 2 * kBits) - 1;
  const std::uint32_t pairs =
      (bytes & kCode * 0x00010001u) | (bytes >> (8 - kBits) & (kCode << kBits) * 0x00010001u);
  if constexpr (kBits == 8) return bytes;
  return (pairs & kPair) | (pairs >> (16 - 2 * kBits) & kPair << 2 * kBits);
}

// The inverse; bits above the fourth code are ignored.
template <int kBits>
__device__ inline std::uint32_t spread_out(std::uint32_t field) {
  constexpr std::uint32_t kCode = (1u << kBits) - 1, kPair = (1u << 2 * kBits) - 1;
  if constexpr (kBits == 8) return field;
  const std::uint32_t pairs = (field & kPair) | (field << (16 - 2 * kBits) & kPair << 16);
  return (pairs & kCode * 0x00010001u) | (pairs << (8 - kBits) & (kCode << 8) * 0x00010001u);
}

// Rows of codes and of the words that hold them, cut into units of kUnit codes, a thread each.
// Rows that follow each other without spare bits count as one.
template <class Code, class Word, int kUnit>
struct PackedUnits {
  Code* codes;
  Word* words;
  std::int64_t codes_stride, words_stride;
  bool one_row;
  std::int64_t row_length;
  Divisor row_units;  // the last unit of a row may be short
  std::int64_t units;
  bool aligned;  // 16 bytes of codes, and `word_align` of words, may be accessed at once

  template <class Desc, class Codes, class Words>
  PackedUnits(const Desc& d, const Codes& of_codes, const Words& of_words,
              std::uintptr_t word_align)
      : codes(static_cast<Code*>(of_codes.data)),
        words(static_cast<Word*>(of_words.data)),
        codes_stride(of_codes.row_stride()),
        words_stride(of_words.row_stride()),
        one_row(d.outer_size <= 1 ||
                (d.axis_size * d.bits % 32 == 0 && codes_stride == d.axis_size &&
                 words_stride == d.axis_size * d.bits / 32)),
        row_length(one_row ? d.outer_size * d.axis_size : d.axis_size),
        row_units((row_length + kUnit - 1) / kUnit),
        units((one_row ? 1 : d.outer_size) * row_units.value()),
        aligned(lies_on(codes, codes_stride, 16) && lies_on(words, 4 * words_stride, word_align)) {}

 private:
  bool lies_on(const void* data, std::int64_t stride_bytes, std::uintptr_t align) const {
    return reinterpret_cast<std::uintptr_t>(data) % align == 0 &&
           (one_row || stride_bytes % static_cast<std::int64_t>(align) == 0);
  }
};

}  // namespace bittern::cuda
