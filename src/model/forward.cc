#include "model/forward.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "bittern/ops/aura_attention.h"
#include "bittern/ops/causal_conv1d.h"
#include "bittern/ops/embedding.h"
#include "bittern/ops/gated_activation.h"
#include "bittern/ops/gated_rms_norm.h"
#include "bittern/ops/gdn_chunk_forward.h"
#include "bittern/ops/gdn_decode_step.h"
#include "bittern/ops/rms_norm.h"
#include "bittern/ops/rope.h"
#include "core/activations.h"
#include "core/math.h"
#include "core/numerics.h"
#include "cpu/parallel.h"
#include "model/runner.h"

namespace bittern {
namespace {

class Pass : Runner {
 public:
  Pass(const ModelData& model, std::span<const Segment> segments, Watcher* watcher)
      : Runner(model, segments.front().session->scratch),
        d_(model.decoder),
        segments_(segments),
        watcher_(watcher) {
    for (const Segment& s : segments) tokens_ += s.count();
  }

  // The last layer's rows from `first` on, normed.
  Status layers(std::int64_t first, float* out) {
    scratch_.release({});
    stream_ = take(tokens_, d_.hidden);
    normed_ = take(tokens_, d_.hidden);
    added_ = take(tokens_, d_.hidden);
    BITTERN_TRY(embed());
    for (std::size_t i = 0; i < d_.layers.size(); ++i) {
      BITTERN_TRY(layer(i));
      if (watcher_ != nullptr) show_stream();
    }
    if (first >= tokens_) return {};
    if (!pending_)
      return norm(all(stream_, first), m_.weights.final_norm,
                  rows_of(out, tokens_ - first, d_.hidden, d_.hidden));
    return norm(all(added_, first), m_.weights.final_norm,
                rows_of(out, tokens_ - first, d_.hidden, d_.hidden), all(stream_, first));
  }

  // What forward_pass does to the stream, a step at a time.
  Status only_embed(float* stream) {
    scratch_.release({});
    stream_ = {stream, d_.hidden};
    return embed();
  }
  Status only_layer(std::size_t index, float* stream) {
    scratch_.release({});
    stream_ = {stream, d_.hidden};
    normed_ = take(tokens_, d_.hidden);
    added_ = take(tokens_, d_.hidden);
    find_positions();
    BITTERN_TRY(layer(index));
    join();
    return {};
  }
  Status only_layer(std::size_t index, const float* stream, LayerTape& tape) {
    scratch_.release({});
    tape.stream.assign(stream, stream + tokens_ * d_.hidden);
    stream_ = {tape.stream.data(), d_.hidden};
    find_positions();
    tape_ = &tape;
    if (auto& state = segments_.front().session->layers[index].delta) {
      std::fill(state->conv.begin(), state->conv.end(), 0.0f);
      std::fill(state->state.begin(), state->state.end(), 0.0f);
    }
    return layer(index);
  }
  Status only_norm(float* stream) {
    scratch_.release({});
    stream_ = {stream, d_.hidden};
    normed_ = take(tokens_, d_.hidden);
    BITTERN_TRY(norm(all(stream_), m_.weights.final_norm, all(normed_)));
    std::copy_n(normed_.row(0), tokens_ * d_.hidden, stream);
    return {};
  }

 private:
  Status layer(std::size_t index) {
    const LayerSpec& spec = d_.layers[index];
    const LayerWeights& w = m_.weights.layers[index];
    layer_ = static_cast<std::int64_t>(index);
    const Scratch::Mark mark = scratch_.mark();
    BITTERN_TRY(before(w.before));
    LayerTape& tape = tape_ != nullptr ? *tape_ : unused_;
    tape.mixer_in = input_;
    tape.mixed = added_ = output();
    BITTERN_TRY(spec.delta ? delta(index, w, tape) : attention(index, spec.attention, w, tape));
    BITTERN_TRY(after(w.after));
    release(mark);
    BITTERN_TRY(before(w.before_mlp));
    tape.mlp_in = input_;
    tape.mlp_out = added_ = output();
    BITTERN_TRY(spec.experts ? experts(w, tape)
                             : mlp(w.mlp, input_, tokens_, added_.row(0), tape.mlp));
    if (tape_ != nullptr) return {};
    BITTERN_TRY(after(w.after_mlp));
    release(mark);
    return {};
  }
  // With a tape all rows stay as they are, so everything has memory of its own.
  void release(Scratch::Mark mark) {
    if (tape_ == nullptr) scratch_.release(mark);
  }
  FloatRows output() { return tape_ == nullptr ? added_ : take(tokens_, d_.hidden); }

