// lsq of groups of 32, 64 and 128: a lane has a group, whose weights lie in shared memory. Sums are
// then a lane's own affair, and the fit, which a group takes once a round, is a small part.
//
// Groups need different numbers of fits from each of their starting ranges. A warp therefore has
// more slots for groups than lanes: a lane that is done leaves codes in the slot and takes up a
// group that waits in another. When too few wait, the whole warp writes out what is done and makes
// a new batch ready.
#pragma once
#include <algorithm>

#include "cuda/ptx.cuh"
#include "ops/affine/qdq_affine_init/affine_device.cuh"

namespace bittern::affine {

// leaf(0) + ... + leaf(kCount - 1) by the halving tree, few leaves at a time.
template <int kCount, int kStep = 1, class Leaf>
__device__ __forceinline__ auto row_sums(const Leaf& leaf, int first = 0) {
  if constexpr (kCount == 1) {
    return leaf(first);
  } else {
    const auto even = row_sums<kCount / 2, 2 * kStep>(leaf, first);
    return even + row_sums<kCount / 2, 2 * kStep>(leaf, first + kStep);
  }
}

template <class X, int kSize, bool kWeighted>
class LsqWarp {
  static constexpr int V = 4, kRows = kSize / V;
  static constexpr bool kHalves = sizeof(X) == 2;
  using Row = cuda::Pack<float, V>;
  using Raw = cuda::Pack<X, 16 / sizeof(X)>;
  static constexpr int kRawSize = 16 / sizeof(X), kRawRows = kSize / kRawSize;
  static constexpr int kBits = std::is_same_v<X, bf16> ? 8 : std::is_same_v<X, f16> ? 11 : 24;

  // A slot is 16 bytes more than a multiple of 128, so that lanes with neighbouring slots read
  // their rows from different banks.
  struct Slot {
    Row rows[kWeighted ? 2 * kRows : kRows];  // of u = w - b, then of importance
    float s, b, sum_cu, sum_c;                // s and b of minmax; at last, those found
    __device__ Row& u(int i) { return rows[i]; }
    __device__ Row& c(int i) { return rows[kRows + i]; }
    // The weights as they come lie at the end of what u will take, the codes at the beginning.
    __device__ Raw& raw(int i) { return reinterpret_cast<Raw*>(rows + kRows)[i - kRawRows]; }
    __device__ uint4& codes(int i) { return reinterpret_cast<uint4*>(rows)[i]; }
  };

 public:
  static constexpr int kSlots = std::min<int>(48, (45 << 10) / sizeof(Slot));
  struct Shared {
    Slot slots[kSlots];
    std::uint32_t groups[kSlots];                 // twice the number within the run + halved
    std::uint8_t waiting[kSlots], spare[kSlots];  // slots: lists that grow and shrink at the end
    std::uint32_t codes[kSize / 4];
  };
  // Warps on a multiprocessor, each a block: 16 have the registers they want, if the 228 KB of an
  // H100 have room for them. A block's first KB is the system's.
  static constexpr int kResident = std::min<int>(16, (228 << 10) / (sizeof(Shared) + 1024));

