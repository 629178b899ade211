// The KV cache of one attention layer and one sequence, compressed by the row format of
// bittern/aura_desc.h: K and V each with their own width, rotation, scale rule and centring.
//
//   auto cache = KvCache::make({.kv_heads = 8, .dim = 128, .recent = 64});
//   cache->append(k, v);                  k, v [tokens, kv_heads, dim]
//   cache->attend(q, out);                q, out [queries, heads, dim], the last tokens' queries
//   auto guess = cache->fork();           shares pages until either writes to one
//   guess->truncate(guess->size() - 3);   rolls back
//
// append numbers tokens from 0. Token t is in one of three regions, in this order:
//
//   first    t < config.first, in bf16
//   coded    in pages of page_size tokens: [kv_heads, page_size] rows of codes and scales
//   recent   the newest config.recent, in bf16. A token that leaves is encoded from its bf16 value,
//            so the cache does not depend on how tokens were grouped into appends
//
// Encoding is not undone: after truncate the recent region is shorter until it fills again.
//
// With a window, tokens that are window + slack or more behind the newest are dropped, and their
// pages are used again (a ring). `slack` is how many tokens truncate may remove, and how many
// queries beyond the first attend may have. First tokens are kept if window_keeps_first.
//
// On a CUDA device all rows are in its memory: k, v, q, out and sinks are there too. The host has
// the sizes and the page tables, so no call but those that give rows back waits for the device. The
// same appends leave the same bytes on every device, and attend gives the same bits
// (Preference::exact).
//
//   auto cache = KvCache::make(config, {Device::Type::cuda, 0});
//   cache->set_stream({stream});          of the calls that follow
//   auto host = cache->to({});            a copy; and host->to(device) brings it back
//
// A call that fails leaves the cache as it was.
//
// Forks share a pool of pages. A cache, its forks included, may be used by one thread at a time.
#pragma once
#include <memory>
#include <vector>

#include "bittern/codec.h"
#include "bittern/plan.h"

