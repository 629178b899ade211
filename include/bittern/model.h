// Language models that run on the CPU: weights as their file stores them, one forward pass for all
// architectures (docs/run.md lists them).
//
//   auto model = Model::load("model.gguf");
//   auto session = Session::make(*model);
//   std::vector<float> logits(model->info().vocab);
//   session->append(tokens, view(logits.data(), {1, vocab}));      logits after the last token
//   session->truncate(session->size() - 3);                        takes tokens back
//
// The same tokens give the same bits on every SIMD target and thread count. With plain caches, and
// with compressed ones that keep no recent tokens apart, they also give the same bits however they
// are grouped into appends, but for gated delta layers: those compute several tokens chunk by chunk
// and single ones step by step (docs/run.md states the difference).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/kv_cache.h"
#include "bittern/ops/quantized_matmul.h"
#include "bittern/status.h"
#include "bittern/tensor.h"

namespace bittern {

// "float", "int16" or "int8".
Result<Activations> parse_activations(std::string_view name) noexcept;

struct LoadOptions {
  // How activations enter products with quantised weights. Plain weights always take them as f32.
  Activations activations = Activations::int16;
  // fastest: also kernels with a declared bound, where the CPU has them (docs/run.md). Results may
  // then differ between CPUs and SIMD targets, still not between numbers of threads.
  Preference preference = Preference::exact;
  int threads = 0;           // as set_num_threads takes them; 0: num_threads()
  std::int64_t context = 0;  // the longest session to be made; 0: what the model was made for
};

struct ModelInfo {
  std::string architecture;  // "llama", as transformers' model_type
  std::int64_t layers = 0, attention_layers = 0, hidden = 0, vocab = 0;
  std::int64_t context = 0;        // tokens that it was made for
  std::uint64_t parameters = 0;    // numbers, a tied head counted once
  std::uint64_t weight_bytes = 0;  // memory that the weights take
};

class Session;
struct ModelData;
struct SessionData;

// A step of one session: the tokens that it is given.
struct SessionTokens {
  Session* session = nullptr;
  std::span<const std::int32_t> tokens;
};

// Where in a layer rows enter a product with weights.
enum class ProductPlace {
  mixer_in,   // q, k, v; or those of a gated delta net
  mixer_out,  // o
  mlp_in,     // gate, up, and the routers of experts
  mlp_down,
};

struct ProductInput {
  std::int64_t layer = 0;
  ProductPlace place = ProductPlace::mixer_in;
  std::int64_t expert = -1;  // of an expert's own rows; -1: of no expert
  bool shared = false;       // of the shared expert
  ConstView x{};             // f32 [rows, inputs], valid during the call
};

// Sees a forward pass from within. Its calls come from the thread that runs the pass, in order.
class Watcher {
 public:
  virtual ~Watcher() = default;
  // Asked before each pass of up to some hundred tokens; false ends the call with Code::cancelled.
  virtual bool go_on() { return true; }
  virtual void product(const ProductInput& input) { (void)input; }
  // f32 [rows, hidden]: what the next layer reads, before its norm.
  virtual void layer(std::int64_t index, const ConstView& stream) { (void)index, (void)stream; }
};

class Model {
 public:
  // A GGUF file, a Hugging Face or MLX folder, or a folder of the Hugging Face cache.
  static Result<Model> load(const std::string& path, const LoadOptions& options = {}) noexcept;
  // What load would say, from the headers: errors but those of the weights' contents, and the info.
  static Result<ModelInfo> look(const std::string& path, const LoadOptions& options = {}) noexcept;
  Model(const Model&) noexcept;  // the same weights
  Model& operator=(const Model&) noexcept;
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  const ModelInfo& info() const noexcept;

  // Appends tokens to several sessions of this model, in one pass where they fit. `out` f32
  // [all tokens, hidden] receives what the last layer gives for each token, normed: the head's
  // input. A call that fails leaves the sessions as they were (empty, if even going back fails for
  // want of memory).
  // A watcher does not change the results.
  Status hidden(std::span<const SessionTokens> steps, const MutView& out,
                Watcher* watcher = nullptr) const noexcept;
  // out f32 [rows, vocab] = the logits of such rows.
  Status logits(const ConstView& hidden, const MutView& out) const noexcept;

 private:
  friend class Session;
  friend struct ModelAccess;
  explicit Model(std::shared_ptr<const ModelData> data) noexcept;
  std::shared_ptr<const ModelData> data_;
};

struct SessionOptions {
  std::int64_t context = 0;  // the most tokens; 0: LoadOptions::context
  // The cache: f32, f16, bf16, or aura with bits of K and V: "aura8v4"; "aura8" is "aura8v8".
  std::string kv = "f16";
  // Of an aura cache: tokens kept in bf16 at the start and at the end, and attention layers whose
  // cache is f16: the first `skip_first` and the last `skip_last`, of those that there are.
  std::int64_t first = 0, recent = 0;
  std::int64_t skip_first = 0, skip_last = 0;
};

struct SessionBytes {
  std::uint64_t cache = 0;   // keys and values of the tokens held
  std::uint64_t states = 0;  // of gated delta layers
};

// One sequence of tokens and what the layers remember of it. It may be used by one thread at a
// time; so may the sessions of one call.
class Session {
 public:
  static Result<Session> make(const Model& model, const SessionOptions& options = {}) noexcept;
  // What make refuses in the options, before the model is loaded (Model::look).
  static Status check(const ModelInfo& model, const SessionOptions& options) noexcept;
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  Session(const Session&) = delete;  // fork() says what it does
  Session& operator=(const Session&) = delete;
  ~Session();

  // `logits` f32 [n, vocab] receives those of the last n tokens, n from 1 to tokens.size(). Leave
  // it out ({}) where none are wanted.
  Status append(std::span<const std::int32_t> tokens, const MutView& logits = {},
                Watcher* watcher = nullptr) noexcept;
  // Forgets all tokens from `size` on. Gated delta layers cannot go back: the tokens since their
  // last saved state (one is saved before each append of several tokens) are computed again. Where
  // that fails for want of memory, the session is empty.
  Status truncate(std::int64_t size) noexcept;
  // A session with the same tokens.
  Result<Session> fork() const noexcept;

  Model model() const noexcept;
  std::int64_t size() const noexcept;  // tokens
  std::int64_t context() const noexcept;
  std::span<const std::int32_t> tokens() const noexcept;
  SessionBytes bytes() const noexcept;

 private:
  friend class Model;
  friend struct ModelAccess;
  explicit Session(std::unique_ptr<SessionData> data) noexcept;
  std::unique_ptr<SessionData> data_;
};

}  // namespace bittern
