// bittern eval MODEL... --text FILE: perplexity, and the divergence from a teacher.
#include "bittern/eval.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "bittern/convert.h"
#include "cli/cli.h"
#include "cli/eval_output.h"
#include "cli/interrupt.h"
#include "cli/model_flags.h"
#include "cli/processes.h"
#include "convert/replace.h"
#include "formats/fingerprint.h"
#include "formats/mapped_file.h"
#include "report/eval_report.h"

namespace bittern::cli {
namespace {

struct EvalFlags {
  CommonFlags common;
  ModelFlags model;  // path: unused
  std::vector<std::string> models;
  std::string teacher, cache, text, report, dialect = "llama", bos = "auto";
  std::int64_t context = 512, chunks = 0;
  std::int64_t top = 0;  // 0: not given
  bool kv_sweep = false, any_bytes = false, layers = false;

  bool judged() const { return kv_sweep || !teacher.empty() || !cache.empty(); }
  ReportFile page() const {
    return {
        .flag = "--report", .path = report, .force = common.force, .ours = report::is_eval_page};
  }
};

// ---- the text ----

struct Text {
  std::string bytes, sha256;
  std::vector<std::string> notes{};  // about how models read it
};

Result<std::string> sha256_of(const std::string& bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1)
    return internal("no SHA-256");
  std::string hex;
  for (unsigned i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

Result<Text> text_of(const EvalFlags& flags) {
  auto bytes = read_text(flags.text, flags.any_bytes, kAnyBytes);
  if (!bytes) return bytes.status();
  Text text;
  text.bytes = std::move(*bytes);
  auto digest = sha256_of(text.bytes);
  if (!digest) return digest.status();
  text.sha256 = std::move(*digest);
  return text;
}

constexpr EncodeOptions kPlainText{.add_special = false, .parse_special = false};

// Models that are compared must mean the same by each token of the text. One without a tokeniser
// that can be read is trusted, and a note says so.
Status check_tokenizer(const std::string& path, const std::string& first_path,
                       const Tokenizer& first, std::vector<std::int32_t> tokens,
                       std::vector<std::string>& notes) {
  const auto own = Tokenizer::load(path);
  if (!own) {
    notes.push_back(
        fmt::format("{}: its tokeniser cannot be read, so that of {} is used for it ({})", path,
                    first_path, own.status().message()));
    return {};
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  for (const std::int32_t id : tokens) {
    const auto wanted = first.token(id), found = own->token(id);
    if (!wanted) return wanted.status();
    if (!found || *found != *wanted)
      return invalid(fmt::format("{}: token {} is {}, expected {} as in {}", path, id,
                                 found ? fmt::format("\"{}\"", *found) : "none",
                                 fmt::format("\"{}\"", *wanted), first_path));
  }
  return {};
}

// The token in front of each piece; -1: none.
Result<std::int32_t> first_token(const EvalFlags& flags, const Tokenizer& tokenizer) {
  if (flags.bos == "never") return -1;
  if (flags.bos == "always") {
    if (!tokenizer.bos())
      return invalid("--bos: always, but the tokeniser of " + flags.models.front() +
                     " has no such token");
    return *tokenizer.bos();
  }
  if (flags.dialect != "llama") return -1;
  return first_of_pieces(tokenizer);
}

// ---- the teacher ----

// A teacher's cache is f16, so that KL shows what the students' caches cost; but no less exact than
// theirs.
SessionOptions teacher_session(const EvalFlags& flags) {
  return {.kv = flags.model.session.kv == "f32" ? "f32" : "f16"};
}

// What a teacher's predictions depend on.
Result<std::string> teacher_identity(const EvalFlags& flags) {
  const auto described = inspect_model(flags.teacher);
  if (!described) return described.status();
  Fingerprint all;
  for (const std::string& path : described->files) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) continue;  // its files are listed too
    const auto file = MappedFile::open(path);
    if (!file) return file.status();
    all.add(std::filesystem::path(path).filename().string());
    all.add(Checksum::of(file->bytes()));
    BITTERN_TRY(file->unchanged());
  }
  return fmt::format("{:016x}, {} activations, {} cache", all.value(), flags.model.activations,
                     teacher_session(flags).kv);
}

Result<Model> load(const EvalFlags& flags, const std::string& path) {
  ModelFlags one = flags.model;
  one.path = path;
  one.context = flags.context;
  return load_model(one);
}

std::function<bool(const EvalProgress&)> show_in(Progress& progress, const char* what) {
  return [&progress, what](const EvalProgress& state) {
    std::string text =
        fmt::format("{}{:3.0f} %, {} of {} tokens", what,
                    100 * static_cast<double>(state.done) / static_cast<double>(state.total),
                    state.done, state.total);
    if (state.perplexity > 0) text += fmt::format(", perplexity {:.4f}", state.perplexity);
    progress.show(text);
    return StopOnSignal::check().ok();
  };
}

// Errors of the library name models by their number.
Status named(const EvalFlags& flags, const Status& status) {
  BITTERN_TRY(StopOnSignal::check());
  std::string said(status.message());
  const auto replace = [&](const std::string& what, const std::string& by) {
    for (std::size_t at = 0; (at = said.find(what, at)) != said.npos; at += by.size())
      said.replace(at, what.size(), by);
  };
  if (said.starts_with("layers: ")) said = "--" + said;
  if (said.starts_with("tokens: ")) said = flags.text + ": " + said;
  if (said.starts_with("teacher: ") && !flags.teacher.empty())
    said = flags.teacher + said.substr(std::string_view("teacher").size());
  for (std::size_t i = 0; i < flags.models.size(); ++i)
    replace(fmt::format("models[{}]", i), flags.models[i]);
  replace(": kv: ", ": --kv: ");
  replace(": skip_first: ", ": --kv-skip-layers: first");
  replace(": skip_last: ", ": --kv-skip-layers: last");
  return {status.code(), said};
}

// The targets in --teacher-cache; nothing: they are to be made. `identity`: of the teacher.
Result<std::optional<TeacherTargets>> known_targets(const EvalFlags& flags,
                                                    const EvalOptions& options,
                                                    std::span<const std::int32_t> tokens,
                                                    std::string& identity) {
  const auto there = thing_at(flags.cache);
  if (!there) return there.status();
  if (!flags.teacher.empty()) {
    auto found = teacher_identity(flags);
    if (!found) return found.status();
    identity = std::move(*found);
  } else if (*there == Thing::nothing) {
    return unavailable("--teacher-cache: " + flags.cache +
                       ": no such file, expected one (or --teacher, to make it)");
  }
  Status why;
  if (*there != Thing::nothing) {
    auto targets = TeacherTargets::open(flags.cache);
    why = targets ? targets->check(tokens, options) : targets.status();
    if (why.ok() && !identity.empty() && targets->teacher() != identity)
      why = invalid(fmt::format("{}: made by another teacher ({}), expected {} ({})", flags.cache,
                                targets->teacher(), flags.teacher, identity));
    const std::int64_t top = targets ? std::min(flags.top, targets->vocab()) : 0;
    if (why.ok() && top != 0 && targets->top() != top)
      why = invalid(fmt::format("{}: made with --teacher-top {}, expected {}", flags.cache,
                                targets->top(), flags.top));
    if (why.ok()) return std::optional(std::move(*targets));
    if (identity.empty() || !flags.common.force)
      return Status(why.code(), "--teacher-cache: " + std::string(why.message()) +
                                    (identity.empty() ? "" : " (--force makes it again)"));
  }
  return std::optional<TeacherTargets>();
}

// The same, made first if they are not there. The first of several processes decides that.
Result<TeacherTargets> cached_targets(const EvalFlags& flags, const EvalOptions& options,
                                      std::span<const std::int32_t> tokens) {
  std::string identity;
  std::optional<TeacherTargets> known;
  if (speaks()) {
    auto found = known_targets(flags, options, tokens, identity);
    if (!found) return found.status();
    known = std::move(*found);
  }
  std::byte made{known.has_value()};
  if (Processes* const all = processes(); all != nullptr) {
    BITTERN_TRY(all->agree({}));
    BITTERN_TRY(all->broadcast({&made, 1}));
  }
  if (known) return std::move(*known);
  if (made == std::byte{0}) {
    const auto teacher = load(flags, flags.teacher);
    if (!teacher) return teacher.status();
    Progress progress(flags.common.quiet);
    EvalOptions own = options;
    own.layers = false;
    own.progress = show_in(progress, "teacher: ");
    const Status written = write_targets(
        flags.cache, {&*teacher, teacher_session(flags)}, tokens, own,
        {.top = flags.top != 0 ? flags.top : 64, .teacher = identity, .replace = true});
    if (!written.ok()) return named(flags, written);
  }
  return TeacherTargets::open(flags.cache);
}

// ---- the report ----

Status give(const EvalFlags& flags, const Text& text, const EvalOptions& options,
            const EvalResult& result, report::Evaluation& e) {
  e.context = flags.context;
  e.judged = flags.judged();
  if (!flags.common.quiet) {
    fmt::print("dialect {}, context {}, {} activations, {} cache{}\n", flags.dialect, flags.context,
               flags.model.activations, flags.kv_sweep ? "aura" : flags.model.session.kv,
               options.first >= 0 ? fmt::format(", token {} first", options.first) : "");
    fmt::print("{}: sha256 {}\n", printable(flags.text), text.sha256);
    fmt::print("{} tokens in {} piece{}, {} scored\n\n", result.tokens, result.pieces,
               result.pieces == 1 ? "" : "s", result.scored);
    print_evaluation(e);
    for (const std::string& note : text.notes) fmt::print("\nnote: {}\n", printable(note));
  }
  if (!flags.report.empty()) {
    e.facts = {{"dialect", flags.dialect},
               {"context", fmt::format("{} tokens", flags.context)},
               {"scored", fmt::format("{} of {} tokens", result.scored, result.tokens)},
               {"pieces", std::to_string(result.pieces)},
               {"activations", flags.model.activations},
               {"KV cache", flags.kv_sweep ? "compressed, against f16" : flags.model.session.kv},
               {"first token of a piece",
                options.first >= 0 ? fmt::format("replaced by {}", options.first) : "the text's"},
               {"threads", std::to_string(num_threads())}};
    if (e.teacher && !flags.kv_sweep) e.facts.emplace_back("teacher", e.teacher->path);
    if (!flags.cache.empty()) e.facts.emplace_back("targets from", flags.cache);
    e.facts.emplace_back("text", flags.text);
    e.facts.emplace_back("SHA-256 of the text", text.sha256);
    BITTERN_TRY(write_report_file(flags.page(), report::eval_page(e)));
  }
  Json json{{"schema", 1},
            {"dialect", flags.dialect},
            {"context", flags.context},
            {"first", options.first >= 0 ? Json(options.first) : Json()},
            {"activations", flags.model.activations},
            {"kv", flags.kv_sweep ? Json() : Json(flags.model.session.kv)},
            {"text", flags.text},
            {"sha256", text.sha256},
            {"tokens", result.tokens},
            {"scored", result.scored},
            {"pieces", result.pieces},
            {"notes", text.notes},
            {"models", models_json(e)}};
  if (e.teacher) {
    json["teacher"] = teacher_json(*e.teacher);
    json["teacher"]["cache"] = flags.cache.empty() ? Json() : Json(flags.cache);
  }
  return write_json(flags.common, json);
}

// Caches of every pair of bits against the f16 cache.
Status sweep(const EvalFlags& flags, const Text& text, const SessionOptions& session,
             std::span<const std::int32_t> tokens, const EvalOptions& options, Progress& progress) {
  const std::string& path = flags.models.front();
  const auto model = load(flags, path);
  if (!model) return model.status();
  constexpr int kBits[] = {2, 3, 4, 8};
  std::vector<EvalModel> models;
  for (const int k : kBits)
    for (const int v : kBits) {
      models.push_back({&*model, session});
      models.back().session.kv = aura_name({k, v});
    }
  const auto result = evaluate(models, tokens, options, EvalModel{&*model, {.kv = "f16"}});
  progress.clear();
  if (!result) return named(flags, result.status());
  report::Evaluation e{.sweep = true};
  std::size_t i = 0;
  for (const int k : kBits)
    for (const int v : kBits) {
      auto one = judged_model(path, models[i].session.kv, true, result->models[i], result->tokens);
      if (!one) return one.status();
      one->k_bits = k;
      one->v_bits = v;
      e.models.push_back(std::move(*one));
      ++i;
    }
  auto exact = judged_model(path, "f16", true, result->teacher, result->tokens);
  if (!exact) return exact.status();
  e.teacher = std::move(*exact);
  return give(flags, text, options, *result, e);
}

Status judge(const EvalFlags& flags, const Text& text, const SessionOptions& session,
             std::span<const std::int32_t> tokens, const EvalOptions& options, Progress& progress) {
  std::optional<TeacherTargets> targets;
  std::optional<Model> teacher;
  if (!flags.cache.empty()) {
    auto found = cached_targets(flags, options, tokens);
    BITTERN_TRY(StopOnSignal::check());
    if (!found) return found.status();
    targets.emplace(std::move(*found));
  } else if (!flags.teacher.empty()) {
    auto model = load(flags, flags.teacher);
    if (!model) return model.status();
    teacher.emplace(std::move(*model));
  }
  std::vector<Model> models;
  for (const std::string& path : flags.models) {
    BITTERN_TRY(StopOnSignal::check());
    auto model = load(flags, path);
    if (!model) return model.status();
    models.push_back(std::move(*model));
  }
  std::vector<EvalModel> students;
  for (const Model& model : models) students.push_back({&model, session});
  const auto result =
      targets ? evaluate(students, tokens, options, *targets)
              : evaluate(students, tokens, options,
                         teacher ? EvalModel{&*teacher, teacher_session(flags)} : EvalModel{});
  progress.clear();
  if (!result) return named(flags, result.status());

  report::Evaluation e;
  std::vector<std::string> paths = flags.models;
  if (flags.judged()) paths.push_back(flags.teacher.empty() ? flags.cache : flags.teacher);
  const std::vector<std::string> names = report::short_names(paths);
  for (std::size_t i = 0; i < models.size(); ++i) {
    auto one = judged_model(paths[i], names[i], true, result->models[i], result->tokens);
    if (!one) return one.status();
    e.models.push_back(std::move(*one));
  }
  if (flags.judged()) {
    auto one = judged_model(paths.back(), names.back(), !flags.teacher.empty(), result->teacher,
                            result->tokens);
    if (!one) return one.status();
    e.teacher = std::move(*one);
  }
  return give(flags, text, options, *result, e);
}

// ---- all checks that cost little come first ----

Status check_flags(const EvalFlags& flags) {
  if (flags.layers && !flags.kv_sweep && (flags.teacher.empty() || !flags.cache.empty()))
    return invalid(flags.cache.empty()
                       ? "--layers: no teacher, expected --teacher"
                       : "--layers: needs the teacher itself, expected no --teacher-cache");
  if (flags.top != 0 && flags.cache.empty())
    return invalid("--teacher-top: no --teacher-cache, expected one");
  if (flags.kv_sweep) {
    if (!flags.teacher.empty() || !flags.cache.empty())
      return invalid("--kv-sweep: the f16 cache is the teacher, expected no other one");
    if (flags.models.size() > 1)
      return invalid(fmt::format("--kv-sweep: {} models, expected one", flags.models.size()));
    if (flags.model.session.kv != SessionOptions().kv)
      return invalid("--kv-sweep: --kv is " + flags.model.session.kv + ", expected no --kv");
  }
  BITTERN_TRY(check_json_flag(flags.common));
  if (!flags.report.empty()) BITTERN_TRY(check_report_file(flags.page()));
  std::vector<OutputName> outputs = json_output(flags.common);
  if (!flags.report.empty()) outputs.push_back({"--report", flags.report});
  if (!flags.cache.empty()) outputs.push_back({"--teacher-cache", flags.cache});
  if (outputs.empty()) return {};
  std::vector<std::string> inputs{flags.text};
  std::vector<std::string> paths = flags.models;
  if (!flags.teacher.empty()) paths.push_back(flags.teacher);
  for (const std::string& path : paths) {
    const auto model = inspect_model(path);
    if (!model) return model.status();
    inputs.insert(inputs.end(), model->files.begin(), model->files.end());
  }
  return check_apart(outputs, inputs);
}

Status run(const EvalFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  const StopOnSignal stop;
  BITTERN_TRY(check_flags(flags));
  ModelFlags model_flags = flags.model;
  if (flags.kv_sweep) model_flags.session.kv = "aura4v4";  // so that --kv-first and others fit
  auto session = session_options(model_flags);
  if (!session) return session.status();
  auto text = text_of(flags);
  if (!text) return text.status();
  const std::string& path = flags.models.front();
  const auto tokenizer = Tokenizer::load(path);
  if (!tokenizer) return tokenizer.status();
  const auto tokens = tokenizer->encode(text->bytes, kPlainText);
  if (!tokens) return tokens.status();
  for (std::size_t i = 1; i < flags.models.size(); ++i)
    BITTERN_TRY(check_tokenizer(flags.models[i], path, *tokenizer, *tokens, text->notes));
  if (!flags.teacher.empty())
    BITTERN_TRY(check_tokenizer(flags.teacher, path, *tokenizer, *tokens, text->notes));
  BITTERN_TRY(StopOnSignal::check());

  const auto first = first_token(flags, *tokenizer);
  if (!first) return first.status();
  Progress progress(flags.common.quiet);
  EvalOptions options{.context = flags.context,
                      .pieces = flags.chunks,
                      .first = *first,
                      .layers = flags.layers,
                      .progress = show_in(progress, ""),
                      .ranks = processes()};
  for (std::size_t i = 0; i < std::size(kPerplexityDialectNames); ++i)
    if (flags.dialect == kPerplexityDialectNames[i])
      options.dialect = static_cast<PerplexityDialect>(i);
  // Before models are loaded.
  const auto least =
      options.dialect == PerplexityDialect::windows ? std::int64_t{2} : flags.context;
  if (std::cmp_less(tokens->size(), least))
    return invalid(fmt::format("{}: {} tokens, expected at least {}{}", flags.text, tokens->size(),
                               least, least == flags.context ? " (the context, -c)" : ""));
  for (const std::string& model : flags.models) {
    const auto info = Model::look(model, load_options(model_flags));
    if (!info) return info.status();
    BITTERN_TRY(check_session(*info, *session));
  }
  return flags.kv_sweep ? sweep(flags, *text, *session, *tokens, options, progress)
                        : judge(flags, *text, *session, *tokens, options, progress);
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](const std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        return fmt::format("{}, expected {}", text, fmt::join(words, ", "));
      },
      "");
}

}  // namespace

