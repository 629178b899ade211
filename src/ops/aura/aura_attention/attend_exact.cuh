// The kernel that gives the bits of `ref`, for every descriptor. A block has a KV head and a few of
// its query rows. It takes the splits of 256 tokens one after the other and merges each as it
// comes; or, where there are too few blocks for the device, it takes one split and leaves its sums
// in the workspace, and a second kernel merges them in order.
#pragma once
#include "ops/aura/aura_attention/attend.cuh"

namespace bittern::attend {

inline constexpr int kThreads = 256;
// Half a warp: a lane for each accumulator of a dot or of l. In a block, one for each row.
inline constexpr int kTeam = 16, kTeams = kThreads / kTeam;
inline constexpr int kMostRows = kTeams;

// How the work is cut.
struct Cut {
  std::int64_t row_blocks;  // of a KV head
  std::int64_t tasks;
  std::int64_t splits[aura::kRegions];
  float* partials = nullptr;  // [row, split of any region, 2 + dim]: m, l, o. Null: merged at once

  std::int64_t all_splits() const {
    return splits[aura::kFirst] + splits[aura::kCoded] + splits[aura::kRecent];
  }
  __device__ float* partial(const Problem& p, std::int64_t row, Region region,
                            std::int64_t split) const {
    std::int64_t all = 0, before = 0;
    for (int i = 0; i < aura::kRegions; ++i) {
      if (i < region) before += splits[i];
      all += splits[i];
    }
    return partials + (row * all + before + split) * (2 + p.d.dim);
  }
};

// Rows of a task: fewer of long ones, so that four arrays of them fit in 64 KB.
inline int rows_at_once(const Op::Desc& d) {
  const std::int64_t most = d.dim <= 256 ? 16 : d.dim <= 512 ? 8 : 4;
  const std::int64_t rows = std::min(most, d.queries * d.group());
  return rows > 8 ? 16 : rows > 4 ? 8 : rows > 1 ? 4 : 1;
}

inline Cut cut_of(const Op::Desc& d) {
  const std::int64_t rows = rows_at_once(d);
  Cut cut;
  cut.row_blocks = (d.queries * d.group() + rows - 1) / rows;
  cut.tasks = d.sequences * d.kv_heads * cut.row_blocks;
  const std::int64_t tokens[] = {d.first, d.capacity, d.recent};
  for (int i = 0; i < aura::kRegions; ++i) cut.splits[i] = (tokens[i] + kSplit - 1) / kSplit;
  return cut;
}

// The sums of splits in the workspace, 0 where a block merges its own.
inline std::size_t partials_bytes(const Op::Desc& d, int device) {
  constexpr std::int64_t kMost = std::int64_t{256} << 20;
  const Cut cut = cut_of(d);
  if (cut.tasks >= 2 * cuda::limits(device).multiprocessors || cut.all_splits() < 2) return 0;
  const std::int64_t row = static_cast<std::int64_t>(sizeof(float)) * (2 + d.dim);
  const std::int64_t rows = d.sequences * d.queries * d.heads;
  if (rows == 0 || cut.all_splits() > kMost / row / rows) return 0;
  return static_cast<std::size_t>(rows * cut.all_splits() * row);
}

// The first eight codes from byte `byte` of a packed row on, in the lower bits; zeros after its
// end.
__device__ inline std::uint64_t eight_codes(const std::uint32_t* row, int words, int byte) {
  const int at = byte / 4;
  const unsigned shift = 8 * static_cast<unsigned>(byte % 4);
  const std::uint32_t a = row[at], b = at + 1 < words ? row[at + 1] : 0,
                      c = at + 2 < words ? row[at + 2] : 0;
  return std::uint64_t{__funnelshift_r(b, c, shift)} << 32 | __funnelshift_r(a, b, shift);
}
__device__ inline std::uint32_t code_at(const std::uint32_t* row, int j, int bits) {
  const int word = j * bits / 32, at = j * bits % 32;
  std::uint32_t code = row[word] >> at;
  if (at + bits > 32) code |= row[word + 1] << (32 - at);
  return code & ((1u << bits) - 1);
}

// Whose bits decide: every operation below is one of the header of the op.
template <int kRows>
class ExactBlock {
  static_assert(kRows <= kMostRows);

