#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_aims.h"
#include "ops/gdn/gdn_matrix.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_chunk_forward_check_cases() {
  std::vector<GdnDesc> cases = gdn_cases(GdnChunkForward::kFields);
  // More value heads a key head than go together.
  GdnDesc d{.tokens = 35, .key_heads = 2, .value_heads = 14, .key_dim = 12, .value_dim = 9};
  d.chunk = 16;
  cases.push_back(d);
  d.head_map = HeadMap::tiled;
  cases.push_back(d);
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_chunk_forward_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32, fused = f32;
  bf16.element = fused.element = DType::bf16;
  fused.qk_l2norm = fused.gate = fused.beta_sigmoid = true;
  const auto fill = [](const GdnDesc& d, std::string_view operand, const ConstView& view,
                       Rng& rng) {
    if (operand == "g" && !d.gate) aim_log_decay(view, rng);
    if (operand == "mask")
      for (std::int64_t i = 0; i < view.shape.numel(); ++i) put(view, i, 1);
  };
  std::vector<BenchCase<GdnDesc>> cases{
      {"f32 16/32 heads 128", f32, fill, "mask"},
      {"bf16 16/32 heads 128", bf16, fill, "mask"},
      {"bf16 16/32 heads 128 fused", fused, fill},
      {"bf16 16/32 heads 128 fastest", bf16, fill, "mask", Preference::fastest},
      {"bf16 16/32 heads 128 fused fastest", fused, fill, "", Preference::fastest}};
  for (auto& large : gdn_gpu_bench_cases(fill)) cases.push_back(std::move(large));
  return cases;
}

// Whole and ragged chunks, odd sizes, several chunks and sequences, keys that are normalised or
// not.
std::vector<GdnDesc> gdn_chunk_forward_bounded_cases(bool on_cuda) {
  std::vector<GdnDesc> cases;
  const auto add = [&](GdnDesc d) {
    d.element = DType::bf16;
    for (const bool fused : {false, true}) {
      d.qk_l2norm = fused;
      d.gate = d.beta_sigmoid = fused && cases.size() % 4 == 1;
      cases.push_back(d);
    }
  };
  add({.tokens = 130, .key_dim = 128, .value_dim = 32});
  add({.tokens = 75,
       .key_heads = 1,
       .value_heads = 2,
       .key_dim = 33,
       .value_dim = 48,
       .chunk = 32});
  add({.tokens = 61, .key_dim = 16, .value_dim = 17, .chunk = 16});
  add({.batch = 2, .tokens = 23, .key_heads = 2, .value_heads = 6, .key_dim = 7, .value_dim = 130});
  add({.tokens = 90, .key_dim = 20, .value_dim = 16, .chunk = 32, .sequences = 4});
  // What tensor cores take: chunks of 64, keys of 64 and 128, values in groups of 64.
  if (!on_cuda) return cases;
  add({.tokens = 70});
  add({.batch = 0, .tokens = 70});
  for (const auto& [keys, values] : gdn_tensor_core_sizes())
    add({.tokens = 140, .key_dim = keys, .value_dim = values});
  add({.tokens = 250, .value_dim = 256});
  add({.tokens = 200,
       .key_heads = 1,
       .value_heads = 2,
       .key_dim = 64,
       .value_dim = 256,
       .sequences = 3});
  add({.tokens = 200, .key_heads = 1, .value_heads = 3, .sequences = 4});
  add({.tokens = 270});
  for (const bool fused : {false, true}) {
    GdnDesc d{.tokens = 130, .value_heads = 2};
    if (fused) d.key_dim = 64, d.value_dim = 256;
    d.element = DType::f16;
    d.state_layout = StateLayout::value_key;
    d.qk_l2norm = d.beta_sigmoid = d.allow_neg_eigval = fused;
    if (fused) d.head_map = HeadMap::tiled;
    cases.push_back(d);
  }
  return cases;
}

namespace {

// The bound that the header of the op states, for one head of one sequence.
class RuleBound {
 public:
  RuleBound(const GdnDesc& d, const GdnChunkForward::Args& a, std::int64_t sequence, std::int64_t h,
            double bound)
      : d_(d),
        a_(a),
        h_(h),
        bound_(bound),
        inverse_(bound > kGdnPairsBound),
        least_(d.element == DType::f16 ? 0x1p-14 : 0x1p-80),
        most_(d.element == DType::f16 ? 0x1p14 : 0x1p126),
        state_(d.key_dim, d.value_dim),
        off_(state_) {
    for (std::int64_t m = 0; a.initial_state && m < d.key_dim; ++m) {
      for (std::int64_t c = 0; c < d.value_dim; ++c) {
        const std::int64_t row = (sequence * d.value_heads + h) * d.key_dim * d.value_dim;
        state_(m, c) = get(a.initial_state, row + state_index(m, c));
        see(state_(m, c));
      }
    }
  }

