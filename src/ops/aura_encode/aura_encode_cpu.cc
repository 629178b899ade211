#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/ops/aura_encode.h"
#include "core/numerics.h"
#include "cpu/dispatch.h"
#include "cpu/rotate.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura_encode/aura_encode_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/levels-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/reduce-inl.h"
#include "cpu/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// kF32Lanes rows at a time; lane i of a vector of sums or norms belongs to row i.
class RowEncoder {
 public:
  RowEncoder(const AuraDesc& d, const AuraEncode::Args& a)
      : d_(d),
        a_(a),
        stride_(RoundUpToLanes(d.axis_size)),
        rotation_(d.rotation, d.axis_size, a.rotation.as<float>()),
        packer_(d.bits) {}

  template <class X>
  void Encode(std::int64_t first, std::int64_t count) {
    const X* x = a_.x.as<X>() + first * a_.x.row_stride();
    Normalise(x, count);
    if (!rotation_.InRegisters()) rotation_.Apply(tile_, stride_, count, false);
    switch (d_.bits) {
      case 1: Quantise<1>(first, count); break;
      case 2: Quantise<2>(first, count); break;
      case 3: Quantise<3>(first, count); break;
      case 4: Quantise<4>(first, count); break;
      case 5: Quantise<5>(first, count); break;
      case 6: Quantise<6>(first, count); break;
      case 7: Quantise<7>(first, count); break;
      default: Quantise<8>(first, count);
    }
  }