  struct Shared {
    float levels[2][256];
    Place place[kSplit];
    float x[kRows][kSplit];  // logits of a split, then weights
    float b[kRows];
    float m[kRows], l[kRows], l_coded[kRows];
    float split_m[kRows], split_l[kRows], f[kRows], g[kRows];
    int begin[kRows], end[kRows];  // tokens of the split that a row sees
  };
  enum Array { kA, kR, kExact, kCodedSums, kArrays };  // [kRows, dim] each

 public:
  static std::size_t shared_bytes(const Op::Desc& d) {
    return sizeof(Shared) + sizeof(float) * kArrays * kRows * static_cast<std::size_t>(d.dim);
  }
  __device__ ExactBlock(const Problem& p, const Cut& cut)
      : p_(p), cut_(cut), dim_(static_cast<int>(p.d.dim)), t_(*cuda::dynamic_shared<Shared>()) {
    for (int i = thread(); i < 256; i += kThreads) {
      if (i < 1 << p.k.bits) t_.levels[0][i] = p.k.codebook[i];
      if (i < 1 << p.v.bits) t_.levels[1][i] = p.v.codebook[i];
    }
    __syncthreads();
  }

  __device__ void begin_task(std::int64_t task) {
    const std::int64_t at = task / cut_.row_blocks;
    s_ = at / p_.d.kv_heads;
    head_ = at % p_.d.kv_heads;
    first_row_ = task % cut_.row_blocks * kRows;
    const std::int64_t left = p_.head_rows - first_row_;
    rows_ = static_cast<int>(left < kRows ? left : kRows);
    for (int row = warp_index(); row < kRows; row += kThreads / 32) load_query(row);
    __syncthreads();
  }
  __device__ std::int64_t global_row(int row) const {
    return (s_ * p_.d.kv_heads + head_) * p_.head_rows + first_row_ + row;
  }

  // Is there a token of the split that a row sees? By the whole block.
  __device__ bool begin_split(const aura::Sequence& sequence, Region region, std::int64_t split) {
    const std::int64_t first = split * kSplit;
    __syncthreads();  // the last split's rows have been read
    if (thread() < kRows) {
      aura::Span seen;
      if (thread() < rows_) seen = sequence.seen(p_.d, query(thread()).query, region);
      const auto within = [&](std::int64_t t) {
        return static_cast<int>(std::clamp<std::int64_t>(t - first, 0, +kSplit));
      };
      t_.begin[thread()] = within(seen.begin);
      t_.end[thread()] = within(seen.end);
    }
    __syncthreads();
    lo_ = kSplit, hi_ = 0;
    for (int row = 0; row < rows_; ++row) {
      if (t_.begin[row] >= t_.end[row]) continue;
      lo_ = std::min(lo_, t_.begin[row]);
      hi_ = std::max(hi_, t_.end[row]);
    }
    ragged_ = false;
    for (int row = 0; row < rows_; ++row)
      ragged_ = ragged_ || t_.begin[row] != lo_ || t_.end[row] != hi_;
    if (lo_ >= hi_) return false;
    const int token = lo_ + thread();
    if (token < hi_) {
      const std::int64_t slot = sequence.slot(region, first + token);
      t_.place[token] = region == aura::kCoded ? p_.place(s_, head_, slot) : Place{0, slot};
    }
    __syncthreads();
    return true;
  }

