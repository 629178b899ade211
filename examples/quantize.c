/* Quantises two rows of weights to 8-bit codes, one scale per row, from C. */
#include <stdio.h>

#include "bittern/c/bittern.h"

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, bittern_last_error());
  return 1;
}

int main(void) {
  float weights[2][4] = {{0.5f, -1.0f, 0.25f, 1.0f}, {3.0f, 2.0f, -1.5f, 0.0f}};
  float scale[2] = {0.0078125f, 0.03125f};
  int8_t codes[2][4];

  bittern_desc* desc = NULL;
  if (bittern_desc_create("quantize_per_group", &desc)) return fail("desc");
  if (bittern_desc_set(desc, "outer_size", 2) || bittern_desc_set(desc, "axis_size", 4) ||
      bittern_desc_set_text(desc, "granularity", "token")) {
    return fail("desc");
  }
  const bittern_device cpu = {BITTERN_CPU, 0};
  bittern_plan* plan = NULL;
  if (bittern_select(desc, cpu, BITTERN_EXACT, NULL, 0, &plan)) return fail("select");

  const int64_t shape[] = {2, 4};
  const bittern_tensor tensors[] = {
      {.name = "x",
       .data = weights,
       .dtype = BITTERN_F32,
       .device = cpu,
       .rank = 2,
       .shape = shape},
      {.name = "scale",
       .data = scale,
       .dtype = BITTERN_F32,
       .device = cpu,
       .rank = 1,
       .shape = shape},
      {.name = "q", .data = codes, .dtype = BITTERN_S8, .device = cpu, .rank = 2, .shape = shape},
  };
  if (bittern_plan_run(plan, tensors, 3, NULL, NULL, 0)) return fail("run");

  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j) printf("%5d", codes[i][j]);
    printf("\n");
  }
  bittern_plan_destroy(plan);
  bittern_desc_destroy(desc);
  return 0;
}
