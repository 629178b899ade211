#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_aims.h"
#include "ops/gdn/gdn_matrix.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_state_check_cases() { return gdn_cases(GdnState::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_state_bench_cases() {
  return gdn_chain_bench_cases("initial_state");
}

std::vector<GdnDesc> gdn_state_bounded_cases(bool on_cuda) {
  return on_cuda ? gdn_tensor_core_cases() : std::vector<GdnDesc>();
}

namespace {

// The bound that the header of the op states, for one head of one sequence.
class ChainBound {
 public:
  ChainBound(const GdnDesc& d, const GdnState::Args& a, std::int64_t sequence, std::int64_t h,
             double bound)
      : d_(d),
        a_(a),
        h_(h),
        bound_(bound),
        least_(d.element == DType::f16 ? 0x1p-13 : 0x1p-80),
        most_(d.element == DType::f16 ? 0x1p14 : 0x1p126),
        state_(d.key_dim, d.value_dim),
        off_(state_) {
    const std::int64_t first = (sequence * d.value_heads + h) * d.key_dim * d.value_dim;
    for (std::int64_t m = 0; a.initial_state && m < d.key_dim; ++m)
      for (std::int64_t c = 0; c < d.value_dim; ++c)
        state_(m, c) = get(a.initial_state, first + state_index(m, c));
    limit(state_);
  }

  std::int64_t state_index(std::int64_t m, std::int64_t c) const {
    return d_.state_layout == StateLayout::key_value ? m * d_.value_dim + c : c * d_.key_dim + m;
  }
  double state_unit(std::int64_t m, std::int64_t c) const { return or_nothing(off_(m, c)); }

  // Units of the rows of v_new.
  Matrix chunk(const GdnChunk& chunk) {
    const auto rows = [&](const ConstView& x, std::int64_t heads, std::int64_t head,
                          std::int64_t width) {
      return made(chunk.rows, width, [&](auto i, auto c) {
        return get(x, ((chunk.begin + i) * heads + head) * width + c);
      });
    };
    const Matrix k = rows(a_.k, d_.key_heads, d_.key_head(h_), d_.key_dim);
    const Matrix w = rows(a_.w, d_.value_heads, h_, d_.key_dim);
    const Matrix u = rows(a_.u, d_.value_heads, h_, d_.value_dim);
    const auto gate = [&](std::int64_t i) {
      return a_.g.as<float>()[(chunk.begin + i) * d_.value_heads + h_];
    };
    const auto last = static_cast<double>(math::exp(gate(chunk.rows - 1)));
    const Matrix rest = made(chunk.rows, 1, [&](auto i, auto) {
      return static_cast<double>(gdn_decay(gate(chunk.rows - 1), gate(i)));
    });
    Matrix units(chunk.rows, d_.value_dim);
    for (const Matrix* x : {&k, &w, &u, &rest}) limit(*x);
    if (!(last < most_)) lost_ = true;
    if (!lost_) units = run(k, w, u, rest, last);
    for (double& x : units.data) x = or_nothing(x);
    return units;
  }

 private:
  double or_nothing(double unit) const {
    return lost_ ? std::numeric_limits<double>::infinity() : unit;
  }
  const Matrix& limit(const Matrix& a) {
    for (const double x : a.data) lost_ = lost_ || !(std::fabs(x) < most_);
    return a;
  }
  double size(double x) const { return x == 0 ? 0 : std::max(std::fabs(x), least_); }
  Matrix sizes(Matrix a) const {
    for (double& x : a.data) x = size(x);
    return a;
  }
  Matrix sum_of_sizes(const Matrix& a, const Matrix& b) const {
    Matrix c = sizes(a) * sizes(b);
    for (double& x : c.data) x += least_;
    return c;
  }
  // |a| + bound off
  Matrix with_errors(const Matrix& a, const Matrix& off) const {
    return made(a.rows, a.columns,
                [&](auto i, auto j) { return std::fabs(a(i, j)) + bound_ * off(i, j); });
  }

