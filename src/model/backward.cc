#include "model/backward.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bittern/ops/attention_backward.h"
#include "bittern/ops/causal_conv1d_backward.h"
#include "bittern/ops/gated_activation_backward.h"
#include "bittern/ops/gated_rms_norm_backward.h"
#include "bittern/ops/gdn_chunk_backward.h"
#include "bittern/ops/quantized_matmul_backward.h"
#include "bittern/ops/rms_norm_backward.h"
#include "bittern/ops/rope.h"
#include "bittern/ops/unpack_panels.h"
#include "core/dot.h"
#include "core/math.h"
#include "core/numerics.h"
#include "cpu/parallel.h"
#include "model/runner.h"

namespace bittern {
namespace {

// Writes into columns of a wider matrix, and reads from them.
void copy_rows(const float* from, std::int64_t from_stride, float* to, std::int64_t to_stride,
               std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i = 0; i < rows; ++i)
    std::copy_n(from + i * from_stride, columns, to + i * to_stride);
}

class Backward : Runner {
 public:
  Backward(const ModelData& model, Scratch& scratch, std::int64_t tokens, GradientSink& sink)
      : Runner(model, scratch), d_(model.decoder), tokens_(tokens), sink_(sink) {}

  Status layer(std::size_t index, const float* stream, float* d_stream, const LayerTape& tape) {
    const LayerSpec& spec = d_.layers[index];
    const LayerWeights& w = m_.weights.layers[index];
    layer_ = static_cast<std::int64_t>(index);
    d_stream_ = {d_stream, d_.hidden};
    for (std::int64_t i = 0; i < tokens_; ++i) positions_.push_back(static_cast<std::int32_t>(i));
    d_input_ = take(tokens_, d_.hidden);
    FloatRows d_added;
    BITTERN_TRY(after(w.after_mlp, tape.mlp_out, d_added));
    if (spec.experts) {
      BITTERN_TRY(experts(w, tape, d_added));
    } else {
      BITTERN_TRY(mlp(w.mlp, tape.mlp, d_added.row(0), d_input_.row(0)));
    }
    BITTERN_TRY(before(w.before_mlp, tape.stream.data()));
    BITTERN_TRY(after(w.after, tape.mixed, d_added));
    BITTERN_TRY(spec.delta ? delta(w, tape, d_added) : attention(spec.attention, w, tape, d_added));
    return before(w.before, stream);
  }

  Status last_norm(const float* stream, float* d_stream) {
    const FloatRows d = take(tokens_, d_.hidden);
    std::copy_n(d_stream, tokens_ * d_.hidden, d.row(0));
    return norm(all(d), view(stream, {tokens_, d_.hidden}), m_.weights.final_norm,
                rows_of(d_stream, tokens_, d_.hidden, d_.hidden), {});
  }

  // d_x [rows, inputs] = d_y W; the grids' gradients go to the sink.
  Status linear(const Matrix& w, const ConstView& x, const float* d_y, std::int64_t stride,
                float* d_x) {
    const std::int64_t rows = x.shape[0];
    const Scratch::Mark mark = scratch_.mark();
    const FloatRows more = w.pieces.size() > 1 ? take(rows, w.inputs) : FloatRows{};
    bool first = true;
    for (const Matrix::Piece& piece : w.pieces) {
      const GradientSink::Grids grids = sink_.grids(piece);
      float* const to = std::exchange(first, false) ? d_x : more.row(0);
      QuantizedMatmulBackward::Args args{};
      args.d_y = view(d_y + piece.first, {rows, piece.weights.outputs}, stride);
      if (grids.scales || grids.weights) args.x = x;
      args.panels = panels_of(piece);
      args.d_x = rows_of(to, rows, w.inputs, w.inputs);
      args.d_scales = grids.scales;
      args.d_biases = grids.biases;
      args.d_w = grids.weights;
      BITTERN_TRY(run<QuantizedMatmulBackward>({.rows = rows, .weights = piece.weights}, args));
      if (to != d_x) add(d_x, to, rows * w.inputs);
    }
    scratch_.release(mark);
    return {};
  }

