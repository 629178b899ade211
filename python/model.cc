// Models that run. bittern/_model.py makes the classes that users see from these, and checks what
// they are given. Texts are bytes on both sides.
#include "bittern/model.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "bittern/convert.h"
#include "bittern/generate.h"
#include "tensor.h"

namespace bittern {
namespace {

using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int32_t> span_of(const Ids& ids) { return {ids.data(), ids.size()}; }

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Ctrl-C ends a call between two passes.
class UntilSignal : public Watcher {
 public:
  bool go_on() override {
    const nb::gil_scoped_acquire acquired;
    return PyErr_CheckSignals() == 0;
  }
};

// A cancelled call has an exception already: that of the signal's handler.
void check_call(const Status& status) {
  if (status.code() == Code::cancelled && PyErr_Occurred() != nullptr) throw nb::python_error();
  check(status);
}

// Runs f() -> Status or Result without the GIL.
template <class F>
auto unlocked(F&& f) {
  const nb::gil_scoped_release released;
  return f();
}

Model load(const nb::bytes& path, const std::string& activations, int threads, std::int64_t context,
           bool fastest) {
  guard_mapped_files();  // a file that shrinks must not end the interpreter
  const std::string from(path.c_str(), path.size());
  const Activations kind = checked(parse_activations(activations));
  auto result = unlocked([&] {
    return Model::load(from, {.activations = kind,
                              .preference = fastest ? Preference::fastest : Preference::exact,
                              .threads = threads,
                              .context = context});
  });
  check_file(result.status());
  return std::move(*result);
}

nb::dict info_of(const Model& model) {
  const ModelInfo& info = model.info();
  nb::dict all;
  all["architecture"] = info.architecture;
  all["layers"] = info.layers;
  all["attention_layers"] = info.attention_layers;
  all["hidden"] = info.hidden;
  all["vocab"] = info.vocab;
  all["context"] = info.context;
  all["parameters"] = info.parameters;
  all["weight_bytes"] = info.weight_bytes;
  return all;
}

// The logits of all tokens of several sequences, which run side by side.
nb::list logits(const Model& model, const nb::list& given, std::int64_t context,
                const std::string& kv) {
  const std::int64_t hidden = model.info().hidden, vocab = model.info().vocab;
  const std::int64_t most = context != 0 ? context : model.info().context;
  std::vector<Ids> ids;
  for (const nb::handle one : given) ids.push_back(nb::cast<Ids>(one));
  std::vector<std::vector<float>> out(ids.size());
  const Status status = unlocked([&]() -> Status {
    std::vector<Session> sessions;
    std::vector<SessionTokens> steps;
    std::int64_t total = 0;
    for (const Ids& one : ids) {
      const auto count = static_cast<std::int64_t>(one.size());
      if (count > most)
        return invalid("logits: tokens: " + std::to_string(count) + ", expected at most " +
                       std::to_string(most) + ", the context");
      auto session = Session::make(model, {.context = std::max<std::int64_t>(count, 1), .kv = kv});
      if (!session) return session.status();
      sessions.push_back(std::move(*session));
      total += count;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) steps.push_back({&sessions[i], span_of(ids[i])});
    std::vector<float> rows(at(total * hidden));
    UntilSignal watcher;
    BITTERN_TRY(model.hidden(steps, view(rows.data(), {total, hidden}), &watcher));
    std::int64_t first = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto count = static_cast<std::int64_t>(ids[i].size());
      out[i].resize(at(count * vocab));
      BITTERN_TRY(model.logits(as_const(view(rows.data() + first * hidden, {count, hidden})),
                               view(out[i].data(), {count, vocab})));
      first += count;
    }
    return {};
  });
  check_call(status);
  nb::list arrays;
  for (std::size_t i = 0; i < ids.size(); ++i)
    arrays.append(to_numpy(std::move(out[i]), {ids[i].size(), at(vocab)}));
  return arrays;
}

// Calls of several threads follow one another. The GIL is not held while they wait.
struct SharedSession {
  explicit SharedSession(Session made) : session(std::move(made)) {}
  std::mutex mutex;
  Session session;
};

class PySession {
 public:
  explicit PySession(Session session)
      : shared_(std::make_shared<SharedSession>(std::move(session))) {}

  template <class F>
  auto locked(F&& f) const {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(shared_->mutex);
    return f(shared_->session);
  }

