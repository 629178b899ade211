#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = CausalConv1dBackward;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

TEST(CausalConv1dBackward, MatchesRefEverywhere) {
  oracle::expect_parity("causal_conv1d_backward");
}

// Packed sequences, one of them shorter than the window and one empty, with two masked tokens.
constexpr std::int32_t kBounds[] = {0, 2, 2, 11};
constexpr std::int64_t kTokens = 11, kChannels = 3, kSequences = 3;

struct Inputs {
  Doubles x, weight, bias, initial;
};

bool masked(std::int64_t t) { return t == 1 || t == 6; }

// <d_y, y> + <d_final, final_state> of the f64 convolution.
double loss(const CausalConvDesc& d, const Inputs& in, const Doubles& d_y, const Doubles& d_final) {
  double sum = 0;
  const std::int64_t reach = d.width - 1;
  for (std::int64_t s = 0; s < kSequences; ++s) {
    const std::int64_t begin = kBounds[s], length = kBounds[s + 1] - begin;
    for (std::int64_t c = 0; c < kChannels; ++c) {
      const auto state = static_cast<std::size_t>((s * kChannels + c) * reach);
      const auto x = [&](std::int64_t p) {
        if (p < 0) return in.initial[state + static_cast<std::size_t>(p + reach)];
        if (masked(begin + p)) return 0.0;
        return in.x[static_cast<std::size_t>((begin + p) * kChannels + c)];
      };
      for (std::int64_t t = 0; t < length; ++t) {
        if (masked(begin + t)) continue;
        double u = in.bias[static_cast<std::size_t>(c)];
        for (std::int64_t j = 0; j <= reach; ++j)
          u += in.weight[static_cast<std::size_t>(c * d.width + j)] * x(t - reach + j);
        sum += d_y[static_cast<std::size_t>((begin + t) * kChannels + c)] *
               (d.silu ? u / (1 + std::exp(-u)) : u);
      }
      for (std::int64_t i = 0; i < reach; ++i)
        sum += d_final[state + static_cast<std::size_t>(i)] * x(length - reach + i);
    }
  }
  return sum;
}

TEST(CausalConv1dBackward, IsTheDerivativeOfTheForward) {
  for (const bool silu : {true, false}) {
    for (const std::int32_t width : {2, 3, 4}) {
      const CausalConvDesc d{.tokens = kTokens,
                             .channels = kChannels,
                             .width = width,
                             .sequences = kSequences,
                             .silu = silu};
      oracle::Rng rng(11);
      // f32 values, held in f64 too.
      const auto make = [&](Floats& f, Doubles& x, const Shape& shape) {
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          f.push_back(static_cast<float>(rng.normal()));
          x.push_back(static_cast<double>(f.back()));
        }
      };
      Inputs in;
      Doubles d_y, d_final;
      Floats x, weight, bias, initial, d_y_f, d_final_f;
      make(x, in.x, d.tensor_shape());
      make(weight, in.weight, d.weight_shape());
      make(bias, in.bias, {kChannels});
      make(initial, in.initial, d.state_shape());
      make(d_y_f, d_y, d.tensor_shape());
      make(d_final_f, d_final, d.state_shape());
      std::vector<std::uint8_t> mask;
      for (std::int64_t t = 0; t < kTokens; ++t) mask.push_back(masked(t) ? 0 : 1);
      Floats d_x(x.size(), NAN), d_weight(weight.size(), NAN), d_bias(bias.size(), NAN),
          d_initial(initial.size(), NAN);
      for (const std::int64_t t : {1, 6}) {  // never read
        std::fill_n(x.begin() + t * kChannels, kChannels, NAN);
        std::fill_n(d_y_f.begin() + t * kChannels, kChannels, NAN);
      }
      const Op::Args args{.d_y = view(std::as_const(d_y_f).data(), d.tensor_shape()),
                          .d_final_state = view(std::as_const(d_final_f).data(), d.state_shape()),
                          .x = view(std::as_const(x).data(), d.tensor_shape()),
                          .weight = view(std::as_const(weight).data(), d.weight_shape()),
                          .bias = view(std::as_const(bias).data(), {kChannels}),
                          .initial_state = view(std::as_const(initial).data(), d.state_shape()),
                          .mask = view(std::as_const(mask).data(), d.mask_shape()),
                          .cu_seqlens = view(kBounds, {kSequences + 1}),
                          .d_x = view(d_x.data(), d.tensor_shape()),
                          .d_weight = view(d_weight.data(), d.weight_shape()),
                          .d_bias = view(d_bias.data(), {kChannels}),
                          .d_initial_state = view(d_initial.data(), d.state_shape())};
      for (const auto kernel : kBothKernels) {
        auto plan = Plan<Op>::select(d, {}, Preference::exact, kernel);
        ASSERT_TRUE(plan.ok());
        alignas(64) static std::byte scratch[1 << 16];
        ASSERT_LE(plan->workspace_bytes(), sizeof scratch);
        expect_ok(plan->run(args, {}, {scratch, sizeof scratch}));
        const auto compare = [&](const char* name, Doubles Inputs::* member, const Floats& got) {
          constexpr double kStep = 1e-5;
          for (std::size_t i = 0; i < got.size(); ++i) {
            Inputs up = in, down = in;
            (up.*member)[i] += kStep;
            (down.*member)[i] -= kStep;
            const double slope =
                (loss(d, up, d_y, d_final) - loss(d, down, d_y, d_final)) / (2 * kStep);
            EXPECT_NEAR(got[i], slope, 2e-5) << kernel << " " << name << " " << i;
          }
        };
        compare("d_x", &Inputs::x, d_x);
        compare("d_weight", &Inputs::weight, d_weight);
        compare("d_bias", &Inputs::bias, d_bias);
        compare("d_initial_state", &Inputs::initial, d_initial);
      }
    }
  }
}

TEST(CausalConv1dBackward, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "causal_conv1d_backward: ";
  expect_error(Op::check({.channels = 3, .width = 1}), bad, op + "width: 1, expected 2..4");
  const CausalConvDesc d{.tokens = 2, .channels = 1, .width = 2};
  const float x[2] = {}, weight[2] = {};
  float d_x[2];
  Op::Args a{.d_y = {},
             .x = view(x, {1, 2, 1}),
             .weight = view(weight, {1, 2}),
             .d_x = view(d_x, {1, 2, 1})};
  expect_error(run_op<Op>(d, a, "ref"), bad, op + "d_y: null, expected f32 [1,2,1]");
  a.d_y = view(x, {1, 2, 1});
  expect_ok(run_op<Op>(d, a, "ref"));
  const auto plan = Plan<Op>::select(d, {}, Preference::exact, "cpu");
  expect_error(plan->run(a), bad, op + "workspace: 0 bytes, expected at least 12");
}

}  // namespace
}  // namespace bittern
