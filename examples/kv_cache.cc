// Keeps 100 tokens of 2 KV heads at 4 bits, the newest 16 in bf16, and attends to them.
#include <bittern/bittern.h>
#include <bittern/kv_cache.h>
#include <bittern/metrics.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace bittern;

constexpr std::int64_t kTokens = 100, kKvHeads = 2, kHeads = 4, kDim = 64;

Status attend() {
  std::vector<float> k(kTokens * kKvHeads * kDim), v(k.size()), q(kHeads * kDim), out(q.size());
  for (std::size_t i = 0; i < k.size(); ++i) {  // in place of a model's keys and values
    k[i] = std::sin(0.7f * static_cast<float>(i));
    v[i] = std::cos(1.3f * static_cast<float>(i));
  }
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.1f * static_cast<float>(i * i));

  auto cache = KvCache::make({.kv_heads = kKvHeads, .dim = kDim, .recent = 16});
  if (!cache) return cache.status();
  const Shape rows{kTokens, kKvHeads, kDim}, query{1, kHeads, kDim};
  BITTERN_TRY(
      cache->append(view(std::as_const(k).data(), rows), view(std::as_const(v).data(), rows)));
  BITTERN_TRY(cache->attend(view(std::as_const(q).data(), query), view(out.data(), query)));

  std::vector<float> k0(kKvHeads * kDim), v0(k0.size());
  BITTERN_TRY(cache->read(0, k0, v0));
  const KvCacheBytes bytes = cache->bytes();
  std::printf("%lld tokens coded in %zu bytes, %lld in bf16 in %zu; error of token 0: %.4f\n",
              static_cast<long long>(cache->coded()), bytes.codes + bytes.scales,
              static_cast<long long>(cache->recent()), bytes.exact,
              relative_mse({k.data(), k0.size()}, k0));
  return {};
}

}  // namespace

int main() {
  const Status status = attend();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().data());
  return status.ok() ? 0 : 1;
}
