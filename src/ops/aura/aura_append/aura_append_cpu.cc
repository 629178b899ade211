#include <cmath>

#include "bittern/ops/aura_append.h"
#include "core/rope.h"
#include "cpu/kernel.h"
#include "ops/aura/aura_append/sides.h"
#include "ops/aura/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_append/aura_append_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/angle-inl.h"
#include "ops/aura/encode-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// Rows of one side, staged in f32 until there are enough of them to be encoded together.
class Appender {
 public:
  Appender(const AuraAppendDesc& d, const AuraAppend::Args& a, const append::Side& side)
      : d_(d),
        a_(a),
        side_(side),
        words_(packed_words(d.dim, side.coding.bits)),
        most_(std::min(kStaged / d.dim, kMostRows)),
        encoder_(side.coding, {.x = view(static_cast<const float*>(rows_), {most_, d.dim}),
                               .table = side.table,
                               .boundaries = side.boundaries,
                               .codebook = side.codebook,
                               .packed = view(packed_, {most_, words_}),
                               .scales = view(scales_, {most_, 1})}) {}

  // Row i is head i % kv_heads of token i / kv_heads.
  void Append(std::int64_t begin, std::int64_t end) {
    (void)visit<float, f16, bf16>(d_.element, [&]<class X>(Type<X>) {
      return visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
        for (std::int64_t i = begin; i < end; ++i) Take<X, E>(i / d_.kv_heads, i % d_.kv_heads);
        return Status();
      });
    });
    Encode();
  }

 private:
  static constexpr std::int64_t kStaged = 16 * kAuraMaxDim, kMostRows = 128;

  template <class X, class E>
  void Take(std::int64_t token, std::int64_t head) {
    const std::int64_t n = d_.dim, slot = a_.slots.as<std::int32_t>()[token];
    const std::int64_t r = d_.kept > 0 ? a_.kept_slots.as<std::int32_t>()[token] : -1;
    if (slot < 0 && r < 0) return;
    float* row = rows_ + count_ * n;
    const X* x = side_.x.as<X>() + side_.x.at(token, head);
    const std::int64_t step = side_.x.stride[2];
    if (step == 1) {
      for (std::int64_t j = 0; j < n; ++j) row[j] = to_math(x[j]);
    } else {
      for (std::int64_t j = 0; j < n; ++j) row[j] = to_math(x[j * step]);
    }
    if (side_.is_k && d_.rotary_dim > 0) Turn<X>(token, row);
    if (r >= 0) {
      E* kept = side_.kept.as<E>() + side_.kept.at(r / d_.kept, head, r % d_.kept);
      for (std::int64_t j = 0; j < n; ++j) {
        const float old = to_math(kept[j]);
        kept[j] = from_math<E>(row[j]);
        row[j] = old;
      }
    } else if (d_.kept > 0) {
      for (std::int64_t j = 0; j < n; ++j) row[j] = to_math(from_math<E>(row[j]));
    }
    if (slot < 0) return;
    halved_[count_] = side_.mean != nullptr && Centre(side_.mean + head * n, row);
    page_[count_] = slot / d_.page_size;
    row_[count_] = head * d_.page_size + slot % d_.page_size;
    if (++count_ == most_) Encode();
  }

  template <class X>
  void Turn(std::int64_t token, float* HWY_RESTRICT row) {
    if (token != turned_) MakeTurns(token);
    const std::int64_t half = d_.rotary_dim / 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const auto [first, second] = rope_pair(i, half, d_.interleaved);
      const RopeTurn turn{cos_[i], sin_[i]};
      const float x_a = row[first], x_b = row[second];
      row[first] = to_math(from_math<X>(turn.first(x_a, x_b)));
      row[second] = to_math(from_math<X>(turn.second(x_a, x_b)));
    }
  }

  // As rope_turn, for all pairs of a token: its heads share them.
  void MakeTurns(std::int64_t token) {
    const hn::ScalableTag<double> dd;
    const hn::Rebind<float, decltype(dd)> df;
    constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(dd));
    const std::int64_t half = d_.rotary_dim / 2;
    const float* inverse = a_.inverse_frequencies.as<float>();
    const auto factor = hn::Set(df, static_cast<float>(d_.factor));
    const auto at = hn::Set(dd, static_cast<double>(a_.positions.as<std::int32_t>()[token]));
    for (std::int64_t i = 0; i < half; i += kLanes) {
      alignas(64) float some[kLanes] = {};
      std::copy_n(inverse + i, std::min(kLanes, half - i), some);
      hn::Vec<decltype(dd)> c, s;
      CosSin(dd, hn::Mul(at, hn::PromoteTo(dd, hn::Load(df, some))), c, s);
      hn::Store(hn::Mul(hn::DemoteTo(df, c), factor), df, cos_ + i);
      hn::Store(hn::Mul(hn::DemoteTo(df, s), factor), df, sin_ + i);
    }
    turned_ = token;
  }

  // row := row - mean, or half of it, and then the result is true.
  bool Centre(const float* HWY_RESTRICT mean, float* HWY_RESTRICT row) const {
    bool overflow = false;
    for (std::int64_t j = 0; j < d_.dim; ++j)
      overflow |= std::isfinite(row[j]) && std::isinf(row[j] - mean[j]);
    if (overflow) {
      for (std::int64_t j = 0; j < d_.dim; ++j) row[j] = row[j] / 2 - mean[j] / 2;
    } else {
      for (std::int64_t j = 0; j < d_.dim; ++j) row[j] -= mean[j];
    }
    return overflow;
  }

  // Of the rows that are staged.
  void Encode() {
    encoder_.Encode(0, count_);
    for (std::int64_t i = 0; i < count_; ++i) {
      std::copy_n(packed_ + i * words_, words_,
                  side_.packed.as<std::uint32_t>() + page_[i] * side_.packed.row_stride() +
                      row_[i] * words_);
      const float s = halved_[i] ? Limited(2 * scales_[i], max_finite<float>()) : scales_[i];
      const std::int64_t at = page_[i] * side_.scales.row_stride() + row_[i];
      if (d_.f16_scale) {
        side_.scales.as<f16>()[at] = to_f16(Limited(s, max_finite<f16>()));
      } else {
        side_.scales.as<float>()[at] = s;
      }
    }
    count_ = 0;
  }
  static float Limited(float s, float most) { return s > most ? most : s < -most ? -most : s; }

  const AuraAppendDesc& d_;
  const AuraAppend::Args& a_;
  const append::Side& side_;
  const std::int64_t words_, most_;
  std::int64_t count_ = 0, turned_ = -1;
  std::int64_t page_[kMostRows], row_[kMostRows];
  bool halved_[kMostRows];
  HWY_ALIGN float cos_[kAuraMaxDim / 2], sin_[kAuraMaxDim / 2];
  HWY_ALIGN float scales_[kMostRows];
  HWY_ALIGN std::uint32_t packed_[kStaged / 4 + kMostRows];
  HWY_ALIGN float rows_[kStaged];
  RowEncoder encoder_;
};

// Rows of K, then those of V.
void AppendRows(const AuraAppendDesc& d, const AuraAppend::Args& a, std::int64_t begin,
                std::int64_t end) {
  const std::int64_t rows = d.tokens * d.kv_heads;
  if (begin < rows) Appender(d, a, append::k_side(d, a)).Append(begin, std::min(end, rows));
  if (end > rows)
    Appender(d, a, append::v_side(d, a))
        .Append(std::max(begin - rows, std::int64_t{0}), end - rows);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraAppend;
BITTERN_EXPORT(AppendRows);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const bool dense = d.k_rotation == Rotation::dense || d.v_rotation == Rotation::dense;
  const AuraDesc rows{.rows = 2 * d.tokens * d.kv_heads,
                      .dim = d.dim,
                      .rotation = dense ? Rotation::dense : Rotation::hadamard};
  cpu::parallel_rows(rows, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(AppendRows)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraAppend>> aura_append_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
