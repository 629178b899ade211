// KvCache::write_aura and read_aura: AURA's layout.
#include <cstring>

#include "codec/kv_pages.h"
#include "core/guarded.h"
#include "plan/overlap.h"

namespace bittern {

using kv::between;
using kv::kMostTokens;
using kv::refuse;

namespace {

Status expect_aura(const KvCacheConfig& c, const KvCache::AuraViews& views, std::int64_t tokens) {
  const auto expect = [&](const char* name, const MutView& v, DType dtype, std::int64_t width) {
    const int rank = width == 0 ? 2 : 3;
    const bool shaped = v.shape.rank == rank && v.shape[0] == c.kv_heads && v.shape[1] >= tokens &&
                        (width == 0 || v.shape[2] == width);
    if (v.dtype == dtype && shaped) {
      BITTERN_TRY(kv::expect_memory(name, v));
      return kv::expect_strides(name, v, false);
    }
    return refuse(name, std::string(bittern::name(v.dtype)) + " " + v.shape.str() + ", expected " +
                            bittern::name(dtype) + " [" + std::to_string(c.kv_heads) + ",capacity" +
                            (width == 0 ? "" : "," + std::to_string(width)) +
                            "], capacity at least " + std::to_string(tokens));
  };
  BITTERN_TRY(expect("k_packed", views.k_packed, DType::u32, packed_words(c.dim, c.k.bits)));
  BITTERN_TRY(expect("k_scales", views.k_scales, DType::f32, 0));
  BITTERN_TRY(expect("v_packed", views.v_packed, DType::u32, packed_words(c.dim, c.v.bits)));
  return expect("v_scales", views.v_scales, DType::f32, 0);
}

// No two of the views that are written share a byte.
Status expect_apart(const KvCache::AuraViews& views) {
  const std::pair<const char*, const MutView*> all[] = {{"k_packed", &views.k_packed},
                                                        {"k_scales", &views.k_scales},
                                                        {"v_packed", &views.v_packed},
                                                        {"v_scales", &views.v_scales}};
  const auto memory = [](const MutView& v) {
    return plan_detail::Memory{v.data, size_of(v.dtype), &v.shape, &v.stride};
  };
  for (std::size_t i = 0; i < std::size(all); ++i) {
    BITTERN_TRY(kv::expect_strides(all[i].first, *all[i].second, true));
    for (std::size_t j = 0; j < i; ++j) {
      const MutView &a = *all[i].second, &b = *all[j].second;
      if (kv::is_empty(a.shape) || kv::is_empty(b.shape)) continue;
      if (plan_detail::overlap(memory(a), memory(b)))
        return refuse(all[i].first,
                      std::string("overlaps ") + all[j].first + ", expected memory of its own");
    }
  }
  return {};
}

}  // namespace

Status KvCache::write_aura(const AuraViews& to) const noexcept try {
  if (config_.f16_scale) return refuse("write_aura", "f16_scale is true, expected f32 scales");
  if (first() != 0 || recent() != 0 || forgotten() != 0) {
    return refuse("write_aura", std::to_string(first()) + " first, " + std::to_string(recent()) +
                                    " recent and " + std::to_string(forgotten()) +
                                    " forgotten tokens, expected coded ones only");
  }
  BITTERN_TRY(expect_aura(config_, to, size_));
  BITTERN_TRY(expect_apart(to));
  if (!on_host(device_)) {
    const auto host = this->to({});
    return host ? host->write_aura(to) : host.status();
  }
  for (int s = 0; s < 2; ++s) {
    const MutView &packed = s == 0 ? to.k_packed : to.v_packed,
                  &scales = s == 0 ? to.k_scales : to.v_scales;
    for (std::int64_t h = 0; h < config_.kv_heads; ++h) {
      for (std::int64_t t = 0; t < size_; ++t) {
        const Slot from = slot(t);
        std::memcpy(packed.as<std::uint32_t>() + packed.at(h, t),
                    pool_->row(s, from.page, h, from.token), kv::at(4 * pool_->words[s]));
        std::memcpy(scales.as<float>() + scales.at(h, t), pool_->scale(s, from.page, h, from.token),
                    sizeof(float));
      }
    }
  }
  return {};
} catch (...) {
  return caught("kv_cache: write_aura");
}

Result<KvCache> KvCache::read_aura(const KvCacheConfig& config, const AuraViews& from,
                                   std::int64_t tokens) noexcept try {
  if (config.f16_scale) return refuse("read_aura", "f16_scale is true, expected f32 scales");
  for (const auto& [field, value] :
       {std::pair{"first", config.first}, {"recent", config.recent}, {"window", config.window}}) {
    if (value != 0) {
      return refuse("read_aura",
                    std::string(field).append(" is ") + std::to_string(value) + ", expected 0");
    }
  }
  auto made = make(config);
  if (!made) return made;
  KvCache& c = *made;
  if (Status s = between("tokens", tokens, 0, kMostTokens); !s.ok()) return s;
  if (Status s = expect_aura(c.config_, from, tokens); !s.ok()) return s;
  if (Status s = c.reserve_pages(tokens); !s.ok()) return s;
  c.size_ = c.coded_end_ = tokens;
  for (int s = 0; s < 2; ++s) {
    const MutView &packed = s == 0 ? from.k_packed : from.v_packed,
                  &scales = s == 0 ? from.k_scales : from.v_scales;
    for (std::int64_t h = 0; h < c.config_.kv_heads; ++h) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const Slot to = c.slot(t);
        std::memcpy(c.pool_->row(s, to.page, h, to.token),
                    packed.as<std::uint32_t>() + packed.at(h, t), kv::at(4 * c.pool_->words[s]));
        std::memcpy(c.pool_->scale(s, to.page, h, to.token), scales.as<float>() + scales.at(h, t),
                    sizeof(float));
      }
    }
  }
  return made;
} catch (...) {
  return caught("kv_cache: read_aura");
}

}  // namespace bittern
