// Every form of the SIMD halving tree against the literal one, bit by bit.
#include <gtest/gtest.h>

#include <random>

#include "core/numerics.h"
#include "cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/reduce_test.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/reduce-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

template <class T>
struct Load {
  const T* terms;
  hn::ScalableTag<T> d;

  HWY_INLINE hn::Vec<hn::ScalableTag<T>> operator()(std::int64_t i) const {
    return hn::LoadU(d, terms + i);
  }
  HWY_INLINE hn::Vec<hn::ScalableTag<T>> operator()(std::int64_t i, std::int64_t count) const {
    HWY_ALIGN T lane[hn::MaxLanes(hn::ScalableTag<T>())] = {};
    std::copy_n(terms + i, count, lane);
    return hn::Load(d, lane);
  }
};

template <class T>
struct LoadTwice {
  Load<T> load;
  using V = hn::Vec<hn::ScalableTag<T>>;
  HWY_INLINE TwoTerms<V> operator()(std::int64_t i) const {
    return {load(i), hn::Add(load(i), load(i))};
  }
  HWY_INLINE TwoTerms<V> operator()(std::int64_t i, std::int64_t count) const {
    return {load(i, count), hn::Add(load(i, count), load(i, count))};
  }
};

template <class T>
T SumRun(const T* terms, std::int64_t n) {
  const hn::ScalableTag<T> d;
  return LaneTree(d, RowTree(d, n, Load<T>{terms, d}), RowWidth(d, n));
}

template <class T>
void SumTwice(const T* terms, std::int64_t n, T* out) {
  const hn::ScalableTag<T> d;
  const auto both = RowTree(d, n, LoadTwice<T>{{terms, d}});
  out[0] = LaneTree(d, both.first, RowWidth(d, n));
  out[1] = LaneTree(d, both.second, RowWidth(d, n));
}

// As many runs as a vector has lanes, one after another; returns how many.
template <class T>
std::int64_t SumRuns(const T* terms, std::int64_t n, T* out) {
  const hn::ScalableTag<T> d;
  hn::Vec<hn::ScalableTag<T>> v[hn::MaxLanes(d)];
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (n < lanes) return 0;
  for (std::int64_t g = 0; g < lanes; ++g) v[g] = RowTree(d, n, Load<T>{terms + g * n, d});
  hn::StoreU(LaneTrees(d, v), d, out);
  return lanes;
}

template <class T>
struct Copy {
  const T* terms;
  const cpu::BlockShape& shape;
  void operator()(std::int64_t first, std::int64_t count, T* block) const {
    for (std::int64_t sum = 0; sum < shape.sums; ++sum)
      std::copy_n(terms + (sum * shape.n + first) * shape.columns, count * shape.columns,
                  block + sum * shape.rows * shape.columns);
  }
};

// In `split` subtrees, as threads would.
template <class T>
void SumColumns(const T* terms, std::int64_t n, std::int64_t columns, std::int64_t sums,
                std::int64_t split, T* out) {
  const hn::ScalableTag<T> d;
  const cpu::BlockShape shape(n, columns, sums);
  while (split > 1 && split / 2 >= shape.blocks) split /= 2;
  std::vector<T> part(static_cast<std::size_t>(split * shape.lanes()));
  for (std::int64_t r = 0; r < split; ++r)
    BlockTree(d, shape, Copy<T>{terms, shape}, r, split, part.data() + r * shape.lanes());
  for (std::int64_t stride = split / 2; stride > 0; stride /= 2)
    AddTo(d, part.data() + stride * shape.lanes(), stride * shape.lanes(), part.data());
  FinishBlock(d, shape, part.data());
  for (std::int64_t sum = 0; sum < sums; ++sum)
    std::copy_n(part.data() + sum * shape.rows * columns, columns, out + sum * columns);
}

