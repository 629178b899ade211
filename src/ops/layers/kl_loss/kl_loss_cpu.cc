#include "bittern/ops/kl_loss.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/kl_loss/kl_top.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/kl_loss/kl_loss_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"
#include "ops/layers/log_sum-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = KlLoss;
using lines::Chains;
using lines::D64;
using lines::Lines;
using lines::V;
using lines::V64;
using lines::Wide;

// The largest number; a NaN does not count.
float MostOf(const float* row, std::int64_t dim) {
  const DotTag tag;
  V most = hn::Neg(hn::Inf(tag));
  Lines{dim}.Each([&](auto part) HWY_ATTR {
    const V v = part.Load(row);
    most = part.Only(hn::IfThenElse(hn::Gt(v, most), v, most), most);
  });
  return hn::GetLane(hn::MaxOfLanes(tag, most));
}

// Logits of one side: v to (v - most) / temperature, and to its exponential.
struct Side {
  const float* row;
  float most;
  double inverse_temperature;

  // Lanes past the end are -infinity, whose exponential is +0.
  template <class Part>
  HWY_INLINE void Log(const Part& part, std::int64_t first, Wide& out) const {
    const V v = part.Only(part.Load(row + first), hn::Neg(hn::Inf(DotTag())));
    const V64 at = hn::Set(D64(), static_cast<double>(most));
    const V64 k = hn::Set(D64(), inverse_temperature);
    lines::Widen(v, out);
    out.low = hn::Mul(hn::Sub(out.low, at), k);
    out.high = hn::Mul(hn::Sub(out.high, at), k);
  }
  static HWY_INLINE void Exp(const Wide& log, Wide& out) {
    out.low = Exp64(D64(), log.low);
    out.high = Exp64(D64(), log.high);
  }
  template <class Part>
  HWY_INLINE void Exp(const Part& part, std::int64_t first, Wide& out) const {
    Wide log;
    Log(part, first, log);
    Exp(log, out);
  }
};

// f(part, first) on the parts of each block, and done() after it.
template <class F, class Done>
HWY_INLINE void EachBlock(std::int64_t dim, const F& f, const Done& done) {
  for (std::int64_t first = 0; first < dim; first += kLogSumBlock) {
    Lines{std::min(dim - first, kLogSumBlock)}.Each([&](auto part) HWY_ATTR { f(part, first); });
    done();
  }
}

// E (a - b), and 0 where E is
HWY_INLINE V64 Term(V64 e, V64 a, V64 b) {
  return hn::IfThenZeroElse(hn::Eq(e, hn::Zero(D64())), hn::Mul(e, hn::Sub(a, b)));
}

// One row. What turns slopes into gradients is the same for all of them.
class Gradient {
 public:
  Gradient(const Op::Desc& d, float weight)
      : scale_(static_cast<double>(weight) * (1 / d.temperature)),
        cap_(static_cast<double>(static_cast<float>(d.softcap))) {}

  // The row's slopes, of which slope(part, out) gives a part at a time; c is read before d_x is
  // written.
  template <class F>
  HWY_INLINE void Store(std::int64_t dim, const float* c, float* d_x, const F& slope) const {
    const hn::Half<DotTag> half;
    Lines{dim}.Each([&](auto part) HWY_ATTR {
      Wide v, at;
      slope(part, v);
      lines::Widen(part.Load(c), at);
      v.low = Scaled(v.low, at.low);
      v.high = Scaled(v.high, at.high);
      part.Store(hn::Combine(DotTag(), hn::DemoteTo(half, v.high), hn::DemoteTo(half, v.low)), d_x);
    });
  }
  float One(double slope, float c) const {
    double v = scale_ * slope;
    if (cap_ > 0) {
      const auto at = static_cast<double>(c);
      v = v * (((cap_ - at) * (cap_ + at)) * (1 / (cap_ * cap_)));
    }
    return static_cast<float>(v);
  }

 private:
  HWY_INLINE V64 Scaled(V64 slope, V64 at) const {
    const D64 d;
    const V64 v = hn::Mul(hn::Set(d, scale_), slope);
    if (!(cap_ > 0)) return v;
    const V64 cap = hn::Set(d, cap_), inverse = hn::Set(d, 1 / (cap_ * cap_));
    return hn::Mul(v, hn::Mul(hn::Mul(hn::Sub(cap, at), hn::Add(cap, at)), inverse));
  }
  double scale_, cap_;
};

double AllLogits(const Op::Desc& d, const float* c, const float* teacher, const Gradient& gradient,
                 float* d_x) {
  const double k = 1 / d.temperature;
  const Side student{c, MostOf(c, d.dim), k}, other{teacher, MostOf(teacher, d.dim), k};
  double e_sum = 0, f_sum = 0, sum = 0;
  Chains e_chains, f_chains, chains;
  EachBlock(
      d.dim,
      [&](auto part, std::int64_t first) HWY_ATTR {
        Wide a, b, e, f, terms;
        other.Log(part, first, a);
        student.Log(part, first, b);
        Side::Exp(a, e);
        Side::Exp(b, f);
        terms.low = Term(e.low, a.low, b.low);
        terms.high = Term(e.high, a.high, b.high);
        e_chains.Add(e, part.at);
        f_chains.Add(f, part.at);
        chains.Add(terms, part.at);
      },
      [&]() HWY_ATTR {
        e_sum += e_chains.Join();
        f_sum += f_chains.Join();
        sum += chains.Join();
        e_chains = f_chains = chains = Chains();
      });
  const double inverse_e = 1 / e_sum, inverse_f = 1 / f_sum;
  if (d_x != nullptr) {
    const V64 by_e = hn::Set(D64(), inverse_e), by_f = hn::Set(D64(), inverse_f);
    gradient.Store(d.dim, c, d_x, [&](auto part, Wide& out) HWY_ATTR {
      Wide e, f;
      other.Exp(part, 0, e);
      student.Exp(part, 0, f);
      out.low = hn::Sub(hn::Mul(f.low, by_f), hn::Mul(e.low, by_e));
      out.high = hn::Sub(hn::Mul(f.high, by_f), hn::Mul(e.high, by_e));
    });
  }
  return sum * inverse_e + (log64(f_sum) - log64(e_sum));
}

