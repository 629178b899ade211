// The forward pass of a decoder.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bittern/model.h"
#include "model/decoder.h"
#include "model/session_state.h"
#include "model/weights.h"

namespace bittern {

struct ModelData {
  ModelInfo info;
  ModelConfig config;
  std::vector<std::string> gguf_names;  // of the tensors of a GGUF file; none of a folder
  Decoder decoder;
  Weights weights;
  LoadOptions options;
};

// Model::load, for those who change weights: the model that they make of it sees the changes.
Result<std::shared_ptr<ModelData>> load_model_data(const std::string& path,
                                                   const LoadOptions& options);

struct ModelAccess {
  static Model model(std::shared_ptr<const ModelData> data) { return Model(std::move(data)); }
  static const ModelData& data(const Model& model) { return *model.data_; }
  static SessionData& data(const Session& session) { return *session.data_; }
};

// Rows of numbers, in a pass's scratch.
struct FloatRows {
  float* data = nullptr;
  std::int64_t width = 0;
  float* row(std::int64_t i) const { return data + i * width; }
};

// Tokens of one session in a pass.
struct Segment {
  SessionData* session;
  std::span<const std::int32_t> tokens;
  std::int64_t row = 0;       // its first in the pass
  std::int64_t position = 0;  // of its first token
  std::int64_t count() const { return static_cast<std::int64_t>(tokens.size()); }
};

// What a layer computed, for the gradients (model/backward.h). It is in the scratch of the
// segment's session, until the next pass.
struct MlpTape {
  std::int64_t rows = 0;
  ConstView x{};   // [rows, hidden]
  FloatRows in{};  // gate, then up
  FloatRows act{};
};

struct ExpertTape {
  std::int64_t expert = 0;
  struct Choice {
    std::int64_t token;
    float weight;
  };
  std::vector<Choice> chosen{};  // the tokens that it is used for
  MlpTape mlp{};
  FloatRows out{};  // [chosen, hidden]
};

struct LayerTape {
  std::vector<float> stream{};     // as the MLP's norm reads it
  ConstView mixer_in{}, mlp_in{};  // the stream, normed
  FloatRows mixed{}, mlp_out{};    // what mixer and MLP gave, before a norm of their own

  // Attention. qkv: as projected. q, k, v: as attended to.
  FloatRows qkv{};
  MutView q{}, k{}, v{};
  FloatRows attended{};  // before the gate
  // The gated delta net: as projected; after the convolution; out of the rule.
  FloatRows delta_in{}, convolved{}, delta_out{};
  FloatRows out{};  // of either, what the last product reads

  MlpTape mlp{}, shared{};
  FloatRows probabilities{};  // of the experts
  std::vector<ExpertTape> experts{};
  FloatRows shared_gate{}, shared_out{};
};

// Runs all segments through all layers: caches and states then hold their tokens. `hidden` receives
// what the last layer gives for the rows from `first` on, normed: the input of the head.
Status forward_pass(const ModelData& model, std::span<const Segment> segments, std::int64_t first,
                    float* hidden, Watcher* watcher);
// The same layer by layer, for one segment and `stream` f32 [tokens, hidden]: the embedding fills
// it, each layer turns it into what the next one reads, and the norm into `hidden`. The session's
// caches must have room for the tokens. Only the layer's own cache or state changes.
Status embed_pass(const ModelData& model, const Segment& segment, float* stream);
Status layer_pass(const ModelData& model, const Segment& segment, std::int64_t layer, float* stream,
                  Watcher* watcher);
// The same of a segment that begins its session, with a tape; the stream stays as it is.
Status layer_pass(const ModelData& model, const Segment& segment, std::int64_t layer,
                  const float* stream, LayerTape& tape);
Status norm_pass(const ModelData& model, const Segment& segment, float* stream);
// out [rows, vocab] = the logits of rows of `hidden`.
Status head_pass(const ModelData& model, const float* hidden, std::int64_t rows, const MutView& out,
                 Scratch& scratch);
// The same before the decoder's logit_softcap.
Status uncapped_head_pass(const ModelData& model, const float* hidden, std::int64_t rows,
                          const MutView& out, Scratch& scratch);

// The most tokens of a pass, which bounds the memory for activations.
std::int64_t pass_tokens(const ModelData& model);

// Appends to sessions, in as many passes as it takes; then, or when an error ends it, all sessions
// hold either all of their tokens or none.
// `hidden` receives the rows from `first` on, counted through all steps.
Status run_sessions(const ModelData& model, std::span<const Segment> steps, std::int64_t first,
                    float* hidden, Watcher* watcher = nullptr);

// Forgets the tokens from `size` on.
Status go_back(SessionData& session, std::int64_t size);
void forget_all(SessionData& session) noexcept;

inline constexpr std::int64_t kMostContext = std::int64_t{1} << 24;

}  // namespace bittern
