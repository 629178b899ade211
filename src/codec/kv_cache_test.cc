#include "bittern/kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/bittern.h"
#include "bittern/metrics.h"
#include "oracle/op_test.h"
#include "oracle/oracle.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::Rng;
using Floats = std::vector<float>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Floats normals(std::int64_t n, Rng& rng) {
  Floats x(at(n));
  for (float& v : x) v = static_cast<float>(rng.normal());
  return x;
}

ConstView rows(const Floats& x, std::int64_t middle, std::int64_t dim) {
  return view(x.data(), {static_cast<std::int64_t>(x.size()) / (middle * dim), middle, dim});
}

KvCache make(const KvCacheConfig& config) {
  auto cache = KvCache::make(config);
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return std::move(*cache);
}

// ---- a plain model: tokens in a list, each as the cache should stand for it ----

// x, [kv_heads, dim], encoded and decoded by the ops.
Floats coded_value(const KvCacheConfig& c, const KvSide& side, Floats x) {
  for (std::size_t i = 0; i < side.mean.size(); ++i) x[i] -= side.mean[i];
  const AuraDesc d{.rows = c.kv_heads,
                   .dim = c.dim,
                   .bits = side.bits,
                   .rotation = side.rotation,
                   .scale_rule = side.scale_rule,
                   .f16_scale = c.f16_scale};
  std::vector<std::uint32_t> packed(at(d.packed_shape().numel()));
  std::vector<std::byte> scales(at(c.kv_heads * 4));
  const MutView scale_view{scales.data(), d.scale_element(), {}, d.scale_shape(), {1, 1}};
  const ConstView table = side.rotation == Rotation::identity
                              ? ConstView{}
                              : view(side.table.data(), d.rotation_shape());
  const ConstView levels = view(side.codebook.levels.data(), {d.levels()});
  Floats y(x.size());
  const auto run = [](const auto& plan, const auto& args) {
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    expect_ok(oracle::run_plan(*plan, args));
  };
  run(Plan<AuraEncode>::select(d),
      AuraEncode::Args{.x = view(std::as_const(x).data(), d.tensor_shape()),
                       .table = table,
                       .boundaries = view(side.codebook.boundaries.data(), {d.levels() - 1}),
                       .codebook = levels,
                       .packed = view(packed.data(), d.packed_shape()),
                       .scales = scale_view});
  run(Plan<AuraDecode>::select(d),
      AuraDecode::Args{.packed = view(std::as_const(packed).data(), d.packed_shape()),
                       .scales = scale_view,
                       .table = table,
                       .codebook = levels,
                       .y = view(y.data(), d.tensor_shape())});
  for (std::size_t i = 0; i < side.mean.size(); ++i) y[i] += side.mean[i];
  return y;
}

struct Model {
  enum class State { first, coded, recent, gone };
  struct Token {
    State state;
    Floats k, v;
  };
  KvCacheConfig config;
  std::vector<Token> tokens;

  std::int64_t count(State state) const {
    return std::count_if(tokens.begin(), tokens.end(),
                         [&](const Token& t) { return t.state == state; });
  }
  void append(const Floats& k, const Floats& v) {
    Token t{State::recent, k, v};
    const bool early = static_cast<std::int64_t>(tokens.size()) < config.first;
    if (early) t.state = State::first;
    if (early || config.recent > 0) {
      for (Floats* x : {&t.k, &t.v})
        for (float& value : *x) value = to_f32(to_bf16(value));
    }
    tokens.push_back(t);
    if (count(State::recent) > config.recent) {
      Token& leaving = *std::find_if(tokens.begin(), tokens.end(),
                                     [](const Token& each) { return each.state == State::recent; });
      leaving = {State::coded, coded_value(config, config.k, leaving.k),
                 coded_value(config, config.v, leaving.v)};
    }
    const std::int64_t oldest =
        static_cast<std::int64_t>(tokens.size()) - config.window - config.slack;
    for (std::int64_t i = 0; config.window > 0 && i < oldest; ++i)
      if (tokens[at(i)].state == State::coded) tokens[at(i)].state = State::gone;
  }
  // Whether the tokens that a window would then reach are all there.
  bool truncate(std::int64_t size) {
    const auto have = static_cast<std::int64_t>(tokens.size());
    for (std::int64_t i = std::max<std::int64_t>(size - config.window, 0);
         size < have && config.window > 0 && i < have; ++i)
      if (tokens[at(i)].state == State::gone) return false;
    // A window that ends before what is gone would be as wrong.
    if (size < have && size - config.window < 0 && count(State::gone) > 0) return false;
    tokens.resize(at(size));
    return true;
  }
  // f64 attention of the newest token's query.
  std::vector<double> attend(const Floats& q, std::int64_t heads) const {
    const std::int64_t dim = config.dim, size = static_cast<std::int64_t>(tokens.size());
    std::vector<double> out;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t at_head = h / (heads / config.kv_heads) * dim;
      double l = 0;
      std::vector<double> o(at(dim));
      for (std::int64_t t = 0; t < size; ++t) {
        const Token& token = tokens[at(t)];
        const bool outside = config.window > 0 && t + config.window < size &&
                             !(config.window_keeps_first && token.state == State::first);
        if (outside) continue;
        EXPECT_NE(token.state, State::gone);
        double x = 0;
        for (std::int64_t j = 0; j < dim; ++j)
          x += static_cast<double>(q[at(h * dim + j)]) *
               static_cast<double>(token.k[at(at_head + j)]);
        const double p = std::exp(x / std::sqrt(static_cast<double>(dim)));
        l += p;
        for (std::int64_t j = 0; j < dim; ++j)
          o[at(j)] += p * static_cast<double>(token.v[at(at_head + j)]);
      }
      for (const double v : o) out.push_back(l == 0 ? 0 : v / l);
    }
    return out;
  }
};

