// Stored rows into panels, and panels into stored rows.
#if defined(BITTERN_OPS_MATMUL_REPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_MATMUL_REPACK_INL_H_
#undef BITTERN_OPS_MATMUL_REPACK_INL_H_
#else
#define BITTERN_OPS_MATMUL_REPACK_INL_H_
#endif

#include <cstring>

#include "cpu/pack-inl.h"
#include "ops/matmul/panels.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// The operands of stored weights as bytes; `row` is the distance of rows in bytes.
template <class Byte>
struct StoredPart {
  Byte* at = nullptr;
  std::int64_t row = 0;
};
template <class Byte>
struct StoredParts {
  StoredPart<Byte> w, packed, scales, biases, blocks;
};
template <class Byte, class Args>
StoredParts<Byte> StoredPartsOf(const Args& a) {
  const auto part = [](const auto& v) {
    return StoredPart<Byte>{static_cast<Byte*>(v.data),
                            v.row_stride() * static_cast<std::int64_t>(size_of(v.dtype))};
  };
  return {part(a.w), part(a.packed), part(a.scales), part(a.biases), part(a.blocks)};
}

// Codes 32 c .. 32 c + 31 of a block, a byte each. Loops of 32 bytes are vectors.
template <BlockType kType>
HWY_INLINE void BlockChunk(const std::uint8_t* HWY_RESTRICT block, int c,
                           std::uint8_t* HWY_RESTRICT to) {
  using enum BlockType;
  constexpr CodeBits kFirst = code_bits_at(kType, 0);
  if constexpr (kType == q8_0) {
    for (int i = 0; i < 32; ++i) to[i] = block[2 + i] ^ 0x80;
  } else if constexpr (block_size(kType).weights == 32 || kType == iq4_xs) {
    const std::uint8_t* low = block + kFirst.low.byte + 16 * c;
    for (int i = 0; i < 16; ++i) to[i] = low[i] & 15;
    for (int i = 0; i < 16; ++i) to[16 + i] = static_cast<std::uint8_t>(low[i] >> 4);
    if constexpr (kFirst.high.count != 0) {
      std::uint32_t high;
      std::memcpy(&high, block + kFirst.high.byte, sizeof high);
      for (int i = 0; i < 32; ++i) to[i] = static_cast<std::uint8_t>(to[i] | (high >> i & 1) << 4);
    }
  } else {
    // A plane's bits of these codes are at the same place of 32 bytes in a row.
    const CodeBits at = code_bits_at(kType, 32 * c);
    const std::uint8_t* low = block + at.low.byte;
    const auto mask = static_cast<std::uint8_t>((1 << kFirst.low.count) - 1);
    for (int i = 0; i < 32; ++i) to[i] = static_cast<std::uint8_t>(low[i] >> at.low.first & mask);
    if constexpr (kFirst.high.count != 0) {
      const std::uint8_t* high = block + at.high.byte;
      const auto bits = static_cast<std::uint8_t>((1 << kFirst.high.count) - 1);
      for (int i = 0; i < 32; ++i)
        to[i] = static_cast<std::uint8_t>(to[i] | (high[i] >> at.high.first & bits)
                                                      << kFirst.low.count);
    }
  }
}
// The inverse, into zeros.
template <BlockType kType>
HWY_INLINE void PutBlockChunk(const std::uint8_t* codes, int c, std::uint8_t* block) {
  for (int i = 0; i < 32; ++i) put_unsigned_code(kType, block, 32 * c + i, codes[i]);
}

template <class F, std::size_t... i>
HWY_INLINE void WithBlockType(BlockType type, std::index_sequence<i...>, F&& f) {
  (void)((static_cast<std::size_t>(type) == i &&
          (f(std::integral_constant<BlockType, static_cast<BlockType>(i)>()), true)) ||
         ...);
}
template <class F>
HWY_INLINE void WithBlockType(BlockType type, F&& f) {
  WithBlockType(type, std::make_index_sequence<std::size(kBlockTypeNames)>(), f);
}

