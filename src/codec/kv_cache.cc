#include "bittern/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/ops/aura_attention.h"
#include "bittern/ops/aura_decode.h"
#include "bittern/ops/aura_encode.h"
#include "codec/kv_pages.h"
#include "core/float_mode.h"
#include "core/guarded.h"
#include "core/scratch.h"

namespace bittern {

using kv::at;
using kv::between;
using kv::expect_memory;
using kv::expect_strides;
using kv::has_size;
using kv::kMostExact;
using kv::kMostTokens;
using kv::refuse;

namespace {

// Checks one side and fills in what it leaves out.
Status complete(const std::string& name, std::int64_t kv_heads, std::int64_t dim, KvSide& side) {
  BITTERN_TRY(between(name + ".bits", side.bits, 1, 8));
  BITTERN_TRY(check_aura_row("kv_cache: " + name, "dim", dim, side.bits, side.rotation));
  BITTERN_TRY(between(name + ".scale_rule", static_cast<std::int32_t>(side.scale_rule), 0, 3));
  if (side.table.empty()) {
    auto table = make_rotation(side.rotation, dim, side.seed);
    if (!table) return table.status();
    side.table = std::move(*table);
  }
  const std::int64_t entries = side.rotation == Rotation::dense      ? dim * dim
                               : side.rotation == Rotation::hadamard ? dim
                                                                     : 0;
  BITTERN_TRY(has_size(name + ".table", side.table.size(), entries));
  if (side.rotation == Rotation::hadamard)
    BITTERN_TRY(check_signs("kv_cache", name + ".table", side.table.data(), dim));
  if (side.codebook.levels.empty()) {
    auto codebook = sphere_codebook(dim, side.bits);
    if (!codebook) return codebook.status();
    side.codebook = std::move(*codebook);
  }
  const std::int64_t levels = std::int64_t{1} << side.bits;
  const auto& [values, boundaries, distortion] = side.codebook;
  BITTERN_TRY(has_size(name + ".codebook.levels", values.size(), levels));
  BITTERN_TRY(check_codebook("kv_cache", name + ".codebook.levels", values.data(), levels));
  if (!boundaries.empty()) {
    BITTERN_TRY(has_size(name + ".codebook.boundaries", boundaries.size(), levels - 1));
    BITTERN_TRY(
        check_boundaries("kv_cache", name + ".codebook.boundaries", boundaries.data(), levels - 1));
  }
  if (!side.mean.empty()) {
    BITTERN_TRY(has_size(name + ".mean", side.mean.size(), kv_heads * dim));
    BITTERN_TRY(check_codebook("kv_cache", name + ".mean", side.mean.data(), kv_heads * dim));
  }
  return {};
}

// Row `head` of a token of a [tokens, kv_heads, dim] view as f32.
void load_row(const ConstView& view, std::int64_t token, std::int64_t head, std::int64_t dim,
              float* to) {
  (void)visit<float, f16, bf16>(view.dtype, [&]<class X>(Type<X>) {
    const X* from = view.as<X>() + view.at(token, head);
    const std::int64_t step = view.stride[2];
    if (step == 1) {
      for (std::int64_t j = 0; j < dim; ++j) to[j] = to_math(from[j]);
    } else {
      for (std::int64_t j = 0; j < dim; ++j) to[j] = to_math(from[j * step]);
    }
    return Status();
  });
}

// A view [n, middle, dim] that may have any strides; `axes` are the names of these.
Status expect_rows(std::string_view operand, const ConstView& view, const char* axes,
                   std::int64_t middle, std::int64_t dim) {
  if (view.shape.rank != 3 || view.shape[0] < 0 || view.shape[1] != middle ||
      view.shape[2] != dim) {
    return refuse(operand, "shape " + view.shape.str() + ", expected [n," + std::to_string(middle) +
                               "," + std::to_string(dim) + "] = " + axes);
  }
  if (view.dtype != DType::f32 && !is_half(view.dtype)) {
    return refuse(operand,
                  std::string("dtype ").append(name(view.dtype)) + ", expected f32, f16 or bf16");
  }
  return expect_memory(operand, view);
}

}  // namespace

bool KvSide::operator==(const KvSide& other) const {
  const FloatMode mode;
  return bits == other.bits && rotation == other.rotation && seed == other.seed &&
         scale_rule == other.scale_rule && table == other.table &&
         codebook.levels == other.codebook.levels &&
         codebook.boundaries == other.codebook.boundaries && mean == other.mean;
}

KvCache::KvCache(KvCacheConfig config)
    : config_(std::move(config)), pool_(std::make_shared<Pool>(config_)) {}
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&& other) noexcept {
  if (this != &other) {
    release();
    config_ = std::move(other.config_);
    pool_ = std::move(other.pool_);
    table_ = std::move(other.table_);
    table_begin_ = other.table_begin_;
    size_ = other.size_;
    coded_begin_ = other.coded_begin_;
    coded_end_ = other.coded_end_;
    first_slots_ = other.first_slots_;
    recent_slots_ = other.recent_slots_;
    k_first_ = std::move(other.k_first_);
    v_first_ = std::move(other.v_first_);
    k_recent_ = std::move(other.k_recent_);
    v_recent_ = std::move(other.v_recent_);
  }
  return *this;
}
KvCache::~KvCache() { release(); }

