// Reading panels: codes as bytes, scales and biases as f32, and weights as the numbers they stand
// for. A vector holds the 16 rows of a panel, or on AVX2 half of them (part 0 or 1).
#if defined(BITTERN_OPS_MATMUL_EXPAND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_MATMUL_EXPAND_INL_H_
#undef BITTERN_OPS_MATMUL_EXPAND_INL_H_
#else
#define BITTERN_OPS_MATMUL_EXPAND_INL_H_
#endif

#include "cpu/bf16-inl.h"
#include "cpu/unroll-inl.h"
#include "ops/matmul/panels.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DB = hn::Repartition<std::uint8_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kParts = matmul::kLanes / kWidth;

// What codes stand for: themselves less an offset, or values of a table, stored plus the offset.
enum class Values { plain, iq4, mxfp4 };
constexpr int kIq4Offset = 128, kMxfp4Offset = 12;

inline Values ValuesOf(const WeightDesc& d) {
  if (!d.blocks() || code_values(d.block_type()) == nullptr) return Values::plain;
  return d.type == WeightType::mxfp4 ? Values::mxfp4 : Values::iq4;
}
// What is to be subtracted from the bytes that Quad gives.
inline int OffsetOf(const WeightDesc& d) {
  switch (ValuesOf(d)) {
    case Values::iq4: return kIq4Offset;
    case Values::mxfp4: return kMxfp4Offset;
    case Values::plain: break;
  }
  return d.blocks() ? code_offset(d.block_type()) : 0;
}

template <int kBits, Values kValues>
struct Codes {
  static constexpr int kCodeBits = kBits;
  static constexpr int kChunkBytes = 64 * kBits;
  static constexpr bool kNibbles = kBits == 4 && kValues == Values::plain;  // two codes in a byte
  // The largest byte.
  static constexpr int kMost = kValues == Values::iq4     ? 241
                               : kValues == Values::mxfp4 ? 24
                                                          : (1 << kBits) - 1;

  Codes() : table_(hn::Zero(DB())) {
    if constexpr (kValues != Values::plain) {
      const std::int8_t* values = kValues == Values::iq4 ? kIq4Values : kMxfp4Values;
      alignas(16) std::uint8_t raised[16];
      for (int i = 0; i < 16; ++i)
        raised[i] = static_cast<std::uint8_t>(values[i] +
                                              (kValues == Values::iq4 ? kIq4Offset : kMxfp4Offset));
      table_ = hn::LoadDup128(DB(), raised);
    }
  }

  // Codes 4q .. 4q + 3 of a chunk, a byte each; kHighAsIs: 16 times the code if q is odd.
  template <int q, bool kHighAsIs = false>
  HWY_INLINE VU Quad(const std::uint8_t* chunk) const {
    constexpr matmul::Plane kLow = matmul::plane_of(kBits, 0);
    constexpr int kPerWord = 8 / kLow.bits;
    VU v = Word(chunk, q / kPerWord);
    if constexpr (kHighAsIs && q % 2 == 1) {
      static_assert(kNibbles);
      return hn::And(v, Mask<4, 4>());
    }
    if constexpr (kLow.bits < 8) {
      constexpr int kShift = kLow.bits * (q % kPerWord);
      if constexpr (kShift != 0) v = hn::ShiftRight<kShift>(v);
      v = hn::And(v, Mask<kLow.bits, 0>());
    }
    if constexpr (matmul::num_planes(kBits) == 2) {
      constexpr matmul::Plane kHigh = matmul::plane_of(kBits, 1);
      constexpr int kFrom = kHigh.bits * (q % (8 / kHigh.bits)), kTo = kHigh.shift;
      VU high = Word(chunk, kHigh.words + q * kHigh.bits / 8);
      if constexpr (kFrom > kTo) high = hn::ShiftRight<kFrom - kTo>(high);
      if constexpr (kFrom < kTo) high = hn::ShiftLeft<kTo - kFrom>(high);
      v = hn::Or(v, hn::And(high, Mask<kHigh.bits, kTo>()));
    }
    if constexpr (kValues != Values::plain)
      v = hn::BitCast(DU(), hn::TableLookupBytes(table_, hn::BitCast(DB(), v)));
    return v;
  }