  // For groups first .. end - 1.
  __device__ LsqWarp(const Problem& p, Shared& shared, std::int64_t first, std::int64_t end)
      : p_(p),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x % 32)),
        first_(first),
        end_(static_cast<int>(end - first)) {
    for (int i = lane_; i < kSlots; i += 32) shared_.spare[i] = static_cast<std::uint8_t>(i);
    __syncwarp();
  }

  __device__ void run() {
    for (;;) {
      const unsigned idle = __ballot_sync(cuda::kWarp, state_ == kIdle);
      if (waiting_ < __popc(idle) && spare_ >= kSlots / 2 && next_ < end_) {
        write_out();
        load();
      }
      take(idle);
      if (!__any_sync(cuda::kWarp, state_ != kIdle)) break;
      round();
      retire();
    }
    write_out();
  }

 private:
  using Sums = cuda::Sums<float, kWeighted ? 3 * V : V>;
  struct Totals {
    float cq, cqq, cqu;
  };
  enum class Gain { no, yes, open };

  __device__ unsigned lanes_before() const { return (1u << lane_) - 1; }

  // ---- whole warps: groups into slots, and out of them ----

  __device__ std::int64_t row_of(std::int64_t group) const {
    return p_.one_row ? 0 : p_.row_groups.divide(group);
  }
  __device__ const X* weights(std::int64_t group) const {
    const std::int64_t row = row_of(group);
    return static_cast<const X*>(p_.w) + row * p_.w_stride +
           (group - row * p_.row_groups.value()) * kSize;
  }
  // Of the element-th weight of a group.
  __device__ float importance(std::int64_t group, int element) const {
    const std::int64_t in_row = group - p_.row_groups.divide(group) * p_.row_groups.value();
    const float c = p_.importance[in_row * kSize + element];
    return c > 0 && std::isfinite(c) ? c : 0.0f;
  }

  // Spare slots get groups, one each, that then wait. None of the spare ones has a result.
  __device__ void load() {
    const int batch = min(min(end_ - next_, spare_), 32);
    spare_ -= batch;
    // Lane k has the k-th of these groups; it takes kRawRows lanes to copy one.
    const int index = shared_.spare[spare_ + min(lane_, batch - 1)], group = next_ + lane_;
    const auto from = reinterpret_cast<std::uintptr_t>(weights(first_ + min(group, end_ - 1)));
#pragma unroll 2
    for (int i = 0; i < batch; i += 32 / kRawRows) {
      const int k = i + lane_ / kRawRows, piece = lane_ % kRawRows;
      const auto* weights = reinterpret_cast<const Raw*>(__shfl_sync(cuda::kWarp, from, k));
      const int to = __shfl_sync(cuda::kWarp, index, k);
      if (k < batch) cuda::copy_async_16(&shared_.slots[to].raw(piece), weights + piece);
    }
    cuda::copy_async_commit();
    if constexpr (kWeighted) {
      for (int i = lane_; i < batch * kSize; i += 32) {
        const int k = i / kSize, element = i % kSize;
        shared_.slots[shared_.spare[spare_ + k]].c(element / V).at[element % V] =
            importance(first_ + next_ + k, element);
      }
    }
    cuda::copy_async_wait<0>();
    __syncwarp();
    if (lane_ < batch) {
      prepare(index, group);
      shared_.waiting[waiting_ + lane_] = static_cast<std::uint8_t>(index);
    }
    waiting_ += batch;
    empty_ = spare_;
    next_ += batch;
    __syncwarp();
  }

  // minmax, and what stays the same in every fit.
  __device__ void prepare(int index, int group) {
    Slot& slot = shared_.slots[index];
    cuda::Pack<X, kHalves ? kSize : 1> w;  // halves stay in registers: u overwrites them
    Range<float> range;
    if constexpr (kHalves) {
      w = w.load(slot.raw(0).at);
      range = lane_range(w);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Range<float> row = lane_range(slot.u(i));
        range = {fminf(range.min, row.min), fmaxf(range.max, row.max)};
      }
    }
    Params<float> start;
    bool halved = false, usual = usual_minmax(range, p_, start);
    if (!usual) {
      const bool finite = std::isfinite(range.max - range.min);
      range = {};
#pragma unroll 1
      for (int i = 0; i < kSize; ++i) extend(range, slot.raw(i / kRawSize).math(i % kRawSize));
      halved = range.overflows();
      start = minmax_params(range, p_.bins, largest_stored<float>(p_.scale_element),
                            Stored{p_.scale_element});
      usual = finite && !halved;
    }
    const auto sums = row_sums<kRows>([&](int i) {
      cuda::Sums<float, kWeighted ? 2 * V : V> terms;
      Row u;
      if constexpr (!kHalves) u = slot.u(i);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        u.at[j] = (kHalves ? w.math(i * V + j) : u.at[j]) - start.b;
        terms.at[j] = u.at[j];
        if constexpr (kWeighted) {
          terms.at[V + j] = slot.c(i).at[j];
          terms.at[j] *= terms.at[V + j];
        }
      }
      slot.u(i) = u;
      return terms;
    });
    slot.s = start.s;
    slot.b = start.b;
    // With a weight that is not finite, or a range that is not, no fit is to come about: minmax.
    slot.sum_cu = usual ? across(sums, 0) : std::numeric_limits<float>::quiet_NaN();
    slot.sum_c = kWeighted ? across(sums, kWeighted) : kSize;
    shared_.groups[index] = static_cast<std::uint32_t>(2 * group + halved);
  }

  // Results of spare slots to memory.
  __device__ void write_out() {
#pragma unroll 1
    for (int i = empty_ + lane_; i < spare_; i += 32) {
      const int index = shared_.spare[i];
      const std::int64_t group = first_ + shared_.groups[index] / 2;
      store_param(p_.scales, p_.scale_element, group, shared_.slots[index].s);
      store_param(p_.biases, p_.scale_element, group, shared_.slots[index].b);
    }
    constexpr int kChunks = kSize / 16;
#pragma unroll 1
    for (int i = empty_; i < spare_; i += 32 / kChunks) {
      const int k = i + lane_ / kChunks, chunk = lane_ % kChunks;
      const int index = shared_.spare[min(k, spare_ - 1)];
      const std::int64_t group = first_ + shared_.groups[index] / 2, row = row_of(group);
      const uint4 codes = shared_.slots[index].codes(chunk);
      const std::uint32_t bytes[4] = {codes.x, codes.y, codes.z, codes.w};
      write_codes(p_, static_cast<std::uint8_t*>(p_.q) + row * p_.q_stride * (p_.packed ? 4 : 1),
                  (group - row * p_.row_groups.value()) * kChunks + chunk, bytes, k < spare_);
    }
    __syncwarp();
  }

  // ---- a lane and its group ----

  // Idle lanes take up groups that wait.
  __device__ void take(unsigned idle) {
    const int rank = __popc(idle & lanes_before());
    if (state_ == kIdle && rank < waiting_) {
      index_ = shared_.waiting[waiting_ - 1 - rank];
      const Slot& slot = shared_.slots[index_];
      start_ = best_ = now_ = {slot.s, slot.b};
      range_ = 0;
      sum_cu_ = slot.sum_cu;
      sum_c_ = slot.sum_c;
      fits_ = 0;
      state_ = kStale;
    }
    waiting_ -= min(waiting_, __popc(idle));
    __syncwarp();
  }

  // Fits s and b to the codes, and codes to those. Where no sum changes, neither would the next s
  // and b.
  __device__ void round() {
    if (state_ == kFits) {
      const Params<float> exact =
          least_squares(sum_c_, totals_.cq, totals_.cqq, sum_cu_, totals_.cqu, start_.b);
      const Params<float> next = fit(exact, Stored{p_.scale_element});
      const bool moves = next.s > 0 && (next.s != now_.s || next.b != now_.b);
      // Stored as halves, s and b may come and go between two values: the last fit then gives the
      // one that its number, even or odd, says.
      const bool returns = kHalves && fits_ > 0 && next.s == last_.s && next.b == last_.b;
      if (fits_ >= kMostFits || !moves || (returns && (kMostFits - fits_) % 2 == 0)) {
        state_ = kDone;
      } else {
        // What storing s and b as halves takes away, the next fit mostly wins back: count both.
        const bool halves = p_.scale_element != DType::f32;
        if (fits_ == 0) gain_ = 0;
        if (fits_ == 0 || halves) gain_ += error_above(exact, now_, -0x1p-10f);
        if (halves) gain_ -= error_above(exact, next, 0x1p-10f);
        if (returns) fits_ = kMostFits - 1;
        last_ = now_;
        ++fits_;
        now_ = next;
      }
    }
    const Totals before = totals_;
    quantize();
    const bool same =
        before.cq == totals_.cq && before.cqq == totals_.cqq && before.cqu == totals_.cqu;
    if (state_ == kFits && same) state_ = kDone;
    if (state_ == kStale) {
      if (fits_ == 0 && range_ == 0) best_error_ = error();
      state_ = fits_ == kNoMore ? kDone : kFits;
    }
  }

  // Lanes that are done with a range go on with the next. After the last they leave their results
  // in their slots; one whose best was another range first gets its codes again.
  __device__ void retire() {
    const bool fitted = state_ == kDone && fits_ != kNoMore;
    Gain gain = fitted && (now_.s != best_.s || now_.b != best_.b) ? estimated_gain() : Gain::no;
    for (unsigned open = __ballot_sync(cuda::kWarp, gain == Gain::open); open != 0;
         open &= open - 1) {
      const int from = __ffs(static_cast<int>(open)) - 1;
      const bool gains = gains_by_definition(from);
      if (lane_ == from) gain = gains ? Gain::yes : Gain::no;
    }
    if (gain == Gain::yes) {
      best_ = now_;
      best_error_ = error();
    }
    if (fitted) next_range();
    const unsigned leaving = __ballot_sync(cuda::kWarp, state_ == kDone);
    if (state_ == kDone) {
      Slot& slot = shared_.slots[index_];
      slot.s = now_.s;
      slot.b = now_.b;
#pragma unroll
      for (int i = 0; i < kSize / 16; ++i)
        slot.codes(i) = {codes_[4 * i], codes_[4 * i + 1], codes_[4 * i + 2], codes_[4 * i + 3]};
      shared_.spare[spare_ + __popc(leaving & lanes_before())] = static_cast<std::uint8_t>(index_);
      state_ = kIdle;
    }
    spare_ += __popc(leaving);
    __syncwarp();
  }

  __device__ void next_range() {
    // No fit comes about with a weight that is not finite.
    const int ranges = std::isnan(sum_cu_) ? 1 : lsq_starts(p_.bins);
    while (++range_ < ranges) {
      const Params<float> next = lsq_start(start_, p_.bins, range_, Stored{p_.scale_element});
      if (!(next.s > 0)) continue;
      now_ = next;
      fits_ = 0;
      state_ = kStale;
      return;
    }
    if (now_.s == best_.s && now_.b == best_.b) return;
    now_ = best_;
    fits_ = kNoMore;
    state_ = kStale;
  }

  // The k-th V sums, one for each value of a row, together.
  template <int N>
  __device__ static float across(const cuda::Sums<float, N>& sums, int k) {
    return (sums.at[k * V] + sums.at[k * V + 2]) + (sums.at[k * V + 1] + sums.at[k * V + 3]);
  }

  // Codes of s and b, as minmax_code gives them, and their sums: c q, c q q and c q u. Without
  // importance the first two are integers, exact in any order.
  __device__ void quantize() {
    Slot& slot = shared_.slots[index_];
    const bool halves = kHalves && p_.scale_element != DType::f32;
    NearCodes near(now_, p_.n, start_.b - now_.b, halves ? kBits : 24);
    std::uint32_t sum_q = 0, sum_qq = 0;
    const Sums sums = row_sums<kRows>([&](int i) {
      const Row u = slot.u(i);
      std::uint32_t bits[V];
      float q[V];
      Sums terms;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        bits[j] = near.code(u.at[j]);
        q[j] = __uint_as_float(bits[j]) - 0x1p23f;
      }
      codes_[i] = four_bytes(bits[0], bits[1], bits[2], bits[3]);
      if constexpr (kWeighted) {
        const Row c = slot.c(i);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          terms.at[j] = c.at[j] * q[j];
          terms.at[V + j] = terms.at[j] * q[j];
          terms.at[2 * V + j] = terms.at[j] * u.at[j];
        }
      } else {
        sum_q = __dp4a(codes_[i], 0x01010101u, sum_q);
        sum_qq = __dp4a(codes_[i], codes_[i], sum_qq);
#pragma unroll
        for (int j = 0; j < V; ++j) terms.at[j] = q[j] * u.at[j];
      }
      return terms;
    });
    if constexpr (kWeighted) {
      totals_ = {across(sums, 0), across(sums, 1), across(sums, 2)};
    } else {
      static_assert(kSize * 255 * 255 < 1 << 24);
      totals_ = {cuda::small_integer<float>(sum_q), cuda::small_integer<float>(sum_qq),
                 across(sums, 0)};
    }
    const bool certain = near.certain() && !std::isnan(sum_cu_);
    for (unsigned open = __ballot_sync(cuda::kWarp, state_ != kIdle && !certain); open != 0;
         open &= open - 1)
      quantize_by_definition(__ffs(static_cast<int>(open)) - 1);
  }

  // ---- the whole warp for one lane's group: what is rare ----

  // The same where a code is near a tie, or the group is an odd one.
  __device__ void quantize_by_definition(int from) {
    const Params<float> by{__shfl_sync(cuda::kWarp, now_.s, from),
                           __shfl_sync(cuda::kWarp, now_.b, from)};
    const int index = __shfl_sync(cuda::kWarp, index_, from);
    const bool halved = shared_.groups[index] % 2 != 0;
    const X* w = weights(first_ + shared_.groups[index] / 2);
    Slot& slot = shared_.slots[index];
    auto* bytes = reinterpret_cast<std::uint8_t*>(shared_.codes);
    const auto sums = cuda::warp_tree<float, 3>(kSize, [&](int j) -> cuda::Sums<float, 3> {
      const std::uint8_t code = minmax_code(cuda::load_math(w[j]), by, p_.bins, halved);
      bytes[j] = code;
      const float q = code, cq = kWeighted ? slot.c(j / V).at[j % V] * q : q;
      return {cq, cq * q, cq * slot.u(j / V).at[j % V]};
    });
    __syncwarp();
    if (lane_ == from) {
      totals_ = {sums.at[0], sums.at[1], sums.at[2]};
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) codes_[i] = shared_.codes[i];
    }
    __syncwarp();
  }

  // Is the last fit kept? The errors are sums of c (w - fma(q, s, b))^2.
  __device__ bool gains_by_definition(int from) {
    const Params<float> best{__shfl_sync(cuda::kWarp, best_.s, from),
                             __shfl_sync(cuda::kWarp, best_.b, from)};
    const Params<float> now{__shfl_sync(cuda::kWarp, now_.s, from),
                            __shfl_sync(cuda::kWarp, now_.b, from)};
    const int index = __shfl_sync(cuda::kWarp, index_, from);
    const X* w = weights(first_ + shared_.groups[index] / 2);
    const auto errors = cuda::warp_tree<double, 2>(kSize, [&](int j) -> cuda::Sums<double, 2> {
      const float x = cuda::load_math(w[j]);
      const auto error = [&](Params<float> by) {
        const float q = minmax_code(x, by, p_.bins, false);
        const double d = x - fmaf(q, by.s, by.b);
        return kWeighted ? static_cast<double>(shared_.slots[index].c(j / V).at[j % V]) * (d * d)
                         : d * d;
      };
      return {error(best), error(now)};
    });
    return gains(errors.at[0], errors.at[1]);
  }

  // Codes fixed, the error of s and b is above that of the least-squares ones by
  // (ds, db) M (ds, db) with M = (QQ Q; Q C). Of its squares much may cancel: a share of them,
  // `doubt`, is added.
  __device__ float error_above(Params<float> least, Params<float> by, float doubt) const {
    const float ds = by.s - least.s, db = by.b - least.b;
    const float squares = totals_.cqq * ds * ds + sum_c_ * db * db;
    return squares + 2 * totals_.cq * ds * db + doubt * squares;
  }

  // The sum of c (u - q s - (b - b0))^2 less that of c u^2, from the sums of now_. Sums are right
  // to 2^-21 of themselves, and without importance those of integers are exact; the rest to 2^-22
  // of all terms' sizes.
  struct Error {
    float value, doubt;
  };
  __device__ Error error() const {
    const float s = now_.s, shift = now_.b - start_.b;
    const float qq = s * s * totals_.cqq, qu = 2 * s * totals_.cqu, u = 2 * shift * sum_cu_;
    const float q = 2 * s * shift * totals_.cq, c = shift * shift * sum_c_;
    const float sums = fabsf(qu) + fabsf(u), integers = qq + fabsf(q) + c;
    return {(qq - qu) + (q + c - u),
            sums * 0x1.8p-21f + integers * (kWeighted ? 0x1.8p-21f : 0x1p-22f)};
  }

  // Is the last fit kept? Two ways to tell: of the first range by what the fits gained and storing
  // s and b took away (new codes only lower the error further), and by the errors. Codes are those
  // of the definition, but it squares f32 differences d, each off by at most 2^-24 (|b| + n s +
  // |d|), and u is off by 2^-24 of itself. Where the errors are about equal, d is at most s on
  // average.
  __device__ Gain estimated_gain() const {
    const float unit = start_.s, b = fabsf(start_.b) + fabsf(best_.b) + fabsf(now_.b);
    if (!(unit > 0x1p-50f && unit < 0x1p50f && b < 0x1p12f * unit && now_.s < 2 * unit &&
          best_.s < 2 * unit))
      return Gain::open;
    const Error now = error();
    const float gain = best_error_.value - now.value, doubt = best_error_.doubt + now.doubt;
    const float rounding = sum_c_ * unit * (p_.n * unit + b) * 0x1p-20f;
    if ((!kWeighted && range_ == 0 && gain_ > 2 * rounding) || gain > doubt + rounding)
      return Gain::yes;
    return gain < -(doubt + rounding) ? Gain::no : Gain::open;
  }

  const Problem& p_;
  Shared& shared_;
  int lane_;
  std::int64_t first_;
  int next_ = 0, end_;                                 // groups not yet in a slot
  int waiting_ = 0, spare_ = kSlots, empty_ = kSlots;  // of the spare, so many have no result

  int index_ = 0;                     // of the lane's slot
  Params<float> start_, now_, last_;  // minmax's, the codes', and those before (of halves)
  Params<float> best_;                // of the ranges before
  int range_ = 0;                     // the one it began from
  float sum_c_ = 0, sum_cu_ = 0;
  Totals totals_{};
  std::uint32_t codes_[kSize / 4];  // these and totals_ are those of now_, unless stale
  static constexpr int kNoMore = kMostFits + 1;
  int fits_ = 0;  // kNoMore: the best it is
  Error best_error_{};
  float gain_ = 0;  // of the fits, less what storing s and b took away
  enum { kIdle, kStale, kFits, kDone } state_ = kIdle;  // stale: s and b are there, codes not yet
};

// Each warp fits `run` groups.
template <class X, int kSize, bool kWeighted>
__global__ void __launch_bounds__(32, LsqWarp<X, kSize, kWeighted>::kResident)
    lsq_groups(const Problem p, int run) {
  using Warp = LsqWarp<X, kSize, kWeighted>;
  __shared__ typename Warp::Shared shared;
  const std::int64_t first = std::int64_t{blockIdx.x} * run;
  Warp(p, shared, first, first + run < p.groups ? first + run : p.groups).run();
}

}  // namespace bittern::affine