namespace bittern {

// The settings of one side, K or V.
struct KvSide {
  std::int32_t bits = 4;
  Rotation rotation = Rotation::hadamard;
  std::uint64_t seed = 0;  // for the rotation
  ScaleRule scale_rule = ScaleRule::matched;
  // Empty: make_rotation(rotation, dim, seed).
  std::vector<float> table = {};
  // Without levels: sphere_codebook(dim, bits). Without boundaries, coded tokens can be read but
  // nothing can be appended.
  Codebook codebook = {};
  std::vector<float> mean = {};  // [kv_heads, dim], subtracted before encoding; empty: none
  bool operator==(const KvSide&) const;
};

struct KvCacheConfig {
  std::int64_t kv_heads = 1;
  std::int64_t dim = 128;
  std::int64_t page_size = 64;  // tokens, 16..128
  std::int64_t first = 0;
  std::int64_t recent = 0;
  std::int64_t window = 0;  // 0: nothing is forgotten
  std::int64_t slack = 0;
  bool window_keeps_first = false;
  bool f16_scale = false;
  KvSide k = {};
  KvSide v = {};
  bool operator==(const KvCacheConfig&) const = default;
};

// f(name, member, help) for the numbers and choices of a config, and for its tables. Error messages
// and the C setters use these names.
template <class C, class F>
void visit_kv_fields(C& c, F&& f) {
  f("kv_heads", c.kv_heads, "KV heads");
  f("dim", c.dim, "length of a head's row, 2..1024");
  f("page_size", c.page_size, "tokens of a page, 16..128");
  f("first", c.first, "first tokens, kept in bf16");
  f("recent", c.recent, "newest tokens, kept in bf16");
  f("window", c.window, "number of tokens that a query sees (0: all)");
  f("slack", c.slack, "tokens kept beyond the window, for truncate and for several queries");
  f("window_keeps_first", c.window_keeps_first,
    "let queries see the first tokens outside the window too");
  f("f16_scale", c.f16_scale, "store scales in f16 instead of f32");
  f("k.bits", c.k.bits, "bits per code of K, 1..8");
  f("k.rotation", c.k.rotation, "identity, hadamard or dense");
  f("k.seed", c.k.seed, "seed of the rotation");
  f("k.scale_rule", c.k.scale_rule, "matched, none, least_squares or unbiased");
  f("v.bits", c.v.bits, "bits per code of V, 1..8");
  f("v.rotation", c.v.rotation, "identity, hadamard or dense");
  f("v.seed", c.v.seed, "seed of the rotation");
  f("v.scale_rule", c.v.scale_rule, "matched, none, least_squares or unbiased");
}
template <class C, class F>
void visit_kv_tables(C& c, F&& f) {
  f("k.table", c.k.table, "signs [dim] or matrix [dim, dim] of the rotation");
  f("k.codebook.levels", c.k.codebook.levels, "2^bits values, ascending");
  f("k.codebook.boundaries", c.k.codebook.boundaries, "2^bits - 1 values, ascending");
  f("k.mean", c.k.mean, "[kv_heads, dim], subtracted before encoding");
  f("v.table", c.v.table, "signs [dim] or matrix [dim, dim] of the rotation");
  f("v.codebook.levels", c.v.codebook.levels, "2^bits values, ascending");
  f("v.codebook.boundaries", c.v.codebook.boundaries, "2^bits - 1 values, ascending");
  f("v.mean", c.v.mean, "[kv_heads, dim], subtracted before encoding");
}

struct KvAttention {
  double scale = 0;      // of the logits; 0: 1 / sqrt(dim)
  double softcap = 0;    // logits become softcap * tanh(logit / softcap); 0: none
  ConstView sinks = {};  // f32 [heads]; null: none
  bool causal = true;
  Preference preference = Preference::exact;
};

// The memory held, to the byte.
struct KvCacheBytes {
  std::size_t codes = 0;    // packed words of the coded tokens
  std::size_t scales = 0;   // scales of the coded tokens
  std::size_t exact = 0;    // tokens held in bf16
  std::size_t pages = 0;    // memory of the pages in use, whole ones
  std::size_t shared = 0;   // the part of `pages` that another cache holds too
  std::size_t regions = 0;  // memory of the bf16 regions, which grow with their tokens
  std::size_t tables = 0;   // codebooks, rotations, means
};

class KvCache {
 public:
  // Fills in the tables that `config` leaves out. Without the device, the status says what is
  // missing.
  static Result<KvCache> make(const KvCacheConfig& config, Device device = {}) noexcept;

  KvCache(const KvCache&) = delete;  // fork() says what it does
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  // A cache with the same tokens. Pages are shared, and copied when one of the two writes to them.
  Result<KvCache> fork() const noexcept;
  // A cache with the same tokens on another device, or on this one: it shares nothing.
  Result<KvCache> to(Device device) const noexcept;
  Device device() const { return device_; }

  // The CUDA stream of append, attend and fork from now on; forks have it too. It must come after
  // what another stream still does with the cache.
  void set_stream(Stream stream) { stream_ = stream; }
  Stream stream() const { return stream_; }

  // k and v [tokens, kv_heads, dim], f32, f16 or bf16, of any strides (on CUDA none is negative).
  Status append(const ConstView& k, const ConstView& v) noexcept;

  // Removes all tokens from `size` on. Refused if the window would then need tokens that were
  // dropped already.
  Status truncate(std::int64_t size) noexcept;

  // q and out [queries, heads, dim], f32, f16 or bf16, of the newest `queries` tokens:
  // aura_attention with the config's window. Strides may be any, except that the values of a row
  // are neighbours.
  Status attend(const ConstView& q, const MutView& out, const KvAttention& how = {}) const noexcept;
  // What attend would refuse about q, before there is an `out`.
  Status check_query(const ConstView& q) const noexcept;

