#include <numeric>

#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = KlLoss;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(KlLoss, MatchesRefEverywhere) { oracle::expect_parity("kl_loss"); }

struct Problem {
  KlLossDesc d;
  Floats x{}, teacher{}, log_probs{}, tail{}, weights{};
  Ids ids{};
  Floats loss{}, d_x{};

  Op::Args args() {
    loss.assign(static_cast<std::size_t>(d.rows), NAN);
    d_x.assign(x.size(), NAN);
    Op::Args a;
    a.x = view(std::as_const(x).data(), d.shape());
    if (d.top == 0) a.teacher = view(std::as_const(teacher).data(), d.shape());
    if (d.top > 0) {
      a.ids = view(std::as_const(ids).data(), d.top_shape());
      a.log_probs = view(std::as_const(log_probs).data(), d.top_shape());
      a.tail = view(std::as_const(tail).data(), d.row_shape());
    }
    if (!weights.empty()) a.weights = view(std::as_const(weights).data(), d.row_shape());
    a.loss = view(loss.data(), d.row_shape());
    a.d_x = view(d_x.data(), d.shape());
    return a;
  }
  void run(std::string_view kernel) { expect_ok(run_op<Op>(d, args(), kernel)); }
};

// log softmax of a row in long double, the student's with its cap.
std::vector<long double> log_probabilities(const Doubles& x, double cap, double temperature) {
  std::vector<long double> v;
  for (const double u : x) v.push_back((cap > 0 ? cap * std::tanh(u / cap) : u) / temperature);
  const long double most = *std::max_element(v.begin(), v.end());
  long double sum = 0;
  for (const long double u : v) sum += std::exp(u - most);
  for (long double& u : v) u -= most + std::log(sum);
  return v;
}

// KL of row i by its definition, with the student's logits x.
double exact_kl(const Problem& p, std::size_t i, const Doubles& x) {
  const auto dim = static_cast<std::size_t>(p.d.dim), top = static_cast<std::size_t>(p.d.top);
  const auto q = log_probabilities(x, p.d.softcap, p.d.temperature);
  long double sum = 0;
  if (top == 0) {
    const Doubles t(p.teacher.begin() + static_cast<std::ptrdiff_t>(i * dim),
                    p.teacher.begin() + static_cast<std::ptrdiff_t>((i + 1) * dim));
    const auto log_p = log_probabilities(t, 0, p.d.temperature);
    for (std::size_t j = 0; j < dim; ++j) sum += std::exp(log_p[j]) * (log_p[j] - q[j]);
    return static_cast<double>(sum);
  }
  // The teacher's probabilities, divided by their sum.
  long double rest = 1, all = std::exp(static_cast<long double>(p.tail[i]));
  for (std::size_t k = 0; k < top; ++k)
    all += std::exp(static_cast<long double>(p.log_probs[i * top + k]));
  const auto part = [&](long double log_p, long double log_q) {
    const long double mass = std::exp(log_p) / all;
    return mass > 0 ? mass * (std::log(mass) - log_q) : 0;
  };
  for (std::size_t k = 0; k < top; ++k) {
    const auto id = static_cast<std::size_t>(p.ids[i * top + k]);
    rest -= std::exp(q[id]);
    sum += part(p.log_probs[i * top + k], q[id]);
  }
  return static_cast<double>(sum + part(p.tail[i], std::log(rest)));
}

Doubles row_of(const Floats& x, std::size_t i, std::size_t dim) {
  return {x.begin() + static_cast<std::ptrdiff_t>(i * dim),
          x.begin() + static_cast<std::ptrdiff_t>((i + 1) * dim)};
}

// Random problems; the teacher's top is the `top` first of a shuffle, the rest its tail.
Problem random_problem(const KlLossDesc& d, std::uint64_t seed, double size) {
  Problem p{d};
  oracle::Rng rng(seed);
  const auto dim = static_cast<std::size_t>(d.dim);
  for (std::int64_t i = 0; i < d.rows; ++i) {
    Doubles t;
    for (std::size_t j = 0; j < dim; ++j) {
      p.teacher.push_back(static_cast<float>(size * rng.normal()));
      p.x.push_back(p.teacher.back() + static_cast<float>(0.5 * rng.normal()));
      t.push_back(static_cast<double>(p.teacher.back()));
    }
    p.weights.push_back(static_cast<float>(0.5 + rng.uniform()));
    if (d.top == 0) continue;
    const auto log_p = log_probabilities(t, 0, d.temperature);
    Ids order(dim);
    std::iota(order.begin(), order.end(), 0);
    long double tail = 1;
    for (std::size_t k = 0; k < static_cast<std::size_t>(d.top); ++k) {
      std::swap(order[k],
                order[k + static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(dim - k)))]);
      p.ids.push_back(order[k]);
      p.log_probs.push_back(static_cast<float>(log_p[static_cast<std::size_t>(order[k])]));
      tail -= std::exp(log_p[static_cast<std::size_t>(order[k])]);
    }
    p.tail.push_back(static_cast<float>(std::log(tail)));
  }
  return p;
}

