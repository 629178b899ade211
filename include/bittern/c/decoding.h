/* Plain functions around decoding, from C: bittern/rope_frequencies.h and bittern/sample.h.
 *
 * Errors are as in bittern/c/bittern.h. */
#ifndef BITTERN_C_DECODING_H_
#define BITTERN_C_DECODING_H_

#include "bittern/c/bittern.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { BITTERN_ROPE_NONE, BITTERN_ROPE_LINEAR, BITTERN_ROPE_LLAMA3, BITTERN_ROPE_YARN };

/* All zeros: no scaling. A number that is 0 has its default. */
typedef struct {
  int32_t kind;                             /* BITTERN_ROPE_NONE, ... */
  double factor;                            /* 1 */
  double original_context;                  /* 8192 */
  double low_freq_factor, high_freq_factor; /* 1 and 4 */
  double beta_fast, beta_slow;              /* 32 and 1 */
  double attention_factor;                  /* from the others */
  double mscale, mscale_all_dim;            /* not given */
  bool not_truncated;
} bittern_rope_scaling;

/* `inverse` has room for `count` numbers, which must be rotary_dim / 2; `*factor` is that of the op
 * rope. `scaling` NULL: none. */
bittern_code bittern_rope_frequencies(int64_t rotary_dim, double base,
                                      const bittern_rope_scaling* scaling, float* inverse,
                                      size_t count, double* factor);

/* All zeros: the largest logit. */
typedef struct {
  double temperature; /* 0: greedy */
  int64_t top_k;      /* 0: all */
  double top_p;       /* 0: 1 */
  double min_p;
  double repetition_penalty; /* 0: 1 */
  uint64_t seed;
} bittern_sample_options;

/* The next token. `step` counts the tokens drawn with one seed. `history` may be NULL where
 * `history_count` is 0; `options` NULL: all zeros. */
bittern_code bittern_sample(const float* logits, size_t count, const int32_t* history,
                            size_t history_count, const bittern_sample_options* options,
                            uint64_t step, int32_t* token);

#ifdef __cplusplus
}
#endif
#endif
