// Tiles of products: some rows of x times one or more panels of W, in integers, as expanded floats
// or as pairs of bf16.
#if defined(BITTERN_OPS_QUANTIZED_MATMUL_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZED_MATMUL_TILES_INL_H_
#undef BITTERN_OPS_QUANTIZED_MATMUL_TILES_INL_H_
#else
#define BITTERN_OPS_QUANTIZED_MATMUL_TILES_INL_H_
#endif

#include "cpu/bf16-inl.h"
#include "cpu/bytes-inl.h"
#include "ops/matmul/expand-inl.h"
#include "ops/matmul/quantized_matmul/work.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// A tile of integers: rows of x times panels of W.
struct TileJob {
  const WeightDesc* weights;
  const matmul::PanelFormat* format;
  UnitWalk walk;            // of the first panel
  std::int64_t next_panel;  // bytes from one panel to the next
  // s and b of all runs; or, where `grids` is not null, room for those of units that lie together,
  // which it makes shortly before their codes are read: memory is then read once, from end to end.
  const float* s;
  const float* b;          // null: no biases
  std::int64_t next_grid;  // numbers from one panel's to the next's
  GridFunction* grids;     // for one panel only
  Grid room;
  int repeat;
  const std::uint8_t* ahead;  // lines to fetch meanwhile, one for each run of several panels
  const std::uint8_t* ahead_end;
  const std::int32_t* x;
  const float* factors;
  std::int64_t tile;   // rows of the tile that x is packed for
  int chunks_per_run;  // 1 or 2
  int planes;
  float* y;               // results
  std::int64_t y_stride;  // from row to row; panels lie side by side
};

constexpr float kZeros[matmul::kIntegerTile] = {};
HWY_INLINE VI IntegerAt(const float* p) { return hn::Set(DI(), std::bit_cast<std::int32_t>(*p)); }

// The shape of a tile: rows of x times panels; planes of x that are multiplied at once, and sums
// for each result: one row has few to work at in turn, so it gets two for each.
template <int kRows_, int kPanels_, int kAtOnce_>
struct TileShape {
  static constexpr int kRows = kRows_, kPanels = kPanels_, kAtOnce = kAtOnce_;
  static constexpr int kChains = kRows * kPanels == 1 ? 2 : 1;
};

// Whether the upper of two codes in a byte is multiplied where it is, as 16 times itself. Those
// have a chain of their own, whose sums are shifted once. Only vpdpbusd takes such large bytes.
template <class C, class T>
inline constexpr bool kHighAsIs = HWY_TARGET == HWY_AVX3_DL && C::kNibbles && T::kChains == 2;

// The scales and biases of a run: numbers in memory, or of one panel in registers.
struct GridAt {
  const float* s;
  const float* b;     // null: no biases
  std::int64_t next;  // numbers from one panel's to the next's

  HWY_INLINE bool biased() const { return b != nullptr; }
  HWY_INLINE VF Scale(int p) const { return hn::LoadU(DF(), s + p * next); }
  HWY_INLINE VF Bias(int p) const { return hn::LoadU(DF(), b + p * next); }
};
template <bool kBiased>
struct GridOf {
  VF s, b;

  static constexpr bool biased() { return kBiased; }
  HWY_INLINE VF Scale(int) const { return s; }
  HWY_INLINE VF Bias(int) const { return b; }
};

// One run's integers into the sums: `sum` are its dot products, factors and grid its own.
template <class T, class G>
HWY_INLINE void FinishRun(const VI (&sum)[T::kPanels][T::kRows], const float* factors,
                          const G& grid, VF (&acc)[T::kPanels][T::kRows]) {
  const DF df;
  if (grid.biased()) {
    Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
      const VF bv = grid.Bias(p);
      Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
        acc[p][r] = hn::MulAdd(bv, hn::Set(df, factors[T::kRows + r]), acc[p][r]);
      });
    });
  }
  Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
    const VF sv = grid.Scale(p);
    Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
      const VF dot = hn::ConvertTo(df, sum[p][r]);
      acc[p][r] = hn::MulAdd(hn::Mul(dot, hn::Set(df, factors[r])), sv, acc[p][r]);
    });
  });
}

