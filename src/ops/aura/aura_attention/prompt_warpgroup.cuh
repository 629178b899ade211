// Prompts on tensor cores, by products of a warpgroup (sm_90a): rows of the lengths that have a
// PromptShape, any widths. A block has 128 query rows of a KV head: queries, and within each its
// heads. Two warpgroups have 64 rows each; a third one makes f16 of a tile of tokens' codes at a
// time, by the table of decode_tensor.cuh, in shared memory, where both read it:
//
//   logits [64 rows, tokens] = q levels(K)^T        o [64 rows, dim] += w levels(V)
//
// Scales meet the logits and the weights w, as there. The logits of the next tokens are under way
// with the values of the last ones, and while their weights are made the values still are.
//
// First and recent tokens go the same way before the coded ones, with the query as it was given:
// their rows are in units of a power of two each, which then is the scale.
//
// A quad of lanes has two rows, 8 apart. Sums stay in registers, and the rotations are done there.
// So do queries of at most 128 elements; longer ones are in shared memory, beside the table and the
// tokens.
#pragma once
#include "ops/aura/aura_attention/decode_tensor.cuh"
#include "ops/aura/aura_tile.cuh"

namespace bittern::attend {

inline constexpr int kPromptRows = 128;  // of a block
inline constexpr int kPromptGroups = 2, kPromptStages = 3;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kPromptThreads = (kPromptGroups + 1) * kWarpgroup;
using PromptRegisters = cuda::RegisterShares<kPromptGroups, 104, 200>;

// What a tile's tokens are multiplied by: v_scale = ratio 2^exponent.
template <int kTokens>
struct TokenScales {
  float k[kTokens], exponent[kTokens], ratio[kTokens];
  float back[kTokens];  // 2^-exponent
};

template <int kDim_>
struct PromptShape {
  static constexpr int kDim = kDim_;
  // Sums of a long row take the registers that its query would need, and tokens the memory.
  static constexpr bool kLong = kDim > 128;
  static constexpr int kTokens = kLong ? 32 : 64;  // of a tile
  // A matrix of tokens is several tiles (cuda::tile_place), each of 64 elements. What lies past a
  // row's end in the last one is never written, and only sums that nothing reads are made of it.
  static constexpr int kParts = (kDim + 63) / 64;
  static constexpr int kPart = kTokens * cuda::kTileRowBytes;
  static constexpr int kThreads = kWarpgroup / kTokens;  // that make a token's row
  static constexpr int kShare = kDim / kThreads;         // codes of each
  static_assert(kDim % 16 == 0 && kShare % 8 == 0);

  using Scales = TokenScales<kTokens>;
  static constexpr int kTable = 0, kRing = 256 * 256;  // in shared memory
  static constexpr int kKeys = 0, kValues = kParts * kPart, kStage = 2 * kValues;
  static constexpr int kQueries = kRing + kPromptStages * kStage;
  static constexpr int kGroupQueries = kLong ? kParts * cuda::kTileBytes64 : 0;
  static constexpr int kScales = kQueries + kPromptGroups * kGroupQueries;
  static constexpr int kBytes = kScales + kPromptStages * static_cast<int>(sizeof(Scales));
  static_assert(kBytes <= 227 << 10);
};

struct PromptCut {
  int row_tiles, items;                    // tiles of a KV head
  cuda::Divisor32 pairs, kv_heads, group;  // pairs of a sequence and a KV head
  cuda::Divisor32 page_size;               // if there are pages
  float* exact_sums = nullptr;             // o of first and recent tokens: [block, dim / 2, thread]
};

// A block's rows, and for each region the tiles with a token that one of them may see.
template <class Shape>
struct PromptItem {
  int s, head, first_row;
  aura::Sequence sequence;
  int first[aura::kRegions], end[aura::kRegions];

