/* bittern from C: every op by name, over the same plans as the C++ interface.
 *
 *   descriptor -> select -> run
 *
 * A function that can fail returns a bittern_code; bittern_last_error() then has the message, for
 * the calling thread alone. A null pointer where one is needed is BITTERN_INVALID_ARGUMENT, never a
 * crash. Strings the library returns live as long as the process. Handles may be read by several
 * threads at once; a plan is immutable. */
#ifndef BITTERN_C_BITTERN_H_
#define BITTERN_C_BITTERN_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  BITTERN_OK,
  BITTERN_INVALID_ARGUMENT, /* the caller's problem or operands are malformed */
  BITTERN_UNSUPPORTED,      /* well formed, but no kernel here does it */
  BITTERN_UNAVAILABLE,      /* a device, file or driver is not there */
  BITTERN_OUT_OF_MEMORY,
  BITTERN_DEVICE_ERROR,
  BITTERN_IO_ERROR,
  BITTERN_INTERNAL,
  BITTERN_CANCELLED /* by the caller, while it ran */
} bittern_code;

enum {
  BITTERN_F32,
  BITTERN_F64,
  BITTERN_F16,
  BITTERN_BF16,
  BITTERN_U8,
  BITTERN_S8,
  BITTERN_S32,
  BITTERN_U32
};
typedef int32_t bittern_dtype;

enum { BITTERN_CPU = 1, BITTERN_CUDA = 2 };
typedef struct {
  int32_t type; /* BITTERN_CPU, BITTERN_CUDA */
  int32_t index;
} bittern_device;

enum {
  BITTERN_EXACT,  /* only kernels that meet the op's contract */
  BITTERN_FASTEST /* also kernels that declare a weaker bound */
};
typedef int32_t bittern_preference;

enum { BITTERN_MAX_RANK = 6 };

typedef struct bittern_desc bittern_desc; /* an op and its problem */
typedef struct bittern_plan bittern_plan; /* a problem and the kernel that will run it */

/* An operand as the descriptor implies it. */
typedef struct {
  const char* name;
  bittern_dtype dtype;
  int32_t rank;
  int64_t shape[BITTERN_MAX_RANK];
  bool optional;   /* may be left out */
  bool output;     /* is written */
  bool row_stride; /* the first axis may have any stride that keeps rows apart */
  bool in_place;   /* may be the same memory as an operand of the same dtype, also marked so */
  bool in_out;     /* an output that is read first */
} bittern_operand;

/* Memory of the caller's. Inputs are not written. */
typedef struct {
  const char* name; /* the operand; NULL: the one at this position */
  void* data;       /* NULL: left out, or of a tensor without elements */
  bittern_dtype dtype;
  bittern_device device;
  int32_t rank;
  const int64_t* shape;
  const int64_t* strides; /* in elements; NULL: dense, row by row */
} bittern_tensor;

typedef struct {
  const char* category;      /* "quantization" */
  const char* op;            /* "quantize_per_group" */
  bittern_dtype element;     /* of the floating-point operands */
  bittern_dtype aux_element; /* of the codes */
  const char* architecture;  /* "AVX3_DL", "sm_90", "any" */
  const char* backend;       /* "ref", "cpu", "cuda" */
  const char* kernel;
} bittern_sku;

/* What bittern_precision.error_bound is relative to. */
typedef enum {
  BITTERN_ERROR_EXACT, /* nothing: results are those of the op's contract, and the bound is 0 */
  BITTERN_ERROR_TERMS  /* the sum of the terms' magnitudes that the op's header in bittern/ops
                          defines; one ulp of an f16 or bf16 output is added */
} bittern_error_norm;

typedef struct {
  bittern_dtype math_precision; /* the type of each elementary operation */
  bittern_dtype accumulator;    /* the type sums are kept in */
  bool deterministic;
  bool bit_stable_on_same_hardware;
  bool same_bits_on_all_backends;
  bittern_error_norm error_norm;
  double error_bound; /* the largest difference from the op's contract, in units of error_norm */
} bittern_precision;

const char* bittern_version(void);       /* "0.1.0" */
const char* bittern_last_error(void);    /* "" when no call of this thread has failed */
const char* bittern_code_name(int code); /* "invalid_argument" */
size_t bittern_op_count(void);
const char* bittern_op_name(size_t index); /* NULL when there is no such op */

/* Threads CPU kernels use, unless their plan has its own; results never depend on it. Below 1: the
 * default. Refused, and nothing is changed: more than 256 (or one per core where there are more),
 * or than the system allows. */
int bittern_num_threads(void);
bittern_code bittern_set_num_threads(int threads);

/* `*desc` has the op's defaults; destroy takes NULL. */
bittern_code bittern_desc_create(const char* op, bittern_desc** desc);
void bittern_desc_destroy(bittern_desc* desc);
/* A field by name: integers, real numbers, and names such as "bf16" or "channel" as text (or their
 * index). */
bittern_code bittern_desc_set(bittern_desc* desc, const char* field, int64_t value);
bittern_code bittern_desc_set_real(bittern_desc* desc, const char* field, double value);
bittern_code bittern_desc_set_text(bittern_desc* desc, const char* field, const char* text);
bittern_code bittern_desc_get(const bittern_desc* desc, const char* field, int64_t* value);
bittern_code bittern_desc_get_real(const bittern_desc* desc, const char* field, double* value);
/* Is the problem well formed? select asks this too. */
bittern_code bittern_desc_check(const bittern_desc* desc);
/* Groups along the axis; 0 when group_size <= 0 or the op has none. */
bittern_code bittern_desc_num_groups(const bittern_desc* desc, int64_t* groups);
/* The operands of a well-formed problem, in the order run takes them. */
bittern_code bittern_desc_operand_count(const bittern_desc* desc, size_t* count);
bittern_code bittern_desc_operand(const bittern_desc* desc, size_t index, bittern_operand* operand);

/* `kernel` NULL: the first that supports the problem. `threads` are those of a CPU plan, as
 * bittern_set_num_threads takes them; 0: bittern_num_threads() when it runs. The plan keeps a copy
 * of the descriptor. */
bittern_code bittern_select(const bittern_desc* desc, bittern_device device,
                            bittern_preference preference, const char* kernel, int threads,
                            bittern_plan** plan);
void bittern_plan_destroy(bittern_plan* plan);
bittern_code bittern_plan_sku(const bittern_plan* plan, bittern_sku* sku);
bittern_code bittern_plan_precision(const bittern_plan* plan, bittern_precision* precision);
bittern_code bittern_plan_workspace_bytes(const bittern_plan* plan, size_t* bytes);
/* Operands no tensor stands for are left out. */
bittern_code bittern_plan_can_implement(const bittern_plan* plan, const bittern_tensor* tensors,
                                        size_t count);
/* `stream` is a cudaStream_t for a CUDA plan. `workspace` is 64-byte aligned scratch of at least
 * bittern_plan_workspace_bytes, NULL when that is 0. */
bittern_code bittern_plan_run(const bittern_plan* plan, const bittern_tensor* tensors, size_t count,
                              void* stream, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
