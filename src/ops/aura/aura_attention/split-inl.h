// One split, that is up to kSplit tokens of a region: logits, softmax and sums for up to
// kRowsAtOnce query rows, and the merging of a split into a row's state.
#if defined(BITTERN_OPS_AURA_ATTENTION_SPLIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_AURA_ATTENTION_SPLIT_INL_H_
#undef BITTERN_OPS_AURA_ATTENTION_SPLIT_INL_H_
#else
#define BITTERN_OPS_AURA_ATTENTION_SPLIT_INL_H_
#endif

#include <limits>
#include <new>

#include "cpu/math-inl.h"
#include "ops/aura/aura_attention/block-inl.h"
#include "ops/aura/aura_attention/int8-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// Turns dots into weights: w[n] = p_n, and m, l.
void Softmax(float* HWY_RESTRICT x, std::int64_t count, Partial& to) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const std::int64_t padded = round_up(count, kUnit);
  std::fill(x + count, x + padded, kNone);
  VF most = hn::Set(d, kNone);
  for (std::int64_t n = 0; n < padded; n += kWidth) {
    const VF v = hn::Load(d, x + n);
    most = hn::IfThenElse(hn::Gt(v, most), v, most);
  }
  HWY_ALIGN float lane[kUnit];
  hn::Store(most, d, lane);
  float m = kNone;
  for (std::int64_t i = 0; i < kWidth; ++i) m = lane[i] > m ? lane[i] : m;
  const VF base = hn::Set(d, m == kNone ? 0.0f : m);
  VF sum[kHalves];
  for (std::int64_t half = 0; half < kHalves; ++half) sum[half] = hn::Zero(d);
  for (std::int64_t n = 0; n < padded; n += kUnit) {
    for (std::int64_t half = 0; half < kHalves; ++half) {
      float* at = x + n + half * kWidth;
      const VF p = Exp(d, hn::Sub(hn::Load(d, at), base));
      sum[half] = hn::Add(sum[half], p);
      hn::Store(p, d, at);
    }
  }
  if constexpr (kHalves == 2) sum[0] = hn::Add(sum[0], sum[1]);
  to.m = m;
  to.l = LaneTree(d, sum[0], kWidth);
}

// Merges a split into the states of the rows from `first` on; those that saw no token of it are
// left as they are.
void Merge(const Work& w, aura::Region region, std::int64_t first, std::int64_t count,
           float* const* partials) {
  const DF d;
  HWY_ALIGN float m[kUnit] = {}, split_m[kUnit] = {}, f[kUnit], g[kUnit];
  for (std::int64_t r = 0; r < count; ++r) {
    m[r] = Record(w, first + r).m;
    split_m[r] = Partial(partials[r]).m;
  }
  for (std::int64_t at = 0; at < round_up(count, kWidth); at += kWidth) {
    const VF one = hn::Load(d, m + at), other = hn::Load(d, split_m + at);
    const VF most = hn::IfThenElse(hn::Gt(other, one), other, one);
    const auto none = hn::Eq(most, hn::Set(d, -std::numeric_limits<float>::infinity()));
    const VF base = hn::IfThenZeroElse(none, most);
    hn::Store(Exp(d, hn::Sub(one, base)), d, f + at);
    hn::Store(Exp(d, hn::Sub(other, base)), d, g + at);
    hn::Store(most, d, m + at);
  }
  const bool coded = region == aura::kCoded;
  for (std::int64_t r = 0; r < count; ++r) {
    const Partial split(partials[r]);
    if (split.seen == 0) continue;
    Record state(w, first + r);
    state.m = m[r];
    state.l = std::fma(split.l, g[r], state.l * f[r]);
    state.l_coded = coded ? std::fma(split.l, g[r], state.l_coded * f[r]) : state.l_coded * f[r];
    const VF vf = hn::Set(d, f[r]), vg = hn::Set(d, g[r]);
    const auto scale = [&](float* o, std::int64_t length) HWY_ATTR {
      for (std::int64_t j = 0; j < length; j += kWidth)
        hn::Store(hn::Mul(hn::Load(d, o + j), vf), d, o + j);
    };
    const auto add = [&](float* o, std::int64_t length) HWY_ATTR {
      for (std::int64_t j = 0; j < length; j += kWidth) {
        const VF scaled = hn::Mul(hn::Load(d, o + j), vf);
        hn::Store(hn::MulAdd(hn::LoadU(d, split.o + j), vg, scaled), d, o + j);
      }
    };
    if (coded) {
      add(state.o_coded, w.coded_length());
      scale(state.o_exact, w.exact_length());
    } else {
      scale(state.o_coded, w.coded_length());
      add(state.o_exact, w.exact_length());
    }
  }
}

