// bittern VERB ... : parses, runs one verb, and turns its status into one line and an exit status.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "bittern/convert.h"
#include "cli/cli.h"
#include "cli/interrupt.h"
#include "cli/processes.h"
#include "core/float_mode.h"
#include "core/ranks.h"
#include "plan/names.h"

namespace bittern::cli {
namespace {

// 0 ok; 2 bad usage, refused input, output exists; 3 unsupported; 4 unavailable; 130 and 143
// stopped by SIGINT and SIGTERM; 1 anything else.
int exit_status(Code code) {
  switch (code) {
    case Code::cancelled: return StopOnSignal::noted() != 0 ? 128 + StopOnSignal::noted() : 1;
    case Code::ok: return 0;
    case Code::invalid_argument: return 2;
    case Code::unsupported: return 3;
    case Code::unavailable: return 4;
    default: return 1;
  }
}

// Of several processes the first one tells, and its exit status is that of all.
int complain(const Status& status) {
  if (!speaks()) return 0;
  std::fflush(stdout);
  tell(fmt::format("bittern: {}\n", printable(status.message())));
  return exit_status(status.code());
}

int fail(const Status& status) {
  // Without memory it cannot tell the others.
  if (processes() != nullptr && status.code() == Code::out_of_memory) {
    tell(fmt::format("bittern: process {}: out of memory\n", processes()->rank()));
    processes()->abort(exit_status(status.code()));
  }
  return complain(agree(processes(), status));
}

// An empty value is most often a script's variable that was never set. Without this check, flags
// would take it as "not given", or --flag= would take the next argument.
Status no_value(const std::string& flag) { return invalid(flag + ": empty, expected a value"); }

Status check_equals_signs(std::span<char*> words) {
  for (const std::string_view word : words) {
    if (word == "--") break;
    if (word.starts_with("--") && word.find('=') == word.size() - 1)
      return no_value(std::string(word.substr(0, word.size() - 1)));
  }
  return {};
}

Status check_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const auto& values = option->results();
    if (std::find(values.begin(), values.end(), "") != values.end())
      return no_value(option->get_name(false, true));
  }
  for (const CLI::App* verb : app.get_subcommands()) BITTERN_TRY(check_values(*verb));
  return {};
}

// CLI11 counts values in words of its own ("1 required TEXT missing").
Status wrong_count(const CLI::App& app, const std::string& text) {
  for (const CLI::App* verb : app.get_subcommands()) {
    for (const CLI::Option* option : verb->get_options()) {
      const std::string flag = option->get_name();
      if (!text.starts_with(flag + ": ")) continue;
      if (text.ends_with(" missing"))
        return invalid(
            fmt::format("{}: no value, expected one ({})", flag, option->get_description()));
      if (text.find("At Most 1 required") != text.npos)
        return invalid(fmt::format("{}: given more than once, expected once", flag));
    }
  }
  return invalid(text);
}

// The flag that was perhaps meant, as a question; empty where none is near.
std::string perhaps(const CLI::App& app, std::string_view word) {
  if (!word.starts_with("--")) return {};
  std::vector<std::string_view> names;
  for (const CLI::Option* option : app.get_options())
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  const std::string_view meant = nearest(word.substr(2, word.find('=') - 2), names);
  return meant.empty() ? std::string() : fmt::format(" (did you mean --{}?)", meant);
}

std::string flags_of(const CLI::App& app) {
  std::string text;
  for (const CLI::Option* option : app.get_options()) {
    if (option->nonpositional()) text += " " + option->get_name();
  }
  return text;
}

// CLI11's help, with lines of at most 100 columns and without the type of a positional argument.
class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = option->get_description();
    const std::size_t width = 100 - get_column_width();
    for (std::size_t start = 0; text.size() - start > width;) {
      const std::size_t space = text.rfind(' ', start + width);
      if (space == text.npos || space <= start) break;
      text[space] = '\n';
      start = space + 1;
    }
    return text;
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_positional() ? std::string() : Formatter::make_option_opts(option);
  }
};

