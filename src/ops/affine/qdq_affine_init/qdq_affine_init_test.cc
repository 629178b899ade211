#include "ops/affine/qdq_affine_init/qdq_affine_init_test.h"

#include <bit>

#include "cpu/dispatch.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace qdq_affine_init_test;

TEST(QdqAffineInit, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_init"); }

// What affine_rules.h says of divide_once where codes round half to even, by trying it. Next to h s
// are the x for which it matters: two ulps away, x / s is more than half an ulp from h.
TEST(QdqAffineInit, OneCorrectionDivides) {
  std::int64_t wrong = 0;
  const auto check = [&](float s) {
    const float inverse = 1 / s;
    for (int k = 0; k <= 255; ++k) {
      const float h = static_cast<float>(k) + 0.5f;
      const auto bits = std::bit_cast<std::int32_t>(h * s);
      for (int ulps = -2; ulps <= 2; ++ulps) {
        const auto x = std::bit_cast<float>(bits + ulps);
        const float z = affine::divide_once(x, s, inverse), exact = x / s;
        wrong += (z > h) != (exact > h) || (z < h) != (exact < h);
      }
    }
  };
  for (const int bits : {8, 11})  // of bf16 and f16
    for (int edge = 1 << (bits - 1); edge < 1 << bits; ++edge)
      for (int k = 1; k <= 255; ++k) check(static_cast<float>(edge) / static_cast<float>(k));
  check(1e-7f);
  EXPECT_EQ(wrong, 0);
}

// Weights of few bits meet ties of scales of few bits, and groups with NaN beside ordinary ones.
TEST(QdqAffineInit, TiesOfHalves) {
  const auto check = [&]<class X, class S>(Type<X>, Type<S>) {
    oracle::Rng rng(11);
    for (const int bits : {2, 3, 4, 8}) {
      for (const AffineMethod method :
           {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
        std::vector<X> w(64 * 200);
        for (X& x : w) x = from_math<X>(static_cast<float>(rng.below(400) - 200) / 64);
        for (std::size_t i = 0; i < w.size(); i += 997) w[i] = from_math<X>(i % 2 ? kNan : kInf);
        for (std::size_t i = 5; i < w.size(); i += 333) w[i] = from_math<X>(-1e-5f);
        const AffineDesc d = group_of(64, bits, method);
        const auto ref = init<X, S>(d, w, {}, "ref"), cpu = init<X, S>(d, w, {});
        EXPECT_EQ(ref.q, cpu.q) << bits;
        for (std::size_t g = 0; g < ref.scales.size(); ++g) {
          EXPECT_EQ(ref.s(g), cpu.s(g));
          EXPECT_EQ(ref.b(g), cpu.b(g));
        }
      }
    }
  };
  check(Type<bf16>(), Type<bf16>());
  check(Type<bf16>(), Type<float>());
  check(Type<f16>(), Type<f16>());
}

// One group in 40 of bf16 comes and goes between two fits, whose last is the 20th.
TEST(QdqAffineInit, FitsThatComeAndGo) {
  oracle::Rng rng(13);
  const auto check = [&]<class X>(Type<X>) {
    for (const int bits : {2, 3, 4, 8}) {
      std::vector<X> w(64 * 4000);
      for (X& x : w) x = from_math<X>(static_cast<float>(rng.normal()));
      const AffineDesc d = group_of(64, bits, AffineMethod::lsq);
      const auto ref = init<X>(d, w, {}, "ref"), cpu = init<X>(d, w);
      EXPECT_EQ(ref.q, cpu.q) << bits;
      for (std::size_t g = 0; g < ref.scales.size(); ++g) {
        EXPECT_EQ(ref.s(g), cpu.s(g));
        EXPECT_EQ(ref.b(g), cpu.b(g));
      }
    }
  };
  check(Type<bf16>());
  check(Type<f16>());
}

// Weights on and next to every b + (k + 1/2) s and next to 0, for which codes are easily wrong by
// one; groups of both signs and of one, with zeros of both signs, and NaN of both.
TEST(QdqAffineInit, NextToEveryTie) {
  const auto moved = [](float x, std::int64_t ulps) {
    const auto bits = std::bit_cast<std::uint16_t>(from_math<bf16>(x));
    return std::bit_cast<bf16>(static_cast<std::uint16_t>(bits + ulps));
  };
  oracle::Rng rng(12);
  for (const int bins : {2, 3, 4, 7, 8, 15, 16, 31, 100, 255, 256}) {
    std::vector<bf16> w;
    for (int group = 0; group < 3000; ++group) {
      const float size = std::ldexp(1.0f, static_cast<int>(rng.below(40)) - 30);
      const auto part = [&] { return static_cast<float>(rng.below(1 << 12)) / (1 << 12); };
      float b = -size * part(), top = b + size * (1 + part());
      if (group % 4 == 0) b = -size * std::ldexp(1.0f, -static_cast<int>(rng.below(24)));
      if (group % 11 == 0) top += 1 - b, b = std::max(b, size / 8);  // one sign
      if (group % 13 == 0) b = 0;
      b = to_math(from_math<bf16>(b));
      const float s = to_math(from_math<bf16>((top - b) / static_cast<float>(bins - 1)));
      const std::size_t first = w.size();
      w.push_back(from_math<bf16>(b));
      w.push_back(from_math<bf16>(top));
      while (w.size() < first + 64) {
        const float h = static_cast<float>(rng.below(bins - 1)) + 0.5f;
        switch (rng.below(5)) {
          case 0:
            w.push_back(moved(size * std::ldexp(1.0f, -static_cast<int>(rng.below(30))), 0));
            break;
          case 1: w.push_back(from_math<bf16>(rng.below(2) ? 0.0f : -0.0f)); break;
          default: w.push_back(moved(b + h * s, rng.below(3) - 1));
        }
      }
      for (std::size_t i = first; group % 22 == 0 && i < w.size(); ++i)
        w[i] = from_math<bf16>(-to_math(w[i]));
    }
    for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx}) {
      AffineDesc d = group_of(64, 0, method);
      d.n_bins = bins;
      const auto ref = init<bf16, bf16>(d, w, {}, "ref"), cpu = init<bf16, bf16>(d, w, {});
      const auto differs = std::mismatch(ref.q.begin(), ref.q.end(), cpu.q.begin()).first;
      const auto at = static_cast<std::size_t>(differs - ref.q.begin());
      EXPECT_EQ(at, w.size()) << bins << " bins, method " << static_cast<int>(method) << ": weight "
                              << to_math(w[at]) << ", scale " << ref.s(at / 64) << ", bias "
                              << ref.b(at / 64);
      for (std::size_t g = 0; g < ref.scales.size(); ++g) {
        ASSERT_EQ(ref.s(g), cpu.s(g));
        ASSERT_EQ(ref.b(g), cpu.b(g));
      }
    }
  }
}