 private:
  template <int kCount, int kAt>
  static HWY_INLINE VU Mask() {
    return hn::Set(DU(), ((1u << kCount) - 1) * 0x01010101u << kAt);
  }
  static HWY_INLINE VU Word(const std::uint8_t* chunk, int word) {
    return hn::LoadU(DU(), reinterpret_cast<const std::uint32_t*>(chunk + 64 * word));
  }
  hn::Vec<DB> table_;
};

template <class F>
HWY_INLINE void WithCodes(const WeightDesc& d, F&& f) {
  const int bits = matmul::panel_format(d).bits;
  switch (ValuesOf(d)) {
    case Values::iq4: return f(Type<Codes<4, Values::iq4>>());
    case Values::mxfp4: return f(Type<Codes<4, Values::mxfp4>>());
    case Values::plain: break;
  }
  switch (bits) {
    case 2: return f(Type<Codes<2, Values::plain>>());
    case 3: return f(Type<Codes<3, Values::plain>>());
    case 4: return f(Type<Codes<4, Values::plain>>());
    case 5: return f(Type<Codes<5, Values::plain>>());
    case 6: return f(Type<Codes<6, Values::plain>>());
    case 8: return f(Type<Codes<8, Values::plain>>());
    default: return;
  }
}

// ---- scales and biases ----

// Scales and biases of a run of inputs: 16 of each, one for each row of the panel.
struct Grid {
  float* s;
  float* b;
};

// One of a unit's headers, and a lane's part of it.
struct Header {
  const std::uint8_t* at;
  int part;

  // Field at `before` bytes of a row's header.
  template <class T>
  HWY_INLINE VF Floats(int before) const {
    return LoadMath(DF(), reinterpret_cast<const T*>(at + 16 * before) + part * kWidth);
  }
  HWY_INLINE VU Words(int before) const {
    return hn::LoadU(DU(),
                     reinterpret_cast<const std::uint32_t*>(at + 16 * before) + part * kWidth);
  }
  template <class T>
  HWY_INLINE VU Integers(int before) const {
    const hn::Rebind<T, DU> d;
    return hn::PromoteTo(
        DU(), hn::LoadU(d, reinterpret_cast<const T*>(at + 16 * before) + part * kWidth));
  }
};

HWY_INLINE VU BitsAt(VU v, int first, std::uint32_t mask) {
  return hn::And(hn::ShiftRightSame(v, first), hn::Set(DU(), mask));
}
HWY_INLINE VF FloatOf(VU v) { return hn::ConvertTo(DF(), hn::BitCast(DI(), v)); }

// A panel, or a part of one that begins where headers do: units one after the other.
struct UnitWalk {
  const std::uint8_t* at;
  std::int64_t units;
};

// Calls f(headers of n units, their codes, n) until all units are done.
template <class F>
HWY_INLINE void ForUnits(const matmul::PanelFormat& format, UnitWalk walk, F&& f) {
  const std::int64_t header = format.header_bytes(), codes = format.code_bytes();
  while (walk.units > 0) {
    const std::int64_t n = std::min<std::int64_t>(format.together, walk.units);
    f(walk.at, walk.at + n * header, n);
    walk.at += n * (header + codes);
    walk.units -= n;
  }
}