  std::int64_t state_index(std::int64_t m, std::int64_t c) const {
    return d_.state_layout == StateLayout::key_value ? m * d_.value_dim + c : c * d_.key_dim + m;
  }
  double state_unit(std::int64_t m, std::int64_t c) const { return or_not_finite(off_(m, c)); }

  // Units of the rows of o.
  Matrix chunk(const GdnChunk& chunk) {
    Matrix units(chunk.rows, d_.value_dim);
    const bool was_nan = nan_;
    load(chunk);
    // Rows before the first with a NaN do not know of it.
    const std::int64_t good = was_nan ? 0 : good_;
    if (!inf_ && good > 0) {
      const Matrix some = run(good, good == chunk.rows);
      std::copy(some.data.begin(), some.data.end(), units.data.begin());
    }
    for (std::int64_t i = 0; i < chunk.rows; ++i)
      for (std::int64_t c = 0; c < d_.value_dim; ++c)
        if (inf_ || i >= good) units(i, c) = or_not_finite(std::nan(""));
    return units;
  }

 private:
  void see(double x) {
    nan_ = nan_ || std::isnan(x);
    inf_ = inf_ || std::isinf(x);
  }
  double or_not_finite(double unit) const {
    return inf_ ? std::numeric_limits<double>::infinity() : nan_ ? std::nan("") : unit;
  }
  const Matrix& limit(const Matrix& a) {
    for (const double x : a.data) inf_ = inf_ || !(x < most_);
    return a;
  }
  // A factor of a sum of magnitudes, and such a sum.
  double size_of_factor(double x) const { return x == 0 ? 0 : std::max(std::fabs(x), least_); }
  Matrix sizes(Matrix a) const {
    for (double& x : a.data) x = size_of_factor(x);
    return a;
  }
  Matrix sum_of_sizes(const Matrix& a, const Matrix& b) const {
    Matrix c = sizes(a) * sizes(b);
    for (double& x : c.data) x += least_;
    return c;
  }

  void load(const GdnChunk& chunk) {
    k_.clear(), q_.clear(), v_.clear(), beta_.clear(), sum_.clear();
    good_ = chunk.rows;
    double total = 0;
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      const std::int64_t t = chunk.begin + i, gate = t * d_.value_heads + h_;
      const bool masked = a_.mask && get(a_.mask, t) == 0;
      const auto row = [&](const ConstView& x, std::int64_t first, std::int64_t width) {
        std::vector<double> out(static_cast<std::size_t>(width));
        for (std::int64_t c = 0; !masked && c < width; ++c)
          see(out[static_cast<std::size_t>(c)] = get(x, first * width + c));
        return out;
      };
      const std::int64_t key_row = t * d_.key_heads + d_.key_head(h_);
      k_.push_back(row(a_.k, key_row, d_.key_dim));
      q_.push_back(row(a_.q, key_row, d_.key_dim));
      v_.push_back(row(a_.v, gate, d_.value_dim));
      float beta = 0, g = 0;
      if (!masked) {
        const auto number = [&](const ConstView& x, std::int64_t at) {
          return static_cast<float>(get(x, at));
        };
        beta = gdn_strength(d_, number(a_.beta, gate));
        g = number(a_.g, gate);
        if (d_.gate) g = gdn_log_decay(g, number(a_.a_log, h_), number(a_.dt_bias, h_));
      }
      beta_.push_back(static_cast<double>(beta));
      see(beta_.back());
      see(std::max<double>(static_cast<double>(g), static_cast<double>(kGdnReset)));
      if (std::isnan(g)) nan_ = true;
      total = gdn_next_sum(total, g);
      sum_.push_back(gdn_sum(total));
      if (nan_) good_ = std::min(good_, i);
    }
  }

  // Keys or queries times `scale`, normalised; they and their products are also limited as they
  // are.
  Matrix vectors(const std::vector<std::vector<double>>& x, std::int64_t rows, double scale) {
    Matrix raw = made(rows, d_.key_dim, [&](auto i, auto m) { return at(x, i)[index(m)]; });
    const Matrix keys = made(rows, d_.key_dim, [&](auto i, auto m) { return at(k_, i)[index(m)]; });
    limit(sum_of_sizes(raw, transposed(keys)));
    limit(sum_of_sizes(raw, sizes(state_)));
    for (std::int64_t i = 0; i < rows; ++i) {
      double squares = 1e-6;
      for (std::int64_t m = 0; m < d_.key_dim; ++m) squares += raw(i, m) * raw(i, m);
      if (!(squares < most_)) inf_ = true;
      const double factor = scale * (d_.qk_l2norm ? 1 / std::sqrt(squares) : 1);
      for (std::int64_t m = 0; m < d_.key_dim; ++m) raw(i, m) *= factor;
    }
    return raw;
  }