Result<KvCache> KvCache::make(const KvCacheConfig& given) noexcept try {
  const FloatMode mode;
  KvCacheConfig config = given;
  Status status = [&]() -> Status {
    BITTERN_TRY(between("kv_heads", config.kv_heads, 1, 1 << 16));
    BITTERN_TRY(between("dim", config.dim, kAuraMinDim, kAuraMaxDim));
    BITTERN_TRY(between("page_size", config.page_size, 16, 128));
    const std::int64_t most = kMostExact / (config.kv_heads * config.dim);
    BITTERN_TRY(between("first", config.first, 0, most));
    BITTERN_TRY(between("recent", config.recent, 0, most));
    BITTERN_TRY(between("window", config.window, 0, kMostTokens));
    BITTERN_TRY(between("slack", config.slack, 0, config.window > 0 ? kMostTokens : 0));
    BITTERN_TRY(complete("k", config.kv_heads, config.dim, config.k));
    return complete("v", config.kv_heads, config.dim, config.v);
  }();
  if (!status.ok()) return status;
  return KvCache(std::move(config));
} catch (...) {
  return caught("kv_cache");
}

Result<KvCache> KvCache::fork() const noexcept try {
  KvCache other(config_);
  other.pool_ = pool_;
  other.table_ = table_;
  for (const std::int32_t page : table_) pool_->hold(page);
  other.table_begin_ = table_begin_;
  other.size_ = size_;
  other.coded_begin_ = coded_begin_;
  other.coded_end_ = coded_end_;
  other.first_slots_ = first_slots_;
  other.recent_slots_ = recent_slots_;
  other.k_first_ = k_first_;
  other.v_first_ = v_first_;
  other.k_recent_ = k_recent_;
  other.v_recent_ = v_recent_;
  return other;
} catch (...) {
  return caught("kv_cache: fork");
}

std::int64_t KvCache::first() const noexcept { return std::min(config_.first, size_); }

// ---- writing ----

namespace {

constexpr float kMost = std::numeric_limits<float>::max();

// x + y, limited to the largest finite number if both are finite: the error of a code must not turn
// a finite row into an infinite one.
float finite_sum(float x, float y) {
  const float sum = x + y;
  return std::isinf(sum) && std::isfinite(x) ? std::clamp(sum, -kMost, kMost) : sum;
}

// row = x - mean. If that overflows, row is half of it, which keeps the direction, and the result
// is true.
bool centre(const float* x, const float* mean, std::int64_t dim, float* row) {
  bool overflow = false;
  for (std::int64_t i = 0; i < dim; ++i) {
    row[i] = x[i] - mean[i];
    overflow = overflow || (std::isinf(row[i]) && std::isfinite(x[i]));
  }
  if (!overflow) return false;
  for (std::int64_t i = 0; i < dim; ++i) row[i] = x[i] / 2 - mean[i] / 2;
  return true;
}

}  // namespace

