#include "bittern/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/ops/aura_append.h"
#include "bittern/ops/aura_attention.h"
#include "bittern/ops/aura_decode.h"
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

// A view [tokens, kv_heads, dim] of the host, as f32 without gaps.
std::vector<float> dense_rows(const ConstView& view) {
  std::vector<float> rows;
  rows.reserve(at(view.shape.numel()));
  (void)visit<float, f16, bf16>(view.dtype, [&]<class X>(Type<X>) {
    for (std::int64_t t = 0; t < view.shape[0]; ++t)
      for (std::int64_t h = 0; h < view.shape[1]; ++h)
        for (std::int64_t j = 0; j < view.shape[2]; ++j)
          rows.push_back(to_math(view.as<X>()[view.at(t, h, j)]));
    return Status();
  });
  return rows;
}

// A view [n, middle, dim] that may have any strides; `axes` are the names of these.
Status expect_rows(std::string_view operand, const ConstView& view, const char* axes,
                   std::int64_t middle, std::int64_t dim, Device device) {
  if (view.shape.rank != 3 || view.shape[0] < 0 || view.shape[1] != middle ||
      view.shape[2] != dim) {
    return refuse(operand, "shape " + view.shape.str() + ", expected [n," + std::to_string(middle) +
                               "," + std::to_string(dim) + "] = " + axes);
  }
  if (view.dtype != DType::f32 && !is_half(view.dtype)) {
    return refuse(operand,
                  std::string("dtype ").append(name(view.dtype)) + ", expected f32, f16 or bf16");
  }
  return expect_memory(operand, view, device);
}

}  // namespace

bool KvSide::operator==(const KvSide& other) const {
  const FloatMode mode;
  return bits == other.bits && rotation == other.rotation && seed == other.seed &&
         scale_rule == other.scale_rule && table == other.table &&
         codebook.levels == other.codebook.levels &&
         codebook.boundaries == other.codebook.boundaries && mean == other.mean;
}

KvCache::KvCache(KvCacheConfig config, Device device)
    : config_(std::move(config)),
      device_(device),
      pool_(std::make_shared<Pool>(config_, device)),
      regions_(std::make_unique<Regions>(device)) {}
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&& other) noexcept {
  if (this != &other) {
    release();
    config_ = std::move(other.config_);
    device_ = other.device_;
    stream_ = other.stream_;
    pool_ = std::move(other.pool_);
    regions_ = std::move(other.regions_);
    table_ = std::move(other.table_);
    table_begin_ = other.table_begin_;
    size_ = other.size_;
    coded_begin_ = other.coded_begin_;
    coded_end_ = other.coded_end_;
  }
  return *this;
}
KvCache::~KvCache() { release(); }

Result<KvCache> KvCache::make(const KvCacheConfig& given, Device device) noexcept try {
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
    BITTERN_TRY(complete("v", config.kv_heads, config.dim, config.v));
    return expect_device("kv_cache", device);
  }();
  if (!status.ok()) return status;
  KvCache made(std::move(config), device);
  BITTERN_TRY(made.pool_->fill_tables(made.config_));
  return made;
} catch (...) {
  return caught("kv_cache");
}

Result<KvCache> KvCache::fork() const noexcept try {
  KvCache other(config_, device_);
  other.stream_ = stream_;
  for (const auto& [to, from] : {std::pair{&other.regions_->first, &regions_->first},
                                 {&other.regions_->recent, &regions_->recent}}) {
    for (int s = 0; s < 2; ++s) {
      const std::size_t bytes = from->rows[s].size();
      BITTERN_TRY(to->rows[s].grow(bytes, stream_));
      BITTERN_TRY(copy_on(device_, to->rows[s].data(), from->rows[s].data(), bytes, stream_));
    }
    to->slots = from->slots;
  }
  std::vector<std::int32_t> table = table_;
  other.pool_ = pool_;
  other.table_ = std::move(table);
  for (const std::int32_t page : table_) pool_->hold(page);
  other.table_begin_ = table_begin_;
  other.size_ = size_;
  other.coded_begin_ = coded_begin_;
  other.coded_end_ = coded_end_;
  return other;
} catch (...) {
  return caught("kv_cache: fork");
}

