/* run_model MODEL TEXT: continues a text with a model, a GGUF file or a folder, from C. */
#include "bittern/c/model.h"

#include <stdio.h>
#include <string.h>

enum { kMost = 4096 };
static int32_t prompt[kMost];

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, bittern_last_error());
  return 1;
}

static bool print(int32_t token, const char* text, size_t bytes, void* user) {
  (void)token, (void)user;
  fwrite(text, 1, bytes, stdout);
  fflush(stdout);
  return true; /* false would end it */
}

int main(int argc, char** argv) {
  if (argc != 3) {
    printf("usage: run_model MODEL TEXT\n");
    return 0;
  }
  bittern_tokenizer* tokenizer = NULL;
  bittern_model* model = NULL;
  bittern_session* session = NULL;
  if (bittern_tokenizer_load(argv[1], &tokenizer)) return fail("tokenizer");
  if (bittern_model_load(argv[1], NULL, &model)) return fail("model");
  const bittern_session_options compressed = {.kv = "aura8v4"};
  if (bittern_session_create(model, &compressed, &session)) return fail("session");

  size_t count = 0;
  if (bittern_tokenizer_encode(tokenizer, argv[2], strlen(argv[2]), NULL, prompt, kMost, &count))
    return fail("prompt");
  if (count > kMost) count = kMost;
  const bittern_generate_options options = {.max_tokens = 100};
  if (bittern_generate(session, tokenizer, prompt, count, &options, print, NULL, NULL))
    return fail("generate");
  printf("\n");
  bittern_session_destroy(session);
  bittern_model_destroy(model);
  bittern_tokenizer_destroy(tokenizer);
  return 0;
}
