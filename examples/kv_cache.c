/* Keeps 100 tokens of 2 KV heads at 4 bits, the newest 16 in bf16, and attends to them, from C. */
#include "bittern/c/kv_cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 100, kKvHeads = 2, kHeads = 4, kDim = 64 };

static float k[kTokens][kKvHeads][kDim], v[kTokens][kKvHeads][kDim], q[kHeads][kDim],
    out[kHeads][kDim];

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, bittern_last_error());
  return 1;
}

int main(void) {
  for (int i = 0; i < kTokens * kKvHeads * kDim; ++i) { /* stands for a model's */
    (&k[0][0][0])[i] = sinf(0.7f * (float)i);
    (&v[0][0][0])[i] = cosf(1.3f * (float)i);
  }
  for (int i = 0; i < kHeads * kDim; ++i) (&q[0][0])[i] = sinf(0.1f * (float)(i * i));

  bittern_kv_config* config = NULL;
  if (bittern_kv_config_create(&config)) return fail("config");
  if (bittern_kv_config_set(config, "kv_heads", kKvHeads) ||
      bittern_kv_config_set(config, "dim", kDim) || bittern_kv_config_set(config, "recent", 16) ||
      bittern_kv_config_set_text(config, "v.scale_rule", "least_squares")) {
    return fail("config");
  }
  bittern_kv_cache* cache = NULL;
  if (bittern_kv_cache_create(config, &cache)) return fail("create");
  bittern_kv_config_destroy(config);

  const bittern_device cpu = {BITTERN_CPU, 0};
  const int64_t rows[] = {kTokens, kKvHeads, kDim}, query[] = {1, kHeads, kDim};
  const bittern_tensor keys = {
      .data = k, .dtype = BITTERN_F32, .device = cpu, .rank = 3, .shape = rows};
  const bittern_tensor values = {
      .data = v, .dtype = BITTERN_F32, .device = cpu, .rank = 3, .shape = rows};
  const bittern_tensor queries = {
      .data = q, .dtype = BITTERN_F32, .device = cpu, .rank = 3, .shape = query};
  const bittern_tensor result = {
      .data = out, .dtype = BITTERN_F32, .device = cpu, .rank = 3, .shape = query};
  if (bittern_kv_cache_append(cache, &keys, &values)) return fail("append");
  if (bittern_kv_cache_attend(cache, &queries, &result, NULL)) return fail("attend");

  /* A draft of two tokens, which is then thrown away: the cache itself has not changed. */
  bittern_kv_cache* draft = NULL;
  if (bittern_kv_cache_fork(cache, &draft)) return fail("fork");
  const int64_t two[] = {2, kKvHeads, kDim};
  const bittern_tensor drafted = {
      .data = k, .dtype = BITTERN_F32, .device = cpu, .rank = 3, .shape = two};
  if (bittern_kv_cache_append(draft, &drafted, &drafted)) return fail("append");
  bittern_kv_cache_destroy(draft);

  /* To a file or another process, and back. */
  size_t size = 0;
  if (bittern_kv_cache_serialized_bytes(cache, &size)) return fail("serialize");
  void* bytes = malloc(size);
  if (bytes == NULL) return 1;
  if (bittern_kv_cache_serialize(cache, bytes, size)) return fail("serialize");
  bittern_kv_cache_destroy(cache);
  if (bittern_kv_cache_parse(bytes, size, &cache)) return fail("parse");
  free(bytes);

  bittern_kv_counts counts;
  bittern_kv_bytes held;
  if (bittern_kv_cache_counts(cache, &counts)) return fail("counts");
  if (bittern_kv_cache_bytes(cache, &held)) return fail("bytes");
  printf("%lld tokens coded in %zu bytes, %lld in bf16 in %zu; %zu bytes serialised\n",
         (long long)counts.coded, held.codes + held.scales, (long long)counts.recent, held.exact,
         size);
  bittern_kv_cache_destroy(cache);
  return 0;
}