  // Units of the first `rows` rows; `all`: goes on to the chunk's end.
  Matrix run(std::int64_t rows, bool all) {
    const std::int64_t width = d_.value_dim;
    const Matrix k = vectors(k_, rows, 1);
    const Matrix q = vectors(q_, rows, static_cast<double>(d_.query_scale()));
    const auto decay = [&](std::int64_t i, std::int64_t j) {
      return static_cast<double>(gdn_decay(at(sum_, i), at(sum_, j)));
    };
    std::vector<double> e, rest;
    for (std::int64_t i = 0; i < rows; ++i) {
      e.push_back(static_cast<double>(gdn_decay(at(sum_, i))));
      rest.push_back(decay(rows - 1, i));
    }
    const Matrix kk = k * transposed(k), qk = q * transposed(k);
    const Matrix kk_sizes = sum_of_sizes(k, transposed(k)),
                 qk_sizes = sum_of_sizes(q, transposed(k));
    const auto lower = [&](bool diagonal, auto&& f) {
      return made(rows, rows,
                  [&](auto i, auto j) { return j < i || (diagonal && j == i) ? f(i, j) : 0.0; });
    };
    const Matrix l =
        lower(false, [&](auto i, auto j) { return at(beta_, i) * kk(i, j) * decay(i, j); });
    const Matrix a = lower(false, [&](auto i, auto j) {
      return size_of_factor(at(beta_, i) * kk_sizes(i, j) * decay(i, j));
    });
    const Matrix p = lower(true, [&](auto i, auto j) { return qk(i, j) * decay(i, j); });
    const Matrix p_sizes = lower(true, [&](auto i, auto j) {
      return size_of_factor(p(i, j)) + size_of_factor(qk_sizes(i, j) * decay(i, j)) / 64;
    });
    Matrix t(rows, rows);  // (I + L)^-1
    for (std::int64_t i = 0; i < rows; ++i) {
      t(i, i) = 1;
      for (std::int64_t m = 0; m < i; ++m)
        for (std::int64_t j = 0; j <= m; ++j) t(i, j) -= l(i, m) * t(m, j);
    }
    if (inverse_) limit(sizes(t));
    const Matrix ks = k * state_, qs = q * state_;
    Matrix y = t * made(rows, width, [&](auto i, auto c) {
                 return at(beta_, i) * (at(v_, i)[index(c)] - at(e, i) * ks(i, c));
               });
    const Matrix s_sizes = sizes(made(d_.key_dim, width, [&](auto m, auto c) {
      return std::fabs(state_(m, c)) + bound_ * off_(m, c);
    }));
    const Matrix seen = limit(sum_of_sizes(k, s_sizes)), asked = limit(sum_of_sizes(q, s_sizes));
    // What earlier errors do to y, o and S.
    const Matrix weighted =
        made(rows, d_.key_dim, [&](auto i, auto m) { return at(beta_, i) * at(e, i) * k(i, m); });
    const Matrix tbk = t * weighted;
    const Matrix eq = made(rows, d_.key_dim, [&](auto i, auto m) { return at(e, i) * q(i, m); });
    const Matrix wk = made(rows, d_.key_dim, [&](auto i, auto m) { return at(rest, i) * k(i, m); });
    Matrix y_off(rows, width), o_off(rows, width), s_off(d_.key_dim, width);
    for (Earlier& c : earlier_) {
      const Matrix x = tbk * c.f;
      y_off = y_off + sizes(x) * c.fresh;
      o_off = o_off + sizes(eq * c.f - p * x) * c.fresh;
      if (!all) continue;
      Matrix f = c.f;
      for (double& z : f.data) z *= e.back();
      c.f = f - transposed(wk) * x;
      s_off = s_off + sizes(c.f) * c.fresh;
    }
    Matrix r(rows, width), y_sizes(rows, width);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < width; ++c) {
        const double beta = size_of_factor(at(beta_, i));
        // What rounds: S, and, with an inverse, the right side of y and T.
        const double of_v = inverse_ ? 1 : 1.0 / 64, of_seen = inverse_ ? 1.5 : 0.5;
        r(i, c) = beta * (size_of_factor(at(v_, i)[index(c)]) * of_v +
                          size_of_factor(at(e, i)) * seen(i, c) * of_seen) +
                  least_;
        for (std::int64_t j = 0; j < i; ++j) r(i, c) += a(i, j) * y_sizes(j, c) / 64;
        for (std::int64_t j = 0; j <= i; ++j) y_off(i, c) += size_of_factor(t(i, j)) * r(j, c);
        y_sizes(i, c) = size_of_factor(std::fabs(y(i, c)) + bound_ * y_off(i, c));
      }
    }
    limit(y_sizes), limit(r);
    const Matrix pt = p * t;
    // T's rounding reaches o as P (dT side), so |P| |T| bounds it, not |P T|.
    const Matrix of_t = sizes(t) * made(rows, width, [&](auto i, auto c) {
                          const double side = size_of_factor(at(v_, i)[index(c)]) +
                                              size_of_factor(at(e, i)) * seen(i, c);
                          return inverse_ ? size_of_factor(at(beta_, i)) * side / 2 : 0.0;
                        });
    Matrix units = o_off + p_sizes * y_sizes + sizes(pt) * r + sizes(p) * of_t;
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t c = 0; c < width; ++c)
        units(i, c) += size_of_factor(at(e, i)) * asked(i, c) / 2 + least_;
    limit(units);
    if (!all) return units;

    const Matrix rest_sizes = made(
        rows, width, [&](auto i, auto c) { return size_of_factor(at(rest, i) * y_sizes(i, c)); });
    Matrix fresh = sum_of_sizes(transposed(k), rest_sizes);
    const Matrix kwt = sizes(transposed(wk) * t) * r + sizes(transposed(wk)) * of_t;
    for (std::int64_t m = 0; m < d_.key_dim; ++m)
      for (std::int64_t c = 0; c < width; ++c)
        fresh(m, c) = fresh(m, c) / 2 + size_of_factor(e.back()) * s_sizes(m, c) / 64 + kwt(m, c);
    for (double& z : state_.data) z *= e.back();
    state_ = state_ + transposed(wk) * y;
    off_ = limit(s_off + fresh);
    limit(sizes(state_));
    Earlier now{Matrix(d_.key_dim, d_.key_dim), fresh};
    for (std::int64_t m = 0; m < d_.key_dim; ++m) now.f(m, m) = 1;
    earlier_.push_back(std::move(now));
    return units;
  }

  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  template <class T>
  static const T& at(const std::vector<T>& x, std::int64_t i) {
    return x[index(i)];
  }

  const GdnDesc& d_;
  const GdnChunkForward::Args& a_;
  std::int64_t h_;
  double bound_;
  bool inverse_;  // of the kernels whose bound is looser: y is found by an inverse
  double least_, most_;
  Matrix state_, off_;
  struct Earlier {
    Matrix f, fresh;
  };
  std::vector<Earlier> earlier_;
  bool nan_ = false, inf_ = false;
  std::int64_t good_ = 0;
  std::vector<std::vector<double>> k_, q_, v_;
  std::vector<double> beta_;
  std::vector<GdnSum> sum_;
};

}  // namespace

