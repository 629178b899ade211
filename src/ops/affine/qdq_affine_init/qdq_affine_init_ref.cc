#include "bittern/ops/qdq_affine_init.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineInit;
using affine::Params;
using affine::Range;

template <class F>
struct Group {
  std::vector<F> w, c;  // c: importance, 1 where none is given
  Params<F> p;          // as stored
  std::vector<std::uint8_t> q;
};

template <class F>
void quantize_minmax(Group<F>& g, std::int32_t bins, bool halved) {
  for (std::size_t i = 0; i < g.w.size(); ++i)
    g.q[i] = affine::minmax_code(g.w[i], g.p, bins, halved);
}

template <class S>
void init_mlx(Group<Math<S>>& g, std::int32_t bins) {
  const auto exact = affine::mlx_params(affine::finite_range<Math<S>>(g.w), bins);
  for (std::size_t i = 0; i < g.w.size(); ++i) g.q[i] = affine::mlx_code(g.w[i], exact, bins);
  g.p = {affine::stored<S>(exact.s), affine::stored<S>(exact.b)};
}

// sum c (w - y)^2, y = fma(q, s, b)
template <class F>
double squared_error(const Group<F>& g) {
  std::vector<double> terms(g.w.size());
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const F y = std::fma(static_cast<F>(g.q[i]), g.p.s, g.p.b);
    const double d = g.w[i] - y;
    terms[i] = static_cast<double>(g.c[i]) * (d * d);
  }
  return halving_sum(terms);
}

// The least-squares s and b of g's codes, as stored; s is NaN where there are none.
template <class S>
Params<Math<S>> fit(const Group<Math<S>>& g, Math<S> b0) {
  using F = Math<S>;
  const auto sum = [&](auto&& term) {
    std::vector<F> terms(g.w.size());
    for (std::size_t i = 0; i < terms.size(); ++i)
      terms[i] = term(g.c[i], static_cast<F>(g.q[i]), g.w[i] - b0);
    return static_cast<double>(halving_sum(terms));
  };
  const double c = sum([](F ci, F, F) { return ci; });
  const double cq = sum([](F ci, F q, F) { return ci * q; });
  const double cqq = sum([](F ci, F q, F) { return ci * q * q; });
  const double cu = sum([](F ci, F, F u) { return ci * u; });
  const double cqu = sum([](F ci, F q, F u) { return ci * q * u; });
  const double r = 1 / (c * cqq - cq * cq);
  const double s = (c * cqu - cq * cu) * r;
  const double b = static_cast<double>(b0) + (cqq * cu - cq * cqu) * r;
  const Params<F> p{affine::stored<S>(static_cast<F>(s)),
                    affine::stored<S>(static_cast<F>(b)) + F(0)};
  if (p.s > 0 && std::isfinite(p.s) && std::isfinite(p.b)) return p;
  return {std::numeric_limits<F>::quiet_NaN(), 0};
}

template <class S>
void refine_lsq(Group<Math<S>>& g, std::int32_t bins) {
  using F = Math<S>;
  const Group<F> start = g;
  double least = squared_error(start);
  for (int k = 0; k < affine::lsq_starts(bins); ++k) {
    Group<F> now = start;
    now.p = affine::lsq_start(start.p, bins, k, affine::stored<S>);
    if (!(now.p.s > 0)) continue;
    quantize_minmax(now, bins, false);
    for (int round = 0; round < affine::kMostFits; ++round) {
      const Params<F> p = fit<S>(now, start.p.b);
      if (!(p.s > 0) || (p.s == now.p.s && p.b == now.p.b)) break;
      now.p = p;
      quantize_minmax(now, bins, false);
    }
    const double error = squared_error(now);
    if (!affine::gains(least, error)) continue;
    least = error;
    g = now;
  }
}

template <class S>
void init(Group<Math<S>>& g, AffineMethod method, std::int32_t bins) {
  using F = Math<S>;
  const Range<F> range = affine::finite_range<F>(g.w);
  if (method == AffineMethod::mlx && !range.overflows()) return init_mlx<S>(g, bins);
  g.p = affine::minmax_params<S>(range, bins);
  quantize_minmax(g, bins, range.overflows());
  const bool finite = std::all_of(g.w.begin(), g.w.end(), [](F x) { return std::isfinite(x); });
  if (method == AffineMethod::lsq && finite && !range.overflows()) refine_lsq<S>(g, bins);
}

template <class X, class S>
Status run_as(const Op::Desc& d, const Op::Args& a) {
  using F = Math<X>;
  const std::int64_t groups = d.num_groups(), size = d.group_size, bits = d.code_bits();
  const auto* importance = a.importance.as<float>();
  bool finite = true;
  Group<F> g;
  g.w.resize(static_cast<std::size_t>(size));
  g.c.resize(g.w.size());
  g.q.resize(g.w.size());
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    if (d.storage == CodeStorage::packed) {
      auto* words = a.q.as<std::uint32_t>() + i * a.q.row_stride();
      std::fill_n(words, packed_words(d.axis_size, bits), 0u);
    }
    for (std::int64_t k = 0; k < groups; ++k) {
      const X* w = a.w.as<X>() + i * a.w.row_stride() + k * size;
      for (std::int64_t j = 0; j < size; ++j) {
        const auto at = static_cast<std::size_t>(j);
        const float c = importance != nullptr ? importance[k * size + j] : 1.0f;
        g.w[at] = to_math(w[j]);
        finite &= std::isfinite(g.w[at]);
        g.c[at] = c > 0 && std::isfinite(c) ? static_cast<F>(c) : F(0);
      }
      init<S>(g, d.method, d.bins());
      a.scales.as<S>()[i * groups + k] = from_math<S>(g.p.s);
      a.biases.as<S>()[i * groups + k] = from_math<S>(g.p.b);
      for (std::int64_t j = 0; j < size; ++j) {
        const std::uint32_t code = g.q[static_cast<std::size_t>(j)];
        if (d.storage == CodeStorage::u8) {
          a.q.as<std::uint8_t>()[i * a.q.row_stride() + k * size + j] =
              static_cast<std::uint8_t>(code);
        } else {
          auto* words = a.q.as<std::uint32_t>() + i * a.q.row_stride();
          const std::int64_t bit = (k * size + j) * bits;
          words[bit / 32] |= code << bit % 32;
          if (bit % 32 + bits > 32) words[bit / 32 + 1] |= code >> (32 - bit % 32);
        }
      }
    }
  }
  return finite || !d.expect_finite ? Status() : Op::not_finite();
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if constexpr (!std::is_same_v<X, double>) {
      if (d.f32_scale) return run_as<X, float>(d, a);
    }
    return run_as<X, X>(d, a);
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QdqAffineInit>> qdq_affine_init_ref() { return kKernels; }

}  // namespace bittern
