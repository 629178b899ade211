#include <optional>

#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_aims.h"
#include "ops/gdn/gdn_matrix.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_chunk_backward_check_cases() {
  std::vector<GdnDesc> cases = gdn_cases(GdnChunkBackward::kFields);
  GdnDesc d{.tokens = 35, .key_heads = 2, .value_heads = 6, .key_dim = 12, .value_dim = 9};
  d.chunk = 16;
  d.sequences = 3;
  d.gate = d.qk_l2norm = d.beta_sigmoid = true;
  cases.push_back(d);
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_chunk_backward_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32, fused = f32;
  bf16.element = fused.element = DType::bf16;
  fused.qk_l2norm = fused.gate = fused.beta_sigmoid = true;
  const auto fill = [](const GdnDesc& d, std::string_view operand, const ConstView& view,
                       Rng& rng) {
    if (operand == "g" && !d.gate) aim_log_decay(view, rng);
  };
  std::vector<BenchCase<GdnDesc>> cases{{"f32 16/32 heads 128", f32, fill, "mask"},
                                        {"bf16 16/32 heads 128", bf16, fill, "mask"},
                                        {"bf16 16/32 heads 128 fused", fused, fill, "mask"}};
  for (auto& large : gdn_gpu_bench_cases(fill)) cases.push_back(std::move(large));
  cases.push_back(cases.back());
  cases.back().label = "T 32768 16/32 heads fused";
  cases.back().desc = fused;
  cases.back().desc.tokens = 32768;
  return cases;
}

// What tensor cores take: whole and ragged chunks, several of them and several sequences, more
// value heads than key heads, keys of 64 and 128, values in groups of 64.
std::vector<GdnDesc> gdn_chunk_backward_bounded_cases(bool on_cuda) {
  std::vector<GdnDesc> cases;
  if (!on_cuda) return cases;
  const auto add = [&](GdnDesc d, DType element) {
    d.element = element;
    for (const bool fused : {false, true}) {
      d.qk_l2norm = d.gate = d.beta_sigmoid = d.allow_neg_eigval = fused;
      d.state_layout = fused ? StateLayout::value_key : StateLayout::key_value;
      d.head_map = fused ? HeadMap::tiled : HeadMap::grouped;
      cases.push_back(d);
    }
  };
  add({.tokens = 70}, DType::bf16);
  add({.batch = 0, .tokens = 70}, DType::bf16);
  add({.tokens = 150, .key_heads = 2, .value_heads = 6, .sequences = 4}, DType::bf16);
  add({.batch = 2, .tokens = 130, .value_heads = 2}, DType::f16);
  for (const auto& [keys, values] : gdn_tensor_core_sizes())
    add({.tokens = 140, .key_dim = keys, .value_dim = values}, DType::bf16);
  add({.tokens = 150,
       .key_heads = 2,
       .value_heads = 4,
       .key_dim = 64,
       .value_dim = 256,
       .sequences = 3},
      DType::f16);
  return cases;
}

namespace {

// The bound that the header of the op states, for one head of one sequence: units of its outputs.
class GradientBound {
 public:
  Matrix d_q, d_k, d_q_sizes, d_k_sizes;  // [tokens, keys]
  Matrix d_v;
  std::vector<double> d_g, d_beta;  // of the log decay and of the strength
  Matrix d_state;
  bool finite = true;  // else nothing is promised

