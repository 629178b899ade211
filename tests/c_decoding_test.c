/* bittern/c/decoding.h, from C. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bittern/c/decoding.h"

static int failures = 0;

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, bittern_last_error()); \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)
#define EXPECT_BAD(call, expected)                                                     \
  do {                                                                                 \
    const bittern_code code_ = (call);                                                 \
    if (code_ != BITTERN_INVALID_ARGUMENT || strcmp(bittern_last_error(), expected)) { \
      fprintf(stderr, "%s:%d: \"%s\", expected \"%s\"\n", __FILE__, __LINE__,          \
              code_ == BITTERN_OK ? "" : bittern_last_error(), expected);              \
      ++failures;                                                                      \
    }                                                                                  \
  } while (0)

static void frequencies(void) {
  float inverse[4];
  double factor = 0;
  EXPECT(bittern_rope_frequencies(8, 10000, NULL, inverse, 4, &factor) == BITTERN_OK);
  EXPECT(inverse[0] == 1 && inverse[1] == 0.1f && inverse[2] == 0.01f && inverse[3] == 0.001f);
  EXPECT(factor == 1);
  bittern_rope_scaling scaling;
  memset(&scaling, 0, sizeof scaling);
  scaling.kind = BITTERN_ROPE_LINEAR;
  scaling.factor = 4;
  EXPECT(bittern_rope_frequencies(8, 10000, &scaling, inverse, 4, &factor) == BITTERN_OK);
  EXPECT(inverse[0] == 0.25f && factor == 1);
  scaling.kind = BITTERN_ROPE_YARN; /* 0.001 (1/3 + 2/3 / 4), 0.1 log(4) + 1 */
  EXPECT(bittern_rope_frequencies(8, 10000, &scaling, inverse, 4, &factor) == BITTERN_OK);
  EXPECT(inverse[0] == 1 && inverse[3] == 0.0005f && factor > 1.1386294 && factor < 1.1386295);
  scaling.kind = BITTERN_ROPE_LLAMA3;
  EXPECT(bittern_rope_frequencies(8, 10000, &scaling, inverse, 4, &factor) == BITTERN_OK);
  EXPECT(inverse[0] == 1 && factor == 1);
  scaling.kind = 4;
  EXPECT_BAD(bittern_rope_frequencies(8, 10000, &scaling, inverse, 4, &factor),
             "rope_frequencies: kind: 4, expected 0..3");
  EXPECT_BAD(bittern_rope_frequencies(8, 10000, NULL, inverse, 3, &factor),
             "rope_frequencies: count: 3, expected rotary_dim / 2, 4");
  EXPECT_BAD(bittern_rope_frequencies(8, 10000, NULL, NULL, 4, &factor),
             "bittern_rope_frequencies: inverse: null");
  EXPECT_BAD(bittern_rope_frequencies(8, 10000, NULL, inverse, 4, NULL),
             "bittern_rope_frequencies: factor: null");
}

static void samples(void) {
  const float logits[] = {0, 2, 2, 1};
  const int32_t history[] = {1};
  int32_t token = -1;
  EXPECT(bittern_sample(logits, 4, NULL, 0, NULL, 0, &token) == BITTERN_OK && token == 1);
  bittern_sample_options options;
  memset(&options, 0, sizeof options);
  options.repetition_penalty = 2;
  EXPECT(bittern_sample(logits, 4, history, 1, &options, 0, &token) == BITTERN_OK && token == 2);
  options.temperature = 1;
  options.top_k = 1;
  EXPECT(bittern_sample(logits, 4, history, 1, &options, 0, &token) == BITTERN_OK && token == 2);
  options.top_p = 2;
  EXPECT_BAD(bittern_sample(logits, 4, NULL, 0, &options, 0, &token),
             "sample: top_p: 2, expected above 0 and at most 1");
  const float bad[] = {0, (float)NAN};
  EXPECT_BAD(bittern_sample(bad, 2, NULL, 0, NULL, 0, &token),
             "sample: logits: [1] is NaN, expected a number or -infinity");
  EXPECT_BAD(bittern_sample(NULL, 4, NULL, 0, NULL, 0, &token), "bittern_sample: logits: null");
  EXPECT_BAD(bittern_sample(logits, 4, NULL, 1, NULL, 0, &token), "bittern_sample: history: null");
  EXPECT_BAD(bittern_sample(logits, 4, NULL, 0, NULL, 0, NULL), "bittern_sample: token: null");
}

int main(void) {
  frequencies();
  samples();
  return failures != 0;
}