 private:
  // Step 1, and step 2 as far as rows are taken one by one. Where they are rotated in registers
  // they come straight from x, otherwise by way of the tile.
  template <class X>
  HWY_INLINE void Normalise(const X* HWY_RESTRICT x, std::int64_t count) {
    const DF32 d;
    const std::int64_t n = d_.axis_size, x_stride = a_.x.row_stride();
    const bool direct = rotation_.InRegisters();
    VF32 sums[kF32Lanes];
    for (std::int64_t i = 0; i < kF32Lanes; ++i) {
      float* row = tile_ + i * stride_;
      if (i >= count) {
        sums[i] = hn::Zero(d);
      } else if (direct) {
        sums[i] = SquaresOf(x + i * x_stride);
      } else {
        LoadRow(x + i * x_stride, n, row);
        sums[i] = SquaresOf(row);
      }
    }
    const VF32 total = LaneTrees(d, sums);
    const VF32 norm = hn::Sqrt(total);
    const VF32 one = hn::Set(d, 1.0f);
    const VF32 inv = hn::IfThenElseZero(hn::Gt(norm, hn::Set(d, kAuraTiny)), hn::Div(one, norm));
    hn::Store(norm, d, norm_);
    hn::Store(inv, d, inv_);
    const auto ordinary = hn::Lt(total, hn::Inf(d));
    const bool all_ordinary = hn::AllTrue(d, ordinary);
    poisoned_ = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      float* row = tile_ + i * stride_;
      const bool extreme = !all_ordinary && !(norm_[i] < std::numeric_limits<float>::infinity());
      if (extreme) LoadExtreme(x + i * x_stride, i);
      const VF32 factor = hn::Set(d, inv_[i]);
      if (direct && !extreme) {
        rotation_.Hadamard(
            [&](std::int64_t j)
                HWY_ATTR { return hn::Mul(LoadMath(d, x + i * x_stride + j), factor); },
            row);
        continue;
      }
      for (std::int64_t j = 0; j < n; j += kF32Lanes)
        hn::Store(hn::Mul(hn::Load(d, row + j), factor), d, row + j);
      if (direct) rotation_.Apply(row, stride_, 1, false);
    }
  }

  // The row's squares added up to one vector, which is left to LaneTrees.
  template <class X>
  HWY_INLINE VF32 SquaresOf(const X* x) const {
    const DF32 d;
    return RowTree(d, stride_, [&](std::int64_t j, std::int64_t = kF32Lanes) HWY_ATTR {
      const VF32 v = LoadMath(d, x + j);
      return hn::Mul(v, v);
    });
  }

  // A row whose squares overflow, or that is not finite: the latter as zeros.
  template <class X>
  HWY_NOINLINE void LoadExtreme(const X* x, std::int64_t i) {
    const DF32 d;
    float* row = tile_ + i * stride_;
    LoadRow(x, d_.axis_size, row);
    bool finite = true;
    for (std::int64_t j = 0; j < d_.axis_size; ++j) {
      finite = finite && std::isfinite(row[j]);
      row[j] *= kAuraShrink;
    }
    if (!finite) {
      std::fill_n(row, stride_, 0.0f);
      poisoned_ |= 1u << i;
    }
    const float norm = std::sqrt(LaneTree(d, SquaresOf(row), kF32Lanes));
    inv_[i] = norm > kAuraTiny ? 1 / norm : 0;
    norm_[i] = std::min(norm / kAuraShrink, max_finite<float>());
  }

  // Steps 3 to 5.
  template <int kBits>
  HWY_INLINE void Quantise(std::int64_t first, std::int64_t count) {
    const DF32 d;
    const LevelSearch<kBits> search(a_.boundaries.as<float>());
    const LevelTable<kBits> codebook(a_.codebook.as<float>());
    const hn::Rebind<std::uint8_t, DF32> d8;
    const hn::RebindToSigned<DF32> di;
    const bool squares = d_.scale_rule != ScaleRule::none;
    const bool products =
        d_.scale_rule == ScaleRule::least_squares || d_.scale_rule == ScaleRule::unbiased;
    const std::size_t bytes = packer_.Bytes(static_cast<std::size_t>(d_.axis_size));
    const auto row_bytes = static_cast<std::size_t>(4 * packed_words(d_.axis_size, d_.bits));
    VF32 cc[kF32Lanes], rc[kF32Lanes];
    for (std::int64_t i = 0; i < kF32Lanes; ++i) {
      cc[i] = rc[i] = hn::Zero(d);
      if (i >= count) continue;
      const float* row = tile_ + i * stride_;
      for (std::int64_t j = 0; j < stride_; j += kF32Lanes) {
        const auto code = search(hn::Load(d, row + j));
        hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, code)), d8, codes_ + j);
        hn::Store(codebook(code), d, level_ + j);
      }
      // Past the end of the row is nothing.
      for (std::int64_t j = d_.axis_size; j < stride_; ++j) level_[j] = 0;
      if (squares) cc[i] = SquaresOf(static_cast<const float*>(level_));
      if (products) {
        rc[i] = RowTree(d, stride_, [&](std::int64_t j, std::int64_t = kF32Lanes) HWY_ATTR {
          return hn::Mul(hn::Load(d, row + j), hn::Load(d, level_ + j));
        });
      }
      auto* packed = reinterpret_cast<std::uint8_t*>(a_.packed.as<std::uint32_t>() +
                                                     (first + i) * a_.packed.row_stride());
      if ((poisoned_ >> i & 1) != 0) {
        std::memset(packed, 0, row_bytes);
        continue;
      }
      packer_.Pack(codes_, static_cast<std::size_t>(d_.axis_size), packed);
      std::memset(packed + bytes, 0, row_bytes - bytes);
    }
    const VF32 c = LaneTrees(d, cc);
    StoreNorms(Scale(c, hn::Add(LaneTrees(d, rc), hn::Zero(d))), first, count);
  }

  HWY_INLINE VF32 Scale(VF32 cc, VF32 rc) const {
    const DF32 d;
    const VF32 norm = hn::Load(d, norm_), tiny = hn::Set(d, kAuraTiny);
    const VF32 length = hn::Sqrt(cc);
    switch (d_.scale_rule) {
      case ScaleRule::matched:
        return hn::IfThenElse(hn::Gt(length, tiny), hn::Div(norm, length), norm);
      case ScaleRule::least_squares:
        return hn::IfThenElse(hn::Gt(length, tiny), hn::Mul(norm, hn::Div(rc, cc)), norm);
      case ScaleRule::unbiased: return hn::IfThenElse(hn::Gt(rc, tiny), hn::Div(norm, rc), norm);
      default: return norm;
    }
  }

  HWY_INLINE void StoreNorms(VF32 scale, std::int64_t first, std::int64_t count) {
    HWY_ALIGN float s[kF32Lanes];
    hn::Store(scale, DF32(), s);
    const std::int64_t stride = a_.norms.row_stride();
    for (std::int64_t i = 0; i < count; ++i) {
      const bool poisoned = (poisoned_ >> i & 1) != 0;
      const float value = poisoned ? std::numeric_limits<float>::quiet_NaN() : s[i];
      if (d_.f16_norm) {
        a_.norms.as<f16>()[(first + i) * stride] = to_f16(Clamped(value, max_finite<f16>()));
      } else {
        a_.norms.as<float>()[(first + i) * stride] = Clamped(value, max_finite<float>());
      }
    }
  }
  static float Clamped(float s, float most) { return s > most ? most : s < -most ? -most : s; }

  const AuraDesc& d_;
  const AuraEncode::Args& a_;
  std::int64_t stride_;
  RowRotation rotation_;
  CodePacker packer_;
  std::uint32_t poisoned_ = 0;  // rows that are not finite
  HWY_ALIGN float norm_[kF32Lanes], inv_[kF32Lanes];
  HWY_ALIGN float level_[kAuraMaxDim];
  HWY_ALIGN std::uint8_t codes_[kAuraMaxDim];
  HWY_ALIGN float tile_[kF32Lanes * kAuraMaxDim];
};

void EncodeRows(const AuraDesc& d, const AuraEncode::Args& a, std::int64_t begin,
                std::int64_t end) {
  RowEncoder encoder(d, a);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t first = begin; first < end; first += kF32Lanes)
      encoder.Encode<X>(first, std::min(end - first, kF32Lanes));
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraEncode;
BITTERN_EXPORT(EncodeRows);

Status supports(const Op::Desc&) { return cpu::supported(); }

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel_rows(
      d, [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(EncodeRows)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
