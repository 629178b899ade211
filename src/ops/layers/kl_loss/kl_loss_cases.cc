#include "core/math.h"
#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<KlLossDesc> kl_loss_check_cases() {
  std::vector<KlLossDesc> cases;
  for (const std::int64_t dim : {1, 7, 8, 16, 31, 100, 4096, 4111}) {
    for (const std::int64_t top : {std::int64_t{0}, std::int64_t{1}, std::int64_t{17}, dim}) {
      if (top > dim || (top == dim && dim > 100) || (top == 1 && dim == 1)) continue;
      const std::size_t turn = cases.size();
      cases.push_back({.rows = dim < 50 ? 41 : 5,
                       .dim = dim,
                       .top = top,
                       .softcap = turn % 3 == 1 ? 30.0 : 0.0,
                       .temperature = turn % 4 == 2 ? 0.7 : 1.0});
    }
  }
  cases.push_back({.rows = 2, .dim = 9000, .softcap = 50, .temperature = 2});
  cases.push_back({.rows = 2, .dim = 9000, .top = 64, .temperature = 2});
  cases.push_back({.rows = 0, .dim = 16});
  return cases;
}

namespace {

// Different ids: a shuffle's first.
void put_ids(const KlLossDesc& d, const ConstView& ids, Rng& rng) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(d.dim));
  for (std::size_t j = 0; j < all.size(); ++j) all[j] = static_cast<std::int32_t>(j);
  for (std::int64_t i = 0; i < d.rows; ++i) {
    for (std::int64_t k = 0; k < d.top; ++k) {
      std::swap(all[static_cast<std::size_t>(k)],
                all[static_cast<std::size_t>(k + rng.below(d.dim - k))]);
      put(ids, i * d.top + k, all[static_cast<std::size_t>(k)]);
    }
  }
}

void fill_teacher(const KlLossDesc& d, std::string_view operand, const ConstView& v, Rng& rng) {
  if (operand == "ids") return put_ids(d, v, rng);
  const bool logs = operand == "log_probs" || operand == "tail";
  for (std::int64_t i = 0; i < v.shape.numel(); ++i)
    put(v, i, operand == "weights" ? 1 : logs ? -4.0 - rng.uniform() : 3 * rng.normal());
}

}  // namespace

std::vector<BenchCase<KlLossDesc>> kl_loss_bench_cases() {
  const KlLossDesc all{.rows = 64, .dim = 49152};
  KlLossDesc top = all, capped = all;
  top.top = 64;
  capped.softcap = 30;
  return {{"64 x 49152", all, fill_teacher},
          {.label = "loss alone", .desc = all, .fill = fill_teacher, .left_out = "weights d_x"},
          {"top 64", top, fill_teacher},
          {"with a soft cap", capped, fill_teacher}};
}

// Mostly rows of finite logits, since one NaN spoils its row: equal ones, some with -infinity, far
// ones whose exponentials are 0, some on either side of tanh's threshold, and a student that is the
// teacher. Log probabilities of which some are -infinity. Rows of weight 0 keep what they had.
void kl_loss_aim(const KlLossDesc& d, const KlLoss::Args& a, Rng& rng) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto logits = [&](const ConstView& v, std::int64_t i, std::int64_t kind) {
    for (std::int64_t j = 0; j < d.dim; ++j) {
      double value = kind == 1 ? 3.0 : 10 * rng.normal();
      if (kind == 2 && rng.chance(2)) value = -kInfinity;
      if (kind == 3 && d.softcap > 0) {
        value = step(DType::f32, static_cast<double>(math::kTanhSmall) * d.softcap,
                     static_cast<int>(rng.below(5)) - 2);
      }
      if (kind == 4) value *= 100;
      if (kind == 5) value = -kInfinity;
      put(v, i * d.dim + j, value);
    }
  };
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const std::int64_t kind = rng.below(10);
    if (kind != 0) logits(a.x, i, kind);
    if (d.top == 0) {
      const std::int64_t other = rng.below(10);
      if (other != 0) logits(a.teacher, i, other);
      if (other == 6)
        for (std::int64_t j = 0; j < d.dim; ++j)
          put(a.teacher, i * d.dim + j, get(a.x, i * d.dim + j));
    } else {
      const bool some = rng.chance(3), none = rng.chance(10);
      for (std::int64_t k = 0; k < d.top; ++k)
        put(a.log_probs, i * d.top + k,
            none || (some && rng.chance(2)) ? -kInfinity : -10 * rng.uniform());
      put(a.tail, i, none || rng.chance(3) ? -kInfinity : -5 * rng.uniform());
      if (rng.chance(16)) put(a.tail, i, std::numeric_limits<double>::quiet_NaN());
    }
    if (a.weights && rng.chance(3)) put(a.weights, i, rng.chance(2) ? 0.0 : -0.0);
  }
  if (d.top == 0) return;
  put_ids(d, a.ids, rng);
  for (std::int64_t i = 0; i < d.rows; ++i) {  // a top or a rest that the student gives nothing
    const bool top = rng.chance(12), rest = rng.chance(12);
    if (!top && !rest) continue;
    for (std::int64_t j = 0; j < d.dim && rest; ++j) put(a.x, i * d.dim + j, -kInfinity);
    for (std::int64_t k = 0; k < d.top; ++k) {
      const auto id = static_cast<std::int64_t>(get(a.ids, i * d.top + k));
      put(a.x, i * d.dim + id, top ? -kInfinity : rng.normal());
    }
    // A lone NaN among -infinities must show.
    if (rest && rng.chance(3))
      put(a.x, i * d.dim + rng.below(d.dim), std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace bittern::oracle
