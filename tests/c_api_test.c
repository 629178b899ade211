/* The C header, from C: a plan end to end, every null argument, and two threads that fail at once.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "bittern/c/bittern.h"

static int failures = 0;

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, bittern_last_error()); \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)
#define EXPECT_TEXT(text, expected)                                                            \
  do {                                                                                         \
    if (strcmp(text, expected) != 0) {                                                         \
      fprintf(stderr, "%s:%d: \"%s\", expected \"%s\"\n", __FILE__, __LINE__, text, expected); \
      ++failures;                                                                              \
    }                                                                                          \
  } while (0)

static const bittern_device kCpu = {BITTERN_CPU, 0};

static bittern_desc* make_desc(void) {
  bittern_desc* desc = NULL;
  EXPECT(bittern_desc_create("quantize_per_group", &desc) == BITTERN_OK);
  EXPECT(bittern_desc_set(desc, "outer_size", 2) == BITTERN_OK);
  EXPECT(bittern_desc_set(desc, "axis_size", 6) == BITTERN_OK);
  EXPECT(bittern_desc_set_text(desc, "group_size", "3") == BITTERN_OK);
  return desc;
}

static void test_library(void) {
  EXPECT(strchr(bittern_version(), '.') != NULL);
  EXPECT_TEXT(bittern_code_name(BITTERN_OK), "ok");
  EXPECT_TEXT(bittern_code_name(BITTERN_INTERNAL), "internal");
  EXPECT_TEXT(bittern_code_name(BITTERN_CANCELLED), "cancelled");
  EXPECT_TEXT(bittern_code_name(99), "unknown");
  EXPECT(bittern_op_count() >= 1);
  EXPECT_TEXT(bittern_op_name(0), "quantize_per_group");
  EXPECT(bittern_op_name(bittern_op_count()) == NULL);
  EXPECT(bittern_set_num_threads(3) == BITTERN_OK);
  EXPECT(bittern_num_threads() == 3);
  EXPECT(bittern_set_num_threads(1 << 30) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "num_threads: 1073741824, expected an integer 1..") != NULL);
  EXPECT(bittern_num_threads() == 3);
  EXPECT(bittern_set_num_threads(0) == BITTERN_OK);
  EXPECT(bittern_num_threads() >= 1);
}

static void test_desc(void) {
  bittern_desc* desc = make_desc();
  int64_t value = 0;
  size_t count = 0;
  bittern_operand operand;
  EXPECT(bittern_desc_check(desc) == BITTERN_OK);
  EXPECT(bittern_desc_num_groups(desc, &value) == BITTERN_OK && value == 2);
  EXPECT(bittern_desc_get(desc, "axis_size", &value) == BITTERN_OK && value == 6);
  EXPECT(bittern_desc_operand_count(desc, &count) == BITTERN_OK && count == 4);

  EXPECT(bittern_desc_operand(desc, 0, &operand) == BITTERN_OK);
  EXPECT_TEXT(operand.name, "x");
  EXPECT(operand.dtype == BITTERN_F32 && operand.rank == 2);
  EXPECT(operand.shape[0] == 2 && operand.shape[1] == 6);
  EXPECT(!operand.optional && !operand.output && operand.row_stride);
  EXPECT(bittern_desc_operand(desc, 2, &operand) == BITTERN_OK);
  EXPECT_TEXT(operand.name, "zero_point");
  EXPECT(operand.dtype == BITTERN_S32 && operand.optional && operand.shape[1] == 2);
  EXPECT(bittern_desc_operand(desc, 3, &operand) == BITTERN_OK);
  EXPECT_TEXT(operand.name, "q");
  EXPECT(operand.dtype == BITTERN_S8 && operand.output);
  EXPECT(bittern_desc_operand(desc, 4, &operand) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: operand 4, expected below 4");

  EXPECT(bittern_desc_set(desc, "axes", 1) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "quantize_per_group: no field axes") != NULL);
  EXPECT(bittern_desc_set_text(desc, "element", "f31") == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "element: f31, expected f32, f64, f16 or bf16") != NULL);
  EXPECT(bittern_desc_set(desc, "q_min", INT64_C(1) << 40) == BITTERN_INVALID_ARGUMENT);
  EXPECT(bittern_desc_set_real(desc, "group_size", 64) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: group_size: 64, expected an integer, by bittern_desc_set or "
              "bittern_desc_set_text");
  EXPECT(bittern_desc_set_real(desc, "element", 1) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: element: 1, expected a name, by bittern_desc_set or "
              "bittern_desc_set_text");
  EXPECT(bittern_desc_set_real(desc, "axes", 1) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "quantize_per_group: no field axes") != NULL);
  EXPECT(bittern_desc_set_text(desc, "group_size", "3") == BITTERN_OK);
  EXPECT(bittern_desc_set_text(desc, "group_size", "3.0") == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: group_size: 3.0, expected an integer");
  EXPECT(bittern_desc_set_text(desc, "group_size", "") == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: group_size: empty, expected an integer");
  EXPECT(bittern_desc_set_text(desc, "granularity", "") == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: granularity: empty, expected group, token, channel or tensor");
  EXPECT(bittern_desc_set_text(desc, "group_size", "99999999999999999999") ==
         BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: group_size: 99999999999999999999 does not fit 64 bits");
  EXPECT(bittern_desc_set(desc, "", 1) == BITTERN_INVALID_ARGUMENT);
  EXPECT(strstr(bittern_last_error(), "quantize_per_group: no field \"\", expected one of ") !=
         NULL);
  bittern_desc* real = NULL;
  EXPECT(bittern_desc_create("gdn_recurrent_step", &real) == BITTERN_OK);
  EXPECT(bittern_desc_set(real, "scale", 2) == BITTERN_OK);
  EXPECT(bittern_desc_set_text(real, "scale", "0.25") == BITTERN_OK);
  EXPECT(bittern_desc_set_text(real, "scale", "inf") == BITTERN_INVALID_ARGUMENT);
  EXPECT(bittern_desc_set_text(real, "scale", "1e400") == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "gdn_recurrent_step: scale: 1e400 does not fit 64 bits");
  EXPECT(bittern_desc_get(real, "scale", &value) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "gdn_recurrent_step: scale: a real number, expected an integer field; "
              "bittern_desc_get_real reads it");
  double scale = 0;
  EXPECT(bittern_desc_get_real(real, "scale", &scale) == BITTERN_OK && scale == 0.25);
  bittern_desc_destroy(real);

  EXPECT(bittern_desc_set(desc, "group_size", 0) == BITTERN_OK);
  EXPECT(bittern_desc_num_groups(desc, &value) == BITTERN_OK && value == 0);
  EXPECT(bittern_desc_check(desc) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: group_size: 0, expected at least 1");
  EXPECT(bittern_desc_operand_count(desc, &count) == BITTERN_INVALID_ARGUMENT);
  bittern_plan* plan = (bittern_plan*)&value;
  EXPECT(bittern_select(desc, kCpu, BITTERN_EXACT, NULL, 0, &plan) == BITTERN_INVALID_ARGUMENT);
  EXPECT(plan == NULL);
  bittern_desc_destroy(desc);

  EXPECT(bittern_desc_create("quantise", &desc) == BITTERN_INVALID_ARGUMENT);
  EXPECT(desc == NULL);
  EXPECT(strstr(bittern_last_error(), "no op called quantise"));
}

/* R(x / s) + zp by hand; ties go to even, the last code of row 1 saturates. */
static float x[2][8] = {{0.25f, 0.75f, -1.25f, 1.0f, 2.0f, 3.0f, -1, -1},
                        {5.0f, -5.0f, 0.5f, 1e9f, -1e9f, 0.0f, -1, -1}};
