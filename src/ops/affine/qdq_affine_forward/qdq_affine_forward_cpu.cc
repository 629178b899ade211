#include "bittern/ops/qdq_affine_forward.h"
#include "cpu/code_chunks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/qdq_affine_forward/qdq_affine_forward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/stream-inl.h"
#include "ops/affine/codes-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QdqAffineForward;

// y[0, n) in whole vectors: reads codes and writes y up to a vector beyond n.
template <bool kMlx, bool kStream, class X>
HWY_INLINE void AffineRun(const std::uint8_t* HWY_RESTRICT q, std::int64_t n, Math<X> scale,
                          Math<X> bias, X* HWY_RESTRICT y) {
  const hn::ScalableTag<Math<X>> d;
  const auto s = hn::Set(d, scale), b = hn::Set(d, bias);
  for (std::int64_t j = 0; j < n; j += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto code = LoadCodes(d, q + j);
    const auto v = kMlx ? hn::Add(RoundMath<X>(d, hn::Mul(code, s)), b) : hn::MulAdd(code, s, b);
    if constexpr (kStream) {
      StreamMath(d, v, y + j);
    } else {
      StoreMath(d, v, y + j);
    }
  }
}

template <class X, class S, bool kMlx>
void DequantizeChunks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  const bool stream = d.outer_size * d.axis_size * std::int64_t{sizeof(X)} >= kStreamBytes;
  const bool whole_lines = d.group_size * std::int64_t{sizeof(X)} % 64 == 0;
  CodeReader reader(d, a.q);
  alignas(64) X buffer[cpu::kCodeChunk + 64 + kCodesOverrun];
  for (std::int64_t i = begin; i < end; ++i) {
    const cpu::CodeChunks::Chunk chunk = chunks[i];
    const std::int64_t row = chunk.row, first = chunk.first, count = chunk.count;
    const std::uint8_t* q = reader.Read(row, first, count);
    X* y = a.y.as<X>() + row * a.y.row_stride() + first;
    const auto each_group = [&](auto streamed, X* to) HWY_ATTR {
      std::int64_t group = row * d.num_groups() + first / d.group_size;
      std::int64_t stop = d.group_size - first % d.group_size;
      for (std::int64_t j = 0; j < count; j = stop, stop += d.group_size, ++group) {
        AffineRun<kMlx, streamed>(q + j, std::min(stop, count) - j,
                                  to_math(a.scales.as<S>()[group]),
                                  to_math(a.biases.as<S>()[group]), to + j);
      }
    };
    if (whole_lines && !stream) {
      each_group(std::false_type(), y);
    } else if (whole_lines && ToNextLine(y) == 0) {
      each_group(std::true_type(), y);
    } else {
      // Computed in L1 and copied out: groups of any size still write whole vectors, and whole
      // lines are streamed however rows lie.
      X* staged = buffer + (64 - ToNextLine(y)) % 64 / sizeof(X);
      each_group(std::false_type(), staged);
      EmitLines(staged, static_cast<std::size_t>(count) * sizeof(X), y, stream);
    }
  }
  if (stream) hwy::FlushStream();
}

void RunQdqAffineForward(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    const auto run = [&]<class S>(Type<S>) {
      if (d.rounding == AffineRounding::mlx) {
        DequantizeChunks<X, S, true>(d, a, begin, end);
      } else {
        DequantizeChunks<X, S, false>(d, a, begin, end);
      }
    };
    if constexpr (std::is_same_v<X, f16> || std::is_same_v<X, bf16>) {
      if (d.f32_scale) {
        run(Type<float>());
        return Status();
      }
    }
    run(Type<X>());
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

using Op = QdqAffineForward;
BITTERN_EXPORT(RunQdqAffineForward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  cpu::parallel(chunks.size(), chunks.grain(), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunQdqAffineForward)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineForward>> qdq_affine_forward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