  // The rows that see most come first.
  __device__ PromptItem(const Problem& p, const PromptCut& cut, int item) : sequence(p.d) {
    const unsigned tile = cut.pairs.divide(static_cast<unsigned>(item));
    const unsigned pair = static_cast<unsigned>(item) - tile * cut.pairs.value();
    s = static_cast<int>(cut.kv_heads.divide(pair));
    head = static_cast<int>(pair) - s * static_cast<int>(cut.kv_heads.value());
    first_row = (cut.row_tiles - 1 - static_cast<int>(tile)) * kPromptRows;
    sequence = p.sequence(s);
    const int last_row = std::min(first_row + kPromptRows, static_cast<int>(p.head_rows)) - 1;
    const unsigned first_query = cut.group.divide(static_cast<unsigned>(first_row));
    const unsigned last_query = cut.group.divide(static_cast<unsigned>(last_row));
    constexpr int kTokens = Shape::kTokens;
    for (const Region region : {aura::kFirst, aura::kCoded, aura::kRecent}) {
      const std::int64_t from = sequence.seen(p.d, first_query, region).begin;
      const std::int64_t to = sequence.seen(p.d, last_query, region).end;
      first[region] = static_cast<int>(from / kTokens);
      end[region] = from < to ? static_cast<int>((to + kTokens - 1) / kTokens) : first[region];
    }
  }
};

// The blocks' barriers, each of a warpgroup and the one that makes its tokens: a stage has a tile,
// and is free again. One more is a warpgroup's own.
inline constexpr int kPairThreads = 2 * kWarpgroup;
__device__ inline int full_barrier(int stage, int group) {
  return 1 + stage * kPromptGroups + group;
}
__device__ inline int free_barrier(int stage, int group) {
  return 1 + (kPromptStages + stage) * kPromptGroups + group;
}
__device__ inline int own_barrier(int group) {
  return 1 + 2 * kPromptStages * kPromptGroups + group;
}
static_assert(1 + (2 * kPromptStages + 1) * kPromptGroups <= 16);
__device__ inline int next_stage(int stage) { return stage + 1 == kPromptStages ? 0 : stage + 1; }

template <class T>
__device__ T& prompt_shared(int place) {
  return *reinterpret_cast<T*>(cuda::dynamic_shared<char>() + place);
}
template <class Shape>
__device__ typename Shape::Scales& token_scales(int stage) {
  using Scales = typename Shape::Scales;
  return prompt_shared<Scales>(Shape::kScales + stage * static_cast<int>(sizeof(Scales)));
}

// ---- the warpgroup that makes tokens ----

template <class Shape>
class PromptTokens {
  static constexpr int kTokens = Shape::kTokens, kDim = Shape::kDim, kShare = Shape::kShare;
  using Item = PromptItem<Shape>;

 public:
  __device__ PromptTokens(const Problem& p, const PromptCut& cut)
      : p_(p),
        cut_(cut),
        row_(static_cast<int>(threadIdx.x) % kTokens),
        part_(static_cast<int>(threadIdx.x) % kWarpgroup / kTokens) {}

  __device__ void run() {
    for (int i = static_cast<int>(blockIdx.x); i < cut_.items; i += static_cast<int>(gridDim.x)) {
      const Item item(p_, cut_, i);
      for (const Region region : {aura::kFirst, aura::kRecent})
        for (int tile = item.first[region]; tile < item.end[region]; ++tile)
          put_exact(item, region, tile);
      put_coded(item);
    }
    // No barrier is left half way. The oldest tile is in the next stage, or in the first.
    if (made_ < kPromptStages) stage_ = 0;
    for (int i = 0; i < made_; ++i) {
      wait_free();
      stage_ = next_stage(stage_);
    }
  }

 private:
  __device__ void wait_free() const {
    for (int group = 0; group < kPromptGroups; ++group)
      cuda::barrier_wait(free_barrier(stage_, group), kPairThreads);
  }
  __device__ void begin() const {
    if (made_ == kPromptStages) wait_free();
  }
  __device__ void end() {
    cuda::fence_shared();
    for (int group = 0; group < kPromptGroups; ++group)
      cuda::barrier_arrive(full_barrier(stage_, group), kPairThreads);
    stage_ = next_stage(stage_);
    if (made_ < kPromptStages) ++made_;
  }
  __device__ int tile_at(bool of_v) const {
    return Shape::kRing + stage_ * Shape::kStage + (of_v ? Shape::kValues : Shape::kKeys);
  }
  // Of K by the first thread of a row, of V by the second.
  __device__ void put_scale(float scale) const {
    auto& to = token_scales<Shape>(stage_);
    if (part_ > 1) return;
    if (part_ == 0) {
      to.k[row_] = scale;
      return;
    }
    const int raw = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
    const int exponent = min(max(raw, kLeastLog), kMostLog);
    to.exponent[row_] = static_cast<float>(exponent);
    to.back[row_] = math::power_of_two(-exponent);
    to.ratio[row_] = scale * math::power_of_two(-exponent);
  }

  // ---- codes: a thread has its share of a row of K and of one of V ----

  struct Codes {
    std::uint32_t words[kShare / 4];  // of 8 bits
  };

  // Where a token's codes lie, and a scale. Past the last token they are those of the last.
  struct Places {
    const std::uint32_t *k, *v;
    float scale;  // of K for a row's first thread, otherwise of V
  };
  __device__ Places places(const Item& item, int tile) const {
    const std::int64_t last = item.sequence.tokens[aura::kCoded] - 1;
    const std::int64_t token = std::min<std::int64_t>(tile * kTokens + row_, last);
    const auto slot = static_cast<unsigned>(item.sequence.slot(aura::kCoded, token));
    Place at{item.s * p_.d.kv_heads + item.head, slot};
    if (p_.d.page_size != 0) {
      const unsigned index = cut_.page_size.divide(slot), size = cut_.page_size.value();
      const std::int64_t page = p_.block_table[item.s * p_.table_stride + index];
      at.outer = std::clamp<std::int64_t>(page, 0, p_.d.pages - 1);
      at.inner = item.head * static_cast<std::int64_t>(size) + (slot - index * size);
    }
    const auto row = [&](const CodedRows& rows) {
      return rows.packed + at.outer * rows.packed_stride + at.inner * rows.words;
    };
    return {row(p_.k), row(p_.v), p_.scale_of(part_ == 0 ? p_.k : p_.v, at)};
  }
  // A share of codes that begins within a word: its bits, and the most that lie before it.
  template <int kBits>
  static constexpr int kShareBits = kShare * kBits;
  template <int kBits>
  static constexpr int kMostBefore = std::max(kShareBits<kBits> % 32, 3 * kShareBits<kBits> % 32);