// What one thread keeps while it works.
class Worker {
 public:
  Worker(const Work& w, float* slot)
      : w_(w),
        d_(w.d),
        k_tile_(slot),
        v_tile_(k_tile_ + kSplit * w.longer_length()),
        queries_(v_tile_ + kSplit * w.longer_length()),
        logits_(queries_ + round_up(w.task_rows(), kUnit) * w.longer_length()),
        spread_k_(d_.k_bits, d_.dim),
        spread_v_(d_.v_bits, d_.dim),
        k_wide_(w.a.k_codebook.as<float>(), d_.k_bits),
        v_wide_(w.a.v_codebook.as<float>(), d_.v_bits),
        k_bytes_(w.int8 ? w.a.k_codebook.as<float>() : kNoTable)
#if HWY_TARGET <= HWY_AVX3
        ,
        v_shorts_(w.int8 && d_.v_bits == 4 ? w.a.v_codebook.as<float>() : kNoTable)
#endif
  {
  }

  // For Block: the queries of `count` rows from `first` on, 16 side by side.
  void LoadQueries(aura::Region region, std::int64_t first, std::int64_t count) {
    const std::int64_t length = Length(region);
    for (std::int64_t row = 0; row < round_up(count, kUnit); ++row) {
      float* to = queries_ + row / kUnit * kUnit * length + row % kUnit;
      if (row >= count) {
        for (std::int64_t j = 0; j < length; ++j) to[j * kUnit] = 0;
        continue;
      }
      const Record record(w_, first + row);
      const float* from = region == aura::kCoded ? record.r : record.a;
      for (std::int64_t j = 0; j < length; ++j) to[j * kUnit] = from[j];
    }
  }
  // For Block: the tokens `some` of one split as f32.
  void LoadSplit(std::int64_t s, std::int64_t head, const aura::Sequence& sequence,
                 aura::Region region, aura::Span some) {
    const std::int64_t length = Length(region), before = some.begin % kSplit;
    ForPlaces(s, head, sequence, region, some, [&](const Place& place, std::int64_t n) {
      n += before;
      if (region == aura::kCoded) {
        LoadScales(w_.a.k_scales, place.scale_k, place.count, block_k_scales_ + n);
        LoadScales(w_.a.v_scales, place.scale_v, place.count, block_v_scales_ + n);
      }
      const auto load = [&](bool of_v, const Rows& rows, float* to) {
        const Rows whole = WholeUnits(region, rows, of_v ? spread_v_ : spread_k_);
        WithSource(region, of_v, [&](const auto& source) {
          Convert(source, whole, length / kUnit, to + n * length);
        });
      };
      load(false, {place.k, place.k_stride, place.count}, k_tile_);
      load(true, {place.v, place.v_stride, place.count}, v_tile_);
    });
  }
  // Row r of up to 16 sees the tokens seen(r) of the split that was loaded. `row` counts from the
  // first that LoadQueries was given, which is record `first`.
  template <class Seen>
  void Block(aura::Region region, std::int64_t first, std::int64_t row, std::int64_t count,
             const Seen& seen, float* const* partials) {
    const bool coded = region == aura::kCoded;
    const std::int64_t lanes = coded ? (d_.dim + kBlock - 1) / kBlock : d_.dim;
    const Tiles tiles{k_tile_,
                      v_tile_,
                      coded ? block_k_scales_ : nullptr,
                      coded ? block_v_scales_ : nullptr,
                      Length(region),
                      std::min(lanes, kUnit),
                      static_cast<float>(d_.softcap)};
    BlockOfRows block;
    block.count = count;
    block.q = queries_ + row * tiles.length;
    block.o = Partial(partials[0]).o;
    block.stride = count > 1 ? partials[1] - partials[0] : 0;
    for (std::int64_t r = 0; r < kUnit; ++r) {
      const aura::Span span = r < count ? seen(row + r) : aura::Span{};
      const std::int64_t start = span.begin / kSplit * kSplit;
      block.begin[r] = span.empty() ? 0 : span.begin - start;
      block.end[r] = span.empty() ? 0 : span.end - start;
      block.b[r] = r < count ? Record(w_, first + row + r).b : 0.0f;
    }
    AttendBlock(tiles, block, logits_);
    for (std::int64_t r = 0; r < count; ++r) {
      Partial to(partials[r]);
      to.seen = block.begin[r] < block.end[r] ? 1 : 0;
      to.m = block.m[r];
      to.l = block.l[r];
    }
  }