void expect_same(const KvCache& cache, const Model& model) {
  const auto size = static_cast<std::int64_t>(model.tokens.size());
  ASSERT_EQ(cache.size(), size);
  EXPECT_EQ(cache.first(), model.count(Model::State::first));
  EXPECT_EQ(cache.coded(), model.count(Model::State::coded));
  EXPECT_EQ(cache.recent(), model.count(Model::State::recent));
  EXPECT_EQ(cache.forgotten(), model.count(Model::State::gone));
  const KvCacheConfig& c = cache.config();
  Floats k(at(c.kv_heads * c.dim)), v(k.size());
  for (std::int64_t t = 0; t < size; ++t) {
    const Model::Token& token = model.tokens[at(t)];
    const Status status = cache.read(t, k, v);
    ASSERT_EQ(status.ok(), token.state != Model::State::gone) << t << " " << status.message();
    if (!status.ok()) continue;
    ASSERT_EQ(k, token.k) << "token " << t << " of " << size;
    ASSERT_EQ(v, token.v) << "token " << t << " of " << size;
  }
  const KvCacheBytes b = cache.bytes();
  const std::int64_t row = 4 * (packed_words(c.dim, c.k.bits) + packed_words(c.dim, c.v.bits));
  EXPECT_EQ(b.codes, at(cache.coded() * c.kv_heads * row));
  EXPECT_EQ(b.scales, at(cache.coded() * c.kv_heads * (c.f16_scale ? 4 : 8)));
  EXPECT_EQ(b.exact, at((cache.first() + cache.recent()) * c.kv_heads * c.dim * 4));
  EXPECT_LE(b.codes + b.scales, b.pages);
  // No more pages than the tokens may straddle.
  const std::size_t page = at(c.page_size * c.kv_heads * (row + (c.f16_scale ? 4 : 8)));
  EXPECT_LE(b.pages, at((cache.coded() + 2 * c.page_size - 2) / c.page_size) * page);
}

void expect_attention(const KvCache& cache, const Model& model, Rng& rng) {
  if (cache.size() == 0) return;
  const KvCacheConfig& c = cache.config();
  const std::int64_t heads = 2 * c.kv_heads;
  const Floats q = normals(heads * c.dim, rng);
  Floats out(q.size());
  expect_ok(cache.attend(rows(q, heads, c.dim), view(out.data(), {1, heads, c.dim})));
  const auto want = model.attend(q, heads);
  double most = 0;
  for (const double w : want) most = std::max(most, std::fabs(w));
  for (std::size_t i = 0; i < out.size(); ++i)
    ASSERT_NEAR(static_cast<double>(out[i]), want[i], 1e-5 * most) << i;
}

KvCacheConfig small(std::int64_t first, std::int64_t recent, std::int64_t window,
                    std::int64_t slack, bool keeps) {
  KvCacheConfig c{.kv_heads = 2,
                  .dim = 16,
                  .page_size = 16,
                  .first = first,
                  .recent = recent,
                  .window = window,
                  .slack = slack,
                  .window_keeps_first = keeps};
  c.k.bits = 5;
  c.v.bits = 3;
  c.v.rotation = Rotation::dense;
  c.v.scale_rule = ScaleRule::least_squares;
  c.v.seed = 7;
  Rng rng(99);
  c.k.mean = normals(c.kv_heads * c.dim, rng);
  c.v.mean = normals(c.kv_heads * c.dim, rng);
  c.f16_scale = recent % 2 == 1;
  return c;
}

TEST(KvCache, RandomHistoriesMatchAPlainModel) {
  const KvCacheConfig configs[] = {small(0, 0, 0, 0, false), small(3, 5, 0, 0, false),
                                   small(0, 4, 40, 6, false), small(2, 0, 33, 3, true),
                                   small(4, 50, 20, 0, false)};
  std::uint64_t seed = 1;
  for (const KvCacheConfig& config : configs) {
    Rng rng(seed++);
    std::vector<std::pair<KvCache, Model>> forks;
    forks.emplace_back(make(config), Model{});
    forks[0].second.config = forks[0].first.config();
    int refused = 0;
    for (int step = 0; step < 120; ++step) {
      auto& [cache, model] = forks[at(rng.below(static_cast<std::int64_t>(forks.size())))];
      switch (rng.below(8)) {
        case 0:
        case 1:
        case 2: {
          const std::int64_t n = rng.chance(3) ? rng.below(45) : 1 + rng.below(3);
          const std::int64_t row = config.kv_heads * config.dim;
          const Floats k = normals(n * row, rng), v = normals(n * row, rng);
          expect_ok(cache.append(rows(k, config.kv_heads, config.dim),
                                 rows(v, config.kv_heads, config.dim)));
          for (std::int64_t i = 0; i < n; ++i) {
            const auto slice = [&](const Floats& x) {
              return Floats(x.begin() + i * row, x.begin() + (i + 1) * row);
            };
            model.append(slice(k), slice(v));
          }
          break;
        }
        case 3:
        case 4: {
          const std::int64_t back = rng.chance(4) ? rng.below(60) : rng.below(6);
          const std::int64_t size = std::max<std::int64_t>(cache.size() - back, 0);
          const bool possible = model.truncate(size);
          const Status status = cache.truncate(size);
          EXPECT_EQ(status.ok(), possible) << status.message();
          refused += !possible;
          break;
        }
        case 5: {
          KvCache copy = *cache.fork();
          Model same = model;
          if (forks.size() < 4) {
            forks.emplace_back(std::move(copy), std::move(same));
          } else {
            forks[at(rng.below(4))] = {std::move(copy), std::move(same)};
          }
          break;
        }
        case 6: {
          const std::vector<std::byte> bytes = *cache.serialize();
          auto parsed = KvCache::parse(bytes);
          ASSERT_TRUE(parsed.ok()) << parsed.status().message();
          EXPECT_EQ(*parsed->serialize(), bytes);
          EXPECT_EQ(cache.serialized_bytes(), bytes.size());
          EXPECT_EQ(parsed->config(), cache.config());
          cache = std::move(*parsed);
          break;
        }
        default: expect_attention(cache, model, rng);
      }
      if (step % 10 == 9) {
        for (const auto& [each, plain] : forks) {
          expect_same(each, plain);
          expect_attention(each, plain, rng);
          if (HasFatalFailure()) return;
        }
      }
    }
    if (config.window == 33) {
      EXPECT_GT(refused, 0);
    }
  }
}

