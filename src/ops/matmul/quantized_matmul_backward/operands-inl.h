// The operands of quantized_matmul_backward's products: parts of W as panels, and words of terms in
// scratch, a term in each (Floats) or a pair of neighbouring terms in bf16 (Pairs).
#if defined(BITTERN_OPS_QUANTIZED_MATMUL_BACKWARD_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZED_MATMUL_BACKWARD_OPERANDS_INL_H_
#undef BITTERN_OPS_QUANTIZED_MATMUL_BACKWARD_OPERANDS_INL_H_
#else
#define BITTERN_OPS_QUANTIZED_MATMUL_BACKWARD_OPERANDS_INL_H_
#endif

#include "bittern/ops/quantized_matmul_backward.h"
#include "ops/matmul/expand-inl.h"
#include "ops/matmul/quantized_matmul_backward/work.h"
#include "ops/matmul/repack-inl.h"
// after the family's own: it has another namespace `matmul`
#include "cpu/bf16-inl.h"
#include "cpu/tile-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QuantizedMatmulBackward;
using Work = bittern::matmul::BackwardWork;
constexpr std::int64_t kPanelRows = bittern::matmul::kLanes;
// Columns of a register tile: those of a right operand lie together.
constexpr std::int64_t kTileColumns = matmul::kTileVectors * matmul::kLanes;
static_assert(kTileColumns <= Work::kTileColumns && Work::kTileColumns % kTileColumns == 0);
static_assert(kTileColumns % kPanelRows == 0 && matmul::kTileRows == Work::kTileRows);

// Inputs [first, first + count) of W as panels of a matrix of their own, `desc`.
class PanelPart {
 public:
  PanelPart(const WeightDesc& w, const Op::Args& a, std::int64_t first, std::int64_t count,
            std::uint8_t* scratch)
      : desc_(w), repacker_(desc_), scratch_(scratch) {
    desc_.inputs = count;
    if (!w.stored()) {
      const auto format =
          w.plain() ? bittern::matmul::PanelFormat() : bittern::matmul::panel_format(w);
      panels_ =
          a.panels.as<std::uint8_t>() + (w.plain() ? first * kPanelRows * Size(w.plain_element())
                                                   : format.run_at(first / format.unit));
      panel_bytes_ = kPanelRows * w.row_bytes();
      return;
    }
    from_ = StoredPartsOf<const std::uint8_t>(a);
    if (w.plain()) from_.w.at += first * Size(w.plain_element());
    if (w.affine()) {
      from_.packed.at += first * w.bits / 8;
      from_.scales.at += first / w.group_size * Size(w.scale_element);
      from_.biases.at += first / w.group_size * Size(w.scale_element);
    }
    if (w.blocks()) {
      const BlockSize size = block_size(w.block_type());
      from_.blocks.at += first / size.weights * size.bytes;
    }
  }
  PanelPart(const PanelPart&) = delete;

  const WeightDesc& desc() const { return desc_; }
  // Valid until the next call.
  const std::uint8_t* Panel(std::int64_t p) const {
    if (!desc_.stored()) return panels_ + p * panel_bytes_;
    repacker_.ToPanel(from_, p * kPanelRows, scratch_);
    return scratch_;
  }

 private:
  static std::int64_t Size(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

  WeightDesc desc_;
  Repacker repacker_;
  StoredParts<const std::uint8_t> from_;
  const std::uint8_t* panels_ = nullptr;
  std::int64_t panel_bytes_ = 0;
  std::uint8_t* scratch_;
};

// ---- words of terms ----

// Operands are in tiles of kTileColumns columns (right) and strips of Work::kStrip rows (left, of
// Pairs always), each Work::kDepth words deep.

struct Floats {
  using Word = float;
  static constexpr std::int64_t kPerWord = 1;
  static constexpr std::int64_t kLeftStride = Work::kDepth + Work::kPad;

  // The terms are rows of `from`: to[term][column].
  template <class X>
  static void FromRows(const X* from, std::int64_t from_stride, std::int64_t depth,
                       std::int64_t columns, Word* to, std::int64_t stride) {
    tile::LoadAs(from, from_stride, depth, columns, to, stride);
  }
  // The terms are columns of `from`: a left operand for MultiplyColumns.
  static void FromColumns(const float* from, std::int64_t from_stride, std::int64_t rows,
                          std::int64_t depth, Word* to) {
    tile::LoadAs(from, from_stride, rows, depth, to, kLeftStride);
  }
  // The terms are rows of a panel, of which `depth` count: to[term][input] = numbers[input][term].
  static void FromPanel(const float* numbers, std::int64_t, std::int64_t inputs, Word* to) {
    tile::Transpose(numbers, kPanelRows, inputs, kPanelRows, to, kTileColumns);
  }