// Quads [kFirst, kFirst + kQuads) of a chunk times planes of x.
template <class C, class T, int kFirst, int kQuads>
HWY_INLINE void AddQuads(const C& codes, const std::uint8_t* chunk, std::int64_t next_panel,
                         const std::int32_t* x,
                         VI (&sum)[T::kAtOnce][T::kChains][T::kPanels][T::kRows]) {
  Unroll<kQuads>([&](auto i) BITTERN_INLINE_LAMBDA {
    constexpr int q = kFirst + i;
    VI quad[T::kPanels];
    Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
      quad[p] = hn::BitCast(DI(), codes.template Quad<q, kHighAsIs<C, T>>(chunk + p * next_panel));
    });
    Unroll<T::kAtOnce>([&](auto plane) BITTERN_INLINE_LAMBDA {
      Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
        const std::int32_t* const from = x + (plane * 8 + q) * T::kRows + r;
        auto& to = sum[plane][i % T::kChains];
        if constexpr (T::kPanels == 1) {
          to[0][r] = DotBytesOf<C::kMost>(to[0][r], quad[0], from);
        } else {
          const VI four = hn::Set(DI(), *from);
          Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
            to[p][r] = DotBytes<C::kMost>(to[p][r], quad[p], four);
          });
        }
      });
    });
  });
}

// The run that begins at this chunk and has `chunks` of them, or half of one. Of the job's planes
// T::kAtOnce are multiplied at once; the others follow, which needs fewer registers.
template <class C, class T, int kFirst, int kQuads, class G>
HWY_INLINE void AddRun(const C& codes, const TileJob& job, const std::uint8_t* chunk, int chunks,
                       const std::int32_t* x, int planes, const float* factors, const G& grid,
                       VF (&acc)[T::kPanels][T::kRows]) {
  // The last plane's sums begin with -offset C, which then costs no operation of its own.
  const float* taken = factors + 2 * T::kRows;
  const float* first = planes == T::kAtOnce ? taken : kZeros;
  VI sum[T::kAtOnce][T::kChains][T::kPanels][T::kRows];
  const auto each = [&](auto&& f) BITTERN_INLINE_LAMBDA {
    Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
      Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA { f(p, r); });
    });
  };
  Unroll<T::kAtOnce>([&](auto plane) BITTERN_INLINE_LAMBDA {
    Unroll<T::kChains>([&](auto c) BITTERN_INLINE_LAMBDA {
      each([&](auto p, auto r) BITTERN_INLINE_LAMBDA {
        constexpr bool kLast = plane == T::kAtOnce - 1 && c == 0;
        sum[plane][c][p][r] = kLast ? IntegerAt(first + r) : hn::Zero(DI());
      });
    });
  });
  for (int plane = 0; plane < planes; plane += T::kAtOnce) {
    if (plane > 0) {
      each([&](auto p, auto r) BITTERN_INLINE_LAMBDA {
        VI& to = sum[0][0][p][r];
        to = hn::Add(hn::ShiftLeft<8>(to), IntegerAt(taken + r));
      });
    }
    for (int c = 0; c < chunks; ++c) {
      AddQuads<C, T, kFirst, kQuads>(codes, chunk + c * C::kChunkBytes, job.next_panel,
                                     x + (c * planes + plane) * 8 * T::kRows, sum);
    }
  }
  each([&](auto p, auto r) BITTERN_INLINE_LAMBDA {
    if constexpr (T::kChains == 2) {
      Unroll<T::kAtOnce>([&](auto plane) BITTERN_INLINE_LAMBDA {
        VI second = sum[plane][1][p][r];
        if constexpr (kHighAsIs<C, T>) second = hn::ShiftRight<4>(second);
        sum[plane][0][p][r] = hn::Add(sum[plane][0][p][r], second);
      });
    }
    if constexpr (T::kAtOnce == 2)
      sum[0][0][p][r] = hn::Add(hn::ShiftLeft<8>(sum[0][0][p][r]), sum[1][0][p][r]);
  });
  FinishRun<T>(sum[0][0], factors, grid, acc);
}

