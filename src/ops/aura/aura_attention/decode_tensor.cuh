// Decoding on tensor cores: one query, all query heads of a KV head together. Codes become f16
// levels by a table in shared memory that has a copy for every bank, the levels are the left factor
// of both products,
//
//   logits [16 tokens, 8 heads] = levels of K [16, dim] q^T       o^T [dim, 8] = levels of V^T w^T
//
// and scales meet the logits and the weights w = p v_scale, which are O(tokens) instead of
// O(tokens dim). Tokens are taken in the order of their slots. A warp has every so many tiles of 16
// of them and its own sums; a team adds its warps' sums, a second kernel those of all teams, both
// in a fixed order. The warps of a block are one team, or two.
//
// Ranges. Queries and levels are divided by powers of two so that f16 holds them. Weights are
// relative to a reference that rises with the largest p |v_scale|, which becomes about 2^14. So
// what f16 loses below its least number is less than 2^-38 of that.
#pragma once
#include <numeric>

#include "ops/aura/aura_attention/attend.cuh"

namespace bittern::attend {

inline constexpr int kTile = 16;                  // tokens
inline constexpr std::int64_t kMostExact = 1024;  // first and recent tokens: one kernel adds them
inline constexpr int kHeadsAtOnce = 8;            // of a product
inline constexpr float kLog2E = 0x1.715476p0f;
inline constexpr float kHeadroom = 14;  // a weight becomes 2^14 where it raises the reference
inline constexpr float kMostWeight = 0x1p15f;
// The logarithms of a |v_scale| that moves the reference.
inline constexpr int kLeastLog = -60, kMostLog = 100;
inline constexpr float kLowest = -0x1p100f;  // below every logit

// A head's sums, relative to 2^reference: the reference, l, two numbers that nothing reads, and o,
// whose element dim / 8 r + 2 n + i is at 16 n + 2 r + i, r < 8, i < 2. (The lanes that write it
// then use all banks.)
inline constexpr int record_of(int dim) { return 4 + dim; }
template <int kDim>
__device__ int element_at(int place) {
  return place % 16 / 2 * (kDim / 8) + place / 16 * 2 + place % 2;
}

inline Status refuse(const char* field, std::int64_t found, const std::string& expected) {
  return unsupported(std::string(field) + ": " + std::to_string(found) + ", expected " + expected);
}

// f(std::integral_constant<int, dim>) for a head length among kDims.
template <int... kDims, class F>
Status visit_dims(const Op::Desc& d, F&& f) {
  Status status;
  const auto is = [&]<int kDim>(std::integral_constant<int, kDim> dim) {
    if (d.dim != kDim) return false;
    status = f(dim);
    return true;
  };
  if ((is(std::integral_constant<int, kDims>()) || ...)) return status;
  std::string expected;
  std::size_t left = sizeof...(kDims);
  for (const int dim : {kDims...}) {
    if (!expected.empty()) expected += left == 1 ? " or " : ", ";
    expected += std::to_string(dim);
    --left;
  }
  return refuse("dim", d.dim, expected);
}

// Teams of a block, as many as have room for their queries.
inline constexpr int most_teams(std::int64_t dim) { return dim <= 256 ? 2 : 1; }

// Splits of each KV head's tokens, teams of a block, and what blocks leave.
struct DecodeCut {
  int splits = 1, teams = 1;
  cuda::Divisor32 page_tiles;  // of a page, if there are any
  // [KV head of a sequence, split, head of it, record_of(dim)]. Null: nothing is to be added to
  // what a block has, so it writes the output.
  float* partials = nullptr;
};

template <int kKBits_, int kVBits_, int kDim_>
struct DecodeShape {
  static constexpr int kKBits = kKBits_, kVBits = kVBits_, kDim = kDim_;
  // Of a tile in the ring: rows of K, pairs of rows of V, scales. Pairs are moved apart for the
  // four lanes of a row to be in different banks, where they are whole pieces of a copy.
  static constexpr int kKRow = (kDim * kKBits + 31) / 32 * 4, kVRow = (kDim * kVBits + 31) / 32 * 4;
  static constexpr int kVApart = kVRow % 8 == 0 ? 32 : 0, kVPair = 2 * kVRow + kVApart;
  static constexpr int kVAt = kTile * kKRow, kScalesAt = kVAt + kTile / 2 * kVPair;
  static constexpr int kTileBytes = kScalesAt + 2 * kTile * 4;
  // Tiles that a warp takes at once.
  static constexpr int kAtOnce = (kKBits + kVBits) * kDim <= 8 * 128 ? 2 : 1;
  static constexpr int kStage = kAtOnce * kTileBytes;
  static constexpr int kTable = 256 * 256;  // bytes: an entry has 128 for K and 128 for V
  static constexpr int kCodebooks = 2 * 256 * 4;
  static constexpr int kMostTeams = most_teams(kDim);
  static constexpr int kTeamBytes = kHeadsAtOnce * kDim * 10 + 1024;  // room for a DecodeShared
  static constexpr int kRoom =
      (227 << 10) - kTable - kCodebooks - kMostTeams * kTeamBytes;  // for the ring
  // 12 warps have 168 registers a thread, 8 have 255. kEach of them are a team, or all are one.
  // Queries of long heads stay in shared memory.
  static constexpr bool kQueriesHeld = kDim <= 256;
  static constexpr int kMostEach = (kDim <= 128 ? 12 : 8) / kMostTeams;
  static constexpr int kRecord = record_of(kDim);
  // Of a warp: its stages, and later its sums.
  static constexpr int kSums = kHeadsAtOnce * kRecord * 4;
  static constexpr int kLeastRing = 2 * kStage > kSums ? 2 * kStage : kSums;
  static constexpr int kEachOfRoom = kRoom / (kMostTeams * kLeastRing);
  static constexpr int kEach = kMostEach < kEachOfRoom ? kMostEach : kEachOfRoom;
  static constexpr int kWarps = kMostTeams * kEach, kThreads = 32 * kWarps;
  static constexpr int kStagesOfRoom = kRoom / (kWarps * kStage);
  static constexpr int kStages = kStagesOfRoom > 4 ? 4 : kStagesOfRoom;
  static constexpr int kRing = kStages * kStage > kSums ? kStages* kStage : kSums;
  static_assert(kStages >= 2 && kWarps * kRing <= kRoom);
};

// Teams take items on their own. Two of them have more to begin and to end, but while one does, the
// other has tiles.
template <class Shape>
struct DecodeTeam {
  int warps, index, warp;  // the calling warp's own, of the team

