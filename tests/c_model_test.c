/* The C interface to models that run, compiled as C. */
#include <bittern/c/model.h>
#include <math.h>
#include <stdint.h>
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

enum { kVocab = 12, kHidden = 32, kInner = 48, kLayers = 2 };

static const char kConfig[] =
    "{\"model_type\":\"llama\",\"vocab_size\":12,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":16,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":true,"
    "\"hidden_act\":\"silu\"}";
static const char kTokenizer[] =
    "{\"added_tokens\":[{\"id\":4,\"content\":\"</s>\",\"special\":true}],"
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
    "\"decoder\":{\"type\":\"ByteLevel\"},"
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"c\":3,\"d\":5,\"e\":6},"
    "\"merges\":[\"a b\"]}}";

/* ---- a model ---- */

typedef struct {
  char header[4096];
  size_t length, bytes;
} header;

static void add(header* h, const char* name, int rows, int columns) {
  const size_t size = sizeof(float) * (size_t)rows * (size_t)(columns > 0 ? columns : 1);
  char shape[32];
  if (columns > 0) {
    snprintf(shape, sizeof shape, "%d,%d", rows, columns);
  } else {
    snprintf(shape, sizeof shape, "%d", rows);
  }
  h->length += (size_t)snprintf(h->header + h->length, sizeof h->header - h->length,
                                "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,"
                                "%zu]}",
                                h->bytes > 0 ? "," : "{", name, shape, h->bytes, h->bytes + size);
  h->bytes += size;
}

static int put(const char* folder, const char* name, const void* text, size_t bytes) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "wb");
  if (file == NULL) return 1;
  const int failed = fwrite(text, 1, bytes, file) != bytes;
  return fclose(file) != 0 || failed;
}

static int put_weights(const char* folder, float first) {
  static header h;
  memset(&h, 0, sizeof h);
  add(&h, "model.embed_tokens.weight", kVocab, kHidden);
  for (int i = 0; i < kLayers; ++i) {
    const struct {
      const char* name;
      int rows, columns;
    } parts[] = {{"input_layernorm", kHidden, 0},    {"post_attention_layernorm", kHidden, 0},
                 {"self_attn.q_proj", 32, kHidden},  {"self_attn.k_proj", 16, kHidden},
                 {"self_attn.v_proj", 16, kHidden},  {"self_attn.o_proj", kHidden, 32},
                 {"mlp.gate_proj", kInner, kHidden}, {"mlp.up_proj", kInner, kHidden},
                 {"mlp.down_proj", kHidden, kInner}};
    for (size_t p = 0; p < sizeof parts / sizeof *parts; ++p) {
      char name[96];
      snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, parts[p].name);
      add(&h, name, parts[p].rows, parts[p].columns);
    }
  }
  add(&h, "model.norm.weight", kHidden, 0);
  h.header[h.length++] = '}';

  const uint64_t length = h.length;
  char* const text = malloc(sizeof length + h.length + h.bytes);
  if (text == NULL) return 1;
  memcpy(text, &length, sizeof length);
  memcpy(text + sizeof length, h.header, h.length);
  for (size_t i = 0; i < h.bytes / sizeof(float); ++i) {
    const float x = i == 0 ? first : sinf(0.37f * (float)(i % 9973));
    memcpy(text + sizeof length + h.length + i * sizeof x, &x, sizeof x);
  }
  const int failed = put(folder, "model.safetensors", text, sizeof length + h.length + h.bytes);
  free(text);
  return failed;
}

/* ---- tests ---- */

typedef struct {
  char text[256];
  size_t bytes;
  int32_t tokens[64];
  int count, most;
} heard;

static bool hear(int32_t token, const char* text, size_t bytes, void* user) {
  heard* const to = user;
  memcpy(to->text + to->bytes, text, bytes);
  to->bytes += bytes;
  if (token >= 0) to->tokens[to->count++] = token;
  return to->most == 0 || to->count < to->most;
}

