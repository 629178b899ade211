#include "bittern/c/kv_cache.h"

#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bittern/kv_cache.h"
#include "c/c_api.h"
#include "plan/fields.h"
#include "plan/names.h"

using namespace bittern;
using c_api::null;
using c_api::run;

struct bittern_kv_config {
  KvCacheConfig config;
};
struct bittern_kv_cache {
  KvCache cache;
};

namespace {

Status refuse(std::string_view what) { return invalid(std::string("kv_cache: ").append(what)); }

// f(member) of the field called `field`; visit is visit_kv_fields or visit_kv_tables.
template <class Visit, class F>
Status with_member(const char* kind, std::string_view field, Visit&& visit, F&& f) {
  std::vector<std::string_view> known;
  bool found = false;
  Status status;
  visit([&](const char* name, auto& member, const char*) {
    known.push_back(name);
    if (field != name) return;
    found = true;
    status = f(member);
  });
  if (!found) return refuse(unknown_name(kind, field, known));
  return status.ok() ? status : refuse(status.message());
}

template <class Config, class F>
Status with_field(Config& config, const char* field, F&& f) {
  return with_member("field", field, [&](auto&& each) { visit_kv_fields(config, each); }, f);
}

template <class Config, class F>
Status with_table(Config& config, const char* table, F&& f) {
  return with_member("table", table, [&](auto&& each) { visit_kv_tables(config, each); }, f);
}

Status set_text(KvCacheConfig& config, const char* field, std::string_view text) {
  return with_field(config, field, [&](auto& member) -> Status {
    using T = std::remove_cvref_t<decltype(member)>;
    Status status = assign_field(field, member, text);
    if (status.ok() || !kIsNamed<T>) return status;
    return invalid(std::string(field).append(": ").append(text.empty() ? "empty" : text) +
                   ", expected " + either(field_names<T>()));
  });
}

Status to_view(const char* operand, const bittern_tensor* tensor, MutView& view) {
  const std::string where = std::string("kv_cache: ").append(operand);
  if (tensor == nullptr) return invalid(where + ": null");
  return c_api::to_view(where, *tensor, view);
}

Status to_views(const bittern_kv_aura& aura, KvCache::AuraViews& views) {
  BITTERN_TRY(to_view("k_packed", &aura.k_packed, views.k_packed));
  BITTERN_TRY(to_view("k_scales", &aura.k_scales, views.k_scales));
  BITTERN_TRY(to_view("v_packed", &aura.v_packed, views.v_packed));
  return to_view("v_scales", &aura.v_scales, views.v_scales);
}

Status give(Result<KvCache> made, bittern_kv_cache** cache) {
  if (!made) return made.status();
  *cache = new bittern_kv_cache{std::move(*made)};
  return {};
}

}  // namespace

bittern_code bittern_kv_config_create(bittern_kv_config** config) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_create", "config");
    *config = nullptr;
    *config = new bittern_kv_config{};
    return {};
  });
}

bittern_code bittern_kv_config_create_aura(const char* scheme, int64_t kv_heads, int64_t dim,
                                           uint64_t layer, bool legacy,
                                           bittern_kv_config** config) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_create_aura", "config");
    *config = nullptr;
    if (scheme == nullptr) return null("bittern_kv_config_create_aura", "scheme");
    const auto widths = parse_aura_name(scheme);
    if (!widths) return widths.status();
    auto made = aura_config(*widths, kv_heads, dim, layer, legacy);
    if (!made) return made.status();
    *config = new bittern_kv_config{std::move(*made)};
    return {};
  });
}

void bittern_kv_config_destroy(bittern_kv_config* config) { delete config; }

bittern_code bittern_kv_config_set(bittern_kv_config* config, const char* field, int64_t value) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_set", "config");
    if (field == nullptr) return null("bittern_kv_config_set", "field");
    return with_field(config->config, field,
                      [&](auto& member) { return assign_field(field, member, value); });
  });
}

bittern_code bittern_kv_config_set_text(bittern_kv_config* config, const char* field,
                                        const char* text) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_set_text", "config");
    if (field == nullptr) return null("bittern_kv_config_set_text", "field");
    if (text == nullptr) return null("bittern_kv_config_set_text", "text");
    return set_text(config->config, field, text);
  });
}

