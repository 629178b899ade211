#include "cpu/gemm.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <string>

#include "bittern/device.h"
#include "cpu/dispatch.h"

namespace bittern::cpu {

Status gemm_f32(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b,
                float* c) {
  // oneDNN takes this once, before its first kernel; later calls change nothing.
  if (isa() == Isa::avx2) (void)dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
  const int before = omp_get_max_threads();
  omp_set_num_threads(num_threads());
  const dnnl_status_t status = dnnl_sgemm('N', 'N', m, n, k, 1.0f, a, k, b, n, 0.0f, c, n);
  omp_set_num_threads(before);
  if (status == dnnl_success) return {};
  return Status(status == dnnl_out_of_memory ? Code::out_of_memory : Code::internal,
                "gemm: oneDNN status " + std::to_string(status));
}

}  // namespace bittern::cpu