static float scale[2][2] = {{0.5f, 1.0f}, {2.0f, 1.0f}};
static int32_t zero_point[2][2] = {{0, 10}, {0, 0}};
static const int8_t kCodes[2][6] = {{0, 2, -2, 11, 12, 13}, {2, -2, 0, 127, -128, 0}};
static const int64_t kShape[2] = {2, 6}, kStrides[2] = {8, 1}, kParams[2] = {2, 2};

static void test_run(const char* kernel) {
  bittern_desc* desc = make_desc();
  bittern_plan* plan = NULL;
  EXPECT(bittern_select(desc, kCpu, BITTERN_EXACT, kernel, 0, &plan) == BITTERN_OK);
  bittern_desc_destroy(desc); /* the plan has its own copy */

  int8_t q[2][6];
  size_t bytes = 1;
  EXPECT(bittern_plan_workspace_bytes(plan, &bytes) == BITTERN_OK && bytes == 0);

  /* In order, with a row stride. */
  bittern_tensor ordered[4] = {{NULL, x, BITTERN_F32, kCpu, 2, kShape, kStrides},
                               {NULL, scale, BITTERN_F32, kCpu, 2, kParams, NULL},
                               {NULL, zero_point, BITTERN_S32, kCpu, 2, kParams, NULL},
                               {NULL, q, BITTERN_S8, kCpu, 2, kShape, NULL}};
  memset(q, 77, sizeof q);
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_OK);
  EXPECT(bittern_plan_run(plan, ordered, 4, NULL, NULL, 0) == BITTERN_OK);
  EXPECT(memcmp(q, kCodes, sizeof q) == 0);

  /* By name, in another order, the zero point left out. */
  bittern_tensor named[3] = {ordered[3], ordered[1], ordered[0]};
  named[0].name = "q";
  named[1].name = "scale";
  named[2].name = "x";
  EXPECT(bittern_plan_run(plan, named, 3, NULL, NULL, 0) == BITTERN_OK);
  EXPECT(q[0][2] == -2 && q[0][3] == 1 && q[0][5] == 3);

  /* Errors leave the output alone. */
  memset(q, 77, sizeof q);
  named[0].name = "codes";
  EXPECT(bittern_plan_run(plan, named, 3, NULL, NULL, 0) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: no operand codes, expected one of x scale zero_point q");
  named[0].name = "x";
  EXPECT(bittern_plan_run(plan, named, 3, NULL, NULL, 0) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: given twice");
  named[0].name = "q";
  EXPECT(bittern_plan_run(plan, named, 2, NULL, NULL, 0) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: null, expected f32 [2,6]");
  EXPECT(bittern_plan_run(plan, ordered, 5, NULL, NULL, 0) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: 5 operands, expected at most 4");
  EXPECT(bittern_plan_run(plan, NULL, 4, NULL, NULL, 0) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: tensors: null");
  bittern_tensor bad = ordered[0];
  ordered[0].dtype = BITTERN_F16;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: dtype f16, expected f32");
  ordered[0].dtype = 99;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: dtype 99, expected a bittern_dtype");
  ordered[0] = bad;
  ordered[0].rank = 7;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: rank 7, expected 0..6");
  ordered[0] = bad;
  ordered[0].shape = NULL;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: shape is null");
  ordered[0] = bad;
  ordered[0].device.index = 3;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  EXPECT_TEXT(bittern_last_error(), "quantize_per_group: x: on cpu:3, expected cpu");
  ordered[0] = bad;
  ordered[0].device.type = 7;
  EXPECT(bittern_plan_can_implement(plan, ordered, 4) == BITTERN_INVALID_ARGUMENT);
  for (size_t i = 0; i < sizeof q; ++i) EXPECT(((int8_t*)q)[i] == 77);

  bittern_sku sku;
  EXPECT(bittern_plan_sku(plan, &sku) == BITTERN_OK);
  EXPECT_TEXT(sku.op, "quantize_per_group");
  EXPECT_TEXT(sku.category, "quantization");
  EXPECT(sku.element == BITTERN_F32 && sku.aux_element == BITTERN_S8);
  EXPECT(strlen(sku.architecture) > 0 && strlen(sku.backend) > 0);
  if (kernel != NULL) EXPECT_TEXT(sku.kernel, kernel);
  bittern_precision precision;
  EXPECT(bittern_plan_precision(plan, &precision) == BITTERN_OK);
  EXPECT(precision.math_precision == BITTERN_F32 && precision.accumulator == BITTERN_F32);
  EXPECT(precision.deterministic && precision.bit_stable_on_same_hardware &&
         precision.same_bits_on_all_backends);
  EXPECT(precision.error_norm == BITTERN_ERROR_EXACT && precision.error_bound == 0);
  bittern_plan_destroy(plan);
}

static void test_f64_says_f64(void) {
  bittern_desc* desc = make_desc();
  bittern_plan* plan = NULL;
  bittern_sku sku;
  bittern_precision precision;
  EXPECT(bittern_desc_set_text(desc, "element", "f64") == BITTERN_OK);
  EXPECT(bittern_select(desc, kCpu, BITTERN_FASTEST, NULL, 0, &plan) == BITTERN_OK);
  EXPECT(bittern_plan_sku(plan, &sku) == BITTERN_OK && sku.element == BITTERN_F64);
  EXPECT(bittern_plan_precision(plan, &precision) == BITTERN_OK &&
         precision.math_precision == BITTERN_F64);
  bittern_plan_destroy(plan);
  bittern_desc_destroy(desc);
}

static void test_null(void) {
  bittern_desc* desc = make_desc();
  bittern_desc* refused = desc;
  bittern_plan* plan = NULL;
  int64_t value = 0;
  size_t count = 0;
  bittern_operand operand;
  bittern_sku sku;
  bittern_precision precision;
  const bittern_code bad = BITTERN_INVALID_ARGUMENT;
  EXPECT(bittern_desc_create(NULL, &refused) == bad && refused == NULL);
  EXPECT_TEXT(bittern_last_error(), "bittern_desc_create: op: null");
  EXPECT(bittern_desc_create("quantize_per_group", NULL) == bad);
  EXPECT(bittern_desc_set(NULL, "axis_size", 1) == bad);
  EXPECT(bittern_desc_set(desc, NULL, 1) == bad);
  EXPECT(bittern_desc_set_text(NULL, "code", "s8") == bad);
  EXPECT(bittern_desc_set_text(desc, NULL, "s8") == bad);
  EXPECT(bittern_desc_set_text(desc, "code", NULL) == bad);
  EXPECT(bittern_desc_get(NULL, "code", &value) == bad);
  EXPECT(bittern_desc_get(desc, NULL, &value) == bad);
  EXPECT(bittern_desc_get(desc, "code", NULL) == bad);
  EXPECT(bittern_desc_check(NULL) == bad);
  EXPECT(bittern_desc_num_groups(NULL, &value) == bad);
  EXPECT(bittern_desc_num_groups(desc, NULL) == bad);
  EXPECT(bittern_desc_operand_count(NULL, &count) == bad);
  EXPECT(bittern_desc_operand_count(desc, NULL) == bad);
  EXPECT(bittern_desc_operand(NULL, 0, &operand) == bad);
  EXPECT(bittern_desc_operand(desc, 0, NULL) == bad);
  EXPECT(bittern_select(NULL, kCpu, BITTERN_EXACT, NULL, 0, &plan) == bad);
  EXPECT(bittern_select(desc, kCpu, BITTERN_EXACT, NULL, 0, NULL) == bad);
  EXPECT(bittern_select(desc, kCpu, 9, NULL, 0, &plan) == bad);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: preference 9, expected BITTERN_EXACT or BITTERN_FASTEST");
  EXPECT(bittern_select(desc, (bittern_device){0, 0}, BITTERN_EXACT, NULL, 0, &plan) == bad);
  EXPECT_TEXT(bittern_last_error(),
              "quantize_per_group: device type 0, expected BITTERN_CPU or BITTERN_CUDA");
  EXPECT(bittern_select(desc, kCpu, BITTERN_EXACT, "no such", 0, &plan) == BITTERN_UNSUPPORTED);
  EXPECT(bittern_plan_sku(NULL, &sku) == bad);
  EXPECT(bittern_plan_precision(NULL, &precision) == bad);
  EXPECT(bittern_plan_workspace_bytes(NULL, &count) == bad);
  EXPECT(bittern_plan_can_implement(NULL, NULL, 0) == bad);
  EXPECT(bittern_plan_run(NULL, NULL, 0, NULL, NULL, 0) == bad);
  EXPECT(bittern_select(desc, kCpu, BITTERN_EXACT, NULL, 0, &plan) == BITTERN_OK);
  EXPECT(bittern_plan_sku(plan, NULL) == bad);
  EXPECT(bittern_plan_precision(plan, NULL) == bad);
  EXPECT(bittern_plan_workspace_bytes(plan, NULL) == bad);
  bittern_plan_destroy(plan);
  bittern_plan_destroy(NULL);
  bittern_desc_destroy(desc);
  bittern_desc_destroy(NULL);
}

/* Both threads fail between the two barriers, then read: each must see its own message. */
static pthread_barrier_t barrier;

static void* fail_in_thread(void* field) {
  size_t wrong = 0;
  if (bittern_last_error()[0] != '\0') ++wrong; /* another thread's failure is not ours */
  bittern_desc* desc = NULL;
  if (bittern_desc_create("quantize_per_group", &desc) != BITTERN_OK) ++wrong;
  for (int i = 0; i < 100; ++i) {
    pthread_barrier_wait(&barrier);
    if (bittern_desc_set(desc, field, 1) != BITTERN_INVALID_ARGUMENT) ++wrong;
    pthread_barrier_wait(&barrier);
    if (strstr(bittern_last_error(), field) == NULL) ++wrong;
  }
  bittern_desc_destroy(desc);
  return (void*)wrong;
}

static void test_threads(void) {
  pthread_t threads[2];
  const char* fields[2] = {"first_field", "second_field"};
  pthread_barrier_init(&barrier, NULL, 2);
  for (int i = 0; i < 2; ++i)
    EXPECT(pthread_create(&threads[i], NULL, fail_in_thread, (void*)fields[i]) == 0);
  for (int i = 0; i < 2; ++i) {
    void* wrong = NULL;
    EXPECT(pthread_join(threads[i], &wrong) == 0);
    EXPECT(wrong == NULL);
  }
  pthread_barrier_destroy(&barrier);
}

int main(void) {
  EXPECT_TEXT(bittern_last_error(), "");
  test_library();
  test_desc();
  test_run("ref");
  test_run(NULL);
  test_f64_says_f64();
  test_null();
  test_threads();
  if (failures == 0) printf("c_api_test: ok\n");
  return failures != 0;
}