  __device__ explicit DecodeTeam(const DecodeCut& cut)
      : warps(cut.teams == 1 ? Shape::kWarps : Shape::kEach),
        index(warp_index() / warps),
        warp(warp_index() % warps) {}
  __device__ int threads() const { return 32 * warps; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x) % threads(); }
  __device__ void sync() const { cuda::barrier_wait(1 + index, threads()); }
};

// ---- from codes to levels ----

// Bits `kAt` .. `kAt + kWidth - 1` of a bit string as an offset in the table: 256 times the number,
// and `base`, whose second byte is 0. Of fewer than 8 bits the number has more above them, which do
// not matter: the table repeats its entries.
template <int kAt, int kWidth, int kWords>
__device__ inline unsigned entry_of(const std::uint32_t (&words)[kWords], unsigned base) {
  static_assert(kWidth <= 8);
  constexpr int kWord = kAt / 32, kByte = kAt % 32 / 8;
  const std::uint32_t next = kWord + 1 < kWords ? words[kWord + 1] : 0;
  // Fields that begin at the same bit of a byte share the shift.
  return __byte_perm(__funnelshift_r(words[kWord], next, kAt % 8), base, 0x7604 | kByte << 4);
}

__device__ inline std::uint32_t table_at(const char* table, unsigned offset) {
  return *reinterpret_cast<const std::uint32_t*>(table + offset);
}

__device__ inline uint2 table_pair(const char* table, unsigned offset) {
  return *reinterpret_cast<const uint2*>(table + offset);
}

// Codes `kCode` and `kCode + 1` of a bit string as a pair of levels.
template <int kBits, int kCode, int kWords>
__device__ inline std::uint32_t neighbours(const char* table, const std::uint32_t (&words)[kWords],
                                           unsigned base) {
  if constexpr (kBits <= 4) {
    return table_at(table, entry_of<kCode * kBits, 2 * kBits>(words, base));
  } else {
    return __byte_perm(table_at(table, entry_of<kCode * kBits, kBits>(words, base)),
                       table_at(table, entry_of<(kCode + 1) * kBits, kBits>(words, base)), 0x7610);
  }
}

// Word `word` of a table's entry for K or V. 3 and 4 bits: the levels of two codes, a copy for each
// bank; more bits: that of one code, twice; 2 bits: of four codes, a copy for each pair of banks.
__device__ inline std::uint32_t table_word(const float* codebook, int bits, int entry, int word,
                                           float unit_inverse) {
  const int mask = (1 << bits) - 1;
  if (bits == 2) entry >>= word % 2 * 4;
  const int low = entry & mask, high = bits <= 4 ? entry >> bits & mask : low;
  return cuda::store_pair<f16>(codebook[low] * unit_inverse, codebook[high] * unit_inverse);
}

// Two bit strings of codes, those of two tokens, taken together: fields of 2 kBits bits, a code of
// each, first of the even codes and then of the odd ones.
template <int kBits, int kWords>
struct Paired {
  std::uint32_t even[kWords], odd[kWords];

  __device__ static constexpr std::uint32_t mask(int word) {
    std::uint32_t m = 0;
    for (int i = 0; i < 32; ++i)
      if ((32 * word + i) / kBits % 2 == 0) m |= 1u << i;
    return m;
  }
  __device__ Paired(const std::uint32_t (&a)[kWords], const std::uint32_t (&b)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t up = __funnelshift_l(i == 0 ? 0 : b[i - 1], b[i], kBits);
      const std::uint32_t down = __funnelshift_r(a[i], i + 1 < kWords ? a[i + 1] : 0, kBits);
      even[i] = (a[i] & mask(i)) | (up & ~mask(i));
      odd[i] = (down & mask(i)) | (b[i] & ~mask(i));
    }
  }
};

template <int kFirst, int kEnd, class F>
__device__ inline void static_for(const F& f) {
  if constexpr (kFirst < kEnd) {
    f(std::integral_constant<int, kFirst>());
    static_for<kFirst + 1, kEnd>(f);
  }
}

// The least power of two from 2^-126 to 2^126 that is not below x: x / it is at most 1, or 4 for
// the largest x.
__device__ inline float power_above(float x) {
  const unsigned bits = __float_as_uint(fminf(fmaxf(x, 0x1p-126f), 0x1p126f));
  return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}