  __device__ void load(const std::uint32_t* row, int bits, Codes& to) const {
    cuda::visit_bits(bits, [&](auto width) {
      constexpr int kBits = decltype(width)::value;
      constexpr int kWords = (kMostBefore<kBits> + kShareBits<kBits> + 31) / 32;
      const std::uint32_t* const from = row + part_ * kShareBits<kBits> / 32;
      if constexpr (kShareBits<kBits> % 64 == 0) {
#pragma unroll
        for (int i = 0; i < kWords; i += 2) {
          const uint2 x = *reinterpret_cast<const uint2*>(from + i);
          to.words[i] = x.x;
          to.words[i + 1] = x.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) to.words[i] = from[i];
      }
    });
  }
  __device__ void convert(Codes& codes, int bits, bool of_v) const {
    const char* const table = &prompt_shared<char>(Shape::kTable) + (of_v ? 128 : 0);
    const int to = tile_at(of_v);
    cuda::visit_bits(bits, [&](auto width) {
      constexpr int kBits = decltype(width)::value, kPieces = kShare / 8;
      if constexpr (kMostBefore<kBits> != 0) {
        const auto before = static_cast<unsigned>(part_ * kShareBits<kBits>) % 32;
        constexpr int kWords = (kShareBits<kBits> + 31) / 32;
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          codes.words[i] =
              __funnelshift_r(codes.words[i], i + 1 < kShare / 4 ? codes.words[i + 1] : 0, before);
      }
      const unsigned base = 4 * static_cast<unsigned>(lane_index());
      const unsigned pairs = 8 * static_cast<unsigned>(lane_index() % 16);
      // Four pieces are looked up before the first is stored: the compiler keeps the order of
      // loads and stores, and each store would wait for its own loads.
      static_for<0, (kPieces + 3) / 4>([&](auto four) {
        constexpr int kFirst = 4 * decltype(four)::value, kCount = std::min(4, kPieces - kFirst);
        uint4 levels[kCount];
        static_for<0, kCount>([&](auto one) {
          constexpr int kCode = 8 * (kFirst + decltype(one)::value);
          uint4& to_levels = levels[decltype(one)::value];
          if constexpr (kBits == 2) {
            const uint2 low = table_pair(table, entry_of<kCode * 2, 8>(codes.words, pairs));
            const uint2 high = table_pair(table, entry_of<kCode * 2 + 8, 8>(codes.words, pairs));
            to_levels = {low.x, low.y, high.x, high.y};
          } else {
            to_levels = {neighbours<kBits, kCode>(table, codes.words, base),
                         neighbours<kBits, kCode + 2>(table, codes.words, base),
                         neighbours<kBits, kCode + 4>(table, codes.words, base),
                         neighbours<kBits, kCode + 6>(table, codes.words, base)};
          }
        });
#pragma unroll
        for (int i = 0; i < kCount; ++i) put_piece(to, part_ * kPieces + kFirst + i, levels[i]);
      });
    });
  }
  __device__ void put_piece(int matrix, int piece, uint4 levels) const {
    prompt_shared<uint4>(matrix + cuda::tile_place<kTokens>(row_, piece)) = levels;
  }
  __device__ void put_coded(const Item& item) {
    const int first = item.first[aura::kCoded], last = item.end[aura::kCoded];
    if (first >= last) return;
    Codes k, v;
    Places at = places(item, first);
    load(at.k, p_.k.bits, k);
    for (int tile = first; tile < last; ++tile) {
      const float scale = at.scale;
      // Not before the last tile's end(): its fence waits for all loads.
      load(at.v, p_.v.bits, v);
      if (tile + 1 < last) at = places(item, tile + 1);
      begin();
      convert(k, p_.k.bits, false);
      if (tile + 1 < last) load(at.k, p_.k.bits, k);
      convert(v, p_.v.bits, true);
      put_scale(scale);
      end();
    }
  }

  // ---- first and recent tokens: a thread has a row of K or of V, or half of it ----

