// A block's results, and how they are written: scales and biases as stored, codes packed and
// streamed.
#if defined(BITTERN_OPS_QDQ_AFFINE_INIT_RESULTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QDQ_AFFINE_INIT_RESULTS_INL_H_
#undef BITTERN_OPS_QDQ_AFFINE_INIT_RESULTS_INL_H_
#else
#define BITTERN_OPS_QDQ_AFFINE_INIT_RESULTS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/pack-inl.h"
#include "cpu/parallel.h"
#include "cpu/stream-inl.h"
#include "ops/affine/qdq_affine_init/blocks.h"
#include "ops/affine/qdq_affine_init/code_rows-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using affine::kBlockCodes;
using affine::kBlockGroups;

template <class F>
struct Results {
  HWY_ALIGN F s[kBlockGroups + kWidth<F>], b[kBlockGroups + kWidth<F>];
  HWY_ALIGN std::uint8_t codes[kBlockCodes + kRow];
  HWY_ALIGN F nought[kWidth<F>] = {};  // of all blocks so far, see FindRange
};

template <class F>
HWY_NOINLINE void StoreParams(const F* HWY_RESTRICT from, std::int64_t first, std::int64_t count,
                              const MutView& to) {
  (void)visit_float(to.dtype, [&]<class S>(Type<S>) {
    if constexpr (std::is_same_v<Math<S>, F>) {
      const Tag<F> t;
      S* p = to.as<S>() + first;
      std::int64_t i = 0;
      for (; i + kWidth<F> <= count; i += kWidth<F>) StoreMath(t, hn::LoadU(t, from + i), p + i);
      for (; i < count; ++i) p[i] = from_math<S>(from[i]);
    }
    return Status();
  });
}

// Codes from the buffer to where they belong, streamed when there are many. `nibbles`: they are
// packed already.
class CodeWriter {
 public:
  HWY_NOINLINE CodeWriter(const Op::Desc& d, const MutView& q, bool nibbles)
      : packer_(d.code_bits()),
        q_(static_cast<std::uint8_t*>(q.data)),
        packed_(d.storage == CodeStorage::packed),
        nibbles_(nibbles),
        bits_(d.code_bits()),
        row_groups_(d.num_groups()),
        size_(d.group_size),
        row_bytes_(q.row_stride() * static_cast<std::int64_t>(size_of(q.dtype))),
        stream_(d.code_shape().numel() * static_cast<std::int64_t>(size_of(q.dtype)) >=
                    kStreamBytes ||
                cpu::grain_ignored()) {}

  HWY_NOINLINE void Write(std::int64_t first, std::int64_t count, const std::uint8_t* codes) const {
    while (count > 0) {
      const std::int64_t row = first / row_groups_, k = first % row_groups_;
      const std::int64_t groups = std::min(count, row_groups_ - k);
      std::uint8_t* to = q_ + row * row_bytes_;
      if (nibbles_) {
        EmitLines(codes, static_cast<std::size_t>(groups * size_ / 2), to + k * size_ / 2, stream_);
        codes -= groups * size_ / 2;
      } else if (packed_) {
        Pack(codes, groups * size_, to + k * size_ * bits_ / 8);
      } else {
        EmitLines(codes, static_cast<std::size_t>(groups * size_), to + k * size_, stream_);
      }
      codes += groups * size_;
      first += groups;
      count -= groups;
    }
  }
  void Finish() const {
    if (stream_) hwy::FlushStream();
  }

 private:
  // Lines are assembled in L1: codes need not fill them evenly.
  void Pack(const std::uint8_t* codes, std::int64_t count, std::uint8_t* to) const {
    constexpr std::int64_t kPiece = 4096;
    HWY_ALIGN std::uint8_t buffer[kPiece];
    for (std::int64_t i = 0; i < count; i += kPiece) {
      const auto n = static_cast<std::size_t>(std::min(kPiece, count - i));
      const std::size_t used = packer_.Bytes(n), whole = (used + 3) / 4 * 4;
      packer_.Pack(codes + i, n, buffer);
      std::memset(buffer + used, 0, whole - used);
      EmitLines(buffer, whole, to + i * bits_ / 8, stream_);
    }
  }

  CodePacker packer_;
  std::uint8_t* q_;
  bool packed_, nibbles_;
  std::int64_t bits_, row_groups_, size_, row_bytes_;
  bool stream_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