// kHalf: runs of 16 inputs, half a chunk.
template <class C, bool kHalf, class T>
HWY_NOINLINE void IntegerTile(const TileJob& job) {
  const C codes;
  const DF df;
  const int planes = T::kAtOnce == 2 ? 2 : job.planes;
  const int chunks = kHalf ? 1 : job.chunks_per_run;
  const std::int64_t header = job.format->header_bytes(), code_bytes = job.format->code_bytes();
  const std::int64_t together = job.format->together;
  for (int part = 0; part < kParts; ++part) {
    const int lane = part * kWidth;
    GridAt grid{job.s + lane, job.b == nullptr ? nullptr : job.b + lane, job.next_grid};
    const std::int64_t next_b = grid.biased() ? matmul::kLanes : 0;
    const std::int32_t* x = job.x;
    const float* factors = job.factors;
    VF acc[T::kPanels][T::kRows];
    Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
      Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA { acc[p][r] = hn::Zero(df); });
    });
    const std::uint8_t* at = job.walk.at + 4 * lane;
    const std::uint8_t* ahead = job.ahead;
    for (std::int64_t units = job.walk.units; units > 0; units -= together) {
      const std::int64_t n = std::min(together, units);
      if constexpr (T::kPanels == 1) {
        if (job.grids != nullptr) {
          job.grids(*job.weights, *job.format, {at - 4 * lane, n}, job.repeat, job.room);
          grid.s = job.s + lane;
          if (grid.biased()) grid.b = job.b + lane;
        }
      }
      at += n * header;
      const std::uint8_t* end = at + n * code_bytes;
      for (; at < end; at += chunks * C::kChunkBytes) {
        if constexpr (T::kPanels > 1) {
          if (ahead < job.ahead_end) __builtin_prefetch(ahead, 0, 2);
          ahead += 64;
        }
        if constexpr (kHalf) {
          AddRun<C, T, 0, 4>(codes, job, at, 1, x, planes, factors, grid, acc);
          const GridAt second{grid.s + matmul::kLanes, grid.b + next_b, grid.next};
          AddRun<C, T, 4, 4>(codes, job, at, 1, x, planes, factors + 3 * T::kRows, second, acc);
        } else {
          AddRun<C, T, 0, 8>(codes, job, at, chunks, x, planes, factors, grid, acc);
        }
        constexpr int kRuns = kHalf ? 2 : 1;
        factors += 3 * T::kRows * kRuns;
        grid.s += matmul::kLanes * kRuns;
        grid.b += next_b * kRuns;
        x += chunks * planes * 8 * T::kRows;
      }
    }
    Unroll<T::kPanels>([&](auto p) BITTERN_INLINE_LAMBDA {
      Unroll<T::kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
        hn::StoreU(acc[p][r], df, job.y + r * job.y_stride + p * matmul::kLanes + lane);
      });
    });
  }
}

// One row times one panel, where a unit has one scale in f16 or bf16 and a bias like it or none:
// they go from the header to registers.
template <class C, class S, bool kBiased, int kPlanes>
HWY_NOINLINE void OneRow(const TileJob& job) {
  using T = TileShape<1, 1, kPlanes>;
  const C codes;
  const DF df;
  const int chunks = job.chunks_per_run;
  const std::int64_t header = job.format->header_bytes(), code_bytes = job.format->code_bytes();
  for (int part = 0; part < kParts; ++part) {
    const int lane = part * kWidth;
    const std::int32_t* x = job.x;
    const float* factors = job.factors;
    VF acc[1][1] = {{hn::Zero(df)}};
    const std::uint8_t* headers = job.walk.at;
    for (std::int64_t units = job.walk.units, n; units > 0; units -= n) {
      n = std::min<std::int64_t>(job.format->together, units);
      const std::uint8_t* at = headers + n * header + 4 * lane;
      for (std::int64_t u = 0; u < n; ++u, headers += header) {
        const Header h{headers, part};
        GridOf<kBiased> grid{h.Floats<S>(0), hn::Zero(df)};
        if constexpr (kBiased) grid.b = h.Floats<S>(sizeof(S));
        const std::uint8_t* end = at + code_bytes;
        for (; at < end; at += chunks * C::kChunkBytes) {
          AddRun<C, T, 0, 8>(codes, job, at, chunks, x, kPlanes, factors, grid, acc);
          factors += 3;
          x += chunks * kPlanes * 8;
        }
      }
      headers = at - 4 * lane;
    }
    hn::StoreU(acc[0][0], df, job.y + lane);
  }
}