// Encodes `count` tokens after the last coded one; k and v [kv_heads, count, dim], not centred.
Status KvCache::encode(std::int64_t count, const std::vector<float>& k,
                       const std::vector<float>& v) {
  const std::int64_t heads = config_.kv_heads, dim = config_.dim, page_size = config_.page_size;
  BITTERN_TRY(reserve_pages(count));
  std::vector<float> rows;
  std::vector<bool> halved;
  for (std::int64_t done = 0, run; done < count; done += run) {
    const std::int64_t token = coded_end_;
    make_own(at((token - table_begin_) / page_size));
    const Slot to = slot(token);
    run = std::min(count - done, page_size - to.token);
    for (int s = 0; s < 2; ++s) {
      const KvSide& side = s == 0 ? config_.k : config_.v;
      const std::vector<float>& values = s == 0 ? k : v;
      rows.resize(at(heads * run * dim));
      halved.assign(at(heads * run), false);
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* from = values.data() + (h * count + done) * dim;
        float* row = rows.data() + h * run * dim;
        for (std::int64_t t = 0; t < run; ++t, from += dim, row += dim) {
          if (side.mean.empty()) {
            std::copy_n(from, dim, row);
          } else {
            halved[at(h * run + t)] = centre(from, side.mean.data() + h * dim, dim, row);
          }
        }
      }
      // One token's rows are page_size apart; several tokens' rows of a head follow each other.
      const bool one = run == 1;
      const AuraDesc desc{.rows = one ? heads : run,
                          .dim = dim,
                          .bits = side.bits,
                          .rotation = side.rotation,
                          .scale_rule = side.scale_rule,
                          .f16_scale = config_.f16_scale};
      const auto plan = Plan<AuraEncode>::select(desc);
      if (!plan) return plan.status();
      AlignedScratch scratch(plan->workspace_bytes());
      for (std::int64_t h = 0; h < (one ? 1 : heads); ++h) {
        MutView packed = view(pool_->row(s, to.page, h, to.token), desc.packed_shape(),
                              one ? page_size * pool_->words[s] : pool_->words[s]);
        MutView scales{pool_->scale(s, to.page, h, to.token),
                       desc.scale_element(),
                       {},
                       desc.scale_shape(),
                       {one ? page_size : 1, 1}};
        AuraEncode::Args args{
            .x = view(std::as_const(rows).data() + h * run * dim, desc.tensor_shape()),
            .boundaries = view(side.codebook.boundaries.data(), {desc.levels() - 1}),
            .codebook = view(side.codebook.levels.data(), {desc.levels()}),
            .packed = packed,
            .scales = scales};
        if (side.rotation != Rotation::identity)
          args.table = view(side.table.data(), desc.rotation_shape());
        BITTERN_TRY(plan->run(args, {}, scratch.workspace()));
      }
      // Half of what f16 clamps is clamped, too.
      for (std::int64_t i = 0; i < heads * run && !config_.f16_scale; ++i) {
        if (!halved[at(i)]) continue;
        std::byte* p = pool_->scale(s, to.page, i / run, to.token + i % run);
        float scale;
        std::memcpy(&scale, p, sizeof scale);
        scale = finite_sum(scale, scale);
        std::memcpy(p, &scale, sizeof scale);
      }
    }
    coded_end_ += run;
  }
  return {};
}

// Nothing that the cache holds is overwritten or given away before all that can fail has succeeded:
// rows go to slots that are free.
Status KvCache::append(const ConstView& k, const ConstView& v) noexcept {
  const std::int64_t size = size_, begin = coded_begin_, end = coded_end_;
  const std::int64_t table_begin = table_begin_;
  std::vector<std::int32_t> aside;
  Status status = guarded("kv_cache: append", [&] { return append_all(k, v, aside); });
  if (!status.ok()) {
    if (!aside.empty()) std::swap(table_, aside);
    size_ = size;
    coded_begin_ = begin;
    coded_end_ = end;
    table_begin_ = table_begin;
    drop_pages();
  }
  for (const std::int32_t page : aside) pool_->drop(page);
  return status;
}

