// bittern bench [OP...]: every op beside the limits measured in the same run.
//
// The copy is interleaved with the op, because a machine's bandwidth may change in mid-run:
// copy, op, copy, op, ... copy. A sample's ratio compares the op with the copies before and after
// it; what is reported is the median of the samples.
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "cli/bench_meter.h"
#include "cli/bench_problem.h"
#include "cli/cli.h"
#include "cpu/dispatch.h"

namespace bittern::cli {
namespace {

struct BenchFlags {
  CommonFlags common;
  std::vector<std::string> ops;
  std::string filter;
  int repeat = 0;  // 0: by the time a case takes
  bool quick = false;
};

// Quick problems have 1/8 of the elements. Its copy is still larger than most caches, so that ops
// find their operands in memory as in a full run.
constexpr std::int64_t kQuickFactor = 8;
constexpr std::size_t kCopyBytes = std::size_t{128} << 20, kQuickCopyBytes = std::size_t{64} << 20;
constexpr int kGemmSize = 2048, kQuickGemmSize = 1024;
constexpr int kRepeat = 15, kQuickRepeat = 5, kLeast = 3;
constexpr double kSecondsPerCase = 4, kQuickSecondsPerCase = 0.3;

// OpenMP reads these when it is loaded, so the program starts anew with them; a user's own settings
// are left alone.
void pin_threads(char** argv) {
  if (std::getenv("OMP_PROC_BIND") != nullptr || std::getenv("OMP_PLACES") != nullptr ||
      std::getenv("GOMP_CPU_AFFINITY") != nullptr) {
    return;
  }
  setenv("OMP_PROC_BIND", "spread", 1);
  setenv("OMP_PLACES", "cores", 1);
  (void)execv("/proc/self/exe", argv);  // should it fail, the header says that nothing is pinned
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

struct Row {
  std::string kernel, architecture, device;
  double seconds = 0;
  double gb_s = 0, copy_gb_s = 0;
  double gflop_s = 0;                               // 0: bound by memory, so compared with the copy
  double ratio = 0, ratio_low = 0, ratio_high = 0;  // median and quartiles
  double elements_s_core = 0;
  int repeat = 0;
};

double quartile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

Result<Row> measure(const Problem& problem, const AnyPlan& plan, Meter& meter, double gemm_gflop_s,
                    const BenchFlags& flags) {
  struct Release {
    Meter& meter;
    ~Release() { meter.release_all(); }
  } release{meter};
  const auto operands = make_operands(problem, meter);
  if (!operands) return operands.status();
  const auto scratch = meter.allocate(std::max<std::size_t>(plan.workspace_bytes(), 64));
  if (!scratch) return scratch.status();
  const auto work = [&] {
    return plan.run(operands->views, {}, Workspace{*scratch, plan.workspace_bytes()});
  };
  const auto first = meter.time(work);
  if (!first) return first.status();
  auto copy = meter.time_copy();
  if (!copy) return copy.status();
  int repeat = flags.repeat;
  if (repeat == 0) {
    const double budget = flags.quick ? kQuickSecondsPerCase : kSecondsPerCase;
    const double fit = budget / (*first + 2 * *copy);
    repeat =
        static_cast<int>(std::clamp<double>(fit, kLeast, flags.quick ? kQuickRepeat : kRepeat));
  }
  std::vector<double> times, copies = {*copy}, ratios;
  const double gigaflops = 1e-9 * problem.desc->flops();
  const double gigabytes = 1e-9 * static_cast<double>(operands->bytes);
  const double copied = 2e-9 * static_cast<double>(meter.copy_bytes());
  for (int i = 0; i < repeat; ++i) {
    const auto t = meter.time(work);
    if (!t) return t.status();
    copy = meter.time_copy();
    if (!copy) return copy.status();
    const double around = (copies.back() + *copy) / 2;
    times.push_back(*t);
    copies.push_back(*copy);
    ratios.push_back(gigaflops > 0 && gemm_gflop_s > 0 ? gigaflops / *t / gemm_gflop_s
                                                       : gigabytes / *t / (copied / around));
  }
  const Sku sku = plan.sku();
  Row row{std::string(sku.kernel), std::string(sku.architecture), name(meter.device())};
  row.seconds = median(times);
  row.gb_s = gigabytes / row.seconds;
  row.gflop_s = gigaflops / row.seconds;
  row.copy_gb_s = copied / median(copies);
  row.ratio = median(ratios);
  row.ratio_low = quartile(ratios, 0.25);
  row.ratio_high = quartile(ratios, 0.75);
  row.elements_s_core =
      static_cast<double>(problem.desc->elements()) / row.seconds / std::max(num_threads(), 1);
  row.repeat = repeat;
  return row;
}

// Nanoseconds for select and run on 32 elements: the median of batches.
Result<double> plan_overhead() {
  const QuantizeDesc desc{.outer_size = 1, .axis_size = 32, .group_size = 32};
  alignas(64) float x[32];
  alignas(64) std::int8_t q[32];
  const float scale[1] = {0.01f};
  for (int i = 0; i < 32; ++i) x[i] = 0.02f * static_cast<float>(i - 16);
  const QuantizePerGroup::Args args{
      .x = view(static_cast<const float*>(x), {1, 32}),
      .scale = view(scale, {1, 1}),
      .zero_point = {},
      .q = view(q, {1, 32}),
  };
  constexpr int kBatch = 200, kBatches = 51;
  std::vector<double> batches;
  for (int b = 0; b < kBatches; ++b) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kBatch; ++i) {
      const auto plan = Plan<QuantizePerGroup>::select(desc);
      if (!plan) return plan.status();
      if (Status s = plan->run(args); !s.ok()) return s;
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    batches.push_back(took.count() / kBatch);
  }
  return median(batches);
}

// The machine and its limits; meters are made when a case first needs them.
class Machine {
 public:
  explicit Machine(const BenchFlags& flags) : flags_(flags) {}