  // A row's codes are read from its panel, which is a matrix of 16 rows.
  Status embedding(std::span<const std::int32_t> tokens, const float* d_stream) {
    const Matrix::Piece& piece = m_.weights.embedding.pieces.front();
    const GradientSink::Grids grids = sink_.grids(piece);
    if (!grids.scales && !grids.biases) return {};
    WeightDesc panel = piece.weights;
    panel.outputs = WeightDesc::kPanelRows;
    panel.layout = WeightLayout::stored;
    const std::int64_t words = panel.words(), groups = panel.groups();
    const std::int64_t bytes = WeightDesc::kPanelRows * panel.row_bytes();
    std::vector<std::uint32_t> packed(at(panel.outputs * words));
    std::vector<std::byte> scales(at(panel.outputs * groups) * size_of(panel.scale_element)),
        biases(scales.size());
    const float factor = static_cast<float>(d_.embedding_scale);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const std::int64_t row = tokens[at(t)], lane = row % WeightDesc::kPanelRows;
      UnpackPanels::Args args{};
      const Axes grid = panel.grid_shape(), all = panel.panel_shape();
      args.panels = {m_.weights.memory.data() + piece.offset + row / WeightDesc::kPanelRows * bytes,
                     DType::u8,
                     {},
                     all,
                     all.dense_strides()};
      args.packed = view(packed.data(), panel.packed_shape());
      args.scales = {scales.data(), panel.scale_element, {}, grid, grid.dense_strides()};
      args.biases = {biases.data(), panel.scale_element, {}, grid, grid.dense_strides()};
      BITTERN_TRY(run<UnpackPanels>(panel, args));
      const std::uint32_t* const codes = packed.data() + lane * words;
      const float* const d = d_stream + t * d_.hidden;
      for (std::int64_t g = 0; g < groups; ++g) {
        float d_scale = 0, d_bias = 0;
        for (std::int64_t k = g * panel.group_size; k < (g + 1) * panel.group_size; ++k) {
          const float dw = factor * d[k];
          d_scale = std::fma(static_cast<float>(packed_code(codes, k, panel.bits)), dw, d_scale);
          d_bias += dw;
        }
        if (grids.scales) grids.scales.as<float>()[row * groups + g] += d_scale;
        if (grids.biases) grids.biases.as<float>()[row * groups + g] += d_bias;
      }
    }
    return {};
  }

 private:
  MutView all(const FloatRows& b) const { return rows_of(b.row(0), tokens_, b.width, b.width); }

  void tell(ProductPlace place, const ConstView& x, const float* d_y, std::int64_t outputs,
            std::int64_t expert = -1, bool shared = false) {
    sink_.product({layer_, place, expert, shared, x}, view(d_y, {x.shape[0], outputs}));
  }

  Status norm(const ConstView& d_y, const ConstView& x, const Vector& weight, const MutView& d_x,
              const ConstView& d_sum) {
    std::int64_t rows = 1;
    for (int i = 0; i + 1 < x.shape.rank; ++i) rows *= x.shape[i];
    RmsNormBackward::Args args{};
    args.d_y = d_y;
    args.x = x;
    args.weight = vector_of(weight);
    args.d_sum = d_sum;
    args.d_x = d_x;
    return run<RmsNormBackward>({.rows = rows, .dim = x.shape[x.shape.rank - 1], .eps = d_.eps},
                                args);
  }

  // The stream's gradient at what a mixer or MLP gave, before its own norm.
  Status after(const Vector& weight, const FloatRows& x, FloatRows& d) {
    d = take(tokens_, d_.hidden);
    if (weight.empty()) {
      std::copy_n(d_stream_.row(0), tokens_ * d_.hidden, d.row(0));
      return {};
    }
    return norm(all(d_stream_), all(x), weight, all(d), {});
  }

  // Adds to the stream's gradient what came through a mixer or MLP, whose input was normed.
  Status before(const Vector& weight, const float* x) {
    if (weight.empty()) {
      add(d_stream_.row(0), d_input_.row(0), tokens_ * d_.hidden);
      return {};
    }
    return norm(all(d_input_), view(x, {tokens_, d_.hidden}), weight, all(d_stream_),
                all(d_stream_));
  }