  __device__ void put_exact(const Item& item, Region region, int tile) {
    const bool of_v = part_ % 2 == 1;
    constexpr int kPieces = kDim / 8, kEach = 2 * kPieces / Shape::kThreads;
    const ExactRows& rows = p_.exact_rows(region, of_v);
    // Past the last token the row is 0. All threads go the same way: barriers lie on it.
    const std::int64_t here = std::int64_t{tile} * kTokens + row_;
    const std::int64_t token = std::min(here, item.sequence.tokens[region] - 1);
    const bool there = here == token;
    const std::int64_t from = rows.offset(item.s * p_.d.kv_heads + item.head) +
                              item.sequence.slot(region, token) * rows.slot_stride;
    float x[8], most = 0;
    bool finite = true;
#pragma unroll 2
    for (int piece = 0; piece < kPieces; ++piece) {
      load_eight(rows.data, p_.d.exact, from + 8 * piece, x);
#pragma unroll
      for (const float e : x) {
        finite = finite && fabsf(e) < std::numeric_limits<float>::infinity();
        most = fmaxf(most, fabsf(e));
      }
    }
    const float unit = power_above(most), inverse = inverse_power(unit);
    begin();
#pragma unroll 2
    for (int i = 0; i < kEach; ++i) {
      const int piece = part_ / 2 * kEach + i;
      load_eight(rows.data, p_.d.exact, from + 8 * piece, x);
      const auto pair = [&](int e) {
        return cuda::store_pair<f16>(x[2 * e] * inverse, x[2 * e + 1] * inverse);
      };
      // What is not finite would meet the zero weights of queries that do not see it. So its row is
      // 0, and its scale NaN.
      put_piece(tile_at(of_v), piece,
                there && finite ? uint4{pair(0), pair(1), pair(2), pair(3)} : uint4{});
    }
    put_scale(!there ? 0.0f : finite ? unit : std::numeric_limits<float>::quiet_NaN());
    end();
  }
  __device__ static void load_eight(const void* data, DType type, std::int64_t at, float (&x)[8]) {
    const auto load = [&]<class X>(Type<X>) {
      const auto pack =
          *reinterpret_cast<const cuda::Pack<X, 8>*>(static_cast<const X*>(data) + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = pack.math(i);
    };
    switch (type) {
      case DType::f16: return load(Type<f16>());
      case DType::bf16: return load(Type<bf16>());
      default: return load(Type<float>());
    }
  }

  const Problem& p_;
  const PromptCut& cut_;
  const int row_, part_;
  int stage_ = 0, made_ = 0;
};

// ---- a warpgroup with 64 rows ----

// What a lane has of the columns of its two rows: element 4 t + 2 d + e is column
// 8 t + 2 (lane % 4) + e of row lane / 4 + 8 d of the warp's 16. f(i, d, column) for each.
template <int kDim, class F>
__device__ void for_columns(F&& f) {
  const int column = 2 * (lane_index() % 4);
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) f(i, i / 2 % 2, 8 * (i / 4) + column + i % 2);
}
__device__ inline float sum_of_quad(float x) {
  x += cuda::across(x, 1);
  return x + cuda::across(x, 2);
}
__device__ inline float most_of_quad(float x) {
  x = fmaxf(x, cuda::across(x, 1));
  return fmaxf(x, cuda::across(x, 2));
}

// H_m, or its transpose, on columns seen as [m, n].
template <int kDim, bool kInverse, int kCount>
__device__ void mix_columns(float (&x)[kCount]) {
  constexpr int kOrder = static_cast<int>(hadamard_factor(kDim)), kBlock = kDim / kOrder;
  if constexpr (kOrder == 1) return;
  float t[kOrder], y[kOrder];
  const auto multiply = [&] {
    cuda::paley_product<kOrder, kInverse>(t, y, std::make_integer_sequence<int, kOrder>());
  };
  if constexpr (kBlock >= 8) {
    constexpr int kStep = kBlock / 2;  // registers
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
#pragma unroll
      for (int c = 0; c < kOrder; ++c) t[c] = x[c * kStep + b];
      multiply();
#pragma unroll
      for (int c = 0; c < kOrder; ++c) x[c * kStep + b] = y[c];
    }
  } else {
    // Every other c is on the lane two on: of two columns side by side each takes all of one.
    static_assert(kBlock == 4);
    const bool second = (lane_index() & 2) != 0;
    const auto exchange = [&](float& a, float& b) {
      const float other = cuda::across(second ? a : b, 2);
      a = second ? other : a;
      b = second ? b : other;
    };
#pragma unroll
    for (int d = 0; d < 2; ++d) {
#pragma unroll
      for (int c = 0; c < kOrder; c += 2) {
        t[c] = x[2 * c + 2 * d];
        t[c + 1] = x[2 * c + 2 * d + 1];
        exchange(t[c], t[c + 1]);
      }
      multiply();
#pragma unroll
      for (int c = 0; c < kOrder; c += 2) {
        exchange(y[c], y[c + 1]);
        x[2 * c + 2 * d] = y[c];
        x[2 * c + 2 * d + 1] = y[c + 1];
      }
    }
  }
}

// P x, or its inverse: a butterfly for each bit of the column within n, and H_m.
template <int kDim, bool kInverse, int kCount>
__device__ void rotate_columns(const RowRotation& rotation, float (&x)[kCount]) {
  if (rotation.kind == Rotation::identity) return;
  constexpr int kBlock = kDim / static_cast<int>(hadamard_factor(kDim));
  for_columns<kDim>([&](int i, int, int column) {
    x[i] *= kInverse ? rotation.scale : rotation.table[column] * rotation.scale;
  });
  const auto butterflies = [&](int h) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  };
  butterflies(1);