TEST(KvCache, DoesNotDependOnHowTokensWereGrouped) {
  Rng rng(5);
  const KvCacheConfig config = small(2, 7, 0, 0, false);
  const std::int64_t row = config.kv_heads * config.dim;
  const Floats k = normals(60 * row, rng), v = normals(60 * row, rng);
  KvCache whole = make(config), parts = make(config);
  expect_ok(whole.append(rows(k, 2, 16), rows(v, 2, 16)));
  for (std::int64_t i = 0, n; i < 60; i += n) {
    n = std::min<std::int64_t>(1 + i % 11, 60 - i);
    expect_ok(
        parts.append(view(k.data() + i * row, {n, 2, 16}), view(v.data() + i * row, {n, 2, 16})));
  }
  EXPECT_EQ(*whole.serialize(), *parts.serialize());
}

TEST(KvCache, DoesNotDependOnTheCallersFloatModes) {
  Rng rng(8);
  KvCacheConfig config = small(2, 7, 0, 0, false);
  config.k.mean = normals(config.kv_heads * config.dim, rng);
  Floats x = normals(40 * 32, rng), tiny = x;
  for (float& value : tiny) value *= 1e-39f;
  const auto run = [&](unsigned mode) {
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode);
    KvCache cache = make(config);
    Floats out(3 * 32), k(32), v(32);
    const Status appended = cache.append(rows(x, 2, 16), rows(tiny, 2, 16));
    const auto attend = [&](double scale) {
      return cache.attend(view(std::as_const(x).data(), {3, 2, 16}), view(out.data(), {3, 2, 16}),
                          {.scale = scale});
    };
    const Status attended = attend(0.1), refused = attend(1e300);
    const Status was_read = cache.read(20, k, v);
    const bool same = cache.config() == config;  // tables were filled in
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    expect_ok(appended);
    expect_ok(attended);
    expect_ok(was_read);
    EXPECT_EQ(refused.code(), Code::invalid_argument);
    EXPECT_FALSE(same);
    EXPECT_EQ(after & 0xffc0u, mode);
    out.insert(out.end(), k.begin(), k.end());
    out.insert(out.end(), v.begin(), v.end());
    std::vector<std::byte> bytes = *cache.serialize();
    const auto* first = reinterpret_cast<const std::byte*>(out.data());
    bytes.insert(bytes.end(), first, first + out.size() * sizeof(float));
    return bytes;
  };
  const auto expected = run(0x1f80);
  EXPECT_EQ(run(0x1f80 | 0x8040), expected) << "flush to zero";
  EXPECT_EQ(run(0x1f80 | 0x4000), expected) << "round up";
  EXPECT_EQ(run(0), expected) << "traps";
}

TEST(KvCache, ForksShareUntilTheyWrite) {
  Rng rng(6);
  KvCache cache = make({.kv_heads = 1, .dim = 32, .page_size = 16});
  const Floats x = normals(40 * 32, rng);
  expect_ok(cache.append(rows(x, 1, 32), rows(x, 1, 32)));
  EXPECT_EQ(cache.bytes().shared, 0u);
  const auto before = *cache.serialize();
  const std::size_t page = cache.bytes().pages / 3;
  {
    KvCache fork = *cache.fork();
    EXPECT_EQ(fork.bytes().shared, 3 * page);
    const Floats y = normals(32, rng);
    expect_ok(fork.append(rows(y, 1, 32), rows(y, 1, 32)));
    EXPECT_EQ(fork.bytes().shared, 2 * page);  // its last page is now its own
    expect_ok(fork.truncate(20));
    expect_ok(fork.append(rows(y, 1, 32), rows(y, 1, 32)));
    EXPECT_EQ(fork.bytes().shared, page);
    EXPECT_EQ(*cache.serialize(), before);
  }
  EXPECT_EQ(cache.bytes().shared, 0u);
}

TEST(KvCache, AWindowNeedsNoMorePagesThanItIsWide) {
  Rng rng(8);
  KvCache cache = make({.kv_heads = 1, .dim = 32, .page_size = 16, .window = 40, .slack = 8});
  std::size_t most = 0;
  for (int i = 0; i < 400; ++i) {
    const Floats x = normals(32, rng);
    expect_ok(cache.append(rows(x, 1, 32), rows(x, 1, 32)));
    most = std::max(most, cache.bytes().pages);
  }
  const std::size_t page = 16 * (2 * 16 + 2 * 4);
  EXPECT_EQ(most, 4 * page);  // 48 tokens straddle at most 4
  EXPECT_EQ(cache.coded(), 48);
  EXPECT_EQ(cache.forgotten(), 352);
  expect_ok(cache.truncate(392));
  expect_error(cache.truncate(391), Code::invalid_argument,
               "kv_cache: truncate: 391, expected at least 392: the window would reach tokens that "
               "are gone");
  const Floats q = normals(10 * 32, rng);
  Floats out(q.size());
  expect_error(cache.attend(rows(q, 1, 32), view(out.data(), {10, 1, 32})), Code::invalid_argument,
               "kv_cache: queries: 10, expected at most 1: the first one's window reaches tokens "
               "that are gone");
  expect_ok(cache.attend(rows({q.begin(), q.begin() + 32}, 1, 32), view(out.data(), {1, 1, 32})));
}