  void find_positions() {
    for (const Segment& s : segments_)
      for (std::int64_t i = 0; i < s.count(); ++i)
        positions_.push_back(static_cast<std::int32_t>(s.position + i));
  }

  Status embed() {
    std::vector<std::int32_t> ids;
    for (const Segment& s : segments_) ids.insert(ids.end(), s.tokens.begin(), s.tokens.end());
    find_positions();
    const Matrix::Piece& piece = m_.weights.embedding.pieces.front();
    Embedding::Args args{};
    args.ids = view(std::as_const(ids).data(), {tokens_});
    args.panels = panels_of(piece);
    args.y = rows_of(stream_.row(0), tokens_, d_.hidden, d_.hidden);
    BITTERN_TRY(run<Embedding>({.rows = tokens_, .weights = piece.weights}, args));
    if (d_.embedding_scale != 1) {
      const float scale = static_cast<float>(d_.embedding_scale);
      float* const x = stream_.row(0);
      for (std::int64_t i = 0; i < tokens_ * d_.hidden; ++i) x[i] *= scale;
    }
    return {};
  }

  Status norm(const ConstView& x, const Vector& weight, const MutView& y,
              const MutView& residual = {}) {
    std::int64_t rows = 1;
    for (int i = 0; i + 1 < x.shape.rank; ++i) rows *= x.shape[i];
    return run<RmsNorm>(
        {.rows = rows, .dim = x.shape[x.shape.rank - 1], .eps = d_.eps},
        {.x = x, .weight = vector_of(weight), .residual = residual, .y = y, .sum = residual});
  }

  MutView all(const FloatRows& b, std::int64_t first = 0) const {
    return rows_of(b.row(first), tokens_ - first, b.width, b.width);
  }

  // input_ = norm(stream), after what the last mixer or MLP gave is added to the stream.
  Status before(const Vector& weight) {
    if (tape_ != nullptr) normed_ = take(tokens_, d_.hidden);
    if (weight.empty()) {  // no norm
      if (pending_) add(stream_.row(0), added_.row(0), tokens_ * d_.hidden);
      pending_ = false;
      input_ = all(tape_ == nullptr ? stream_ : normed_);
      if (tape_ != nullptr) std::copy_n(stream_.row(0), tokens_ * d_.hidden, normed_.row(0));
      return {};
    }
    input_ = all(normed_);
    const bool pending = std::exchange(pending_, false);
    return pending ? norm(all(added_), weight, all(normed_), all(stream_))
                   : norm(all(stream_), weight, all(normed_));
  }

  // What a mixer or MLP gave, in added_, is normed and waits to be added.
  Status after(const Vector& weight) {
    pending_ = true;
    if (weight.empty()) return {};
    if (tape_ != nullptr) normed_ = take(tokens_, d_.hidden);
    BITTERN_TRY(norm(all(added_), weight, all(normed_)));
    std::swap(added_, normed_);
    return {};
  }

  // The sum that the next norm would make, made before it.
  void join() {
    add(stream_.row(0), added_.row(0), tokens_ * d_.hidden);
    pending_ = false;
  }
  void show_stream() {
    join();
    watcher_->layer(layer_, all(stream_));
  }
  void show(ProductPlace place, const ConstView& x, std::int64_t expert = -1, bool shared = false) {
    if (watcher_ != nullptr) watcher_->product({layer_, place, expert, shared, x});
  }

  // ---- attention ----

