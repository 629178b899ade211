// Session: what the layers remember of a sequence of tokens.
#include <algorithm>
#include <cstring>
#include <utility>

#include "bittern/model.h"
#include "core/guarded.h"
#include "core/thread_count.h"
#include "cpu/parallel.h"
#include "model/forward.h"

namespace bittern {
namespace {

constexpr std::size_t kSaved = 2;  // states of gated delta layers that a session keeps

// A cache for `capacity` tokens that holds the first `tokens` of another.
Result<PlainCache> copy_of(const Decoder& d, const PlainCache& from, std::int64_t tokens,
                           std::int64_t capacity) {
  const std::size_t row = static_cast<std::size_t>(d.dim) * size_of(from.dtype);
  const auto bytes = static_cast<std::size_t>(d.kv_heads * capacity) * row;
  auto k = LargePages::make(bytes);
  if (!k) return k.status();
  auto v = LargePages::make(bytes);
  if (!v) return v.status();
  PlainCache to{from.dtype, capacity, std::move(*k), std::move(*v)};
  if (tokens == 0) return to;
  for (std::int64_t h = 0; h < d.kv_heads; ++h) {
    const std::size_t source = static_cast<std::size_t>(h * from.capacity) * row,
                      target = static_cast<std::size_t>(h * capacity) * row;
    std::memcpy(to.k.data() + target, from.k.data() + source,
                static_cast<std::size_t>(tokens) * row);
    std::memcpy(to.v.data() + target, from.v.data() + source,
                static_cast<std::size_t>(tokens) * row);
  }
  return to;
}

DeltaState empty_delta(const Decoder& d) {
  return {std::vector<float>(static_cast<std::size_t>(d.delta_channels() * (d.conv_width - 1))),
          std::vector<float>(static_cast<std::size_t>(d.value_heads * d.key_dim * d.value_dim))};
}

Status check_context(std::int64_t context) {
  if (context >= 1 && context <= kMostContext) return {};
  return invalid("context: " + std::to_string(context) + ", expected 1 to " +
                 std::to_string(kMostContext));
}

// Of a cache by this name: its dtype, or how it is compressed.
struct CacheKind {
  DType dtype = DType::f16;
  std::optional<AuraScheme> scheme{};
};
Result<CacheKind> cache_kind(const std::string& kv) {
  if (kv == "f16") return CacheKind{};
  if (kv == "f32") return CacheKind{DType::f32};
  if (kv == "bf16") return CacheKind{DType::bf16};
  const auto scheme = parse_aura_name(kv);
  if (scheme) return CacheKind{.scheme = *scheme};
  return invalid("kv: \"" + kv +
                 "\", expected f32, f16, bf16, or aura and bits of K and V, 1 to 8, such as "
                 "aura8v4 (aura8 is aura8v8)");
}

Result<std::vector<LayerState>> layer_states(const Decoder& d, const SessionOptions& options,
                                             std::int64_t context) {
  const auto kind = cache_kind(options.kv);
  if (!kind) return kind.status();
  std::vector<LayerState> layers(d.layers.size());
  std::int64_t attention = 0;
  const std::int64_t count = d.attention_layers();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (d.layers[i].delta) {
      layers[i].delta = empty_delta(d);
      continue;
    }
    const bool skipped = attention < options.skip_first || attention >= count - options.skip_last;
    ++attention;
    if (!kind->scheme || skipped) {
      layers[i].plain = PlainCache{.dtype = kind->dtype};
      continue;
    }
    auto config = aura_config(*kind->scheme, d.kv_heads, d.dim, static_cast<std::uint64_t>(i));
    if (!config) return config.status();
    config->first = options.first;
    config->recent = options.recent;
    config->window = d.layers[i].attention.window;
    // Nothing is dropped, so that truncate can go back as far as it likes.
    if (config->window != 0) config->slack = context;
    auto cache = KvCache::make(*config);
    if (!cache) return cache.status();
    layers[i].coded.emplace(std::move(*cache));
  }
  return layers;
}

}  // namespace

