#include <limits>

#include "bittern/ops/aura_attention.h"
#include "core/math.h"
#include "core/numerics.h"
#include "ops/aura/aura.h"
#include "ops/aura/aura_attention/walk.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraAttention;
using aura::Region;
using Row = std::vector<float>;

constexpr float kNone = -std::numeric_limits<float>::infinity();

float difference_exp(float x, float m) { return math::exp(m == kNone ? x : x - m); }

// A dot by 16 accumulators; element j goes to the one numbered j / run mod 16.
float dot(const Row& a, const Row& b, std::size_t run) {
  Row acc(16, 0.0f);
  for (std::size_t j = 0; j < a.size(); ++j) {
    float& at = acc[j / run % 16];
    at = std::fma(a[j], b[j], at);
  }
  return halving_sum(acc);
}

struct Sums {
  float m, l;
  Row o;
};

// One query row's view of the tokens of its KV head.
class Attention {
 public:
  Attention(const Op::Desc& d, const Op::Args& a, std::int64_t s, std::int64_t head)
      : d_(d), a_(a), s_(s), head_(head), sequence_(d, a, s) {}

  const aura::Sequence& sequence() const { return sequence_; }

  // Token t's centroids (coded), or the row as it is.
  Row row(Region region, std::int64_t t, bool of_v) const {
    Row values(static_cast<std::size_t>(d_.dim));
    const std::int64_t slot = sequence_.slot(region, t);
    if (region == aura::kCoded) {
      const ConstView& codes = of_v ? a_.v_packed : a_.k_packed;
      const std::int64_t bits = of_v ? d_.v_bits : d_.k_bits;
      const auto* codebook = (of_v ? a_.v_codebook : a_.k_codebook).as<float>();
      const auto* words =
          codes.as<std::uint32_t>() +
          aura::row_offset(d_, codes, a_.block_table, s_, head_, slot, packed_words(d_.dim, bits));
      for (std::int64_t j = 0; j < d_.dim; ++j)
        values[static_cast<std::size_t>(j)] = codebook[packed_code(words, j, bits)];
      return values;
    }
    const ConstView& exact = region == aura::kFirst ? (of_v ? a_.v_first : a_.k_first)
                                                    : (of_v ? a_.v_recent : a_.k_recent);
    const std::int64_t at = aura::exact_offset(d_, exact, s_, head_, slot);
    (void)visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
      for (std::int64_t j = 0; j < d_.dim; ++j)
        values[static_cast<std::size_t>(j)] = to_math(exact.as<E>()[at + j]);
      return Status();
    });
    return values;
  }

  float scale(std::int64_t t, bool of_v) const {
    const ConstView& scales = of_v ? a_.v_scales : a_.k_scales;
    const std::int64_t at =
        aura::row_offset(d_, scales, a_.block_table, s_, head_, sequence_.slot(aura::kCoded, t), 1);
    return d_.f16_scale ? to_f32(scales.as<f16>()[at]) : scales.as<float>()[at];
  }

  // A split's tokens `seen`: `q` is a or r, as the region wants it.
  Sums split(Region region, aura::Span seen, const Row& q, float b) const {
    const bool coded = region == aura::kCoded;
    Row x;
    for (std::int64_t t = seen.begin; t < seen.end; ++t) {
      const float product = dot(q, row(region, t, false), coded ? 8 : 1);
      const float logit = coded ? std::fma(product, scale(t, false), b) : product;
      const auto cap = static_cast<float>(d_.softcap);
      x.push_back(cap == 0 ? logit : cap * math::tanh(logit / cap));
    }
    Sums sums{kNone, 0, Row(q.size(), 0.0f)};
    for (const float logit : x) sums.m = logit > sums.m ? logit : sums.m;
    Row acc(16, 0.0f);
    for (std::size_t n = 0; n < x.size(); ++n) {
      const float p = difference_exp(x[n], sums.m);
      acc[n % 16] += p;
      const std::int64_t t = seen.begin + static_cast<std::int64_t>(n);
      const float w = coded ? p * scale(t, true) : p;
      const Row y = row(region, t, true);
      for (std::size_t j = 0; j < y.size(); ++j) sums.o[j] = std::fma(w, y[j], sums.o[j]);
    }
    sums.l = halving_sum(acc);
    return sums;
  }

 private:
  const Op::Desc& d_;
  const Op::Args& a_;
  std::int64_t s_, head_;
  aura::Sequence sequence_;
};