__device__ inline float inverse_power(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// ---- a warp's tiles ----

// Where the tiles of a KV head's split lie: those that hold a token that the query sees. Slots past
// the last one begin anew.
struct Tiles {
  int s, head;
  int begin, end;   // slots of the tokens seen
  int first, last;  // tiles of the split

  __device__ Tiles(const Problem& p, const DecodeCut& cut, int item) {
    const int at = item / cut.splits, split = item - at * cut.splits;
    const auto heads = static_cast<int>(p.d.kv_heads);
    s = at / heads;
    head = at % heads;
    const aura::Sequence sequence = p.sequence(s);
    const aura::Span seen = sequence.seen(p.d, 0, aura::kCoded);
    const auto start = static_cast<int>(sequence.start[aura::kCoded]);
    begin = start + static_cast<int>(seen.begin);
    end = seen.empty() ? begin : start + static_cast<int>(seen.end);
    const int from = begin / kTile, to = begin < end ? (end + kTile - 1) / kTile : from;
    const int each = (to - from + cut.splits - 1) / cut.splits;
    first = from + split * each;
    last = first + each < to ? first + each : to;
  }
};

// A lane's share of the copies of tiles. Its pieces of 16 bytes are at fixed distances from the
// tile's first byte.
template <class Shape>
class TileCopies {
  static constexpr int kKPieces = kTile * Shape::kKRow / 16, kVPieces = kTile * Shape::kVRow / 16;

 public:
  __device__ TileCopies(const Problem& p, const DecodeCut& cut, const Tiles& tiles)
      : pages_(p.d.page_size == 0 ? nullptr : p.block_table),
        page_tiles_(cut.page_tiles),
        last_page_(static_cast<int>(p.d.pages) - 1),
        all_(static_cast<int>(p.d.capacity) / kTile),
        scale_pieces_(p.d.f16_scale ? kTile / 8 : kTile / 4) {
    const int lane = lane_index();
    const bool of_v = lane >= scale_pieces_;
    const CodedRows& scaled = of_v ? p.v : p.k;
    k_ = reinterpret_cast<const char*>(p.k.packed) + 16 * lane;
    v_ = reinterpret_cast<const char*>(p.v.packed) + 16 * lane;
    scale_ = static_cast<const char*>(scaled.scales) + 16 * (of_v ? lane - scale_pieces_ : lane);
    k_stride_ = 4 * p.k.packed_stride;
    v_stride_ = 4 * p.v.packed_stride;
    scale_stride_ = (p.d.f16_scale ? 2 : 4) * scaled.scale_stride;
    scale_to_ = Shape::kScalesAt + (of_v ? 4 * kTile - 16 * scale_pieces_ : 0) + 16 * lane;
    if (pages_ == nullptr) {
      move(tiles.s * p.d.kv_heads + tiles.head);
    } else {
      pages_ += tiles.s * p.table_stride;
      first_ = tiles.head * static_cast<int>(page_tiles_.value());
    }
  }

  // Starts copying kCount tiles, of which those from `end` on are not there.
  template <int kCount>
  __device__ void start(int tile, int end, char* to) const {
    if (pages_ == nullptr && tile + kCount <= end && (tile + kCount <= all_ || tile >= all_)) {
      if (tile >= all_) tile -= all_;  // they lie one after the other
#pragma unroll
      for (int n = 0; n < kCount; ++n) copy(tile, n, to + n * Shape::kTileBytes);
      return;
    }
#pragma unroll 1
    for (int n = 0; n < kCount && tile + n < end; ++n)
      start_one(tile + n, to + n * Shape::kTileBytes);
  }

 private:
  __device__ void start_one(int tile, char* to) const {
    if (tile >= all_) tile -= all_;
    if (pages_ == nullptr) return copy(tile, 0, to);
    TileCopies from = *this;
    const auto index = static_cast<int>(page_tiles_.divide(static_cast<unsigned>(tile)));
    const int page = pages_[index];
    from.move(page < 0 ? 0 : page > last_page_ ? last_page_ : page);
    from.copy(tile + first_ - index * static_cast<int>(page_tiles_.value()), 0, to);
  }
  // Tile `tile` + n.
  __device__ void copy(int tile, int n, char* to) const {
    const int lane = lane_index();
    const char* const k =
        k_ + std::int64_t{tile} * (kTile * Shape::kKRow) + n * kTile * Shape::kKRow;
    const char* const v =
        v_ + std::int64_t{tile} * (kTile * Shape::kVRow) + n * kTile * Shape::kVRow;
#pragma unroll
    for (int i = 0; i < (kKPieces + 31) / 32; ++i) {
      const int piece = 32 * i + lane;
      if (kKPieces % 32 == 0 || piece < kKPieces) cuda::copy_async_16(to + 16 * piece, k + 512 * i);
    }
#pragma unroll
    for (int i = 0; i < (kVPieces + 31) / 32; ++i) {
      const int piece = 32 * i + lane, pair = 16 * piece / (2 * Shape::kVRow);
      if (kVPieces % 32 == 0 || piece < kVPieces)
        cuda::copy_async_16(to + Shape::kVAt + 16 * piece + Shape::kVApart * pair, v + 512 * i);
    }
    if (lane < 2 * scale_pieces_)
      cuda::copy_async_16(to + scale_to_, scale_ + std::int64_t{tile + n} * (16 * scale_pieces_));
  }
  // To a page, or to a KV head of a sequence where there are no pages.
  __device__ void move(std::int64_t to) {
    k_ += to * k_stride_;
    v_ += to * v_stride_;
    scale_ += to * scale_stride_;
  }

  const char *k_, *v_, *scale_;
  std::int64_t k_stride_, v_stride_, scale_stride_;  // in bytes
  const std::int32_t* pages_;
  cuda::Divisor32 page_tiles_;
  int last_page_, all_, scale_pieces_, first_ = 0, scale_to_;
};

// Few models need it: not among the instructions that all of them fetch.
__device__ __noinline__ inline float capped(float y, float most) {
  return most * math::tanh(y / most);
}

// A sink beside sums that are relative to 2^reference: l of the sink, and what those sums are to be
// multiplied by. However far the sink is from the tokens, neither overflows, and the quotient is 0
// only where f32 has no number for it.
struct SinkWeight {
  float l = 0, factor = 1;
  __device__ SinkWeight(const Problem& p, std::int64_t head, float reference) {
    if (p.sinks == nullptr) return;
    constexpr float kMostSink = 100;  // log2 of l
    const float sink = p.sinks[head] * kLog2E, base = fmaxf(reference, sink - kMostSink);
    l = cuda::approximate_exp2(sink - base);
    factor = cuda::approximate_exp2(reference - base);
  }
};

template <class Shape>
class DecodeWarp {
  static constexpr int kKBits = Shape::kKBits, kVBits = Shape::kVBits, kDim = Shape::kDim;
  static constexpr int kAtOnce = Shape::kAtOnce;
  static constexpr int kKCodes = kDim / 4, kVCodes = kDim / 8;  // of a lane, in a token's row
  static constexpr int kKWords = (kKCodes * kKBits + 31) / 32;
  static constexpr int kVWords = (kVCodes * kVBits + 31) / 32;
  static constexpr int kSteps = kDim / 16;  // products of K, and tiles of o
  static_assert(kDim % 16 == 0);

 public:
  __device__ DecodeWarp(const Problem& p, const TileCopies<Shape>& copies, const Tiles& tiles,
                        const DecodeTeam<Shape>& team, const char* table, char* ring)
      : p_(p),
        copies_(copies),
        tiles_(tiles),
        team_(team),
        table_(table),
        ring_(ring),
        begin_(tiles.begin),
        tokens_(std::min(tiles.end, tiles.last * kTile) - tiles.begin) {}

  // The first copies.
  __device__ void start() const {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i)
      fetch(tiles_.first + (team_.warp + i * team_.warps) * kAtOnce, i);
  }
  // Then q in f16, and by head the unit of its logits and b.
  __device__ void run(const f16* q, const float* units, float k_unit, const float* b) {
    constexpr int kStages = Shape::kStages;
    const int lane = lane_index(), step = team_.warps * kAtOnce;
    q_at_ = reinterpret_cast<const uint2*>(q) + lane;
    if constexpr (Shape::kQueriesHeld) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) q_[i] = q_at_[32 * i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unit_[i] = units[2 * (lane % 4) + i] * k_unit;
      b_[i] = b[2 * (lane % 4) + i];
    }
    int stage = 0;
#pragma unroll 1
    for (int tile = tiles_.first + team_.warp * kAtOnce; tile < tiles_.last; tile += step) {
      cuda::copy_async_wait<kStages - 2>();
      __syncwarp();
      // The stage that was read last is free.
      fetch(tile + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
      attend(tile, ring_ + stage * Shape::kStage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cuda::copy_async_wait<0>();
  }

  // The warp's sums: [head, reference, l, o].
  __device__ void put_out(float* to) const {
    const int lane = lane_index(), r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float l = l_[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) l += cuda::across(l, step);
      float* const head = to + (c + i) * Shape::kRecord;
      if (r == 0) {
        head[0] = reference_[i];
        head[1] = l;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Codes 2 step and 2 step + 1 of a lane.
        const int even = step & ~1, at = 2 * (step % 2) + i;
        *reinterpret_cast<float2*>(head + 4 + 16 * step + 2 * r) =
            crosses(step) ? make_float2(o_[even][at], o_[even + 1][at])
                          : make_float2(o_[step][i], o_[step][2 + i]);
      }
    }
  }

 private:
  // With 2 bits of V a step has codes 4 n and 4 n + 2 of a lane, the next 4 n + 1 and 4 n + 3:
  // those that one read finds.
  __device__ static constexpr bool crosses(int step) { return kVBits == 2 && (step | 1) < kSteps; }
  // Every lane ends a group of copies, also where there is no tile.
  __device__ void fetch(int tile, int stage) const {
    char* const to = ring_ + stage * Shape::kStage;
    copies_.template start<kAtOnce>(tile, tiles_.last, to);
    cuda::copy_async_commit();
  }

  // Tiles `tile` and on. A lane has the logits of tokens r and r + 8, heads 2 q and 2 q + 1.
  __device__ void attend(int tile, const char* stage) {
    const int r = lane_index() / 4;
    float k_scale[kAtOnce][2], v_scale[kAtOnce][2], logit[kAtOnce][2][2], p[kAtOnce][2][2];
    load_scales(stage, k_scale, v_scale);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      float x[4];
      multiply_keys(stage + n * Shape::kTileBytes, x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        logit[n][i / 2][i % 2] = fmaf(x[i], k_scale[n][i / 2] * unit_[i % 2], b_[i % 2]);
    }
    if (p_.softcap != 0) {
#pragma unroll
      for (int i = 0; i < 4 * kAtOnce; ++i) {
        float& y = logit[i / 4][i / 2 % 2][i % 2];
        y = capped(y, p_.softcap * kLog2E);
      }
    }
    const int first = tile * kTile - begin_;
    if (first < 0 || first + kAtOnce * kTile > tokens_) {
      // Not all of them are seen, and nothing of a tile beyond the last.
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int token = first + r + 8 * i;
        if (token >= 0 && token < tokens_) continue;
        logit[i / 2][i % 2][0] = logit[i / 2][i % 2][1] = kNone;
        v_scale[i / 2][i % 2] = 0;
      }
    }
    if (__any_sync(cuda::kAllLanes, weigh(logit, v_scale, p) > kMostWeight)) {
      raise(logit, v_scale);
      weigh(logit, v_scale, p);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      // Weights, transposed: a column of heads for each token becomes a row.
      std::uint32_t w[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) l_[i] += p[n][half][i];
        w[half] = cuda::transpose_tile(cuda::store_pair<f16>(p[n][half][0] * v_scale[n][half],
                                                             p[n][half][1] * v_scale[n][half]));
      }
      multiply_values(stage + n * Shape::kTileBytes, w);
    }
  }

  // A |v_scale| as it moves the reference.
  __device__ static float magnitude(float v_scale) {
    return fminf(fmaxf(fabsf(v_scale), math::power_of_two(kLeastLog)),
                 math::power_of_two(kMostLog));
  }
  // p of these tokens. The largest weight is returned.
  __device__ float weigh(const float (&logit)[kAtOnce][2][2], const float (&v_scale)[kAtOnce][2],
                         float (&p)[kAtOnce][2][2]) const {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4 * kAtOnce; ++i) {
      const int n = i / 4, half = i / 2 % 2;
      p[n][half][i % 2] =
          cuda::approximate_exp2(logit[n][half][i % 2] - (reference_[i % 2] - kHeadroom));
      most = fmaxf(most, p[n][half][i % 2] * magnitude(v_scale[n][half]));
    }
    return most;
  }

  // To the largest of what these tokens bring.
  __device__ void raise(const float (&logit)[kAtOnce][2][2], const float (&v_scale)[kAtOnce][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = reference_[i];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          most =
              fmaxf(most, logit[n][half][i] + cuda::approximate_log2(magnitude(v_scale[n][half])));
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, cuda::across(most, step));
      const float factor = cuda::approximate_exp2(reference_[i] - most);
      reference_[i] = most;
      l_[i] *= factor;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        o_[step][i] *= factor;
        o_[step][2 + i] *= factor;
      }
    }
  }

  __device__ uint2 query(int step) const {
    if constexpr (Shape::kQueriesHeld) return q_[step];
    return q_at_[32 * step];
  }
  // x of tokens r and r + 8.
  __device__ void multiply_keys(const char* tile, float (&sum)[4]) const {
    const int lane = lane_index(), r = lane / 4, q = lane % 4;
    std::uint32_t k[2][kKWords];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_codes<kKCodes * kKBits>(tile + (r + 8 * half) * Shape::kKRow, q, k[half]);
    // 2 bits: two codes of each token, whose levels one read brings into neighbouring registers.
    const Paired<4, kKWords> both(k[0], k[1]);
    float x[2][4] = {};
    static_for<0, kSteps>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      std::uint32_t a[4];
      if constexpr (kKBits == 2) {
        const unsigned base = 8 * static_cast<unsigned>(lane % 16);
        const uint2 low = table_pair(table_, entry_of<8 * kStep, 8>(both.even, base));
        const uint2 high = table_pair(table_, entry_of<8 * kStep, 8>(both.odd, base));
        a[0] = low.x, a[1] = low.y, a[2] = high.x, a[3] = high.y;
      } else {
        const unsigned base = 4 * static_cast<unsigned>(lane);
        a[0] = neighbours<kKBits, 4 * kStep>(table_, k[0], base);
        a[1] = neighbours<kKBits, 4 * kStep>(table_, k[1], base);
        a[2] = neighbours<kKBits, 4 * kStep + 2>(table_, k[0], base);
        a[3] = neighbours<kKBits, 4 * kStep + 2>(table_, k[1], base);
      }
      const uint2 q = query(kStep);
      cuda::multiply_f16(x[kStep % 2], a, {q.x, q.y});
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = x[0][i] + x[1][i];
  }

  // Adds the values of tokens 2 q, 2 q + 1 and 8 more.
  __device__ void multiply_values(const char* tile, const std::uint32_t (&w)[2]) {
    const int lane = lane_index(), r = lane / 4, q = lane % 4;
    std::uint32_t v[2][2][kVWords];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_codes<kVCodes * kVBits>(
            tile + Shape::kVAt + (q + 4 * half) * Shape::kVPair + i * Shape::kVRow, r, v[half][i]);
    }
    const char* const table = table_ + 128;
    const unsigned base = 4 * static_cast<unsigned>(lane);
    if constexpr (kVBits == 2) {
      const Paired<kVBits, kVWords> low(v[0][0], v[0][1]), high(v[1][0], v[1][1]);
      const unsigned pairs = 8 * static_cast<unsigned>(lane % 16);
      static_for<0, kSteps>([&](auto step) {
        constexpr int kStep = decltype(step)::value, kAt = 8 * (kStep / 2);
        const auto load = [&](const auto& tokens, int odd) {
          return table_pair(table, entry_of<kAt, 8>(odd == 0 ? tokens.even : tokens.odd, pairs));
        };
        if constexpr (crosses(kStep)) {
          const uint2 a = load(low, kStep % 2), b = load(high, kStep % 2);
          cuda::multiply_f16(o_[kStep], {a.x, a.y, b.x, b.y}, w);
        } else {
          cuda::multiply_f16(o_[kStep],
                             {load(low, 0).x, load(low, 1).x, load(high, 0).x, load(high, 1).x}, w);
        }
      });
    } else if constexpr (kVBits <= 4) {
      const Paired<kVBits, kVWords> low(v[0][0], v[0][1]), high(v[1][0], v[1][1]);
      static_for<0, kSteps>([&](auto step) {
        constexpr int kAt = decltype(step)::value * 2 * kVBits;
        cuda::multiply_f16(o_[decltype(step)::value],
                           {table_at(table, entry_of<kAt, 2 * kVBits>(low.even, base)),
                            table_at(table, entry_of<kAt, 2 * kVBits>(low.odd, base)),
                            table_at(table, entry_of<kAt, 2 * kVBits>(high.even, base)),
                            table_at(table, entry_of<kAt, 2 * kVBits>(high.odd, base))},
                           w);
      });
    } else {
      static_for<0, kSteps>([&](auto step) {
        constexpr int kCode = 2 * decltype(step)::value;
        const auto pair = [&](auto code, const std::uint32_t(&both)[2][kVWords]) {
          constexpr int kAt = decltype(code)::value * kVBits;
          return __byte_perm(table_at(table, entry_of<kAt, kVBits>(both[0], base)),
                             table_at(table, entry_of<kAt, kVBits>(both[1], base)), 0x7610);
        };
        constexpr std::integral_constant<int, kCode> kEven;
        constexpr std::integral_constant<int, kCode + 1> kOdd;
        cuda::multiply_f16(
            o_[decltype(step)::value],
            {pair(kEven, v[0]), pair(kOdd, v[0]), pair(kEven, v[1]), pair(kOdd, v[1])}, w);
      });
    }
  }

  // Of tokens r and r + 8.
  __device__ void load_scales(const char* stage, float (&k)[kAtOnce][2],
                              float (&v)[kAtOnce][2]) const {
    const auto load = [&]<class E>(E) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* const from = stage + n * Shape::kTileBytes + Shape::kScalesAt;
          const int token = lane_index() / 4 + 8 * half;
          k[n][half] = cuda::load_math(reinterpret_cast<const E*>(from)[token]);
          v[n][half] = cuda::load_math(reinterpret_cast<const E*>(from + 4 * kTile)[token]);
        }
      }
    };
    if (p_.d.f16_scale) {
      load(f16());
    } else {
      load(float());
    }
  }
  // Words from an address that is a multiple of as many bytes as divide them.
  template <int kWords>
  __device__ static void load_words(const char* from, std::uint32_t (&to)[kWords]) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + 4 * i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
      }
    } else if constexpr (kWords % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        const uint2 x = *reinterpret_cast<const uint2*>(from + 4 * i);
        to[i] = x.x, to[i + 1] = x.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        to[i] = *reinterpret_cast<const std::uint32_t*>(from + 4 * i);
    }
  }
  // The `index`-th kBits of a row.
  template <int kBits, int kWords>
  __device__ static void load_codes(const char* row, int index, std::uint32_t (&to)[kWords]) {
    if constexpr (kBits % 32 == 0) {
      load_words(row + index * (kBits / 8), to);
    } else {
      const int at = index * kBits;
      const auto* const from = reinterpret_cast<const std::uint32_t*>(row) + at / 32;
      // Whether they end beyond as many words. The next one is read even if it is another row's.
      constexpr bool kBeyond = kBits % 32 > std::gcd(kBits, 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const std::uint32_t next = kBeyond || i + 1 < kWords ? from[i + 1] : 0;
        to[i] = __funnelshift_r(from[i], next, static_cast<unsigned>(at) % 32);
      }
    }
  }

  const Problem& p_;
  const TileCopies<Shape>& copies_;
  const Tiles& tiles_;
  const DecodeTeam<Shape>& team_;
  const char* const table_;
  char* const ring_;
  const int begin_;
  const int tokens_;  // from there to the end of the split
  const uint2* q_at_;
  uint2 q_[Shape::kQueriesHeld ? kSteps : 1];
  float unit_[2], b_[2], reference_[2] = {kLowest, kLowest}, l_[2] = {};
  float o_[kSteps][4] = {};
};