void gdn_chunk_forward_judge(const GdnDesc& d, const GdnChunkForward::Args& got,
                             const GdnChunkForward::Args& want, Judge& judge) {
  const std::vector<Sequence> sequences = sequences_of(d.rows(), want.cu_seqlens);
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const auto sequence = static_cast<std::int64_t>(n);
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      RuleBound rule(d, want, sequence, h, judge.bound());
      for (std::int64_t i = 0; i < d.chunks(sequences[n].end - sequences[n].begin); ++i) {
        const GdnChunk chunk = gdn_chunk(d, sequences[n], i);
        const Matrix units = rule.chunk(chunk);
        for (std::int64_t row = 0; got.o && row < chunk.rows; ++row)
          for (std::int64_t c = 0; c < d.value_dim; ++c)
            judge.value("o", as_const(got.o), as_const(want.o),
                        ((chunk.begin + row) * d.value_heads + h) * d.value_dim + c, units(row, c));
      }
      const std::int64_t first = (sequence * d.value_heads + h) * d.key_dim * d.value_dim;
      for (std::int64_t m = 0; got.final_state && m < d.key_dim; ++m)
        for (std::int64_t c = 0; c < d.value_dim; ++c)
          judge.value("final_state", as_const(got.final_state), as_const(want.final_state),
                      first + rule.state_index(m, c), rule.state_unit(m, c));
    }
  }
}

void gdn_chunk_forward_aim(const GdnDesc& d, const GdnChunkForward::Args& a, Rng& rng) {
  aim_rule(d, a, rng);
}

}  // namespace bittern::oracle
