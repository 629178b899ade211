// What the verbs share: the common flags, the device, JSON files, numbers as text.
#pragma once
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/bittern.h"
#include "bittern/convert.h"
#include "convert/apart.h"
#include "oracle/oracle.h"
#include "plan/any_op.h"

namespace bittern::cli {

using Json = nlohmann::ordered_json;

struct CommonFlags {
  std::string device = "auto";
  int threads = 0;
  std::string json;
  bool force = false;
  bool quiet = false;
};

struct Verb {
  CLI::App* app = nullptr;
  std::function<Status()> run;
  bool takes_fields = false;  // unknown flags are an op's fields
  // Of a verb with one argument: how what others write as further ones is given.
  const char* one_model = nullptr;
  bool shared = false;  // several processes may share its work
};

Verb ops_verb(CLI::App& main);
Verb check_verb(CLI::App& main);
Verb bench_verb(CLI::App& main, char** argv);
Verb inspect_verb(CLI::App& main);
Verb quantize_verb(CLI::App& main);
Verb run_verb(CLI::App& main);
Verb eval_verb(CLI::App& main);
Verb calibrate_verb(CLI::App& main);
Verb distill_verb(CLI::App& main);
// The flag that stands for a field of QuantizeOptions or CompareOptions.
std::string flag_of(std::string_view field);
// What is not as it was asked for, told once a reason.
std::vector<std::string> notes_of(const QuantizeReport& report);
void print_notes(const QuantizeReport& report);
// The rule in REGEX=4:64, REGEX=4, REGEX=Q8_0 or REGEX=keep.
Result<QuantizeRule> parse_rule(const std::string& flag, const std::string& text);

void add_common_flags(CLI::App& verb, CommonFlags& flags);
void add_output_flags(CLI::App& verb, CommonFlags& flags);  // those without a device
Status use_threads(const CommonFlags& flags);               // --threads
// Whether BITTERN_KERNEL is the name of a kernel of any op; each plan asks for one of its own.
Status check_kernel_variable();
// A CLI11 check whose message says what would be right.
CLI::Validator integer_in(std::int64_t low, std::int64_t high);
CLI::Validator number_in(double low, double high);  // no infinity, no NaN
CLI::Validator seed_check();                        // any 64 bits

// "auto", "cpu", "cuda" or "cuda:n". The device is there, or the status says why not.
struct DeviceChoice {
  Device device;
  bool automatic = false;  // another device may serve what this one cannot
};
Result<DeviceChoice> choose_device(const CommonFlags& flags);

// A file that a verb writes beside its text.
struct ReportFile {
  const char* flag = "";
  std::string path{};
  bool force = false;                             // may replace an earlier report
  bool or_stdout = false;                         // messages name - as another choice
  bool (*ours)(std::string_view text) = nullptr;  // whether a text is such a report
};
// Refuses, before the work begins, standard output, a file that could not be written when it ends,
// and one that is no report of bittern's.
Status check_report_file(const ReportFile& report);
// Writes beside the final name, syncs and renames.
Status write_report_file(const ReportFile& report, std::string_view text);

// The same for --json, if it is given. With "-" or "/dev/stdout" the JSON alone goes to standard
// output; all text goes to standard error from here on.
Status check_json_flag(const CommonFlags& flags);
// --json beside -o and what is read; nothing when it goes to standard output.
std::vector<OutputName> json_output(const CommonFlags& flags);
Status write_json(const CommonFlags& flags, Json json);

// Standard input, output and error that are closed become /dev/null, or the next file that is
// opened would take their numbers, and text would go into it. Text that should have gone to
// standard output is an error still.
void open_standard_files();
// To standard error; that nobody can read it stops nothing.
void tell(std::string_view text);

// A line on the terminal that the next one replaces; nothing when stderr is not a terminal.
class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress() { clear(); }
  void show(std::string_view text);
  void clear();

 private:
  bool on_;
  bool shown_ = false;
};

// The same, not too often; where stderr is no terminal, a plain line every few seconds.
class PacedProgress {
 public:
  explicit PacedProgress(bool quiet);
  bool due();   // whether it is time for a line; the next one waits from here
  void wait();  // the next one waits from here
  void show(const std::string& text);
  void clear() { line_.clear(); }

 private:
  Progress line_;
  bool plain_;
  std::chrono::steady_clock::time_point shown_{};
};

std::string size_text(std::uint64_t bytes);  // "1.2 MB"
// Names come from strangers: nothing in them may steer a terminal.
std::string printable(std::string_view text);

// A problem of the op as its benchmark has it.
struct Problem {
  std::string label;
  std::unique_ptr<AnyDesc> desc;
  // As oracle::BenchCase has them; fill for a descriptor that may have been shrunk.
  std::function<void(const AnyDesc& desc, std::string_view operand, const ConstView& view,
                     oracle::Rng& rng)>
      fill;
  std::string left_out;
  Preference preference = Preference::exact;
  bool gpu_only = false;
  oracle::BenchLimit limit = oracle::BenchLimit::usual;
};
std::vector<Problem> bench_problems(const AnyOp& op);
// One that takes no time.
std::unique_ptr<AnyDesc> small_problem(const AnyOp& op);

// An op's fields as the command line has them: "--name=value" or "--name value".
using Fields = std::vector<std::pair<std::string, std::string>>;
Result<Fields> parse_fields(std::string_view verb, const std::vector<std::string>& words);

std::string field_text(const AnyDesc& desc, const FieldInfo& field);
Json fields_json(const AnyDesc& desc);

}  // namespace bittern::cli