// ---- the kernels ----

// Of a team.
template <class Shape>
struct DecodeShared {
  alignas(16) f16 q[kHeadsAtOnce * Shape::kDim];  // in query_place's order
  float units[kHeadsAtOnce], b[kHeadsAtOnce];     // the units without that of K's levels
  float factors[Shape::kWarps * kHeadsAtOnce], most[kHeadsAtOnce], l[kHeadsAtOnce];
  float rows[kHeadsAtOnce][2][Shape::kDim];  // of load_queries and finish_row
};

__device__ inline float most_across(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, cuda::across(x, step));
  return x;
}

// Where element j of a head's query lies: lane 4 head + i takes four of its i-th quarter at a time.
template <int kDim>
__device__ int query_place(int head, int j) {
  constexpr int kQuarter = kDim / 4;
  const int lane = 4 * head + j / kQuarter, step = j % kQuarter / 4;
  return (32 * step + lane) * 4 + j % 4;
}

// The queries of a KV head in f16, by a team's warps. `meanwhile()` is called once by each warp,
// while its first one is on its way.
template <class Shape, class F>
__device__ void load_queries(const Problem& p, const Tiles& tiles, const DecodeTeam<Shape>& team,
                             DecodeShared<Shape>& t, const F& meanwhile) {
  constexpr int kDim = Shape::kDim, kEach = (kDim + 31) / 32;
  const int lane = lane_index();
  float x[kEach] = {}, mean[kEach] = {};
  const auto load = [&](int head) {
    if (head >= p.group) return;
    const std::int64_t from = QueryRow(p, tiles.s, tiles.head, head).offset(p.q_stride);
    const auto load_as = [&]<class X>(Type<X>) {
      const X* const q = static_cast<const X*>(p.q) + from;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (lane + 32 * i < kDim) x[i] = cuda::load_math(q[lane + 32 * i]);
    };
    switch (p.d.element) {
      case DType::f16: load_as(Type<f16>()); break;
      case DType::bf16: load_as(Type<bf16>()); break;
      default: load_as(Type<float>());
    }
    if (p.k_mean == nullptr) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i < kDim) mean[i] = p.k_mean[tiles.head * kDim + lane + 32 * i];
  };
  load(team.warp);
  meanwhile();
  for (int head = team.warp; head < kHeadsAtOnce; head += team.warps) {
    if (head >= p.group) {
      for (int j = lane; j < kDim; j += 32) t.q[query_place<kDim>(head, j)] = {};
      if (lane == 0) t.units[head] = t.b[head] = 0;
      continue;
    }
    if (head != team.warp) load(head);
    float* const row = t.rows[head][0];
    float b = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i < kDim) row[lane + 32 * i] = x[i] * p.scale;
      b = fmaf(x[i] * p.scale, mean[i], b);
    }
    b = cuda::sum_across(b, 16);
    __syncwarp();
    const float* const r = cuda::rotate_by_warp<4>(p.k_rotation, row, t.rows[head][1]);
    for (int j = lane; j < kDim; j += 32) most = fmaxf(most, fabsf(r[j]));
    const float unit = power_above(most_across(most)), inverse = inverse_power(unit);
    for (int j = lane; j < kDim; j += 32)
      t.q[query_place<kDim>(head, j)] = cuda::store_math<f16>(r[j] * inverse);
    if (lane == 0) {
      t.units[head] = unit * kLog2E;
      t.b[head] = b * kLog2E;
    }
  }
}

