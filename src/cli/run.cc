// bittern run MODEL -p TEXT: generates text, or answers in a chat.
#include <fmt/format.h>
#include <histedit.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "bittern/generate.h"
#include "cli/cli.h"
#include "cli/model_flags.h"

namespace bittern::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

struct RunFlags {
  CommonFlags common;
  ModelFlags model;
  std::string prompt, file, system;
  GenerateOptions generate;
  bool chat = false, stats = false, no_prompt = false;
};

volatile std::sig_atomic_t interrupted = 0;  // the signal that asks to stop
void on_interrupt(int signal) { interrupted = signal; }

// While one lives, SIGINT and SIGTERM set `interrupted` instead of ending the program.
class CatchInterrupt {
 public:
  CatchInterrupt() {
    interrupted = 0;
    struct sigaction action{};
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART;  // of a write
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~CatchInterrupt() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }
  CatchInterrupt(const CatchInterrupt&) = delete;
  CatchInterrupt& operator=(const CatchInterrupt&) = delete;

 private:
  struct sigaction interrupt_{}, terminate_{};
};

class UntilInterrupt : public Watcher {
 public:
  bool go_on() override { return interrupted == 0; }
};

// Ends the program as the signal would have: the caller's shell then knows.
void end_by(int signal) {
  std::fflush(stdout);
  tell(fmt::format("bittern: run: stopped by {}\n", signal == SIGINT ? "SIGINT" : "SIGTERM"));
  (void)std::signal(signal, SIG_DFL);
  (void)std::raise(signal);
}

struct Stats {
  double load = 0, prompt = 0, generation = 0;
  std::int64_t prompt_tokens = 0, tokens = 0;  // tokens: those generated
  std::string text;                            // of the last answer
  GenerateEnd end = GenerateEnd::none;
};

class Runner {
 public:
  Runner(const RunFlags& flags, const Tokenizer& tokenizer, Session session)
      : flags_(flags), tokenizer_(tokenizer), session_(std::move(session)) {}

  // Appends the prompt and generates; the text goes to standard output.
  Status answer(std::span<const std::int32_t> prompt, Stats& stats) {
    stats.text.clear();
    stats.end = GenerateEnd::none;
    BITTERN_TRY(
        check_room(static_cast<std::int64_t>(prompt.size()), session_.size(), session_.context()));
    UntilInterrupt watcher;
    GenerateOptions options = flags_.generate;
    options.step = step_;
    const auto start = Clock::now();
    auto generator = Generator::start(session_, &tokenizer_, prompt, options, &watcher);
    if (generator.status().code() == Code::cancelled) return {};
    if (!generator) return generator.status();
    const auto read = Clock::now();
    stats.prompt += seconds(start, read);
    stats.prompt_tokens += static_cast<std::int64_t>(prompt.size());
    while (true) {
      if (interrupted != 0) generator->finish();
      const auto piece = generator->next();
      if (!piece) return piece.status();
      if (!*piece) break;
      stats.text += (*piece)->text;
      BITTERN_TRY(write((*piece)->text));
    }
    stats.generation += seconds(read, Clock::now());
    stats.tokens += generator->tokens();
    stats.end = generator->end();
    step_ = generator->step();
    return {};
  }

  // Before any work.
  static Status check_room(std::int64_t prompt, std::int64_t held, std::int64_t context) {
    if (prompt == 0) return invalid("-p: no tokens, expected a prompt with at least one");
    if (held + prompt < context) return {};
    return invalid(
        fmt::format("-c: a context of {} tokens has no room for the {} of the {} and an answer, "
                    "expected more",
                    context, held + prompt, held > 0 ? "conversation" : "prompt"));
  }

  Session& session() { return session_; }

 private:
  static Status write(std::string_view text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0)
      return {};
    return {Code::io_error,
            fmt::format("standard output: {}, cannot write to it", std::strerror(errno))};
  }

  const RunFlags& flags_;
  const Tokenizer& tokenizer_;
  Session session_;
  std::uint64_t step_ = 0;
};

