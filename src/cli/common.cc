#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <set>

#include "bittern/version.h"
#include "cli/cli.h"
#include "cli/processes.h"
#include "convert/replace.h"
#include "cuda/plugin.h"
#include "oracle/oracle.h"

namespace bittern::cli {

void add_common_flags(CLI::App& verb, CommonFlags& flags) {
  verb.add_option("--device", flags.device,
                  "run on this device: auto, cpu, cuda or cuda:n; auto uses the GPU where it can "
                  "and otherwise the CPU (default: auto)")
      ->option_text("DEVICE");
  add_output_flags(verb, flags);
}

void add_output_flags(CLI::App& verb, CommonFlags& flags) {
  verb.add_option("-t,--threads", flags.threads,
                  "use N CPU threads (default: BITTERN_THREADS, or one per core)")
      ->option_text("N")
      ->check(integer_in(1, max_threads()));
  verb.add_option("--json", flags.json,
                  "also write a report to FILE, as JSON; - means standard output, and all other "
                  "text then goes to standard error")
      ->option_text("FILE");
  verb.add_flag("--force", flags.force, "replace FILE of --json if it is an earlier report");
  verb.add_flag("--quiet", flags.quiet, "print only errors");
}

Status use_threads(const CommonFlags& flags) {
  if (flags.threads == 0) return {};
  if (Status s = check_num_threads(flags.threads); !s.ok())
    return invalid("--threads: " + std::string(s.message()));
  set_num_threads(flags.threads);
  return {};
}

namespace {

template <class Kernels>
void add_names(const Kernels& kernels, std::set<std::string, std::less<>>& names) {
  for (const auto& kernel : kernels) names.emplace(kernel.name);
}

}  // namespace

Status check_kernel_variable() {
  const char* given = std::getenv("BITTERN_KERNEL");
  if (given == nullptr) return {};
  std::string text = given;
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::set<std::string, std::less<>> names;
#define BITTERN_OP(T, f, CPU, CUDA) \
  add_names(f##_ref(), names);      \
  BITTERN_IF_##CPU(add_names(f##_cpu(), names);)
#include "ops/ops.inc"
  if (names.contains(text)) return {};
  // The plug-in is loaded for this question only where it may answer it.
  const auto plugin = cuda_plugin(0);
  if (plugin) {
#define BITTERN_OP(T, f, CPU, CUDA) BITTERN_IF_##CUDA(add_names((*plugin)->f, names);)
#include "ops/ops.inc"
    if (names.contains(text)) return {};
  }
  return invalid(
      fmt::format("BITTERN_KERNEL: {}, expected one of {}{}", *given == 0 ? "empty" : given,
                  fmt::join(names, " "),
                  plugin ? "" : " (no CUDA here: " + std::string(plugin.status().message()) + ")"));
}

CLI::Validator integer_in(std::int64_t low, std::int64_t high) {
  return CLI::Validator(
      [=](const std::string& text) {
        std::int64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool ok = error == std::errc() && end == text.data() + text.size() && value >= low &&
                        value <= high;
        return ok ? std::string() : fmt::format("{}, expected an integer {}..{}", text, low, high);
      },
      "");
}

CLI::Validator seed_check() {
  return CLI::Validator(
      [](const std::string& text) {
        std::uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool ok = error == std::errc() && end == text.data() + text.size();
        return ok ? std::string()
                  : fmt::format("{}, expected an integer 0..{}", text,
                                std::numeric_limits<std::uint64_t>::max());
      },
      "");
}

CLI::Validator number_in(double low, double high) {
  return CLI::Validator(
      [=](const std::string& text) {
        double value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool ok = error == std::errc() && end == text.data() + text.size() && value >= low &&
                        value <= high;
        return ok ? std::string() : fmt::format("{}, expected a number {}..{}", text, low, high);
      },
      "");
}

Result<DeviceChoice> choose_device(const CommonFlags& flags) {
  const std::string& text = flags.device;
  if (text == "cpu") return DeviceChoice{};
  if (text == "auto") {
    const Device cuda{Device::Type::cuda, 0};
    return DeviceChoice{cuda_plugin(0) ? cuda : Device{}, true};
  }
  int index = 0;
  bool ok = text == "cuda";
  if (text.starts_with("cuda:")) {
    const auto [end, error] = std::from_chars(text.data() + 5, text.data() + text.size(), index);
    ok = error == std::errc() && end == text.data() + text.size() && index >= 0;
  }
  if (!ok) return invalid("--device: " + text + ", expected auto, cpu, cuda or cuda:n");
  if (auto plugin = cuda_plugin(index); !plugin) {
    return unavailable("--device " + text + ": " + std::string(plugin.status().message()));
  }
  return DeviceChoice{{Device::Type::cuda, index}, false};
}

namespace {

// A larger file is no report.
constexpr off_t kMostReportBytes = off_t{256} << 20;
// What a report says of itself: the version that wrote it.
constexpr const char* kMark = "bittern";
// Where the JSON goes when standard output takes it.
int json_stdout = -1;
bool stdout_was_closed = false;

Status file_error(const ReportFile& file, int error) {
  const bool there = error == ENOSPC || error == EIO || error == EDQUOT;
  return Status(there ? Code::io_error : Code::unavailable,
                fmt::format("{}: {}: {}, expected a file that can be written", file.flag, file.path,
                            std::strerror(error)));
}

bool is_stdout(const std::string& path) { return path == "-" || path == "/dev/stdout"; }

using Keys = std::initializer_list<const char*>;

// An object with all of `needed` and nothing but these and `more`.
bool has_keys(const Json& json, Keys needed, Keys more = {}) {
  const auto in = [](Keys keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  if (!json.is_object()) return false;
  for (const auto& [key, value] : json.items())
    if (!in(needed, key) && !in(more, key)) return false;
  return std::all_of(needed.begin(), needed.end(),
                     [&](const char* key) { return json.contains(key); });
}

bool all_have_keys(const Json& rows, Keys needed, Keys more = {}) {
  return rows.is_array() && !rows.empty() &&
         std::all_of(rows.begin(), rows.end(),
                     [&](const Json& row) { return has_keys(row, needed, more); });
}

// What write_json() writes: an object with its mark, or rows of check or ops.
bool is_report(const Json& json) {
  if (json.is_object())
    return json.contains(kMark) && json[kMark].is_string() &&
           (json.contains("schema") || json.contains("machine"));
  return all_have_keys(json, {"op", "compared", "failures", "seconds"}, {"kernels"}) ||
         all_have_keys(json, {"op", "category", "chosen_here", "backends"},
                       {"weaker_kernels", "fields", "operands"});
}

// ok when the file is a report of ours, or empty.
Status check_ours(const ReportFile& report) {
  const auto unreadable = [&](int error) {
    return unavailable(fmt::format("{}: {}: cannot be read, so that it may be anything: {}",
                                   report.flag, report.path, std::strerror(error)));
  };
  struct stat info;
  std::string text;
  const int file = open(report.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return unreadable(errno);
  int error = fstat(file, &info) != 0 ? errno : 0;
  const bool small = error == 0 && info.st_size <= kMostReportBytes;
  char piece[1 << 16];
  while (small && error == 0) {
    const ssize_t n = read(file, piece, sizeof piece);
    if (n == 0) break;
    if (n > 0) text.append(piece, static_cast<std::size_t>(n));
    if (n < 0 && errno != EINTR) error = errno;
  }
  close(file);
  if (error != 0) return unreadable(error);
  if (small && (text.empty() || report.ours(text))) return {};
  return invalid(fmt::format("{}: {} is no report of bittern's; --force replaces only those",
                             report.flag, report.path));
}

// With a slash at its end.
std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

// A new file in the folder of `path`. Not the file's name and more: that may be too long.
int open_beside(const std::string& path, std::string& name) {
  name = fmt::format("{}.bittern-{}.tmp", folder_of(path), getpid());
  return open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

int write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(file, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

Status check_report_file(const ReportFile& report) {
  if (!speaks()) return {};
  if (is_stdout(report.path))
    return invalid(fmt::format("{}: {}: standard output, expected the name of a file", report.flag,
                               report.path));
  const auto there = thing_at(report.path);
  if (!there) return unavailable(fmt::format("{}: {}", report.flag, there.status().message()));
  if (*there != Thing::nothing && *there != Thing::file) {
    return invalid(fmt::format("{}: {}: {}, expected a file{}", report.flag, report.path,
                               name(*there),
                               report.or_stdout ? " (or - for standard output)" : ""));
  }
  if (*there == Thing::file) {
    if (!report.force)
      return invalid(
          fmt::format("{}: {} exists, expected a new name (or --force)", report.flag, report.path));
    BITTERN_TRY(check_ours(report));
  }
  if (folder_of(report.path) == report.path) return file_error(report, EISDIR);
  // Permission is not enough: /dev/fd and the like take no new files.
  std::string probe;
  const int file = open_beside(report.path, probe);
  if (file < 0) return file_error(report, errno);
  close(file);
  unlink(probe.c_str());
  return {};
}

Status write_report_file(const ReportFile& report, std::string_view text) {
  if (!speaks()) return {};
  std::string beside;
  const int file = open_beside(report.path, beside);
  if (file < 0) return file_error(report, errno);
  int error = write_all(file, text);
  if (error == 0 && fsync(file) != 0) error = errno;
  if (close(file) != 0 && error == 0) error = errno;
  if (error == 0) {
    // The name may have been given to something else in the meantime.
    const auto there = thing_at(report.path);
    if (!there || (*there != Thing::nothing &&
                   !(*there == Thing::file && report.force && check_ours(report).ok())))
      error = EEXIST;
  }
  if (error == 0 && std::rename(beside.c_str(), report.path.c_str()) != 0) error = errno;
  if (error == 0) return {};
  unlink(beside.c_str());
  return file_error(report, error);
}

namespace {

ReportFile json_file(const CommonFlags& flags) {
  return {
      .flag = "--json",
      .path = flags.json,
      .force = flags.force,
      .or_stdout = true,
      .ours = [](std::string_view text) { return is_report(Json::parse(text, nullptr, false)); }};
}

}  // namespace

Status check_json_flag(const CommonFlags& flags) {
  if (flags.json.empty() || !speaks()) return {};
  if (!is_stdout(flags.json)) return check_report_file(json_file(flags));
  if (stdout_was_closed) return file_error(json_file(flags), EBADF);
  std::fflush(stdout);
  json_stdout = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (json_stdout < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
    return file_error(json_file(flags), errno);
  return {};
}

std::vector<OutputName> json_output(const CommonFlags& flags) {
  if (flags.json.empty() || is_stdout(flags.json)) return {};
  return {{"--json", flags.json}};
}

Status write_json(const CommonFlags& flags, Json json) {
  if (flags.json.empty() || !speaks()) return {};
  if (processes() != nullptr) json["processes"] = processes()->count();
  if (json.is_object()) json[kMark] = version();
  // Names in files of strangers need not be UTF-8.
  const std::string text = json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  if (!is_stdout(flags.json)) return write_report_file(json_file(flags), text);
  const int error = write_all(json_stdout, text);
  return error == 0 ? Status() : file_error(json_file(flags), error);
}

void open_standard_files() {
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(file, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number: this one. Writing to a standard output that is closed stays an error.
    const bool output = file == STDOUT_FILENO;
    (void)open("/dev/null", output ? O_RDONLY : O_RDWR);
    if (output) stdout_was_closed = true;
  }
}

void tell(std::string_view text) {
  (void)std::fwrite(text.data(), 1, text.size(), stderr);
  (void)std::fflush(stderr);
}

Progress::Progress(bool quiet) : on_(!quiet && speaks() && isatty(STDERR_FILENO) == 1) {}

void Progress::show(std::string_view text) {
  if (!on_) return;
  tell(fmt::format("\r\033[K{}", text));
  shown_ = true;
}

void Progress::clear() {
  if (shown_) tell("\r\033[K");
  shown_ = false;
}

PacedProgress::PacedProgress(bool quiet)
    : line_(quiet), plain_(!quiet && speaks() && isatty(STDERR_FILENO) != 1) {}

bool PacedProgress::due() {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - shown_;
  if (since.count() < (plain_ ? 5 : 0.1)) return false;
  wait();
  return true;
}

void PacedProgress::wait() { shown_ = std::chrono::steady_clock::now(); }

void PacedProgress::show(const std::string& text) {
  if (plain_) {
    tell(text + "\n");
  } else {
    line_.show(text);
  }
}

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  return out;
}

std::string size_text(std::uint64_t bytes) {
  const auto x = static_cast<double>(bytes);
  if (bytes < 1000) return fmt::format("{} B", bytes);
  if (x < 1e6) return fmt::format("{:.1f} kB", x / 1e3);
  if (x < 1e9) return fmt::format("{:.1f} MB", x / 1e6);
  return fmt::format("{:.2f} GB", x / 1e9);
}

Result<Fields> parse_fields(std::string_view verb, const std::vector<std::string>& words) {
  Fields fields;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with("--")) {
      return invalid(fmt::format("{}: unknown argument {}, expected --field=value", verb, word));
    }
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos) {
      fields.emplace_back(word.substr(2, equals - 2), word.substr(equals + 1));
    } else if (i + 1 < words.size() && !words[i + 1].starts_with("--")) {
      fields.emplace_back(word.substr(2), words[i + 1]);
      ++i;
    } else {
      return invalid(fmt::format("{}: {}: no value, expected {}=value", verb, word, word));
    }
    const std::string& name = fields.back().first;
    if (fields.back().second.empty())
      return invalid(fmt::format("{}: --{}: empty, expected a value", verb, name));
    if (std::count_if(fields.begin(), fields.end(), [&](auto& f) { return f.first == name; }) > 1)
      return invalid(fmt::format("{}: --{}: given twice, expected once", verb, name));
  }
  return fields;
}

namespace {

template <class Op>
std::unique_ptr<AnyDesc> any_desc(const AnyOp& op, const typename Op::Desc& desc) {
  auto any = op.make_desc();
  Op::fields(desc, [&](const char* field, const auto& member, const char*) {
    if constexpr (kIsReal<std::remove_cvref_t<decltype(member)>>) {
      (void)any->set(field, member);
    } else {
      (void)any->set(field, static_cast<std::int64_t>(member));
    }
  });
  return any;
}

// The first of the check cases in which every operand that is read has elements.
template <class Op>
std::unique_ptr<AnyDesc> small(const AnyOp& op) {
  for (const auto& desc : oracle::Cases<Op>::check()) {
    auto any = any_desc<Op>(op, desc);
    const auto operands = any->operands();
    if (std::none_of(operands.begin(), operands.end(), [](const OperandInfo& o) {
          return (o.expected.flags & Operand::kUnread) == 0 && o.expected.shape.numel() == 0;
        }))
      return any;
  }
  return op.make_desc();
}

template <class Op>
std::vector<Problem> problems(const AnyOp& op) {
  std::vector<Problem> out;
  for (const auto& bench : oracle::Cases<Op>::bench()) {
    Problem& problem = out.emplace_back();
    problem.label = bench.label;
    problem.desc = any_desc<Op>(op, bench.desc);
    problem.left_out = bench.left_out;
    problem.preference = bench.preference;
    problem.gpu_only = bench.gpu_only;
    problem.limit = bench.limit;
    if (bench.fill != nullptr) {
      problem.fill = [fill = bench.fill](const AnyDesc& shrunk, std::string_view operand,
                                         const ConstView& view, oracle::Rng& rng) {
        typename Op::Desc desc;
        Op::fields(desc, [&](const char* field, auto& member, const char*) {
          using Member = std::remove_cvref_t<decltype(member)>;
          if constexpr (kIsReal<Member>) {
            member = static_cast<Member>(*shrunk.get_real(field));
          } else {
            member = static_cast<Member>(*shrunk.get(field));
          }
        });
        fill(desc, operand, view, rng);
      };
    }
  }
  return out;
}

}  // namespace

std::vector<Problem> bench_problems(const AnyOp& op) {
#define BITTERN_OP(T, f, CPU, CUDA) \
  if (op.name() == T::kName) return problems<T>(op);
#include "ops/ops.inc"
  return {};
}

std::unique_ptr<AnyDesc> small_problem(const AnyOp& op) {
#define BITTERN_OP(T, f, CPU, CUDA) \
  if (op.name() == T::kName) return small<T>(op);
#include "ops/ops.inc"
  return op.make_desc();
}

std::string field_text(const AnyDesc& desc, const FieldInfo& field) {
  if (field.real) return bittern::field_text(*desc.get_real(field.name));
  const auto value = desc.get(field.name);
  if (!value) return {};
  if (field.choices.empty()) return std::to_string(*value);
  return std::string(field.choices[static_cast<std::size_t>(*value)]);
}

Json fields_json(const AnyDesc& desc) {
  Json json = Json::object();
  for (const FieldInfo& field : desc.op().fields()) {
    const std::string name(field.name);
    if (field.real) {
      json[name] = *desc.get_real(field.name);
    } else if (field.choices.empty()) {
      const auto value = desc.get(field.name);
      json[name] = value ? *value : 0;
    } else {
      json[name] = field_text(desc, field);
    }
  }
  return json;
}

}  // namespace bittern::cli
