/* bittern/c/kv_cache.h, from C: a cache end to end, and every error of every function. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bittern/c/kv_cache.h"

static int failures = 0;

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, bittern_last_error()); \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)
#define EXPECT_ERROR(call, expected_code, expected)                                      \
  do {                                                                                   \
    const bittern_code code_ = (call);                                                   \
    if (code_ != (expected_code) || strcmp(bittern_last_error(), expected) != 0) {       \
      fprintf(stderr, "%s:%d: %s: \"%s\", expected \"%s\"\n", __FILE__, __LINE__,        \
              bittern_code_name(code_), code_ == BITTERN_OK ? "" : bittern_last_error(), \
              expected);                                                                 \
      ++failures;                                                                        \
    }                                                                                    \
  } while (0)
#define EXPECT_BAD(call, expected) EXPECT_ERROR(call, BITTERN_INVALID_ARGUMENT, expected)

enum { kTokens = 40, kKvHeads = 2, kHeads = 4, kDim = 16, kRow = kKvHeads * kDim };

static float k[kTokens * kRow], v[kTokens * kRow], q[3 * kHeads * kDim], out[3 * kHeads * kDim];
static const int64_t kRows[] = {kTokens, kKvHeads, kDim}, kQuery[] = {3, kHeads, kDim};

static bittern_tensor tensor(void* data, bittern_dtype dtype, int32_t rank, const int64_t* shape) {
  const bittern_tensor t = {NULL, data, dtype, {BITTERN_CPU, 0}, rank, shape, NULL};
  return t;
}

static void fill(float* values, size_t count, unsigned seed) { /* in [-1, 1) */
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) * 0x1p-23f - 1;
  }
}

static bittern_kv_config* make_config(void) {
  bittern_kv_config* config = NULL;
  EXPECT(bittern_kv_config_create(&config) == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "kv_heads", kKvHeads) == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "dim", kDim) == BITTERN_OK);
  EXPECT(bittern_kv_config_set_text(config, "page_size", "16") == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "recent", 4) == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "v.bits", 8) == BITTERN_OK);
  return config;
}

static bittern_kv_cache* make_cache(void) {
  bittern_kv_config* config = make_config();
  bittern_kv_cache* cache = NULL;
  EXPECT(bittern_kv_cache_create(config, &cache) == BITTERN_OK);
  bittern_kv_config_destroy(config); /* the cache has its own copy */
  return cache;
}

static bittern_kv_cache* make_filled(void) {
  bittern_kv_cache* cache = make_cache();
  const bittern_tensor keys = tensor(k, BITTERN_F32, 3, kRows);
  const bittern_tensor values = tensor(v, BITTERN_F32, 3, kRows);
  EXPECT(bittern_kv_cache_append(cache, &keys, &values) == BITTERN_OK);
  return cache;
}

static void* serialized(const bittern_kv_cache* cache, size_t* size) {
  EXPECT(bittern_kv_cache_serialized_bytes(cache, size) == BITTERN_OK);
  void* bytes = malloc(*size);
  EXPECT(bittern_kv_cache_serialize(cache, bytes, *size) == BITTERN_OK);
  return bytes;
}

static bool same(const bittern_kv_cache* a, const bittern_kv_cache* b) {
  size_t a_size = 0, b_size = 0;
  void *a_bytes = serialized(a, &a_size), *b_bytes = serialized(b, &b_size);
  const bool equal = a_size == b_size && memcmp(a_bytes, b_bytes, a_size) == 0;
  free(a_bytes);
  free(b_bytes);
  return equal;
}