Result<KvCache> KvCache::to(Device device) const noexcept try {
  BITTERN_TRY(expect_device("kv_cache", device));
  KvCache other(config_, device);
  BITTERN_TRY(other.pool_->fill_tables(config_));
  BITTERN_TRY(other.copy_from(*this));
  return other;
} catch (...) {
  return caught("kv_cache: to");
}

std::int64_t KvCache::first() const noexcept { return std::min(config_.first, size_); }

// ---- writing ----

// What one run of aura_append takes: where the tokens from `begin` of k and v on go.
struct KvCache::Rows {
  std::int64_t begin;
  Regions::Region* region;                          // of the kept rows
  std::vector<std::int32_t> slots = {}, kept = {};  // -1: none
};

Status KvCache::append_rows(const ConstView& k, const ConstView& v, const Rows& rows) {
  const auto tokens = static_cast<std::int64_t>(rows.slots.size());
  if (tokens == 0) return {};
  const Pool& pool = *pool_;
  const Regions::Region& region = *rows.region;
  const AuraAppendDesc desc{.tokens = tokens,
                            .kv_heads = config_.kv_heads,
                            .dim = config_.dim,
                            .page_size = config_.page_size,
                            .pages = pool.pages(),
                            .kept = region.slots,
                            .k_bits = config_.k.bits,
                            .v_bits = config_.v.bits,
                            .k_rotation = config_.k.rotation,
                            .v_rotation = config_.v.rotation,
                            .k_scale_rule = config_.k.scale_rule,
                            .v_scale_rule = config_.v.scale_rule,
                            .element = k.dtype,
                            .f16_scale = config_.f16_scale,
                            .exact = DType::bf16};
  const auto plan = Plan<AuraAppend>::select(desc, device_);
  if (!plan) return plan.status();
  const std::int32_t *slots = rows.slots.data(), *kept = rows.kept.data();
  if (!on_host(device_)) {
    std::vector<std::int32_t> both = rows.slots;
    both.insert(both.end(), rows.kept.begin(), rows.kept.end());
    const std::size_t bytes = both.size() * sizeof(std::int32_t);
    Memory& to = regions_->slots;
    if (bytes > to.size()) BITTERN_TRY(to.grow(std::max(bytes, 2 * to.size()), stream_));
    BITTERN_TRY(copy_on(device_, to.data(), both.data(), bytes, stream_));
    slots = reinterpret_cast<const std::int32_t*>(to.data());
    kept = slots + tokens;
  }
  const auto some = [&](ConstView all) {
    all.data = static_cast<const std::byte*>(all.data) +
               rows.begin * all.stride[0] * static_cast<std::int64_t>(size_of(all.dtype));
    all.shape[0] = tokens;
    return all;
  };
  const auto floats = [&](const float* values, const Shape& shape) {
    return values == nullptr ? ConstView{} : view(values, shape, device_);
  };
  const auto coded = [&](std::byte* data, DType dtype, const Shape& shape) {
    return MutView{data, dtype, device_, shape, shape.dense_strides()};
  };
  const kv::Tables of_k = pool.tables(config_, 0), of_v = pool.tables(config_, 1);
  AuraAppend::Args args{
      .k = some(k),
      .v = some(v),
      .slots = view(slots, {tokens}, device_),
      .k_boundaries = floats(of_k.boundaries, desc.boundary_shape(desc.k_bits)),
      .v_boundaries = floats(of_v.boundaries, desc.boundary_shape(desc.v_bits)),
      .k_codebook = floats(of_k.levels, desc.codebook_shape(desc.k_bits)),
      .v_codebook = floats(of_v.levels, desc.codebook_shape(desc.v_bits)),
      .k_table = floats(of_k.table, desc.rotation_shape(desc.k_rotation)),
      .v_table = floats(of_v.table, desc.rotation_shape(desc.v_rotation)),
      .k_mean = floats(of_k.mean, desc.mean_shape()),
      .v_mean = floats(of_v.mean, desc.mean_shape()),
      .k_packed = coded(pool.codes[0].data(), DType::u32, desc.packed_shape(desc.k_bits)),
      .k_scales = coded(pool.scales[0].data(), desc.scale_element(), desc.scale_shape()),
      .v_packed = coded(pool.codes[1].data(), DType::u32, desc.packed_shape(desc.v_bits)),
      .v_scales = coded(pool.scales[1].data(), desc.scale_element(), desc.scale_shape())};
  if (region.slots > 0) {
    args.kept_slots = view(kept, {tokens}, device_);
    args.k_kept = coded(region.rows[0].data(), DType::bf16, desc.kept_shape());
    args.v_kept = coded(region.rows[1].data(), DType::bf16, desc.kept_shape());
  }
  AlignedScratch scratch(plan->workspace_bytes());  // none on CUDA
  return plan->run(args, stream_, scratch.workspace());
}

