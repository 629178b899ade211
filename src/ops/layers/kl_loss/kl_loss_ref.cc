#include "bittern/ops/kl_loss.h"
#include "core/math.h"
#include "ops/layers/kl_loss/kl_top.h"
#include "ops/layers/log_sum.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = KlLoss;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The largest number; a NaN does not count.
float most_of(const Floats& v) {
  float most = -kInfinity;
  for (const float x : v)
    if (x > most) most = x;
  return most;
}

// exp((v - most) / temperature)
double weight(const Op::Desc& d, float v, float most) {
  return math::exp64((static_cast<double>(v) - static_cast<double>(most)) * (1 / d.temperature));
}

// A row's KL; the slopes go to `slope`.
double all_logits(const Op::Desc& d, const Floats& c, const Floats& teacher, Doubles& slope) {
  const double k = 1 / d.temperature;
  const float most = most_of(c), teacher_most = most_of(teacher);
  const auto at = [](std::int64_t j) { return static_cast<std::size_t>(j); };
  const auto e = [&](std::int64_t j) { return weight(d, teacher[at(j)], teacher_most); };
  const auto f = [&](std::int64_t j) { return weight(d, c[at(j)], most); };
  const double e_sum = chain_sum(d.dim, e), f_sum = chain_sum(d.dim, f);
  const double sum = chain_sum(d.dim, [&](std::int64_t j) {
    const double a = (static_cast<double>(teacher[at(j)]) - static_cast<double>(teacher_most)) * k;
    const double b = (static_cast<double>(c[at(j)]) - static_cast<double>(most)) * k;
    return e(j) == 0 ? 0 : e(j) * (a - b);
  });
  const double inverse_e = 1 / e_sum, inverse_f = 1 / f_sum;
  for (std::int64_t j = 0; j < d.dim; ++j) slope[at(j)] = f(j) * inverse_f - e(j) * inverse_e;
  return sum * inverse_e + (log64(f_sum) - log64(e_sum));
}

double some_tokens(const Op::Desc& d, const Floats& c, const std::int32_t* ids,
                   const float* log_probs, float tail, Doubles& slope) {
  Floats others = c, top;
  for (std::int64_t i = 0; i < d.top; ++i) {
    const auto id = static_cast<std::size_t>(ids[i]);
    top.push_back(c[id]);
    others[id] = -kInfinity;
  }
  const float most = most_of(c);
  float others_most = most_of(others);
  if (others_most == -kInfinity) others_most = most;
  const auto g = [&](std::int64_t j) {
    return weight(d, others[static_cast<std::size_t>(j)], others_most);
  };
  Doubles f, p;
  for (std::int64_t i = 0; i < d.top; ++i) {
    f.push_back(weight(d, top[static_cast<std::size_t>(i)], most));
    p.push_back(math::exp64(static_cast<double>(log_probs[i])));
  }
  const KlTop found = kl_top(d, top.data(), f.data(), log_probs, p.data(), tail, most, others_most,
                             chain_sum(d.dim, g));
  for (std::int64_t j = 0; j < d.dim; ++j) slope[static_cast<std::size_t>(j)] = g(j) * found.others;
  for (std::size_t i = 0; i < f.size(); ++i)
    slope[static_cast<std::size_t>(ids[i])] = f[i] * found.inverse_l - p[i] * found.inverse_s;
  return found.kl;
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const auto dim = static_cast<std::size_t>(d.dim);
  const auto cap = static_cast<float>(d.softcap);
  Floats c(dim);
  Doubles slope(dim);
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const float weight = a.weights ? a.weights.as<float>()[i] : 1.0f;
    float* d_x = a.d_x ? a.d_x.as<float>() + i * a.d_x.row_stride() : nullptr;
    if (weight == 0) {
      if (a.loss) a.loss.as<float>()[i] = 0;
      if (d_x != nullptr) std::fill_n(d_x, d.dim, 0.0f);
      continue;
    }
    const float* x = a.x.as<float>() + i * a.x.row_stride();
    for (std::size_t j = 0; j < dim; ++j) c[j] = cap > 0 ? cap * math::tanh(x[j] / cap) : x[j];
    double kl = 0;
    if (d.top == 0) {
      const float* teacher = a.teacher.as<float>() + i * a.teacher.row_stride();
      kl = all_logits(d, c, Floats(teacher, teacher + dim), slope);
    } else {
      kl = some_tokens(d, c, a.ids.as<std::int32_t>() + i * a.ids.row_stride(),
                       a.log_probs.as<float>() + i * a.log_probs.row_stride(),
                       a.tail.as<float>()[i], slope);
    }
    if (a.loss) a.loss.as<float>()[i] = static_cast<float>(static_cast<double>(weight) * kl);
    const double scale = static_cast<double>(weight) * (1 / d.temperature);
    const auto limit = static_cast<double>(cap);
    for (std::size_t j = 0; d_x != nullptr && j < dim; ++j) {
      double v = scale * slope[j];
      if (cap > 0) {
        const auto at = static_cast<double>(c[j]);
        v = v * (((limit - at) * (limit + at)) * (1 / (limit * limit)));
      }
      d_x[j] = static_cast<float>(v);
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<KlLoss>> kl_loss_ref() { return kKernels; }

}  // namespace bittern
