// Ops of a decoder's passes: views of rows and heads, and a runner with one scratch memory.
#pragma once
#include <cstdint>

#include "bittern/ops/quantized_matmul.h"
#include "bittern/plan.h"
#include "cpu/parallel.h"
#include "model/decoder.h"
#include "model/forward.h"
#include "model/memory.h"
#include "model/weights.h"

namespace bittern {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline MutView rows_of(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  return view(data, {rows, columns}, stride);
}
// [tokens, heads, dim] with `token` and `head` numbers from one to the next.
inline MutView heads_of(float* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                        std::int64_t token, std::int64_t head) {
  MutView v = view(data, {tokens, heads, dim});
  v.stride[0] = token;
  v.stride[1] = head;
  return v;
}
// The same with an axis of length 1 before it.
inline MutView batch_of(MutView v) {
  for (int i = v.shape.rank; i > 0; --i) {
    v.shape[i] = v.shape[i - 1];
    v.stride[i] = v.stride[i - 1];
  }
  ++v.shape.rank;
  ++v.stride.rank;
  v.shape[0] = 1;
  v.stride[0] = v.stride[1] * v.shape[1];
  return v;
}
inline ConstView vector_of(const Vector& v) {
  return view(v.data(), {static_cast<std::int64_t>(v.size())});
}

// A gated delta net's rule over `tokens` tokens of one sequence.
inline GdnDesc gdn_desc(const Decoder& d, std::int64_t tokens) {
  return {.tokens = tokens,
          .key_heads = d.key_heads,
          .value_heads = d.value_heads,
          .key_dim = d.key_dim,
          .value_dim = d.value_dim,
          .head_map = d.head_map,
          .qk_l2norm = true,
          .gate = true,
          .beta_sigmoid = true};
}

inline void add(float* to, const float* from, std::int64_t count) {
  cpu::parallel(count, cpu::kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
  });
}

// Runs ops of one model, with one scratch memory.
class Runner {
 public:
  Runner(const ModelData& model, Scratch& scratch) : m_(model), scratch_(scratch) {}

  template <class Op>
  Status run(const typename Op::Desc& desc, const typename Op::Args& args) {
    const auto plan = Plan<Op>::select(desc, {}, m_.options.preference);
    if (!plan) return plan.status();
    const std::size_t bytes = plan->workspace_bytes();
    const Scratch::Mark mark = scratch_.mark();
    const Status status = plan->run(args, {}, {scratch_.take(bytes), bytes});
    scratch_.release(mark);
    return status;
  }

  // y [rows, outputs], `stride` numbers from row to row, = x W^T + bias.
  Status linear(const Matrix& w, const ConstView& x, std::int64_t rows, float* y,
                std::int64_t stride) {
    for (const Matrix::Piece& piece : w.pieces) {
      QuantizedMatmulDesc desc{.rows = rows, .weights = piece.weights};
      desc.activations = piece.weights.plain() ? Activations::exact : m_.options.activations;
      QuantizedMatmul::Args args{};
      args.x = x;
      args.panels = panels_of(piece);
      args.y = rows_of(y + piece.first, rows, piece.weights.outputs, stride);
      BITTERN_TRY(run<QuantizedMatmul>(desc, args));
    }
    if (w.bias.empty()) return {};
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t j = 0; j < w.outputs; ++j) y[r * stride + j] += w.bias[at(j)];
    return {};
  }

  ConstView panels_of(const Matrix::Piece& piece) const {
    const Axes shape = piece.weights.panel_shape();
    return {m_.weights.memory.data() + piece.offset, DType::u8, {}, shape, shape.dense_strides()};
  }

 protected:
  FloatRows take(std::int64_t count, std::int64_t width) {
    return {scratch_.floats(count * width), width};
  }

  const ModelData& m_;
  Scratch& scratch_;
};

}  // namespace bittern