static void test_config(void) {
  bittern_kv_config* config = make_config();
  int64_t value = 0;
  EXPECT(bittern_kv_config_get(config, "kv_heads", &value) == BITTERN_OK && value == kKvHeads);
  EXPECT(bittern_kv_config_get(config, "k.bits", &value) == BITTERN_OK && value == 4);
  EXPECT(bittern_kv_config_set_text(config, "k.rotation", "dense") == BITTERN_OK);
  EXPECT(bittern_kv_config_get(config, "k.rotation", &value) == BITTERN_OK && value == 2);
  EXPECT(bittern_kv_config_set(config, "k.rotation", 1) == BITTERN_OK);
  EXPECT(bittern_kv_config_set_text(config, "f16_scale", "true") == BITTERN_OK);
  EXPECT(bittern_kv_config_get(config, "f16_scale", &value) == BITTERN_OK && value == 1);
  EXPECT(bittern_kv_config_set_text(config, "v.seed", "18446744073709551615") == BITTERN_OK);
  EXPECT(bittern_kv_config_get(config, "v.seed", &value) == BITTERN_OK && value == -1);
  EXPECT(bittern_kv_config_set(config, "v.seed", 7) == BITTERN_OK);

  EXPECT(bittern_kv_config_set(config, "bits", 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "kv_cache: no field bits (did you mean k.bits?)") != NULL);
  EXPECT(bittern_kv_config_get(config, "k.table", &value) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "kv_cache: no field k.table") != NULL);
  EXPECT_BAD(bittern_kv_config_set(config, "v.seed", -1),
             "kv_cache: v.seed: -1, expected at least 0");
  EXPECT_BAD(bittern_kv_config_set_text(config, "v.seed", "18446744073709551616"),
             "kv_cache: v.seed: 18446744073709551616 does not fit 64 bits");
  EXPECT_BAD(bittern_kv_config_set(config, "k.bits", INT64_C(1) << 40),
             "kv_cache: k.bits: 1099511627776 does not fit 32 bits");
  EXPECT_BAD(bittern_kv_config_set(config, "k.rotation", 3),
             "kv_cache: k.rotation: 3, expected 0..2");
  EXPECT_BAD(bittern_kv_config_set_text(config, "k.rotation", "spin"),
             "kv_cache: k.rotation: spin, expected identity, hadamard or dense");
  EXPECT_BAD(bittern_kv_config_set_text(config, "recent", "many"),
             "kv_cache: recent: many, expected an integer");

  /* Tables. */
  const float* values = NULL;
  size_t count = 99;
  float mean[kRow];
  fill(mean, kRow, 9);
  EXPECT(bittern_kv_config_table(config, "k.mean", &values, &count) == BITTERN_OK && count == 0);
  EXPECT(bittern_kv_config_set_table(config, "k.mean", mean, kRow) == BITTERN_OK);
  EXPECT(bittern_kv_config_table(config, "k.mean", &values, &count) == BITTERN_OK);
  EXPECT(count == kRow && memcmp(values, mean, sizeof mean) == 0 && values != mean);
  EXPECT_BAD(bittern_kv_config_set_table(config, "k.mean", NULL, 3),
             "bittern_kv_config_set_table: values: null");
  EXPECT_BAD(bittern_kv_config_set_table(config, "k.mean", mean, (size_t)-1),
             "kv_cache: k.mean: 18446744073709551615 values, expected at most 2^28");
  EXPECT(bittern_kv_config_set_table(config, "mean", mean, kRow) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "kv_cache: no table mean (did you mean k.mean?)") != NULL);

  /* What create refuses, and what it fills in. */
  bittern_kv_cache* cache = (bittern_kv_cache*)config;
  EXPECT(bittern_kv_config_set_table(config, "k.mean", mean, 3) == BITTERN_OK);
  EXPECT_BAD(bittern_kv_cache_create(config, &cache), "kv_cache: k.mean: 3 values, expected 32");
  EXPECT(cache == NULL);
  EXPECT(bittern_kv_config_set_table(config, "k.mean", NULL, 0) == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "v.bits", 9) == BITTERN_OK);
  EXPECT_BAD(bittern_kv_cache_create(config, &cache), "kv_cache: v.bits: 9, expected 1..8");
  EXPECT(bittern_kv_config_set(config, "v.bits", 2) == BITTERN_OK);
  EXPECT(bittern_kv_config_set_table(config, "v.codebook.levels", mean, 3) == BITTERN_OK);
  EXPECT_BAD(bittern_kv_cache_create(config, &cache),
             "kv_cache: v.codebook.levels: 3 values, expected 4");
  EXPECT(bittern_kv_config_set_table(config, "v.codebook.levels", NULL, 0) == BITTERN_OK);
  EXPECT(bittern_kv_cache_create(config, &cache) == BITTERN_OK);
  bittern_kv_config* filled = NULL;
  EXPECT(bittern_kv_cache_config(cache, &filled) == BITTERN_OK);
  EXPECT(bittern_kv_config_get(filled, "v.bits", &value) == BITTERN_OK && value == 2);
  EXPECT(bittern_kv_config_table(filled, "v.codebook.levels", &values, &count) == BITTERN_OK);
  EXPECT(count == 4 && values[0] < values[1]);
  EXPECT(bittern_kv_config_table(filled, "k.table", &values, &count) == BITTERN_OK);
  EXPECT(count == kDim && (values[0] == 1 || values[0] == -1));
  bittern_kv_config_destroy(filled);
  bittern_kv_cache_destroy(cache);
  bittern_kv_config_destroy(config);
}

