/* The C interface to tokenisers, compiled as C. */
#include <bittern/c/tokenizer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, bittern_last_error()); \
      return 1;                                                                                 \
    }                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == BITTERN_OK)
#define REFUSED(call) CHECK((call) == BITTERN_INVALID_ARGUMENT && bittern_last_error()[0] != 0)

static const char kTokenizer[] =
    "{\"added_tokens\":[{\"id\":4,\"content\":\"<|im_start|>\",\"special\":true},"
    "{\"id\":5,\"content\":\"<|im_end|>\",\"special\":true}],"
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
    "\"decoder\":{\"type\":\"ByteLevel\"},"
    "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
    "\"x\","
    "\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{\"x\":{"
    "\"id\":"
    "\"x\",\"ids\":[4],\"tokens\":[\"<|im_start|>\"]}}},"
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\\u00e4\":3,\"u\":6,\"s\":7,"
    "\"e\":8,\"r\":9,\"\\u010a\":10},\"merges\":[\"a b\"]}}";

static int use(const char* folder) {
  bittern_tokenizer* t = NULL;
  REFUSED(bittern_tokenizer_load(NULL, &t));
  REFUSED(bittern_tokenizer_load(folder, NULL));
  CHECK(bittern_tokenizer_load("/nonexistent", &t) == BITTERN_UNAVAILABLE && t == NULL);
  OK(bittern_tokenizer_load(folder, &t));

  int32_t ids[64];
  size_t count = 0;
  OK(bittern_tokenizer_encode(t, "abb<|im_end|>", 13, NULL, ids, 64, &count));
  CHECK(count == 4 && ids[0] == 4 && ids[1] == 2 && ids[2] == 1 && ids[3] == 5);
  const bittern_encode_options bare = {.leave_out_special = true};
  OK(bittern_tokenizer_encode(t, "ab", 2, &bare, NULL, 0, &count));
  CHECK(count == 1);
  ids[1] = 77; /* no room, nothing written */
  OK(bittern_tokenizer_encode(t, "abb", 3, &bare, ids, 1, &count));
  CHECK(count == 2 && ids[0] == 2 && ids[1] == 77);
  const bittern_encode_options plain = {.leave_out_special = true, .plain = true};
  OK(bittern_tokenizer_encode(t, "<|im_end|>e", 11, &plain, ids, 64, &count));
  CHECK(count == 2 && ids[0] == 8); /* of letters without a token nothing is left */
  OK(bittern_tokenizer_encode(t, NULL, 0, &bare, ids, 64, &count));
  CHECK(count == 0);
  REFUSED(bittern_tokenizer_encode(NULL, "a", 1, NULL, ids, 64, &count));
  REFUSED(bittern_tokenizer_encode(t, NULL, 1, NULL, ids, 64, &count));
  REFUSED(bittern_tokenizer_encode(t, "a", 1, NULL, NULL, 64, &count));
  REFUSED(bittern_tokenizer_encode(t, "a", 1, NULL, ids, 64, NULL));

  char text[64];
  const int32_t some[] = {2, 5, 1};
  OK(bittern_tokenizer_decode(t, some, 3, true, text, sizeof text, &count));
  CHECK(count == 3 && memcmp(text, "abb", 3) == 0);
  OK(bittern_tokenizer_decode(t, some, 3, false, NULL, 0, &count));
  CHECK(count == 13);
  const int32_t wrong[] = {11};
  REFUSED(bittern_tokenizer_decode(t, wrong, 1, false, text, sizeof text, &count));
  CHECK(strcmp(bittern_last_error(), "decode: token 11, expected 0..10") == 0);
  REFUSED(bittern_tokenizer_decode(t, NULL, 1, false, text, sizeof text, &count));

  bittern_tokenizer_info info;
  OK(bittern_tokenizer_describe(t, &info));
  CHECK(info.size == 11 && info.bos == -1 && info.eos == 5 && info.end_count == 1 &&
        info.ends[0] == 5 && strstr(info.chat_template, "im_start") != NULL);
  REFUSED(bittern_tokenizer_describe(t, NULL));
  const char* spelled = NULL;
  OK(bittern_tokenizer_token(t, 2, &spelled, &count));
  CHECK(count == 2 && memcmp(spelled, "ab", 2) == 0);
  REFUSED(bittern_tokenizer_token(t, -1, &spelled, &count));
  bool special = false;
  OK(bittern_tokenizer_is_special(t, 4, &special));
  CHECK(special);
  int32_t id = 0;
  OK(bittern_tokenizer_find(t, "ab", 2, &id));
  CHECK(id == 2);
  OK(bittern_tokenizer_find(t, "ba", 2, &id));
  CHECK(id == -1);

  const bittern_chat_message talk[] = {{"user", "ab", 2}};
  const bittern_chat_options closed = {.no_generation_prompt = true};
  OK(bittern_tokenizer_apply_chat(t, talk, 1, &closed, ids, 64, &count));
  const int32_t want[] = {4, 6, 7, 8, 9, 10, 2, 5, 10};
  CHECK(count == 9 && memcmp(ids, want, sizeof want) == 0);
  OK(bittern_tokenizer_chat_text(t, talk, 1, NULL, text, sizeof text, &count));
  CHECK(count == 52 && memcmp(text, "<|im_start|>user\nab", 19) == 0);
  const bittern_chat_options unknown = {.format = "none"};
  REFUSED(bittern_tokenizer_apply_chat(t, talk, 1, &unknown, ids, 64, &count));
  REFUSED(bittern_tokenizer_apply_chat(t, NULL, 1, NULL, ids, 64, &count));
  REFUSED(bittern_tokenizer_apply_chat(t, talk, 0, NULL, ids, 64, &count));
  const bittern_chat_message nobody = {NULL, "x", 1};
  REFUSED(bittern_tokenizer_chat_text(t, &nobody, 1, NULL, text, sizeof text, &count));

  bittern_token_stream* stream = NULL;
  OK(bittern_token_stream_create(t, false, &stream));
  bittern_tokenizer_destroy(t); /* the stream lives on */
  OK(bittern_token_stream_push(stream, 2, &spelled, &count));
  CHECK(count == 2 && memcmp(spelled, "ab", 2) == 0);
  OK(bittern_token_stream_push(stream, 3, &spelled, &count));
  CHECK(count == 0);
  OK(bittern_token_stream_finish(stream, &spelled, &count));
  CHECK(count == 3 && memcmp(spelled, "\xef\xbf\xbd", 3) == 0);
  REFUSED(bittern_token_stream_push(stream, 99, &spelled, &count));
  REFUSED(bittern_token_stream_push(NULL, 0, &spelled, &count));
  bittern_token_stream_destroy(stream);
  bittern_token_stream_destroy(NULL);
  bittern_tokenizer_destroy(NULL);
  return 0;
}

static int put(const char* folder, const char* name, const char* text) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "wb");
  if (file == NULL) return 1;
  const int failed = fputs(text, file) < 0;
  return fclose(file) != 0 || failed;
}

int main(void) {
  char folder[] = "/tmp/bittern_c_tokenizer_XXXXXX";
  if (mkdtemp(folder) == NULL) return 1;
  int failed = put(folder, "tokenizer.json", kTokenizer);
  failed |=
      put(folder, "tokenizer_config.json",
          "{\"eos_token\":\"<|im_end|>\",\"chat_template\":\"{% for message in messages %}{{"
          "'<|im_start|>' + message['role'] + '\\\\n' + message['content'] + '<|im_end|>' + "
          "'\\\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\\\n' "
          "}}{% endif %}\"}");
  failed |= use(folder);
  const char* names[] = {"tokenizer.json", "tokenizer_config.json"};
  for (int i = 0; i < 2; ++i) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    unlink(path);
  }
  rmdir(folder);
  return failed;
}