// A codebook's column of the table, by a block. The unit of its levels, a power of two above all of
// them, is returned.
template <int kBits, int kWarps>
__device__ float fill_table(const float* codebook, std::uint32_t* table) {
  float most = 0;
  for (int i = lane_index(); i < 1 << kBits; i += 32) most = fmaxf(most, fabsf(codebook[i]));
  const float unit = power_above(most_across(most)), inverse = inverse_power(unit);
  constexpr int kEach = 8;  // their reads do not wait for each other's stores
#pragma unroll 1
  for (int first = warp_index(); first < 256; first += kEach * kWarps) {
    std::uint32_t words[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      words[i] = table_word(codebook, kBits, (first + i * kWarps) % 256, lane_index(), inverse);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int entry = first + i * kWarps;
      if (entry < 256) table[64 * entry + lane_index()] = words[i];
    }
  }
  return unit;
}

template <class Shape>
__device__ void decode_items(const Problem& p, const DecodeCut& cut) {
  char* const table = cuda::dynamic_shared<char>();
  auto* const codebooks = reinterpret_cast<float*>(table + Shape::kTable);
  char* const rings = table + Shape::kTable + Shape::kCodebooks;
  const DecodeTeam<Shape> team(cut);
  auto& t =
      reinterpret_cast<DecodeShared<Shape>*>(rings + Shape::kWarps * Shape::kRing)[team.index];
  auto* const sums = reinterpret_cast<float*>(rings + team.index * team.warps * Shape::kRing);
  static_assert(sizeof t <= Shape::kTeamBytes);
  constexpr int kRecord = Shape::kRecord, kWarpSums = kHeadsAtOnce * kRecord;
  const int thread = team.thread();
  const int group = static_cast<int>(p.group);
  cuda::begin_next_kernel();  // it waits for this one's end
  // Codebooks are on their way while the first item begins.
  constexpr int kOfThread = (256 + Shape::kThreads - 1) / Shape::kThreads;
  const auto for_codes = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (const int code = static_cast<int>(threadIdx.x) + i * Shape::kThreads; code < 256)
        f(i, code);
  };
  float k_level[kOfThread] = {}, v_level[kOfThread] = {};
  for_codes([&](int i, int code) {
    if (code < 1 << Shape::kKBits) k_level[i] = p.k.codebook[code];
    if (code < 1 << Shape::kVBits) v_level[i] = p.v.codebook[code];
  });
  float k_unit = 0, v_unit = 0;
  const auto fill = [&] {  // by all teams
    for_codes([&](int i, int code) {
      codebooks[code] = k_level[i];
      codebooks[256 + code] = v_level[i];
    });
    __syncthreads();
    auto* const words = reinterpret_cast<std::uint32_t*>(table);
    k_unit = fill_table<Shape::kKBits, Shape::kWarps>(codebooks, words);
    v_unit = fill_table<Shape::kVBits, Shape::kWarps>(codebooks + 256, words + 32);
    __syncthreads();
  };
  const int items = static_cast<int>(p.d.sequences * p.d.kv_heads) * cut.splits;
  const auto blocks = static_cast<int>(gridDim.x);
  for (int item = static_cast<int>(blockIdx.x) + team.index * blocks; item < items;
       item += cut.teams * blocks) {
    const Tiles tiles(p, cut, item);
    const TileCopies<Shape> copies(p, cut, tiles);
    DecodeWarp<Shape> warp(p, copies, tiles, team, table, rings + warp_index() * Shape::kRing);
    team.sync();  // the last sums have been read
    warp.start();
    load_queries<Shape>(p, tiles, team, t, [&] {
      if (k_unit == 0) fill();
    });
    team.sync();
    warp.run(t.q, t.units, k_unit, t.b);
    team.sync();
    warp.put_out(sums + team.warp * kWarpSums);
    team.sync();
    // f(w) for the team's warps, in their order.
    const auto for_warps = [&](const auto& f) {
#pragma unroll 1
      for (int first = 0; first < team.warps; first += Shape::kEach) {
#pragma unroll
        for (int w = 0; w < Shape::kEach; ++w) f(first + w);
      }
    };
    for (int i = thread; i < team.warps * kHeadsAtOnce; i += team.threads()) {
      const float* const from = sums + i % kHeadsAtOnce * kRecord;
      float most = kLowest;
      for_warps([&](int w) { most = fmaxf(most, from[w * kWarpSums]); });
      t.factors[i] = cuda::approximate_exp2(from[i / kHeadsAtOnce * kWarpSums] - most);
      if (i < kHeadsAtOnce) t.most[i] = most;
    }
    team.sync();
    for (int i = thread; i < group * kRecord; i += team.threads()) {
      const int head = i / kRecord, at = i % kRecord;
      float sum = 0;
      for_warps([&](int w) {
        sum = fmaf(sums[w * kWarpSums + i], t.factors[w * kHeadsAtOnce + head], sum);
      });
      if (at == 0) sum = t.most[head] - kHeadroom;
      if (at >= 4) sum *= v_unit;
      if (cut.partials != nullptr) {
        cut.partials[std::int64_t{item} * group * kRecord + i] = sum;
      } else if (at == 0) {
        t.most[head] = sum;  // of this thread alone
      } else if (at == 1) {
        t.l[head] = sum;
      } else if (at >= 4) {
        t.rows[head][0][element_at<Shape::kDim>(at - 4)] = sum;
      }
    }
    if (cut.partials != nullptr) continue;
    team.sync();
    for (int head = team.warp; head < group; head += team.warps) {
      const QueryRow query(p, tiles.s, tiles.head, head);
      const SinkWeight sink(p, query.head, t.most[head]);
      const float l_coded = t.l[head] * sink.factor;
      finish_row(p, query, l_coded + sink.l, l_coded, t.rows[head][0], t.rows[head][1], nullptr,
                 sink.factor);
    }
  }
  if (k_unit == 0) fill();  // a team without an item
}