Status KvCache::append_all(const ConstView& k, const ConstView& v,
                           std::vector<std::int32_t>& aside) {
  const FloatMode mode;
  const std::int64_t heads = config_.kv_heads, dim = config_.dim;
  BITTERN_TRY(expect_rows("k", k, "[tokens,kv_heads,dim]", heads, dim));
  BITTERN_TRY(expect_rows("v", v, "[tokens,kv_heads,dim]", heads, dim));
  const std::int64_t count = k.shape[0];
  if (v.shape[0] != count) {
    return refuse(
        "v", std::to_string(v.shape[0]) + " tokens, expected those of k, " + std::to_string(count));
  }
  if (count > kMostTokens - size_) return refuse("append", "more than 2^29 tokens");
  for (const auto& [name, side] : {std::pair{"k", &config_.k}, {"v", &config_.v}}) {
    if (side->codebook.boundaries.empty()) {
      return refuse(std::string(name).append(".codebook.boundaries"),
                    "none: this table can only decode; to append, the codebook needs boundaries");
    }
  }
  reserve_exact(std::min(config_.first, size_ + count), std::min(config_.recent, recent() + count));
  std::vector<float> row(at(dim));
  // Token `token` of the input to row `slot` of a bf16 region.
  const auto keep = [&](std::int64_t token, std::int64_t slot, std::int64_t slots,
                        std::vector<bf16>& k_rows, std::vector<bf16>& v_rows) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (const auto& [from, to] : {std::pair{&k, &k_rows}, {&v, &v_rows}}) {
        load_row(*from, token, h, dim, row.data());
        for (std::int64_t j = 0; j < dim; ++j)
          (*to)[at((h * slots + slot) * dim + j)] = to_bf16(row[at(j)]);
      }
    }
  };
  std::int64_t taken = 0;
  for (; taken < count && size_ < config_.first; ++taken) {
    keep(taken, size_, first_slots_, k_first_, v_first_);
    coded_begin_ = coded_end_ = ++size_;
  }
  // What leaves the recent region, oldest first, and of the new tokens what finds no room in it;
  // so many at a time that they stay small.
  std::int64_t leaving = std::max<std::int64_t>(recent() + count - taken - config_.recent, 0);
  // The window leaves these behind at once, and all that was coded before them: they are not
  // encoded. The old pages are kept until nothing can fail.
  const std::int64_t skipped =
      std::clamp(oldest(size_ + count - taken) - coded_end_, std::int64_t{0}, leaving);
  if (skipped > 0) {
    const std::int64_t from_region = std::min(skipped, recent());
    std::swap(table_, aside);
    coded_begin_ = coded_end_ += skipped;
    taken += skipped - from_region;
    size_ += skipped - from_region;
    leaving -= skipped;
  }
  while (leaving > 0) {
    const std::int64_t n = std::min(leaving, 4 * config_.page_size);
    std::vector<float> k_rows(at(heads * n * dim)), v_rows(k_rows.size());
    const std::int64_t from_region = std::min(n, recent());
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < n; ++i) {
        float* to[] = {k_rows.data() + (h * n + i) * dim, v_rows.data() + (h * n + i) * dim};
        for (int s = 0; s < 2; ++s) {
          if (i < from_region) {
            const std::int64_t slot = (coded_end_ + i) % recent_slots_;
            const bf16* from =
                (s == 0 ? k_recent_ : v_recent_).data() + (h * recent_slots_ + slot) * dim;
            for (std::int64_t j = 0; j < dim; ++j) to[s][j] = to_f32(from[j]);
          } else {
            load_row(s == 0 ? k : v, taken + i - from_region, h, dim, to[s]);
            if (config_.recent > 0)
              for (std::int64_t j = 0; j < dim; ++j) to[s][j] = to_f32(to_bf16(to[s][j]));
          }
        }
      }
    }
    BITTERN_TRY(encode(n, k_rows, v_rows));
    taken += n - from_region;
    size_ += n - from_region;
    leaving -= n;
  }
  for (; taken < count; ++taken, ++size_)
    keep(taken, size_ % recent_slots_, recent_slots_, k_recent_, v_recent_);
  forget();
  return {};
}

Status KvCache::truncate(std::int64_t size) noexcept try {
  BITTERN_TRY(between("truncate", size, 0, size_));
  const std::int64_t least = forgotten() > 0 ? coded_begin_ + config_.window : 0;
  if (size < size_ && size < least) {
    return refuse("truncate", std::to_string(size) + ", expected at least " +
                                  std::to_string(least) +
                                  ": the window would reach tokens that are gone");
  }
  size_ = size;
  coded_end_ = std::min(coded_end_, size);
  coded_begin_ = std::min(coded_begin_, size);
  drop_pages();
  return {};
} catch (...) {
  return caught("kv_cache: truncate");
}

// ---- reading ----