  GradientBound(const GdnDesc& d, const GdnChunkBackward::Args& a, const Sequence& s,
                std::int64_t n, std::int64_t h, double bound)
      : d_q(s.end - s.begin, d.key_dim),
        d_k(d_q),
        d_q_sizes(d_q),
        d_k_sizes(d_q),
        d_v(d_q.rows, d.value_dim),
        d_g(index(d_q.rows)),
        d_beta(d_g),
        d_state(d.key_dim, d.value_dim),
        d_(d),
        a_(a),
        sequence_(n),
        h_(h),
        bound_(bound),
        least_(d.element == DType::f16 ? 0x1p-14 : 0x1p-80),
        most_(d.element == DType::f16 ? 0x1p14 : 0x1p126) {
    const Matrix none(d.key_dim, d.value_dim);
    Errors state{load_state(a.initial_state), none, {}};
    std::vector<Chunk> chunks;
    for (std::int64_t i = 0; i < d.chunks(s.end - s.begin); ++i) {
      chunks.push_back(load(gdn_chunk(d, s, i)));
      if (!finite) return;
      forward(chunks.back(), state);
    }
    Errors gradient{load_state(a.d_final_state), none, {}};
    for (std::size_t i = chunks.size(); i-- > 0;) {
      const Rows r = backward(chunks[i], gradient);
      if (!finite) return;
      add_units(chunks[i], r, chunks[i].place.begin - s.begin);
    }
    d_state = gradient.off;
    // Units are at least a 64th of the terms.
    const auto check = [&](const std::vector<double>& units) {
      for (const double x : units) finite = finite && 64 * x < kMostSum;
    };
    check(d_q.data), check(d_k.data), check(d_v.data), check(d_state.data);
    check(d_g), check(d_beta);
  }

  std::int64_t state_at(std::int64_t m, std::int64_t c) const {
    const std::int64_t first = (sequence_ * d_.value_heads + h_) * d_.key_dim * d_.value_dim;
    return first +
           (d_.state_layout == StateLayout::key_value ? m * d_.value_dim + c : c * d_.key_dim + m);
  }

 private:
  // S or H, units of its errors, and what errors of other chunks have become of: the sum of
  // |f| fresh.
  struct Transported {
    Matrix f, fresh;
  };
  struct Errors {
    Matrix exact, off;
    std::vector<Transported> parts;
  };
  // Numbers, their sizes with errors, and units of these.
  struct Rows {
    Matrix exact, sizes, off;
  };
  struct Chunk {
    GdnChunk place;
    Matrix k, q, v, d_o;  // as they are
    std::vector<double> k_norm, q_norm, beta, e, rest;
    Matrix decay, kk, l, p, t;  // kk normalised
    Matrix kk_sizes, a, c;      // of k k^T, L and P, by magnitudes
    Rows state, y;
    Rows gradient;  // H
    std::int64_t rows() const { return k.rows; }
  };

  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  static double at(const std::vector<double>& x, std::int64_t i) { return x[index(i)]; }

  double size_of_factor(double x) const { return x == 0 ? 0 : std::max(std::fabs(x), least_); }
  Matrix sizes(Matrix m) const {
    for (double& x : m.data) x = size_of_factor(x);
    return m;
  }
  static Matrix magnitudes(Matrix m) {
    for (double& x : m.data) x = std::fabs(x);
    return m;
  }
  static Matrix times(Matrix m, double factor) {
    for (double& x : m.data) x *= factor;
    return m;
  }
  static Matrix scaled_rows(Matrix m, const std::vector<double>& by) {
    for (std::int64_t i = 0; i < m.rows; ++i)
      for (std::int64_t j = 0; j < m.columns; ++j) m(i, j) *= at(by, i);
    return m;
  }
  static Matrix scaled_columns(Matrix m, const std::vector<double>& by) {
    for (std::int64_t i = 0; i < m.rows; ++i)
      for (std::int64_t j = 0; j < m.columns; ++j) m(i, j) *= at(by, j);
    return m;
  }
  const Matrix& limit(const Matrix& m) {
    for (const double x : m.data) finite = finite && std::fabs(x) < most_;
    return m;
  }
  // The same of what is not rounded to `element`.
  static constexpr double kMostSum = 0x1p126;
  const Matrix& limit_sums(const Matrix& m) {
    for (const double x : m.data) finite = finite && std::fabs(x) < kMostSum;
    return m;
  }
  // |x| + bound off, as a factor.
  Matrix with_errors(const Matrix& x, const Matrix& off) {
    return limit(sizes(magnitudes(x) + times(off, bound_)));
  }
  // Units of x rounded to `element`.
  static Matrix rounded(const Rows& x) { return x.off + times(x.sizes, 0.5); }