  Matrix run(const Matrix& k, const Matrix& w, const Matrix& u, const Matrix& rest, double last) {
    const Matrix kept =
        transposed(made(k.rows, k.columns, [&](auto i, auto m) { return rest(i, 0) * k(i, m); }));
    const Matrix states = with_errors(state_, off_);
    const Matrix fresh_y = sum_of_sizes(w, states) + made(u.rows, u.columns, [&](auto i, auto c) {
                             return size(u(i, c)) / 64;
                           });
    Matrix units = fresh_y, off(d_.key_dim, d_.value_dim);
    for (Earlier& c : earlier_) {
      const Matrix seen = w * c.f;
      units = units + sizes(seen) * c.fresh;
      for (double& x : c.f.data) x *= last;
      c.f = c.f - kept * seen;
      off = off + sizes(c.f) * c.fresh;
    }
    const Matrix y = u - w * state_;
    Matrix fresh = sum_of_sizes(kept, with_errors(y, units) + fresh_y);
    for (std::int64_t m = 0; m < d_.key_dim; ++m)
      for (std::int64_t c = 0; c < d_.value_dim; ++c)
        fresh(m, c) += size(last) * size(states(m, c)) / 64;
    for (double& x : state_.data) x *= last;
    state_ = state_ + kept * y;
    off_ = off + fresh;
    for (const Matrix* x : {&units, &off_, &state_}) limit(*x);
    Earlier now{Matrix(d_.key_dim, d_.key_dim), fresh};
    for (std::int64_t m = 0; m < d_.key_dim; ++m) now.f(m, m) = 1;
    earlier_.push_back(std::move(now));
    return units;
  }

  const GdnDesc& d_;
  const GdnState::Args& a_;
  std::int64_t h_;
  double bound_, least_, most_;
  Matrix state_, off_;
  struct Earlier {
    Matrix f, fresh;
  };
  std::vector<Earlier> earlier_;
  bool lost_ = false;  // nothing more is promised
};

}  // namespace

void gdn_state_judge(const GdnDesc& d, const GdnState::Args& got, const GdnState::Args& want,
                     Judge& judge) {
  const std::vector<Sequence> sequences = sequences_of(d.rows(), want.cu_seqlens);
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const auto sequence = static_cast<std::int64_t>(n);
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      ChainBound chain(d, want, sequence, h, judge.bound());
      const auto states = [&](const char* name, const MutView& out, const MutView& ref,
                              std::int64_t place) {
        const std::int64_t first = (place * d.value_heads + h) * d.key_dim * d.value_dim;
        for (std::int64_t m = 0; out && m < d.key_dim; ++m)
          for (std::int64_t c = 0; c < d.value_dim; ++c)
            judge.value(name, as_const(out), as_const(ref), first + chain.state_index(m, c),
                        chain.state_unit(m, c));
      };
      for (std::int64_t i = 0; i < d.chunks(sequences[n].end - sequences[n].begin); ++i) {
        const GdnChunk chunk = gdn_chunk(d, sequences[n], i);
        states("h", got.h, want.h, chunk.state);
        const Matrix units = chain.chunk(chunk);
        for (std::int64_t row = 0; got.v_new && row < chunk.rows; ++row)
          for (std::int64_t c = 0; c < d.value_dim; ++c)
            judge.value("v_new", as_const(got.v_new), as_const(want.v_new),
                        ((chunk.begin + row) * d.value_heads + h) * d.value_dim + c, units(row, c));
      }
      states("final_state", got.final_state, want.final_state, sequence);
    }
  }
}

void gdn_state_aim(const GdnDesc& d, const GdnState::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  for (const ConstView& x : {a.k, a.w, a.u}) aim_values(x, 0.3, rng);
  aim_values(a.initial_state, 1, rng);
  if (for_tensor_cores(d) && !rng.chance(8)) {
    aim_summed_log_decay(d, a.g, a.cu_seqlens, rng);
  } else {
    aim_log_decay(a.g, rng);
  }
}

}  // namespace bittern::oracle