// Slices, transposed and reversed arrays give what a dense copy of them gives.
TEST(KvCache, TakesRowsOfAnyStrides) {
  Rng rng(31);
  const KvCacheConfig config = small(2, 3, 0, 0, false);  // [2, 16]
  const Floats wide = normals(2 * 40 * 3 * 16, rng);
  const auto strided = [&](std::int64_t offset, Shape stride) {
    ConstView v = view(wide.data() + offset, {40, 2, 16});
    v.stride = stride;
    return v;
  };
  const ConstView views[] = {strided(0, {32, 16, 1}),       // dense
                             strided(16, {48, 16, 1}),      // two of three heads
                             strided(0, {16, 40 * 16, 1}),  // [heads, tokens, dim]
                             strided(39 * 32, {-32, 16, 1}), strided(0, {0, 0, 1}),
                             strided(7, {33, 1, 2})};
  for (const ConstView& v : views) {
    Floats dense;
    for (std::int64_t t = 0; t < 40; ++t)
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t j = 0; j < 16; ++j) dense.push_back(v.as<float>()[v.at(t, h, j)]);
    KvCache a = make(config), b = make(config);
    expect_ok(a.append(v, v));
    expect_ok(b.append(rows(dense, 2, 16), rows(dense, 2, 16)));
    EXPECT_EQ(*a.serialize(), *b.serialize()) << v.stride.str();

    const std::int64_t queries = 5;
    ConstView q = v;
    q.shape[0] = queries;
    Floats want(at(queries * 32)), got(at(3 * queries * 32), -7.0f);
    expect_ok(b.attend(view(std::as_const(dense).data(), {queries, 2, 16}),
                       view(want.data(), {queries, 2, 16})));
    MutView out = view(got.data(), {queries, 2, 16});
    out.stride = {16, queries * 16 + 5, 1};
    if (v.stride[2] != 1 || v.stride[0] < 0) {
      const bool last = v.stride[2] != 1;
      expect_error(a.attend(q, out), Code::unsupported,
                   last ? "kv_cache: q: stride 2 of axis 2, expected 1"
                        : "kv_cache: q: stride -32 of axis 0, expected at least 0");
      continue;
    }
    expect_ok(a.attend(q, out));
    std::size_t written = 0;
    for (const float x : got) written += x != -7.0f;
    EXPECT_EQ(written, want.size());
    for (std::int64_t i = 0; i < queries; ++i)
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t j = 0; j < 16; ++j)
          ASSERT_EQ(got[at(out.at(i, h, j))], want[at((i * 2 + h) * 16 + j)]);
    out.stride = {16, 8, 1};
    expect_error(a.attend(q, out), Code::unsupported,
                 "kv_cache: out: stride 8 of axis 1, expected at least 16");
    out.stride = {16, 32, 1};
    expect_error(a.attend(q, out), Code::unsupported,
                 "kv_cache: out: stride 32 of axis 1, expected at least 80");
  }
}

// ---- serialised bytes ----

TEST(KvCache, BadBytesAreRefused) {
  Rng rng(3);
  KvCache cache = make(small(2, 3, 0, 0, false));
  const Floats x = normals(30 * 32, rng);
  expect_ok(cache.append(rows(x, 2, 16), rows(x, 2, 16)));
  const std::vector<std::byte> good = *cache.serialize();
  const auto refused = [](std::span<const std::byte> bytes, const std::string& message) {
    const auto parsed = KvCache::parse(bytes);
    ASSERT_FALSE(parsed.ok());
    expect_error(parsed.status(), Code::invalid_argument, "kv_cache: bytes: " + message);
  };
  refused({}, "0 of them, not a KV cache: expected at least 28");
  std::vector<std::byte> bytes(good.size() + 1);
  for (const std::size_t size : {std::size_t{0}, good.size() - 1, good.size() + 1}) {
    expect_error(cache.serialize(std::span(bytes).first(size)), Code::invalid_argument,
                 "kv_cache: bytes: " + std::to_string(size) + " of them, expected " +
                     std::to_string(good.size()));
  }
  bytes = good;
  bytes[0] ^= std::byte{1};
  refused(bytes, "magic at byte 0: not a KV cache, expected BTRNKV\\r\\n");
  bytes = good;
  bytes[8] = std::byte{2};
  refused(bytes, "version at byte 8: 2, expected 1");
  const std::string n = std::to_string(good.size());
  const auto counted = [&](std::size_t count) {
    return "length at byte 12: " + n + ", but there are " + std::to_string(count) + " bytes";
  };
  refused(std::span(good).first(good.size() - 1), counted(good.size() - 1));
  bytes = good;
  bytes.push_back(std::byte{0});
  refused(bytes, counted(bytes.size()));
  for (std::size_t i = 20; i < good.size(); i += 7) {
    bytes = good;
    bytes[i] ^= std::byte{0x10};
    refused(bytes, "checksum at byte " + std::to_string(good.size() - 8) +
                       ": it differs, so the bytes were changed");
  }
  // Bytes with a checksum to match are read, or refused, but never trusted.
  const auto seal = [](std::vector<std::byte>& b) {
    std::uint64_t length = b.size(), hash = 0xcbf29ce484222325u;
    std::memcpy(b.data() + 12, &length, 8);
    for (std::size_t i = 0; i + 8 < b.size(); ++i)
      hash = (hash ^ static_cast<std::uint64_t>(b[i])) * 0x100000001b3u;
    std::memcpy(b.data() + b.size() - 8, &hash, 8);
  };
  bytes = good;
  seal(bytes);
  EXPECT_EQ(bytes, good);
  int rejected = 0;
  for (std::size_t i = 20; i < 420; ++i) {
    bytes = good;
    bytes[i] ^= std::byte{static_cast<unsigned char>(1 << i % 8)};
    seal(bytes);
    const auto parsed = KvCache::parse(bytes);
    rejected += !parsed.ok();
    if (parsed.ok()) continue;
    // Each refusal names a field, and the byte it begins at, which is none after the change.
    const std::string text(parsed.status().message());
    const std::size_t at = text.find(" at byte ");
    ASSERT_TRUE(text.starts_with("kv_cache: bytes: ") && at != std::string::npos) << text;
    EXPECT_LE(std::stoul(text.substr(at + 9)), good.size()) << text;
  }
  EXPECT_GT(rejected, 50);
  const auto planted = [&](std::size_t offset, std::int64_t value, std::size_t size,
                           const std::string& message) {
    bytes = good;
    std::memcpy(bytes.data() + offset, &value, size);
    seal(bytes);
    refused(bytes, message);
  };
  planted(20, 0, 8, "kv_heads at byte 20: 0, expected 1..65536");
  planted(28, 5000, 8, "dim at byte 28: 5000, expected 2..1024");
  planted(36, 15, 8, "page_size at byte 36: 15, expected 16..128");
  planted(76, 2, 1, "window_keeps_first at byte 76: 2, expected 0 or 1");
  planted(78, 9, 4, "k.bits at byte 78: 9, expected 1..8");
  planted(82, 3, 4, "k.rotation at byte 82: 3, expected 0..2");
  planted(86, -1, 4, "k.scale_rule at byte 86: -1, expected 0..3");
  planted(106, std::int64_t{1} << 40, 8,
          "k.table at byte 106: 1099511627776 values, but " + std::to_string(good.size() - 122) +
              " bytes follow");
  for (std::size_t size = 28; size < good.size(); size += 13) {
    bytes.assign(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    seal(bytes);
    const auto parsed = KvCache::parse(bytes);
    ASSERT_FALSE(parsed.ok()) << size;
    EXPECT_NE(parsed.status().message().find(" at byte "), std::string_view::npos)
        << parsed.status().message();
  }
}

// Memory follows the tokens that the bytes hold, not the room that their config says.
TEST(KvCache, RegionsGrowWithTheirTokens) {
  KvCacheConfig config{.kv_heads = 1, .dim = 2};
  config.first = config.recent = std::int64_t{1} << 27;  // 2 GiB in all, once they are full
  KvCache cache = make(config);
  EXPECT_EQ(cache.bytes().regions, 0u);
  const std::vector<std::byte> none = *cache.serialize();
  auto parsed = KvCache::parse(none);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->config(), cache.config());
  EXPECT_LE(parsed->bytes().regions, none.size());
  Rng rng(5);
  const Floats x = normals(10 * 2, rng);
  expect_ok(parsed->append(rows(x, 1, 2), rows(x, 1, 2)));
  EXPECT_EQ(parsed->first(), 10);
  EXPECT_LE(parsed->bytes().regions, 4 * parsed->bytes().exact);
}