  double number(const ConstView& x, std::int64_t i) {
    const double value = get(x, i);
    finite = finite && std::isfinite(value);
    return value;
  }
  Matrix load_state(const ConstView& x) {
    return made(d_.key_dim, d_.value_dim,
                [&](auto m, auto c) { return x ? number(x, state_at(m, c)) : 0.0; });
  }
  bool masked(std::int64_t t) const { return a_.mask && get(a_.mask, t) == 0; }
  std::int64_t gate_at(std::int64_t t) const { return t * d_.value_heads + h_; }

  Chunk load(const GdnChunk& place) {
    const std::int64_t n = place.rows, heads = d_.value_heads;
    const auto rows = [&](const ConstView& x, std::int64_t width, std::int64_t of, std::int64_t h) {
      return made(n, width, [&](auto i, auto c) {
        const std::int64_t t = place.begin + i;
        return masked(t) ? 0.0 : number(x, (t * of + h) * width + c);
      });
    };
    const std::int64_t key_head = d_.key_head(h_);
    const Matrix square(n, n), none(d_.key_dim, d_.value_dim);
    Chunk c{.place = place,
            .k = rows(a_.k, d_.key_dim, d_.key_heads, key_head),
            .q = rows(a_.q, d_.key_dim, d_.key_heads, key_head),
            .v = rows(a_.v, d_.value_dim, heads, h_),
            .d_o = rows(a_.d_o, d_.value_dim, heads, h_),
            .k_norm = {},
            .q_norm = {},
            .beta = {},
            .e = {},
            .rest = {},
            .decay = square,
            .kk = square,
            .l = square,
            .p = square,
            .t = square,
            .kk_sizes = square,
            .a = square,
            .c = square,
            .state = {none, none, none},
            .y = {none, none, none},
            .gradient = {none, none, none}};
    std::vector<GdnSum> sum;
    double total = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t t = place.begin + i;
      float beta = 0, g = 0;
      if (!masked(t)) {
        beta = gdn_strength(d_, static_cast<float>(number(a_.beta, gate_at(t))));
        g = log_decay(t);
        finite = finite && !std::isnan(g) && !(static_cast<double>(g) > most_);
      }
      c.beta.push_back(static_cast<double>(beta));
      total = gdn_next_sum(total, g);
      sum.push_back(gdn_sum(total));
      const auto norm = [&](const Matrix& x) {
        double squares = 1e-6;
        for (std::int64_t m = 0; m < d_.key_dim; ++m) squares += x(i, m) * x(i, m);
        finite = finite && squares < kMostSum;
        return d_.qk_l2norm ? 1 / std::sqrt(squares) : 1;
      };
      c.k_norm.push_back(norm(c.k));
      c.q_norm.push_back(norm(c.q) * static_cast<double>(d_.query_scale()));
    }
    const auto decay = [&](std::int64_t i, std::int64_t j) {
      return static_cast<double>(gdn_decay(sum[index(i)], sum[index(j)]));
    };
    for (std::int64_t i = 0; i < n; ++i) {
      c.e.push_back(static_cast<double>(gdn_decay(sum[index(i)])));
      c.rest.push_back(decay(n - 1, i));
      finite = finite && c.e.back() < most_ && c.rest.back() < most_;
    }
    const Matrix kk = c.k * transposed(c.k), qk = c.q * transposed(c.k);
    const Matrix kk_sizes = limit_sums(sizes(c.k) * transposed(sizes(c.k)));
    const Matrix qk_sizes = limit_sums(sizes(c.q) * transposed(sizes(c.k)));
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        c.decay(i, j) = decay(i, j);
        const double norms = at(c.k_norm, i) * at(c.k_norm, j);
        const double q_norms = std::fabs(at(c.q_norm, i)) * at(c.k_norm, j);
        c.kk(i, j) = kk(i, j) * norms;
        c.kk_sizes(i, j) = kk_sizes(i, j) * norms;
        c.p(i, j) = qk(i, j) * at(c.q_norm, i) * at(c.k_norm, j) * decay(i, j);
        c.c(i, j) = size_of_factor(qk_sizes(i, j) * q_norms * decay(i, j));
        if (i == j) continue;
        c.l(i, j) = at(c.beta, i) * c.kk(i, j) * decay(i, j);
        c.a(i, j) = size_of_factor(at(c.beta, i) * c.kk_sizes(i, j) * decay(i, j));
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {  // (I + L)^-1
      c.t(i, i) = 1;
      for (std::int64_t m = 0; m < i; ++m)
        for (std::int64_t j = 0; j <= m; ++j) c.t(i, j) -= c.l(i, m) * c.t(m, j);
    }
    limit(c.t), limit(c.p);
    return c;
  }
  float log_decay(std::int64_t t) const {
    const auto one = [](const ConstView& x, std::int64_t i) {
      return static_cast<float>(get(x, i));
    };
    const float g = one(a_.g, gate_at(t));
    return d_.gate ? gdn_log_decay(g, one(a_.a_log, h_), one(a_.dt_bias, h_)) : g;
  }