// Nothing that the cache holds is overwritten or given away before all that can fail has succeeded:
// rows go to slots that are free, and the last run alone replaces rows of the recent region.
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
  BITTERN_TRY(expect_rows("k", k, "[tokens,kv_heads,dim]", heads, dim, device_));
  BITTERN_TRY(expect_rows("v", v, "[tokens,kv_heads,dim]", heads, dim, device_));
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
  // The op takes one dtype, and no strides that are negative.
  const auto backwards = [](const ConstView& x) {
    return std::any_of(x.stride.dim.begin(), x.stride.dim.begin() + x.stride.rank,
                       [](std::int64_t stride) { return stride < 0; });
  };
  if (k.dtype != v.dtype || backwards(k) || backwards(v)) {
    if (!on_host(device_)) {
      if (k.dtype == v.dtype)
        return unsupported("kv_cache: k and v: negative strides, expected none on " +
                           name(device_));
      return refuse("v", std::string("dtype ").append(name(v.dtype)) + ", expected that of k, " +
                             name(k.dtype) + ", on " + name(device_));
    }
    const std::vector<float> k_rows = dense_rows(k), v_rows = dense_rows(v);
    return append_all(view(k_rows.data(), k.shape), view(v_rows.data(), v.shape), aside);
  }
  BITTERN_TRY(reserve_exact(std::min(config_.first, size_ + count),
                            std::min(config_.recent, recent() + count)));
  const std::int64_t firsts = std::clamp(config_.first - size_, std::int64_t{0}, count);
  if (firsts > 0) {
    Rows rows{.begin = 0, .region = &regions_->first};
    rows.slots.assign(at(firsts), -1);
    for (std::int64_t i = 0; i < firsts; ++i)
      rows.kept.push_back(static_cast<std::int32_t>(size_ + i));
    BITTERN_TRY(append_rows(k, v, rows));
    coded_begin_ = coded_end_ = size_ += firsts;
  }
  // Tokens [held, base) are in the recent region, [base, size) are new; [held, end) leave, of which
  // the window forgets those before `from` at once, and all that was coded before them: they are
  // not encoded. The old pages are kept until nothing can fail.
  const std::int64_t base = size_, size = base + count - firsts, held = coded_end_;
  const std::int64_t end = size - std::min(config_.recent, size - held);
  const std::int64_t from = held + std::clamp(oldest(size) - held, std::int64_t{0}, end - held);
  if (from > held) {
    std::swap(table_, aside);
    coded_begin_ = coded_end_ = from;
  }
  BITTERN_TRY(reserve_pages(end - from));
  Rows rows{.begin = firsts + std::clamp(from - base, std::int64_t{0}, size - base),
            .region = &regions_->recent};
  const std::int64_t ring = regions_->recent.slots;
  const auto place = [&](std::int64_t token) {  // where it is coded
    if (token < from) return -1;
    const Slot to = slot(token);
    return static_cast<std::int32_t>(to.page * config_.page_size + to.token);
  };
  for (std::int64_t token = base + rows.begin - firsts; token < size; ++token) {
    const bool direct = token < end;
    // One that stays takes the place of the one that was in its slot of the ring, if any.
    const std::int64_t coded = direct ? token : token - ((token - base) / ring + 1) * ring;
    rows.slots.push_back(direct || coded >= held ? place(coded) : -1);
    rows.kept.push_back(direct ? -1 : static_cast<std::int32_t>(token % ring));
  }
  BITTERN_TRY(append_rows(k, v, rows));
  size_ = size;
  coded_end_ = end;
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