TEST(KlLoss, IsTheDefinitionAndItsDerivative) {
  for (const std::int64_t top : {0, 1, 5}) {
    for (const double cap : {0.0, 4.0}) {
      for (const double temperature : {1.0, 2.5}) {
        const KlLossDesc d{
            .rows = 3, .dim = 20, .top = top, .softcap = cap, .temperature = temperature};
        Problem p = random_problem(d, 7, 2);
        for (const auto kernel : kBothKernels) {
          p.run(kernel);
          for (std::size_t i = 0; i < 3; ++i) {
            const auto weight = static_cast<double>(p.weights[i]);
            const Doubles x = row_of(p.x, i, 20);
            EXPECT_NEAR(p.loss[i], weight * exact_kl(p, i, x), 1e-6);
            for (std::size_t j = 0; j < 20; ++j) {
              constexpr double kStep = 1e-5;
              Doubles up = x, down = x;
              up[j] += kStep;
              down[j] -= kStep;
              const double slope = (exact_kl(p, i, up) - exact_kl(p, i, down)) / (2 * kStep);
              EXPECT_NEAR(p.d_x[i * 20 + j], weight * slope, cap > 0 ? 1e-6 : 2e-7) << top;
            }
          }
        }
      }
    }
  }
}

// Teacher 1/2, 1/2; student 3/4, 1/4: KL = 1/2 log(2/3) + 1/2 log 2 = log(2 / sqrt 3), and the
// gradient is q - p.
TEST(KlLoss, ByHand) {
  for (const auto kernel : kBothKernels) {
    Problem p{{.rows = 1, .dim = 2}};
    p.x = {std::log(3.0f), 0};
    p.teacher = {5, 5};
    p.run(kernel);
    EXPECT_FLOAT_EQ(p.loss[0], 0.143841036f);
    EXPECT_FLOAT_EQ(p.d_x[0], 0.25f);
    EXPECT_FLOAT_EQ(p.d_x[1], -0.25f);
  }
}

// Teacher: token 2 has 1/2, all others together 1/2. Student: 1/4 each, so Q = 3/4.
// KL = 1/2 log 2 + 1/2 log(2/3); the others lose 1/2 and gain 3/4 in equal shares.
TEST(KlLoss, ByHandWithATail) {
  for (const auto kernel : kBothKernels) {
    Problem p{{.rows = 1, .dim = 4, .top = 1}};
    p.x = {7, 7, 7, 7};
    p.ids = {2};
    p.log_probs = p.tail = {std::log(0.5f)};
    p.run(kernel);
    EXPECT_FLOAT_EQ(p.loss[0], 0.143841036f);
    EXPECT_FLOAT_EQ(p.d_x[2], -0.25f);
    for (const std::size_t j : {0u, 1u, 3u}) EXPECT_FLOAT_EQ(p.d_x[j], 0.25f / 3);
  }
}

// 50000 logits that hardly differ: KL near 1e-6 and 1e-9, and the rounding of f64.
TEST(KlLoss, SmallDivergencesOfLongRowsAreAccurate) {
  for (const std::int64_t top : {0, 64}) {
    for (const double size : {2e-3, 6e-5}) {
      Problem p = random_problem({.rows = 1, .dim = 50000, .top = top}, 3, 3);
      oracle::Rng rng(4);
      for (std::size_t j = 0; j < p.x.size(); ++j)
        p.x[j] = p.teacher[j] + static_cast<float>(size * rng.normal());
      p.weights.clear();
      const double want = exact_kl(p, 0, row_of(p.x, 0, 50000));
      if (top == 0) {
        EXPECT_NEAR(want, size * size / 2, 0.2 * size * size);
      }
      for (const auto kernel : kBothKernels) {
        p.run(kernel);
        EXPECT_NEAR(p.loss[0], want, 1e-6 * want + 2e-14);
        EXPECT_GE(p.loss[0], 0);
        const double total = std::accumulate(p.d_x.begin(), p.d_x.end(), 0.0);
        EXPECT_NEAR(total, 0, 1e-10);
      }
    }
  }
}

