#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = CausalConv1d;
using Floats = std::vector<float>;

TEST(CausalConv1d, MatchesRefEverywhere) { oracle::expect_parity("causal_conv1d"); }

struct Problem {
  CausalConvDesc d;
  Floats x, weight, bias, initial, y, final_state;
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> cu_seqlens;

  explicit Problem(const CausalConvDesc& desc, std::vector<std::int32_t> bounds = {})
      : d(desc), cu_seqlens(std::move(bounds)) {
    oracle::Rng rng(7);
    const auto fill = [&](Floats& v, const Shape& shape) {
      for (std::int64_t i = 0; i < shape.numel(); ++i)
        v.push_back(static_cast<float>(rng.normal()));
    };
    fill(x, d.tensor_shape());
    fill(weight, d.weight_shape());
    fill(bias, {d.channels});
    fill(initial, d.state_shape());
    mask.assign(static_cast<std::size_t>(d.mask_shape().numel()), 1);
    y.assign(x.size(), NAN);
    final_state.assign(initial.size(), NAN);
  }
  Op::Args args() {
    return {.x = view(std::as_const(x).data(), d.tensor_shape()),
            .weight = view(std::as_const(weight).data(), d.weight_shape()),
            .bias = view(std::as_const(bias).data(), {d.channels}),
            .initial_state = view(std::as_const(initial).data(), d.state_shape()),
            .mask = view(std::as_const(mask).data(), d.mask_shape()),
            .cu_seqlens = d.sequences > 0
                              ? view(std::as_const(cu_seqlens).data(), {d.sequences + 1})
                              : ConstView{},
            .y = view(y.data(), d.tensor_shape()),
            .final_state = view(final_state.data(), d.state_shape())};
  }
  void run(std::string_view kernel = {}) { expect_ok(run_op<Op>(d, args(), kernel)); }
};

TEST(CausalConv1d, ByHand) {
  const CausalConvDesc d{.tokens = 3, .channels = 1, .width = 3, .silu = false};
  const float x[] = {1, 2, 3}, weight[] = {100, 10, 1}, state[] = {5, 7}, bias = 0.5f;
  for (const auto kernel : kBothKernels) {
    float y[3], last[2];
    Op::Args a{.x = view(x, {1, 3, 1}),
               .weight = view(weight, {1, 3}),
               .bias = view(&bias, {1}),
               .initial_state = view(state, {1, 1, 2}),
               .y = view(y, {1, 3, 1}),
               .final_state = view(last, {1, 1, 2})};
    expect_ok(run_op<Op>(d, a, kernel));
    EXPECT_EQ(y[0], 571.5f);
    EXPECT_EQ(y[1], 712.5f);
    EXPECT_EQ(y[2], 123.5f);
    EXPECT_EQ(last[0], 2);
    EXPECT_EQ(last[1], 3);
    a.initial_state = a.bias = {};
    expect_ok(run_op<Op>(d, a, kernel));
    EXPECT_EQ(y[0], 1);
    EXPECT_EQ(y[1], 12);
  }
}

TEST(CausalConv1d, IsTheConvolution) {
  for (const std::int32_t width : {2, 3, 4}) {
    Problem p({.batch = 2, .tokens = 70, .channels = 9, .width = width});
    p.run();
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t t = 0; t < 70; ++t) {
        for (std::int64_t c = 0; c < 9; ++c) {
          double u = p.bias[static_cast<std::size_t>(c)];
          for (std::int64_t j = 0; j < width; ++j) {
            const std::int64_t at = t - width + 1 + j;
            const float x = at >= 0 ? p.x[static_cast<std::size_t>((b * 70 + at) * 9 + c)]
                                    : p.initial[static_cast<std::size_t>((b * 9 + c) * (width - 1) +
                                                                         at + width - 1)];
            u += static_cast<double>(p.weight[static_cast<std::size_t>(c * width + j)]) *
                 static_cast<double>(x);
          }
          EXPECT_NEAR(p.y[static_cast<std::size_t>((b * 70 + t) * 9 + c)], u / (1 + std::exp(-u)),
                      1e-5);
        }
      }
    }
  }
}

