#include "core/activations.h"
#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<LogSoftmaxDesc> log_softmax_check_cases() {
  std::vector<LogSoftmaxDesc> cases;
  for (const std::int64_t dim : {1, 7, 8, 16, 31, 100, 4096, 4111}) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      const std::size_t turn = cases.size();
      cases.push_back({.rows = dim < 50 ? 41 : 5,
                       .dim = dim,
                       .softcap = turn % 3 == 1 ? 30.0 : 0.0,
                       .temperature = turn % 4 == 2 ? 0.7 : 1.0,
                       .element = element});
    }
  }
  cases.push_back({.rows = 2, .dim = 9000, .softcap = 50, .temperature = 1.5});
  cases.push_back({.rows = 0, .dim = 16});
  return cases;
}

std::vector<BenchCase<LogSoftmaxDesc>> log_softmax_bench_cases() {
  const LogSoftmaxDesc f32{.rows = 256, .dim = 49152};
  LogSoftmaxDesc bf16 = f32, capped = f32, one{.rows = 1, .dim = 151936};
  bf16.element = DType::bf16;
  capped.softcap = 30;
  return {{"f32 256 x 49152", f32},
          {"bf16 256 x 49152", bf16},
          {"f32 with a soft cap", capped},
          {"f32 1 x 151936", one}};
}

// Mostly rows of finite logits, since one NaN spoils its row: equal ones, some with -infinity, and
// some on either side of tanh's threshold.
void log_softmax_aim(const LogSoftmaxDesc& d, const LogSoftmax::Args& a, Rng& rng) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const std::int64_t kind = rng.below(8);
    if (kind == 0) continue;
    for (std::int64_t j = 0; j < d.dim; ++j) {
      double v = kind == 1 ? 3.0 : 10 * rng.normal();
      if (kind == 2 && rng.chance(2)) v = -kInfinity;
      if (kind == 3 && d.softcap > 0) {
        v = step(a.x.dtype, static_cast<double>(math::kTanhSmall) * d.softcap,
                 static_cast<int>(rng.below(5)) - 2);
      }
      if (kind == 4) v *= 20;
      put(a.x, i * d.dim + j, v);
    }
  }
}

}  // namespace bittern::oracle
