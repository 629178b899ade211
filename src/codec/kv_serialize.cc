// KvCache::serialize and parse: the format of docs/kv_cache.md.
#include <bit>
#include <cstring>

#include "codec/kv_pages.h"
#include "core/guarded.h"

namespace bittern {

using kv::at;
using kv::kMostExact;
using kv::kMostTokens;
using kv::refuse;

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[8] = {'B', 'T', 'R', 'N', 'K', 'V', '\r', '\n'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kOpening = sizeof kMagic + sizeof kVersion + sizeof(std::uint64_t);

std::uint64_t checksum(std::span<const std::byte> bytes) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  return hash;
}

// Writes one thing after another, or only counts the bytes.
class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}  // null: counts
  template <class T>
  void value(T x) {
    array(&x, 1);
  }
  template <class T>
  void array(const T* from, std::size_t count) {
    if (to_ != nullptr && count > 0) std::memcpy(to_ + size_, from, count * sizeof(T));
    size_ += count * sizeof(T);
  }
  void list(const std::vector<float>& values) {
    value(static_cast<std::uint64_t>(values.size()));
    array(values.data(), values.size());
  }
  std::size_t size() const { return size_; }

 private:
  std::byte* to_;
  std::size_t size_ = 0;
};

// Reads fields in order, and knows where each was.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::size_t offset) : rest_(bytes), offset_(offset) {}
  std::size_t left() const { return rest_.size(); }
  const Status& status() const { return status_; }
  template <class T>
  void value(const std::string& field, T& x) {
    fields_.emplace_back(field, offset_);
    if (fits(sizeof(T), 1, "the bytes end here")) array(&x, 1);
  }
  template <class T>
  void array(T* to, std::size_t count) {
    if (count == 0) return;  // `to` may be null
    std::memcpy(to, rest_.data(), count * sizeof(T));
    skip(count * sizeof(T));
  }
  void list(const std::string& field, std::vector<float>& values) {
    std::uint64_t count = 0;
    value(field, count);
    if (!fits(sizeof(float), count,
              std::to_string(count) + " values, but " + std::to_string(left()) + " bytes follow")) {
      return;
    }
    values.resize(static_cast<std::size_t>(count));
    array(values.data(), values.size());
  }
  void flag(const std::string& field, bool& x) {
    std::uint8_t byte = 0;
    value(field, byte);
    if (byte > 1) fail(bad(field, std::to_string(byte) + ", expected 0 or 1"));
    x = byte == 1;
  }
  template <class Enum>
  void choice(const std::string& field, Enum& x, std::int32_t most) {
    std::int32_t number = 0;
    value(field, number);
    if (number < 0 || number > most)
      fail(bad(field, std::to_string(number) + ", expected 0.." + std::to_string(most)));
    x = static_cast<Enum>(number);
  }
  // "kv_cache: bytes: k.bits at byte 78: what"
  Status bad(std::string_view field, const std::string& what) const {
    std::string where(field);
    for (const auto& [name, offset] : fields_)
      if (name == field) where += " at byte " + std::to_string(offset);
    return refuse("bytes", where + ": " + what);
  }
  // The same of an error that KvCache::make has for the config that was read.
  Status bad(const Status& made) const {
    std::string_view text = made.message();
    text.remove_prefix(std::min(std::string_view("kv_cache: ").size(), text.size()));
    for (const std::string_view side : {"k: ", "v: "})  // of check_aura_row: dim and its rotation
      if (text.starts_with(side)) text.remove_prefix(side.size());
    const std::size_t colon = std::min(text.find(": "), text.size());
    const std::string_view rest = text.substr(std::min(colon + 2, text.size()));
    return {made.code(), std::string(bad(text.substr(0, colon), std::string(rest)).message())};
  }

 private:
  bool fits(std::size_t size, std::uint64_t count, const std::string& otherwise) {
    if (!status_.ok()) return false;
    if (count <= rest_.size() / size) return true;
    fail(bad(fields_.back().first, otherwise));
    return false;
  }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  void skip(std::size_t bytes) {
    rest_ = rest_.subspan(bytes);
    offset_ += bytes;
  }
  std::span<const std::byte> rest_;
  std::size_t offset_;
  std::vector<std::pair<std::string, std::size_t>> fields_;
  Status status_;
};

// The config's numbers, in order, for both ways.
template <class C, class F>
void each_number(C& c, F&& f) {
  f("kv_heads", c.kv_heads);
  f("dim", c.dim);
  f("page_size", c.page_size);
  f("first", c.first);
  f("recent", c.recent);
  f("window", c.window);
  f("slack", c.slack);
}