  // beta[i] e[i] n_k[i] k[i] and the like.
  static std::vector<double> product(std::vector<double> x, const std::vector<double>& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= y[i];
    return x;
  }
  // What earlier errors have become of before a product with m, and after `next`.
  static Matrix carried(const Errors& x, const Matrix& m) {
    Matrix sum(m.rows, x.exact.columns);
    for (const Transported& part : x.parts) sum = sum + magnitudes(m * part.f) * part.fresh;
    return sum;
  }
  void move_on(Errors& x, const Matrix& next, Matrix exact, Matrix fresh) {
    x.off = fresh;
    for (Transported& part : x.parts) {
      part.f = next * part.f;
      x.off = x.off + magnitudes(part.f) * part.fresh;
    }
    x.exact = std::move(exact);
    limit(x.exact), limit(x.off);
    const Matrix one =
        made(next.rows, next.rows, [](auto i, auto j) { return i == j ? 1.0 : 0.0; });
    x.parts.push_back({one, std::move(fresh)});
  }

  // T's rounding reaches a state as keys^T (dT side), so |keys|^T |T| bounds it, not |keys^T T|.
  static Matrix of_rounding(const Matrix& keys, const Matrix& t, const Matrix& side) {
    return times(transposed(magnitudes(keys)) * (t * side), 0.5);
  }