static void test_cache(void) {
  bittern_kv_cache* cache = make_filled();
  bittern_kv_counts counts;
  bittern_kv_bytes bytes;
  EXPECT(bittern_kv_cache_counts(cache, &counts) == BITTERN_OK);
  EXPECT(counts.size == kTokens && counts.first == 0 && counts.coded == kTokens - 4);
  EXPECT(counts.recent == 4 && counts.forgotten == 0);
  EXPECT(bittern_kv_cache_bytes(cache, &bytes) == BITTERN_OK);
  EXPECT(bytes.codes == (kTokens - 4) * kKvHeads * (8 + 16));
  EXPECT(bytes.scales == (kTokens - 4) * kKvHeads * 8 && bytes.exact == 4 * kRow * 4);
  EXPECT(bytes.shared == 0 && bytes.pages >= bytes.codes + bytes.scales && bytes.tables > 0);

  /* Rows by other strides and in parts: the same cache. */
  static float heads_first[kKvHeads][kTokens][kDim];
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kKvHeads; ++h)
      memcpy(heads_first[h][t], k + (t * kKvHeads + h) * kDim, kDim * sizeof(float));
  }
  bittern_kv_cache* other = make_cache();
  const int64_t strides[] = {kDim, kTokens * kDim, 1}, part[] = {kTokens / 2, kKvHeads, kDim};
  for (int i = 0; i < 2; ++i) {
    bittern_tensor keys = tensor(heads_first[0][i * kTokens / 2], BITTERN_F32, 3, part);
    const bittern_tensor values = tensor(v + i * kTokens / 2 * kRow, BITTERN_F32, 3, part);
    keys.strides = strides;
    EXPECT(bittern_kv_cache_append(other, &keys, &values) == BITTERN_OK);
  }
  EXPECT(same(cache, other));

  /* Attention of the default kind, and with everything said. */
  const bittern_tensor queries = tensor(q, BITTERN_F32, 3, kQuery);
  const bittern_tensor result = tensor(out, BITTERN_F32, 3, kQuery);
  static float again[3 * kHeads * kDim];
  const bittern_tensor second = tensor(again, BITTERN_F32, 3, kQuery);
  EXPECT(bittern_kv_cache_attend(cache, &queries, &result, NULL) == BITTERN_OK);
  bittern_kv_attention how = {.scale = 0.25};
  EXPECT(bittern_kv_cache_attend(other, &queries, &second, &how) == BITTERN_OK);
  EXPECT(memcmp(out, again, sizeof out) == 0); /* 1 / sqrt(16) */
  how.softcap = 1e30; /* far above every logit: the identity, but for rounding */
  EXPECT(bittern_kv_cache_attend(other, &queries, &second, &how) == BITTERN_OK);
  for (int i = 0; i < 3 * kHeads * kDim; ++i)
    EXPECT(out[i] - again[i] < 1e-5f && again[i] - out[i] < 1e-5f);
  how.softcap = 0.01; /* logits are nearly equal */
  EXPECT(bittern_kv_cache_attend(other, &queries, &second, &how) == BITTERN_OK);
  EXPECT(memcmp(out, again, sizeof out) != 0);
  how.softcap = 0;
  how.not_causal = true;
  EXPECT(bittern_kv_cache_attend(other, &queries, &second, &how) == BITTERN_OK);
  EXPECT(memcmp(out, again, sizeof out / 3) != 0);
  EXPECT(memcmp(out + 2 * kHeads * kDim, again + 2 * kHeads * kDim, sizeof out / 3) == 0);
  float logits[kHeads] = {50, 50, 50, 50};
  const int64_t four[] = {kHeads};
  const bittern_tensor sinks = tensor(logits, BITTERN_F32, 1, four);
  how = (bittern_kv_attention){.sinks = &sinks, .preference = BITTERN_FASTEST};
  EXPECT(bittern_kv_cache_attend(other, &queries, &second, &how) == BITTERN_OK);
  for (int i = 0; i < 3 * kHeads * kDim; ++i) EXPECT(again[i] > -1e-6f && again[i] < 1e-6f);

  /* Forks go their own ways. */
  bittern_kv_cache* fork = NULL;
  EXPECT(bittern_kv_cache_fork(cache, &fork) == BITTERN_OK);
  EXPECT(same(cache, fork));
  EXPECT(bittern_kv_cache_bytes(cache, &bytes) == BITTERN_OK && bytes.shared == bytes.pages);
  EXPECT(bittern_kv_cache_truncate(fork, 10) == BITTERN_OK);
  EXPECT(bittern_kv_cache_counts(fork, &counts) == BITTERN_OK && counts.size == 10);
  const bittern_tensor keys = tensor(k, BITTERN_F32, 3, part);
  EXPECT(bittern_kv_cache_append(fork, &keys, &keys) == BITTERN_OK);
  EXPECT(same(cache, other) && !same(cache, fork));

  /* A copy that shares nothing, and where it is. */
  bittern_kv_cache* copy = NULL;
  bittern_device device = {BITTERN_CUDA, 7};
  EXPECT(bittern_kv_cache_to(cache, (bittern_device){BITTERN_CPU, 0}, &copy) == BITTERN_OK);
  EXPECT(bittern_kv_cache_device(copy, &device) == BITTERN_OK);
  EXPECT(device.type == BITTERN_CPU && device.index == 0);
  EXPECT(bittern_kv_cache_set_stream(copy, NULL) == BITTERN_OK);
  EXPECT(same(cache, copy));
  EXPECT(bittern_kv_cache_append(copy, &keys, &keys) == BITTERN_OK);
  EXPECT(same(cache, other) && !same(cache, copy));
  bittern_kv_cache_destroy(copy);
  EXPECT(bittern_kv_cache_to(cache, (bittern_device){BITTERN_CUDA, 1000}, &copy) ==
         BITTERN_UNAVAILABLE);
  EXPECT(copy == NULL && strncmp(bittern_last_error(), "kv_cache: device: cuda", 22) == 0);

  /* A token in bf16 and a coded one. */
  float row_k[kRow], row_v[kRow];
  EXPECT(bittern_kv_cache_read(cache, kTokens - 1, row_k, row_v, kRow) == BITTERN_OK);
  for (int i = 0; i < kRow; ++i) {
    const float error = row_k[i] - k[(kTokens - 1) * kRow + i];
    EXPECT(error < 1.0f / 256 && error > -1.0f / 256);
  }
  EXPECT(bittern_kv_cache_read(cache, 0, row_k, row_v, kRow) == BITTERN_OK);
  for (int i = 0; i < kRow; ++i) EXPECT(row_v[i] - v[i] < 0.1f && row_v[i] - v[i] > -0.1f);

  /* Bytes and back. */
  size_t size = 0;
  void* serial = serialized(cache, &size);
  bittern_kv_cache_destroy(cache);
  EXPECT(bittern_kv_cache_parse(serial, size, &cache) == BITTERN_OK);
  EXPECT(same(cache, other));
  bittern_kv_cache* refused = cache;
  EXPECT_BAD(bittern_kv_cache_parse(serial, 5, &refused),
             "kv_cache: bytes: 5 of them, not a KV cache: expected at least 28");
  EXPECT(refused == NULL);
  ((char*)serial)[size / 2] ^= 1;
  EXPECT(bittern_kv_cache_parse(serial, size, &refused) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "it differs, so the bytes were changed") != NULL);
  char text[128];
  snprintf(text, sizeof text, "kv_cache: bytes: %zu of them, expected %zu", size - 1, size);
  EXPECT_BAD(bittern_kv_cache_serialize(cache, serial, size - 1), text);
  free(serial);
  bittern_kv_cache_destroy(fork);
  bittern_kv_cache_destroy(other);
  bittern_kv_cache_destroy(cache);
}