// Panels that a tile of many rows takes at once: each four bytes of x then meet three panels. AVX2
// has registers for one.
constexpr int kIntegerPanels = HWY_TARGET == HWY_AVX2 ? 1 : matmul::kPanelsAtOnce;

using TileFunction = void(const TileJob& job);
struct IntegerTiles {
  TileFunction *one, *two, *four, *four_panels;

  // job.tile rows times one panel, or four times kIntegerPanels.
  HWY_INLINE void operator()(const TileJob& job, bool panels) const {
    (panels ? four_panels : job.tile == 4 ? four : job.tile == 2 ? two : one)(job);
  }
};
template <class C, bool kHalf>
IntegerTiles TilesOf(int planes) {
  constexpr int kFour = HWY_TARGET == HWY_AVX2 ? 1 : 2;
  constexpr auto kPanels = IntegerTile<C, kHalf, TileShape<4, kIntegerPanels, 1>>;
  if (planes == 1) {
    return {IntegerTile<C, kHalf, TileShape<1, 1, 1>>, IntegerTile<C, kHalf, TileShape<2, 1, 1>>,
            IntegerTile<C, kHalf, TileShape<4, 1, 1>>, kPanels};
  }
  return {IntegerTile<C, kHalf, TileShape<1, 1, 2>>, IntegerTile<C, kHalf, TileShape<2, 1, 2>>,
          IntegerTile<C, kHalf, TileShape<4, 1, kFour>>, kPanels};
}
// OneRow, for the types it is for; null for the others.
template <class C>
TileFunction* OneRowOf(const WeightDesc& w, int planes) {
  const auto with = [&]<class S, bool kBiased>() -> TileFunction* {
    return planes == 1 ? OneRow<C, S, kBiased, 1> : OneRow<C, S, kBiased, 2>;
  };
  switch (w.type) {
    case WeightType::affine:
      if (w.scale_element == DType::bf16) return with.template operator()<bf16, true>();
      return w.scale_element == DType::f16 ? with.template operator()<f16, true>() : nullptr;
    case WeightType::q4_1:
    case WeightType::q5_1: return with.template operator()<f16, true>();
    case WeightType::q4_0:
    case WeightType::q5_0:
    case WeightType::q8_0:
    case WeightType::iq4_nl: return with.template operator()<f16, false>();
    default: return nullptr;
  }
}
inline IntegerTiles TilesFor(const matmul::Work& work) {
  IntegerTiles tiles{};
  const auto planes = static_cast<int>(work.planes);
  WithCodes(work.d.weights, [&]<class C>(Type<C>) {
    if constexpr (C::kCodeBits == 2 || C::kCodeBits == 3 || C::kCodeBits == 6) {
      if (work.d.run() == 16) {
        tiles = TilesOf<C, true>(planes);
        return;
      }
    }
    tiles = TilesOf<C, false>(planes);
    if (TileFunction* const one = OneRowOf<C>(work.d.weights, planes)) tiles.one = one;
  });
  return tiles;
}

// ---- floats ----

// acc[rows][panels * 16] += x w over `count` inputs, k ascending. kPanels panels of weights lie
// `panel` floats apart, x has `tile` rows.
template <int kRows, int kVectors>
HWY_NOINLINE void FloatTile(const float* const* w, const float* x, std::int64_t tile,
                            std::int64_t count, float* const* acc) {
  const DF df;
  VF sum[kRows][kVectors];
  Unroll<kRows>([&](auto r) HWY_ATTR {
    Unroll<kVectors>([&](auto v)
                         HWY_ATTR { sum[r][v] = hn::LoadU(df, acc[v] + r * matmul::kLanes); });
  });
  const float* weights[kVectors];
  for (int v = 0; v < kVectors; ++v) weights[v] = w[v];
  for (std::int64_t k = 0; k < count; ++k) {
    VF wv[kVectors];
    Unroll<kVectors>([&](auto v)
                         HWY_ATTR { wv[v] = hn::LoadU(df, weights[v] + k * matmul::kLanes); });
    Unroll<kRows>([&](auto r) HWY_ATTR {
      const VF xv = hn::Set(df, x[k * tile + r]);
      Unroll<kVectors>([&](auto v) HWY_ATTR { sum[r][v] = hn::MulAdd(xv, wv[v], sum[r][v]); });
    });
  }
  Unroll<kRows>([&](auto r) HWY_ATTR {
    Unroll<kVectors>([&](auto v)
                         HWY_ATTR { hn::StoreU(sum[r][v], df, acc[v] + r * matmul::kLanes); });
  });
}