Verb eval_verb(CLI::App& main) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* verb = main.add_subcommand(
      "eval", "measure how well models predict a text, and how far from a teacher");
  const auto option = [verb](const char* name, auto& value, const char* word, const char* text) {
    return verb->add_option(name, value, text)->option_text(word);
  };
  verb->add_option("MODEL", flags->models,
                   "one or more models: .gguf files, Hugging Face or MLX folders")
      ->required();
  option("-f,--file,--text", flags->text, "FILE", "the text to predict")->required();
  option("--dialect", flags->dialect, "NAME",
         "which tokens are scored: llama (the second half of each piece), segments (all of each "
         "piece) or windows (every token once) (default: llama)")
      ->check(one_of({"llama", "segments", "windows"}));
  option("-c,--ctx,--ctx-size", flags->context, "N", "tokens of a piece (default: 512)")
      ->check(integer_in(2, 1 << 20));
  option("--chunks", flags->chunks, "N", "use at most N pieces (default: all)")
      ->check(integer_in(1, std::int64_t{1} << 40));
  option("--bos", flags->bos, "WHEN",
         "put the bos token in place of each piece's first token: always, never, or auto (in the "
         "dialect llama, if the model's tokeniser puts it before texts) (default: auto)")
      ->check(one_of({"auto", "always", "never"}));
  verb->add_flag("--any-bytes", flags->any_bytes, "accept a text that is not UTF-8");
  const char* teacher = "Teacher";
  option("--teacher", flags->teacher, "MODEL",
         "also compare predictions with this model's: KL divergence, agreement")
      ->group(teacher);
  option("--teacher-cache", flags->cache, "FILE",
         "read the teacher's predictions from FILE, or write them to it if it is not there; KL is "
         "then a lower bound (docs/eval.md)")
      ->group(teacher);
  option("--teacher-top", flags->top, "N",
         "write the N likeliest tokens of each position to --teacher-cache (default: 64)")
      ->check(integer_in(5, 1 << 20))
      ->group(teacher);
  verb->add_flag("--layers", flags->layers,
                 "with --teacher: show where along the depth the error arises")
      ->group(teacher);
  verb->add_flag("--kv-sweep", flags->kv_sweep,
                 "compare compressed caches of 2, 3, 4 and 8 bits for K and V with the f16 cache")
      ->group(teacher);
  option("--report", flags->report, "FILE", "also write a page with plots to FILE, as HTML");
  add_run_flags(*verb, flags->model);
  add_output_flags(*verb, flags->common);
  verb->get_option("--force")->description(
      "replace FILE of --json and --report if it is an earlier report, and a --teacher-cache that "
      "was made of something else");
  verb->footer(
      "Examples:\n"
      "  bittern eval model.gguf -f wiki.test.raw\n"
      "  bittern eval model-4bit model-3bit -f text.txt --teacher model --report report.html\n"
      "  bittern eval model.gguf -f text.txt -c 1024 --kv-sweep --json -\n"
      "mpirun -n N bittern eval ... shares the pieces among N processes.");
  return {.app = verb, .run = [flags] { return run(*flags); }, .shared = true};
}

}  // namespace bittern::cli