namespace {

constexpr float kMost = std::numeric_limits<float>::max();

// x + y, limited to the largest finite number if both are finite: the error of a code must not turn
// a finite row into an infinite one.
float finite_sum(float x, float y) {
  const float sum = x + y;
  return std::isinf(sum) && std::isfinite(x) ? std::clamp(sum, -kMost, kMost) : sum;
}

}  // namespace

Status KvCache::check_query(const ConstView& q) const noexcept try {
  const std::int64_t dim = config_.dim;
  if (q.shape.rank != 3) {
    return refuse(
        "q", "shape " + q.shape.str() + ", expected [queries,heads," + std::to_string(dim) + "]");
  }
  const std::int64_t heads = q.shape[1];
  BITTERN_TRY(between("heads", heads, 1, 1 << 16));
  BITTERN_TRY(expect_rows("q", q, "[queries,heads,dim]", heads, dim, device_));
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
                         .first = regions_->first.slots,
                         .recent = regions_->recent.slots,
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
  const auto plan = Plan<AuraAttention>::select(desc, device_, how.preference);
  if (!plan) return plan.status();
  // Before the first token that is gone none is in a window.
  const std::int64_t firsts = forgotten() > 0 && !config_.window_keeps_first ? 0 : first();
  const std::int64_t ring = std::max<std::int64_t>(regions_->recent.slots, 1);
  // Lengths, starts, pages.
  std::vector<std::int32_t> state{
      static_cast<std::int32_t>(firsts), static_cast<std::int32_t>(coded()),
      static_cast<std::int32_t>(recent()),
      static_cast<std::int32_t>(coded() > 0 ? coded_begin_ - table_begin_ : 0),
      static_cast<std::int32_t>(coded_end_ % ring)};
  state.insert(state.end(), table_.begin(), table_.end());
  const auto as_sequence = [&](auto rows) {  // [queries, heads, dim] as one sequence's
    rows.shape = desc.query_shape();
    rows.stride = {0, rows.stride[0], rows.stride[1], rows.stride[2]};
    return rows;
  };
  if (out.shape != q.shape || out.dtype != q.dtype) {
    return refuse("out", std::string(name(out.dtype)) + " " + out.shape.str() + ", expected " +
                             name(q.dtype) + " " + q.shape.str());
  }
  BITTERN_TRY(expect_rows("out", out, "[queries,heads,dim]", heads, dim, device_));
  BITTERN_TRY(expect_strides("out", out, true));
  const Pool& pool = *pool_;
  Regions& regions = *regions_;
  const std::int32_t* told = state.data();
  AlignedScratch host_scratch(on_host(device_) ? plan->workspace_bytes() : 0);
  Workspace workspace = host_scratch.workspace();
  if (!on_host(device_)) {
    BITTERN_TRY(regions.scratch.grow(plan->workspace_bytes(), stream_));
    workspace = {regions.scratch.data(), regions.scratch.size()};
    if (state != regions.told) {
      const std::size_t bytes = state.size() * sizeof(std::int32_t);
      regions.told.clear();
      if (bytes > regions.attended.size())
        BITTERN_TRY(regions.attended.grow(std::max(bytes, 2 * regions.attended.size()), stream_));
      BITTERN_TRY(copy_on(device_, regions.attended.data(), state.data(), bytes, stream_));
      regions.told = std::move(state);
    }
    told = reinterpret_cast<const std::int32_t*>(regions.attended.data());
  }
  const auto stored = [&](const std::byte* data, DType dtype, const Shape& shape) {
    return ConstView{data, dtype, device_, shape, shape.dense_strides()};
  };
  const auto floats = [&](const float* values, const Shape& shape) {
    return values == nullptr ? ConstView{} : view(values, shape, device_);
  };
  const auto exact = [&](const Regions::Region& region, int side) {
    return stored(region.rows[side].data(), DType::bf16, {desc.kv_heads, region.slots, desc.dim});
  };
  const kv::Tables of_k = pool.tables(config_, 0), of_v = pool.tables(config_, 1);
  const Shape mean{config_.kv_heads, dim};
  const AuraAttention::Args args{
      .q = as_sequence(q),
      .k_packed = stored(pool.codes[0].data(), DType::u32, desc.packed_shape(desc.k_bits)),
      .k_scales = stored(pool.scales[0].data(), desc.scale_element(), desc.scale_shape()),
      .v_packed = stored(pool.codes[1].data(), DType::u32, desc.packed_shape(desc.v_bits)),
      .v_scales = stored(pool.scales[1].data(), desc.scale_element(), desc.scale_shape()),
      .k_codebook = floats(of_k.levels, {std::int64_t{1} << desc.k_bits}),
      .v_codebook = floats(of_v.levels, {std::int64_t{1} << desc.v_bits}),
      .k_table = floats(of_k.table, desc.rotation_shape(desc.k_rotation)),
      .v_table = floats(of_v.table, desc.rotation_shape(desc.v_rotation)),
      .block_table = view(told + 5, desc.table_shape(), device_),
      .lengths = view(told, {1, 3}, device_),
      .starts = view(told + 3, {1, 2}, device_),
      .k_first = exact(regions.first, 0),
      .v_first = exact(regions.first, 1),
      .k_recent = exact(regions.recent, 0),
      .v_recent = exact(regions.recent, 1),
      .k_mean = floats(of_k.mean, mean),
      .v_mean = floats(of_v.mean, mean),
      .sinks = how.sinks,
      .out = as_sequence(out)};
  return plan->run(args, stream_, workspace);
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
  const bool early = token < first(), coded = !early && token < coded_end_;
  const Regions::Region& region = early ? regions_->first : regions_->recent;
  const Slot from = coded ? slot(token) : Slot{};
  BITTERN_TRY(wait_for(device_));
  // A row of every head, to the host.
  const auto fetch = [&](void* to, std::size_t bytes, auto&& row) -> Status {
    for (std::int64_t h = 0; h < heads; ++h)
      BITTERN_TRY(
          transfer({}, static_cast<std::byte*>(to) + at(h) * bytes, device_, row(h), bytes));
    return {};
  };
  for (int s = 0; s < 2; ++s) {
    const KvSide& side = s == 0 ? config_.k : config_.v;
    const std::span<float> to = s == 0 ? k : v;
    if (!coded) {
      std::vector<bf16> rows(at(heads * dim));
      BITTERN_TRY(fetch(rows.data(), at(dim) * sizeof(bf16),
                        [&](std::int64_t h) { return region.row(s, h, token, dim); }));
      for (std::size_t i = 0; i < rows.size(); ++i) to[i] = to_f32(rows[i]);
      continue;
    }
    const AuraDesc desc{.rows = heads,
                        .dim = dim,
                        .bits = side.bits,
                        .rotation = side.rotation,
                        .f16_scale = config_.f16_scale};
    const auto plan = Plan<AuraDecode>::select(desc);
    if (!plan) return plan.status();
    std::vector<std::uint32_t> packed(at(heads * pool_->words[s]));
    std::vector<float> scales(at(heads));  // room for either dtype
    BITTERN_TRY(fetch(packed.data(), at(4 * pool_->words[s]),
                      [&](std::int64_t h) { return pool_->row(s, from.page, h, from.token); }));
    BITTERN_TRY(fetch(scales.data(), at(pool_->scale_bytes),
                      [&](std::int64_t h) { return pool_->scale(s, from.page, h, from.token); }));
    AuraDecode::Args args{
        .packed = view(std::as_const(packed).data(), desc.packed_shape()),
        .scales = {scales.data(), desc.scale_element(), {}, desc.scale_shape(), {1, 1}},
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
  for (const Regions::Region* region : {&regions_->first, &regions_->recent})
    b.regions += region->rows[0].size() + region->rows[1].size();
  for (const KvSide* side : {&config_.k, &config_.v}) {
    b.tables += (side->table.size() + side->mean.size() + side->codebook.levels.size() +
                 side->codebook.boundaries.size()) *
                sizeof(float);
  }
  return b;
}

}  // namespace bittern
