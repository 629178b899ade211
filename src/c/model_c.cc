#include "bittern/c/model.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/generate.h"
#include "bittern/model.h"
#include "c/c_api.h"
#include "c/sample_options.h"
#include "c/tokenizer_c.h"

using namespace bittern;
using c_api::null;
using c_api::run;

struct bittern_model {
  Model model;
};
struct bittern_session {
  Session session;
};

bittern_code bittern_model_load(const char* path, const bittern_load_options* options,
                                bittern_model** model) {
  constexpr const char* kName = "bittern_model_load";
  return run([&]() -> Status {
    if (model == nullptr) return null(kName, "model");
    *model = nullptr;
    if (path == nullptr) return null(kName, "path");
    LoadOptions how;
    if (options != nullptr) {
      if (const Status s = c_api::check_preference(options->preference); !s.ok())
        return invalid(std::string(kName).append(": ").append(s.message()));
      how.preference = static_cast<Preference>(options->preference);
      how.threads = options->threads;
      how.context = options->context;
      if (options->activations != nullptr) {
        const auto kind = parse_activations(options->activations);
        if (!kind) return kind.status();
        how.activations = *kind;
      }
    }
    auto made = Model::load(path, how);
    if (!made) return made.status();
    *model = new bittern_model{std::move(*made)};
    return {};
  });
}

void bittern_model_destroy(bittern_model* model) { delete model; }

bittern_code bittern_model_describe(const bittern_model* model, bittern_model_info* info) {
  return run([&]() -> Status {
    if (model == nullptr) return null("bittern_model_describe", "model");
    if (info == nullptr) return null("bittern_model_describe", "info");
    const ModelInfo& m = model->model.info();
    *info = {.architecture = m.architecture.c_str(),
             .layers = m.layers,
             .attention_layers = m.attention_layers,
             .hidden = m.hidden,
             .vocab = m.vocab,
             .context = m.context,
             .parameters = m.parameters,
             .weight_bytes = m.weight_bytes};
    return {};
  });
}

bittern_code bittern_session_create(const bittern_model* model,
                                    const bittern_session_options* options,
                                    bittern_session** session) {
  return run([&]() -> Status {
    if (session == nullptr) return null("bittern_session_create", "session");
    *session = nullptr;
    if (model == nullptr) return null("bittern_session_create", "model");
    SessionOptions how;
    if (options != nullptr) {
      how.context = options->context;
      if (options->kv != nullptr) how.kv = options->kv;
      how.first = options->first;
      how.recent = options->recent;
      how.skip_first = options->skip_first;
      how.skip_last = options->skip_last;
    }
    auto made = Session::make(model->model, how);
    if (!made) return made.status();
    *session = new bittern_session{std::move(*made)};
    return {};
  });
}

void bittern_session_destroy(bittern_session* session) { delete session; }

bittern_code bittern_session_fork(const bittern_session* session, bittern_session** fork) {
  return run([&]() -> Status {
    if (fork == nullptr) return null("bittern_session_fork", "fork");
    *fork = nullptr;
    if (session == nullptr) return null("bittern_session_fork", "session");
    auto made = session->session.fork();
    if (!made) return made.status();
    *fork = new bittern_session{std::move(*made)};
    return {};
  });
}

bittern_code bittern_session_append(bittern_session* session, const int32_t* tokens, size_t count,
                                    float* logits, size_t rows) {
  constexpr const char* kName = "bittern_session_append";
  return run([&]() -> Status {
    if (session == nullptr) return null(kName, "session");
    if (tokens == nullptr && count > 0) return null(kName, "tokens");
    if (logits == nullptr && rows > 0) return null(kName, "logits");
    if (rows > count)
      return invalid("append: rows: " + std::to_string(rows) + ", expected at most " +
                     std::to_string(count) + ", the number of tokens");
    // More tokens than the context has are refused, and may make more logits than can be counted.
    const bool refused = std::cmp_greater(count, session->session.context());
    const MutView out = rows == 0 || refused
                            ? MutView{}
                            : view(logits, {static_cast<std::int64_t>(rows),
                                            session->session.model().info().vocab});
    return session->session.append({tokens, count}, out);
  });
}

bittern_code bittern_session_truncate(bittern_session* session, int64_t size) {
  return run([&]() -> Status {
    if (session == nullptr) return null("bittern_session_truncate", "session");
    return session->session.truncate(size);
  });
}

bittern_code bittern_session_describe(const bittern_session* session, bittern_session_info* info) {
  return run([&]() -> Status {
    if (session == nullptr) return null("bittern_session_describe", "session");
    if (info == nullptr) return null("bittern_session_describe", "info");
    const Session& s = session->session;
    const SessionBytes bytes = s.bytes();
    *info = {.size = s.size(),
             .context = s.context(),
             .tokens = s.tokens().data(),
             .cache_bytes = bytes.cache,
             .state_bytes = bytes.states};
    return {};
  });
}

bittern_code bittern_generate(bittern_session* session, const bittern_tokenizer* tokenizer,
                              const int32_t* prompt, size_t count,
                              const bittern_generate_options* options, bittern_on_token on_token,
                              void* user, int64_t* made) {
  constexpr const char* kName = "bittern_generate";
  return run([&]() -> Status {
    if (made != nullptr) *made = 0;
    if (session == nullptr) return null(kName, "session");
    if (prompt == nullptr && count > 0) return null(kName, "prompt");
    GenerateOptions how;
    if (options != nullptr) {
      if (options->sample != nullptr) how.sample = c_api::to_sample_options(options->sample);
      if (options->max_tokens != 0) how.max_tokens = options->max_tokens;
      if (options->stops == nullptr && options->stop_count > 0) return null(kName, "stops");
      for (std::size_t i = 0; i < options->stop_count; ++i) {
        if (options->stops[i] == nullptr) return null(kName, "stops");
        how.stops.emplace_back(options->stops[i]);
      }
      how.ignore_ends = options->ignore_ends;
      how.special = options->special;
      how.step = options->step;
    }
    const std::int64_t before = session->session.size();
    auto generator =
        Generator::start(session->session, tokenizer != nullptr ? &tokenizer->tokenizer : nullptr,
                         {prompt, count}, how);
    if (!generator) return generator.status();
    while (true) {
      const auto piece = generator->next();
      if (made != nullptr) *made = generator->tokens();
      if (!piece) {
        (void)session->session.truncate(before);
        return piece.status();
      }
      if (!*piece) return {};
      const Generated& g = **piece;
      if (on_token != nullptr && !on_token(g.token, g.text.data(), g.text.size(), user)) return {};
    }
  });
}