void SessionData::save_delta() {
  SavedDelta now{.size = size()};
  for (const LayerState& layer : layers)
    if (layer.delta) now.layers.push_back(*layer.delta);
  if (now.layers.empty() || now.size == 0) return;
  if (!saved.empty() && saved.back().size == now.size) return;
  if (saved.size() == kSaved) saved.erase(saved.begin());
  saved.push_back(std::move(now));
}

Status SessionData::reserve(std::int64_t needed) {
  constexpr std::int64_t kLeast = 256;
  for (LayerState& layer : layers) {
    if (!layer.plain || layer.plain->capacity >= needed) continue;
    const std::int64_t roomy = std::max(2 * layer.plain->capacity, needed);
    const std::int64_t capacity = std::min(context, (roomy + kLeast - 1) / kLeast * kLeast);
    auto cache = copy_of(model->decoder, *layer.plain, size(), capacity);
    if (!cache) return cache.status();
    layer.plain = std::move(*cache);
  }
  return {};
}

void forget_all(SessionData& session) noexcept {
  session.tokens.clear();
  session.saved.clear();
  for (LayerState& layer : session.layers) {
    if (layer.coded) (void)layer.coded->truncate(0);
    if (layer.delta) {
      std::fill(layer.delta->conv.begin(), layer.delta->conv.end(), 0.0f);
      std::fill(layer.delta->state.begin(), layer.delta->state.end(), 0.0f);
    }
  }
}

Status go_back(SessionData& session, std::int64_t size) {
  const auto cut = [&](std::int64_t to) -> Status {
    for (LayerState& layer : session.layers)
      if (layer.coded && layer.coded->size() > to) BITTERN_TRY(layer.coded->truncate(to));
    session.tokens.resize(std::min(session.tokens.size(), static_cast<std::size_t>(to)));
    return {};
  };
  const bool delta = std::any_of(session.layers.begin(), session.layers.end(),
                                 [](const LayerState& layer) { return layer.delta.has_value(); });
  if (!delta) return cut(size);
  while (!session.saved.empty() && session.saved.back().size > size) session.saved.pop_back();
  const std::vector<std::int32_t> tokens(session.tokens.begin(), session.tokens.begin() + size);
  const std::int64_t from = session.saved.empty() ? 0 : session.saved.back().size;
  if (session.saved.empty()) {
    forget_all(session);
  } else {
    BITTERN_TRY(cut(from));
    std::size_t i = 0;
    for (LayerState& layer : session.layers)
      if (layer.delta) *layer.delta = session.saved.back().layers[i++];
  }
  const Segment again{.session = &session,
                      .tokens = std::span(tokens).subspan(static_cast<std::size_t>(from))};
  return run_sessions(*session.model, std::span(&again, 1), again.count(), nullptr);
}