// A ring that grows while tokens are in it, also by way of bytes.
TEST(KvCache, ARingThatGrowsKeepsItsTokens) {
  const KvCacheConfig config = small(3, 50, 0, 0, false);
  Rng rng(6);
  KvCache once = make(config), slowly = make(config);
  const Floats x = normals(120 * 32, rng);
  expect_ok(once.append(rows(x, 2, 16), rows(x, 2, 16)));
  for (std::int64_t t = 0; t < 120; ++t) {
    const Floats one(x.begin() + t * 32, x.begin() + (t + 1) * 32);
    expect_ok(slowly.append(rows(one, 2, 16), rows(one, 2, 16)));
    if (t % 7 == 3) slowly = std::move(*KvCache::parse(*slowly.serialize()));
  }
  EXPECT_EQ(*slowly.serialize(), *once.serialize());
}

// ---- errors ----

TEST(KvCache, WithoutADeviceTheErrorSaysWhatIsMissing) {
  const Status status = KvCache::make({}, {Device::Type::cuda, 1000}).status();
  EXPECT_EQ(status.code(), Code::unavailable);
  EXPECT_TRUE(status.message().starts_with("kv_cache: device: cuda")) << status.message();
  EXPECT_EQ(make({}).to({Device::Type::cuda, 1000}).status().message(), status.message());
  expect_error(KvCache::make({}, {static_cast<Device::Type>(7), 0}).status(),
               Code::invalid_argument, "kv_cache: device: type 7, expected that of cpu or cuda");
  expect_error(KvCache::make({}, {Device::Type::cpu, 3}).status(), Code::invalid_argument,
               "kv_cache: device: cpu:3, expected cpu");
}

TEST(KvCache, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const auto with = [](auto change) {
    KvCacheConfig c;
    change(c);
    return KvCache::make(c).status();
  };
  using C = KvCacheConfig&;
  expect_error(with([](C c) { c.k.bits = 9; }), bad, "kv_cache: k.bits: 9, expected 1..8");
  expect_error(with([](C c) { c.page_size = 12; }), bad,
               "kv_cache: page_size: 12, expected 16..128");
  expect_error(with([](C c) { c.dim = 1; }), bad, "kv_cache: dim: 1, expected 2..1024");
  expect_error(with([](C c) { c.slack = 3; }), bad, "kv_cache: slack: 3, expected 0..0");
  expect_error(with([](C c) { c.v.mean = {1, 2}; }), bad,
               "kv_cache: v.mean: 2 values, expected 128");
  expect_error(with([](C c) { c.k.codebook.levels = {1, 2, 3}; }), bad,
               "kv_cache: k.codebook.levels: 3 values, expected 16");
  expect_error(with([](C c) { c.v.table = Floats(128, 0.5f); }), bad,
               "kv_cache: v.table: [0] is 0.5, expected 1 or -1");
  KvCache cache = make({.kv_heads = 2, .dim = 16});
  Floats x(3 * 32), out(16);
  const ConstView three = rows(x, 2, 16);
  expect_error(cache.append(view(std::as_const(x).data(), {3, 1, 32}), three), bad,
               "kv_cache: k: shape [3,1,32], expected [n,2,16] = [tokens,kv_heads,dim]");
  expect_error(cache.append(three, view(std::as_const(x).data(), {2, 2, 16})), bad,
               "kv_cache: v: 2 tokens, expected those of k, 3");
  ConstView odd = three;
  odd.shape[0] = -3;
  expect_error(cache.append(odd, odd), bad,
               "kv_cache: k: shape [-3,2,16], expected [n,2,16] = [tokens,kv_heads,dim]");
  odd = three;
  odd.data = static_cast<const std::byte*>(odd.data) + 2;
  expect_error(cache.append(three, odd), bad, "kv_cache: v: address is not a multiple of 4");
  odd = three;
  odd.stride[0] = std::int64_t{1} << 62;
  expect_error(cache.append(three, odd), bad,
               "kv_cache: v: stride 4611686018427387904 of axis 0 spans more than 2^57 elements");
  odd.stride[0] = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(cache.append(odd, three).code(), bad);
  odd.stride.rank = 2;
  EXPECT_EQ(cache.append(odd, three).code(), bad);
  odd = three;
  odd.device = {Device::Type::cuda, 0};
  expect_error(cache.append(odd, three), bad, "kv_cache: k: on cuda:0, expected cpu");
  odd = three;
  odd.data = nullptr;
  expect_error(cache.append(odd, three), bad, "kv_cache: k: null, expected [3,2,16]");
  odd.shape = {std::int64_t{1} << 40, 2, 16};
  odd.data = x.data();
  odd.stride = {0, 0, 1};
  expect_error(cache.append(odd, odd), bad, "kv_cache: append: more than 2^29 tokens");
  odd.shape = {1, std::int64_t{1} << 60, 16};
  expect_error(cache.attend(odd, {}), bad,
               "kv_cache: heads: 1152921504606846976, expected 1..65536");
  odd.shape = {std::int64_t{1} << 60, 4, 16};
  expect_error(cache.attend(odd, {}), bad, "kv_cache: queries: 1152921504606846976, expected 0..0");
  expect_error(cache.truncate(1), bad, "kv_cache: truncate: 1, expected 0..0");
  expect_error(cache.attend(three, view(x.data(), {3, 2, 16})), bad,
               "kv_cache: queries: 3, expected 0..0");
  expect_ok(cache.append(three, three));
  expect_error(cache.read(3, x, x), bad, "kv_cache: k: 96 values, expected 32");
  Floats k(32), v(32);
  expect_error(cache.read(3, k, v), bad, "kv_cache: token: 3, expected 0..2");
  expect_error(cache.attend(three, view(x.data(), {2, 2, 16})), bad,
               "kv_cache: out: f32 [2,2,16], expected f32 [3,2,16]");
}

