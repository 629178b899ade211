// Contiguous tensors as the copy engine of sm_90 knows them: one thread copies a whole tile, whose
// pieces of 16 bytes are permuted as tile_place (device.cuh) says.
#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/runtime.cuh"

namespace bittern::cuda {

// A parameter of a kernel, __grid_constant__.
struct alignas(64) TensorMap {
  CUtensorMap map;
};

// Elements of 2 bytes, the innermost axis first. A box is what is copied at a time: 64 elements of
// the first axis, `rows` of the second one and `layers` of the third one.
struct TensorBoxes {
  std::array<std::int64_t, 3> shape;
  int rows = 1, layers = 1;
};

inline Status make_tensor_map(std::string_view op, const void* data, const TensorBoxes& boxes,
                              TensorMap* out) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(found)
               : nullptr;
  }();
  if (encode == nullptr)
    return {Code::device_error, std::string(op) + ": the driver has no cuTensorMapEncodeTiled"};
  const auto& shape = boxes.shape;
  const auto size = [&](int axis) { return static_cast<cuuint64_t>(shape[axis]); };
  const cuuint64_t sizes[3] = {size(0), size(1), size(2)};
  const cuuint64_t strides[2] = {2 * size(0), 2 * size(0) * size(1)};  // in bytes, of the others
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(boxes.rows),
                             static_cast<cuuint32_t>(boxes.layers)};
  const cuuint32_t each[3] = {1, 1, 1};
  const CUresult result =
      encode(&out->map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(data), sizes, strides,
             box, each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::device_error, std::string(op) + ": cuTensorMapEncodeTiled failed with code " +
                                  std::to_string(static_cast<int>(result))};
}

// Where a box begins: its first element of each axis.
struct BoxPlace {
  int x, y, z;
};
// Starts copying. `barrier` is told of the bytes (arrival_expect).
__device__ inline void copy_box_in(void* shared, const TensorMap& tensor, BoxPlace at,
                                   std::uint64_t* barrier) {
  if constexpr (kHasBulkCopies)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
        "l"(&tensor.map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(barrier))
        : "memory");
}
// Belongs to the thread's next bulk_copies_commit().
__device__ inline void copy_box_out(const TensorMap& tensor, BoxPlace at, const void* shared) {
  if constexpr (kHasBulkCopies)
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], "
        "[%4];" ::"l"(&tensor.map),
        "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(shared))
        : "memory");
}

}  // namespace bittern::cuda
