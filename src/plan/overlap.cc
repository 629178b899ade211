#include "plan/overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

namespace bittern::plan_detail {
namespace {

using Wide = __int128;  // addresses and spans reach 2^64

// step * i for i in [0, count); a tensor's bytes are at the sums of its terms.
struct Term {
  Wide step, count;
  Wide reach() const { return step * (count - 1); }
};

constexpr int kMostTerms = 2 * (kMaxRank + 1);
constexpr int kMostSteps = 1 << 16;  // of the search: milliseconds

struct Terms {
  std::array<Term, kMostTerms> at;
  int count = 0;
  std::span<Term> all() { return {at.data(), static_cast<std::size_t>(count)}; }
  void add(Term t) {
    if (t.count > 1) at[static_cast<std::size_t>(count++)] = t;
  }
  // Sums of two terms with one step are those of a longer term. So are those of a term that
  // continues where a shorter one ends: a dense axis.
  void merge() {
    std::sort(all().begin(), all().end(), [](auto& a, auto& b) { return a.step < b.step; });
    Terms out;
    for (const Term& t : all()) {
      Term* last = out.count > 0 ? &out.at[static_cast<std::size_t>(out.count - 1)] : nullptr;
      if (last != nullptr && t.step % last->step == 0 && t.step / last->step <= last->count) {
        last->count += t.step / last->step * (t.count - 1);
      } else {
        out.add(t);
      }
    }
    *this = out;
  }
};

// The number of i in [0, n) with (a i + b) mod m <= most, for 0 <= most < m and b >= 0, from
// sum over i of floor((a i + b) / m), which Euclid's algorithm gives.
Wide floor_sum(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = 0;
  for (;;) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const Wide last = a * n + b;
    if (last < m) return sum;
    n = last / m;
    b = last % m;
    std::swap(a, m);
  }
}
bool any_below(Wide n, Wide m, Wide a, Wide b, Wide most) {
  if (n <= 0) return false;
  if (most >= m - 1) return true;
  b += m;  // so that b - most - 1 >= 0
  return floor_sum(n, m, a, b) - floor_sum(n, m, a, b - most - 1) > 0;
}

Wide gcd(Wide a, Wide b) {
  while (b != 0) a = std::exchange(b, a % b);
  return a;
}
Wide ceil_div(Wide a, Wide b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
Wide floor_div(Wide a, Wide b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

Wide reach_of(std::span<const Term> terms) {
  Wide reach = 0;
  for (const Term& t : terms) reach += t.reach();
  return reach;
}

// Whether some choice of an element of each term sums to `target`. Terms are sorted by step.
bool reachable(std::span<const Term> terms, Wide target, int& steps);

// The same for terms that do not split: the last is chosen from the interval that the others can
// still fill up.
bool search(std::span<const Term> terms, Wide target, int& steps) {
  if (--steps < 0) return true;
  const Term& last = terms.back();
  const auto rest = terms.first(terms.size() - 1);
  const Wide low = std::max<Wide>(0, ceil_div(target - reach_of(rest), last.step));
  const Wide high = std::min(last.count - 1, floor_div(target, last.step));
  if (low > high) return false;
  if (rest.empty()) return target % last.step == 0;
  if (rest.size() == 1 && rest[0].step == 1) return true;  // one run fills the interval
  if (rest.size() == 2 && rest[0].step == 1) {
    // Is target - last.step x - rest[1].step y in [0, run]? At `low` the run reaches what y's last
    // element leaves. If that is not needed, y is the quotient, and the remainder decides.
    if (last.step * low <= target - rest[1].reach()) return true;
    return any_below(high - low + 1, rest[1].step, last.step, target - last.step * high,
                     rest[0].reach());
  }
  for (Wide x = low; x <= high; ++x)
    if (reachable(rest, target - last.step * x, steps)) return true;
  return false;
}

bool reachable(std::span<const Term> terms, Wide target, int& steps) {
  if (target < 0 || target > reach_of(terms)) return false;
  if (terms.empty()) return true;
  // Where the steps from some term on have a divisor that the terms before it do not reach, those
  // must sum to the remainder: two smaller problems. Slices of one buffer come apart like this.
  Wide divisor = 0;
  for (std::size_t i = terms.size(); i-- > 0;) {
    divisor = gcd(divisor, terms[i].step);
    const auto small = terms.first(i);
    if (divisor == 1 || reach_of(small) >= divisor) continue;
    const Wide remainder = target % divisor;
    if (!reachable(small, remainder, steps)) return false;
    Terms large;
    for (const Term& t : terms.subspan(i)) large.add({t.step / divisor, t.count});
    return reachable(large.all(), (target - remainder) / divisor, steps);
  }
  return search(terms, target, steps);
}

}  // namespace

bool overlap(const Memory& a, const Memory& b) {
  Terms terms;
  // Where a + (its terms) = b + (its terms), counted from b's last byte: all steps are positive.
  Wide target = 0;
  for (const bool first : {true, false}) {
    const Memory& m = first ? a : b;
    const auto size = static_cast<Wide>(m.size);
    const auto address = static_cast<Wide>(reinterpret_cast<std::uintptr_t>(m.data));
    target += first ? -address : address;
    Terms own;
    own.add({1, size});
    for (int i = 0; i < m.shape->rank; ++i) {
      const Wide step = static_cast<Wide>((*m.stride)[i]) * size, count = (*m.shape)[i];
      if (count == 0) return false;
      if (step < 0) target += (first ? -step : step) * (count - 1);
      if (step != 0) own.add({step < 0 ? -step : step, count});
    }
    own.merge();
    for (const Term& t : own.all()) {
      terms.add(t);
      if (!first) target += t.reach();
    }
  }
  terms.merge();
  int steps = kMostSteps;
  return reachable(terms.all(), target, steps);
}

}  // namespace bittern::plan_detail