template <int kBits>
HWY_INLINE void ChunkToPanel(const std::uint8_t* codes, std::uint8_t* to) {
  std::uint32_t quads[8];
  std::memcpy(quads, codes, sizeof quads);
  for (int p = 0; p < matmul::num_planes(kBits); ++p) {
    const matmul::Plane plane = matmul::plane_of(kBits, p);
    for (int v = 0; v < plane.bits; ++v) {
      const std::uint32_t word = matmul::plane_word(quads, plane, v);
      std::memcpy(to + 64 * (plane.words + v), &word, sizeof word);
    }
  }
}
template <int kBits>
HWY_INLINE void ChunkFromPanel(const std::uint8_t* from, std::uint8_t* codes) {
  std::uint32_t quads[8] = {};
  for (int p = 0; p < matmul::num_planes(kBits); ++p) {
    const matmul::Plane plane = matmul::plane_of(kBits, p);
    for (int v = 0; v < plane.bits; ++v) {
      std::uint32_t word;
      std::memcpy(&word, from + 64 * (plane.words + v), sizeof word);
      matmul::add_plane_word(word, plane, v, quads);
    }
  }
  std::memcpy(codes, quads, sizeof quads);
}

template <class F>
HWY_INLINE void WithBits(int bits, F&& f) {
  switch (bits) {
    case 2: f(std::integral_constant<int, 2>()); break;
    case 3: f(std::integral_constant<int, 3>()); break;
    case 4: f(std::integral_constant<int, 4>()); break;
    case 5: f(std::integral_constant<int, 5>()); break;
    case 6: f(std::integral_constant<int, 6>()); break;
    case 8: f(std::integral_constant<int, 8>()); break;
    default: break;
  }
}

// Between row `n` of stored weights and row r of a panel.
class Repacker {
 public:
  explicit Repacker(const WeightDesc& d)
      : d_(d),
        format_(d.plain() ? matmul::PanelFormat() : matmul::panel_format(d)),
        packer_(d.affine() ? d.bits : 8) {}

  // Rows [first, first + 16) of W, those that there are; the others are zeros.
  void ToPanel(const StoredParts<const std::uint8_t>& from, std::int64_t first,
               std::uint8_t* panel) const {
    const std::int64_t rows = std::min<std::int64_t>(matmul::kLanes, d_.outputs - first);
    if (rows < matmul::kLanes)
      std::memset(panel, 0, static_cast<std::size_t>(matmul::kLanes * d_.row_bytes()));
    for (std::int64_t r = 0; r < rows; ++r) RowToPanel(from, first + r, static_cast<int>(r), panel);
  }

  void RowToPanel(const StoredParts<const std::uint8_t>& from, std::int64_t n, int r,
                  std::uint8_t* panel) const {
    if (d_.plain()) {
      Elements(from.w.at + n * from.w.row, 1, panel, r, matmul::kLanes);
      return;
    }
    const std::int64_t units = d_.inputs / format_.unit;
    Headers(from, n, r, [&](std::int64_t at, const std::uint8_t* stored, int size) {
      std::memcpy(panel + at, stored, static_cast<std::size_t>(size));
    });
    if (d_.affine()) {
      const std::uint8_t* words = from.packed.at + n * from.packed.row;
      WithBits(d_.bits, [&](auto bits) HWY_ATTR {
        for (std::int64_t u = 0; u < units; ++u) {
          const std::uint8_t* stream = words + u * format_.unit * bits / 8;
          std::uint8_t* to = panel + format_.codes_at(u, units) + 4 * r;
          for (int c = 0; c < format_.unit / 32; ++c) {
            alignas(64) std::uint8_t codes[32];
            packer_.Unpack(stream + 4 * c * bits, 32, codes);
            ChunkToPanel<bits>(codes, to + c * bits * 64);
          }
        }
      });
      return;
    }
    WithBlockType(d_.block_type(), [&](auto type) HWY_ATTR {
      constexpr int kBits = block_code_bits(type);
      constexpr BlockSize kSize = block_size(type);
      const std::uint8_t* blocks = from.blocks.at + n * from.blocks.row;
      for (std::int64_t u = 0; u < units; ++u) {
        std::uint8_t* to = panel + format_.codes_at(u, units) + 4 * r;
        for (int c = 0; c < kSize.weights / 32; ++c) {
          alignas(64) std::uint8_t codes[32];
          BlockChunk<type>(blocks + u * kSize.bytes, c, codes);
          ChunkToPanel<kBits>(codes, to + c * kBits * 64);
        }
      }
    });
  }