  Status attention(std::size_t layer, const AttentionSpec& spec, const LayerWeights& w,
                   LayerTape& tape) {
    const std::int64_t q_rows = d_.query_rows(), k_rows = d_.key_rows(),
                       width = q_rows + 2 * k_rows;
    const std::int64_t q_head = d_.gate ? 2 * d_.dim : d_.dim;
    const FloatRows qkv = take(tokens_, width), q_own = take(tokens_, d_.heads * d_.dim),
                    k_own = take(tokens_, k_rows);
    show(ProductPlace::mixer_in, input_);
    BITTERN_TRY(linear(w.qkv, input_, tokens_, qkv.row(0), width));
    MutView q = heads_of(qkv.row(0), tokens_, d_.heads, d_.dim, width, q_head);
    MutView k = heads_of(qkv.row(0) + q_rows, tokens_, d_.kv_heads, d_.dim, width, d_.dim);
    const MutView v =
        heads_of(qkv.row(0) + q_rows + k_rows, tokens_, d_.kv_heads, d_.dim, width, d_.dim);
    BITTERN_TRY(turn(w.q_norm, spec.rotary, q_own.row(0), q));
    BITTERN_TRY(turn(w.k_norm, spec.rotary, k_own.row(0), k));

    const std::int64_t out_width = d_.heads * d_.dim;
    const FloatRows out = take(tokens_, out_width);
    for (const Segment& s : segments_) {
      LayerState& state = s.session->layers[layer];
      const auto part = [&](MutView x) {
        x.data = x.as<float>() + s.row * x.stride[0];
        x.shape[0] = s.count();
        return x;
      };
      const MutView to = heads_of(out.row(s.row), s.count(), d_.heads, d_.dim, out_width, d_.dim);
      if (state.coded) {
        BITTERN_TRY(state.coded->append(part(k), part(v)));
        BITTERN_TRY(state.coded->attend(part(q), to,
                                        {.scale = d_.attention_scale,
                                         .softcap = d_.attention_softcap,
                                         .preference = m_.options.preference}));
      } else {
        store(*state.plain, s, part(k), part(v));
        BITTERN_TRY(attend(*state.plain, s, spec, part(q), to));
      }
    }
    tape.qkv = qkv;
    tape.q = q;
    tape.k = k;
    tape.v = v;
    tape.attended = tape.out = out;
    if (d_.gate) {
      if (tape_ != nullptr) {
        tape.attended = take(tokens_, out_width);
        std::copy_n(out.row(0), tokens_ * out_width, tape.attended.row(0));
      }
      const float* const gates = qkv.row(0) + d_.dim;
      cpu::parallel(tokens_ * d_.heads, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const float* const gate = gates + i / d_.heads * width + i % d_.heads * q_head;
          float* const y = out.row(0) + i * d_.dim;
          for (std::int64_t j = 0; j < d_.dim; ++j) y[j] *= math::sigmoid(gate[j]);
        }
      });
    }
    show(ProductPlace::mixer_out, all(out));
    return linear(w.out, all(out), tokens_, added_.row(0), d_.hidden);
  }

  // x [tokens, heads, dim] normed and turned, where the layer does that, in memory of its own.
  Status turn(const Vector& weight, int rotary, float* own, MutView& x) {
    const std::int64_t heads = x.shape[1];
    const MutView y = heads_of(own, tokens_, heads, d_.dim, heads * d_.dim, d_.dim);
    if (!weight.empty()) {
      if (d_.head_norm == HeadNorm::all) {
        BITTERN_TRY(norm(rows_of(x.as<float>(), tokens_, heads * d_.dim, x.stride[0]), weight,
                         rows_of(own, tokens_, heads * d_.dim, heads * d_.dim)));
      } else {
        BITTERN_TRY(norm(x, weight, y));
      }
      x = y;
    }
    if (rotary < 0) return {};
    const RotaryTable& table = d_.rotary[static_cast<std::size_t>(rotary)];
    BITTERN_TRY(run<Rope>({.tokens = tokens_,
                           .heads = heads,
                           .dim = d_.dim,
                           .rotary_dim = d_.rotary_dim,
                           .factor = table.factor},
                          {.x = x,
                           .positions = view(std::as_const(positions_).data(), {tokens_}),
                           .inverse_frequencies = vector_of(table.frequencies),
                           .y = y}));
    x = y;
    return {};
  }

