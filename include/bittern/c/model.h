/* Models that run, from C: bittern/model.h and bittern/generate.h. Link bittern::model, in a
 * project that has C++ enabled.
 *
 *   load -> session -> append, truncate, fork, generate
 *
 * Errors are as in bittern/c/bittern.h. A model may be used by several threads at once, a session
 * by one. A call that fails leaves the session as it was. What a handle that was destroyed does is
 * not defined. */
#ifndef BITTERN_C_MODEL_H_
#define BITTERN_C_MODEL_H_

#include "bittern/c/bittern.h"
#include "bittern/c/decoding.h"
#include "bittern/c/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bittern_model bittern_model;
typedef struct bittern_session bittern_session;

/* All zeros: the defaults. */
typedef struct {
  const char* activations; /* "float", "int16" or "int8"; NULL: "int16" */
  int threads;             /* 0: bittern_num_threads() */
  int64_t context;         /* the longest session to be made; 0: what the model was made for */
  bittern_preference preference; /* BITTERN_FASTEST: also kernels with a declared bound */
} bittern_load_options;
/* `path`: a GGUF file, a Hugging Face or MLX folder. `options` NULL: the defaults. destroy takes
 * NULL; sessions keep what they need of the model. */
bittern_code bittern_model_load(const char* path, const bittern_load_options* options,
                                bittern_model** model);
void bittern_model_destroy(bittern_model* model);

typedef struct {
  const char* architecture; /* belongs to the model */
  int64_t layers, attention_layers, hidden, vocab;
  int64_t context;                   /* tokens that it was made for */
  uint64_t parameters, weight_bytes; /* numbers; memory that they take */
} bittern_model_info;
bittern_code bittern_model_describe(const bittern_model* model, bittern_model_info* info);

/* All zeros: the defaults. bittern/model.h says what they mean. */
typedef struct {
  int64_t context;
  const char* kv; /* "f32", "f16", "bf16", "aura8v4", ...; NULL: "f16" */
  int64_t first, recent, skip_first, skip_last;
} bittern_session_options;
bittern_code bittern_session_create(const bittern_model* model,
                                    const bittern_session_options* options,
                                    bittern_session** session);
void bittern_session_destroy(bittern_session* session); /* takes NULL */
/* A session with the same tokens. */
bittern_code bittern_session_fork(const bittern_session* session, bittern_session** fork);

/* `logits` [rows, vocab] receives those of the last `rows` tokens, row by row; none where rows
 * is 0. */
bittern_code bittern_session_append(bittern_session* session, const int32_t* tokens, size_t count,
                                    float* logits, size_t rows);
/* Forgets all tokens from `size` on. */
bittern_code bittern_session_truncate(bittern_session* session, int64_t size);

typedef struct {
  int64_t size, context;
  const int32_t* tokens;             /* `size` of them; until the session changes */
  uint64_t cache_bytes, state_bytes; /* keys and values; states of gated delta layers */
} bittern_session_info;
bittern_code bittern_session_describe(const bittern_session* session, bittern_session_info* info);

/* ---- text, token by token ---- */

/* Called with every token, -1 where only text is left, and the text that is complete with it, often
 * none. Returns whether to go on. It must not use the session. */
typedef bool (*bittern_on_token)(int32_t token, const char* text, size_t bytes, void* user);

typedef struct {
  const bittern_sample_options*
      sample;               /* NULL: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 */
  int64_t max_tokens;       /* 0: until the model ends or the context is full */
  const char* const* stops; /* texts, each ended by a zero, before which to end */
  size_t stop_count;
  bool ignore_ends; /* go on after a token that ends an answer */
  bool special;     /* control tokens are part of the text */
  uint64_t step;    /* tokens drawn with this seed before */
} bittern_generate_options;
/* Appends the prompt and generates. `tokenizer` NULL: no text. `options` and `on_token` may be
 * NULL.
 * `*made`, if not NULL: tokens given. The last of them is not in the session. */
bittern_code bittern_generate(bittern_session* session, const bittern_tokenizer* tokenizer,
                              const int32_t* prompt, size_t count,
                              const bittern_generate_options* options, bittern_on_token on_token,
                              void* user, int64_t* made);

#ifdef __cplusplus
}
#endif
#endif
