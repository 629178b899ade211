/* Tokenisers from C: bittern/tokenizer.h. Link bittern::text, in a project that has C++ enabled.
 *
 * Errors are as in bittern/c/bittern.h. A tokeniser may be used by several threads at once, a
 * stream by one.
 *
 * Functions that write ids or bytes take the room there is for them and always set `*count`, also
 * where it is larger than the room; then the first ones are written. Text is bytes with a length:
 * it may hold zeros, and none is added behind it. */
#ifndef BITTERN_C_TOKENIZER_H_
#define BITTERN_C_TOKENIZER_H_

#include "bittern/c/bittern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bittern_tokenizer bittern_tokenizer;
typedef struct bittern_token_stream bittern_token_stream;

/* `path`: a GGUF file, or a folder with tokenizer.json or tokenizer.model. destroy takes NULL. */
bittern_code bittern_tokenizer_load(const char* path, bittern_tokenizer** tokenizer);
void bittern_tokenizer_destroy(bittern_tokenizer* tokenizer);

/* All zeros: the defaults. */
typedef struct {
  bool leave_out_special; /* no bos and eos around the text */
  bool plain;             /* text that spells a control token stays text */
} bittern_encode_options;
/* `options` NULL: the defaults. */
bittern_code bittern_tokenizer_encode(const bittern_tokenizer* tokenizer, const char* text,
                                      size_t bytes, const bittern_encode_options* options,
                                      int32_t* ids, size_t room, size_t* count);
bittern_code bittern_tokenizer_decode(const bittern_tokenizer* tokenizer, const int32_t* ids,
                                      size_t size, bool skip_special, char* text, size_t room,
                                      size_t* count);

/* Ids that are -1: there is none. */
typedef struct {
  int64_t size; /* ids are below it */
  int32_t bos, eos;
  const int32_t* ends; /* what ends an answer; belongs to the tokeniser */
  size_t end_count;
  const char* chat_template; /* belongs to the tokeniser; "": none */
} bittern_tokenizer_info;
bittern_code bittern_tokenizer_describe(const bittern_tokenizer* tokenizer,
                                        bittern_tokenizer_info* info);

/* The token as its file spells it; `*text` belongs to the tokeniser. */
bittern_code bittern_tokenizer_token(const bittern_tokenizer* tokenizer, int32_t id,
                                     const char** text, size_t* bytes);
bittern_code bittern_tokenizer_is_special(const bittern_tokenizer* tokenizer, int32_t id,
                                          bool* special);
/* `*id`: -1 where no token is spelled so. */
bittern_code bittern_tokenizer_find(const bittern_tokenizer* tokenizer, const char* text,
                                    size_t bytes, int32_t* id);

/* ---- conversations ---- */

typedef struct {
  const char* role;    /* "system", "user" or "assistant", ended by a zero */
  const char* content; /* `bytes` bytes */
  size_t bytes;
} bittern_chat_message;
/* All zeros: the defaults. */
typedef struct {
  bool no_generation_prompt;
  bool no_thinking;   /* an empty thought opens the answer (Qwen3) */
  const char* date;   /* today to Llama 3.1 and later; NULL: "26 Jul 2024" */
  const char* format; /* "chatml", "llama-3", "gemma", "qwen"; NULL: the model's template */
} bittern_chat_options;
/* `options` NULL: the defaults. A message that spells a control token stays text. */
bittern_code bittern_tokenizer_apply_chat(const bittern_tokenizer* tokenizer,
                                          const bittern_chat_message* messages, size_t size,
                                          const bittern_chat_options* options, int32_t* ids,
                                          size_t room, size_t* count);
/* The same as text. */
bittern_code bittern_tokenizer_chat_text(const bittern_tokenizer* tokenizer,
                                         const bittern_chat_message* messages, size_t size,
                                         const bittern_chat_options* options, char* text,
                                         size_t room, size_t* count);

/* ---- text, token by token, never half a character ---- */

/* The stream keeps what it needs of the tokeniser. destroy takes NULL. */
bittern_code bittern_token_stream_create(const bittern_tokenizer* tokenizer, bool keep_special,
                                         bittern_token_stream** stream);
void bittern_token_stream_destroy(bittern_token_stream* stream);
/* `*text` is what is complete with this token, often nothing; it belongs to the stream, until the
 * next call. finish gives U+FFFD if a character is cut off; the stream then starts anew. */
bittern_code bittern_token_stream_push(bittern_token_stream* stream, int32_t id, const char** text,
                                       size_t* bytes);
bittern_code bittern_token_stream_finish(bittern_token_stream* stream, const char** text,
                                         size_t* bytes);

#ifdef __cplusplus
}
#endif
#endif