  // Rows of keys and values into the cache, rounded to its dtype.
  void store(const PlainCache& cache, const Segment& s, const MutView& k, const MutView& v) {
    cpu::parallel(s.count() * d_.kv_heads, 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t t = i / d_.kv_heads, h = i % d_.kv_heads;
        const std::int64_t to = (h * cache.capacity + s.position + t) * d_.dim;
        for (const auto& [from, pages] : {std::pair(&k, &cache.k), std::pair(&v, &cache.v)})
          store_row(from->as<float>() + from->at(t, h), cache.dtype, pages->data(), to);
      }
    });
  }
  void store_row(const float* from, DType dtype, std::byte* to, std::int64_t first) const {
    const auto as = [&]<class T>(T) {
      T* const row = reinterpret_cast<T*>(to) + first;
      for (std::int64_t j = 0; j < d_.dim; ++j) row[j] = from_math<T>(from[j]);
    };
    if (dtype == DType::f32) {
      std::memcpy(reinterpret_cast<float*>(to) + first, from, at(d_.dim) * sizeof(float));
    } else if (dtype == DType::f16) {
      as(f16{});
    } else {
      as(bf16{});
    }
  }

  Status attend(const PlainCache& cache, const Segment& s, const AttentionSpec& spec,
                const MutView& q, const MutView& out) {
    const std::int64_t tokens = s.position + s.count();
    AuraAttentionDesc desc{.queries = s.count(),
                           .heads = d_.heads,
                           .kv_heads = d_.kv_heads,
                           .dim = d_.dim,
                           .first = tokens,
                           .scale = d_.attention_scale,
                           .window = spec.window,
                           .exact = cache.dtype};
    desc.softcap = d_.attention_softcap;
    desc.k_bits = desc.v_bits = 1;
    desc.k_rotation = desc.v_rotation = Rotation::identity;
    const std::array<float, 2> codebook{-1, 1};  // of no codes
    const auto cached = [&](const LargePages& pages) {
      ConstView x{pages.data(), cache.dtype, {}, desc.first_shape(), {}};
      x.stride = x.shape.dense_strides();
      x.stride[0] = cache.capacity * d_.dim;
      return x;
    };
    const auto empty = [](DType dtype, const Axes& shape) {
      return ConstView{nullptr, dtype, {}, shape, shape.dense_strides()};
    };
    AuraAttention::Args args{};
    args.q = batch_of(q);
    args.k_packed = empty(DType::u32, desc.packed_shape(1));
    args.v_packed = args.k_packed;
    args.k_scales = empty(DType::f32, desc.scale_shape());
    args.v_scales = args.k_scales;
    args.k_codebook = view(codebook.data(), {2});
    args.v_codebook = args.k_codebook;
    args.k_first = cached(cache.k);
    args.v_first = cached(cache.v);
    args.out = batch_of(out);
    return run<AuraAttention>(desc, args);
  }

  // ---- the gated delta net ----

  Status delta(std::size_t layer, const LayerWeights& w, LayerTape& tape) {
    const std::int64_t channels = d_.delta_channels(), keys = d_.key_heads * d_.key_dim;
    const std::int64_t values = d_.value_rows(), width = w.delta_in.outputs;
    const FloatRows in = take(tokens_, width), mixed = take(tokens_, channels),
                    o = take(tokens_, values);
    show(ProductPlace::mixer_in, input_);
    BITTERN_TRY(linear(w.delta_in, input_, tokens_, in.row(0), width));
    const FloatRows gated = take(tokens_, values);
    // [1, tokens, heads, dim] of a segment, `first` numbers into each of its rows.
    const auto heads = [](const FloatRows& x, const Segment& s, std::int64_t first,
                          std::int64_t count, std::int64_t dim) {
      return batch_of(heads_of(x.row(s.row) + first, s.count(), count, dim, x.width, dim));
    };
    for (const Segment& s : segments_) {
      DeltaState& state = *s.session->layers[layer].delta;
      const std::int64_t n = s.count();
      const MutView x = batch_of(rows_of(in.row(s.row), n, channels, width));
      // z follows the channels of the convolution. The norm is of each value head.
      const MutView z = heads(in, s, channels, d_.value_heads, d_.value_dim),
                    y = heads(gated, s, 0, d_.value_heads, d_.value_dim);
      const auto gates = [&](std::int64_t first) {
        return batch_of(rows_of(in.row(s.row) + first, n, d_.value_heads, width));
      };
      const MutView g = gates(channels + values + d_.value_heads), beta = gates(channels + values);
      const ConstView weight = view(w.conv.data(), {channels, d_.conv_width});
      const MutView conv_state = view(state.conv.data(), {1, channels, d_.conv_width - 1});
      const MutView held = view(state.state.data(), {1, d_.value_heads, d_.key_dim, d_.value_dim});
      if (n == 1 && tape_ == nullptr) {
        BITTERN_TRY(run<GdnDecodeStep>({.batch = 1,
                                        .key_heads = d_.key_heads,
                                        .value_heads = d_.value_heads,
                                        .key_dim = d_.key_dim,
                                        .value_dim = d_.value_dim,
                                        .width = d_.conv_width,
                                        .head_map = d_.head_map,
                                        .eps = d_.eps},
                                       {.x = x,
                                        .z = z,
                                        .g = g,
                                        .beta = beta,
                                        .conv_weight = weight,
                                        .norm_weight = vector_of(w.delta_norm),
                                        .a_log = vector_of(w.a_log),
                                        .dt_bias = vector_of(w.dt_bias),
                                        .conv_state = conv_state,
                                        .state = held,
                                        .y = y}));
        continue;
      }
      std::vector<float> conv_before = state.conv, before = state.state;
      BITTERN_TRY(run<CausalConv1d>(
          {.tokens = n, .channels = channels, .width = d_.conv_width},
          {.x = x,
           .weight = weight,
           .initial_state = view(std::as_const(conv_before).data(), conv_state.shape),
           .y = batch_of(rows_of(mixed.row(s.row), n, channels, channels)),
           .final_state = conv_state}));
      const MutView out = heads(o, s, 0, d_.value_heads, d_.value_dim);
      BITTERN_TRY(run<GdnChunkForward>(
          gdn_desc(d_, n), {.q = heads(mixed, s, 0, d_.key_heads, d_.key_dim),
                            .k = heads(mixed, s, keys, d_.key_heads, d_.key_dim),
                            .v = heads(mixed, s, 2 * keys, d_.value_heads, d_.value_dim),
                            .g = g,
                            .beta = beta,
                            .a_log = vector_of(w.a_log),
                            .dt_bias = vector_of(w.dt_bias),
                            .initial_state = view(std::as_const(before).data(), held.shape),
                            .o = out,
                            .final_state = held}));
      BITTERN_TRY(
          run<GatedRmsNorm>({.rows = n * d_.value_heads, .dim = d_.value_dim, .eps = d_.eps},
                            {.x = out, .z = z, .weight = vector_of(w.delta_norm), .y = y}));
    }
    tape.delta_in = in;
    tape.convolved = mixed;
    tape.delta_out = o;
    tape.out = gated;
    show(ProductPlace::mixer_out, all(gated));
    return linear(w.out, all(gated), tokens_, added_.row(0), d_.hidden);
  }

  // ---- MLP ----

  // y [rows, hidden] = down(f(gate(x)) * up(x))
  Status mlp(const DenseMlp& w, const ConstView& x, std::int64_t rows, float* y, MlpTape& tape,
             std::int64_t expert = -1, bool shared = false) {
    const std::int64_t inner = w.down.inputs;
    const FloatRows in = take(rows, 2 * inner), act = take(rows, inner);
    tape = {.rows = rows, .x = x, .in = in, .act = act};
    show(ProductPlace::mlp_in, x, expert, shared);
    BITTERN_TRY(linear(w.in, x, rows, in.row(0), 2 * inner));
    BITTERN_TRY(run<GatedActivation>({.rows = rows, .dim = inner, .kind = d_.activation},
                                     {.gate = rows_of(in.row(0), rows, inner, 2 * inner),
                                      .up = rows_of(in.row(0) + inner, rows, inner, 2 * inner),
                                      .y = rows_of(act.row(0), rows, inner, inner)}));
    const MutView down = rows_of(act.row(0), rows, inner, inner);
    show(ProductPlace::mlp_down, down, expert, shared);
    return linear(w.down, down, rows, y, d_.hidden);
  }

  // The experts that a token goes to: those of the largest probabilities, ties to the lower number.
  using Choice = ExpertTape::Choice;

  Status experts(const LayerWeights& w, LayerTape& tape) {
    const FloatRows scores = take(tokens_, d_.experts);
    show(ProductPlace::mlp_in, input_);
    BITTERN_TRY(linear(w.router, input_, tokens_, scores.row(0), d_.experts));
    std::vector<std::vector<Choice>> chosen(at(d_.experts));
    std::vector<std::int64_t> order(at(d_.experts));
    for (std::int64_t t = 0; t < tokens_; ++t) choose(scores.row(t), t, order, chosen);
    tape.probabilities = scores;
    tape.experts.clear();

    std::fill_n(added_.row(0), tokens_ * d_.hidden, 0.0f);
    const float* const x = input_.as<float>();
    const std::int64_t stride = input_.stride[0];
    for (std::size_t e = 0; e < chosen.size(); ++e) {  // ascending: the order of each token's sum
      const auto rows = static_cast<std::int64_t>(chosen[e].size());
      if (rows == 0) continue;
      const Scratch::Mark mark = scratch_.mark();
      const FloatRows from = take(rows, d_.hidden), to = take(rows, d_.hidden);
      for (std::int64_t i = 0; i < rows; ++i)
        std::copy_n(x + chosen[e][at(i)].token * stride, d_.hidden, from.row(i));
      ExpertTape expert{.expert = static_cast<std::int64_t>(e), .out = to};
      BITTERN_TRY(mlp(w.experts[e], rows_of(from.row(0), rows, d_.hidden, d_.hidden), rows,
                      to.row(0), expert.mlp, expert.expert));
      for (std::int64_t i = 0; i < rows; ++i) {
        float* const y = added_.row(chosen[e][at(i)].token);
        for (std::int64_t j = 0; j < d_.hidden; ++j)
          y[j] = std::fma(chosen[e][at(i)].weight, to.row(i)[j], y[j]);
      }
      release(mark);
      if (tape_ == nullptr) continue;
      expert.chosen = std::move(chosen[e]);
      tape.experts.push_back(std::move(expert));
    }
    if (!w.shared.in) return {};
    const FloatRows gate = take(tokens_, 1), shared = take(tokens_, d_.hidden);
    BITTERN_TRY(linear(w.shared_router, input_, tokens_, gate.row(0), 1));
    BITTERN_TRY(mlp(w.shared, input_, tokens_, shared.row(0), tape.shared, -1, true));
    tape.shared_gate = gate;
    tape.shared_out = shared;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const float weight = math::sigmoid(*gate.row(t));
      for (std::int64_t j = 0; j < d_.hidden; ++j)
        added_.row(t)[j] = std::fma(weight, shared.row(t)[j], added_.row(t)[j]);
    }
    return {};
  }

  void choose(float* p, std::int64_t token, std::vector<std::int64_t>& order,
              std::vector<std::vector<Choice>>& chosen) const {
    const float most = *std::max_element(p, p + d_.experts);
    float sum = 0;
    for (std::int64_t e = 0; e < d_.experts; ++e) sum += p[e] = math::exp(p[e] - most);
    for (std::int64_t e = 0; e < d_.experts; ++e) p[e] /= sum;
    for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int64_t>(e);
    std::partial_sort(
        order.begin(), order.begin() + d_.experts_used, order.end(),
        [&](std::int64_t a, std::int64_t b) { return p[a] > p[b] || (p[a] == p[b] && a < b); });
    float used = 0;
    for (std::int64_t i = 0; i < d_.experts_used; ++i) used += p[order[at(i)]];
    for (std::int64_t i = 0; i < d_.experts_used; ++i) {
      const std::int64_t e = order[at(i)];
      chosen[at(e)].push_back({token, d_.norm_topk ? p[e] / used : p[e]});
    }
  }

  const Decoder& d_;
  std::span<const Segment> segments_;
  Watcher* watcher_;
  std::int64_t layer_ = 0;
  std::int64_t tokens_ = 0;
  std::vector<std::int32_t> positions_;
  LayerTape* tape_ = nullptr;
  LayerTape unused_;  // where no tape is asked for
  FloatRows stream_;  // what layers add to
  FloatRows normed_, added_;
  MutView input_{};       // of the next mixer or MLP
  bool pending_ = false;  // added_ is not in stream_ yet
};

}  // namespace

