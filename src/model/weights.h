// The weights of a decoder: matrices as their file stores them, repacked into panels
// (bittern/matmul_desc.h) and never expanded, and small vectors in f32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/matmul_desc.h"
#include "bittern/status.h"
#include "convert/recipe.h"
#include "convert/row_reader.h"
#include "formats/checkpoint.h"
#include "model/decoder.h"
#include "model/memory.h"

namespace bittern {

// Matrices with the same inputs, one behind the other: y = x W^T + bias. Neighbours that are stored
// alike are one piece.
struct Matrix {
  struct Piece {
    WeightDesc weights;
    std::size_t offset = 0;  // of its panels in Weights::memory
    std::int64_t first = 0;  // of its outputs
  };
  std::vector<Piece> pieces;
  std::vector<float> bias;  // [outputs], or empty
  std::int64_t inputs = 0, outputs = 0;
  explicit operator bool() const { return outputs > 0; }
};

using Vector = std::vector<float>;

struct DenseMlp {
  Matrix in;  // gate, then up
  Matrix down;
};

struct LayerWeights {
  // Norms; empty: there is none.
  Vector before, after, before_mlp, after_mlp;

  // Attention.
  Matrix qkv, out;
  Vector q_norm, k_norm;

  // The gated delta net.
  Matrix delta_in;  // q, k, v, z, b, a
  Vector conv, a_log, dt_bias, delta_norm;

  DenseMlp mlp;
  Matrix router;
  std::vector<DenseMlp> experts;
  DenseMlp shared;
  Matrix shared_router;
};

// Rows of one of the decoder's parts (World::parts), where they are in the panels.
struct WeightPart {
  std::string name;
  std::int64_t first = 0;  // the part's
  WeightDesc weights;      // of these rows alone
  std::size_t offset = 0;  // in Weights::memory
};

struct Weights {
  LargePages memory;
  std::vector<WeightPart> parts;  // of the matrices, in the order of their offsets
  Matrix embedding, head;         // head: without pieces where it is the embedding
  Vector final_norm;
  std::vector<LayerWeights> layers;
  std::uint64_t bytes = 0;       // of all matrices
  std::uint64_t parameters = 0;  // numbers, matrices and vectors

  const Matrix& output() const { return head ? head : embedding; }
};

// All weights of `decoder`, made of tensors of World::parts; without `fill`, no memory for
// matrices.
Result<Weights> load_weights(const Checkpoint& source, const std::vector<Recipe>& recipes,
                             const Decoder& decoder, int threads, bool fill);

}  // namespace bittern