// o := o_split * g + o * f, or o * f.
void merge(Row& o, const Row* split, float f, float g) {
  for (std::size_t j = 0; j < o.size(); ++j)
    o[j] = split != nullptr ? std::fma((*split)[j], g, o[j] * f) : o[j] * f;
}

template <class X>
void run_row(const Op::Desc& d, const Op::Args& a, std::int64_t s, std::int64_t i, std::int64_t h) {
  const std::int64_t head = h / d.group();
  const auto dim = static_cast<std::size_t>(d.dim);
  const Attention attention(d, a, s, head);
  const auto offset = [&](const ConstView& view) { return view.at(s, i, h); };
  const X* q = a.q.as<X>() + offset(a.q);
  Row exact(dim);
  for (std::size_t j = 0; j < dim; ++j) exact[j] = to_math(q[j]) * d.softmax_scale();
  Row rotated = exact;
  rotate_row(d.k_rotation, d.dim, a.k_table.as<float>(), false, rotated.data());
  const auto mean = [&](const ConstView& view) {
    const float* at = view.as<float>() + head * d.dim;
    return Row(at, at + d.dim);
  };
  const float b = a.k_mean ? dot(exact, mean(a.k_mean), 1) : 0.0f;

  float m = a.sinks ? a.sinks.as<float>()[h] : kNone, l = a.sinks ? 1.0f : 0.0f, l_coded = 0;
  Row o_coded(dim, 0.0f), o_exact(dim, 0.0f);
  for (const Region region : {aura::kFirst, aura::kCoded, aura::kRecent}) {
    const bool coded = region == aura::kCoded;
    const aura::Span all = attention.sequence().seen(d, i, region);
    for (std::int64_t begin = 0; begin < all.end; begin += Op::Desc::kSplit) {
      const aura::Span seen{std::max(all.begin, begin),
                            std::min(all.end, begin + Op::Desc::kSplit)};
      if (seen.empty()) continue;
      const Sums split = attention.split(region, seen, coded ? rotated : exact, b);
      const float most = split.m > m ? split.m : m;
      const float f = difference_exp(m, most), g = difference_exp(split.m, most);
      m = most;
      l = std::fma(split.l, g, l * f);
      l_coded = coded ? std::fma(split.l, g, l_coded * f) : l_coded * f;
      merge(o_coded, coded ? &split.o : nullptr, f, g);
      merge(o_exact, coded ? nullptr : &split.o, f, g);
    }
  }
  rotate_row(d.v_rotation, d.dim, a.v_table.as<float>(), true, o_coded.data());
  if (a.v_mean) {
    const Row v_mean = mean(a.v_mean);
    for (std::size_t j = 0; j < dim; ++j) o_coded[j] = std::fma(l_coded, v_mean[j], o_coded[j]);
  }
  X* out = a.out.as<X>() + offset(a.out);
  for (std::size_t j = 0; j < dim; ++j)
    out[j] = from_math<X>(l == 0 ? 0.0f : (o_coded[j] + o_exact[j]) / l);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t s = 0; s < d.sequences; ++s)
      for (std::int64_t i = 0; i < d.queries; ++i)
        for (std::int64_t h = 0; h < d.heads; ++h) run_row<X>(d, a, s, i, h);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraAttention>> aura_attention_ref() { return kKernels; }

}  // namespace bittern