// Scales and biases of one unit, `repeat` runs for each of its groups; `to` has 16 floats a run.
// Types without a bias get -0, which added to a number leaves it as it is. kType stands for all
// types with the same header.
template <WeightType kType, class S = f16>
HWY_INLINE void UnitGrid(const std::uint8_t* header, int repeat, Grid to) {
  const DF df;
  const VF none = hn::Set(df, -0.0f);
  for (int part = 0; part < kParts; ++part) {
    const Header h{header, part};
    int run = part * kWidth;
    const auto put = [&](VF s, VF b) BITTERN_INLINE_LAMBDA {
      for (int i = 0; i < repeat; ++i, run += matmul::kLanes) {
        hn::StoreU(s, df, to.s + run);
        hn::StoreU(b, df, to.b + run);
      }
    };
    if constexpr (kType == WeightType::affine) {
      put(h.Floats<S>(0), h.Floats<S>(sizeof(S)));
    } else if constexpr (kType == WeightType::q4_0) {
      put(h.Floats<f16>(0), none);
    } else if constexpr (kType == WeightType::q2_k) {
      const VF scale = h.Floats<f16>(0), min = h.Floats<f16>(2);
      for (int i = 0; i < 16; ++i) {
        const VU word = h.Words(4 + i / 4 * 4);
        put(hn::Mul(scale, FloatOf(BitsAt(word, 8 * (i % 4), 15))),
            hn::Neg(hn::Mul(min, FloatOf(BitsAt(word, 8 * (i % 4) + 4, 15)))));
      }
    } else if constexpr (kType == WeightType::q3_k) {
      const VF scale = h.Floats<f16>(0);
      for (int i = 0; i < 16; ++i) {
        const VU low = BitsAt(h.Words(2 + i % 8 / 4 * 4), 8 * (i % 4) + 4 * (i / 8), 15);
        const VU high = BitsAt(h.Words(10), 8 * (i % 4) + 2 * (i / 4), 3);
        const VI sc =
            hn::Sub(hn::BitCast(DI(), hn::Or(low, hn::ShiftLeft<4>(high))), hn::Set(DI(), 32));
        put(hn::Mul(scale, hn::ConvertTo(df, sc)), none);
      }
    } else if constexpr (kType == WeightType::q4_k) {
      const VF scale = h.Floats<f16>(0), min = h.Floats<f16>(2);
      const VU a = h.Words(4), b = h.Words(8), c = h.Words(12);
      const auto put_bits = [&](VU sc, VU mn) HWY_ATTR {
        put(hn::Mul(scale, FloatOf(sc)), hn::Neg(hn::Mul(min, FloatOf(mn))));
      };
      for (int i = 0; i < 4; ++i) put_bits(BitsAt(a, 8 * i, 63), BitsAt(b, 8 * i, 63));
      for (int i = 0; i < 4; ++i) {
        put_bits(hn::Or(BitsAt(c, 8 * i, 15), hn::ShiftLeft<4>(BitsAt(a, 8 * i + 6, 3))),
                 hn::Or(BitsAt(c, 8 * i + 4, 15), hn::ShiftLeft<4>(BitsAt(b, 8 * i + 6, 3))));
      }
    } else if constexpr (kType == WeightType::q6_k) {
      const VF scale = h.Floats<f16>(0);
      for (int i = 0; i < 16; ++i) {
        const VI word = hn::BitCast(DI(), h.Words(2 + i / 4 * 4));
        const VI sc = hn::ShiftRight<24>(hn::ShiftLeftSame(word, 24 - 8 * (i % 4)));
        put(hn::Mul(scale, hn::ConvertTo(df, sc)), none);
      }
    } else if constexpr (kType == WeightType::iq4_xs) {
      const VF scale = h.Floats<f16>(0);
      const VU high = h.Integers<std::uint16_t>(2), low = h.Words(4);
      for (int i = 0; i < 8; ++i) {
        const VU sc = hn::Or(BitsAt(low, 4 * i, 15), hn::ShiftLeft<4>(BitsAt(high, 2 * i, 3)));
        put(hn::Mul(scale, hn::ConvertTo(df, hn::Sub(hn::BitCast(DI(), sc), hn::Set(DI(), 32)))),
            none);
      }
    } else {
      static_assert(kType == WeightType::mxfp4);
      // 2^(e - 128): a number with an exponent of its own, or one of the two below these.
      const VI e = hn::BitCast(DI(), h.Integers<std::uint8_t>(0));
      const VI one = hn::Set(DI(), 1);
      const VI normal = hn::ShiftLeft<23>(hn::Sub(e, one));
      const VI least =
          hn::Add(hn::Set(DI(), 0x00200000), hn::And(hn::Neg(e), hn::Set(DI(), 0x00200000)));
      put(hn::BitCast(df, hn::IfThenElse(hn::Gt(e, one), normal, least)), none);
    }
  }
}