std::int64_t pass_tokens(const ModelData& model) {
  const Decoder& d = model.decoder;
  std::int64_t widest = d.query_rows() + 2 * d.key_rows();
  for (const LayerWeights& w : model.weights.layers)
    widest = std::max({widest, w.mlp.in.outputs, w.shared.in.outputs, w.delta_in.outputs});
  constexpr std::int64_t kNumbers = std::int64_t{3} << 20;
  return std::clamp<std::int64_t>(kNumbers / std::max<std::int64_t>(widest, 1) / 32 * 32, 32, 512);
}

Status forward_pass(const ModelData& model, std::span<const Segment> segments, std::int64_t first,
                    float* hidden, Watcher* watcher) {
  Status status;
  cpu::keep_team_awake([&] { status = Pass(model, segments, watcher).layers(first, hidden); });
  return status;
}

Status embed_pass(const ModelData& model, const Segment& segment, float* stream) {
  return Pass(model, std::span(&segment, 1), nullptr).only_embed(stream);
}

Status layer_pass(const ModelData& model, const Segment& segment, std::int64_t layer, float* stream,
                  Watcher* watcher) {
  Status status;
  cpu::keep_team_awake([&] {
    status = Pass(model, std::span(&segment, 1), watcher)
                 .only_layer(static_cast<std::size_t>(layer), stream);
  });
  return status;
}