// Lines of the user: with editing on a terminal, plain otherwise.
class Lines {
 public:
  Lines() {
    if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0) return;
    edit_ = el_init("bittern", stdin, stdout, stderr);
    if (edit_ == nullptr) return;
    history_ = history_init();
    HistEvent event;
    if (history_ != nullptr) {
      history(history_, &event, H_SETSIZE, 1000);
      el_set(edit_, EL_HIST, history, history_);
    }
    el_set(edit_, EL_PROMPT, +[](EditLine*) { return const_cast<char*>("> "); });
    el_set(edit_, EL_EDITOR, "emacs");
    el_set(edit_, EL_SIGNAL, 1);
    // Ctrl-C drops the line: while one is edited, it is a key and no signal. So is Ctrl-Z.
    el_set(edit_, EL_CLIENTDATA, this);
    el_set(edit_, EL_SETTY, "-d", "-isig", nullptr);
    el_set(
        edit_, EL_ADDFN, "drop-line", "drops the line", +[](EditLine* edit, int) -> unsigned char {
          void* self = nullptr;
          el_get(edit, EL_CLIENTDATA, &self);
          static_cast<Lines*>(self)->dropped_ = true;
          return CC_EOF;
        });
    el_set(
        edit_, EL_ADDFN, "suspend", "suspends the program", +[](EditLine*, int) -> unsigned char {
          (void)std::raise(SIGTSTP);
          return CC_REFRESH;
        });
    el_set(edit_, EL_BIND, "^C", "drop-line", nullptr);
    el_set(edit_, EL_BIND, "^Z", "suspend", nullptr);
  }
  ~Lines() {
    if (history_ != nullptr) history_end(history_);
    if (edit_ != nullptr) el_end(edit_);
  }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // From here on Ctrl-C is a key and no signal. el_gets does this too late: after its prompt.
  void prepare() {
    if (edit_ != nullptr) el_set(edit_, EL_PREP_TERM, 1);
  }

  // Nothing at the end of the input.
  std::optional<std::string> next() {
    prepare();
    return edit_ == nullptr ? plain() : edited();
  }

 private:
  static std::optional<std::string> plain() {
    std::string line;
    for (int c; (c = std::getchar()) != EOF;) {
      if (c == '\n') return line;
      line += static_cast<char>(c);
    }
    return line.empty() ? std::nullopt : std::optional(line);
  }
  std::optional<std::string> edited() {
    int count = 0;
    dropped_ = false;
    const char* const line = el_gets(edit_, &count);
    if (dropped_) {
      prepare();
      fmt::print("\n(Ctrl-D ends the conversation.)\n");
      std::fflush(stdout);
      return std::string();
    }
    if (line == nullptr || count <= 0) {
      fmt::print("\n");
      return {};
    }
    std::string text(line, static_cast<std::size_t>(count));
    while (!text.empty() && text.back() == '\n') text.pop_back();
    HistEvent event;
    if (!text.empty() && history_ != nullptr) history(history_, &event, H_ENTER, line);
    return text;
  }

  EditLine* edit_ = nullptr;
  History* history_ = nullptr;
  bool dropped_ = false;
};

Status chat(const RunFlags& flags, const std::string& first, const Tokenizer& tokenizer,
            Runner& runner, Stats& stats) {
  std::vector<ChatMessage> messages;
  if (!flags.system.empty()) messages.push_back({"system", flags.system});
  Lines lines;
  std::optional<std::string> line = first.empty() ? lines.next() : std::optional(first);
  for (; line; line = lines.next()) {
    if (line->empty()) continue;
    messages.push_back({"user", *line});
    const auto all = tokenizer.apply_chat(messages);
    if (!all) return all.status();
    // What the session holds of it already stays; an answer may be spelt with other tokens.
    const auto held = runner.session().tokens();
    const auto end = std::mismatch(all->begin(), all->end(), held.begin(), held.end()).first;
    const auto same = std::min(end - all->begin(), std::ssize(*all) - 1);
    if (const auto context = runner.session().context(); std::ssize(*all) >= context) {
      messages.pop_back();  // the conversation is as it was before
      tell(fmt::format(
          "bittern: run: the conversation would have {} tokens with this message, and a "
          "context of {} (-c) has no room for them and an answer; the message is left "
          "out\n",
          all->size(), context));
      continue;
    }
    const CatchInterrupt guard;
    BITTERN_TRY(runner.session().truncate(same));
    BITTERN_TRY(runner.answer(std::span(*all).subspan(static_cast<std::size_t>(same)), stats));
    fmt::print("\n");
    std::fflush(stdout);
    if (interrupted == SIGTERM) end_by(SIGTERM);
    lines.prepare();  // while signals are still caught: a late Ctrl-C must not end the program
    if (interrupted != 0 && stats.text.empty()) {  // as if it had never been asked
      messages.pop_back();
    } else {
      messages.push_back({"assistant", stats.text});
    }
  }
  return {};
}