// Scales and biases of all runs of these units.
template <WeightType kType, class S = f16>
HWY_NOINLINE void GridsOf(const WeightDesc& d, const matmul::PanelFormat& format, UnitWalk walk,
                          int repeat, Grid to) {
  const std::int64_t floats = format.unit / d.group() * repeat * matmul::kLanes;
  const std::int64_t header = format.header_bytes();
  ForUnits(format, walk,
           [&](const std::uint8_t* headers, const std::uint8_t*, std::int64_t n)
               BITTERN_INLINE_LAMBDA {
                 for (std::int64_t i = 0; i < n; ++i) {
                   UnitGrid<kType, S>(headers + i * header, repeat, to);
                   to.s += floats;
                   to.b += floats;
                 }
               });
}
using GridFunction = void(const WeightDesc& d, const matmul::PanelFormat& format, UnitWalk walk,
                          int repeat, Grid to);
inline GridFunction* GridFunctionOf(const WeightDesc& d) {
  switch (d.type) {
    case WeightType::affine:
      return d.scale_element == DType::f32    ? GridsOf<WeightType::affine, float>
             : d.scale_element == DType::bf16 ? GridsOf<WeightType::affine, bf16>
                                              : GridsOf<WeightType::affine, f16>;
    case WeightType::q4_1:
    case WeightType::q5_1: return GridsOf<WeightType::affine, f16>;
    case WeightType::q2_k: return GridsOf<WeightType::q2_k>;
    case WeightType::q3_k: return GridsOf<WeightType::q3_k>;
    case WeightType::q4_k:
    case WeightType::q5_k: return GridsOf<WeightType::q4_k>;
    case WeightType::q6_k: return GridsOf<WeightType::q6_k>;
    case WeightType::iq4_xs: return GridsOf<WeightType::iq4_xs>;
    case WeightType::mxfp4: return GridsOf<WeightType::mxfp4>;
    default: return GridsOf<WeightType::q4_0>;
  }
}

// ---- weights as numbers ----

// Where expanded weights go: 16 for each input, as f32.
struct FloatWeights {
  float* HWY_RESTRICT to;
  // Inputs k .. k + 3, from a lane on.
  HWY_INLINE void operator()(std::int64_t k, int lane, const VF (&w)[4]) const {
    Unroll<4>([&](auto t) BITTERN_INLINE_LAMBDA {
      hn::StoreU(w[t], DF(), to + (k + t) * matmul::kLanes + lane);
    });
  }
};
#if HWY_TARGET == HWY_AVX3_DL
// 16 pairs for every two inputs, rounded to bf16.
struct PairWeights {
  std::uint32_t* HWY_RESTRICT to;
  pairs::Interleaver interleave;
  HWY_INLINE void operator()(std::int64_t k, int, const VF (&w)[4]) const {
    std::uint32_t* const at = to + k / 2 * matmul::kLanes;
    hn::StoreU(interleave(w[0], w[1]), DU(), at);
    hn::StoreU(interleave(w[2], w[3]), DU(), at + matmul::kLanes);
  }
};
#endif

