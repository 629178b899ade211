// Model: loading, and the calls that run sessions.
#include "bittern/model.h"

#include <algorithm>
#include <utility>

#include "core/guarded.h"
#include "core/thread_count.h"
#include "formats/checkpoint.h"
#include "model/forward.h"
#include "model/source.h"

namespace bittern {
namespace {

// Without `fill` the weights have no memory.
Result<ModelData> load(const std::string& path, const LoadOptions& options, bool fill) {
  BITTERN_TRY(check_plan_threads("load", options.threads));
  if (options.context < 0)
    return invalid("context: " + std::to_string(options.context) + ", expected 0 or more");
  const auto opened = Checkpoint::open(path);
  if (!opened) return opened.status();
  const Checkpoint& source = *opened;
  auto read = read_source(source);
  if (!read) return read.status();
  auto decoder = describe(read->config, options.context);
  if (!decoder) return in_file(source, decoder.status());
  auto weights = load_weights(source, read->parts, *decoder, options.threads, fill);
  if (!weights) return weights.status();

  std::vector<std::string> names;
  if (read->world == World::gguf)
    for (NamedShape& tensor : read->shapes) names.push_back(std::move(tensor.name));
  ModelData data{.info = {},
                 .config = std::move(read->config),
                 .gguf_names = std::move(names),
                 .decoder = std::move(*decoder),
                 .weights = std::move(*weights),
                 .options = options};
  const Decoder& d = data.decoder;
  data.info = {.architecture = data.config.type->name,
               .layers = static_cast<std::int64_t>(d.layers.size()),
               .attention_layers = d.attention_layers(),
               .hidden = d.hidden,
               .vocab = d.vocab,
               .context = d.context,
               .parameters = data.weights.parameters,
               .weight_bytes = data.weights.bytes};
  return data;
}

// A dense f32 [rows, columns] on the CPU.
Status expect_rows(const char* name, const ConstView& x, std::int64_t rows, std::int64_t columns) {
  const Shape shape{rows, columns};
  if (x.dtype == DType::f32 && x.shape == shape && x.stride == shape.dense_strides() &&
      (x.data != nullptr || shape.numel() == 0))
    return {};
  return invalid(std::string(name) + ": " + std::string(bittern::name(x.dtype)) + " " +
                 x.shape.str() + ", expected dense f32 [" +
                 (rows < 0 ? "rows" : std::to_string(rows)) + "," + std::to_string(columns) + "]");
}

Status check_tokens(const ModelData& model, const SessionData& session,
                    std::span<const std::int32_t> tokens) {
  // First of all: a count that is nonsense must not be read.
  const std::int64_t room = session.context - session.size();
  if (std::cmp_greater(tokens.size(), room))
    return invalid("tokens: " + std::to_string(tokens.size()) + " more than the " +
                   std::to_string(session.size()) + " of a session with a context of " +
                   std::to_string(session.context) + ", expected at most " + std::to_string(room));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= model.decoder.vocab)
      return invalid("tokens: " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                     ", expected 0 to " + std::to_string(model.decoder.vocab - 1));
  return {};
}

}  // namespace