Session::Session(std::unique_ptr<SessionData> data) noexcept : data_(std::move(data)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

Status Session::check(const ModelInfo& model, const SessionOptions& options) noexcept {
  return guarded("session", [&]() -> Status {
    if (options.context != 0) BITTERN_TRY(check_context(options.context));
    const auto kind = cache_kind(options.kv);
    if (!kind) return kind.status();
    for (const auto& [name, value] :
         {std::pair("first: ", options.first), std::pair("recent: ", options.recent),
          std::pair("skip_first: ", options.skip_first),
          std::pair("skip_last: ", options.skip_last)})
      if (value < 0) return invalid(name + std::to_string(value) + ", expected 0 or more");
    for (const auto& [name, value] : {std::pair("skip_first: ", options.skip_first),
                                      std::pair("skip_last: ", options.skip_last)})
      if (kind->scheme && value > model.attention_layers)
        return invalid(name + std::to_string(value) + ", expected at most " +
                       std::to_string(model.attention_layers) + ", the model's attention layers");
    return {};
  });
}

Result<Session> Session::make(const Model& model, const SessionOptions& options) noexcept {
  return guarded("session", [&]() -> Result<Session> {
    BITTERN_TRY(check(model.info(), options));
    const Decoder& d = model.data_->decoder;
    const std::int64_t asked =
        options.context != 0 ? options.context : model.data_->options.context;
    const std::int64_t context = asked != 0 ? asked : d.context;
    BITTERN_TRY(check_context(context));
    auto layers = layer_states(d, options, context);
    if (!layers) return layers.status();
    auto data = std::make_unique<SessionData>();
    data->model = model.data_;
    data->options = options;
    data->context = context;
    data->layers = std::move(*layers);
    return Session(std::move(data));
  });
}

Status Session::append(std::span<const std::int32_t> tokens, const MutView& logits,
                       Watcher* watcher) noexcept {
  return guarded("append", [&]() -> Status {
    const ModelData& model = *data_->model;
    const auto count = static_cast<std::int64_t>(tokens.size());
    std::int64_t rows = 0;
    if (logits) {
      rows = logits.shape.rank == 2 ? logits.shape[0] : -1;
      if (logits.dtype != DType::f32 || logits.shape.rank != 2 || rows < 1 || rows > count ||
          logits.shape[1] != model.decoder.vocab || logits.stride[1] != 1)
        return invalid("logits: " + std::string(name(logits.dtype)) + " " + logits.shape.str() +
                       ", expected f32 [n," + std::to_string(model.decoder.vocab) +
                       "], n from 1 to the number of tokens, " + std::to_string(count));
    }
    const Segment step{.session = data_.get(), .tokens = tokens};
    // More rows than the context has tokens are refused before they are computed.
    std::vector<float> hidden(
        static_cast<std::size_t>(std::min(rows, data_->context) * model.decoder.hidden));
    const ThreadCount threads(model.options.threads);
    Status status;
    cpu::keep_team_awake([&] {
      status = run_sessions(model, std::span(&step, 1), count - rows, hidden.data(), watcher);
      if (status.ok() && rows > 0)
        status = head_pass(model, hidden.data(), rows, logits, data_->scratch);
    });
    return status;
  });
}

Status Session::truncate(std::int64_t size) noexcept {
  return guarded("truncate", [&]() -> Status {
    if (size < 0 || size > data_->size())
      return invalid("truncate: size " + std::to_string(size) + ", expected 0 to " +
                     std::to_string(data_->size()));
    if (size == data_->size()) return {};
    const Status status = guarded("truncate", [&] { return go_back(*data_, size); });
    if (!status.ok()) forget_all(*data_);
    return status;
  });
}

Result<Session> Session::fork() const noexcept {
  return guarded("fork", [&]() -> Result<Session> {
    const Decoder& d = data_->model->decoder;
    auto copy = std::make_unique<SessionData>();
    copy->model = data_->model;
    copy->options = data_->options;
    copy->context = data_->context;
    copy->tokens = data_->tokens;
    copy->saved = data_->saved;
    copy->layers.resize(data_->layers.size());
    for (std::size_t i = 0; i < copy->layers.size(); ++i) {
      const LayerState& from = data_->layers[i];
      LayerState& to = copy->layers[i];
      to.delta = from.delta;
      if (from.coded) {
        auto fork = from.coded->fork();
        if (!fork) return fork.status();
        to.coded.emplace(std::move(*fork));
      }
      if (!from.plain) continue;
      auto cache = copy_of(d, *from.plain, data_->size(), from.plain->capacity);
      if (!cache) return cache.status();
      to.plain = std::move(*cache);
    }
    return Session(std::move(copy));
  });
}

Model Session::model() const noexcept { return Model(data_->model); }
std::int64_t Session::size() const noexcept { return data_->size(); }
std::int64_t Session::context() const noexcept { return data_->context; }
std::span<const std::int32_t> Session::tokens() const noexcept { return data_->tokens; }

SessionBytes Session::bytes() const noexcept {
  const Decoder& d = data_->model->decoder;
  SessionBytes total;
  for (const LayerState& layer : data_->layers) {
    if (layer.plain)
      total.cache += static_cast<std::uint64_t>(2 * d.kv_heads * d.dim * data_->size()) *
                     size_of(layer.plain->dtype);
    if (layer.coded) {
      const KvCacheBytes bytes = layer.coded->bytes();
      total.cache += bytes.codes + bytes.scales + bytes.exact;
    }
    if (layer.delta)
      total.states += sizeof(float) * (layer.delta->conv.size() + layer.delta->state.size());
  }
  return total;
}

}  // namespace bittern