// No code for devices before sm_90, whose shared memory is too small.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_splits(const __grid_constant__ Problem p, const __grid_constant__ DecodeCut cut) {
  if constexpr (cuda::kHasBulkCopies) decode_items<Shape>(p, cut);
}

// The splits' sums, and first and recent tokens: a query head to a block, whose threads have a
// column each of one split and token in kParts.
template <int kDim, int kParts_>
struct DecodeMerge {
  static constexpr int kParts = kParts_, kColumns = (kDim + 31) / 32 * 32;  // in whole warps
  static constexpr int kThreads = kParts * kColumns;
  static constexpr int kAtOnce = 256;  // tokens
  float a[kDim], weights[kAtOnce];
  float l[kParts], l_coded[kParts], coded[kParts][kDim], exact[kParts][kDim], spare[kDim];
};

template <int kDim, int kParts>
__global__ void __launch_bounds__(DecodeMerge<kDim, kParts>::kThreads)
    decode_merge(const __grid_constant__ Problem p, const __grid_constant__ DecodeCut cut) {
  using Shared = DecodeMerge<kDim, kParts>;
  constexpr int kAtOnce = Shared::kAtOnce;
  constexpr int kRecord = record_of(kDim);
  auto& t = *cuda::dynamic_shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x), lane = lane_index();
  const int part = thread / Shared::kColumns, place = thread % Shared::kColumns;
  const int column = std::min(place, kDim - 1);  // surplus threads repeat the last column
  const auto heads = static_cast<int>(p.d.heads), group = static_cast<int>(p.group);
  const int rows = static_cast<int>(p.d.sequences) * heads;
  cuda::wait_for_last_kernel();
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    const int s = row / heads, h = row % heads, kv = h / group;
    const QueryRow query(p, s, kv, h % group);
    const std::int64_t kv_row = s * p.d.kv_heads + kv;
    float m = p.sinks != nullptr ? p.sinks[h] * kLog2E : kLowest;
    float l = p.sinks != nullptr && part == 0 ? 1.0f : 0.0f;
    float l_coded = 0, o_coded = 0, o_exact = 0;
    // What has been added is relative to 2^m.
    const auto raise = [&](float most) {
      const float factor = cuda::approximate_exp2(m - most);
      m = most;
      l *= factor, l_coded *= factor, o_coded *= factor, o_exact *= factor;
    };
    const int step = group * kRecord;
    const float* const from = cut.partials + kv_row * cut.splits * step + h % group * kRecord;
    // So many splits are under way together.
    constexpr int kEach = 10;
    float m_split[kEach], l_split[kEach], o_split[kEach];
    const auto load = [&](int first) {
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        const int at = first + n * kParts;
        const bool there = at < cut.splits;
        m_split[n] = there ? from[at * step] : kLowest;
        l_split[n] = there ? from[at * step + 1] : 0.0f;
        o_split[n] = there ? from[at * step + 4 + column] : 0.0f;
      }
    };
    load(part);
    float most = m;
    for (int i = lane; i < cut.splits; i += 32) most = fmaxf(most, from[i * step]);
    raise(most_across(most));
    for (int first = part; first < cut.splits; first += kEach * kParts) {
      if (first != part) load(first);
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        const float weight = cuda::approximate_exp2(m_split[n] - m);
        l_coded = fmaf(l_split[n], weight, l_coded);
        o_coded = fmaf(o_split[n], weight, o_coded);
      }
    }
    const bool has_exact = p.d.first + p.d.recent > 0;
    if (has_exact) {
      // `weights` become those of `count` more, whose logarithms they were.
      const auto weigh = [&](int count) {
        float largest = m;
        for (int i = 0; i < count; ++i) largest = fmaxf(largest, t.weights[i]);
        raise(largest);
        __syncthreads();
        for (int i = thread; i < count; i += Shared::kThreads)
          t.weights[i] = cuda::approximate_exp2(t.weights[i] - m);
        __syncthreads();
      };
      const aura::Sequence sequence = p.sequence(s);
      __syncthreads();
      if (part == 0)
        t.a[column] =
            cuda::load_element(p.q, p.d.element, query.offset(p.q_stride) + column) * p.scale;
      for (const Region region : {aura::kFirst, aura::kRecent}) {
        const aura::Span seen = sequence.seen(p.d, 0, region);
        if (seen.empty()) continue;
        const ExactRows &keys = p.exact_rows(region, false), &values = p.exact_rows(region, true);
        const std::int64_t k_from = keys.offset(kv_row), v_from = values.offset(kv_row);
        for (std::int64_t first = seen.begin; first < seen.end; first += kAtOnce) {
          const int count =
              static_cast<int>(seen.end - first < kAtOnce ? seen.end - first : kAtOnce);
          __syncthreads();
          for (int token = warp_index(); token < count; token += Shared::kThreads / 32) {
            const std::int64_t at =
                k_from + sequence.slot(region, first + token) * keys.slot_stride;
            float dot = 0;
            for (int j = lane; j < kDim; j += 32)
              dot = fmaf(t.a[j], cuda::load_element(keys.data, p.d.exact, at + j), dot);
            dot = cuda::sum_across(dot, 16);
            if (p.softcap != 0) dot = capped(dot, p.softcap);
            if (lane == 0) t.weights[token] = dot * kLog2E;
          }
          __syncthreads();
          weigh(count);
          for (int token = part; token < count; token += kParts) {
            const std::int64_t at =
                v_from + sequence.slot(region, first + token) * values.slot_stride;
            l += t.weights[token];
            o_exact = fmaf(t.weights[token],
                           cuda::load_element(values.data, p.d.exact, at + column), o_exact);
          }
        }
      }
    }
    __syncthreads();
    t.coded[part][element_at<kDim>(column)] = o_coded;
    if (has_exact) t.exact[part][column] = o_exact;
    if (column == 0) {
      t.l[part] = l + l_coded;
      t.l_coded[part] = l_coded;
    }
    __syncthreads();
    if (warp_index() == 0) {
      const auto add_parts = [&](float(&of)[kParts][kDim]) {
        for (int j = lane; j < kDim; j += 32) {
#pragma unroll
          for (int i = 1; i < kParts; ++i) of[0][j] += of[i][j];
        }
      };
      add_parts(t.coded);
      if (has_exact) add_parts(t.exact);
      l = l_coded = 0;
      for (int i = 0; i < kParts; ++i) {
        l += t.l[i];
        l_coded += t.l_coded[i];
      }
      finish_row(p, query, l, l_coded, t.coded[0], t.spare, has_exact ? t.exact[0] : nullptr);
    }
  }
}