void write_head(const KvCacheConfig& c, Writer& w) {
  w.array(kMagic, sizeof kMagic);
  w.value(kVersion);
  w.value(std::uint64_t{0});  // the length, which is known at the end
  each_number(c, [&](const char*, std::int64_t x) { w.value(x); });
  w.value(static_cast<std::uint8_t>(c.window_keeps_first));
  w.value(static_cast<std::uint8_t>(c.f16_scale));
  for (const KvSide* side : {&c.k, &c.v}) {
    w.value(side->bits);
    w.value(static_cast<std::int32_t>(side->rotation));
    w.value(static_cast<std::int32_t>(side->scale_rule));
    w.value(side->seed);
    w.value(side->codebook.distortion);
    w.list(side->table);
    w.list(side->codebook.levels);
    w.list(side->codebook.boundaries);
    w.list(side->mean);
  }
}

// Bytes of the rows of so many tokens in bf16 and in codes.
std::int64_t row_bytes(const KvCacheConfig& c, std::int64_t exact, std::int64_t coded) {
  const std::int64_t row = 4 * (packed_words(c.dim, c.k.bits) + packed_words(c.dim, c.v.bits)) +
                           2 * (c.f16_scale ? 2 : 4);
  return c.kv_heads * (exact * c.dim * 4 + coded * row);
}

}  // namespace

std::size_t KvCache::serialized_bytes() const noexcept {
  Writer w(nullptr);
  write_head(config_, w);
  return w.size() + 3 * sizeof(std::int64_t) + at(row_bytes(config_, first() + recent(), coded())) +
         sizeof(std::uint64_t);
}

Result<std::vector<std::byte>> KvCache::serialize() const noexcept try {
  std::vector<std::byte> bytes(serialized_bytes());
  BITTERN_TRY(serialize(bytes));
  return bytes;
} catch (...) {
  return caught("kv_cache: serialize");
}

Status KvCache::serialize(std::span<std::byte> to) const noexcept try {
  if (const std::size_t needed = serialized_bytes(); to.size() != needed) {
    return refuse("bytes",
                  std::to_string(to.size()) + " of them, expected " + std::to_string(needed));
  }
  if (!on_host(device_)) {
    const auto host = this->to({});
    return host ? host->serialize(to) : host.status();
  }
  Writer w(to.data());
  write_head(config_, w);
  for (const std::int64_t x : {size_, coded_begin_, coded_end_}) w.value(x);
  const std::int64_t dim = config_.dim;
  for (int s = 0; s < 2; ++s) {
    for (std::int64_t h = 0; h < config_.kv_heads; ++h) {
      const auto rows = [&](const Regions::Region& region, std::int64_t from,
                            std::int64_t to_token) {
        for (std::int64_t t = from; t < to_token; ++t) w.array(region.row(s, h, t, dim), at(dim));
      };
      rows(regions_->first, 0, first());
      for (std::int64_t t = coded_begin_; t < coded_end_; ++t)
        w.array(pool_->row(s, slot(t).page, h, slot(t).token), at(4 * pool_->words[s]));
      for (std::int64_t t = coded_begin_; t < coded_end_; ++t)
        w.array(pool_->scale(s, slot(t).page, h, slot(t).token), at(pool_->scale_bytes));
      rows(regions_->recent, coded_end_, size_);
    }
  }
  const std::uint64_t length = to.size();
  std::memcpy(to.data() + kOpening - sizeof length, &length, sizeof length);
  w.value(checksum(to.first(w.size())));
  return {};
} catch (...) {
  return caught("kv_cache: serialize");
}