static int sessions(const bittern_model* model) {
  bittern_session *s = NULL, *fork = NULL;
  REFUSED(bittern_session_create(NULL, NULL, &s));
  REFUSED(bittern_session_create(model, NULL, NULL));
  const bittern_session_options wrong = {.kv = "f8"}, few = {.context = 8, .kv = "f32"};
  REFUSED(bittern_session_create(model, &wrong, &s));
  CHECK(s == NULL && strstr(bittern_last_error(), "expected f32, f16") != NULL);
  const bittern_session_options refused[] = {{.kv = ""},
                                             {.kv = "aura9"},
                                             {.context = -1},
                                             {.context = INT64_MAX},
                                             {.first = -1},
                                             {.recent = INT64_MIN},
                                             {.kv = "aura8v4", .first = INT64_MAX},
                                             {.kv = "aura8v4", .recent = INT64_MAX},
                                             {.kv = "aura8v4", .skip_first = kLayers + 1},
                                             {.kv = "aura8v4", .skip_last = INT64_MAX},
                                             {.skip_last = -1}};
  static int anything;
  for (size_t i = 0; i < sizeof refused / sizeof *refused; ++i) {
    s = (bittern_session*)(void*)&anything;
    REFUSED(bittern_session_create(model, &refused[i], &s));
    CHECK(s == NULL);
  }
  OK(bittern_session_create(model, &few, &s));

  const int32_t tokens[] = {1, 5, 7, 3, 2, 2, 11, 0, 1};
  float all[5][kVocab], last[kVocab], again[kVocab];
  OK(bittern_session_append(s, tokens, 5, all[0], 5));
  OK(bittern_session_truncate(s, 2));
  OK(bittern_session_fork(s, &fork));
  OK(bittern_session_append(s, tokens + 2, 3, last, 1));
  CHECK(memcmp(last, all[4], sizeof last) == 0);
  OK(bittern_session_append(fork, tokens + 2, 3, again, 1));
  CHECK(memcmp(again, last, sizeof last) == 0);
  OK(bittern_session_append(fork, NULL, 0, NULL, 0));

  bittern_session_info info;
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 5 && info.context == 8 && memcmp(info.tokens, tokens, 5 * 4) == 0);
  CHECK(info.cache_bytes == 5 * 2 * 2 * 16 * 4 && info.state_bytes == 0);

  const int32_t bad[] = {3, 12};
  REFUSED(bittern_session_append(s, bad, 2, NULL, 0));
  CHECK(strcmp(bittern_last_error(), "tokens: 12 at 1, expected 0 to 11") == 0);
  REFUSED(bittern_session_append(s, tokens, 4, NULL, 0)); /* 9 of 8 */
  /* Counts that no array has: refused before any of it is read. */
  const size_t counts[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 60};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
    REFUSED(bittern_session_append(s, tokens, counts[i], NULL, 0));
    REFUSED(bittern_session_append(s, tokens, counts[i], last, counts[i]));
    REFUSED(bittern_session_append(s, tokens, counts[i], last, 1));
    REFUSED(bittern_session_append(s, tokens, 1, last, counts[i]));
    REFUSED(bittern_generate(s, NULL, tokens, counts[i], NULL, NULL, NULL, NULL));
  }
  const int32_t far[] = {INT32_MAX, INT32_MIN, -1, kVocab};
  for (size_t i = 0; i < sizeof far / sizeof *far; ++i) {
    REFUSED(bittern_session_append(s, far + i, 1, last, 1));
    REFUSED(bittern_generate(s, NULL, far + i, 1, NULL, NULL, NULL, NULL));
  }
  REFUSED(bittern_session_append(s, NULL, 0, last, 1)); /* logits of no token */
  REFUSED(bittern_session_append(s, tokens, 1, last, 2));
  REFUSED(bittern_session_append(s, tokens, 1, NULL, 1));
  REFUSED(bittern_session_append(s, NULL, 1, NULL, 0));
  REFUSED(bittern_session_append(NULL, tokens, 1, NULL, 0));
  REFUSED(bittern_session_truncate(s, 6));
  REFUSED(bittern_session_truncate(s, -1));
  REFUSED(bittern_session_truncate(NULL, 0));
  bittern_session* none = s;
  REFUSED(bittern_session_fork(NULL, &none));
  CHECK(none == NULL);
  REFUSED(bittern_session_fork(s, NULL));
  REFUSED(bittern_session_describe(s, NULL));
  REFUSED(bittern_session_describe(NULL, &info));
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 5);
  bittern_session_destroy(fork);
  bittern_session_destroy(s);
  bittern_session_destroy(NULL);
  return 0;
}