#pragma unroll
  for (int h = 4; h < kBlock / 2; h *= 2) butterflies(h);
#pragma unroll
  for (int h = 1; h < 4 && h < kBlock / 2; h *= 2) {
    const float sign = (lane_index() & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) x[i] = fmaf(sign, x[i], cuda::across(x[i], h));
  }
  mix_columns<kDim, kInverse>(x);
  if (kInverse) for_columns<kDim>([&](int i, int, int column) { x[i] *= rotation.table[column]; });
}

template <class Shape>
class PromptQueries {
  static constexpr int kDim = Shape::kDim, kTokens = Shape::kTokens;
  static constexpr int kTiles = kTokens / 8;  // of 8 tokens
  using Item = PromptItem<Shape>;
  using Scales = typename Shape::Scales;

 public:
  __device__ PromptQueries(const Problem& p, const PromptCut& cut, float k_unit, float v_unit)
      : p_(p), cut_(cut), k_unit_(k_unit), v_unit_(v_unit), group_(warp_index() / 4) {}

  __device__ __forceinline__ void run() {
    for (item_ = static_cast<int>(blockIdx.x); item_ < cut_.items;
         item_ += static_cast<int>(gridDim.x))
      attend();
  }

 private:
  // Made anew where it is needed: registers are for sums.
  __device__ Item item() const { return Item(p_, cut_, item_); }
  __device__ static int row(const Item& item, int d) {
    return item.first_row + 16 * warp_index() + lane_index() / 4 + 8 * d;
  }
  __device__ bool has(const Item& item, int d) const { return row(item, d) < p_.head_rows; }
  __device__ QueryRow query(const Item& item, int d) const {
    const auto at = static_cast<unsigned>(has(item, d) ? row(item, d) : item.first_row);
    const unsigned index = cut_.group.divide(at), group = cut_.group.value();
    return {item.s, index, item.head * static_cast<std::int64_t>(group) + (at - index * group)};
  }
  template <class F>
  __device__ static void for_columns(F&& f) {
    attend::for_columns<kDim>(f);
  }