  Result<Meter*> meter(Device device) {
    const bool cuda = device.type == Device::Type::cuda;
    std::unique_ptr<Meter>& slot = cuda ? cuda_ : cpu_;
    if (!slot) {
      const std::size_t bytes = flags_.quick ? kQuickCopyBytes : kCopyBytes;
      // A GPU's cache and launch overhead call for more.
      auto made = cuda ? cuda_meter(device.index, 8 * bytes)
                       : cpu_meter(bytes, gemm_size(), flags_.quick ? 5 : 9, limits_);
      if (!made) return made.status();
      slot = std::move(*made);
      if (!flags_.common.quiet) print(device);
    }
    return slot.get();
  }

  // That of the element's dtype; of f32 where no other was measured.
  double gemm_gflop_s(DType element) const {
    const bool bf16 = element == DType::bf16 && limits_.gemm_bf16_gflop_s > 0;
    return bf16 ? limits_.gemm_bf16_gflop_s : limits_.gemm_gflop_s;
  }

  Json json() const {
    Json j{{"cpu", cpu_model()},   {"cores", omp_get_num_procs()}, {"threads", num_threads()},
           {"pinned", pinned()},   {"isa", cpu::architecture()},   {"version", version()},
           {"quick", flags_.quick}};
    if (cpu_) {
      j["copy_gb_s"] = std::max(limits_.streaming_gb_s, limits_.memcpy_gb_s);
      j["streaming_gb_s"] = limits_.streaming_gb_s;
      j["memcpy_gb_s"] = limits_.memcpy_gb_s;
      j["read_gb_s"] = limits_.read_gb_s;
      j["gemm_gflop_s"] = limits_.gemm_gflop_s;
      j["gemm_bf16_gflop_s"] = limits_.gemm_bf16_gflop_s;
    }
    return j;
  }

 private:
  static bool pinned() { return omp_get_proc_bind() != omp_proc_bind_false; }
  int gemm_size() const { return flags_.quick ? kQuickGemmSize : kGemmSize; }