  // Token t's rows as attention sees them, [kv_heads, dim] each: decoded, means added.
  Status read(std::int64_t token, std::span<float> k, std::span<float> v) const noexcept;

  const KvCacheConfig& config() const { return config_; }
  std::int64_t size() const { return size_; }  // tokens appended, less those taken back
  std::int64_t first() const noexcept;         // how many of them are in each region
  std::int64_t coded() const { return coded_end_ - coded_begin_; }
  std::int64_t recent() const { return size_ - coded_end_; }
  std::int64_t forgotten() const { return coded_begin_ - first(); }  // after the first tokens
  KvCacheBytes bytes() const noexcept;

  // Everything, in the format of docs/kv_cache.md. parse gives an equal cache back, on the CPU, or
  // says why the bytes are not one: foreign, cut short, too long, changed, of another version.
  Result<std::vector<std::byte>> serialize() const noexcept;
  // The same, into the caller's memory of this size.
  std::size_t serialized_bytes() const noexcept;
  Status serialize(std::span<std::byte> to) const noexcept;
  static Result<KvCache> parse(std::span<const std::byte> bytes) noexcept;

  // AURA's layout: packed [kv_heads, capacity, width] u32 and scales
  // [kv_heads, capacity] f32, of K and V, with tokens from slot 0 on. The first axes may have any
  // strides.
  struct AuraViews {
    MutView k_packed, k_scales, v_packed, v_scales;
  };
  // Writes the coded tokens. There must be no others, and the capacity must be enough.
  Status write_aura(const AuraViews& to) const noexcept;
  // A cache of the first `tokens` slots.
  static Result<KvCache> read_aura(const KvCacheConfig& config, const AuraViews& from,
                                   std::int64_t tokens) noexcept;

 private:
  struct Pool;
  struct Regions;
  struct Slot {
    std::int64_t page, token;
  };
  struct Rows;  // what one run of aura_append takes
  KvCache(KvCacheConfig config, Device device);
  Slot slot(std::int64_t token) const;
  Status append_all(const ConstView& k, const ConstView& v, std::vector<std::int32_t>& aside);
  Status append_rows(const ConstView& k, const ConstView& v, const Rows& rows);
  Status copy_from(const KvCache& other);
  Status reserve_pages(std::int64_t tokens);
  Status reserve_exact(std::int64_t first, std::int64_t recent);
  std::int64_t oldest(std::int64_t size) const;
  void forget();
  void drop_pages();
  void release();

  KvCacheConfig config_;
  Device device_;
  Stream stream_ = {};
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Regions> regions_;  // the bf16 rows
  std::vector<std::int32_t> table_;   // pages, oldest first
  std::int64_t table_begin_ = 0;      // the token in the first slot of table_[0]
  std::int64_t size_ = 0, coded_begin_ = 0, coded_end_ = 0;
};

// "aura4v2": bits of K and V; "aura4" is aura4v4.
struct AuraScheme {
  std::int32_t k_bits = 4, v_bits = 4;
  bool operator==(const AuraScheme&) const = default;
};
Result<AuraScheme> parse_aura_name(std::string_view name) noexcept;
std::string aura_name(const AuraScheme& scheme) noexcept;  // "aura" of bits that are none

// A config that reads and writes AURA's caches: hadamard rotations seeded by the layer, matched f32
// scales. With `legacy`, the tables that AURA shipped, for decoding only.
Result<KvCacheConfig> aura_config(const AuraScheme& scheme, std::int64_t kv_heads, std::int64_t dim,
                                  std::uint64_t layer, bool legacy = false) noexcept;

// The tables that AURA shipped for 2, 3, 4 and 8 bits, without boundaries, to read caches that were
// made with them. The 4-bit table has 2.1 times the error of sphere_codebook's, the 8-bit one 3.9
// times.
Result<Codebook> legacy_codebook(std::int64_t dim, std::int32_t bits) noexcept;

}  // namespace bittern