  // ---- attention ----

  Status attention(const AttentionSpec& spec, const LayerWeights& w, const LayerTape& tape,
                   const FloatRows& d_y) {
    const std::int64_t q_rows = d_.query_rows(), k_rows = d_.key_rows(),
                       width = q_rows + 2 * k_rows, out_width = d_.heads * d_.dim;
    const std::int64_t q_head = d_.gate ? 2 * d_.dim : d_.dim;
    const FloatRows d_out = take(tokens_, out_width), d_qkv = take(tokens_, width);
    tell(ProductPlace::mixer_out, all(tape.out), d_y.row(0), d_.hidden);
    BITTERN_TRY(linear(w.out, all(tape.out), d_y.row(0), d_.hidden, d_out.row(0)));
    if (d_.gate) ungate(tape, d_out, d_qkv, width, q_head);

    const auto q_in = [&](const FloatRows& rows) {
      return heads_of(rows.row(0), tokens_, d_.heads, d_.dim, width, q_head);
    };
    const auto k_in = [&](const FloatRows& rows) {
      return heads_of(rows.row(0) + q_rows, tokens_, d_.kv_heads, d_.dim, width, d_.dim);
    };
    AttentionBackwardDesc desc{};
    desc.tokens = tokens_;
    desc.heads = d_.heads;
    desc.kv_heads = d_.kv_heads;
    desc.dim = d_.dim;
    desc.scale = d_.attention_scale;
    desc.softcap = d_.attention_softcap;
    desc.window = spec.window;
    AttentionBackward::Args args{};
    args.q = tape.q;
    args.k = tape.k;
    args.v = tape.v;
    args.d_out = heads_of(d_out.row(0), tokens_, d_.heads, d_.dim, out_width, d_.dim);
    args.d_q = w.q_norm.empty() ? q_in(d_qkv) : own_heads(d_.heads);
    args.d_k = w.k_norm.empty() ? k_in(d_qkv) : own_heads(d_.kv_heads);
    args.d_v =
        heads_of(d_qkv.row(0) + q_rows + k_rows, tokens_, d_.kv_heads, d_.dim, width, d_.dim);
    BITTERN_TRY(run<AttentionBackward>(desc, args));
    BITTERN_TRY(turn_back(w.q_norm, spec.rotary, q_in(tape.qkv), args.d_q, q_in(d_qkv)));
    BITTERN_TRY(turn_back(w.k_norm, spec.rotary, k_in(tape.qkv), args.d_k, k_in(d_qkv)));
    tell(ProductPlace::mixer_in, tape.mixer_in, d_qkv.row(0), width);
    return linear(w.qkv, tape.mixer_in, d_qkv.row(0), width, d_input_.row(0));
  }

  MutView own_heads(std::int64_t heads) {
    return heads_of(take(tokens_, heads * d_.dim).row(0), tokens_, heads, d_.dim, heads * d_.dim,
                    d_.dim);
  }