  void forward(Chunk& c, Errors& s) {
    const std::int64_t n = c.rows();
    c.state = {s.exact, with_errors(s.exact, s.off), s.off};
    const auto seen = product(product(c.beta, c.e), c.k_norm), kept = product(c.rest, c.k_norm);
    const Matrix bk = scaled_rows(c.k, seen), wk = scaled_rows(c.k, kept);
    const Matrix ks = bk * s.exact;
    const Matrix right =
        made(n, d_.value_dim, [&](auto i, auto x) { return at(c.beta, i) * c.v(i, x) - ks(i, x); });
    c.y.exact = c.t * right;
    c.y.off = carried(s, c.t * bk);
    const Matrix seen_sizes = limit_sums(sizes(c.k) * c.state.sizes);
    Matrix r(n, d_.value_dim), side = r;
    c.y.sizes = r;
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t x = 0; x < d_.value_dim; ++x) {
        const double of_v = size_of_factor(at(c.beta, i) * c.v(i, x));
        const double of_s = size_of_factor(at(seen, i)) * seen_sizes(i, x);
        side(i, x) = of_v + of_s;
        r(i, x) = of_v + 1.5 * of_s + least_;
        for (std::int64_t j = 0; j < i; ++j) r(i, x) += c.a(i, j) * c.y.sizes(j, x) / 64;
        for (std::int64_t j = 0; j <= i; ++j) c.y.off(i, x) += size_of_factor(c.t(i, j)) * r(j, x);
        c.y.sizes(i, x) = size_of_factor(std::fabs(c.y.exact(i, x)) + bound_ * c.y.off(i, x));
      }
    }
    limit(c.y.sizes), limit(r);
    const double last = c.e.back();
    const Matrix fresh = times(transposed(sizes(c.k)) * sizes(scaled_rows(c.y.sizes, kept)), 0.5) +
                         times(c.state.sizes, size_of_factor(last) / 64) +
                         magnitudes(transposed(wk) * c.t) * r + of_rounding(wk, sizes(c.t), side);
    const Matrix next =
        made(d_.key_dim, d_.key_dim, [&](auto i, auto j) { return i == j ? last : 0.0; }) -
        transposed(wk) * (c.t * bk);
    move_on(s, next, times(s.exact, last) + transposed(wk) * c.y.exact, fresh);
  }

  // r, and H before the chunk.
  Rows backward(Chunk& c, Errors& h) {
    const std::int64_t n = c.rows();
    c.gradient = {h.exact, with_errors(h.exact, h.off), h.off};
    const auto seen = product(product(c.beta, c.e), c.k_norm), kept = product(c.rest, c.k_norm);
    const auto asked = product(c.e, c.q_norm);
    const Matrix bk = scaled_rows(c.k, seen), wk = scaled_rows(c.k, kept);
    const Matrix turned = transposed(c.t);
    Rows r{turned * (wk * h.exact + transposed(c.p) * c.d_o), Matrix(n, d_.value_dim),
           carried(h, turned * wk)};
    const Matrix of_h = limit_sums(sizes(c.k) * c.gradient.sizes);
    const Matrix d_o = sizes(c.d_o);
    const Matrix of_p = limit_sums(transposed(sizes(c.p)) * d_o), of_c = transposed(c.c) * d_o;
    Matrix u(n, d_.value_dim), side = u;
    for (std::int64_t i = n; i-- > 0;) {
      for (std::int64_t x = 0; x < d_.value_dim; ++x) {
        side(i, x) = size_of_factor(at(kept, i)) * of_h(i, x) + of_p(i, x);
        u(i, x) = 1.5 * side(i, x) + of_c(i, x) / 64 + least_;
        for (std::int64_t j = i + 1; j < n; ++j) u(i, x) += c.a(j, i) * r.sizes(j, x) / 64;
        for (std::int64_t j = i; j < n; ++j) r.off(i, x) += size_of_factor(c.t(j, i)) * u(j, x);
        r.sizes(i, x) = size_of_factor(std::fabs(r.exact(i, x)) + bound_ * r.off(i, x));
      }
    }
    limit(r.sizes), limit(u);
    const double last = c.e.back();
    const Matrix eq = scaled_rows(c.q, asked);
    const Matrix fresh = times(transposed(sizes(c.k)) * sizes(scaled_rows(r.sizes, seen)) +
                                   transposed(sizes(c.q)) * sizes(scaled_rows(d_o, asked)),
                               0.5) +
                         times(c.gradient.sizes, size_of_factor(last) / 64) +
                         magnitudes(transposed(bk) * turned) * u +
                         of_rounding(bk, sizes(turned), side);
    const Matrix next =
        made(d_.key_dim, d_.key_dim, [&](auto i, auto j) { return i == j ? last : 0.0; }) -
        transposed(bk) * (turned * wk);
    move_on(h, next, times(h.exact, last) - transposed(bk) * r.exact + transposed(eq) * c.d_o,
            fresh);
    return r;
  }

  // x y^T of two that are rounded, or of an exact x, and units of it.
  static Rows pair(const Rows& x, const Rows& y) {
    const Matrix other = transposed(y.sizes);
    const Matrix all = x.sizes * other;
    return {x.exact * transposed(y.exact), all,
            rounded(x) * other + x.sizes * transposed(rounded(y)) + times(all, 1.0 / 64)};
  }
  static Rows pair(const Matrix& exact, const Matrix& sizes, const Rows& y) {
    const Matrix all = sizes * transposed(y.sizes);
    return {exact * transposed(y.exact), all,
            sizes * transposed(rounded(y)) + times(all, 1.0 / 64)};
  }
  // Of x, made for pairs of tokens, times `factor`, what its product with keys is off by: x itself,
  // and its rounding.
  Matrix to_round(const Matrix& off, const Matrix& of) const {
    return off + times(sizes(of), 0.53);
  }

  void add_units(const Chunk& c, const Rows& r, std::int64_t first) {
    const std::int64_t n = c.rows(), keys = d_.key_dim;
    std::vector<double> e = c.e, rest = c.rest;  // decays too are factors
    for (auto* decays : {&e, &rest})
      for (double& x : *decays) x = size_of_factor(x);
    const Matrix d_o = sizes(c.d_o);
    const Rows m = pair(r, c.state), nn = pair(c.d_o, d_o, c.state), z = pair(c.y, c.gradient);
    const Rows of_p = pair(c.d_o, d_o, c.y), of_l = pair(r, c.y);
    for (const Rows* rows : {&m, &nn, &z, &of_p, &of_l}) limit_sums(rows->sizes);
    // DP and X: units and sizes.
    Matrix dp(n, n), x(n, n), dp_sizes(n, n), x_sizes(n, n), w(n, n), w_sizes(n, n);
    std::vector<double> slope(index(n)), slope_sizes(index(n));
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        const double decay = size_of_factor(c.decay(i, j)), beta = std::fabs(at(c.beta, i));
        dp(i, j) = decay * (of_p.off(i, j) + of_p.sizes(i, j) / 64);
        dp_sizes(i, j) = decay * (std::fabs(of_p.exact(i, j)) + bound_ * of_p.off(i, j));
        if (i == j) continue;
        const double dl = decay * (of_l.off(i, j) + of_l.sizes(i, j) / 64);
        x(i, j) = beta * dl;
        x_sizes(i, j) = beta * decay * (std::fabs(of_l.exact(i, j)) + bound_ * of_l.off(i, j));
        slope[index(i)] += dl * std::fabs(c.kk(i, j));
        slope_sizes[index(i)] += decay * of_l.sizes(i, j) * c.kk_sizes(i, j);
        w(i, j) = of_l.off(i, j) * std::fabs(c.l(i, j)) + of_p.off(i, j) * std::fabs(c.p(i, j));
        w_sizes(i, j) = of_l.sizes(i, j) * c.a(i, j) + of_p.sizes(i, j) * c.c(i, j);
      }
    }
    std::vector<double> q_norm = c.q_norm;
    for (double& norm : q_norm) norm = std::fabs(norm);
    const auto add = [&](Matrix& to, Matrix& to_sizes, const Matrix& units, const Matrix& all) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t s = 0; s < keys; ++s) {
          to(first + i, s) += units(i, s) + all(i, s) / 64 + least_;
          to_sizes(first + i, s) += all(i, s);
        }
      }
    };
    const Matrix k = sizes(c.k), q = sizes(c.q);
    limit_sums(w_sizes);
    const auto over = [&](const Matrix& units, const Matrix& all, const std::vector<double>& norm,
                          bool turn, const Matrix& by, Matrix& sum) {
      // Columns have the norm; turned, rows.
      const Matrix u = turn ? transposed(scaled_rows(units, norm)) : scaled_columns(units, norm);
      const Matrix s = turn ? transposed(scaled_rows(all, norm)) : scaled_columns(all, norm);
      sum = sum + sizes(limit(s)) * by;
      return to_round(u, s) * by;
    };
    Matrix q_sizes = scaled_rows(nn.sizes, e);
    Matrix q_units = scaled_rows(nn.off, e);
    q_units = q_units + over(dp, dp_sizes, c.k_norm, false, k, q_sizes);
    add(d_q, d_q_sizes, q_units, q_sizes);

    std::vector<double> b = product(c.beta, e);
    for (double& factor : b) factor = std::fabs(factor);
    Matrix k_sizes = scaled_rows(m.sizes, b) + scaled_rows(z.sizes, rest);
    Matrix k_units = scaled_rows(m.off, b) + scaled_rows(z.off, rest);
    k_units = k_units + over(dp, dp_sizes, q_norm, true, q, k_sizes);
    k_units = k_units + over(x, x_sizes, c.k_norm, false, k, k_sizes);
    k_units = k_units + over(x, x_sizes, c.k_norm, true, k, k_sizes);
    add(d_k, d_k_sizes, k_units, k_sizes);

    const Matrix r_units = rounded(r);
    std::vector<double> f(index(n)), gone(index(n));
    double inner = 0;
    {
      const Matrix s = rounded(c.state), h = rounded(c.gradient);
      for (std::size_t i = 0; i < s.data.size(); ++i)
        inner += s.data[i] * c.gradient.sizes.data[i] + h.data[i] * c.state.sizes.data[i] +
                 s.data[i] * h.data[i] * bound_;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      double k_m = 0, k_z = 0, q_n = 0, r_v = 0, raw = 0;
      for (std::int64_t s = 0; s < keys; ++s) {
        const double of_k = std::fabs(c.k(i, s)) * at(c.k_norm, i);
        raw += std::fabs(c.k(i, s)) * (m.sizes(i, s) + z.sizes(i, s)) +
               std::fabs(c.q(i, s)) * nn.sizes(i, s);
        k_m += of_k * (m.off(i, s) + m.sizes(i, s) / 64);
        k_z += of_k * (z.off(i, s) + z.sizes(i, s) / 64);
        q_n += std::fabs(c.q(i, s)) * at(q_norm, i) * (nn.off(i, s) + nn.sizes(i, s) / 64);
      }
      for (std::int64_t s = 0; s < d_.value_dim; ++s) {
        r_v += (r_units(i, s) + r.sizes(i, s) / 64) * std::fabs(c.v(i, s));
        d_v(first + i, s) = std::fabs(at(c.beta, i)) * (r_units(i, s) + r.sizes(i, s) / 64);
      }
      finite = finite && raw < kMostSum;
      f[index(i)] = at(b, i) * k_m + at(e, i) * q_n;
      gone[index(i)] = at(rest, i) * k_z;
      d_beta[index(first + i)] = at(e, i) * k_m + r_v + at(slope, i) + at(slope_sizes, i) / 64;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = e.back() * inner;
      for (std::int64_t j = 0; j < i; ++j) sum += at(gone, j);
      for (std::int64_t j = i; j < n; ++j) {
        sum += at(f, j);
        for (std::int64_t o = 0; o < i; ++o) sum += w(j, o) + w_sizes(j, o) / 64;
      }
      d_g[index(first + i)] = sum;
    }
  }

  const GdnDesc& d_;
  const GdnChunkBackward::Args& a_;
  std::int64_t sequence_, h_;
  double bound_, least_, most_;
};