// ---- AURA's layout ----

TEST(KvCache, ReadsAndWritesTheLayoutOfTheSeedsFamily) {
  for (const char* name : {"aura4v4", "aura8v4", "aura4v2"}) {
    const auto scheme = parse_aura_name(name);
    ASSERT_TRUE(scheme.ok());
    EXPECT_EQ(aura_name(*scheme), name);
    const auto config = aura_config(*scheme, 3, 64, 5);
    ASSERT_TRUE(config.ok());
    KvCache cache = make(*config);
    Rng rng(2);
    const Floats k = normals(20 * 3 * 64, rng), v = normals(20 * 3 * 64, rng);
    expect_ok(cache.append(rows(k, 3, 64), rows(v, 3, 64)));
    const std::int64_t capacity = 50, kw = packed_words(64, scheme->k_bits),
                       vw = packed_words(64, scheme->v_bits);
    std::vector<std::uint32_t> kp(at(3 * capacity * kw), 0xabcdu), vp(at(3 * capacity * vw));
    Floats kn(at(3 * capacity), -1), vn(at(3 * capacity));
    const KvCache::AuraViews views{
        view(kp.data(), {3, capacity, kw}), view(kn.data(), {3, capacity}),
        view(vp.data(), {3, capacity, vw}), view(vn.data(), {3, capacity})};
    expect_ok(cache.write_aura(views));
    EXPECT_EQ(kp[at(20 * kw)], 0xabcdu);  // beyond the tokens nothing is written
    EXPECT_EQ(kn[20], -1);
    const auto back = KvCache::read_aura(*config, views, 20);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(*back->serialize(), *cache.serialize());
    // Row [h, t] of K by its definition: scale * P^T c.
    Floats row_k(3 * 64), row_v(3 * 64);
    expect_ok(back->read(7, row_k, row_v));
    const std::span<const float> original(k.data() + 7 * 3 * 64, 3 * 64);
    EXPECT_LT(relative_mse(original, row_k), scheme->k_bits == 8 ? 1e-4 : 0.02);
  }
  for (const char* bad : {"aura", "aura9", "aura4v", "aura4v0", "turbo4", "aura4x4", "aura4v4 "})
    EXPECT_FALSE(parse_aura_name(bad).ok()) << bad;
  EXPECT_EQ(*parse_aura_name("aura3"), (AuraScheme{3, 3}));
}

// The views' first axes may have any strides; what is not such a view is refused.
TEST(KvCache, ViewsOfTheSeedsFamilyAreChecked) {
  const auto config = aura_config({4, 4}, 3, 64, 0);
  ASSERT_TRUE(config.ok());
  KvCache cache = make(*config);
  Rng rng(12);
  const Floats x = normals(5 * 3 * 64, rng);
  expect_ok(cache.append(rows(x, 3, 64), rows(x, 3, 64)));
  // K and V of a token side by side: [capacity, kv_heads, 2, width].
  std::vector<std::uint32_t> packed(9 * 3 * 2 * 8);
  Floats scales(2 * 3 * 9);
  const auto half = [&](std::int64_t side) {
    MutView v = view(packed.data() + side * 8, {3, 9, 8});
    v.stride = {2 * 8, 3 * 2 * 8, 1};
    return v;
  };
  const KvCache::AuraViews good{half(0), view(scales.data(), {3, 9}), half(1),
                                view(scales.data() + 27, {3, 9})};
  expect_ok(cache.write_aura(good));
  const auto back = KvCache::read_aura(*config, good, 5);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back->serialize(), *cache.serialize());

  const auto both = [&](auto change, Code code, const std::string& message) {
    KvCache::AuraViews views = good;
    change(views);
    expect_error(cache.write_aura(views), code, message);
    expect_error(KvCache::read_aura(*config, views, 5).status(), code, message);
  };
  using V = KvCache::AuraViews&;
  const Code bad = Code::invalid_argument;
  both([](V v) { v.k_packed.stride[2] = 2; }, Code::unsupported,
       "kv_cache: k_packed: stride 2 of axis 2, expected 1");
  both([](V v) { v.v_packed.stride[0] = -16; }, Code::unsupported,
       "kv_cache: v_packed: stride -16 of axis 0, expected at least 0");
  both([](V v) { v.k_scales.device = {Device::Type::cuda, 1}; }, bad,
       "kv_cache: k_scales: on cuda:1, expected cpu");
  both([](V v) { v.v_scales.data = static_cast<std::byte*>(v.v_scales.data) + 1; }, bad,
       "kv_cache: v_scales: address is not a multiple of 4");
  both([](V v) { v.v_scales.data = nullptr; }, bad, "kv_cache: v_scales: null, expected [3,9]");
  both([](V v) { v.k_packed.shape[1] = 4; }, bad,
       "kv_cache: k_packed: u32 [3,4,8], expected u32 [3,capacity,8], capacity at least 5");
  both([](V v) { v.k_packed.stride[1] = std::int64_t{1} << 60; }, bad,
       "kv_cache: k_packed: stride 1152921504606846976 of axis 1 spans more than 2^57 elements");
  both([](V v) { v.k_scales.stride.rank = 1; }, bad,
       "kv_cache: k_scales: strides [9], expected one per axis");
  KvCache::AuraViews views = good;
  views.v_packed = views.k_packed;
  expect_error(cache.write_aura(views), bad,
               "kv_cache: v_packed: overlaps k_packed, expected memory of its own");
  views = good;
  views.k_scales.stride[0] = 0;
  expect_error(cache.write_aura(views), Code::unsupported,
               "kv_cache: k_scales: stride 0 of axis 0, expected at least 1");
}

