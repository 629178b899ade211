#include "cli/gemm.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <oneapi/dnnl/dnnl.hpp>

#include <string>

#include "bittern/device.h"
#include "cpu/dispatch.h"

namespace bittern::cpu {

namespace {

// oneDNN takes this once, before its first kernel; later calls change nothing.
void limit_isa() {
  if (isa() == Isa::avx2) (void)dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
}

}  // namespace

Status gemm_f32(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b,
                float* c) {
  limit_isa();
  const int before = omp_get_max_threads();
  omp_set_num_threads(num_threads());
  const dnnl_status_t status = dnnl_sgemm('N', 'N', m, n, k, 1.0f, a, k, b, n, 0.0f, c, n);
  omp_set_num_threads(before);
  if (status == dnnl_success) return {};
  return Status(status == dnnl_out_of_memory ? Code::out_of_memory : Code::internal,
                "gemm: oneDNN status " + std::to_string(status));
}

Status gemm_bf16(std::int64_t m, std::int64_t n, std::int64_t k, const bf16* a, const bf16* b,
                 bf16* c) {
  limit_isa();
  const int before = omp_get_max_threads();
  omp_set_num_threads(num_threads());
  Status status;
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const auto matrix = [&](std::int64_t rows, std::int64_t columns, const bf16* data) {
      return dnnl::memory(
          {{rows, columns}, dnnl::memory::data_type::bf16, dnnl::memory::format_tag::ab}, engine,
          const_cast<bf16*>(data));
    };
    const auto left = matrix(m, k, a), right = matrix(k, n, b), out = matrix(m, n, c);
    const dnnl::matmul::primitive_desc product(
        dnnl::matmul::desc(left.get_desc(), right.get_desc(), out.get_desc()), engine);
    dnnl::matmul(product).execute(
        stream, {{DNNL_ARG_SRC, left}, {DNNL_ARG_WEIGHTS, right}, {DNNL_ARG_DST, out}});
    stream.wait();
  } catch (const dnnl::error& error) {
    status = Status(error.status == dnnl_unimplemented   ? Code::unsupported
                    : error.status == dnnl_out_of_memory ? Code::out_of_memory
                                                         : Code::internal,
                    "gemm: oneDNN status " + std::to_string(error.status));
  }
  omp_set_num_threads(before);
  return status;
}

}  // namespace bittern::cpu