// Whatever the logits, KL is not below 0 by more than f64 rounds: the loss of a student whose
// distribution is the teacher's, shifted by a constant.
TEST(KlLoss, IsNotNegative) {
  for (const std::int64_t top : {0, 3}) {
    Problem p = random_problem({.rows = 200, .dim = 33, .top = top}, 5, 6);
    p.weights.clear();
    for (std::size_t i = 0; i < p.x.size(); ++i) p.x[i] = p.teacher[i] + 4;
    for (const auto kernel : kBothKernels) {
      p.run(kernel);
      for (const float loss : p.loss) {
        EXPECT_GE(loss, -2e-14f);
        EXPECT_LT(loss, 1e-11f);
      }
    }
  }
  Problem same = random_problem({.rows = 3, .dim = 100}, 5, 6);
  same.x = same.teacher;
  for (const auto kernel : kBothKernels) {
    same.run(kernel);
    for (const float loss : same.loss) EXPECT_EQ(loss, 0);
    for (const float slope : same.d_x) EXPECT_EQ(slope, 0);
  }
}

// p = 0 counts as 0, whatever q is; q = 0 under p > 0 is an infinite loss.
TEST(KlLoss, ZeroProbabilities) {
  for (const auto kernel : kBothKernels) {
    Problem p{{.rows = 3, .dim = 3}};
    p.teacher = {0, -5000, -kInf, 0, 0, -kInf, 0, 0, 0};
    p.x = {0, 0, -kInf, 0, -800, 0, 0, 0, -kInf};
    p.run(kernel);
    EXPECT_FLOAT_EQ(p.loss[0], 0.6931472f);
    EXPECT_FLOAT_EQ(p.d_x[0], -0.5f);
    EXPECT_FLOAT_EQ(p.d_x[1], 0.5f);
    EXPECT_EQ(p.d_x[2], 0);
    EXPECT_FLOAT_EQ(p.loss[1], 400);  // log q of a probability that is 0 in f64
    EXPECT_FLOAT_EQ(p.d_x[4], -0.5f);
    EXPECT_FLOAT_EQ(p.d_x[5], 0.5f);
    EXPECT_EQ(p.loss[2], kInf);
    for (const std::size_t j : {6u, 7u}) EXPECT_FLOAT_EQ(p.d_x[j], 0.5f - 1.0f / 3);
    EXPECT_FLOAT_EQ(p.d_x[8], -1.0f / 3);

    Problem t{{.rows = 4, .dim = 3, .top = 2}};
    t.ids = {0, 1, 0, 1, 0, 1, 2, 0};
    t.log_probs = {0, -kInf, -0.6931472f, -0.6931472f, -1.3862944f, -1.3862944f, -kInf, 0};
    t.tail = {-kInf, -kInf, -0.6931472f, -kInf};
    t.x = {0, 0, 0, 0, 0, -kInf, 0, 0, -kInf, -kInf, 0, 0};
    t.run(kernel);
    EXPECT_FLOAT_EQ(t.loss[0], 1.0986123f);
    EXPECT_FLOAT_EQ(t.d_x[2], 1.0f / 3);
    EXPECT_NEAR(t.loss[1], 0, 1e-7);
    EXPECT_EQ(t.d_x[5], 0);
    EXPECT_EQ(t.loss[2], kInf);
    EXPECT_EQ(t.d_x[8], 0);
    EXPECT_EQ(t.loss[3], kInf);
    for (const float slope : t.d_x) EXPECT_FALSE(std::isnan(slope));
  }
}

// A tail that is far below the student's top has a logarithm all the same.
TEST(KlLoss, TailsThatAreFarBelow) {
  for (const auto kernel : kBothKernels) {
    Problem p{{.rows = 1, .dim = 3, .top = 1}};
    p.ids = {1};
    p.x = {-900, 0, -900};
    p.log_probs = p.tail = {std::log(0.5f)};
    p.run(kernel);
    EXPECT_FLOAT_EQ(p.loss[0], 448.9602795f);  // 1/2 log 1/2 + 1/2 (log 1/2 - (log 2 - 900))
    EXPECT_FLOAT_EQ(p.d_x[0], -0.25f);
    EXPECT_FLOAT_EQ(p.d_x[1], 0.5f);
  }
}