// ---- launches ----

// As many splits as keep every team at work, and as many teams: those that end first, if a split
// begins with the work of `kBefore` tokens. Two teams have half a block's speed each.
inline DecodeCut decode_cut(const Op::Desc& d, int device) {
  constexpr std::int64_t kBefore = 384, kLeastTokens = 256;
  const std::int64_t pairs = d.sequences * d.kv_heads;
  DecodeCut best;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const int most = most_teams(d.dim);
  for (int teams = 1; teams <= most; ++teams) {
    const std::int64_t at_once = teams * cuda::limits(device).multiprocessors;
    for (std::int64_t n = 1; n <= 4 * at_once && (n == 1 || n * kLeastTokens <= d.capacity); ++n) {
      const std::int64_t tokens = (d.capacity + n - 1) / n * teams / most;
      const std::int64_t cost = (pairs * n + at_once - 1) / at_once * (tokens + kBefore);
      if (cost < least) least = cost, best.splits = static_cast<int>(n), best.teams = teams;
    }
  }
  return best;
}

// The bytes of DecodeCut::partials.
inline std::size_t decode_bytes(const Op::Desc& d, int splits) {
  if (splits == 1 && d.first + d.recent == 0) return 0;
  return sizeof(float) * static_cast<std::size_t>(d.sequences * d.heads) *
         static_cast<std::size_t>(record_of(static_cast<int>(d.dim))) *
         static_cast<std::size_t>(splits);
}

