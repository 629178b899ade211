/* The KV cache of one attention layer and one sequence, from C: bittern/kv_cache.h.
 *
 *   config -> cache -> append, attend, truncate, fork, ...
 *
 * Errors are as in bittern/c/bittern.h. A call that fails leaves the cache as it was. A cache, its
 * forks included, may be used by one thread at a time. */
#ifndef BITTERN_C_KV_CACHE_H_
#define BITTERN_C_KV_CACHE_H_

#include "bittern/c/bittern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bittern_kv_config bittern_kv_config; /* sizes, widths, rules and tables */
typedef struct bittern_kv_cache bittern_kv_cache;

/* ---- configs ---- */

/* `*config` has the defaults: 1 head of 128, 4 bits, hadamard rotations, no window. destroy takes
 * NULL. */
bittern_code bittern_kv_config_create(bittern_kv_config** config);
/* The config of an AURA cache: `scheme` is "aura4", "aura8v4", ...; `layer` seeds the rotations.
 * With `legacy`, the tables that AURA shipped: for decoding only. */
bittern_code bittern_kv_config_create_aura(const char* scheme, int64_t kv_heads, int64_t dim,
                                           uint64_t layer, bool legacy, bittern_kv_config** config);
void bittern_kv_config_destroy(bittern_kv_config* config);
/* Fields by name:
 *   kv_heads dim page_size first recent window slack       numbers
 *   window_keeps_first f16_scale                           0 or 1, "false" or "true"
 *   k.bits k.rotation k.seed k.scale_rule, and so for v    numbers, and names such as "dense" and
 *                                                          "least_squares" as text; a seed
 *                                                          above 2^63 is set as text
 * bittern_kv_cache_create checks the values. */
bittern_code bittern_kv_config_set(bittern_kv_config* config, const char* field, int64_t value);
bittern_code bittern_kv_config_set_text(bittern_kv_config* config, const char* field,
                                        const char* text);
bittern_code bittern_kv_config_get(const bittern_kv_config* config, const char* field,
                                   int64_t* value);
/* Tables by name: k.table (of the rotation: dim signs, or dim * dim values), k.codebook.levels,
 * k.codebook.boundaries, k.mean (kv_heads * dim), and so for v. The values are copied. Without
 * values a table is made from the other fields, and there is no mean; but levels without boundaries
 * are for decoding only. */
bittern_code bittern_kv_config_set_table(bittern_kv_config* config, const char* table,
                                         const float* values, size_t count);
/* `*values` belongs to the config, until it is changed or destroyed. */
bittern_code bittern_kv_config_table(const bittern_kv_config* config, const char* table,
                                     const float** values, size_t* count);

/* ---- caches ---- */

bittern_code bittern_kv_cache_create(const bittern_kv_config* config, bittern_kv_cache** cache);
void bittern_kv_cache_destroy(bittern_kv_cache* cache); /* takes NULL */
/* A cache with the same tokens. Pages are shared, and copied when one of the two writes to them. */
bittern_code bittern_kv_cache_fork(const bittern_kv_cache* cache, bittern_kv_cache** fork);
/* A cache with the same tokens on another device, or on this one; it shares nothing. An empty cache
 * becomes one of a CUDA device so: k, v, q, out and sinks are then in the device's memory. */
bittern_code bittern_kv_cache_to(const bittern_kv_cache* cache, bittern_device device,
                                 bittern_kv_cache** copy);
bittern_code bittern_kv_cache_device(const bittern_kv_cache* cache, bittern_device* device);
/* The cudaStream_t of append, attend and fork from now on; NULL: the default stream. It must come
 * after what another stream still does with the cache. */
bittern_code bittern_kv_cache_set_stream(bittern_kv_cache* cache, void* stream);
/* A copy of the cache's config, with the tables that were filled in. */
bittern_code bittern_kv_cache_config(const bittern_kv_cache* cache, bittern_kv_config** config);

/* k and v [tokens, kv_heads, dim], f32, f16 or bf16, of any strides. Their names are not read. */
bittern_code bittern_kv_cache_append(bittern_kv_cache* cache, const bittern_tensor* k,
                                     const bittern_tensor* v);
/* Forgets all tokens from `size` on. Refused where the window would then reach tokens that are gone
 * already. */
bittern_code bittern_kv_cache_truncate(bittern_kv_cache* cache, int64_t size);

/* All zeros: the defaults. */
typedef struct {
  double scale;                  /* of the logits; 0: 1 / sqrt(dim) */
  double softcap;                /* logits become softcap * tanh(logit / softcap); 0: none */
  const bittern_tensor* sinks;   /* f32 [heads]; NULL: none */
  bool not_causal;               /* queries also see the tokens after their own */
  bittern_preference preference; /* BITTERN_EXACT */
} bittern_kv_attention;
/* q and out [queries, heads, dim], f32, f16 or bf16, of the newest `queries` tokens: the op
 * aura_attention. `how` NULL: the defaults. */
bittern_code bittern_kv_cache_attend(const bittern_kv_cache* cache, const bittern_tensor* q,
                                     const bittern_tensor* out, const bittern_kv_attention* how);
/* Token `token`'s rows as attention sees them, kv_heads * dim values each; `count` is how many k
 * and v have room for, and must be that. */
bittern_code bittern_kv_cache_read(const bittern_kv_cache* cache, int64_t token, float* k, float* v,
                                   size_t count);

/* Tokens. */
typedef struct {
  int64_t size;                 /* appended, less those taken back */
  int64_t first, coded, recent; /* of these, in each region */
  int64_t forgotten;            /* and those behind the window */
} bittern_kv_counts;
bittern_code bittern_kv_cache_counts(const bittern_kv_cache* cache, bittern_kv_counts* counts);

/* Bytes: KvCacheBytes in bittern/kv_cache.h. */
typedef struct {
  size_t codes;   /* of the tokens held: their packed words */
  size_t scales;  /* and their scales */
  size_t exact;   /* tokens held in bf16 */
  size_t pages;   /* memory of the pages in use, whole ones */
  size_t shared;  /* of these, pages that another cache holds too */
  size_t regions; /* memory of the bf16 regions */
  size_t tables;  /* codebooks, rotations, means */
} bittern_kv_bytes;
bittern_code bittern_kv_cache_bytes(const bittern_kv_cache* cache, bittern_kv_bytes* bytes);

/* ---- serialised caches: the format of docs/kv_cache.md ---- */

/* serialize writes as many bytes as serialized_bytes says; `count` must be that. */
bittern_code bittern_kv_cache_serialized_bytes(const bittern_kv_cache* cache, size_t* count);
bittern_code bittern_kv_cache_serialize(const bittern_kv_cache* cache, void* bytes, size_t count);
bittern_code bittern_kv_cache_parse(const void* bytes, size_t count, bittern_kv_cache** cache);

/* ---- AURA's layout ---- */

/* packed [kv_heads, capacity, width] u32 and scales [kv_heads, capacity] f32, of K and V, with
 * tokens from slot 0 on. */
typedef struct {
  bittern_tensor k_packed, k_scales, v_packed, v_scales;
} bittern_kv_aura;
/* Writes the coded tokens; there must be no others, and capacity for them. */
bittern_code bittern_kv_cache_write_aura(const bittern_kv_cache* cache, const bittern_kv_aura* to);
/* A cache of the first `tokens` slots. */
bittern_code bittern_kv_cache_read_aura(const bittern_kv_config* config,
                                        const bittern_kv_aura* from, int64_t tokens,
                                        bittern_kv_cache** cache);

#ifdef __cplusplus
}
#endif
#endif