  // The logits of the last `rows` tokens.
  nb::object append(const Ids& ids, std::int64_t rows) const {
    const std::int64_t vocab = locked([](Session& s) { return s.model().info().vocab; });
    std::vector<float> logits(at(rows * vocab));
    const MutView out = rows == 0 ? MutView{} : view(logits.data(), {rows, vocab});
    UntilSignal watcher;
    check_call(locked([&](Session& s) { return s.append(span_of(ids), out, &watcher); }));
    return rows == 0 ? nb::none() : to_numpy(std::move(logits), {at(rows), at(vocab)});
  }
  void truncate(std::int64_t size) const {
    check(locked([&](Session& s) { return s.truncate(size); }));
  }
  PySession fork() const {
    return PySession(checked(locked([](Session& s) { return s.fork(); })));
  }
  std::int64_t size() const {
    return locked([](Session& s) { return s.size(); });
  }
  std::int64_t context() const {
    return locked([](Session& s) { return s.context(); });
  }
  nb::tuple tokens() const {
    return to_tuple(locked([](Session& s) {
      return std::vector<std::int64_t>(s.tokens().begin(), s.tokens().end());
    }));
  }
  nb::tuple bytes() const {
    const SessionBytes b = locked([](Session& s) { return s.bytes(); });
    return nb::make_tuple(b.cache, b.states);
  }
  const std::shared_ptr<SharedSession>& shared() const { return shared_; }

 private:
  std::shared_ptr<SharedSession> shared_;
};

PySession make_session(const Model& model, std::int64_t context, const std::string& kv,
                       std::int64_t first, std::int64_t recent, std::int64_t skip_first,
                       std::int64_t skip_last) {
  return PySession(checked(unlocked([&] {
    return Session::make(model, {.context = context,
                                 .kv = kv,
                                 .first = first,
                                 .recent = recent,
                                 .skip_first = skip_first,
                                 .skip_last = skip_last});
  })));
}

class PyGenerator {
 private:
  template <class F>
  auto locked(F&& f) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(shared_->mutex);
    return f();
  }

 public:
  PyGenerator(const PySession& session, const std::optional<Tokenizer>& tokenizer,
              const Ids& prompt, const GenerateOptions& options)
      : shared_(session.shared()) {
    UntilSignal watcher;
    auto made = session.locked([&](Session& s) {
      return Generator::start(s, tokenizer ? &*tokenizer : nullptr, span_of(prompt), options,
                              &watcher);
    });
    check_call(made.status());
    generator_.emplace(std::move(*made));
  }

  // (token, text); None at the end.
  nb::object next() {
    auto piece = locked([&] { return generator_->next(); });
    check(piece.status());
    if (!*piece) return nb::none();
    const std::string& text = (*piece)->text;
    return nb::make_tuple((*piece)->token, nb::bytes(text.data(), text.size()));
  }
  void finish() {
    locked([&] {
      generator_->finish();
      return 0;
    });
  }
  std::string end() {
    const auto end = locked([&] { return generator_->end(); });
    return std::string(enum_names(end)[static_cast<std::size_t>(end)]);
  }

 private:
  std::shared_ptr<SharedSession> shared_;
  std::optional<Generator> generator_;
};

GenerateOptions options_of(double temperature, std::int64_t top_k, double top_p, double min_p,
                           double repetition_penalty, std::uint64_t seed, std::int64_t max_tokens,
                           const nb::list& stops, bool ignore_eos, bool special) {
  GenerateOptions options{
      .sample = {temperature, top_k, top_p, min_p, repetition_penalty, seed},
      .max_tokens = max_tokens,
      .ignore_ends = ignore_eos,
      .special = special,
  };
  for (const nb::handle stop : stops) {
    const auto text = nb::cast<nb::bytes>(stop);
    options.stops.emplace_back(text.c_str(), text.size());
  }
  return options;
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<PySession>(m, "Session")
      .def("append", &PySession::append)
      .def("truncate", &PySession::truncate)
      .def("fork", &PySession::fork)
      .def("size", &PySession::size)
      .def("context", &PySession::context)
      .def("tokens", &PySession::tokens)
      .def("bytes", &PySession::bytes);
  nb::class_<Model>(m, "Model")
      .def("__init__",
           [](Model* self, const nb::bytes& path, const std::string& activations, int threads,
              std::int64_t context, bool fastest) {
             new (self) Model(load(path, activations, threads, context, fastest));
           })
      .def("info", info_of)
      .def("logits", logits)
      .def("session", make_session);
  nb::class_<PyGenerator>(m, "Generator")
      .def(
          "__init__",
          [](PyGenerator* self, const PySession& session, const nb::object& tokenizer,
             const Ids& prompt, double temperature, std::int64_t top_k, double top_p, double min_p,
             double repetition_penalty, std::uint64_t seed, std::int64_t max_tokens,
             const nb::list& stops, bool ignore_eos, bool special) {
            std::optional<Tokenizer> words;
            if (!tokenizer.is_none()) words.emplace(nb::cast<const Tokenizer&>(tokenizer));
            new (self) PyGenerator(session, words, prompt,
                                   options_of(temperature, top_k, top_p, min_p, repetition_penalty,
                                              seed, max_tokens, stops, ignore_eos, special));
          },
          nb::arg("session"), nb::arg("tokenizer").none(), nb::arg("prompt"),
          nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"),
          nb::arg("repetition_penalty"), nb::arg("seed"), nb::arg("max_tokens"), nb::arg("stops"),
          nb::arg("ignore_eos"), nb::arg("special"))
      .def("next", &PyGenerator::next)
      .def("finish", &PyGenerator::finish)
      .def("end", &PyGenerator::end);
}

}  // namespace bittern