  __device__ void attend() {
    const bool exact = p_.d.first + p_.d.recent > 0;
    float l_exact[2] = {}, reference_exact[2] = {};
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      reference_[d] = kLowest;
      l_[d] = 0;
    }
#pragma unroll 1
    for (int i = exact ? 0 : 2; i < aura::kRegions; ++i) {
      const Region region = i == 0 ? aura::kFirst : i == 1 ? aura::kRecent : aura::kCoded;
      if (i == 0) {
        load_queries(false);
        clear_sums();
      }
      if (region == aura::kCoded) {
        if (exact) {
          for_columns([&](int j, int, int) { exact_sum(j) = o_[j]; });
#pragma unroll
          for (int d = 0; d < 2; ++d) {
            l_exact[d] = sum_of_quad(l_[d]);
            reference_exact[d] = reference_[d];
            l_[d] = 0;
          }
        }
        load_queries(true);
        clear_sums();
        // b is the same for all coded tokens of a row: it moves their reference instead.
#pragma unroll
        for (int d = 0; d < 2; ++d)
          if (p_.softcap == 0) reference_[d] -= b_[d];
      }
      take_tiles(region);
    }
    const Item item = this->item();
    float l[2], l_coded[2], of_exact[2], of_coded[2];
    bool none[2];  // is seen: sums are 0, even of a query that is NaN
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      if (p_.softcap == 0) reference_[d] += b_[d];
      none[d] = !sees_any(item, d);
      if (none[d]) {
        reference_[d] = reference_exact[d] = kLowest;
        l_[d] = l_exact[d] = 0;
      }
      const SinkWeight sink(p_, query(item, d).head, reference_[d] - kHeadroom);
      of_coded[d] = sink.factor;
      of_exact[d] =
          exact ? cuda::approximate_exp2(reference_exact[d] - reference_[d]) * sink.factor : 0.0f;
      l_coded[d] = sum_of_quad(l_[d]) * of_coded[d];
      l[d] = fmaf(l_exact[d], of_exact[d], l_coded[d] + sink.l);
    }
    for_columns([&](int i, int d, int) { o_[i] = none[d] ? 0 : o_[i] * (v_unit_ * of_coded[d]); });
    rotate_columns<kDim, true>(p_.v_rotation, o_);
    if (p_.v_mean != nullptr) {
      const float* const mean = p_.v_mean + item.head * kDim;
      for_columns([&](int i, int d, int column) { o_[i] = fmaf(l_coded[d], mean[column], o_[i]); });
    }
    if (exact)
      for_columns([&](int i, int d, int) {
        if (!none[d]) o_[i] = fmaf(exact_sum(i), of_exact[d], o_[i]);
      });
    switch (p_.d.element) {
      case DType::f16: return store<f16>(item, l);
      case DType::bf16: return store<bf16>(item, l);
      default: return store<float>(item, l);
    }
  }

  __device__ bool sees_any(const Item& item, int d) const {
    bool any = false;
    for (const Region region : {aura::kFirst, aura::kRecent, aura::kCoded}) {
      const aura::Span seen = item.sequence.seen(p_.d, query(item, d).query, region);
      any = any || seen.begin < seen.end;
    }
    return any;
  }

  template <class X>
  __device__ void store(const Item& item, const float (&l)[2]) {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      if (!has(item, d)) continue;
      X* const to = static_cast<X*>(p_.out) + query(item, d).offset(p_.out_stride);
      const float inverse = l[d] == 0 ? 0.0f : 1.0f / l[d];
      for_columns([&](int i, int of, int column) {
        if (of != d || i % 2 == 1) return;
        const auto result = [&](int e) {
          return cuda::store_math<X>(l[d] == 0 ? 0.0f : o_[i + e] * inverse);
        };
        *reinterpret_cast<cuda::Pack<X, 2>*>(to + column) = {result(0), result(1)};
      });
    }
  }

  __device__ float& exact_sum(int i) const {
    return cut_
        .exact_sums[(std::int64_t{blockIdx.x} * (kDim / 2) + i) * (kPromptGroups * kWarpgroup) +
                    threadIdx.x];
  }
  __device__ void clear_sums() {
#pragma unroll
    for (float& sum : o_) sum = 0;
  }

  // q in f16, rotated for coded tokens, and the unit of its logits.
  __device__ void load_queries(bool coded) {
    const Item item = this->item();
    float x[kDim / 2];
    float most[2] = {}, b[2] = {};
    const std::int64_t from[2] = {query(item, 0).offset(p_.q_stride),
                                  query(item, 1).offset(p_.q_stride)};
    const bool there[2] = {has(item, 0), has(item, 1)};
    const float* const mean =
        coded && p_.k_mean != nullptr ? p_.k_mean + item.head * kDim : nullptr;
    const auto load = [&]<class X>(Type<X>) {
      const X* const rows[2] = {static_cast<const X*>(p_.q) + from[0],
                                static_cast<const X*>(p_.q) + from[1]};
      for_columns([&](int i, int d, int column) {
        if (i % 2 == 1) return;
        const auto two = *reinterpret_cast<const cuda::Pack<X, 2>*>(rows[d] + column);
        x[i] = there[d] ? two.math(0) : 0.0f;
        x[i + 1] = there[d] ? two.math(1) : 0.0f;
      });
    };
    switch (p_.d.element) {
      case DType::f16: load(Type<f16>()); break;
      case DType::bf16: load(Type<bf16>()); break;
      default: load(Type<float>());
    }
    if (coded) for_columns([&](int i, int, int) { x[i] *= p_.scale; });
    if (mean != nullptr)
      for_columns([&](int i, int d, int column) { b[d] = fmaf(x[i], mean[column], b[d]); });
    if (coded) rotate_columns<kDim, false>(p_.k_rotation, x);
    for_columns([&](int i, int d, int) { most[d] = fmaxf(most[d], fabsf(x[i])); });
    float inverse[2];
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const float unit = power_above(most_of_quad(most[d]));
      inverse[d] = inverse_power(unit);
      unit_[d] = unit * (coded ? k_unit_ * kLog2E : p_.scale * kLog2E);
      b_[d] = sum_of_quad(b[d]) * kLog2E;
    }
    const auto pair = [&](int i) {
      return cuda::store_pair<f16>(x[2 * i] * inverse[i % 2], x[2 * i + 1] * inverse[i % 2]);
    };
    if constexpr (Shape::kLong) {
      cuda::barrier_wait(own_barrier(group_), kWarpgroup);  // the last ones have been read
      const int rows = queries_at() + 4 * (lane_index() % 4);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i)
        prompt_shared<std::uint32_t>(
            rows + cuda::tile_place(warp_index() % 4 * 16 + i % 2 * 8 + lane_index() / 4, i / 2)) =
            pair(i);
      cuda::fence_shared();
      cuda::barrier_wait(own_barrier(group_), kWarpgroup);
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) q_[i / 4][i % 4] = pair(i);
    }
  }
  __device__ int queries_at() const { return Shape::kQueries + group_ * Shape::kGroupQueries; }

  // ---- tiles ----

  __device__ void take_tiles(Region region) {
    const Item item = this->item();
    const int first = item.first[region], count = item.end[region] - first;
    if (count <= 0) return;
    int least = 0, most = 0x7fffffff;  // tokens that all of the warp's rows see
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const aura::Span seen = item.sequence.seen(p_.d, query(item, d).query, region);
      begin_[d] = static_cast<int>(seen.begin);
      end_[d] = static_cast<int>(std::max(seen.begin, seen.end));
      least = max(least, begin_[d]);
      most = min(most, end_[d]);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      least = max(least, __shfl_xor_sync(cuda::kAllLanes, least, step));
      most = min(most, __shfl_xor_sync(cuda::kAllLanes, most, step));
    }
    const auto weigh = [&](int n) {
      const int token = (first + n) * kTokens;
      const bool all = least <= token && token + kTokens <= most;
      return make_weights(token_scales<Shape>(stage_), token, all, region == aura::kCoded);
    };
    const auto raise_sums = [&] { for_columns([&](int i, int d, int) { o_[i] *= factor_[d]; }); };
    start_logits();
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(s_);
    if (weigh(0)) raise_sums();
    pack_weights();
    // The values of tile n - 1, and the weights of tile n.
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      const int stage = stage_;
      stage_ = next_stage(stage);
      start_logits();
      start_values(stage);
      cuda::warpgroup_wait<1>();
      cuda::warpgroup_hold(s_);
      const bool raised = weigh(n);
      finish_values(stage);
      cuda::warpgroup_hold(s_);  // not packed before: the products read w_
      if (raised) raise_sums();
      pack_weights();
    }
    start_values(stage_);
    finish_values(stage_);
    stage_ = next_stage(stage_);
  }

  __device__ void start_logits() {
    cuda::barrier_wait(full_barrier(stage_, group_), kPairThreads);
    const auto keys = matrix(stage_, Shape::kKeys);
    cuda::warpgroup_begin();
    if constexpr (Shape::kLong) {
      const auto queries = cuda::warpgroup_matrix(&prompt_shared<char>(queries_at()));
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i)
        cuda::warpgroup_multiply_f16(s_, queries.at(i / 4 * cuda::kTileBytes64 + i % 4 * 32),
                                     keys.at(i / 4 * Shape::kPart + i % 4 * 32), i > 0);
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i)
        cuda::warpgroup_multiply_f16(s_, q_[i], keys.at(i / 4 * Shape::kPart + i % 4 * 32), i > 0);
    }
    cuda::warpgroup_commit();
  }
  __device__ void start_values(int stage) {
    const auto values = matrix(stage, Shape::kValues);
    cuda::warpgroup_begin();
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      static_for<0, (Shape::kParts + 1) / 2>([&](auto two) {
        constexpr int kFirst = 2 * decltype(two)::value;
        const auto b = values.at(kFirst * Shape::kPart + i * 16 * cuda::kTileRowBytes);
        if constexpr (kFirst + 1 < Shape::kParts) {
          cuda::warpgroup_multiply_rows_f16<Shape::kPart>(
              reinterpret_cast<float(&)[64]>(o_[32 * kFirst]), w_[i], b);
        } else {
          cuda::warpgroup_multiply_rows_f16(reinterpret_cast<float(&)[32]>(o_[32 * kFirst]), w_[i],
                                            b, true);
        }
      });
    }
    cuda::warpgroup_commit();
  }
  __device__ void finish_values(int stage) {
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(o_);
    cuda::barrier_arrive(free_barrier(stage, group_), kPairThreads);
  }
  __device__ static cuda::WarpgroupMatrix matrix(int stage, int place) {
    return cuda::warpgroup_matrix(
        &prompt_shared<char>(Shape::kRing + stage * Shape::kStage + place));
  }

  __device__ static float2 two_of(const float (&of)[kTokens], int t) {
    return *reinterpret_cast<const float2*>(of + 8 * t + 2 * (lane_index() % 4));
  }

  // The weights of a tile's tokens from their logits, relative to the reference. If that rises,
  // sums are to be multiplied by factor_.
  __device__ bool make_weights(const Scales& scales, int first, bool all, bool coded) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 k = two_of(scales.k, t), exponent = two_of(scales.exponent, t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = s_[4 * t + e];
        s = fmaf(s * (e % 2 == 0 ? k.x : k.y), unit_[e / 2], e % 2 == 0 ? exponent.x : exponent.y);
      }
    }
    if (p_.softcap != 0) cap_logits(scales, coded);
    unsigned unseen[2] = {};  // bits 2 t + i
    if (!all) hide_unseen(first, unseen);
    float most[2] = {kLowest, kLowest};
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s_[i]);
    const auto base = [&](int d) { return reference_[d] - kHeadroom; };
    // A weight is exp2(s - base) ratio with ratio < 2. As subtraction keeps the order of its
    // operands, it is below 2^14.999 * 2 = 65491, however far it rounds; f16 has numbers up to
    // 65504.
    constexpr float kMostAbove = 14.999f;
    const bool raised = __any_sync(cuda::kAllLanes, most[0] - base(0) > kMostAbove ||
                                                        most[1] - base(1) > kMostAbove) != 0;
    if (raised) raise(most);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 ratio = two_of(scales.ratio, t), back = two_of(scales.back, t);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& w = s_[4 * t + 2 * d + i];
          w = cuda::approximate_exp2(w - base(d));
          l_[d] = fmaf(w, i == 0 ? back.x : back.y, l_[d]);
          w *= i == 0 ? ratio.x : ratio.y;
          if (!all && (unseen[d] >> (2 * t + i) & 1) != 0) w = 0;  // whatever the ratio is
        }
      }
    }
    return raised;
  }
  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
      w_[i / 4][i % 4] = cuda::store_pair<f16>(s_[2 * i], s_[2 * i + 1]);
  }
  __device__ void hide_unseen(int first, unsigned (&unseen)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int d = i / 2 % 2, token = first + 8 * (i / 4) + 2 * (lane_index() % 4) + i % 2;
      if (token >= begin_[d] && token < end_[d]) continue;
      s_[i] = kNone;
      unseen[d] |= 1u << (2 * (i / 4) + i % 2);
    }
  }
  __device__ void cap_logits(const Scales& scales, bool coded) {
#pragma unroll 1
    for (int t = 0; t < kTiles; ++t) {
      const float2 exponent = two_of(scales.exponent, t);
#pragma unroll
      for (int other = 0; other < kTiles; ++other) {
        if (other != t) continue;  // registers have no index
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = s_[4 * other + e];
          const float plus = e % 2 == 0 ? exponent.x : exponent.y;
          s = capped(s - plus + (coded ? b_[e / 2] : 0.0f), p_.softcap * kLog2E) + plus;
        }
      }
    }
  }
  __device__ void raise(const float (&most)[2]) {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const float to = fmaxf(reference_[d], most_of_quad(most[d]));
      factor_[d] = cuda::approximate_exp2(reference_[d] - to);
      reference_[d] = to;
      l_[d] *= factor_[d];
    }
  }

  const Problem& p_;
  const PromptCut& cut_;
  const float k_unit_, v_unit_;
  const int group_;
  int item_ = 0, stage_ = 0;
  std::uint32_t q_[Shape::kLong ? 1 : kDim / 16][4];
  float s_[4 * kTiles];             // logits, and weights
  std::uint32_t w_[kTiles / 2][4];  // weights as left sides, 16 tokens each
  float o_[32 * Shape::kParts];
  float unit_[2], b_[2], reference_[2], l_[2], factor_[2];
  int begin_[2], end_[2];
};