Result<std::string> prompt_of(const RunFlags& flags) {
  if (flags.file.empty()) {
    if (!flags.chat && flags.prompt.empty())
      return invalid("-p: no prompt, expected a text (or --chat for a conversation)");
    return flags.prompt;
  }
  if (!flags.prompt.empty()) return invalid("-f: given beside -p, expected one of them");
  if (std::error_code error; std::filesystem::is_directory(flags.file, error))
    return invalid(fmt::format("-f: {}: a folder, expected a file with a prompt", flags.file));
  std::ifstream file(flags.file, std::ios::binary);
  if (!file.is_open())
    return unavailable(fmt::format("-f: {}: {}", flags.file, std::strerror(errno)));
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) return unavailable(fmt::format("-f: {}: cannot be read", flags.file));
  if (text.empty())
    return invalid(fmt::format("-f: {}: an empty file, expected a prompt", flags.file));
  return text;
}

double rate(std::int64_t tokens, double time) {
  return time > 0 ? static_cast<double>(tokens) / time : 0.0;
}

std::uint64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) << 10;
}

void print_stats(const Stats& stats, const ModelInfo& info, const Session& session) {
  const SessionBytes bytes = session.bytes();
  tell(fmt::format("\nload        {:8.3f} s   {}, {} weights, {}\n", stats.load, info.architecture,
                   info.parameters, size_text(info.weight_bytes)));
  tell(fmt::format("prompt      {:8.3f} s   {} tokens, {:.1f} tokens/s\n", stats.prompt,
                   stats.prompt_tokens, rate(stats.prompt_tokens, stats.prompt)));
  tell(fmt::format("generation  {:8.3f} s   {} tokens, {:.1f} tokens/s\n", stats.generation,
                   stats.tokens, rate(stats.tokens, stats.generation)));
  tell(fmt::format("memory      weights {}, cache {}, states {}; all of the program at most {}\n",
                   size_text(info.weight_bytes), size_text(bytes.cache), size_text(bytes.states),
                   size_text(peak_memory())));
}

Json report(const RunFlags& flags, const Stats& stats, const ModelInfo& info,
            const Session& session) {
  const SessionBytes bytes = session.bytes();
  const auto end = static_cast<std::size_t>(stats.end);
  return {{"schema", 1},
          {"model", flags.model.path},
          {"architecture", info.architecture},
          {"text", stats.text},
          {"end", interrupted != 0 ? "interrupted" : enum_names(stats.end)[end]},
          {"prompt_tokens", stats.prompt_tokens},
          {"tokens", stats.tokens},
          {"seconds",
           {{"load", stats.load}, {"prompt", stats.prompt}, {"generation", stats.generation}}},
          {"bytes",
           {{"weights", info.weight_bytes},
            {"cache", bytes.cache},
            {"states", bytes.states},
            {"peak", peak_memory()}}}};
}