Status layer_pass(const ModelData& model, const Segment& segment, std::int64_t layer,
                  const float* stream, LayerTape& tape) {
  Status status;
  cpu::keep_team_awake([&] {
    status = Pass(model, std::span(&segment, 1), nullptr)
                 .only_layer(static_cast<std::size_t>(layer), stream, tape);
  });
  return status;
}

Status norm_pass(const ModelData& model, const Segment& segment, float* stream) {
  return Pass(model, std::span(&segment, 1), nullptr).only_norm(stream);
}

Status uncapped_head_pass(const ModelData& model, const float* hidden, std::int64_t rows,
                          const MutView& out, Scratch& scratch) {
  return Runner(model, scratch)
      .linear(model.weights.output(), view(hidden, {rows, model.decoder.hidden}), rows,
              out.as<float>(), out.stride[0]);
}

Status head_pass(const ModelData& model, const float* hidden, std::int64_t rows, const MutView& out,
                 Scratch& scratch) {
  const Decoder& d = model.decoder;
  float* const logits = out.as<float>();
  const std::int64_t stride = out.stride[0];
  BITTERN_TRY(uncapped_head_pass(model, hidden, rows, out, scratch));
  if (d.logit_softcap == 0) return {};
  const float limit = static_cast<float>(d.logit_softcap);
  cpu::parallel(rows * d.vocab, 1 << 12, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float& x = logits[i / d.vocab * stride + i % d.vocab];
      x = limit * math::tanh(x / limit);
    }
  });
  return {};
}

}  // namespace bittern