static int generation(const bittern_model* model, const bittern_tokenizer* t) {
  bittern_session* s = NULL;
  OK(bittern_session_create(model, NULL, &s));
  const int32_t prompt[] = {2, 3};
  const bittern_sample_options draw = {.temperature = 1.5, .seed = 5};
  bittern_generate_options options = {.sample = &draw, .max_tokens = 20, .ignore_ends = true};
  heard whole = {0}, part = {0};
  int64_t made = -1;
  OK(bittern_generate(s, t, prompt, 2, &options, hear, &whole, &made));
  CHECK(made == 20 && whole.count == 20);
  bittern_session_info info;
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 21); /* the last one is not in it */

  char text[256];
  size_t bytes = 0;
  OK(bittern_tokenizer_decode(t, whole.tokens, 20, true, text, sizeof text, &bytes));
  CHECK(bytes == whole.bytes && memcmp(text, whole.text, bytes) == 0);

  OK(bittern_session_truncate(s, 0)); /* stopped by the callback */
  part.most = 7;
  OK(bittern_generate(s, t, prompt, 2, &options, hear, &part, &made));
  CHECK(made == 7 && memcmp(part.tokens, whole.tokens, 7 * 4) == 0);

  OK(bittern_session_truncate(s, 0)); /* neither text nor callback, and defaults */
  OK(bittern_generate(s, NULL, prompt, 2, NULL, NULL, NULL, NULL));
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 63);

  OK(bittern_session_truncate(s, 0));
  const char *stop = "", *none = NULL;
  options.stops = &stop;
  options.stop_count = 1;
  REFUSED(bittern_generate(s, t, prompt, 2, &options, NULL, NULL, &made));
  options.stops = &none;
  REFUSED(bittern_generate(s, t, prompt, 2, &options, NULL, NULL, &made));
  options.stops = NULL;
  REFUSED(bittern_generate(s, t, prompt, 2, &options, NULL, NULL, &made));
  REFUSED(bittern_generate(s, t, prompt, 0, NULL, NULL, NULL, &made));
  REFUSED(bittern_generate(s, t, NULL, 2, NULL, NULL, NULL, &made));
  REFUSED(bittern_generate(NULL, t, prompt, 2, NULL, NULL, NULL, &made));
  CHECK(made == 0);
  const bittern_sample_options odd[] = {{.temperature = NAN},
                                        {.temperature = -1},
                                        {.top_k = -1},
                                        {.top_p = 2},
                                        {.min_p = -1},
                                        {.repetition_penalty = -1},
                                        {.repetition_penalty = NAN},
                                        {.top_p = INFINITY}};
  for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i) {
    const bittern_generate_options how = {.sample = &odd[i], .max_tokens = 1};
    REFUSED(bittern_generate(s, t, prompt, 2, &how, NULL, NULL, NULL));
  }
  const bittern_generate_options below = {.max_tokens = INT64_MIN};
  REFUSED(bittern_generate(s, t, prompt, 2, &below, NULL, NULL, NULL));
  const bittern_generate_options stops = {.stops = (const char* const[]){"a"}, .stop_count = 1};
  REFUSED(bittern_generate(s, NULL, prompt, 2, &stops, NULL, NULL, NULL)); /* without any text */
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 0); /* what was refused left no token */
  bittern_session_destroy(s);
  return 0;
}