Status run_sessions(const ModelData& model, std::span<const Segment> steps, std::int64_t first_row,
                    float* hidden, Watcher* watcher) {
  for (const Segment& step : steps) {
    BITTERN_TRY(check_tokens(model, *step.session, step.tokens));
    for (const Segment& other : steps)
      if (&other != &step && other.session == step.session)
        return invalid("sessions: one is given twice, expected each once");
  }
  const ThreadCount threads(model.options.threads);
  std::vector<std::int64_t> sizes;
  for (const Segment& step : steps) {
    sizes.push_back(step.session->size());
    BITTERN_TRY(step.session->reserve(step.session->size() + step.count()));
    step.session->tokens.reserve(step.session->tokens.size() + step.tokens.size());
    if (step.count() > 1) step.session->save_delta();
  }
  const Status status = guarded("append", [&]() -> Status {
    const std::int64_t most = pass_tokens(model);
    std::int64_t done = 0;  // rows of the passes before
    std::vector<Segment> pass;
    std::int64_t rows = 0;
    const auto flush = [&]() -> Status {
      if (rows == 0) return {};
      if (watcher != nullptr && !watcher->go_on())
        return Status(Code::cancelled, "append: cancelled");
      const std::int64_t skipped = std::clamp<std::int64_t>(first_row - done, 0, rows);
      const std::int64_t place = std::max<std::int64_t>(done - first_row, 0);
      BITTERN_TRY(
          forward_pass(model, pass, skipped, hidden + place * model.decoder.hidden, watcher));
      for (const Segment& s : pass)
        s.session->tokens.insert(s.session->tokens.end(), s.tokens.begin(), s.tokens.end());
      done += rows;
      pass.clear();
      rows = 0;
      return {};
    };
    for (const Segment& step : steps) {
      for (std::int64_t first = 0; first < step.count();) {
        if (rows == most) BITTERN_TRY(flush());
        const std::int64_t count = std::min(step.count() - first, most - rows);
        pass.push_back({.session = step.session,
                        .tokens = step.tokens.subspan(static_cast<std::size_t>(first),
                                                      static_cast<std::size_t>(count)),
                        .row = rows,
                        .position = step.session->size()});
        rows += count;
        first += count;
        if (first < step.count()) BITTERN_TRY(flush());
      }
    }
    return flush();
  });
  if (status.ok()) return status;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    SessionData& session = *steps[i].session;
    if (!guarded("append", [&] { return go_back(session, sizes[i]); }).ok()) forget_all(session);
  }
  return status;
}

Result<Activations> parse_activations(std::string_view name) noexcept {
  return guarded("load", [&]() -> Result<Activations> {
    constexpr auto& names = enum_names(Activations{});
    const auto found = std::find(std::begin(names), std::end(names), name);
    if (found != std::end(names)) return static_cast<Activations>(found - std::begin(names));
    return invalid("activations: \"" + std::string(name) + "\", expected float, int16 or int8");
  });
}

Model::Model(std::shared_ptr<const ModelData> data) noexcept : data_(std::move(data)) {}
Model::Model(const Model&) noexcept = default;
Model& Model::operator=(const Model&) noexcept = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

Result<std::shared_ptr<ModelData>> load_model_data(const std::string& path,
                                                   const LoadOptions& options) {
  auto data = bittern::load(path, options, true);
  if (!data) return data.status();
  return std::make_shared<ModelData>(std::move(*data));
}

Result<Model> Model::load(const std::string& path, const LoadOptions& options) noexcept {
  return guarded("load", [&]() -> Result<Model> {
    auto data = load_model_data(path, options);
    if (!data) return data.status();
    return Model(std::move(*data));
  });
}

Result<ModelInfo> Model::look(const std::string& path, const LoadOptions& options) noexcept {
  return guarded("load", [&]() -> Result<ModelInfo> {
    auto data = bittern::load(path, options, false);
    if (!data) return data.status();
    return std::move(data->info);
  });
}

const ModelInfo& Model::info() const noexcept { return data_->info; }

Status Model::hidden(std::span<const SessionTokens> steps, const MutView& out,
                     Watcher* watcher) const noexcept {
  return guarded("hidden", [&]() -> Status {
    std::vector<Segment> segments;
    std::int64_t tokens = 0;
    for (const SessionTokens& step : steps) {
      if (step.session == nullptr) return invalid("sessions: null, expected one of this model");
      if (step.session->data_->model != data_)
        return invalid("sessions: one of another model, expected those of this one");
      segments.push_back({.session = step.session->data_.get(), .tokens = step.tokens});
      tokens += segments.back().count();
    }
    BITTERN_TRY(expect_rows("out", out, tokens, data_->decoder.hidden));
    return run_sessions(*data_, segments, 0, out.as<float>(), watcher);
  });
}

Status Model::logits(const ConstView& hidden, const MutView& out) const noexcept {
  return guarded("logits", [&]() -> Status {
    const std::int64_t rows = hidden.shape.rank == 2 ? hidden.shape[0] : -1;
    BITTERN_TRY(expect_rows("hidden", hidden, rows, data_->decoder.hidden));
    BITTERN_TRY(expect_rows("out", out, rows, data_->decoder.vocab));
    const ThreadCount threads(data_->options.threads);
    Scratch scratch;
    return rows == 0 ? Status() : head_pass(*data_, hidden.as<float>(), rows, out, scratch);
  });
}

}  // namespace bittern