Result<KvCache> KvCache::parse(std::span<const std::byte> bytes) noexcept try {
  if (bytes.size() < kOpening + sizeof(std::uint64_t)) {
    return refuse("bytes", std::to_string(bytes.size()) +
                               " of them, not a KV cache: expected at "
                               "least " +
                               std::to_string(kOpening + sizeof(std::uint64_t)));
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    return refuse("bytes", "magic at byte 0: not a KV cache, expected BTRNKV\\r\\n");
  std::uint32_t version = 0;
  std::uint64_t length = 0, sum = 0;
  std::memcpy(&version, bytes.data() + sizeof kMagic, sizeof version);
  if (version != kVersion) {
    return refuse("bytes", "version at byte 8: " + std::to_string(version) + ", expected " +
                               std::to_string(kVersion));
  }
  std::memcpy(&length, bytes.data() + sizeof kMagic + sizeof version, sizeof length);
  if (length != bytes.size()) {
    return refuse("bytes", "length at byte 12: " + std::to_string(length) + ", but there are " +
                               std::to_string(bytes.size()) + " bytes");
  }
  const auto body = bytes.first(bytes.size() - sizeof sum);
  std::memcpy(&sum, bytes.data() + body.size(), sizeof sum);
  if (sum != checksum(body)) {
    return refuse("bytes", "checksum at byte " + std::to_string(body.size()) +
                               ": it differs, so the bytes were changed");
  }

  // What follows holds for bytes that were made to deceive, too.
  Reader r(body.subspan(kOpening), kOpening);
  KvCacheConfig config;
  each_number(config, [&](const char* field, std::int64_t& x) { r.value(field, x); });
  r.flag("window_keeps_first", config.window_keeps_first);
  r.flag("f16_scale", config.f16_scale);
  for (const auto& [name, side] : {std::pair{"k.", &config.k}, {"v.", &config.v}}) {
    const std::string of = name;
    r.value(of + "bits", side->bits);
    r.choice(of + "rotation", side->rotation, 2);
    r.choice(of + "scale_rule", side->scale_rule, 3);
    r.value(of + "seed", side->seed);
    r.value(of + "codebook.distortion", side->codebook.distortion);
    r.list(of + "table", side->table);
    r.list(of + "codebook.levels", side->codebook.levels);
    r.list(of + "codebook.boundaries", side->codebook.boundaries);
    r.list(of + "mean", side->mean);
    if (!r.status().ok()) return r.status();
    if (side->codebook.levels.empty()) return r.bad(of + "codebook.levels", "none");
    if (side->table.empty() && side->rotation != Rotation::identity)
      return r.bad(of + "table", "none, expected one for the rotation");
  }
  std::int64_t size = 0, begin = 0, end = 0;
  r.value("size", size);
  r.value("coded_begin", begin);
  r.value("coded_end", end);
  if (!r.status().ok()) return r.status();
  const auto between = [&](const char* field, std::int64_t value, std::int64_t least,
                           std::int64_t most, const char* why = "") {
    if (value >= least && value <= most) return Status();
    return r.bad(field, std::to_string(value) + ", expected " + std::to_string(least) + ".." +
                            std::to_string(most) + why);
  };
  const auto check = [&]() -> Status {
    BITTERN_TRY(between("kv_heads", config.kv_heads, 1, 1 << 16));
    BITTERN_TRY(between("dim", config.dim, kAuraMinDim, kAuraMaxDim));
    BITTERN_TRY(between("k.bits", config.k.bits, 1, 8));
    BITTERN_TRY(between("v.bits", config.v.bits, 1, 8));
    BITTERN_TRY(between("size", size, 0, kMostTokens));
    BITTERN_TRY(between("first", config.first, 0, kMostExact));
    BITTERN_TRY(between("recent", config.recent, 0, kMostExact));
    const std::int64_t firsts = std::min(config.first, size);
    BITTERN_TRY(between("coded_begin", begin, firsts, config.window == 0 ? firsts : size,
                        config.window == 0 ? ": without a window nothing is forgotten" : ""));
    return between("coded_end", end, std::max(begin, size - config.recent), size,
                   ": the recent tokens are after it");
  };
  if (Status s = check(); !s.ok()) return s;
  // Nothing is allocated for tokens before the bytes are known to hold them.
  const std::int64_t firsts = std::min(config.first, size);
  const std::int64_t payload = row_bytes(config, firsts + size - end, end - begin);
  if (payload != static_cast<std::int64_t>(r.left())) {
    return refuse("bytes", "rows at byte " + std::to_string(body.size() - r.left()) + ": " +
                               std::to_string(r.left()) + " bytes, expected " +
                               std::to_string(payload) + " for " + std::to_string(size) +
                               " tokens");
  }

  auto made = make(config);
  if (!made) return r.bad(made.status());
  KvCache& c = *made;
  BITTERN_TRY(c.reserve_exact(firsts, size - end));
  c.size_ = size;
  c.coded_begin_ = c.coded_end_ = begin;
  if (Status s = c.reserve_pages(end - begin); !s.ok()) return s;
  c.coded_end_ = end;
  const std::int64_t dim = config.dim;
  for (int s = 0; s < 2; ++s) {
    for (std::int64_t h = 0; h < config.kv_heads; ++h) {
      const auto rows = [&](const Regions::Region& region, std::int64_t from, std::int64_t to) {
        for (std::int64_t t = from; t < to; ++t) r.array(region.row(s, h, t, dim), at(dim));
      };
      rows(c.regions_->first, 0, firsts);
      for (std::int64_t t = begin; t < end; ++t)
        r.array(c.pool_->row(s, c.slot(t).page, h, c.slot(t).token), at(4 * c.pool_->words[s]));
      for (std::int64_t t = begin; t < end; ++t)
        r.array(c.pool_->scale(s, c.slot(t).page, h, c.slot(t).token), at(c.pool_->scale_bytes));
      rows(c.regions_->recent, end, size);
    }
  }
  return made;
} catch (...) {
  return caught("kv_cache: parse");
}

}  // namespace bittern