/* Its first weight, in the embedding and so in the head, is NaN. */
static int broken(const char* folder) {
  bittern_model* model = NULL;
  bittern_session* s = NULL;
  OK(bittern_model_load(folder, NULL, &model));
  OK(bittern_session_create(model, NULL, &s));
  const int32_t prompt[] = {2, 3};
  bittern_session_info info;
  OK(bittern_session_append(s, prompt, 2, NULL, 0));
  REFUSED(bittern_generate(s, NULL, prompt, 2, NULL, NULL, NULL, NULL));
  OK(bittern_session_describe(s, &info));
  CHECK(info.size == 2); /* as it was */
  bittern_session_destroy(s);
  bittern_model_destroy(model);
  return 0;
}

static int use(const char* folder) {
  bittern_model* model = NULL;
  REFUSED(bittern_model_load(NULL, NULL, &model));
  REFUSED(bittern_model_load(folder, NULL, NULL));
  CHECK(bittern_model_load("/nonexistent", NULL, &model) == BITTERN_UNAVAILABLE && model == NULL);
  const bittern_load_options wrong = {.activations = "int7"}, plain = {.activations = "float"};
  REFUSED(bittern_model_load(folder, &wrong, &model));
  CHECK(strcmp(bittern_last_error(), "activations: \"int7\", expected float, int16 or int8") == 0);
  const bittern_load_options unknown = {.preference = 2}, fastest = {.preference = BITTERN_FASTEST};
  REFUSED(bittern_model_load(folder, &unknown, &model));
  OK(bittern_model_load(folder, &fastest, &model));
  bittern_model_destroy(model);
  const bittern_load_options numbers[] = {{.threads = -1},     {.threads = INT32_MAX},
                                          {.context = -1},     {.context = INT64_MIN},
                                          {.activations = ""}, {.preference = -1}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
    REFUSED(bittern_model_load(folder, &numbers[i], &model));
    CHECK(model == NULL);
  }
  CHECK(bittern_model_load("", NULL, &model) == BITTERN_UNAVAILABLE && model == NULL);
  OK(bittern_model_load(folder, &plain, &model));
  bittern_model_info info;
  OK(bittern_model_describe(model, &info));
  CHECK(strcmp(info.architecture, "llama") == 0 && info.layers == kLayers &&
        info.attention_layers == kLayers && info.hidden == kHidden && info.vocab == kVocab &&
        info.context == 64 && info.parameters == 15904 && info.weight_bytes >= 4 * 15744);
  REFUSED(bittern_model_describe(NULL, &info));
  REFUSED(bittern_model_describe(model, NULL));

  bittern_tokenizer* t = NULL;
  OK(bittern_tokenizer_load(folder, &t));
  int failed = sessions(model);
  failed |= generation(model, t);
  bittern_tokenizer_destroy(t);
  bittern_model_destroy(model);
  bittern_model_destroy(NULL);
  return failed;
}

int main(void) {
  char folder[] = "/tmp/bittern_c_model_XXXXXX";
  if (mkdtemp(folder) == NULL) return 1;
  int failed = put(folder, "config.json", kConfig, sizeof kConfig - 1);
  failed |= put(folder, "tokenizer.json", kTokenizer, sizeof kTokenizer - 1);
  failed |= put_weights(folder, NAN);
  failed |= broken(folder);
  failed |= put_weights(folder, 0);
  failed |= use(folder);
  const char* names[] = {"config.json", "tokenizer.json", "model.safetensors"};
  for (int i = 0; i < 3; ++i) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    unlink(path);
  }
  rmdir(folder);
  return failed;
}