TEST(QdqAffineInit, MinmaxByHand) {
  auto r = init<float>(group_of(4, 4), {0.0f, 0.5f, 1.5f, 15.0f});
  EXPECT_EQ(r.s(), 1.0);
  EXPECT_EQ(r.b(), 0.0);
  EXPECT_EQ(r.q, (Codes{0, 1, 2, 15}));  // halves go up

  r = init<float>({.group_size = 3, .n_bins = 5}, {-1.0f, 3.0f, 0.5f, 2.0f, 2.0f, 2.0f});
  EXPECT_EQ(r.scales, (std::vector<float>{1, 1}));  // uniform: s = 1
  EXPECT_EQ(r.biases, (std::vector<float>{-1, 2}));
  EXPECT_EQ(r.q, (Codes{0, 4, 2, 0, 0, 0}));

  // All negative; bits = 8 uses every code.
  r = init<float>(group_of(3, 8), {-256.0f, -1.0f, -128.5f});
  EXPECT_EQ(r.s(), 1.0);
  EXPECT_EQ(r.b(), -256.0);
  EXPECT_EQ(r.q, (Codes{0, 255, 128}));
}

TEST(QdqAffineInit, HalfAwayIsExact) {
  const float below = std::nextafter(0.5f, 0.0f);  // floor(z + 0.5f) would give 1
  auto r = init<float>(group_of(4, 4), {0.0f, below, 0.5f, 15.0f});
  EXPECT_EQ(r.q, (Codes{0, 0, 1, 15}));
  r = init<float>(group_of(6, 4), {0.0f, std::nextafter(2.5f, 0.0f), 2.5f,
                                   std::nextafter(14.5f, 0.0f), 14.5f, 15.0f});
  EXPECT_EQ(r.q, (Codes{0, 2, 3, 14, 15, 15}));
  const double below64 = std::nextafter(0.5, 0.0);
  const auto r64 = init<double>(group_of(4, 4), {0.0, below64, 0.5, 15.0});
  EXPECT_EQ(r64.q, (Codes{0, 0, 1, 15}));
}