static void test_window(void) {
  bittern_kv_config* config = make_config();
  EXPECT(bittern_kv_config_set(config, "window", 20) == BITTERN_OK);
  EXPECT(bittern_kv_config_set(config, "slack", 2) == BITTERN_OK);
  bittern_kv_cache* cache = NULL;
  EXPECT(bittern_kv_cache_create(config, &cache) == BITTERN_OK);
  const bittern_tensor keys = tensor(k, BITTERN_F32, 3, kRows);
  EXPECT(bittern_kv_cache_append(cache, &keys, &keys) == BITTERN_OK);
  bittern_kv_counts counts;
  EXPECT(bittern_kv_cache_counts(cache, &counts) == BITTERN_OK);
  EXPECT(counts.size == kTokens && counts.forgotten == kTokens - 22 && counts.coded == 18);
  float row_k[kRow], row_v[kRow];
  EXPECT_BAD(bittern_kv_cache_read(cache, 3, row_k, row_v, kRow),
             "kv_cache: token: 3 is gone, expected at least 18");
  EXPECT_BAD(bittern_kv_cache_truncate(cache, 30),
             "kv_cache: truncate: 30, expected at least 38: the window would reach tokens that are "
             "gone");
  bittern_kv_cache_destroy(cache);
  bittern_kv_config_destroy(config);
}