  void print(Device device) const {
    if (device.type == Device::Type::cuda) {
      fmt::print("{}: the limit is the device's own copy, bytes read plus written\n", name(device));
      return;
    }
    fmt::print("{}, {} cores, {} threads{}, {}\n", cpu_model(), omp_get_num_procs(), num_threads(),
               pinned() ? " (pinned)" : " (not pinned)", cpu::architecture());
    fmt::print(
        "limits: streaming copy {:.1f} GB/s, memcpy {:.1f} GB/s (bytes read plus written), "
        "reading alone {:.1f} GB/s, GEMM f32 {:.0f}{} GFLOP/s ({}^3)\n",
        limits_.streaming_gb_s, limits_.memcpy_gb_s, limits_.read_gb_s, limits_.gemm_gflop_s,
        limits_.gemm_bf16_gflop_s > 0 ? fmt::format(", bf16 {:.0f}", limits_.gemm_bf16_gflop_s)
                                      : "",
        gemm_size());
  }

  const BenchFlags& flags_;
  CpuLimits limits_;
  std::unique_ptr<Meter> cpu_, cuda_;
};

constexpr const char* kLine = "{:<33} {:<31} {:<12} {:>9} {:>10} {:>10} {:>6} {:>12}\n";

std::string rate(double value, const char* unit) { return fmt::format("{:.1f} {}", value, unit); }

constexpr const char* kPlanOverhead = "plan overhead select + run, 32 elements";

struct Task {
  const AnyOp* op;
  Problem problem;
};

bool wants_plan_overhead(const BenchFlags& flags) {
  return flags.ops.empty() &&
         std::string_view(kPlanOverhead).find(flags.filter) != std::string_view::npos;
}

Result<std::vector<Task>> tasks(const BenchFlags& flags) {
  std::vector<const AnyOp*> ops;
  for (const std::string& name : flags.ops) {
    const auto op = find_op(name);
    if (!op) return op.status();
    ops.push_back(*op);
  }
  if (ops.empty()) ops.assign(all_ops().begin(), all_ops().end());
  std::vector<Task> out;
  for (const AnyOp* op : ops) {
    for (Problem& problem : bench_problems(*op)) {
      const std::string title = std::string(op->name()).append(" ") + problem.label;
      if (title.find(flags.filter) == std::string::npos) continue;
      if (flags.quick) shrink(*problem.desc, kQuickFactor);
      out.push_back({op, std::move(problem)});
    }
  }
  if (out.empty() && !wants_plan_overhead(flags)) {
    return invalid("bench: --filter: " + flags.filter +
                   " is in no case's name, expected part of \"OP CASE\" as bench prints them");
  }
  return out;
}

Status run(const BenchFlags& flags, char** argv) {
  BITTERN_TRY(check_json_flag(flags.common));
  const auto todo = tasks(flags);
  if (!todo) return todo.status();
  const auto choice = choose_device(flags.common);
  if (!choice) return choice.status();
  pin_threads(argv);
  if (flags.common.threads > 0) set_num_threads(flags.common.threads);

  const bool print = !flags.common.quiet;
  if (print) {
    fmt::print("bittern {} bench{}{}\n", version(),
               flags.quick ? ", QUICK: 1/8 of the elements, few samples; not for the record" : "",
               choice->automatic ? ", device auto: " + name(choice->device) : "");
  }
  Machine machine(flags);
  Progress progress(flags.common.quiet);
  Json rows = Json::array();
  Status refused;
  bool heading = false;
  for (const Task& task : *todo) {
    const AnyDesc& desc = *task.problem.desc;
    const std::string& label = task.problem.label;
    Device device = choice->device;
    auto plan = desc.select(device, task.problem.preference);
    if (!plan && choice->automatic && device.type == Device::Type::cuda) {
      device = {};
      plan = desc.select(device, task.problem.preference);
    }
    Result<Row> row = plan.status();
    double gemm_gflop_s = 0;
    if (plan) {
      progress.show(fmt::format("{} {}", task.op->name(), label));
      const auto meter = machine.meter(device);
      if (!meter) return meter.status();
      if (print && !heading) {
        fmt::print(
            "ratio: the op's minimum traffic per second over the copy's, measured in turn; for "
            "matrix work its FLOP/s over the GEMM's of its dtype\n");
        fmt::print(kLine, "op", "case", "kernel", "ms", "rate", "limit", "ratio", "Melem/s/core");
        heading = true;
      }
      gemm_gflop_s = machine.gemm_gflop_s((*plan)->sku().element);
      row = measure(task.problem, **plan, **meter, gemm_gflop_s, flags);
      progress.clear();
    }
    if (!row) {
      if (row.status().code() != Code::unsupported) return row.status();
      refused = row.status();
      if (print)
        fmt::print("{:<33} {:<31} unsupported: {}\n", task.op->name(), label, refused.message());
      continue;
    }
    const bool host = device.type == Device::Type::cpu, matrix = row->gflop_s > 0;
    if (print) {
      fmt::print(kLine, task.op->name(), label,
                 row->kernel + (row->architecture == "any" ? "" : " " + row->architecture),
                 fmt::format("{:.3f}", 1e3 * row->seconds),
                 matrix ? rate(row->gflop_s, "GF/s") : rate(row->gb_s, "GB/s"),
                 matrix ? rate(gemm_gflop_s, "GF/s") : rate(row->copy_gb_s, "GB/s"),
                 fmt::format("{:.2f}", row->ratio),
                 host ? fmt::format("{:.0f}", 1e-6 * row->elements_s_core) : "-");
      std::fflush(stdout);
    }
    Json j{{"op", task.op->name()},
           {"case", label},
           {"kernel", row->kernel},
           {"architecture", row->architecture},
           {"device", row->device},
           {"problem", fields_json(desc)},
           {"ms", 1e3 * row->seconds},
           {"gb_s", row->gb_s},
           {"limit_gb_s", row->copy_gb_s},
           {"ratio", row->ratio},
           {"ratio_quartiles", {row->ratio_low, row->ratio_high}},
           {"repeat", row->repeat}};
    if (host) j["elements_s_core"] = row->elements_s_core;
    if (matrix) {
      j["gflop_s"] = row->gflop_s;
      j["limit_gflop_s"] = gemm_gflop_s;
    }
    rows.push_back(std::move(j));
  }
  if (rows.empty() && !refused.ok()) return refused;
  if (wants_plan_overhead(flags)) {
    const auto ns = plan_overhead();
    if (!ns) return ns.status();
    if (print) {
      fmt::print("{:<33} {:<31} {:<12} {:>9}\n", "plan overhead", "select + run, 32 elements",
                 "cpu", fmt::format("{:.0f} ns", *ns));
    }
    rows.push_back({{"op", "plan overhead"},
                    {"case", "select + run, 32 elements"},
                    {"kernel", "cpu"},
                    {"architecture", cpu::architecture()},
                    {"device", "cpu"},
                    {"problem", {{"outer_size", 1}, {"axis_size", 32}, {"group_size", 32}}},
                    {"ms", 1e-6 * *ns},
                    {"gb_s", nullptr},
                    {"limit_gb_s", nullptr},
                    {"ratio", nullptr}});
  }
  return write_json(flags.common, {{"machine", machine.json()}, {"rows", rows}});
}

}  // namespace

Verb bench_verb(CLI::App& main, char** argv) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* verb = main.add_subcommand(
      "bench", "each op's speed beside this machine's copy bandwidth and GEMM rate");
  verb->add_option("OP", flags->ops, "these ops alone (default: all)");
  verb->add_option("--filter", flags->filter, "only cases whose \"OP CASE\" contains this text");
  verb->add_option("--repeat", flags->repeat, "samples per case (default: 15, fewer when slow)")
      ->check(integer_in(1, 100000));
  verb->add_flag("--quick", flags->quick, "small problems, few samples: a glance, not a result");
  add_common_flags(*verb, flags->common);
  verb->footer("Example: bittern bench quantize_per_group --threads 2 --json results.json");
  return {verb, [flags, argv] { return run(*flags, argv); }};
}

}  // namespace bittern::cli