template <class Shape>
__global__ void __launch_bounds__(kPromptThreads, 1)
    attend_prompt(const __grid_constant__ Problem p, const __grid_constant__ PromptCut cut) {
  auto* const table = &prompt_shared<std::uint32_t>(Shape::kTable);
  float k_unit = 0, v_unit = 0;
  cuda::visit_bits(p.k.bits, [&](auto bits) {
    k_unit = fill_table<decltype(bits)::value, kPromptThreads / 32>(p.k.codebook, table);
  });
  cuda::visit_bits(p.v.bits, [&](auto bits) {
    v_unit = fill_table<decltype(bits)::value, kPromptThreads / 32>(p.v.codebook, table + 32);
  });
  __syncthreads();
  if (threadIdx.x >= kPromptGroups * kWarpgroup) {
    PromptRegisters::copy();
    PromptTokens<Shape>(p, cut).run();
  } else {
    PromptRegisters::compute();
    PromptQueries<Shape>(p, cut, k_unit, v_unit).run();
  }
}

inline PromptCut prompt_cut(const Op::Desc& d) {
  const std::int64_t rows = d.queries * d.group(), pairs = d.sequences * d.kv_heads;
  const std::int64_t tiles = (rows + kPromptRows - 1) / kPromptRows;
  return {.row_tiles = static_cast<int>(tiles),
          .items = static_cast<int>(tiles * pairs),
          .pairs = cuda::Divisor32(std::max<std::int64_t>(pairs, 1)),
          .kv_heads = cuda::Divisor32(d.kv_heads),
          .group = cuda::Divisor32(d.group()),
          .page_size = cuda::Divisor32(std::max<std::int64_t>(d.page_size, 1))};
}

template <class F>
Status visit_prompt_dim(const Op::Desc& d, F&& f) {
  return visit_dims<64, 80, 96, 128, 192, 256>(d, f);
}

inline std::int64_t prompt_blocks(const Op::Desc& d, int device) {
  return std::min(prompt_cut(d).items, cuda::limits(device).multiprocessors);
}

inline std::size_t prompt_bytes(const Op::Desc& d, int device) {
  if (d.first + d.recent == 0) return 0;
  return static_cast<std::size_t>(prompt_blocks(d, device) * kPromptRows * d.dim) * sizeof(float);
}

inline Status run_prompt(const Op::Desc& d, const Problem& p, int device, Stream stream,
                         Workspace workspace) {
  PromptCut cut = prompt_cut(d);
  cut.exact_sums = static_cast<float*>(workspace.data);
  return visit_prompt_dim(d, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using Shape = PromptShape<kDim>;
    return cuda::launch(
        Op::kName, attend_prompt<Shape>,
        {.blocks = prompt_blocks(d, device), .threads = kPromptThreads, .shared = Shape::kBytes},
        device, stream, p, cut);
  });
}

}  // namespace bittern::attend