// Units of d_q or d_k of a key head: `units` of what the rule saw, times `factor`, and `sizes` of
// its terms.
void judge_keys(const GdnDesc& d, std::string_view operand, const ConstView& x, const MutView& got,
                const MutView& want, const Sequence& s, std::int64_t key_head, const Matrix& units,
                const Matrix& sizes, double factor, bool finite, const ConstView& mask,
                Judge& judge) {
  for (std::int64_t i = 0; i < units.rows; ++i) {
    const std::int64_t t = s.begin + i, first = (t * d.key_heads + key_head) * d.key_dim;
    const bool masked = mask && get(mask, t) == 0;
    double squares = 1e-6, along = 0;
    const auto unit_of = [&](std::int64_t m) {
      return std::fabs(factor) * (units(i, m) + sizes(i, m) / 64);
    };
    for (std::int64_t m = 0; m < d.key_dim && !masked; ++m) {
      squares += get(x, first + m) * get(x, first + m);
      along += std::fabs(get(x, first + m)) * unit_of(m);
    }
    for (std::int64_t m = 0; m < d.key_dim; ++m) {
      double unit = unit_of(m);
      if (d.qk_l2norm && !masked)
        unit = (unit + along * std::fabs(get(x, first + m)) / squares) / std::sqrt(squares);
      judge.value(operand, as_const(got), as_const(want), first + m,
                  masked   ? 0
                  : finite ? unit
                           : std::numeric_limits<double>::infinity());
    }
  }
}

}  // namespace