static void test_aura(void) {
  bittern_kv_config* config = NULL;
  EXPECT_BAD(bittern_kv_config_create_aura("aura9", 2, 64, 5, false, &config),
             "aura scheme: aura9, expected aura{1..8}[v{1..8}]");
  EXPECT(config == NULL);
  EXPECT(bittern_kv_config_create_aura("aura4v2", 2, 32, 5, false, &config) == BITTERN_OK);
  bittern_kv_cache *cache = NULL, *back = NULL;
  EXPECT(bittern_kv_cache_create(config, &cache) == BITTERN_OK);
  static float x[7 * 2 * 32];
  fill(x, 7 * 2 * 32, 3);
  const int64_t rows[] = {7, 2, 32};
  const bittern_tensor values = tensor(x, BITTERN_F32, 3, rows);
  EXPECT(bittern_kv_cache_append(cache, &values, &values) == BITTERN_OK);
  uint32_t k_packed[2][9][4], v_packed[2][9][2];
  float k_scales[2][9], v_scales[2][9];
  const int64_t k_shape[] = {2, 9, 4}, v_shape[] = {2, 9, 2};
  bittern_kv_aura aura = {.k_packed = tensor(k_packed, BITTERN_U32, 3, k_shape),
                          .k_scales = tensor(k_scales, BITTERN_F32, 2, k_shape),
                          .v_packed = tensor(v_packed, BITTERN_U32, 3, v_shape),
                          .v_scales = tensor(v_scales, BITTERN_F32, 2, v_shape)};
  EXPECT(bittern_kv_cache_write_aura(cache, &aura) == BITTERN_OK);
  EXPECT(bittern_kv_cache_read_aura(config, &aura, 7, &back) == BITTERN_OK);
  EXPECT(same(cache, back));
  bittern_kv_cache_destroy(back);
  EXPECT_BAD(bittern_kv_cache_read_aura(config, &aura, 10, &back),
             "kv_cache: k_packed: u32 [2,9,4], expected u32 [2,capacity,4], capacity at least 10");
  EXPECT(back == NULL);
  EXPECT_BAD(bittern_kv_cache_read_aura(config, &aura, -1, &back),
             "kv_cache: tokens: -1, expected 0..536870912");
  const int64_t backwards[] = {-36, 4, 1};
  aura.k_packed.strides = backwards;
  EXPECT_ERROR(bittern_kv_cache_write_aura(cache, &aura), BITTERN_UNSUPPORTED,
               "kv_cache: k_packed: stride -36 of axis 0, expected at least 0");
  aura.k_packed = aura.v_packed;
  EXPECT(bittern_kv_cache_write_aura(cache, &aura) == BITTERN_INVALID_ARGUMENT);
  aura.k_packed.dtype = 42;
  EXPECT_BAD(bittern_kv_cache_write_aura(cache, &aura),
             "kv_cache: k_packed: dtype 42, expected a bittern_dtype");
  bittern_kv_config_destroy(config);
  EXPECT(bittern_kv_config_create_aura("aura4", 2, 32, 5, true, &config) == BITTERN_OK);
  bittern_kv_cache* legacy = NULL;
  EXPECT(bittern_kv_cache_create(config, &legacy) == BITTERN_OK);
  EXPECT(bittern_kv_cache_append(legacy, &values, &values) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "k.codebook.boundaries: none") != NULL);
  bittern_kv_cache_destroy(legacy);
  bittern_kv_cache_destroy(cache);
  bittern_kv_config_destroy(config);
}