Status KvCache::check_query(const ConstView& q) const noexcept try {
  const std::int64_t dim = config_.dim;
  if (q.shape.rank != 3) {
    return refuse(
        "q", "shape " + q.shape.str() + ", expected [queries,heads," + std::to_string(dim) + "]");
  }
  const std::int64_t heads = q.shape[1];
  BITTERN_TRY(between("heads", heads, 1, 1 << 16));
  BITTERN_TRY(expect_rows("q", q, "[queries,heads,dim]", heads, dim));
  const std::int64_t queries = q.shape[0];
  BITTERN_TRY(between("queries", queries, 0, size_));
  BITTERN_TRY(expect_strides("q", q, false));
  if (forgotten() > 0 && queries > 0 && size_ - queries + 1 - config_.window < coded_begin_) {
    return refuse("queries", std::to_string(queries) + ", expected at most " +
                                 std::to_string(size_ + 1 - config_.window - coded_begin_) +
                                 ": the first one's window reaches tokens that are gone");
  }
  return {};
} catch (...) {
  return caught("kv_cache: check_query");
}

Status KvCache::attend(const ConstView& q, const MutView& out,
                       const KvAttention& how) const noexcept try {
  const FloatMode mode;
  BITTERN_TRY(check_query(q));
  const std::int64_t queries = q.shape[0], heads = q.shape[1], dim = config_.dim;
  AuraAttentionDesc desc{.queries = queries,
                         .heads = heads,
                         .kv_heads = config_.kv_heads,
                         .dim = dim,
                         .capacity = static_cast<std::int64_t>(table_.size()) * config_.page_size,
                         .page_size = config_.page_size,
                         .pages = pool_->pages(),
                         .first = first_slots_,
                         .recent = recent_slots_,
                         .k_bits = config_.k.bits,
                         .v_bits = config_.v.bits,
                         .k_rotation = config_.k.rotation,
                         .v_rotation = config_.v.rotation,
                         .scale = how.scale,
                         .softcap = how.softcap,
                         .window = config_.window,
                         .window_keeps_first = config_.window_keeps_first,
                         .causal = how.causal,
                         .element = q.dtype,
                         .f16_scale = config_.f16_scale,
                         .exact = DType::bf16};
  const auto plan = Plan<AuraAttention>::select(desc, {}, how.preference);
  if (!plan) return plan.status();
  // Before the first token that is gone none is in a window.
  const std::int64_t firsts = forgotten() > 0 && !config_.window_keeps_first ? 0 : first();
  const std::int32_t lengths[] = {static_cast<std::int32_t>(firsts),
                                  static_cast<std::int32_t>(coded()),
                                  static_cast<std::int32_t>(recent())};
  const std::int64_t ring = std::max<std::int64_t>(recent_slots_, 1);
  const std::int32_t starts[] = {
      static_cast<std::int32_t>(coded() > 0 ? coded_begin_ - table_begin_ : 0),
      static_cast<std::int32_t>(coded_end_ % ring)};
  const auto as_sequence = [&](auto rows) {  // [queries, heads, dim] as one sequence's
    rows.shape = desc.query_shape();
    rows.stride = {0, rows.stride[0], rows.stride[1], rows.stride[2]};
    return rows;
  };
  if (out.shape != q.shape || out.dtype != q.dtype) {
    return refuse("out", std::string(name(out.dtype)) + " " + out.shape.str() + ", expected " +
                             name(q.dtype) + " " + q.shape.str());
  }
  BITTERN_TRY(expect_rows("out", out, "[queries,heads,dim]", heads, dim));
  BITTERN_TRY(expect_strides("out", out, true));
  const Pool& pool = *pool_;
  const auto scales = [&](int side) {
    return ConstView{pool.scales[side].data(),
                     desc.scale_element(),
                     {},
                     desc.scale_shape(),
                     desc.scale_shape().dense_strides()};
  };
  const auto floats = [](const std::vector<float>& values, const Shape& shape) {
    return values.empty() ? ConstView{} : view(values.data(), shape);
  };
  const auto exact = [&](const std::vector<bf16>& rows, std::int64_t tokens) {
    return view(rows.data(), {desc.sequences * desc.kv_heads, tokens, desc.dim});
  };
  const Shape mean{config_.kv_heads, dim};
  const AuraAttention::Args args{
      .q = as_sequence(q),
      .k_packed = view(pool.codes[0].data(), desc.packed_shape(desc.k_bits)),
      .k_scales = scales(0),
      .v_packed = view(pool.codes[1].data(), desc.packed_shape(desc.v_bits)),
      .v_scales = scales(1),
      .k_codebook = floats(config_.k.codebook.levels, {std::int64_t{1} << desc.k_bits}),
      .v_codebook = floats(config_.v.codebook.levels, {std::int64_t{1} << desc.v_bits}),
      .k_table = floats(config_.k.table, desc.rotation_shape(desc.k_rotation)),
      .v_table = floats(config_.v.table, desc.rotation_shape(desc.v_rotation)),
      .block_table = view(table_.data(), desc.table_shape()),
      .lengths = view(lengths, {1, 3}),
      .starts = view(starts, {1, 2}),
      .k_first = exact(k_first_, desc.first),
      .v_first = exact(v_first_, desc.first),
      .k_recent = exact(k_recent_, desc.recent),
      .v_recent = exact(v_recent_, desc.recent),
      .k_mean = floats(config_.k.mean, mean),
      .v_mean = floats(config_.v.mean, mean),
      .sinks = how.sinks,
      .out = as_sequence(out)};
  AlignedScratch scratch(plan->workspace_bytes());
  return plan->run(args, {}, scratch.workspace());
} catch (...) {
  return caught("kv_cache: attend");
}