// exp((v - most) k) of v[0, n), as f64.
void Exponentials(const float* v, std::int64_t n, float most, double k, double* out) {
  const Side side{v, most, k};
  Lines{n}.Each([&](auto part) HWY_ATTR {
    Wide e;
    side.Exp(part, 0, e);
    alignas(64) double all[kDotVector];
    hn::Store(e.low, D64(), all);
    hn::Store(e.high, D64(), all + lines::kLanes64);
    std::copy_n(all, part.count, out + part.at);
  });
}

// scratch.row is the row's logits; those of the top move to scratch.top.
double SomeTokens(const Op::Desc& d, const KlScratch& scratch, const std::int32_t* ids,
                  const float* log_probs, float tail, const Gradient& gradient, float* d_x) {
  const double k = 1 / d.temperature;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < d.top; ++i) {
    scratch.top[i] = scratch.row[ids[i]];
    scratch.row[ids[i]] = -kInfinity;
  }
  Side others{scratch.row, MostOf(scratch.row, d.dim), k};
  const float top_most = MostOf(scratch.top, d.top);
  const float most = top_most > others.most ? top_most : others.most;
  if (others.most == -kInfinity) others.most = most;
  double others_sum = 0;
  Chains chains;
  EachBlock(
      d.dim,
      [&](auto part, std::int64_t first) HWY_ATTR {
        Wide g;
        others.Exp(part, first, g);
        chains.Add(g, part.at);
      },
      [&]() HWY_ATTR {
        others_sum += chains.Join();
        chains = Chains();
      });
  Exponentials(scratch.top, d.top, most, k, scratch.f);
  Exponentials(log_probs, d.top, 0, 1, scratch.p);
  const KlTop found =
      kl_top(d, scratch.top, scratch.f, log_probs, scratch.p, tail, most, others.most, others_sum);
  if (d_x == nullptr) return found.kl;
  const V64 share = hn::Set(D64(), found.others);
  gradient.Store(d.dim, scratch.row, d_x, [&](auto part, Wide& out) HWY_ATTR {
    others.Exp(part, 0, out);
    out.low = hn::Mul(out.low, share);
    out.high = hn::Mul(out.high, share);
  });
  for (std::int64_t i = 0; i < d.top; ++i) {
    const double slope = scratch.f[i] * found.inverse_l - scratch.p[i] * found.inverse_s;
    d_x[ids[i]] = gradient.One(slope, scratch.top[i]);
  }
  return found.kl;
}

// Rows [begin, end).
void RunKlLoss(const Op::Desc& d, const Op::Args& a, const KlScratch& scratch, std::int64_t begin,
               std::int64_t end) {
  const DotTag tag;
  const V cap = hn::Set(tag, static_cast<float>(d.softcap));
  const bool capped = d.softcap > 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const float weight = a.weights ? a.weights.as<float>()[i] : 1.0f;
    float* d_x = a.d_x ? a.d_x.as<float>() + i * a.d_x.row_stride() : nullptr;
    if (weight == 0) {
      if (a.loss) a.loss.as<float>()[i] = 0;
      if (d_x != nullptr) std::fill_n(d_x, d.dim, 0.0f);
      continue;
    }
    const float* c = a.x.as<float>() + i * a.x.row_stride();
    if (capped || d.top > 0) {
      Lines{d.dim}.Each([&](auto part) HWY_ATTR {
        V v = part.Load(c);
        if (capped) v = hn::Mul(cap, Tanh(tag, hn::Div(v, cap)));
        part.Store(v, scratch.row);
      });
      c = scratch.row;
    }
    const Gradient gradient(d, weight);
    const double kl =
        d.top == 0
            ? AllLogits(d, c, a.teacher.as<float>() + i * a.teacher.row_stride(), gradient, d_x)
            : SomeTokens(d, scratch, a.ids.as<std::int32_t>() + i * a.ids.row_stride(),
                         a.log_probs.as<float>() + i * a.log_probs.row_stride(),
                         a.tail.as<float>()[i], gradient, d_x);
    if (a.loss) a.loss.as<float>()[i] = static_cast<float>(static_cast<double>(weight) * kl);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = KlLoss;
BITTERN_EXPORT(RunKlLoss);

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(std::max(num_threads(), 1)) * KlScratch::bytes(d);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  const std::size_t bytes = KlScratch::bytes(d);
  cpu::parallel_slots(d.rows, static_cast<std::int64_t>(space.bytes / bytes),
                      [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
                        auto* at = static_cast<std::byte*>(space.data) +
                                   static_cast<std::size_t>(slot) * bytes;
                        BITTERN_CALL(RunKlLoss)(d, a, KlScratch(d, at), begin, end);
                      });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<KlLoss>> kl_loss_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