  // The tokens `seen` of one split by `count` <= kRowsAtOnce rows from `first` on.
  void Split(std::int64_t s, std::int64_t head, const aura::Sequence& sequence, aura::Region region,
             aura::Span seen, std::int64_t first, std::int64_t count, float* const* partials) {
    const bool coded = region == aura::kCoded;
    const std::int64_t tokens = seen.end - seen.begin;
    const float* q[kRowsAtOnce];
    float* o[kRowsAtOnce];
    alignas(Record) std::byte storage[kRowsAtOnce][sizeof(Record)];
    const Record* records[kRowsAtOnce];
    for (std::int64_t r = 0; r < count; ++r) {
      records[r] = new (storage[r]) Record(w_, first + r);
      q[r] = coded ? records[r]->r : records[r]->a;
      o[r] = Partial(partials[r]).o;
      std::fill_n(o[r], coded ? w_.coded_length() : w_.exact_length(), 0.0f);
    }
    const std::int64_t units = (coded ? w_.coded_length() : w_.exact_length()) / kUnit;

    // Longer rows the CPU fetches ahead by itself, and better.
    const bool ahead = coded || d_.dim * static_cast<std::int64_t>(size_of(d_.exact)) <= 128;
    HWY_ALIGN float k_scales[kSplit], v_scales[kSplit];
    ForPlaces(s, head, sequence, region, seen, [&](const Place& place, std::int64_t n) {
      if (ahead) Prefetch(place.v, place.v_stride, place.count);
      if (coded) {
        LoadScales(w_.a.k_scales, place.scale_k, place.count, k_scales + n);
        LoadScales(w_.a.v_scales, place.scale_v, place.count, v_scales + n);
      }
      const Rows k = WholeUnits(region, {place.k, place.k_stride, place.count}, spread_k_);
      if (coded && w_.int8) {
        k_bytes_.Dots(k, units / kBlock, records, count, x_, n);
      } else {
        WithSource(region, false,
                   [&](const auto& source) { Dots(source, k, units, q, count, x_, n); });
      }
    });
    const DF d;
    for (std::int64_t r = 0; r < count; ++r) {
      if (coded) {
        const VF b = hn::Set(d, records[r]->b);
        for (std::int64_t n = 0; n < tokens; n += kWidth) {
          const VF x = hn::MulAdd(hn::Load(d, x_[r] + n), hn::Load(d, k_scales + n), b);
          hn::Store(x, d, x_[r] + n);
        }
      }
      if (d_.softcap != 0) {
        const VF cap = hn::Set(d, static_cast<float>(d_.softcap));
        for (std::int64_t n = 0; n < tokens; n += kWidth)
          hn::Store(SoftCap(d, cap, hn::Load(d, x_[r] + n)), d, x_[r] + n);
      }
      Partial to(partials[r]);
      to.seen = 1;
      Softmax(x_[r], tokens, to);
      if (coded) {
        for (std::int64_t n = 0; n < tokens; n += kWidth) {
          const VF weight = hn::Mul(hn::Load(d, x_[r] + n), hn::Load(d, v_scales + n));
          hn::Store(weight, d, x_[r] + n);
        }
      }
    }
#if HWY_TARGET <= HWY_AVX3
    const bool shorts = coded && w_.int8 && d_.v_bits == 4;
    float unit[kRowsAtOnce];
    for (std::int64_t r = 0; shorts && r < count; ++r)
      unit[r] = v_shorts_.MakeShorts(x_[r], tokens, w_shorts_[r]);
#endif
    // While these are added, the next split's rows of K come in.
    const aura::Span next{seen.begin + kSplit,
                          ahead ? std::min(seen.end + kSplit, sequence.tokens[region]) : 0};
    ForPlaces(s, head, sequence, region, seen, [&](const Place& place, std::int64_t n) {
      for (aura::Span some{next.begin + n, std::min(next.begin + n + place.count, next.end)};
           !some.empty();) {
        const Place then = Locate(s, head, sequence, region, some.begin, some.end - some.begin);
        Prefetch(then.k, then.k_stride, then.count);
        some.begin += then.count;
      }
      const Rows v = WholeUnits(region, {place.v, place.v_stride, place.count}, spread_v_);
#if HWY_TARGET <= HWY_AVX3
      if (shorts) return v_shorts_.Add(v, units / kBlock, w_shorts_, n, o, count);
#endif
      WithSource(region, true, [&](const auto& source) { Add(source, v, units, x_, n, o, count); });
    });
#if HWY_TARGET <= HWY_AVX3
    for (std::int64_t r = 0; shorts && r < count; ++r) {
      const VF factor = hn::Set(d, unit[r]);
      for (std::int64_t j = 0; j < units * kUnit; j += kWidth) {
        const auto sum =
            hn::LoadU(hn::RebindToSigned<DF>(), reinterpret_cast<const std::int32_t*>(o[r] + j));
        hn::StoreU(hn::Mul(hn::ConvertTo(d, sum), factor), d, o[r] + j);
      }
    }
#endif
  }

