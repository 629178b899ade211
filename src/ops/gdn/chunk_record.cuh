// What chunk_prepare.cuh leaves in the workspace for the chains, for every chunk and head.
//
// Tiles are rows of 128 bytes, or parts of 64 elements one after the other, whose 16-byte pieces
// are permuted as the tensor cores want them (WarpgroupMatrix).
#pragma once
#include <string>

#include "cuda/ptx.cuh"
#include "ops/gdn/chunk_device.cuh"
#include "plan/kernel.h"

namespace bittern::chunk_forward {

constexpr int kWide = 128;  // the most elements of a key
constexpr int kPiece = 16, kRowBytes = 128;
constexpr int kPart = kMostRows * kRowBytes;  // 64 x 64 elements
constexpr int kPieces = kRowBytes / kPiece;

using cuda::tile_place;  // where a piece lies

// For row i of a chunk, with n_k and n_q what qk_l2norm and scale make of k and q: what its row of
// W is made with, W = beta v - seen (k S); of o, with (q S); and of y, on its way into S.
struct Factors {
  float beta[kMostRows];   // beta
  float seen[kMostRows];   // beta n_k e^G[i]
  float asked[kMostRows];  // n_q e^G[i]
  float kept[kMostRows];   // n_k e^(G[last] - G[i])
  float decay[kMostRows];  // e^G[last], in every row
};

// What gdn_chunk_backward makes the decays between the rows of a chunk of, and n_k and n_q.
struct ChunkGates {
  float high[kMostRows], low[kMostRows];  // log2(e) G[i]
  float beta[kMostRows], k_norm[kMostRows], q_norm[kMostRows];
};

struct Record {
  // P and T = (I + L)^-1; blocks of 16 above the diagonal are not written.
  static constexpr int kPairs = 0, kInverse = kPart;
  static constexpr int kFactors = 2 * kPart;
  static constexpr int kBytes = kFactors + static_cast<int>(sizeof(Factors));
};

// A chunk's slot is that of cuda::ChunkSlots.
__device__ inline std::int64_t record_at(const Problem& p, std::int64_t slot, std::int64_t head) {
  return (slot * p.d.value_heads + head) * Record::kBytes;
}

// ---- what these tiles are for ----

inline Status refused(const char* field, std::int64_t value, const std::string& expected) {
  return unsupported(std::string(field) + ": " + std::to_string(value) + ", expected " + expected);
}
inline Status supports_tiles(const GdnDesc& d) {
  if (d.element != DType::bf16 && d.element != DType::f16)
    return unsupported(std::string("element: ") + name(d.element) + ", expected bf16 or f16");
  if (d.chunk != kMostRows) return refused("chunk", d.chunk, std::to_string(kMostRows));
  if (d.key_dim != kWide / 2 && d.key_dim != kWide)
    return refused("key_dim", d.key_dim, "64 or 128");
  return {};
}
// A call of f with key_dim as a constant.
template <class F>
Status with_key_dim(const GdnDesc& d, F&& f) {
  return d.key_dim == kWide ? f(std::integral_constant<int, kWide>())
                            : f(std::integral_constant<int, kWide / 2>());
}

template <class T>
__device__ T& shared_at(int place) {
  return *reinterpret_cast<T*>(cuda::dynamic_shared<char>() + place);
}

}  // namespace bittern::chunk_forward