TEST(QdqAffineInit, NotFinite) {
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::lsq}) {
    auto r = init<float>(group_of(6, 2, method), {kNan, kInf, -kInf, 1.0f, 4.0f, 2.0f});
    EXPECT_EQ(r.s(), 1.0);
    EXPECT_EQ(r.b(), 1.0);
    EXPECT_EQ(r.q, (Codes{0, 3, 0, 0, 3, 1}));
  }
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
    auto r = init<float>(group_of(3, 2, method), {kNan, kNan, kNan, kInf, -kInf, kNan});
    EXPECT_EQ(r.scales, (std::vector<float>{1, 1}));
    EXPECT_EQ(r.biases, (std::vector<float>{0, 0}));
    EXPECT_EQ(r.q, (Codes{0, 0, 0, 3, 0, 0}));

    // max - min overflows: the range is 2 * 3e38, in 3 steps.
    r = init<float>(group_of(5, 2, method), {-3e38f, 3e38f, 0.9e38f, 1.1e38f, kInf});
    EXPECT_EQ(r.scales[0], 3e38f / 1.5f);
    EXPECT_EQ(r.biases[0], -3e38f);
    EXPECT_EQ(r.q, (Codes{0, 3, 2, 2, 3}));

    // One step of it would not be finite.
    r = init<float>(group_of(3, 1, method), {-3e38f, 3e38f, 1e38f});
    EXPECT_EQ(r.scales[0], std::numeric_limits<float>::max());
    EXPECT_EQ(r.q, (Codes{0, 1, 1}));
  }
  // mlx: the finite part alone, then its own rule; codes count down from the maximum.
  const auto r = init<float>(group_of(5, 2, AffineMethod::mlx), {3.0f, 0.0f, kInf, -kInf, kNan});
  EXPECT_EQ(r.s(), -1.0);
  EXPECT_EQ(r.b(), 3.0);
  EXPECT_EQ(r.q, (Codes{0, 3, 0, 3, 0}));
}

template <class X>
void expect_told(std::string_view kernel, AffineDesc d, std::size_t rows,
                 const std::vector<float>& importance = {}) {
  d.axis_size = 3 * d.group_size;
  std::vector<X> w(rows * static_cast<std::size_t>(d.axis_size));
  for (std::size_t i = 0; i < w.size(); ++i)
    w[i] = from_math<X>(i % 7 == 0 ? max_finite<X>() : static_cast<Math<X>>(i % 5));
  const auto init_with = [&](const std::vector<X>& weights, bool expect_finite) {
    d.expect_finite = expect_finite;
    return init<X>(d, weights, importance, kernel);
  };
  EXPECT_TRUE(init_with(w, true).status.ok());
  for (const std::size_t at : {std::size_t{0}, w.size() / 2, w.size() - 1}) {
    for (const float bad : {kNan, -kNan, kInf, -kInf}) {
      auto sick = w;
      sick[at] = from_math<X>(static_cast<Math<X>>(bad));
      const auto told = init_with(sick, true), untold = init_with(sick, false);
      EXPECT_EQ(told.status.code(), Code::invalid_argument);
      EXPECT_EQ(told.status.message(),
                "qdq_affine_init: w: holds infinities or NaN, expected finite numbers");
      EXPECT_EQ(told.q, untold.q);
    }
  }
}

void expect_told_by(std::string_view kernel) {
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
    for (const std::size_t size : {2, 5, 64, 100}) {
      for (const std::size_t rows : {1, 50}) {
        const AffineDesc d = group_of(size, 4, method);
        expect_told<float>(kernel, d, rows);
        expect_told<double>(kernel, d, rows);
        expect_told<f16>(kernel, d, rows);
        expect_told<bf16>(kernel, d, rows);
        if (method == AffineMethod::lsq)
          expect_told<float>(kernel, d, rows, std::vector<float>(3 * size, 1.5f));
      }
    }
  }
}

TEST(QdqAffineInit, TellsOfWeightsThatAreNotFinite) {
  expect_told_by("ref");
  for (const cpu::Isa isa : cpu::available_isas()) {
    cpu::force_isa(isa);
    SCOPED_TRACE(cpu::name(isa));
    expect_told_by("cpu");
  }
  cpu::force_isa(cpu::Isa::none);
}

TEST(QdqAffineInit, ScalesAreStoredBeforeTheyAreUsed) {
  // 1/3 in bf16 is 0.333984375; 0.5/0.333984375 = 1.497: code 1, where f32's 1/3 gives 1.5: code 2.
  const std::vector<bf16> w = {to_bf16(0.0f), to_bf16(1.0f), to_bf16(0.5f)};
  EXPECT_EQ(init<bf16>(group_of(3, 2), w).q, (Codes{0, 3, 1}));
  EXPECT_EQ((init<bf16, float>(group_of(3, 2), w).q), (Codes{0, 3, 2}));

  // f16: a scale beyond 65504 is cut to it, one below the least subnormal becomes 1.
  const std::vector<f16> far = {to_f16(-65504.0f), to_f16(65504.0f), to_f16(0.0f)};
  const auto r = init<f16>(group_of(3, 1), far);
  EXPECT_EQ(r.s(), 65504.0);
  EXPECT_EQ(r.q, (Codes{0, 1, 1}));
  const std::vector<f16> near = {to_f16(0.0f), to_f16(0x1p-24f), to_f16(0x1p-24f)};
  EXPECT_EQ(init<f16>(group_of(3, 8), near).s(), 1.0);
  EXPECT_EQ((init<f16, float>(group_of(3, 8), near).q), (Codes{0, 255, 255}));
}