// A row of weight 0 is not read: NaN, and ids that are not ids.
TEST(KlLoss, RowsOfWeightZeroAreNotRead) {
  for (const std::int64_t top : {0, 2}) {
    const Problem plain = random_problem({.rows = 3, .dim = 20, .top = top}, 2, 2);
    for (const auto kernel : kBothKernels) {
      Problem want = plain, p = plain;
      want.run(kernel);
      p.weights[1] = 0;
      for (std::size_t j = 20; j < 40; ++j) p.x[j] = p.teacher[j] = NAN;
      if (top > 0) p.ids[2] = p.ids[3] = -7;
      p.run(kernel);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(p.loss[i], i == 1 ? 0 : want.loss[i]);
        for (std::size_t j = 0; j < 20; ++j)
          EXPECT_EQ(p.d_x[i * 20 + j], i == 1 ? 0 : want.d_x[i * 20 + j]);
      }
    }
  }
}

TEST(KlLoss, RowsThatAreNotFinite) {
  for (const auto kernel : kBothKernels) {
    for (const std::int64_t top : {0, 1}) {
      Problem p{{.rows = 4, .dim = 2, .top = top}};
      p.x = {NAN, 1, kInf, 1, -kInf, -kInf, 1, 2};
      p.teacher = {1, 1, 1, 1, 1, 1, -kInf, -kInf};
      p.ids = {0, 0, 0, 0};
      p.log_probs = p.tail = {-1, -1, -1, -kInf};
      p.run(kernel);
      for (const float loss : p.loss) EXPECT_TRUE(std::isnan(loss));
      for (const float slope : p.d_x) EXPECT_TRUE(std::isnan(slope));
    }
    // A NaN among -infinities outside the top.
    Problem p{{.rows = 1, .dim = 3, .top = 1}};
    p.x = {0, -kInf, NAN};
    p.ids = {0};
    p.log_probs = {0};
    p.tail = {-kInf};
    p.run(kernel);
    EXPECT_TRUE(std::isnan(p.loss[0]));
    EXPECT_TRUE(std::isnan(p.d_x[0]));
  }
}

TEST(KlLoss, GradientsMayTakeTheLogitsPlace) {
  for (const std::int64_t top : {0, 4}) {
    for (const double cap : {0.0, 5.0}) {
      const Problem plain =
          random_problem({.rows = 3, .dim = 37, .top = top, .softcap = cap}, 6, 3);
      for (const auto kernel : kBothKernels) {
        Problem want = plain, p = plain;
        want.run(kernel);
        Op::Args a = p.args();
        a.d_x = view(p.x.data(), p.d.shape());
        a.loss = {};
        expect_ok(run_op<Op>(p.d, a, kernel));
        EXPECT_EQ(p.x, want.d_x);
      }
    }
  }
}

TEST(KlLoss, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "kl_loss: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.dim = 5, .top = 6}), bad, op + "top: 6, expected 0..5");
  expect_error(Op::check({.top = -1}), bad, op + "top: -1, expected 0..128");
  expect_error(Op::check({.softcap = -1}), bad, op + "softcap: -1, expected 0 or 2^-60..2^60");
  expect_error(Op::check({.temperature = 0}), bad, op + "temperature: 0, expected 2^-60..2^60");
  Problem p = random_problem({.rows = 2, .dim = 5, .top = 2}, 2, 2);
  const auto refused = [&](const std::string& what) {
    expect_error(run_op<Op>(p.d, p.args()), bad, op + what);
  };
  p.ids = {0, 1, 2, 5};
  refused("ids: row 1 has 5, expected 0..4");
  p.ids = {0, -1, 2, 3};
  refused("ids: row 0 has -1, expected 0..4");
  p.ids = {0, 1, 3, 3};
  refused("ids: row 1 has 3 twice, expected different ids");
  p.ids = {0, 1, 2, 3};
  Op::Args a = p.args();
  a.teacher = view(std::as_const(p.teacher).data(), p.d.shape());
  expect_error(run_op<Op>(p.d, a), bad,
               op + "teacher: given, but read only with top 0; leave it out");
  a = p.args();
  a.tail = {};
  expect_error(run_op<Op>(p.d, a), bad, op + "tail: null, expected f32 [2]");
  a = p.args();
  a.loss = a.d_x = {};
  expect_error(run_op<Op>(p.d, a), bad, op + "every output is left out, expected at least one");
  const KlLossDesc all{.rows = 2, .dim = 5};
  a = p.args();
  expect_error(run_op<Op>(all, a), bad, op + "teacher: null, expected f32 [2,5]");
  a.teacher = view(std::as_const(p.teacher).data(), p.d.shape());
  expect_error(run_op<Op>(all, a), bad, op + "ids: given, but read only with top; leave it out");
}

}  // namespace
}  // namespace bittern