  // out = attended * sigmoid(gate): d_out becomes that of `attended`.
  void ungate(const LayerTape& tape, const FloatRows& d_out, const FloatRows& d_qkv,
              std::int64_t width, std::int64_t q_head) {
    cpu::parallel(tokens_ * d_.heads, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = i / d_.heads * width + i % d_.heads * q_head + d_.dim;
        const float* const gate = tape.qkv.row(0) + first;
        const float* const attended = tape.attended.row(0) + i * d_.dim;
        float* const d_gate = d_qkv.row(0) + first;
        float* const d = d_out.row(0) + i * d_.dim;
        for (std::int64_t j = 0; j < d_.dim; ++j) {
          const float open = math::sigmoid(gate[j]);
          d_gate[j] = d[j] * attended[j] * open * math::sigmoid(-gate[j]);
          d[j] *= open;
        }
      }
    });
  }

  // From the gradient of heads as attended to, d, to that of heads as projected, to. x: as
  // projected. Without a norm d is `to`.
  Status turn_back(const Vector& weight, int rotary, const MutView& x, const MutView& d,
                   const MutView& to) {
    const std::int64_t heads = x.shape[1];
    if (rotary >= 0) {
      const RotaryTable& table = d_.rotary[static_cast<std::size_t>(rotary)];
      Vector back(table.frequencies);
      for (float& f : back) f = -f;
      BITTERN_TRY(run<Rope>({.tokens = tokens_,
                             .heads = heads,
                             .dim = d_.dim,
                             .rotary_dim = d_.rotary_dim,
                             .factor = table.factor},
                            {.x = d,
                             .positions = view(std::as_const(positions_).data(), {tokens_}),
                             .inverse_frequencies = vector_of(back),
                             .y = d}));
    }
    if (weight.empty()) return {};
    if (d_.head_norm != HeadNorm::all) return norm(d, x, weight, to, {});
    const auto whole = [&](const MutView& v) {
      return rows_of(v.as<float>(), tokens_, heads * d_.dim, v.stride[0]);
    };
    return norm(whole(d), whole(x), weight, whole(to), {});
  }

  // ---- the gated delta net ----

  Status delta(const LayerWeights& w, const LayerTape& tape, const FloatRows& d_y) {
    const std::int64_t channels = d_.delta_channels(), keys = d_.key_heads * d_.key_dim;
    const std::int64_t values = d_.value_rows(), width = w.delta_in.outputs;
    const std::int64_t rows = tokens_ * d_.value_heads;
    const FloatRows d_gated = take(tokens_, values), d_in = take(tokens_, width),
                    d_convolved = take(tokens_, channels), d_o = take(tokens_, values),
                    z = take(tokens_, values), d_z = take(tokens_, values);
    tell(ProductPlace::mixer_out, all(tape.out), d_y.row(0), d_.hidden);
    BITTERN_TRY(linear(w.out, all(tape.out), d_y.row(0), d_.hidden, d_gated.row(0)));

    const auto by_head = [&](const FloatRows& x) {
      return rows_of(x.row(0), rows, d_.value_dim, d_.value_dim);
    };
    copy_rows(tape.delta_in.row(0) + channels, width, z.row(0), values, tokens_, values);
    GatedRmsNormBackward::Args norm_args{};
    norm_args.d_y = by_head(d_gated);
    norm_args.x = by_head(tape.delta_out);
    norm_args.z = by_head(z);
    norm_args.weight = vector_of(w.delta_norm);
    norm_args.d_x = by_head(d_o);
    norm_args.d_z = by_head(d_z);
    BITTERN_TRY(
        run<GatedRmsNormBackward>({.rows = rows, .dim = d_.value_dim, .eps = d_.eps}, norm_args));
    copy_rows(d_z.row(0), values, d_in.row(0) + channels, width, tokens_, values);

    const auto heads = [&](const FloatRows& x, std::int64_t first, std::int64_t count,
                           std::int64_t dim) {
      return batch_of(heads_of(x.row(0) + first, tokens_, count, dim, channels, dim));
    };
    const auto gates = [&](const FloatRows& x, std::int64_t first) {
      return batch_of(rows_of(x.row(0) + first, tokens_, d_.value_heads, width));
    };
    GdnChunkBackward::Args args{};
    args.d_o =
        batch_of(heads_of(d_o.row(0), tokens_, d_.value_heads, d_.value_dim, values, d_.value_dim));
    args.q = heads(tape.convolved, 0, d_.key_heads, d_.key_dim);
    args.k = heads(tape.convolved, keys, d_.key_heads, d_.key_dim);
    args.v = heads(tape.convolved, 2 * keys, d_.value_heads, d_.value_dim);
    args.g = gates(tape.delta_in, channels + values + d_.value_heads);
    args.beta = gates(tape.delta_in, channels + values);
    args.a_log = vector_of(w.a_log);
    args.dt_bias = vector_of(w.dt_bias);
    args.d_q = heads(d_convolved, 0, d_.key_heads, d_.key_dim);
    args.d_k = heads(d_convolved, keys, d_.key_heads, d_.key_dim);
    args.d_v = heads(d_convolved, 2 * keys, d_.value_heads, d_.value_dim);
    args.d_g = gates(d_in, channels + values + d_.value_heads);
    args.d_beta = gates(d_in, channels + values);
    BITTERN_TRY(run<GdnChunkBackward>(gdn_desc(d_, tokens_), args));

    CausalConv1dBackward::Args conv{};
    conv.d_y = batch_of(all(d_convolved));
    conv.x = batch_of(rows_of(tape.delta_in.row(0), tokens_, channels, width));
    conv.weight = view(w.conv.data(), {channels, d_.conv_width});
    conv.d_x = batch_of(rows_of(d_in.row(0), tokens_, channels, width));
    BITTERN_TRY(run<CausalConv1dBackward>(
        {.tokens = tokens_, .channels = channels, .width = d_.conv_width}, conv));
    tell(ProductPlace::mixer_in, tape.mixer_in, d_in.row(0), width);
    return linear(w.delta_in, tape.mixer_in, d_in.row(0), width, d_input_.row(0));
  }

  // ---- MLP ----

  Status mlp(const DenseMlp& w, const MlpTape& tape, const float* d_y, float* d_x,
             std::int64_t expert = -1, bool shared = false) {
    const std::int64_t inner = w.down.inputs, rows = tape.rows;
    const Scratch::Mark mark = scratch_.mark();
    const FloatRows d_act = take(rows, inner), d_in = take(rows, 2 * inner);
    const MutView act = rows_of(tape.act.row(0), rows, inner, inner);
    tell(ProductPlace::mlp_down, act, d_y, d_.hidden, expert, shared);
    BITTERN_TRY(linear(w.down, act, d_y, d_.hidden, d_act.row(0)));
    const auto half = [&](const FloatRows& x, std::int64_t first) {
      return rows_of(x.row(0) + first, rows, inner, 2 * inner);
    };
    GatedActivationBackward::Args args{};
    args.d_y = rows_of(d_act.row(0), rows, inner, inner);
    args.gate = half(tape.in, 0);
    args.up = half(tape.in, inner);
    args.d_gate = half(d_in, 0);
    args.d_up = half(d_in, inner);
    BITTERN_TRY(
        run<GatedActivationBackward>({.rows = rows, .dim = inner, .kind = d_.activation}, args));
    tell(ProductPlace::mlp_in, tape.x, d_in.row(0), 2 * inner, expert, shared);
    BITTERN_TRY(linear(w.in, tape.x, d_in.row(0), 2 * inner, d_x));
    scratch_.release(mark);
    return {};
  }

  // y = the sum over the experts that a token uses of weight * out, and the shared expert's.
  Status experts(const LayerWeights& w, const LayerTape& tape, const FloatRows& d_y) {
    const FloatRows d_scores = take(tokens_, d_.experts);
    std::fill_n(d_input_.row(0), tokens_ * d_.hidden, 0.0f);
    std::fill_n(d_scores.row(0), tokens_ * d_.experts, 0.0f);
    for (const ExpertTape& expert : tape.experts) {
      const auto rows = static_cast<std::int64_t>(expert.chosen.size());
      const Scratch::Mark mark = scratch_.mark();
      const FloatRows d_out = take(rows, d_.hidden), d_x = take(rows, d_.hidden);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto [token, weight] = expert.chosen[at(i)];
        const float* const d = d_y.row(token);
        for (std::int64_t j = 0; j < d_.hidden; ++j) d_out.row(i)[j] = weight * d[j];
        d_scores.row(token)[expert.expert] = dot(d, expert.out.row(i), d_.hidden);
      }
      BITTERN_TRY(
          mlp(w.experts[at(expert.expert)], expert.mlp, d_out.row(0), d_x.row(0), expert.expert));
      for (std::int64_t i = 0; i < rows; ++i) {
        float* const to = d_input_.row(expert.chosen[at(i)].token);
        for (std::int64_t j = 0; j < d_.hidden; ++j) to[j] += d_x.row(i)[j];
      }
      scratch_.release(mark);
    }
    std::vector<std::vector<std::int64_t>> used(at(tokens_));
    for (const ExpertTape& expert : tape.experts)
      for (const ExpertTape::Choice& choice : expert.chosen)
        used[at(choice.token)].push_back(expert.expert);
    for (std::int64_t t = 0; t < tokens_; ++t)
      unchoose(tape.probabilities.row(t), used[at(t)], d_scores.row(t));
    const FloatRows d_x = take(tokens_, d_.hidden);
    BITTERN_TRY(linear(w.router, tape.mlp_in, d_scores.row(0), d_.experts, d_x.row(0)));
    add(d_input_.row(0), d_x.row(0), tokens_ * d_.hidden);
    if (!w.shared.in) return {};

    const FloatRows d_out = take(tokens_, d_.hidden), d_gate = take(tokens_, 1);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const float gate = *tape.shared_gate.row(t), open = math::sigmoid(gate);
      for (std::int64_t j = 0; j < d_.hidden; ++j) d_out.row(t)[j] = open * d_y.row(t)[j];
      *d_gate.row(t) =
          dot(d_y.row(t), tape.shared_out.row(t), d_.hidden) * open * math::sigmoid(-gate);
    }
    BITTERN_TRY(mlp(w.shared, tape.shared, d_out.row(0), d_x.row(0), -1, true));
    add(d_input_.row(0), d_x.row(0), tokens_ * d_.hidden);
    BITTERN_TRY(linear(w.shared_router, tape.mlp_in, d_gate.row(0), 1, d_x.row(0)));
    add(d_input_.row(0), d_x.row(0), tokens_ * d_.hidden);
    return {};
  }

  // From the gradients of the weights of the experts used to those of all experts' scores:
  // weight = p, or p / (the sum of those used); p = softmax(scores).
  void unchoose(const float* p, const std::vector<std::int64_t>& used, float* d) const {
    if (d_.norm_topk) {
      float sum = 0, mean = 0;
      for (const std::int64_t e : used) sum += p[e];
      for (const std::int64_t e : used) mean += d[e] * (p[e] / sum);
      for (const std::int64_t e : used) d[e] = (d[e] - mean) / sum;
    }
    float mean = 0;
    for (const std::int64_t e : used) mean += d[e] * p[e];
    for (std::int64_t e = 0; e < d_.experts; ++e) d[e] = p[e] * (d[e] - mean);
  }

  const Decoder& d_;
  std::int64_t tokens_;
  GradientSink& sink_;
  std::int64_t layer_ = 0;
  std::vector<std::int32_t> positions_;
  FloatRows d_stream_, d_input_;
};

}  // namespace