static void test_operands(void) {
  bittern_kv_cache* cache = make_filled();
  bittern_kv_cache* before = NULL;
  EXPECT(bittern_kv_cache_fork(cache, &before) == BITTERN_OK);
  const bittern_tensor keys = tensor(k, BITTERN_F32, 3, kRows);
  const bittern_tensor queries = tensor(q, BITTERN_F32, 3, kQuery);
  bittern_tensor bad = keys, result = tensor(out, BITTERN_F32, 3, kQuery);
  EXPECT_BAD(bittern_kv_cache_append(cache, NULL, &keys), "kv_cache: k: null");
  EXPECT_BAD(bittern_kv_cache_append(cache, &keys, NULL), "kv_cache: v: null");
  bad.data = NULL;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys), "kv_cache: k: null, expected [40,2,16]");
  bad = keys;
  bad.dtype = BITTERN_F64;
  EXPECT_BAD(bittern_kv_cache_append(cache, &keys, &bad),
             "kv_cache: v: dtype f64, expected f32, f16 or bf16");
  bad.dtype = -1;
  EXPECT_BAD(bittern_kv_cache_append(cache, &keys, &bad),
             "kv_cache: v: dtype -1, expected a bittern_dtype");
  bad = keys;
  bad.rank = 2;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys),
             "kv_cache: k: shape [40,2], expected [n,2,16] = [tokens,kv_heads,dim]");
  bad.rank = 7;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys), "kv_cache: k: rank 7, expected 0..6");
  bad.rank = -1;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys), "kv_cache: k: rank -1, expected 0..6");
  bad = keys;
  bad.shape = NULL;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys), "kv_cache: k: shape is null");
  bad = keys;
  bad.device.type = BITTERN_CUDA;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys), "kv_cache: k: on cuda:0, expected cpu");
  bad.device.type = 3;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys),
             "kv_cache: k: device type 3, expected BITTERN_CPU or BITTERN_CUDA");
  bad = keys;
  bad.data = (char*)k + 1;
  EXPECT_BAD(bittern_kv_cache_append(cache, &bad, &keys),
             "kv_cache: k: address is not a multiple of 4");
  const int64_t fewer[] = {kTokens - 1, kKvHeads, kDim}, none[] = {0, kKvHeads, kDim};
  bad = keys;
  bad.shape = fewer;
  EXPECT_BAD(bittern_kv_cache_append(cache, &keys, &bad),
             "kv_cache: v: 39 tokens, expected those of k, 40");
  const int64_t huge[] = {INT64_MAX, INT64_MAX, INT64_MAX}, many[] = {INT64_MAX, kKvHeads, kDim};
  bad.shape = huge;
  EXPECT(bittern_kv_cache_append(cache, &bad, &bad) == BITTERN_INVALID_ARGUMENT);
  EXPECT(bittern_kv_cache_attend(cache, &bad, &bad, NULL) == BITTERN_INVALID_ARGUMENT);
  bad.shape = many;
  EXPECT(bittern_kv_cache_append(cache, &bad, &bad) == BITTERN_INVALID_ARGUMENT);
  bad = keys;
  bad.shape = none;
  bad.data = NULL;
  EXPECT(bittern_kv_cache_append(cache, &bad, &bad) == BITTERN_OK); /* no tokens */

  EXPECT_BAD(bittern_kv_cache_attend(cache, NULL, &result, NULL), "kv_cache: q: null");
  EXPECT_BAD(bittern_kv_cache_attend(cache, &queries, NULL, NULL), "kv_cache: out: null");
  result.dtype = BITTERN_BF16;
  EXPECT_BAD(bittern_kv_cache_attend(cache, &queries, &result, NULL),
             "kv_cache: out: bf16 [3,4,16], expected f32 [3,4,16]");
  result = queries;
  EXPECT(bittern_kv_cache_attend(cache, &queries, &result, NULL) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "out: overlaps q") != NULL);
  result = tensor(out, BITTERN_F32, 3, kQuery);
  bittern_kv_attention how = {.preference = 9};
  EXPECT_BAD(bittern_kv_cache_attend(cache, &queries, &result, &how),
             "kv_cache: preference 9, expected BITTERN_EXACT or BITTERN_FASTEST");
  bittern_tensor sinks = tensor(q, BITTERN_F32, 1, none + 1); /* 2, not 4 */
  how = (bittern_kv_attention){.sinks = &sinks};
  EXPECT(bittern_kv_cache_attend(cache, &queries, &result, &how) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "sinks: shape [2], expected [4]") != NULL);
  sinks.data = NULL;
  EXPECT_BAD(bittern_kv_cache_attend(cache, &queries, &result, &how),
             "kv_cache: sinks: null data, expected f32 [heads]");
  how = (bittern_kv_attention){.scale = 1e300};
  EXPECT(bittern_kv_cache_attend(cache, &queries, &result, &how) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "scale: 1e+300") != NULL);
  const int64_t odd[] = {3, 3, kDim};
  bad = tensor(q, BITTERN_F32, 3, odd);
  EXPECT(bittern_kv_cache_attend(cache, &bad, &result, NULL) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "heads: 3, expected a multiple of") != NULL);

  float row_k[kRow], row_v[kRow];
  EXPECT_BAD(bittern_kv_cache_read(cache, 0, row_k, row_v, kRow - 1),
             "kv_cache: k: 31 values, expected 32");
  EXPECT_BAD(bittern_kv_cache_read(cache, kTokens, row_k, row_v, kRow),
             "kv_cache: token: 40, expected 0..39");
  EXPECT_BAD(bittern_kv_cache_truncate(cache, kTokens + 1),
             "kv_cache: truncate: 41, expected 0..40");
  EXPECT_BAD(bittern_kv_cache_truncate(cache, -1), "kv_cache: truncate: -1, expected 0..40");
  EXPECT(same(cache, before)); /* nothing of this changed it */
  bittern_kv_cache_destroy(before);
  bittern_kv_cache_destroy(cache);
}