void gdn_chunk_backward_judge(const GdnDesc& d, const GdnChunkBackward::Args& got,
                              const GdnChunkBackward::Args& want, Judge& judge) {
  constexpr double kAny = std::numeric_limits<double>::infinity();
  const std::vector<Sequence> sequences = sequences_of(d.rows(), want.cu_seqlens);
  std::vector<double> a_log(static_cast<std::size_t>(d.value_heads)), dt_bias(a_log);
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const Sequence& s = sequences[n];
    for (std::int64_t key_head = 0; key_head < d.key_heads; ++key_head) {
      std::optional<GradientBound> sum;
      for (std::int64_t i = 0; i < d.value_heads / d.key_heads; ++i) {
        const std::int64_t h = d.value_head(key_head, i);
        const auto of = static_cast<std::size_t>(h);
        GradientBound head(d, want, s, static_cast<std::int64_t>(n), h, judge.bound());
        const auto or_any = [&](double unit) { return head.finite ? unit : kAny; };
        for (std::int64_t t = s.begin; t < s.end; ++t) {
          const std::int64_t gate = t * d.value_heads + h, row = t - s.begin;
          const auto at = static_cast<std::size_t>(row);
          const bool masked = want.mask && get(want.mask, t) == 0;
          double d_g = head.d_g[at], d_beta = head.d_beta[at];
          if (d.gate && !masked) {
            const auto one = [](const ConstView& x, std::int64_t j) {
              return static_cast<float>(get(x, j));
            };
            const float a = one(want.g, gate), rate = math::exp(one(want.a_log, h));
            const float decay = gdn_log_decay(a, one(want.a_log, h), one(want.dt_bias, h));
            if (!(decay <= kGdnReset)) {
              a_log[of] += or_any(d_g * std::fabs(static_cast<double>(decay)));
              d_g *= static_cast<double>(rate) *
                     static_cast<double>(gdn_softplus_slope(a + one(want.dt_bias, h)));
              dt_bias[of] += or_any(d_g);
            }
          }
          if (d.beta_sigmoid && !masked) {
            const double x = get(want.beta, gate), e = std::exp(-std::fabs(x));
            d_beta *= (d.allow_neg_eigval ? 2 : 1) * e / ((1 + e) * (1 + e));
          }
          judge.value("d_g", as_const(got.d_g), as_const(want.d_g), gate, masked ? 0 : or_any(d_g));
          judge.value("d_beta", as_const(got.d_beta), as_const(want.d_beta), gate,
                      masked ? 0 : or_any(d_beta));
          for (std::int64_t c = 0; c < d.value_dim; ++c)
            judge.value("d_v", as_const(got.d_v), as_const(want.d_v), gate * d.value_dim + c,
                        masked ? 0 : or_any(head.d_v(row, c)));
        }
        for (std::int64_t m = 0; got.d_initial_state && m < d.key_dim; ++m)
          for (std::int64_t c = 0; c < d.value_dim; ++c)
            judge.value("d_initial_state", as_const(got.d_initial_state),
                        as_const(want.d_initial_state), head.state_at(m, c),
                        or_any(head.d_state(m, c)));
        if (!sum) {
          sum.emplace(std::move(head));
        } else {
          sum->finite = sum->finite && head.finite;
          for (const auto& [to, from] :
               {std::pair{&sum->d_q, &head.d_q}, std::pair{&sum->d_k, &head.d_k},
                std::pair{&sum->d_q_sizes, &head.d_q_sizes},
                std::pair{&sum->d_k_sizes, &head.d_k_sizes}})
            *to = *to + *from;
        }
      }
      judge_keys(d, "d_q", want.q, got.d_q, want.d_q, s, key_head, sum->d_q, sum->d_q_sizes,
                 static_cast<double>(d.query_scale()), sum->finite, want.mask, judge);
      judge_keys(d, "d_k", want.k, got.d_k, want.d_k, s, key_head, sum->d_k, sum->d_k_sizes, 1,
                 sum->finite, want.mask, judge);
    }
  }
  for (std::int64_t h = 0; h < d.value_heads; ++h) {
    const auto of = static_cast<std::size_t>(h);
    if (got.d_a_log)
      judge.value("d_a_log", as_const(got.d_a_log), as_const(want.d_a_log), h, a_log[of]);
    if (got.d_dt_bias)
      judge.value("d_dt_bias", as_const(got.d_dt_bias), as_const(want.d_dt_bias), h, dt_bias[of]);
  }
}

void gdn_chunk_backward_aim(const GdnDesc& d, const GdnChunkBackward::Args& a, Rng& rng) {
  aim_rule(d, a, rng);
  aim_values(a.d_o, 1, rng);
  aim_values(a.d_final_state, 1, rng);
}

}  // namespace bittern::oracle