Status KvCache::read(std::int64_t token, std::span<float> k, std::span<float> v) const noexcept
    try {
  const FloatMode mode;
  const std::int64_t heads = config_.kv_heads, dim = config_.dim;
  BITTERN_TRY(has_size("k", k.size(), heads * dim));
  BITTERN_TRY(has_size("v", v.size(), heads * dim));
  BITTERN_TRY(between("token", token, 0, size_ - 1));
  if (token >= first() && token < coded_begin_) {
    return refuse("token", std::to_string(token) + " is gone, expected at least " +
                               std::to_string(coded_begin_));
  }
  const bool early = token < first();
  for (int s = 0; s < 2; ++s) {
    const KvSide& side = s == 0 ? config_.k : config_.v;
    const std::span<float> to = s == 0 ? k : v;
    if (early || token >= coded_end_) {
      const std::int64_t slots = early ? first_slots_ : recent_slots_;
      const std::vector<bf16>& rows =
          s == 0 ? (early ? k_first_ : k_recent_) : (early ? v_first_ : v_recent_);
      for (std::int64_t i = 0; i < heads * dim; ++i)
        to[at(i)] = to_f32(rows[at((i / dim * slots + token % slots) * dim + i % dim)]);
      continue;
    }
    const Slot from = slot(token);
    const AuraDesc desc{.rows = heads,
                        .dim = dim,
                        .bits = side.bits,
                        .rotation = side.rotation,
                        .f16_scale = config_.f16_scale};
    const auto plan = Plan<AuraDecode>::select(desc);
    if (!plan) return plan.status();
    AuraDecode::Args args{.packed = view(pool_->row(s, from.page, 0, from.token),
                                         desc.packed_shape(), config_.page_size * pool_->words[s]),
                          .scales = {pool_->scale(s, from.page, 0, from.token),
                                     desc.scale_element(),
                                     {},
                                     desc.scale_shape(),
                                     {config_.page_size, 1}},
                          .codebook = view(side.codebook.levels.data(), {desc.levels()}),
                          .y = view(to.data(), desc.tensor_shape())};
    if (side.rotation != Rotation::identity)
      args.table = view(side.table.data(), desc.rotation_shape());
    AlignedScratch scratch(plan->workspace_bytes());
    BITTERN_TRY(plan->run(args, {}, scratch.workspace()));
    for (std::int64_t i = 0; !side.mean.empty() && i < heads * dim; ++i)
      to[at(i)] = finite_sum(to[at(i)], side.mean[at(i)]);
  }
  return {};
} catch (...) {
  return caught("kv_cache: read");
}

KvCacheBytes KvCache::bytes() const noexcept {
  KvCacheBytes b;
  const std::int64_t rows = coded() * config_.kv_heads;
  b.codes = at(rows * 4 * (pool_->words[0] + pool_->words[1]));
  b.scales = at(rows * 2 * pool_->scale_bytes);
  b.exact = at((first() + recent()) * config_.kv_heads * config_.dim) * 2 * sizeof(bf16);
  b.pages = table_.size() * pool_->page_bytes();
  for (const std::int32_t page : table_)
    if (pool_->holders[at(page)] > 1) b.shared += pool_->page_bytes();
  b.regions =
      (k_first_.size() + v_first_.size() + k_recent_.size() + v_recent_.size()) * sizeof(bf16);
  for (const KvSide* side : {&config_.k, &config_.v}) {
    b.tables += (side->table.size() + side->mean.size() + side->codebook.levels.size() +
                 side->codebook.boundaries.size()) *
                sizeof(float);
  }
  return b;
}

}  // namespace bittern