// A sequence cut anywhere, with the state carried over: the same bits.
TEST(CausalConv1d, StateCarriesASequenceOn) {
  Problem whole({.tokens = 9, .channels = 20});
  whole.run();
  for (std::int64_t cut = 0; cut <= 9; ++cut) {
    Floats state = whole.initial, y;
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, cut}, {cut, 9}}) {
      Problem part({.tokens = end - begin, .channels = 20});
      part.weight = whole.weight;
      part.bias = whole.bias;
      part.initial = state;
      std::copy(whole.x.begin() + begin * 20, whole.x.begin() + end * 20, part.x.begin());
      part.run();
      state = part.final_state;
      y.insert(y.end(), part.y.begin(), part.y.end());
    }
    EXPECT_EQ(y, whole.y) << cut;
    EXPECT_EQ(state, whole.final_state) << cut;
  }
}

// Packed sequences see nothing of each other: a NaN in one changes no other.
TEST(CausalConv1d, PackedSequencesAreApart) {
  const std::vector<std::int32_t> bounds = {0, 2, 2, 70, 71, 75};
  const CausalConvDesc d{.tokens = 75, .channels = 18, .sequences = 5};
  Problem clean(d, bounds);
  clean.run();
  for (std::size_t s = 0; s < 5; ++s) {
    Problem dirty(d, bounds);
    std::fill(dirty.x.begin() + bounds[s] * 18, dirty.x.begin() + bounds[s + 1] * 18, NAN);
    std::fill_n(dirty.initial.begin() + static_cast<std::ptrdiff_t>(s) * 54, 54, NAN);
    dirty.run();
    for (std::int32_t t = 0; t < 75; ++t) {
      const bool mine = t >= bounds[s] && t < bounds[s + 1];
      for (std::int32_t c = 0; c < 18; ++c) {
        const auto i = static_cast<std::size_t>(t * 18 + c);
        EXPECT_EQ(std::isnan(dirty.y[i]), mine);
        if (!mine) {
          EXPECT_EQ(dirty.y[i], clean.y[i]);
        }
      }
    }
    if (bounds[s] == bounds[s + 1]) {  // an empty sequence hands its state on
      EXPECT_TRUE(std::isnan(dirty.final_state[s * 54]));
      EXPECT_TRUE(std::equal(clean.final_state.begin() + static_cast<std::ptrdiff_t>(s) * 54,
                             clean.final_state.begin() + static_cast<std::ptrdiff_t>(s + 1) * 54,
                             clean.initial.begin() + static_cast<std::ptrdiff_t>(s) * 54));
    }
  }
}

TEST(CausalConv1d, MaskedTokensAreNotRead) {
  Problem zero({.tokens = 8, .channels = 3}), masked({.tokens = 8, .channels = 3});
  for (const std::size_t t : {0u, 1u, 5u}) {
    std::fill_n(zero.x.begin() + static_cast<std::ptrdiff_t>(t) * 3, 3, 0.0f);
    std::fill_n(masked.x.begin() + static_cast<std::ptrdiff_t>(t) * 3, 3, NAN);
    masked.mask[t] = 0;
  }
  zero.run();
  masked.run();
  EXPECT_EQ(zero.final_state, masked.final_state);
  for (std::size_t i = 0; i < masked.y.size(); ++i)
    EXPECT_EQ(masked.y[i], masked.mask[i / 3] != 0 ? zero.y[i] : 0.0f);
}

TEST(CausalConv1d, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "causal_conv1d: ";
  expect_error(Op::check({.channels = 3, .width = 5}), bad, op + "width: 5, expected 2..4");
  expect_error(Op::check({.channels = -1}), bad, op + "channels: -1, expected at least 0");
  expect_error(Op::check({.batch = 2, .sequences = 1}), bad,
               op + "batch: 2, expected 1 with sequences");
  expect_error(Op::check({.element = DType::f64}), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");
  Problem p({.tokens = 4, .channels = 2, .sequences = 2}, {0, 3, 2});
  expect_error(run_op<Op>(p.d, p.args()), bad,
               op + "cu_seqlens: [2] is 2, expected at least [1], 3");
  p.cu_seqlens = {0, 3, 3};
  expect_error(run_op<Op>(p.d, p.args()), bad, op + "cu_seqlens: [2] is 3, expected tokens, 4");
  p.cu_seqlens = {0, 3, 4};
  Op::Args a = p.args();
  a.mask.shape = {4, 1};
  expect_error(run_op<Op>(p.d, a), bad, op + "mask: shape [4,1], expected [1,4] = [batch,tokens]");
  a = p.args();
  a.y = a.final_state = {};
  expect_error(run_op<Op>(p.d, a), bad, op + "every output is left out, expected at least one");
}

}  // namespace
}  // namespace bittern