// Vectors of weights that a tile of registers has at once.
constexpr int kFloatRows = HWY_TARGET == HWY_AVX2 ? 4 : 12;

template <int kRows, int kVectors>
HWY_INLINE void FloatVectors(const float* const* w, int vectors, const float* x, std::int64_t tile,
                             std::int64_t count, float* const* acc) {
  int v = 0;
  for (; v + kVectors <= vectors; v += kVectors)
    FloatTile<kRows, kVectors>(w + v, x, tile, count, acc + v);
  for (; v < vectors; ++v) FloatTile<kRows, 1>(w + v, x, tile, count, acc + v);
}

// A tile of rows times `vectors` vectors of weights.
inline void FloatTiles(const float* const* w, int vectors, const float* x, std::int64_t tile,
                       std::int64_t count, float* const* acc) {
  switch (tile) {
    case 1: return FloatVectors<1, 4>(w, vectors, x, tile, count, acc);
    case 2: return FloatVectors<2, 4>(w, vectors, x, tile, count, acc);
    case 4: return FloatVectors<4, 2>(w, vectors, x, tile, count, acc);
    default: break;
  }
  float* rows[8];
  for (std::int64_t r = 0; r < tile; r += kFloatRows) {
    for (int v = 0; v < vectors; ++v) rows[v] = acc[v] + r * matmul::kLanes;
    FloatVectors<kFloatRows, 2>(w, vectors, x + r, tile, count, rows);
  }
}

// ---- pairs of bf16 ----

#if HWY_TARGET == HWY_AVX3_DL
// Expanded panels, `next` words from one to the next: pair p of panel v is 16 words.
struct PanelPairs {
  const std::uint32_t* words;
  std::int64_t next;
  HWY_INLINE pairs::VP operator()(std::int64_t p, int v) const {
    return hn::LoadU(pairs::DP(), words + v * next + p * matmul::kLanes);
  }
};

// Rows of x times panels of W: to = from + x w over `count` pairs, ascending. Rows of `from` and
// `to` hold 16 sums for each panel.
struct PairJob {
  PanelPairs w;
  std::int64_t panels;
  pairs::Left x;
  std::int64_t count;
  const float* from;  // null: zeros
  std::int64_t from_stride;
  float* to;
  std::int64_t to_stride;
};

// Panels [v, v + kPanels).
template <int kRows, int kPanels>
HWY_NOINLINE void PairTile(const PairJob& job, std::int64_t v) {
  const pairs::DF df;
  pairs::VF sum[kRows][kPanels];
  const std::int64_t lane = v * matmul::kLanes;
  Unroll<kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
    Unroll<kPanels>([&](auto i) BITTERN_INLINE_LAMBDA {
      const std::int64_t at = r * job.from_stride + i * matmul::kLanes + lane;
      sum[r][i] = job.from == nullptr ? hn::Zero(df) : hn::LoadU(df, job.from + at);
    });
  });
  const PanelPairs w{job.w.words + v * job.w.next, job.w.next};
  pairs::Add(job.x, w, 0, job.count, sum);
  Unroll<kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
    Unroll<kPanels>([&](auto i) BITTERN_INLINE_LAMBDA {
      hn::StoreU(sum[r][i], df, job.to + r * job.to_stride + i * matmul::kLanes + lane);
    });
  });
}

template <int kRows, int kPanels>
HWY_INLINE void PairPanels(const PairJob& job) {
  std::int64_t v = 0;
  for (; v + kPanels <= job.panels; v += kPanels) PairTile<kRows, kPanels>(job, v);
  for (; v < job.panels; ++v) PairTile<kRows, 1>(job, v);
}

inline void PairTiles(const PairJob& job, std::int64_t tile) {
  switch (tile) {
    case 1: return PairPanels<1, 4>(job);
    case 2: return PairPanels<2, 4>(job);
    case 4: return PairPanels<4, 4>(job);
    default: return PairPanels<matmul::kTile, 2>(job);
  }
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