TEST(KvCache, LegacyTablesAreForDecodingOnly) {
  const auto four = legacy_codebook(128, 4), eight = legacy_codebook(128, 8);
  ASSERT_TRUE(four.ok() && eight.ok());
  EXPECT_FLOAT_EQ(four->levels.back(), 0.173926f);
  EXPECT_EQ(four->levels.front(), -four->levels.back());
  EXPECT_NEAR(four->distortion, 0.01946, 0.0001);  // 2.09 times the optimum
  EXPECT_NEAR(eight->distortion, 1.573e-4, 3e-6);  // 3.9 times
  EXPECT_NEAR(static_cast<double>(eight->levels.back()), 0.321782, 1e-3);
  EXPECT_FALSE(legacy_codebook(128, 6).ok());
  const auto config = aura_config({4, 4}, 1, 128, 0, true);
  ASSERT_TRUE(config.ok());
  std::vector<std::uint32_t> packed(16, 0x88888888u);  // every code 8, the least positive level
  Floats scales = {2};
  const KvCache::AuraViews views{view(packed.data(), {1, 1, 16}), view(scales.data(), {1, 1}),
                                 view(packed.data(), {1, 1, 16}), view(scales.data(), {1, 1})};
  auto cache = KvCache::read_aura(*config, views, 1);
  ASSERT_TRUE(cache.ok());
  Floats k(128), v(128);
  expect_ok(cache->read(0, k, v));
  double sum = 0;
  for (const float x : k) sum += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_NEAR(std::sqrt(sum), 2 * 0.006938 * std::sqrt(128.0), 1e-5);
  const Floats x(128, 1.0f);
  expect_error(
      cache->append(rows(x, 1, 128), rows(x, 1, 128)), Code::invalid_argument,
      "kv_cache: k.codebook.boundaries: none: this table can only decode; to append, the codebook "
      "needs boundaries");
}

// ---- quality ----

// Isotropic keys, logits of standard deviation 2.5, 4096 tokens: what reference figures give.
TEST(KvCache, AttentionKlIsAsExpected) {
  struct Expected {
    std::int32_t bits;
    ScaleRule rule;
    double kl;
  };
  constexpr Expected kExpected[] = {
      {2, ScaleRule::matched, .360},       {2, ScaleRule::least_squares, .347},
      {3, ScaleRule::matched, .1012},      {4, ScaleRule::none, .0308},
      {4, ScaleRule::matched, .0275},      {4, ScaleRule::unbiased, .0277},
      {4, ScaleRule::least_squares, .0274}};
  Rng rng(17);
  constexpr std::int64_t kTokens = 4096, kDim = 128, kQueries = 24;
  const Floats k = normals(kTokens * kDim, rng);
  const Floats q = normals(kQueries * kDim, rng);
  const auto logits = [&](const Floats& keys, std::int64_t query) {
    Floats x(at(kTokens));
    for (std::int64_t t = 0; t < kTokens; ++t) {
      double sum = 0;
      for (std::int64_t j = 0; j < kDim; ++j)
        sum += static_cast<double>(q[at(query * kDim + j)]) *
               static_cast<double>(keys[at(t * kDim + j)]);
      x[at(t)] = static_cast<float>(2.5 * sum / std::sqrt(static_cast<double>(kDim)));
    }
    return x;
  };
  for (const auto& [bits, rule, expected] : kExpected) {
    KvCacheConfig config{.kv_heads = 1, .dim = kDim};
    config.k.bits = bits;
    config.k.scale_rule = rule;
    KvCache cache = make(config);
    expect_ok(cache.append(rows(k, 1, kDim), rows(k, 1, kDim)));
    Floats decoded(k.size()), row_k(kDim), row_v(kDim);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      expect_ok(cache.read(t, row_k, row_v));
      std::copy(row_k.begin(), row_k.end(), decoded.begin() + t * kDim);
    }
    double kl = 0;
    for (std::int64_t i = 0; i < kQueries; ++i)
      kl += attention_kl(logits(k, i), logits(decoded, i)) / kQueries;
    EXPECT_NEAR(kl, expected, 0.15 * expected)
        << bits << " bits, rule " << kScaleRuleNames[static_cast<int>(rule)];
  }
}

// Rows and means of any size: the error of a centred row is that of an ordinary one.
TEST(KvCache, CentredRowsOfAnySizeKeepTheirDirection) {
  constexpr std::int64_t kDim = 128;
  for (int power = -110; power <= 120; power += 5) {
    Rng rng(25);
    Floats mean = normals(kDim, rng), k = normals(kDim, rng);
    for (std::size_t i = 0; i < k.size(); ++i) {
      mean[i] = std::ldexp(mean[i], power);
      k[i] = std::ldexp(k[i], power) + mean[i];
    }
    KvCacheConfig config{.kv_heads = 1, .dim = kDim};
    config.f16_scale = false;
    config.k.mean = mean;
    KvCache cache = make(config);
    expect_ok(cache.append(rows(k, 1, kDim), rows(k, 1, kDim)));
    Floats k_out(kDim), v_out(kDim);
    expect_ok(cache.read(0, k_out, v_out));
    Floats want = k;
    for (std::size_t i = 0; i < k.size(); ++i) {  // where relative_mse has room for squares
      want[i] = std::ldexp(k[i] - mean[i], -power);
      k_out[i] = std::ldexp(k_out[i] - mean[i], -power);
    }
    EXPECT_LT(relative_mse(want, k_out), 0.02) << power;
    for (std::size_t i = 0; i < k.size(); ++i) {
      want[i] = std::ldexp(k[i], -power);
      v_out[i] = std::ldexp(v_out[i], -power);
    }
    EXPECT_LT(relative_mse(want, v_out), 0.02) << power;
  }
}