 private:
  static constexpr float kNoTable[16] = {};

  std::int64_t Length(aura::Region region) const {
    return region == aura::kCoded ? w_.coded_length() : w_.exact_length();
  }

  // Consecutive slots: the rows of k and v, and of scales the index.
  struct Place {
    const std::byte *k, *v;
    std::int64_t k_stride, v_stride;  // bytes
    std::int64_t scale_k, scale_v, count;
  };
  // Few enough that what is fetched ahead of them is still there when its turn comes.
  static constexpr std::int64_t kRowsInTurn = 32;
  Place Locate(std::int64_t s, std::int64_t head, const aura::Sequence& sequence,
               aura::Region region, std::int64_t token, std::int64_t limit) const {
    const std::int64_t slot = sequence.slot(region, token);
    std::int64_t count = std::min(limit, sequence.slots[region] - slot);
    const auto& a = w_.a;
    if (region == aura::kCoded) {
      if (d_.page_size != 0) count = std::min(count, d_.page_size - slot % d_.page_size);
      const auto offset = [&](const ConstView& view, std::int64_t row) {
        return aura::row_offset(d_, view, a.block_table, s, head, slot, row);
      };
      const std::int64_t k_words = packed_words(d_.dim, d_.k_bits);
      const std::int64_t v_words = packed_words(d_.dim, d_.v_bits);
      const auto* k = a.k_packed.as<std::uint32_t>() + offset(a.k_packed, k_words);
      const auto* v = a.v_packed.as<std::uint32_t>() + offset(a.v_packed, v_words);
      return {reinterpret_cast<const std::byte*>(k),
              reinterpret_cast<const std::byte*>(v),
              4 * k_words,
              4 * v_words,
              offset(a.k_scales, 1),
              offset(a.v_scales, 1),
              count};
    }
    const auto size = static_cast<std::int64_t>(size_of(d_.exact));
    const auto row = [&](const ConstView& view) {
      return static_cast<const std::byte*>(view.data) +
             aura::exact_offset(d_, view, s, head, slot) * size;
    };
    const ConstView& k = region == aura::kFirst ? a.k_first : a.k_recent;
    const ConstView& v = region == aura::kFirst ? a.v_first : a.v_recent;
    return {row(k), row(v), aura::exact_stride(k) * size, aura::exact_stride(v) * size, 0,
            0,      count};
  }
  // Calls f(place, index of its first token in the span) for consecutive slots that hold the span.
  template <class F>
  void ForPlaces(std::int64_t s, std::int64_t head, const aura::Sequence& sequence,
                 aura::Region region, aura::Span span, const F& f) const {
    for (std::int64_t token = span.begin; token < span.end;) {
      const std::int64_t limit = std::min(span.end - token, kRowsInTurn);
      const Place place = Locate(s, head, sequence, region, token, limit);
      f(place, token - span.begin);
      token += place.count;
    }
  }
  static void Prefetch(const std::byte* at, std::int64_t stride, std::int64_t count) {
    for (std::int64_t line = 0; line < stride * count; line += 64)
      __builtin_prefetch(at + line, 0, 2);
  }