  // The logits of tokens lo_ .. hi_ - 1, by teams.
  __device__ void score(Region region) {
    const int team = thread() / kTeam, lane = thread() % kTeam;
    for (int base = lo_; base < hi_; base += kTeams) {
      const int token = base + team;
      float acc[kRows] = {};
      if (token < hi_) {
        if (region == aura::kCoded) {
          coded_dot(t_.place[token], lane, acc);
        } else {
          exact_dot(region, t_.place[token].inner, lane, acc);
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float dot = cuda::sum_across(acc[row], kTeam / 2);
        if (lane != row || token >= hi_) continue;
        float x = dot;
        if (region == aura::kCoded) x = fmaf(dot, p_.scale_of(p_.k, t_.place[token]), t_.b[row]);
        if (p_.softcap != 0) x = p_.softcap * math::tanh(x / p_.softcap);
        t_.x[row][token] = x;
      }
    }
    __syncthreads();
  }

  // m and l of each row, and weights in the place of logits: a team to a row.
  __device__ void weigh(Region region) {
    const int row = std::min(thread() / kTeam, kRows - 1), lane = thread() % kTeam;
    const int begin = t_.begin[row], end = thread() / kTeam < rows_ ? t_.end[row] : 0;
    float m = kNone, l = 0;
    for (int token = begin + lane; token < end; token += kTeam)
      m = t_.x[row][token] > m ? t_.x[row][token] : m;
#pragma unroll
    for (int step = kTeam / 2; step > 0; step /= 2) {
      const float other = cuda::across(m, step);
      m = other > m ? other : m;
    }
    for (int token = begin + lane; token < end; token += kTeam) {
      const float weight = difference_exp(t_.x[row][token], m);
      l += weight;
      t_.x[row][token] =
          region == aura::kCoded ? weight * p_.scale_of(p_.v, t_.place[token]) : weight;
    }
    l = cuda::sum_across(l, kTeam / 2);
    if (lane == 0 && begin < end) {
      t_.split_m[row] = m;
      t_.split_l[row] = l;
    }
    __syncthreads();
  }

  // What m and l become, and the factors by which o does.
  __device__ void merge_weights(Region region) {
    const int row = thread();
    if (row < rows_ && t_.begin[row] < t_.end[row]) {
      const float m = t_.m[row], most = t_.split_m[row] > m ? t_.split_m[row] : m;
      const float f = difference_exp(m, most), g = difference_exp(t_.split_m[row], most);
      t_.m[row] = most;
      t_.f[row] = f;
      t_.g[row] = g;
      t_.l[row] = fmaf(t_.split_l[row], g, t_.l[row] * f);
      t_.l_coded[row] = region == aura::kCoded ? fmaf(t_.split_l[row], g, t_.l_coded[row] * f)
                                               : t_.l_coded[row] * f;
    }
    __syncthreads();
  }

  // o of the split for each row and column, which done(row, column, o) takes. A thread has a
  // column, of all rows or, where columns are few, of some.
  template <class Done>
  __device__ void sum_values(Region region, const Done& done) {
    int parts = 1;
    while (2 * parts <= kRows && 2 * parts * dim_ <= kThreads) parts *= 2;
    const int each = kRows / parts;
    const ExactRows& exact = p_.exact_rows(region, true);
    const std::int64_t from = region == aura::kCoded ? 0 : exact.offset(s_ * p_.d.kv_heads + head_);
    for (int item = thread(); item < parts * dim_; item += kThreads) {
      const int column = item % dim_, first = item / dim_ * each;
      float o[kRows] = {};
      for (int token = lo_; token < hi_; ++token) {
        const Place at = t_.place[token];
        const float y = region == aura::kCoded
                            ? t_.levels[1][code_at(packed(p_.v, at), column, p_.v.bits)]
                            : cuda::load_element(exact.data, p_.d.exact,
                                                 from + at.inner * exact.slot_stride + column);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (i >= each) break;
          const int row = first + i;
          // A weight of 0 would not do: it may meet a NaN.
          if (ragged_ && (token < t_.begin[row] || token >= t_.end[row])) continue;
          o[i] = fmaf(t_.x[row][token], y, o[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first + i;
        if (i < each && row < rows_ && t_.begin[row] < t_.end[row]) done(row, column, o[i]);
      }
    }
    __syncthreads();
  }

  __device__ void merge_values(Region region, int row, int column, float o) {
    float& exact = array(kExact, row)[column];
    float& coded = array(kCodedSums, row)[column];
    float& mine = region == aura::kCoded ? coded : exact;
    float& other = region == aura::kCoded ? exact : coded;
    mine = fmaf(o, t_.g[row], mine * t_.f[row]);
    other *= t_.f[row];
  }
  __device__ void put_out(Region region, std::int64_t split) {
    for (int row = thread(); row < rows_; row += kThreads) {
      if (t_.begin[row] >= t_.end[row]) continue;
      float* const to = cut_.partial(p_, global_row(row), region, split);
      to[0] = t_.split_m[row];
      to[1] = t_.split_l[row];
    }
    sum_values(region, [&](int row, int column, float o) {
      cut_.partial(p_, global_row(row), region, split)[2 + column] = o;
    });
  }

  __device__ void finish() {
    for (int row = warp_index(); row < rows_; row += kThreads / 32) {
      __syncwarp();
      finish_row(p_, query(row), t_.l[row], t_.l_coded[row], array(kCodedSums, row), array(kR, row),
                 array(kExact, row));
    }
    __syncthreads();
  }

  __device__ std::int64_t sequence_index() const { return s_; }
  // The splits of `region` that the task's rows may see.
  __device__ aura::Span splits(const aura::Sequence& sequence, Region region) const {
    const aura::Span some{sequence.seen(p_.d, query(0).query, region).begin,
                          sequence.seen(p_.d, query(rows_ - 1).query, region).end};
    if (some.empty()) return {};
    return {some.begin / kSplit, (some.end + kSplit - 1) / kSplit};
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ float* array(Array which, int row) const {
    return reinterpret_cast<float*>(&t_ + 1) + (which * kRows + row) * dim_;
  }
  __device__ QueryRow query(int row) const { return {p_, s_, head_, first_row_ + row}; }
  __device__ static const std::uint32_t* packed(const CodedRows& rows, Place at) {
    return rows.packed + at.outer * rows.packed_stride + at.inner * rows.words;
  }

  // A row's query in both bases and an empty state; zeros for a row that is not there. By a warp.
  __device__ void load_query(int row) {
    const int lane = lane_index();
    float *const a = array(kA, row), *const r = array(kR, row);
    const bool there = row < rows_;
    const std::int64_t from = there ? query(row).offset(p_.q_stride) : 0;
    for (int j = lane; j < dim_; j += 32) {
      a[j] = there ? cuda::load_element(p_.q, p_.d.element, from + j) * p_.scale : 0.0f;
      r[j] = a[j];
    }
    __syncwarp();
    const float* const rotated = cuda::rotate_by_warp(p_.k_rotation, r, array(kCodedSums, row));
    float b = 0;
    if (p_.k_mean != nullptr) {
      for (int j = lane % kTeam; j < dim_; j += kTeam)
        b = fmaf(a[j], p_.k_mean[head_ * dim_ + j], b);
      b = cuda::sum_across(b, kTeam / 2);
    }
    for (int j = lane; j < dim_; j += 32) {
      r[j] = rotated[j];
      array(kExact, row)[j] = 0;
    }
    __syncwarp();
    for (int j = lane; j < dim_; j += 32) array(kCodedSums, row)[j] = 0;
    if (lane == 0) {
      const bool sink = there && p_.sinks != nullptr;
      t_.b[row] = b;
      t_.m[row] = sink ? p_.sinks[query(row).head] : kNone;
      t_.l[row] = sink ? 1.0f : 0.0f;
      t_.l_coded[row] = 0;
    }
  }

  // A lane's accumulator of r . c for each row: codes 8 lane .. 8 lane + 7 of every 128.
  __device__ void coded_dot(Place at, int lane, float (&acc)[kRows]) const {
    const std::uint32_t* const row = packed(p_.k, at);
    const int bits = p_.k.bits;
    const unsigned mask = (1u << bits) - 1;
    for (int j = 8 * lane; j < dim_; j += 8 * kTeam) {
      std::uint64_t codes = eight_codes(row, p_.k.words, j / 8 * bits);
      const int count = std::min(8, dim_ - j);
      for (int i = 0; i < count; ++i, codes >>= bits) {
        const float c = t_.levels[0][static_cast<unsigned>(codes) & mask];
#pragma unroll
        for (int n = 0; n < kRows; ++n) acc[n] = fmaf(array(kR, n)[j + i], c, acc[n]);
      }
    }
  }
  // The same of a . k: elements j with j mod 16 = lane.
  __device__ void exact_dot(Region region, std::int64_t slot, int lane, float (&acc)[kRows]) const {
    const ExactRows& rows = p_.exact_rows(region, false);
    const std::int64_t from = rows.offset(s_ * p_.d.kv_heads + head_) + slot * rows.slot_stride;
    for (int j = lane; j < dim_; j += kTeam) {
      const float k = cuda::load_element(rows.data, p_.d.exact, from + j);
#pragma unroll
      for (int n = 0; n < kRows; ++n) acc[n] = fmaf(array(kA, n)[j], k, acc[n]);
    }
  }

  const Problem& p_;
  const Cut& cut_;
  const int dim_;
  Shared& t_;
  std::int64_t s_ = 0, head_ = 0, first_row_ = 0;
  int rows_ = 0;
  int lo_ = 0, hi_ = 0;  // tokens of the split that any row sees
  bool ragged_ = false;  // not all rows see the same of them
};

// A task to a block.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    attend_tasks(const __grid_constant__ Problem p, const __grid_constant__ Cut cut) {
  ExactBlock<kRows> block(p, cut);
  for (std::int64_t task = blockIdx.x; task < cut.tasks; task += gridDim.x) {
    block.begin_task(task);
    const aura::Sequence sequence = p.sequence(block.sequence_index());
    for (int i = 0; i < aura::kRegions; ++i) {
      const auto region = static_cast<Region>(i);
      const aura::Span splits = block.splits(sequence, region);
      for (std::int64_t split = splits.begin; split < splits.end; ++split) {
        if (!block.begin_split(sequence, region, split)) continue;
        block.score(region);
        block.weigh(region);
        block.merge_weights(region);
        block.sum_values(region, [&](int row, int column, float o) {
          block.merge_values(region, row, column, o);
        });
      }
    }
    block.finish();
  }
}

// A split of a task to a block.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    attend_splits(const __grid_constant__ Problem p, const __grid_constant__ Cut cut) {
  ExactBlock<kRows> block(p, cut);
  const std::int64_t each = cut.splits[0] + cut.splits[1] + cut.splits[2];
  for (std::int64_t at = blockIdx.x; at < cut.tasks * each; at += gridDim.x) {
    std::int64_t split = at % each;
    int region = 0;
    while (split >= cut.splits[region]) split -= cut.splits[region++];
    block.begin_task(at / each);
    const aura::Sequence sequence = p.sequence(block.sequence_index());
    const auto which = static_cast<Region>(region);
    if (!block.begin_split(sequence, which, split)) continue;
    block.score(which);
    block.weigh(which);
    block.put_out(which, split);
  }
}

// A row to a block: its splits, merged in order.
__global__ void __launch_bounds__(kThreads)
    merge_splits(const __grid_constant__ Problem p, const __grid_constant__ Cut cut,
                 std::int64_t rows) {
  struct Shared {
    float l[kThreads], m[kThreads + 1], f[kThreads], g[kThreads];
  };
  constexpr int kColumns = static_cast<int>(kAuraMaxDim) / kThreads;
  auto& t = *cuda::dynamic_shared<Shared>();
  const int dim = static_cast<int>(p.d.dim), thread = static_cast<int>(threadIdx.x);
  float *const coded = reinterpret_cast<float*>(&t + 1), *const spare = coded + dim,
               *const exact = spare + dim;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t at = row / p.head_rows;
    const QueryRow query(p, at / p.d.kv_heads, at % p.d.kv_heads, row % p.head_rows);
    const aura::Sequence sequence = p.sequence(query.s);
    float m = p.sinks != nullptr ? p.sinks[query.head] : kNone;
    float l = p.sinks != nullptr ? 1.0f : 0.0f, l_coded = 0;
    float o_coded[kColumns] = {}, o_exact[kColumns] = {};
    for (int i = 0; i < aura::kRegions; ++i) {
      const auto region = static_cast<Region>(i);
      const aura::Span seen = sequence.seen(p.d, query.query, region);
      if (seen.empty()) continue;
      const std::int64_t last = (seen.end + kSplit - 1) / kSplit;
      for (std::int64_t first = seen.begin / kSplit; first < last; first += kThreads) {
        const int count = static_cast<int>(std::min<std::int64_t>(last - first, kThreads));
        const float* const from = cut.partial(p, row, region, first);
        const std::int64_t step = 2 + dim;
        __syncthreads();
        if (thread < count) {
          t.m[thread + 1] = from[thread * step];
          t.l[thread] = from[thread * step + 1];
        }
        __syncthreads();
        const float split_m = thread < count ? t.m[thread + 1] : 0;
        __syncthreads();
        if (thread == 0) {
          t.m[0] = m;
          for (int n = 0; n < count; ++n) t.m[n + 1] = t.m[n + 1] > t.m[n] ? t.m[n + 1] : t.m[n];
        }
        __syncthreads();
        if (thread < count) {
          t.f[thread] = difference_exp(t.m[thread], t.m[thread + 1]);
          t.g[thread] = difference_exp(split_m, t.m[thread + 1]);
        }
        __syncthreads();
        m = t.m[count];
        for (int n = 0; n < count; ++n) {
          const float f = t.f[n], g = t.g[n];
          l = fmaf(t.l[n], g, l * f);
          l_coded = region == aura::kCoded ? fmaf(t.l[n], g, l_coded * f) : l_coded * f;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int column = thread + c * kThreads;
            if (column >= dim) break;
            const float o = from[n * step + 2 + column];
            o_coded[c] = region == aura::kCoded ? fmaf(o, g, o_coded[c] * f) : o_coded[c] * f;
            o_exact[c] = region == aura::kCoded ? o_exact[c] * f : fmaf(o, g, o_exact[c] * f);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = thread + c * kThreads;
      if (column >= dim) break;
      coded[column] = o_coded[c];
      exact[column] = o_exact[c];
    }
    __syncthreads();
    if (warp_index() == 0) finish_row(p, query, l, l_coded, coded, spare, exact);
  }
}

template <int kRows>
Status run_exact(const Problem& p, const Cut& cut, int device, Stream stream) {
  cuda::Grid grid{
      .blocks = cut.tasks, .threads = kThreads, .shared = ExactBlock<kRows>::shared_bytes(p.d)};
  if (cut.partials == nullptr)
    return cuda::launch(Op::kName, attend_tasks<kRows>, grid, device, stream, p, cut);
  grid.blocks *= cut.all_splits();
  BITTERN_TRY(cuda::launch(Op::kName, attend_splits<kRows>, grid, device, stream, p, cut));
  const cuda::Grid merging{
      .blocks = p.rows(),
      .threads = kThreads,
      .shared = sizeof(float) * (4 * kThreads + 1 + 3 * static_cast<std::size_t>(p.d.dim))};
  return cuda::launch(Op::kName, merge_splits, merging, device, stream, p, cut, p.rows());
}

}  // namespace bittern::attend