bittern_code bittern_kv_config_get(const bittern_kv_config* config, const char* field,
                                   int64_t* value) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_get", "config");
    if (field == nullptr) return null("bittern_kv_config_get", "field");
    if (value == nullptr) return null("bittern_kv_config_get", "value");
    return with_field(config->config, field, [&](const auto& member) -> Status {
      *value = static_cast<std::int64_t>(member);
      return {};
    });
  });
}

bittern_code bittern_kv_config_set_table(bittern_kv_config* config, const char* table,
                                         const float* values, size_t count) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_set_table", "config");
    if (table == nullptr) return null("bittern_kv_config_set_table", "table");
    if (values == nullptr && count > 0) return null("bittern_kv_config_set_table", "values");
    return with_table(config->config, table, [&](std::vector<float>& member) -> Status {
      if (count > std::size_t{1} << 28) {  // the largest mean is 2^26 values
        return invalid(std::string(table).append(": ") + std::to_string(count) +
                       " values, expected at most 2^28");
      }
      member.assign(values, values + count);
      return {};
    });
  });
}

bittern_code bittern_kv_config_table(const bittern_kv_config* config, const char* table,
                                     const float** values, size_t* count) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_config_table", "config");
    if (table == nullptr) return null("bittern_kv_config_table", "table");
    if (values == nullptr) return null("bittern_kv_config_table", "values");
    if (count == nullptr) return null("bittern_kv_config_table", "count");
    return with_table(config->config, table, [&](const std::vector<float>& member) -> Status {
      *values = member.data();
      *count = member.size();
      return {};
    });
  });
}

bittern_code bittern_kv_cache_create(const bittern_kv_config* config, bittern_kv_cache** cache) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_create", "cache");
    *cache = nullptr;
    if (config == nullptr) return null("bittern_kv_cache_create", "config");
    return give(KvCache::make(config->config), cache);
  });
}

void bittern_kv_cache_destroy(bittern_kv_cache* cache) { delete cache; }

bittern_code bittern_kv_cache_fork(const bittern_kv_cache* cache, bittern_kv_cache** fork) {
  return run([&]() -> Status {
    if (fork == nullptr) return null("bittern_kv_cache_fork", "fork");
    *fork = nullptr;
    if (cache == nullptr) return null("bittern_kv_cache_fork", "cache");
    return give(cache->cache.fork(), fork);
  });
}

bittern_code bittern_kv_cache_to(const bittern_kv_cache* cache, bittern_device device,
                                 bittern_kv_cache** copy) {
  return run([&]() -> Status {
    if (copy == nullptr) return null("bittern_kv_cache_to", "copy");
    *copy = nullptr;
    if (cache == nullptr) return null("bittern_kv_cache_to", "cache");
    BITTERN_TRY(c_api::check_device(device));
    return give(cache->cache.to({static_cast<Device::Type>(device.type), device.index}), copy);
  });
}

bittern_code bittern_kv_cache_device(const bittern_kv_cache* cache, bittern_device* device) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_device", "cache");
    if (device == nullptr) return null("bittern_kv_cache_device", "device");
    const Device where = cache->cache.device();
    *device = {static_cast<int32_t>(where.type), where.index};
    return {};
  });
}

bittern_code bittern_kv_cache_set_stream(bittern_kv_cache* cache, void* stream) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_set_stream", "cache");
    cache->cache.set_stream({stream});
    return {};
  });
}

bittern_code bittern_kv_cache_config(const bittern_kv_cache* cache, bittern_kv_config** config) {
  return run([&]() -> Status {
    if (config == nullptr) return null("bittern_kv_cache_config", "config");
    *config = nullptr;
    if (cache == nullptr) return null("bittern_kv_cache_config", "cache");
    *config = new bittern_kv_config{cache->cache.config()};
    return {};
  });
}

bittern_code bittern_kv_cache_append(bittern_kv_cache* cache, const bittern_tensor* k,
                                     const bittern_tensor* v) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_append", "cache");
    MutView k_view, v_view;
    BITTERN_TRY(to_view("k", k, k_view));
    BITTERN_TRY(to_view("v", v, v_view));
    return cache->cache.append(k_view, v_view);
  });
}

bittern_code bittern_kv_cache_truncate(bittern_kv_cache* cache, int64_t size) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_truncate", "cache");
    return cache->cache.truncate(size);
  });
}