// The weights of `units` units. kFused: fma(c, s, b); otherwise s c + b, each rounded.
template <class C, bool kFused, class To>
HWY_NOINLINE void ExpandUnits(const WeightDesc& d, const matmul::PanelFormat& format, UnitWalk walk,
                              To to) {
  const C codes;
  const DF df;
  const VI offset = hn::Set(DI(), OffsetOf(d));
  const int group = static_cast<int>(d.group());
  GridFunction* const grids = GridFunctionOf(d);
  constexpr int kMostRuns = 32;  // of units whose headers lie together
  alignas(64) float s[kMostRuns * matmul::kLanes], b[kMostRuns * matmul::kLanes];
  std::int64_t input = 0;
  const auto expand = [&](const std::uint8_t* headers, const std::uint8_t* chunk,
                          std::int64_t n) BITTERN_INLINE_LAMBDA {
    grids(d, format, {headers, n}, 1, {s, b});
    for (int k = 0; k < n * format.unit; k += matmul::kChunk, chunk += C::kChunkBytes) {
      for (int part = 0; part < kParts; ++part) {
        const int lane = part * kWidth;
        Unroll<8>([&](auto q) BITTERN_INLINE_LAMBDA {
          const int run = (k + 4 * q) / group * matmul::kLanes + lane;
          const VF sv = hn::LoadU(df, s + run), bv = hn::LoadU(df, b + run);
          const VU quad = codes.template Quad<q>(chunk + 4 * lane);
          VF w[4];
          Unroll<4>([&](auto t) BITTERN_INLINE_LAMBDA {
            VU byte = quad;
            if constexpr (t != 0) byte = hn::ShiftRight<8 * t>(byte);
            if constexpr (t != 3) byte = hn::And(byte, hn::Set(DU(), 255u));
            const VF c = hn::ConvertTo(df, hn::Sub(hn::BitCast(DI(), byte), offset));
            if constexpr (kFused) {
              w[t] = hn::MulAdd(c, sv, bv);
            } else {
              w[t] = hn::Add(hn::Mul(sv, c), bv);
            }
          });
          to(input + 4 * q, lane, w);
        });
      }
      input += matmul::kChunk;
    }
  };
  ForUnits(format, walk, expand);
}

// Inputs [first, first + count) of a panel as numbers, 16 for each input; `first` and `count` are
// multiples of ExpandStep, but for the last.
inline std::int64_t ExpandStep(const WeightDesc& d) {
  if (d.plain()) return 1;
  const matmul::PanelFormat format = matmul::panel_format(d);
  return format.unit * format.together;
}
template <class To>
void ExpandCodes(const WeightDesc& d, const std::uint8_t* panel, std::int64_t first,
                 std::int64_t count, const To& to) {
  const matmul::PanelFormat format = matmul::panel_format(d);
  const UnitWalk walk{panel + format.run_at(first / format.unit), count / format.unit};
  WithCodes(d, [&]<class C>(Type<C>) {
    if (d.affine()) {
      ExpandUnits<C, true>(d, format, walk, to);
    } else {
      ExpandUnits<C, false>(d, format, walk, to);
    }
  });
}
inline void Expand(const WeightDesc& d, const std::uint8_t* panel, std::int64_t first,
                   std::int64_t count, float* to) {
  if (d.plain()) {
    (void)visit<float, f16, bf16>(d.plain_element(), [&]<class T>(Type<T>) {
      const T* from = reinterpret_cast<const T*>(panel) + first * matmul::kLanes;
      for (std::int64_t i = 0; i < count * matmul::kLanes; i += kWidth)
        hn::StoreU(LoadMath(DF(), from + i), DF(), to + i);
      return Status();
    });
    return;
  }
  ExpandCodes(d, panel, first, count, FloatWeights{to});
}
#if HWY_TARGET == HWY_AVX3_DL
// The same as pairs of neighbouring inputs, rounded to bf16; 0 follows an odd last one.
inline void ExpandPairs(const WeightDesc& d, const std::uint8_t* panel, std::int64_t first,
                        std::int64_t count, std::uint32_t* to) {
  const pairs::Interleaver interleave;
  if (!d.plain()) return ExpandCodes(d, panel, first, count, PairWeights{to, interleave});
  (void)visit<float, f16, bf16>(d.plain_element(), [&]<class T>(Type<T>) {
    const T* from = reinterpret_cast<const T*>(panel) + first * matmul::kLanes;
    for (std::int64_t k = 0; k < count; k += 2, from += 2 * matmul::kLanes, to += matmul::kLanes) {
      const VF second = k + 1 < count ? LoadMath(DF(), from + matmul::kLanes) : hn::Zero(DF());
      hn::StoreU(interleave(LoadMath(DF(), from), second), DU(), to);
    }
    return Status();
  });
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