// x - mean overflows in one element, in most, in none; the scale is then the largest there is.
TEST(KvCache, CentredRowsThatOverflowKeepTheirDirection) {
  constexpr std::int64_t kDim = 128;
  for (const bool f16_scale : {false, true}) {
    for (const std::size_t count : {0, 1, 100}) {
      for (const std::int64_t tokens : {1, 3}) {
        Rng rng(26);
        Floats mean = normals(kDim, rng), k = normals(tokens * kDim, rng);
        for (float& x : mean) x *= 1e36f;
        for (float& x : k) x *= 1e36f;
        for (std::size_t i = 0; i < count; ++i) {
          mean[i] = i % 3 == 0 ? -2.5e38f : 2.5e38f;
          for (std::int64_t t = 0; t < tokens; ++t) k[at(t * kDim) + i] = -mean[i];
        }
        KvCacheConfig config{.kv_heads = 1, .dim = kDim};
        config.f16_scale = f16_scale;
        config.k.mean = config.v.mean = mean;
        KvCache cache = make(config);
        expect_ok(cache.append(rows(k, 1, kDim), rows(k, 1, kDim)));
        for (std::int64_t t = 0; t < tokens; ++t) {
          Floats k_out(kDim), v_out(kDim);
          expect_ok(cache.read(t, k_out, v_out));
          for (const float x : k_out) EXPECT_TRUE(std::isfinite(x)) << x;
          if (f16_scale) continue;  // 65504 vanishes beside such means
          double dot = 0, want_square = 0, got_square = 0;
          for (std::size_t i = 0; i < k_out.size(); ++i) {
            const double want = (static_cast<double>(k[at(t * kDim) + i]) - mean[i]) * 1e-38;
            const double got = (static_cast<double>(k_out[i]) - mean[i]) * 1e-38;
            dot += want * got;
            want_square += want * want;
            got_square += got * got;
          }
          EXPECT_GT(dot / std::sqrt(want_square * got_square), 0.99) << count << " " << t;
          EXPECT_EQ(k_out, v_out);
        }
      }
    }
  }
}

// A mean of 605 in one pair of channels swamps the content, unless it is taken out first.
TEST(KvCache, CentringTakesALargeMeanOut) {
  Rng rng(23);
  constexpr std::int64_t kTokens = 512, kDim = 128;
  Floats mean(kDim, 0.0f);
  mean[3] = 605;
  Floats k = normals(kTokens * kDim, rng);
  const Floats v = normals(kTokens * kDim, rng), q = normals(kDim, rng);
  for (std::int64_t t = 0; t < kTokens; ++t) k[at(t * kDim + 3)] += mean[3];
  std::vector<double> want(kDim);
  double l = 0;
  std::vector<double> logit(at(kTokens));
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t j = 0; j < kDim; ++j)
      logit[at(t)] += static_cast<double>(q[at(j)]) *
                      static_cast<double>(k[at(t * kDim + j)] - mean[at(j)]) / std::sqrt(128.0);
    const double p = std::exp(logit[at(t)]);
    l += p;
    for (std::int64_t j = 0; j < kDim; ++j)
      want[at(j)] += p * static_cast<double>(v[at(t * kDim + j)]);
  }
  const auto error = [&](bool centred) {
    KvCacheConfig config{.kv_heads = 1, .dim = kDim};
    config.v.bits = 8;
    if (centred) config.k.mean = mean;
    KvCache cache = make(config);
    expect_ok(cache.append(rows(k, 1, kDim), rows(v, 1, kDim)));
    Floats out(kDim), expected(kDim);
    expect_ok(cache.attend(rows(q, 1, kDim), view(out.data(), {1, 1, kDim})));
    for (std::int64_t j = 0; j < kDim; ++j) expected[at(j)] = static_cast<float>(want[at(j)] / l);
    return relative_mse(expected, out);
  };
  EXPECT_LT(error(true), 0.05);
  EXPECT_GT(error(false), 10 * error(true));
}

TEST(Metrics, ByHand) {
  const Floats x = {3, 4}, y = {3, 3}, z = {0, 0}, w = {-4, 3};
  EXPECT_DOUBLE_EQ(relative_mse(x, y), 1.0 / 25);
  EXPECT_DOUBLE_EQ(relative_mse(z, z), 0);
  EXPECT_EQ(relative_mse(z, x), std::numeric_limits<double>::infinity());
  EXPECT_DOUBLE_EQ(cosine_similarity(x, x), 1);
  EXPECT_DOUBLE_EQ(cosine_similarity(x, w), 0);
  EXPECT_DOUBLE_EQ(cosine_similarity(x, z), 0);
  EXPECT_DOUBLE_EQ(logit_error(x, y), 0.25);
  const Floats a = {std::log(3.0f), 0}, b = {0, 0};  // 3/4, 1/4 against 1/2, 1/2
  EXPECT_NEAR(attention_kl(a, b), 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-7);
  EXPECT_DOUBLE_EQ(attention_kl(a, a), 0);
  EXPECT_DOUBLE_EQ(bits_per_value(128, 4), 4.25);
  EXPECT_DOUBLE_EQ(bits_per_value(128, 4, DType::f16), 4.125);
  EXPECT_DOUBLE_EQ(bits_per_value(80, 3), (8 * 32 + 32) / 80.0);
}

}  // namespace
}  // namespace bittern