float SumRunF32(const float* t, std::int64_t n) { return SumRun(t, n); }
double SumRunF64(const double* t, std::int64_t n) { return SumRun(t, n); }
void SumTwiceF32(const float* t, std::int64_t n, float* out) { SumTwice(t, n, out); }
std::int64_t SumRunsF32(const float* t, std::int64_t n, float* out) { return SumRuns(t, n, out); }
std::int64_t SumRunsF64(const double* t, std::int64_t n, double* o) { return SumRuns(t, n, o); }
void SumColumnsF32(const float* t, std::int64_t n, std::int64_t columns, std::int64_t sums,
                   std::int64_t split, float* out) {
  SumColumns(t, n, columns, sums, split, out);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

BITTERN_EXPORT(SumRunF32);
BITTERN_EXPORT(SumRunF64);
BITTERN_EXPORT(SumTwiceF32);
BITTERN_EXPORT(SumRunsF32);
BITTERN_EXPORT(SumRunsF64);
BITTERN_EXPORT(SumColumnsF32);

constexpr std::int64_t kLengths[] = {
    1,  2,   3,   4,   5,   7,   8,   9,   15,   16,   17,   31,   32,   33,   48,    64,   80,
    96, 100, 127, 128, 129, 255, 256, 512, 1000, 1024, 2047, 2048, 2049, 4099, 16384, 70001};

// Values whose sum depends on the order, with signed zeros everywhere in one kind and infinities
// and NaN now and then in another.
template <class T>
std::vector<T> terms(std::int64_t n, int kind, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<T> t(static_cast<std::size_t>(n));
  for (T& x : t) {
    const auto bits = rng();
    x = std::ldexp(static_cast<T>(static_cast<std::int32_t>(bits)),
                   static_cast<int>(bits >> 32 & 31) - 40);
    if (kind == 1) x = T(-0.0);
    if (kind == 2 && (bits >> 40 & 7) != 0) x = (bits >> 44 & 1) != 0 ? T(0) : T(-0.0);
    if (kind == 3 && (bits >> 40) % static_cast<std::uint64_t>(n + 1) == 0)
      x = (bits >> 33 & 1) != 0 ? std::numeric_limits<T>::infinity()
                                : std::numeric_limits<T>::quiet_NaN();
  }
  return t;
}

template <class T>
void expect_same(T got, T want, std::string_view what, std::int64_t n) {
  const bool same = (std::isnan(got) && std::isnan(want)) ||
                    (got == want && std::signbit(got) == std::signbit(want));
  EXPECT_TRUE(same) << what << " of " << n << " terms: " << got << ", expected " << want;
}

template <class F>
void on_every_isa(F&& f) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::name(isa));
    cpu::force_isa(isa);
    f();
  }
  cpu::force_isa(cpu::Isa::none);
}

template <class T>
T literal(std::vector<T> t) {
  return halving_sum(t);
}

TEST(HalvingTree, OneRun) {
  on_every_isa([] {
    for (const std::int64_t n : kLengths) {
      for (int kind = 0; kind < 4; ++kind) {
        const auto f = terms<float>(n, kind, static_cast<std::uint64_t>(n));
        const auto d = terms<double>(n, kind, static_cast<std::uint64_t>(n));
        expect_same(BITTERN_CALL(SumRunF32)(f.data(), n), literal(f), "f32 sum", n);
        expect_same(BITTERN_CALL(SumRunF64)(d.data(), n), literal(d), "f64 sum", n);
        float both[2];
        BITTERN_CALL(SumTwiceF32)(f.data(), n, both);
        expect_same(both[0], literal(f), "first sum", n);
        auto twice = f;
        for (float& x : twice) x += x;
        expect_same(both[1], literal(twice), "second sum", n);
      }
    }
  });
}

template <class T, class F>
void check_runs(std::int64_t n, int kind, F&& sums) {
  const auto t = terms<T>(16 * n, kind, static_cast<std::uint64_t>(n) + 5);
  T got[16];
  const std::int64_t runs = sums(t.data(), n, got);
  for (std::int64_t g = 0; g < runs; ++g)
    expect_same(got[g], literal(std::vector<T>(t.begin() + g * n, t.begin() + (g + 1) * n)),
                "one sum of many", n);
}

TEST(HalvingTree, ManyRunsAtOnce) {
  on_every_isa([] {
    for (const std::int64_t n : {4, 8, 16, 17, 32, 48, 64, 96, 128, 1000}) {
      for (int kind = 0; kind < 4; ++kind) {
        check_runs<float>(n, kind, BITTERN_CALL(SumRunsF32));
        check_runs<double>(n, kind, BITTERN_CALL(SumRunsF64));
      }
    }
  });
}

TEST(HalvingTree, ColumnsInAnySplit) {
  on_every_isa([] {
    for (const std::int64_t columns : {1, 3, 16, 37, 1024}) {
      for (const std::int64_t n : {1, 2, 3, 5, 64, 65, 1000, 4099}) {
        if (n * columns > 200'000) continue;
        for (int kind = 0; kind < 4; ++kind) {
          const auto t = terms<float>(2 * n * columns, kind, static_cast<std::uint64_t>(n));
          std::vector<float> want(static_cast<std::size_t>(2 * columns));
          for (std::int64_t c = 0; c < 2 * columns; ++c) {
            std::vector<float> column;
            for (std::int64_t i = 0; i < n; ++i)
              column.push_back(
                  t[static_cast<std::size_t>((c / columns * n + i) * columns + c % columns)]);
            want[static_cast<std::size_t>(c)] = halving_sum(column);
          }
          for (const std::int64_t split : {1, 2, 8}) {
            std::vector<float> got(want.size());
            BITTERN_CALL(SumColumnsF32)(t.data(), n, columns, 2, split, got.data());
            for (std::size_t c = 0; c < want.size(); ++c)
              expect_same(got[c], want[c], "column sum", n);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace bittern
#endif  // HWY_ONCE