int run(int argc, char** argv) {
  if (Status s = join_processes(); !s.ok()) return fail(s);
  const FloatMode mode;  // libraries may have changed it; threads start with this one's
  CLI::App app{"bittern: quantise language models, and run and check the kernels for it",
               "bittern"};
  app.formatter(std::make_shared<HelpFormat>());
  app.set_version_flag("--version", std::string("bittern ") + version());
  app.footer(
      "bittern VERB --help shows the options of a verb.\n"
      "Example: bittern quantize model-folder -o model-4bit --bits 4");
  app.allow_extras();
  const Verb verbs[] = {ops_verb(app),     check_verb(app),     bench_verb(app, argv),
                        inspect_verb(app), quantize_verb(app),  run_verb(app),
                        eval_verb(app),    calibrate_verb(app), distill_verb(app)};
  std::string names;
  for (const Verb& verb : verbs) names += " " + verb.app->get_name();
  if (Status s = check_equals_signs({argv, static_cast<std::size_t>(argc)}); !s.ok())
    return fail(s);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // help, version
    std::ostringstream text;
    const int status = app.exit(asked, text, text);
    fmt::print("{}", text.str());
    return status;
  } catch (const CLI::ParseError& error) {
    if (Status s = check_values(app); !s.ok()) return fail(s);
    std::string text = error.what();
    text.resize(std::min(text.find('\n'), text.size()));
    return fail(wrong_count(app, text));
  }
  if (Status s = check_values(app); !s.ok()) return fail(s);
  for (const Verb& verb : verbs) {
    if (!verb.app->parsed()) continue;
    const auto rest = verb.takes_fields ? app.remaining() : app.remaining(true);
    if (!rest.empty()) {
      const std::string& word = rest.front();
      if (verb.one_model && !word.starts_with('-'))
        return fail(invalid(fmt::format("{}: {}: one argument too many, expected {}",
                                        verb.app->get_name(), word, verb.one_model)));
      return fail(
          invalid(fmt::format("{}: unknown argument {}{}, expected one of{}", verb.app->get_name(),
                              word, perhaps(*verb.app, word), flags_of(*verb.app))));
    }
    if (Status s = check_environment(); !s.ok()) return fail(s);
    if (Status s = check_kernel_variable(); !s.ok()) return fail(s);
    if (processes() != nullptr && !verb.shared)
      return fail(
          invalid(fmt::format("{}: {} processes, expected one; quantize, eval and distill "
                              "share their work",
                              verb.app->get_name(), processes()->count())));
    const Status status = agree(processes(), verb.run());
    return status.ok() ? 0 : fail(status);
  }
  const auto rest = app.remaining();
  return fail(
      invalid(rest.empty() || rest.front().empty()
                  ? fmt::format("no verb, expected one of{} (bittern --help tells more)", names)
                  : fmt::format("no verb called {}, expected one of{}", rest.front(), names)));
}

// Text that is lost is no success.
int flushed(int status) {
  const int error = std::fflush(stdout) != 0 ? errno : std::ferror(stdout) != 0 ? EIO : 0;
  if (status != 0 || error == 0) return status;
  return complain({Code::io_error,
                   fmt::format("standard output: {}, cannot write to it", std::strerror(error))});
}

}  // namespace
}  // namespace bittern::cli

int main(int argc, char** argv) {
  bittern::cli::open_standard_files();
  bittern::guard_mapped_files();
  // A limit on the size of files (ulimit -f) is an error of the write that meets it.
  (void)std::signal(SIGXFSZ, SIG_IGN);
  try {
    const int status = bittern::cli::flushed(bittern::cli::run(argc, argv));
    if (auto* const all = bittern::cli::processes(); all != nullptr) all->finish();
    return status;
  } catch (const std::bad_alloc&) {
    std::fputs("bittern: out of memory\n", stderr);
  } catch (const std::system_error& error) {  // of fmt::print
    bittern::cli::tell(
        fmt::format("bittern: standard output: {}, cannot write to it\n", error.code().message()));
  } catch (...) {
    std::fputs("bittern: an internal error; please report the command\n", stderr);
  }
  if (auto* const all = bittern::cli::processes(); all != nullptr) all->abort(1);
  return 1;
}