  void LoadScales(const ConstView& scales, std::int64_t at, std::int64_t count, float* to) const {
    const DF d;
    const auto load = [&](const auto* from) HWY_ATTR {
      std::int64_t n = 0;
      for (; n + kWidth <= count; n += kWidth) hn::StoreU(LoadMath(d, from + n), d, to + n);
      for (; n < count; ++n) to[n] = to_math(from[n]);
    };
    if (d_.f16_scale) {
      load(scales.as<f16>() + at);
    } else {
      load(scales.as<float>() + at);
    }
  }

  // The rows in whole units: where they lie, or copied.
  Rows WholeUnits(aura::Region region, const Rows& rows, const CodeSpreader& spreader) {
    const bool coded = region == aura::kCoded;
    const std::int64_t bytes =
        coded ? spreader.bytes() : w_.exact_length() * static_cast<std::int64_t>(size_of(d_.exact));
    const std::int64_t row =
        coded ? rows.stride : d_.dim * static_cast<std::int64_t>(size_of(d_.exact));
    if (bytes == row && (!coded || spreader.in_place())) return rows;
    for (std::int64_t n = 0; n < rows.count; ++n) {
      const std::byte* from = rows.at + n * rows.stride;
      std::byte* to = copies_ + n * bytes;
      if (coded) {
        spreader(from, to);
      } else {
        std::memcpy(to, from, static_cast<std::size_t>(row));
        std::memset(to + row, 0, static_cast<std::size_t>(bytes - row));
      }
    }
    return {copies_, bytes, rows.count};
  }

  template <class F>
  void WithSource(aura::Region region, bool of_v, const F& f) const {
    const std::int32_t bits = of_v ? d_.v_bits : d_.k_bits;
    const auto* codebook = (of_v ? w_.a.v_codebook : w_.a.k_codebook).as<float>();
    if (region != aura::kCoded) {
      (void)visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
        f(ExactRows<E>());
        return Status();
      });
    } else if (bits == 4) {
      f(NarrowRows<true>(codebook, bits));
    } else if (bits < 4) {
      f(NarrowRows<false>(codebook, bits));
    } else {
      f(of_v ? v_wide_ : k_wide_);
    }
  }

  const Work& w_;
  const AuraAttentionDesc& d_;
  float *k_tile_, *v_tile_, *queries_, *logits_;  // for Block
  HWY_ALIGN float block_k_scales_[kSplit], block_v_scales_[kSplit];
  CodeSpreader spread_k_, spread_v_;
  WideRows k_wide_, v_wide_;
  ByteCodes k_bytes_;
#if HWY_TARGET <= HWY_AVX3
  ShortCodes v_shorts_;
  HWY_ALIGN std::int16_t w_shorts_[kRowsAtOnce][kSplit];
#endif
  HWY_ALIGN float x_[kRowsAtOnce][kSplit];  // logits, then weights
  HWY_ALIGN std::byte copies_[kRowsInTurn * kAuraMaxDim * 4];
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