bittern_code bittern_kv_cache_attend(const bittern_kv_cache* cache, const bittern_tensor* q,
                                     const bittern_tensor* out, const bittern_kv_attention* how) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_attend", "cache");
    MutView q_view, out_view, sinks;
    BITTERN_TRY(to_view("q", q, q_view));
    BITTERN_TRY(to_view("out", out, out_view));
    KvAttention attention;
    if (how != nullptr) {
      if (Status s = c_api::check_preference(how->preference); !s.ok()) return refuse(s.message());
      if (how->sinks != nullptr) {
        BITTERN_TRY(to_view("sinks", how->sinks, sinks));
        if (sinks.data == nullptr) return refuse("sinks: null data, expected f32 [heads]");
      }
      attention = {.scale = how->scale,
                   .softcap = how->softcap,
                   .sinks = sinks,
                   .causal = !how->not_causal,
                   .preference = static_cast<Preference>(how->preference)};
    }
    return cache->cache.attend(q_view, out_view, attention);
  });
}

bittern_code bittern_kv_cache_read(const bittern_kv_cache* cache, int64_t token, float* k, float* v,
                                   size_t count) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_read", "cache");
    if (k == nullptr) return null("bittern_kv_cache_read", "k");
    if (v == nullptr) return null("bittern_kv_cache_read", "v");
    return cache->cache.read(token, {k, count}, {v, count});
  });
}

bittern_code bittern_kv_cache_counts(const bittern_kv_cache* cache, bittern_kv_counts* counts) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_counts", "cache");
    if (counts == nullptr) return null("bittern_kv_cache_counts", "counts");
    const KvCache& c = cache->cache;
    *counts = {.size = c.size(),
               .first = c.first(),
               .coded = c.coded(),
               .recent = c.recent(),
               .forgotten = c.forgotten()};
    return {};
  });
}

bittern_code bittern_kv_cache_bytes(const bittern_kv_cache* cache, bittern_kv_bytes* bytes) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_bytes", "cache");
    if (bytes == nullptr) return null("bittern_kv_cache_bytes", "bytes");
    const KvCacheBytes b = cache->cache.bytes();
    *bytes = {.codes = b.codes,
              .scales = b.scales,
              .exact = b.exact,
              .pages = b.pages,
              .shared = b.shared,
              .regions = b.regions,
              .tables = b.tables};
    return {};
  });
}

bittern_code bittern_kv_cache_serialized_bytes(const bittern_kv_cache* cache, size_t* count) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_serialized_bytes", "cache");
    if (count == nullptr) return null("bittern_kv_cache_serialized_bytes", "count");
    *count = cache->cache.serialized_bytes();
    return {};
  });
}

bittern_code bittern_kv_cache_serialize(const bittern_kv_cache* cache, void* bytes, size_t count) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_serialize", "cache");
    if (bytes == nullptr) return null("bittern_kv_cache_serialize", "bytes");
    return cache->cache.serialize(std::span(static_cast<std::byte*>(bytes), count));
  });
}

bittern_code bittern_kv_cache_parse(const void* bytes, size_t count, bittern_kv_cache** cache) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_parse", "cache");
    *cache = nullptr;
    if (bytes == nullptr) return null("bittern_kv_cache_parse", "bytes");
    return give(KvCache::parse({static_cast<const std::byte*>(bytes), count}), cache);
  });
}

bittern_code bittern_kv_cache_write_aura(const bittern_kv_cache* cache, const bittern_kv_aura* to) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_write_aura", "cache");
    if (to == nullptr) return null("bittern_kv_cache_write_aura", "to");
    KvCache::AuraViews views;
    BITTERN_TRY(to_views(*to, views));
    return cache->cache.write_aura(views);
  });
}

bittern_code bittern_kv_cache_read_aura(const bittern_kv_config* config,
                                        const bittern_kv_aura* from, int64_t tokens,
                                        bittern_kv_cache** cache) {
  return run([&]() -> Status {
    if (cache == nullptr) return null("bittern_kv_cache_read_aura", "cache");
    *cache = nullptr;
    if (config == nullptr) return null("bittern_kv_cache_read_aura", "config");
    if (from == nullptr) return null("bittern_kv_cache_read_aura", "from");
    KvCache::AuraViews views;
    BITTERN_TRY(to_views(*from, views));
    return give(KvCache::read_aura(config->config, views, tokens), cache);
  });
}