  // sums[rows][width] = left right, onto the sums if `onto`; `words` words deep.
  static void MultiplyColumns(std::int64_t rows, std::int64_t width, std::int64_t words,
                              const Word* left, const Word* right, float* sums, bool onto) {
    matmul::Multiply(rows, width, words, {left, kLeftStride}, right, kTileColumns, sums,
                     kTileColumns, onto);
  }
  // The same with a strip of FromRows as left operand.
  static void MultiplyStrip(std::int64_t rows, std::int64_t width, std::int64_t words,
                            const Word* left, const Word* right, float* sums, bool onto) {
    matmul::Multiply(rows, width, words, {left, 1, Work::kStrip}, right, kTileColumns, sums,
                     kTileColumns, onto);
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// An odd last term has a 0 beside it in both operands.
struct Pairs {
  using Word = std::uint32_t;
  static constexpr std::int64_t kPerWord = 2;

  template <class X>
  static void FromRows(const X* from, std::int64_t from_stride, std::int64_t depth,
                       std::int64_t columns, Word* to, std::int64_t stride) {
    const pairs::Interleaver interleave;
    for (std::int64_t m = 0; m < depth; m += 2, from += 2 * from_stride, to += stride) {
      const bool both = m + 1 < depth;
      for (std::int64_t j = 0; j < columns; j += kPanelRows) {
        const VF first = Some(from + j, columns - j);
        const VF second = both ? Some(from + from_stride + j, columns - j) : hn::Zero(DF());
        hn::StoreU(interleave(first, second), DU(), to + j);
      }
    }
  }
  static void FromColumns(const float* from, std::int64_t from_stride, std::int64_t rows,
                          std::int64_t depth, Word* to) {
    alignas(64) Word words[Work::kStrip * kPanelRows];
    for (std::int64_t m = 0; m < rows; m += Work::kStrip) {
      const std::int64_t strip = std::min(Work::kStrip, rows - m);
      for (std::int64_t n = 0; n < depth; n += 2 * kPanelRows) {
        for (std::int64_t r = 0; r < strip; ++r) {
          const float* at = from + (m + r) * from_stride + n;
          const VF low = Some(at, depth - n), high = Some(at + kPanelRows, depth - n - kPanelRows);
          hn::Store(pairs::Neighbours(low, high), DU(), words + r * kPanelRows);
        }
        tile::Transpose(words, kPanelRows, strip, kPanelRows,
                        to + m * Work::kDepth + n / 2 * Work::kStrip, Work::kStrip);
      }
    }
  }
  static void FromPanel(const float* numbers, std::int64_t depth, std::int64_t inputs, Word* to) {
    constexpr std::int64_t kWords = kPanelRows / 2;  // of an input
    alignas(64) Word words[kTileColumns * kWords];
    for (std::int64_t k = 0; k < inputs; k += 2) {
      const float* at = numbers + k * kPanelRows;
      hn::Store(pairs::Neighbours(hn::Load(DF(), at), hn::Load(DF(), at + kPanelRows)), DU(),
                words + k * kWords);
    }
    tile::Transpose(words, kWords, inputs, kWords, to, kTileColumns);
    if (depth < kPanelRows && depth % 2 != 0) {  // the panel may have any bytes there
      Word* last = to + depth / 2 * kTileColumns;
      for (std::int64_t k = 0; k < inputs; ++k) last[k] &= 0xffff;
    }
  }

  static void MultiplyColumns(std::int64_t rows, std::int64_t width, std::int64_t words,
                              const Word* left, const Word* right, float* sums, bool onto) {
    for (std::int64_t m = 0; m < rows; m += Work::kStrip)
      MultiplyStrip(std::min(Work::kStrip, rows - m), width, words, left + m * Work::kDepth, right,
                    sums + m * kTileColumns, onto);
  }
  static void MultiplyStrip(std::int64_t rows, std::int64_t width, std::int64_t words,
                            const Word* left, const Word* right, float* sums, bool onto) {
    constexpr float kOne = 1;
    pairs::Multiply(rows, width, words, {left, Work::kStrip}, {right, kTileColumns},
                    onto ? &kOne : nullptr, sums, kTileColumns);
  }

 private:
  // 16 elements, 0 from `count` on.
  template <class X>
  static HWY_INLINE VF Some(const X* from, std::int64_t count) {
    if (count >= kPanelRows) return LoadMath(DF(), from);
    X some[kPanelRows] = {};
    for (std::int64_t i = 0; i < count; ++i) some[i] = from[i];
    return LoadMath(DF(), some);
  }
};
static_assert(Work::kDepth % kPanelRows == 0 && Work::kStrip % kPanelRows == 0);
#endif

template <class Terms>
constexpr std::int64_t WordsOf(std::int64_t terms) {
  return (terms + Terms::kPerWord - 1) / Terms::kPerWord;
}

// Calls f(Type<Terms>()).
template <class F>
void WithTerms(const Work& work, F&& f) {
#if HWY_TARGET == HWY_AVX3_DL
  if (work.pairs) return f(Type<Pairs>());
#endif
  f(Type<Floats>());
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