TEST(QdqAffineInit, BiasIsNeverNegativeZero) {
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
    for (const std::int32_t bits : {1, 4}) {
      const auto r = init<float>(group_of(2, bits, method), {-0.0f, -0.0f, -0.0f, 1.0f});
      EXPECT_FALSE(std::signbit(r.biases[0]));
      EXPECT_FALSE(std::signbit(r.biases[1]));
    }
  }
}

TEST(QdqAffineInit, MinmaxErrorIsAtMostHalfAStep) {
  for (const std::int32_t bits : {1, 2, 3, 4, 8}) {
    for (const float centre : {0.0f, 100.0f, -1e6f}) {
      std::vector<float> w = gaussian<float>(64 * 50, 3);
      for (float& x : w) x += centre;
      const auto r = init<float>(group_of(64, bits), w);
      for (std::size_t i = 0; i < w.size(); ++i) {
        const double y = r.q[i] * r.s(i / 64) + r.b(i / 64);
        const double ulp = std::nextafter(std::abs(w[i]), kInf) - std::abs(w[i]);
        ASSERT_LE(std::abs(w[i] - y), r.s(i / 64) / 2 + std::max(ulp, 1e-6 * r.s(i / 64)))
            << bits << " bits, weight " << w[i];
      }
    }
  }
}

TEST(QdqAffineInit, PackedIsThePackOfTheCodes) {
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      for (const std::size_t size : {5u, 32u, 64u}) {
        AffineDesc d = group_of(size, bits, method);
        d.axis_size = d.group_size * 7;
        const auto w = gaussian<float>(d.axis_size * 3, 41);
        const auto codes = init<float>(d, w).q;
        d.storage = CodeStorage::packed;
        const auto words = init<float>(d, w).words;
        std::vector<std::uint32_t> expected(words.size());
        const std::size_t row = static_cast<std::size_t>(d.axis_size), row_words = words.size() / 3;
        for (std::size_t i = 0; i < codes.size(); ++i) {
          for (std::size_t k = 0; k < static_cast<std::size_t>(bits); ++k) {
            const std::size_t bit = i % row * static_cast<std::size_t>(bits) + k;
            expected[i / row * row_words + bit / 32] |= (codes[i] >> k & 1u) << bit % 32;
          }
        }
        EXPECT_EQ(words, expected) << bits << " bits, group " << size;
      }
    }
  }
}

std::string message(const AffineDesc& d) {
  const auto plan = Plan<QdqAffineInit>::select(d);
  return plan ? "" : std::string(plan.status().message());
}

TEST(QdqAffineInit, Errors) {
  const AffineDesc good{.outer_size = 2, .axis_size = 128, .method = AffineMethod::lsq};
  AffineDesc d = good;
  d.group_size = 1;
  EXPECT_EQ(message(d), "qdq_affine_init: group_size: 1, expected 2..1024");
  d = good;
  d.axis_size = 100;
  EXPECT_EQ(message(d), "qdq_affine_init: axis_size: 100, expected a multiple of group_size 64");
  d = good;
  d.n_bins = 257;
  EXPECT_EQ(message(d), "qdq_affine_init: n_bins: 257, expected 2..256");
  d = good;
  d.bits = 9;
  EXPECT_EQ(message(d), "qdq_affine_init: bits: 9, expected 1..8");
  d = good;
  d.bits = 2;
  d.n_bins = 5;
  EXPECT_EQ(message(d), "qdq_affine_init: n_bins: 5, expected 2..4");
  d = good;
  d.element = DType::s8;
  EXPECT_EQ(message(d), "qdq_affine_init: element: s8, expected f32, f64, f16 or bf16");

  // Operands: nothing is written when one is wrong.
  const std::vector<float> w(256, 1.0f), importance(64, 1.0f);
  std::vector<float> scales(4, 7.0f), biases(4, 7.0f);
  Codes q(256, 77);
  QdqAffineInit::Args a;
  a.w = view(w.data(), {2, 128});
  a.importance = view(importance.data(), {64});
  a.scales = view(scales.data(), {2, 2});
  a.biases = view(biases.data(), {2, 2});
  a.q = view(q.data(), {2, 128});
  const auto plan = Plan<QdqAffineInit>::select(good);
  ASSERT_TRUE(plan);
  const Status status = plan->run(a);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("qdq_affine_init: importance: "), std::string_view::npos)
      << status.message();
  EXPECT_EQ(scales, std::vector<float>(4, 7.0f));
  EXPECT_EQ(q, Codes(256, 77));
  a.importance = {};
  EXPECT_TRUE(plan->run(a).ok());
}

}  // namespace
}  // namespace bittern