template <int kDim, int kParts>
Status run_merge(const Problem& p, const DecodeCut& cut, int device, Stream stream) {
  using Merge = DecodeMerge<kDim, kParts>;
  const cuda::Grid grid{.blocks = p.d.sequences * p.d.heads,
                        .threads = Merge::kThreads,
                        .shared = sizeof(Merge),
                        .waits = true};
  return cuda::launch(Op::kName, decode_merge<kDim, kParts>, grid, device, stream, p, cut);
}

template <class Shape>
inline constexpr std::size_t kDecodeShared =
    Shape::kTable + Shape::kCodebooks + Shape::kWarps * Shape::kRing +
    Shape::kMostTeams * sizeof(DecodeShared<Shape>);

template <class Shape>
Status run_decode(const Problem& p, const DecodeCut& cut, int device, Stream stream) {
  const std::int64_t items = p.d.sequences * p.d.kv_heads * cut.splits;
  const cuda::Grid grid{
      .blocks = std::min<std::int64_t>(items, cuda::limits(device).multiprocessors),
      .threads = Shape::kThreads,
      .shared = kDecodeShared<Shape>};
  BITTERN_TRY(cuda::launch(Op::kName, decode_splits<Shape>, grid, device, stream, p, cut));
  if (cut.partials == nullptr) return {};
  constexpr int kParts = Shape::kDim <= 256 ? 4 : 2;
  return p.d.sequences * p.d.heads <= 2 * cuda::limits(device).multiprocessors
             ? run_merge<Shape::kDim, kParts>(p, cut, device, stream)
             : run_merge<Shape::kDim, 1>(p, cut, device, stream);
}

}  // namespace bittern::attend