static void test_null(void) {
  bittern_kv_config* config = make_config();
  bittern_kv_config* no_config = config;
  bittern_kv_cache* cache = make_cache();
  bittern_kv_cache* no_cache = cache;
  int64_t value = 0;
  size_t count = 0;
  const float* values = NULL;
  float row[kRow] = {0};
  bittern_kv_counts counts;
  bittern_kv_bytes bytes;
  bittern_kv_aura aura;
  memset(&aura, 0, sizeof aura);
  const bittern_tensor t = tensor(k, BITTERN_F32, 3, kRows);
  EXPECT_BAD(bittern_kv_config_create(NULL), "bittern_kv_config_create: config: null");
  EXPECT_BAD(bittern_kv_config_create_aura("aura4", 1, 64, 0, false, NULL),
             "bittern_kv_config_create_aura: config: null");
  EXPECT_BAD(bittern_kv_config_create_aura(NULL, 1, 64, 0, false, &no_config),
             "bittern_kv_config_create_aura: scheme: null");
  EXPECT(no_config == NULL);
  EXPECT_BAD(bittern_kv_config_set(NULL, "dim", 1), "bittern_kv_config_set: config: null");
  EXPECT_BAD(bittern_kv_config_set(config, NULL, 1), "bittern_kv_config_set: field: null");
  EXPECT_BAD(bittern_kv_config_set_text(NULL, "dim", "1"),
             "bittern_kv_config_set_text: config: null");
  EXPECT_BAD(bittern_kv_config_set_text(config, NULL, "1"),
             "bittern_kv_config_set_text: field: null");
  EXPECT_BAD(bittern_kv_config_set_text(config, "dim", NULL),
             "bittern_kv_config_set_text: text: null");
  EXPECT_BAD(bittern_kv_config_get(NULL, "dim", &value), "bittern_kv_config_get: config: null");
  EXPECT_BAD(bittern_kv_config_get(config, NULL, &value), "bittern_kv_config_get: field: null");
  EXPECT_BAD(bittern_kv_config_get(config, "dim", NULL), "bittern_kv_config_get: value: null");
  EXPECT_BAD(bittern_kv_config_set_table(NULL, "k.mean", row, 1),
             "bittern_kv_config_set_table: config: null");
  EXPECT_BAD(bittern_kv_config_set_table(config, NULL, row, 1),
             "bittern_kv_config_set_table: table: null");
  EXPECT_BAD(bittern_kv_config_table(NULL, "k.mean", &values, &count),
             "bittern_kv_config_table: config: null");
  EXPECT_BAD(bittern_kv_config_table(config, NULL, &values, &count),
             "bittern_kv_config_table: table: null");
  EXPECT_BAD(bittern_kv_config_table(config, "k.mean", NULL, &count),
             "bittern_kv_config_table: values: null");
  EXPECT_BAD(bittern_kv_config_table(config, "k.mean", &values, NULL),
             "bittern_kv_config_table: count: null");
  EXPECT_BAD(bittern_kv_cache_create(config, NULL), "bittern_kv_cache_create: cache: null");
  EXPECT_BAD(bittern_kv_cache_create(NULL, &no_cache), "bittern_kv_cache_create: config: null");
  EXPECT(no_cache == NULL);
  EXPECT_BAD(bittern_kv_cache_fork(cache, NULL), "bittern_kv_cache_fork: fork: null");
  no_cache = cache;
  EXPECT_BAD(bittern_kv_cache_fork(NULL, &no_cache), "bittern_kv_cache_fork: cache: null");
  EXPECT(no_cache == NULL);
  EXPECT_BAD(bittern_kv_cache_to(cache, (bittern_device){BITTERN_CPU, 0}, NULL),
             "bittern_kv_cache_to: copy: null");
  EXPECT_BAD(bittern_kv_cache_to(NULL, (bittern_device){BITTERN_CPU, 0}, &no_cache),
             "bittern_kv_cache_to: cache: null");
  EXPECT_BAD(bittern_kv_cache_device(cache, NULL), "bittern_kv_cache_device: device: null");
  EXPECT_BAD(bittern_kv_cache_device(NULL, NULL), "bittern_kv_cache_device: cache: null");
  EXPECT_BAD(bittern_kv_cache_set_stream(NULL, NULL), "bittern_kv_cache_set_stream: cache: null");
  EXPECT_BAD(bittern_kv_cache_config(cache, NULL), "bittern_kv_cache_config: config: null");
  no_config = config;
  EXPECT_BAD(bittern_kv_cache_config(NULL, &no_config), "bittern_kv_cache_config: cache: null");
  EXPECT(no_config == NULL);
  EXPECT_BAD(bittern_kv_cache_append(NULL, &t, &t), "bittern_kv_cache_append: cache: null");
  EXPECT_BAD(bittern_kv_cache_truncate(NULL, 0), "bittern_kv_cache_truncate: cache: null");
  EXPECT_BAD(bittern_kv_cache_attend(NULL, &t, &t, NULL), "bittern_kv_cache_attend: cache: null");
  EXPECT_BAD(bittern_kv_cache_read(NULL, 0, row, row, kRow), "bittern_kv_cache_read: cache: null");
  EXPECT_BAD(bittern_kv_cache_read(cache, 0, NULL, row, kRow), "bittern_kv_cache_read: k: null");
  EXPECT_BAD(bittern_kv_cache_read(cache, 0, row, NULL, kRow), "bittern_kv_cache_read: v: null");
  EXPECT_BAD(bittern_kv_cache_counts(NULL, &counts), "bittern_kv_cache_counts: cache: null");
  EXPECT_BAD(bittern_kv_cache_counts(cache, NULL), "bittern_kv_cache_counts: counts: null");
  EXPECT_BAD(bittern_kv_cache_bytes(NULL, &bytes), "bittern_kv_cache_bytes: cache: null");
  EXPECT_BAD(bittern_kv_cache_bytes(cache, NULL), "bittern_kv_cache_bytes: bytes: null");
  EXPECT_BAD(bittern_kv_cache_serialized_bytes(NULL, &count),
             "bittern_kv_cache_serialized_bytes: cache: null");
  EXPECT_BAD(bittern_kv_cache_serialized_bytes(cache, NULL),
             "bittern_kv_cache_serialized_bytes: count: null");
  EXPECT_BAD(bittern_kv_cache_serialize(NULL, row, 1), "bittern_kv_cache_serialize: cache: null");
  EXPECT_BAD(bittern_kv_cache_serialize(cache, NULL, 1), "bittern_kv_cache_serialize: bytes: null");
  EXPECT_BAD(bittern_kv_cache_parse(row, 1, NULL), "bittern_kv_cache_parse: cache: null");
  no_cache = cache;
  EXPECT_BAD(bittern_kv_cache_parse(NULL, 1, &no_cache), "bittern_kv_cache_parse: bytes: null");
  EXPECT(no_cache == NULL);
  EXPECT_BAD(bittern_kv_cache_write_aura(NULL, &aura), "bittern_kv_cache_write_aura: cache: null");
  EXPECT_BAD(bittern_kv_cache_write_aura(cache, NULL), "bittern_kv_cache_write_aura: to: null");
  EXPECT_BAD(bittern_kv_cache_read_aura(config, &aura, 0, NULL),
             "bittern_kv_cache_read_aura: cache: null");
  no_cache = cache;
  EXPECT_BAD(bittern_kv_cache_read_aura(NULL, &aura, 0, &no_cache),
             "bittern_kv_cache_read_aura: config: null");
  EXPECT(no_cache == NULL);
  EXPECT_BAD(bittern_kv_cache_read_aura(config, NULL, 0, &no_cache),
             "bittern_kv_cache_read_aura: from: null");
  bittern_kv_cache_destroy(cache);
  bittern_kv_cache_destroy(NULL);
  bittern_kv_config_destroy(config);
  bittern_kv_config_destroy(NULL);
}

int main(void) {
  fill(k, kTokens * kRow, 1);
  fill(v, kTokens * kRow, 2);
  fill(q, 3 * kHeads * kDim, 3);
  test_config();
  test_cache();
  test_window();
  test_aura();
  test_operands();
  test_null();
  if (failures == 0) printf("c_kv_cache_test: ok\n");
  return failures != 0;
}