Status run(const RunFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  BITTERN_TRY(check_json_flag(flags.common));
  if (!flags.system.empty() && !flags.chat)
    return invalid("--system: given without a conversation, expected --chat beside it");
  const auto prompt = prompt_of(flags);
  if (!prompt) return prompt.status();
  Stats stats;
  const auto start = Clock::now();
  const auto tokenizer = Tokenizer::load(flags.model.path);
  if (!tokenizer) return tokenizer.status();
  // What can be wrong is told before the weights are read.
  std::vector<ChatMessage> messages{{"user", *prompt}};
  if (!flags.system.empty()) messages.insert(messages.begin(), {"system", flags.system});
  const auto tokens = flags.chat ? tokenizer->apply_chat(messages) : tokenizer->encode(*prompt);
  if (!tokens) return tokens.status();
  const auto info = Model::look(flags.model.path, load_options(flags.model));
  if (!info) return info.status();
  const auto options = session_options(flags.model);
  if (!options) return options.status();
  BITTERN_TRY(check_session(*info, *options));
  BITTERN_TRY(Runner::check_room(std::ssize(*tokens), 0,
                                 flags.model.context != 0 ? flags.model.context : info->context));
  if (flags.model.context > info->context && !flags.common.quiet)
    tell(fmt::format(
        "note: -c {}: the model was made for {} tokens; what it says beyond them may be "
        "worse\n",
        flags.model.context, info->context));
  const auto model = load_model(flags.model);
  if (!model) return model.status();
  BITTERN_TRY(check_vocabulary(*model, *tokenizer, flags.model.path));
  auto session = make_session(*model, *options);
  if (!session) return session.status();
  stats.load = seconds(start, Clock::now());

  Runner runner(flags, *tokenizer, std::move(*session));
  if (flags.chat) {
    BITTERN_TRY(chat(flags, *prompt, *tokenizer, runner, stats));
    interrupted = 0;
  } else {
    if (!flags.no_prompt && !flags.common.quiet) {
      fmt::print("{}", *prompt);
      std::fflush(stdout);
    }
    const CatchInterrupt guard;
    BITTERN_TRY(runner.answer(*tokens, stats));
    fmt::print("\n");
    std::fflush(stdout);
  }
  if (flags.stats) print_stats(stats, *info, runner.session());
  BITTERN_TRY(write_json(flags.common, report(flags, stats, *info, runner.session())));
  if (interrupted != 0) end_by(interrupted);
  return {};
}

}  // namespace

Verb run_verb(CLI::App& main) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* verb = main.add_subcommand("run", "generate text with a model, or chat with it");
  add_model_flags(*verb, flags->model);
  verb->add_option("-p,--prompt", flags->prompt,
                   "continue this text; with --chat, the first message")
      ->option_text("TEXT");
  verb->add_option("-f,--file", flags->file, "read the prompt from FILE")->option_text("FILE");
  verb->add_flag(
      "--chat,--conversation", flags->chat,
      "answer messages, line by line, in the model's chat format; Ctrl-C stops an answer");
  verb->add_option("--system,--system-prompt", flags->system, "with --chat: the system message")
      ->option_text("TEXT");
  verb->add_option(
          "-n,--predict,--n-predict", flags->generate.max_tokens,
          "generate at most N tokens (default: until the model ends or the context is full)")
      ->option_text("N")
      ->check(integer_in(-1, std::int64_t{1} << 24));
  verb->add_option(
          "--temp,--temperature", flags->generate.sample.temperature,
          "divide logits by T before a token is drawn; 0 takes the likeliest (default: 0.8)")
      ->option_text("T")
      ->check(number_in(0, 1e3));
  verb->add_option("--top-k", flags->generate.sample.top_k,
                   "draw among the K likeliest tokens; 0: all (default: 40)")
      ->option_text("K")
      ->check(integer_in(0, std::int64_t{1} << 24));
  verb->add_option(
          "--top-p", flags->generate.sample.top_p,
          "draw among the likeliest tokens that make up P of the probability (default: 0.95)")
      ->option_text("P")
      ->check(number_in(1e-6, 1));
  verb->add_option(
          "--min-p", flags->generate.sample.min_p,
          "leave out tokens with less than P of the likeliest one's probability (default: 0.05)")
      ->option_text("P")
      ->check(number_in(0, 1));
  verb->add_option("--repeat-penalty", flags->generate.sample.repetition_penalty,
                   "make tokens that occurred before less likely; 1: not (default: 1)")
      ->option_text("R")
      ->check(number_in(1e-3, 1e3));
  verb->add_option("-s,--seed", flags->generate.sample.seed,
                   "draw from this seed: the same seed gives the same text everywhere (default: 0)")
      ->option_text("N")
      ->check(seed_check());
  verb->add_option("--stop,-r,--reverse-prompt", flags->generate.stops,
                   "end before this text; may be repeated")
      ->option_text("TEXT")
      ->take_all()
      ->allow_extra_args(false);
  verb->add_flag("--ignore-eos", flags->generate.ignore_ends, "go on after the model ends");
  verb->add_flag("--special", flags->generate.special, "print control tokens too");
  verb->add_flag("--no-display-prompt", flags->no_prompt, "do not print the prompt first");
  verb->add_flag("--stats", flags->stats, "print times, tokens per second and memory at the end");
  add_output_flags(*verb, flags->common);
  verb->footer(
      "Example: bittern run model.gguf -p \"The capital of France is\" -n 20 --temp 0\n"
      "         bittern run model-4bit --chat --kv aura8v4 --stats");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace bittern::cli