  void RowFromPanel(const std::uint8_t* panel, int r, const StoredParts<std::uint8_t>& to,
                    std::int64_t n) const {
    if (d_.plain()) {
      Elements(panel, matmul::kLanes, to.w.at + n * to.w.row, 0, 1, r);
      return;
    }
    const std::int64_t units = d_.inputs / format_.unit;
    if (d_.affine()) {
      std::uint8_t* words = to.packed.at + n * to.packed.row;
      WithBits(d_.bits, [&](auto bits) HWY_ATTR {
        for (std::int64_t u = 0; u < units; ++u) {
          std::uint8_t* stream = words + u * format_.unit * bits / 8;
          const std::uint8_t* from = panel + format_.codes_at(u, units) + 4 * r;
          for (int c = 0; c < format_.unit / 32; ++c) {
            alignas(64) std::uint8_t codes[32];
            ChunkFromPanel<bits>(from + c * bits * 64, codes);
            packer_.Pack(codes, 32, stream + 4 * c * bits);
          }
        }
      });
    } else {
      WithBlockType(d_.block_type(), [&](auto type) HWY_ATTR {
        constexpr int kBits = block_code_bits(type);
        constexpr BlockSize kSize = block_size(type);
        std::uint8_t* blocks = to.blocks.at + n * to.blocks.row;
        std::memset(blocks, 0, static_cast<std::size_t>(units * kSize.bytes));
        for (std::int64_t u = 0; u < units; ++u) {
          const std::uint8_t* from = panel + format_.codes_at(u, units) + 4 * r;
          for (int c = 0; c < kSize.weights / 32; ++c) {
            alignas(64) std::uint8_t codes[32];
            ChunkFromPanel<kBits>(from + c * kBits * 64, codes);
            PutBlockChunk<type>(codes, c, blocks + u * kSize.bytes);
          }
        }
      });
    }
    Headers(to, n, r, [&](std::int64_t at, std::uint8_t* stored, int size) {
      std::memcpy(stored, panel + at, static_cast<std::size_t>(size));
    });
  }

 private:
  // Calls f(offset in the panel, the field as stored, its size) for each field of row n's headers.
  template <class Byte, class F>
  void Headers(const StoredParts<Byte>& stored, std::int64_t n, int r, F&& f) const {
    const std::int64_t units = d_.inputs / format_.unit;
    const std::int64_t bytes = d_.blocks() ? block_size(d_.block_type()).bytes : 0;
    std::int64_t before = 0;
    for (int i = 0; i < format_.num_fields; ++i) {
      const matmul::HeaderField field = format_.fields[i];
      Byte* from = d_.blocks()     ? stored.blocks.at + n * stored.blocks.row + field.at
                   : field.at == 0 ? stored.scales.at + n * stored.scales.row
                                   : stored.biases.at + n * stored.biases.row;
      const std::int64_t step = d_.blocks() ? bytes : field.size;
      for (std::int64_t u = 0; u < units; ++u)
        f(format_.header_at(u) + before + r * field.size, from + u * step, field.size);
      before += std::int64_t{matmul::kLanes} * field.size;
    }
  }

  // A plain row: element k from from[k * from_step + from_at] to to[k * to_step + to_at].
  void Elements(const std::uint8_t* from, std::int64_t from_step, std::uint8_t* to,
                std::int64_t to_at, std::int64_t to_step, std::int64_t from_at = 0) const {
    const auto move = [&]<class T>(Type<T>) {
      for (std::int64_t k = 0; k < d_.inputs; ++k)
        std::memcpy(to + (k * to_step + to_at) * std::int64_t{sizeof(T)},
                    from + (k * from_step + from_at) * std::int64_t{sizeof(T)}, sizeof(T));
    };
    if (d_.type == WeightType::f32) {
      move(Type<float>());
    } else {
      move(Type<f16>());
    }
  }

  const WeightDesc& d_;
  matmul::PanelFormat format_;
  CodePacker packer_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