Status layer_backward(const ModelData& model, const Segment& segment, std::int64_t layer,
                      const float* stream, float* d_stream, LayerTape& tape, GradientSink& sink) {
  Status status = layer_pass(model, segment, layer, stream, tape);
  if (!status.ok()) return status;
  cpu::keep_team_awake([&] {
    status = Backward(model, segment.session->scratch, segment.count(), sink)
                 .layer(static_cast<std::size_t>(layer), stream, d_stream, tape);
  });
  return status;
}

Status norm_backward(const ModelData& model, const Segment& segment, const float* stream,
                     float* d_stream) {
  GradientSink none;
  segment.session->scratch.release({});
  return Backward(model, segment.session->scratch, segment.count(), none)
      .last_norm(stream, d_stream);
}

Status head_backward(const ModelData& model, const float* hidden, std::int64_t rows,
                     const ConstView& d_logits, float* d_hidden, GradientSink& sink,
                     Scratch& scratch) {
  return Backward(model, scratch, rows, sink)
      .linear(model.weights.output(), view(hidden, {rows, model.decoder.hidden}),
              d_logits.as<float>(), d_logits.stride[0], d_hidden);
}

Status embedding_backward(const ModelData& model, std::span<const std::int32_t> tokens,
                          const float* d_stream, GradientSink& sink, Scratch& scratch) {
  scratch.release({});
  return Backward(model, scratch, static_cast<std::int64_t>(tokens.size()), sink)
      .embedding(tokens, d_stream);
}

}  // namespace bittern
