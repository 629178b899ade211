// bittern bench [OP...]: compares every op with the machine's limits, measured in the same run.
//
// An op is compared with the copy, with reading alone, or with the multiply-adds that the machine
// does at best. Samples of that limit and of the op alternate, because a machine's bandwidth may
// change during a run: copy, op, copy, op, ... copy. A sample's ratio compares the op with the
// copies before and after it, and the median of the samples is reported. On a GPU a sample is a
// graph of many calls that use several sets of operands in turn, so that no call finds its operands
// in the L2.
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>

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
  int repeat = 0;           // 0: by the time a case takes
  std::int64_t shrink = 0;  // 0: 1, or kQuickShrink when quick
  bool quick = false;
};

// Quick problems have 1/8 of the elements. Its copy is still larger than most caches, so that ops
// find their operands in memory as in a full run.
constexpr std::int64_t kQuickShrink = 8;
constexpr std::size_t kCopyBytes = std::size_t{128} << 20, kQuickCopyBytes = std::size_t{64} << 20;
constexpr int kGemmSize = 2048, kQuickGemmSize = 1024;
constexpr int kCudaCopyCaches = 16, kQuickCudaCopyCaches = 8;
constexpr int kCudaGemmSize = 8192, kQuickCudaGemmSize = 4096;
constexpr int kRepeat = 15, kQuickRepeat = 5, kLeast = 3;
constexpr double kSecondsPerCase = 4, kQuickSecondsPerCase = 0.3;

std::int64_t shrink_factor(const BenchFlags& flags) {
  return flags.shrink > 0 ? flags.shrink : flags.quick ? kQuickShrink : 1;
}

// OpenMP reads these when it is loaded, so the program restarts itself with them. A user's own
// settings are kept.
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
  double gb_s = 0, limit_gb_s = 0, traffic_ratio = 0;  // the copy's or reading's; 0: not measured
  double gflop_s = 0, limit_gflop_s = 0, gflop_ratio = 0;  // 0: not a matrix op, or no limit
  bool by_gflops = false;                                  // which of the two `ratio` is
  double ratio = 0, ratio_low = 0, ratio_high = 0;         // median and quartiles
  double elements_s_core = 0;
  int repeat = 0, calls = 0, sets = 0;
  Limit limit = Limit::copy;
};

// As JSON has them.
constexpr const char* kLimitNames[] = {"copy", "read", "f32", "bf16", "int8"};

// A GPU multiplies much faster than it moves data, so all ops are compared with the copy there.
Limit limit_of(const Problem& problem, const Meter& meter) {
  if (!meter.host()) return Limit::copy;
  switch (problem.limit) {
    case oracle::BenchLimit::read: return Limit::read;
    case oracle::BenchLimit::f32: return Limit::f32_peak;
    case oracle::BenchLimit::bf16: return Limit::bf16_peak;
    case oracle::BenchLimit::int8: return Limit::int8_peak;
    case oracle::BenchLimit::usual: break;
  }
  return Limit::copy;
}

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
  const Limit limit = limit_of(problem, meter);
  const bool is_peak = limit != Limit::copy && limit != Limit::read;
  const auto operands = make_operands(problem, meter, limit);
  if (!operands) return operands.status();
  const auto scratch = meter.allocate(std::max<std::size_t>(plan.workspace_bytes(), 64));
  if (!scratch) return scratch.status();
  const int sets = static_cast<int>(operands->sets.size());
  const auto work = [&](int call) {
    return plan.run(operands->sets[static_cast<std::size_t>(call % sets)], meter.stream(),
                    Workspace{*scratch, plan.workspace_bytes()});
  };
  const auto first = meter.time(work, sets);
  if (!first) return first.status();
  auto most = meter.rate(limit);
  if (!most) return most.status();
  // Each set as often as any other.
  const int calls = (meter.calls(*first) + sets - 1) / sets * sets;
  int repeat = flags.repeat;
  if (repeat == 0) {
    const double budget = flags.quick ? kQuickSecondsPerCase : kSecondsPerCase;
    const double fit = budget / (calls * *first + meter.seconds(limit));
    repeat =
        static_cast<int>(std::clamp<double>(fit, kLeast, flags.quick ? kQuickRepeat : kRepeat));
  }
  const double gigaflops = 1e-9 * problem.desc->flops();
  const double gigabytes = 1e-9 * static_cast<double>(operands->bytes);
  const Sku sku = plan.sku();
  Row row{std::string(sku.kernel), std::string(sku.architecture), name(meter.device())};
  row.limit = limit;
  const bool by_gemm = limit == Limit::copy && gigaflops > 0 && gemm_gflop_s > 0 && meter.host();
  row.by_gflops = by_gemm || is_peak;
  std::vector<double> times, limits = {*most}, traffic_ratios, ratios;
  for (int i = 0; i < repeat; ++i) {
    const auto t = meter.time(work, calls);
    if (!t) return t.status();
    most = meter.rate(limit);
    if (!most) return most.status();
    // What takes half the time counts half: the mean of the times, not of the rates.
    const double around = 2 / (1 / limits.back() + 1 / *most);
    times.push_back(*t);
    limits.push_back(*most);
    if (!is_peak) traffic_ratios.push_back(gigabytes / *t / around);
    ratios.push_back(is_peak   ? gigaflops / *t / around
                     : by_gemm ? gigaflops / *t / gemm_gflop_s
                               : traffic_ratios.back());
  }
  row.seconds = median(times);
  row.gb_s = gigabytes / row.seconds;
  row.limit_gb_s = is_peak ? 0 : median(limits);
  row.traffic_ratio = is_peak ? 0 : median(traffic_ratios);
  row.gflop_s = gigaflops / row.seconds;
  row.limit_gflop_s = is_peak                                 ? median(limits)
                      : limit == Limit::copy && gigaflops > 0 ? gemm_gflop_s
                                                              : 0;
  row.gflop_ratio = row.limit_gflop_s > 0 ? row.gflop_s / row.limit_gflop_s : 0;
  row.ratio = median(ratios);
  row.ratio_low = quartile(ratios, 0.25);
  row.ratio_high = quartile(ratios, 0.75);
  row.elements_s_core =
      static_cast<double>(problem.desc->elements()) / row.seconds / std::max(num_threads(), 1);
  row.repeat = repeat;
  row.calls = calls;
  row.sets = sets;
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
      const int repeat = flags_.quick ? 5 : 9;
      auto made =
          cuda ? cuda_meter(device.index, flags_.quick ? kQuickCudaCopyCaches : kCudaCopyCaches,
                            cuda_gemm_size(), repeat, cuda_limits_)
               : cpu_meter(flags_.quick ? kQuickCopyBytes : kCopyBytes, gemm_size(), repeat,
                           limits_);
      if (!made) return made.status();
      slot = std::move(*made);
      if (!flags_.common.quiet) print(device);
    }
    return slot.get();
  }

  // That of the element's dtype; of f32 where no other was measured, on a GPU of bf16.
  double gemm_gflop_s(Device device, DType element) const {
    if (device.type == Device::Type::cuda) return cuda_limits_.gemm_bf16_gflop_s;
    const bool bf16 = element == DType::bf16 && limits_.gemm_bf16_gflop_s > 0;
    return bf16 ? limits_.gemm_bf16_gflop_s : limits_.gemm_gflop_s;
  }

  Json json() const {
    Json j{{"cpu", cpu_model()},    {"cores", omp_get_num_procs()},   {"threads", num_threads()},
           {"pinned", pinned()},    {"isa", cpu::architecture()},     {"version", version()},
           {"quick", flags_.quick}, {"shrink", shrink_factor(flags_)}};
    if (cpu_) {
      j["copy_gb_s"] = std::max(limits_.streaming_gb_s, limits_.memcpy_gb_s);
      j["streaming_gb_s"] = limits_.streaming_gb_s;
      j["memcpy_gb_s"] = limits_.memcpy_gb_s;
      j["read_gb_s"] = limits_.read_gb_s;
      j["gemm_gflop_s"] = limits_.gemm_gflop_s;
      j["gemm_bf16_gflop_s"] = limits_.gemm_bf16_gflop_s;
      j["f32_gflop_s"] = limits_.f32_gflop_s;
      j["bf16_gflop_s"] = limits_.bf16_gflop_s;
      j["int8_gflop_s"] = limits_.int8_gflop_s;
    }
    if (cuda_) {
      const CudaLimits& c = cuda_limits_;
      j["cuda"] = {{"name", c.name},
                   {"multiprocessors", c.multiprocessors},
                   {"l2_bytes", c.l2_bytes},
                   {"copy_bytes", cuda_->copy_bytes()},
                   {"copy_gb_s", std::max(c.memcpy_gb_s, c.kernel_gb_s)},
                   {"memcpy_gb_s", c.memcpy_gb_s},
                   {"kernel_copy_gb_s", c.kernel_gb_s},
                   {"gemm_bf16_gflop_s", c.gemm_bf16_gflop_s}};
    }
    return j;
  }

 private:
  static bool pinned() { return omp_get_proc_bind() != omp_proc_bind_false; }
  int gemm_size() const { return flags_.quick ? kQuickGemmSize : kGemmSize; }
  int cuda_gemm_size() const { return flags_.quick ? kQuickCudaGemmSize : kCudaGemmSize; }

  void print(Device device) const {
    if (device.type == Device::Type::cuda) {
      const CudaLimits& c = cuda_limits_;
      fmt::print("{}: {}, {} multiprocessors, {} MiB of L2\n", name(device), c.name,
                 c.multiprocessors, c.l2_bytes >> 20);
      fmt::print(
          "limits: copy kernel {:.1f} GB/s, cudaMemcpy {:.1f} GB/s (bytes read plus written, {} "
          "MiB), {}\n",
          c.kernel_gb_s, c.memcpy_gb_s, cuda_->copy_bytes() >> 20,
          c.no_gemm.empty() ? fmt::format("GEMM bf16 {:.0f} GFLOP/s ({}^3)", c.gemm_bf16_gflop_s,
                                          cuda_gemm_size())
                            : "no GEMM rate (" + c.no_gemm + ")");
      return;
    }
    fmt::print("{}, {} cores, {} threads{}, {}\n", cpu_model(), omp_get_num_procs(), num_threads(),
               pinned() ? " (pinned)" : " (not pinned)", cpu::architecture());
    fmt::print(
        "limits: streaming copy {:.1f} GB/s, memcpy {:.1f} GB/s (bytes read plus written), "
        "reading alone {:.1f} GB/s, multiply-adds f32 {:.0f}{}, int8 {:.0f} GFLOP/s, {}\n",
        limits_.streaming_gb_s, limits_.memcpy_gb_s, limits_.read_gb_s, limits_.f32_gflop_s,
        limits_.bf16_gflop_s > 0 ? fmt::format(", bf16 {:.0f}", limits_.bf16_gflop_s) : "",
        limits_.int8_gflop_s,
        limits_.gemm_gflop_s == 0
            ? "no GEMM rate (built without oneDNN)"
            : fmt::format("GEMM f32 {:.0f}{} GFLOP/s ({}^3)", limits_.gemm_gflop_s,
                          limits_.gemm_bf16_gflop_s > 0
                              ? fmt::format(", bf16 {:.0f}", limits_.gemm_bf16_gflop_s)
                              : "",
                          gemm_size()));
  }

  const BenchFlags& flags_;
  CpuLimits limits_;
  CudaLimits cuda_limits_;
  std::unique_ptr<Meter> cpu_, cuda_;
};

constexpr const char* kLine = "{:<33} {:<31} {:<12} {:>9} {:>10} {:>10} {:>6} {:>12}\n";

void print_heading(Device::Type device) {
  const bool cuda = device == Device::Type::cuda;
  fmt::print(
      "ratio: the op's minimum traffic per second over the copy's, measured in turn; {}\n",
      cuda ? "of GEMM: its FLOP/s over the bf16 GEMM's, for matrix work"
           : "for matrix work its FLOP/s over the GEMM's of its dtype, or what the case names");
  fmt::print(kLine, "op", "case", "kernel", "ms", "rate", "limit", "ratio",
             cuda ? "of GEMM" : "Melem/s/core");
}

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

Result<std::vector<Task>> tasks(const BenchFlags& flags, const DeviceChoice& choice) {
  std::vector<const AnyOp*> ops;
  for (const std::string& name : flags.ops) {
    const auto op = find_op(name);
    if (!op) return op.status();
    ops.push_back(*op);
  }
  if (ops.empty()) ops.assign(all_ops().begin(), all_ops().end());
  std::vector<Task> out;
  bool too_large = false;
  for (const AnyOp* op : ops) {
    for (Problem& problem : bench_problems(*op)) {
      const std::string title = std::string(op->name()).append(" ") + problem.label;
      if (title.find(flags.filter) == std::string::npos) continue;
      if (problem.gpu_only && choice.device.type == Device::Type::cpu) {
        too_large = true;
        continue;
      }
      if (shrink_factor(flags) > 1) shrink(*problem.desc, shrink_factor(flags));
      out.push_back({op, std::move(problem)});
    }
  }
  if (out.empty() && too_large && !wants_plan_overhead(flags)) {
    return invalid("bench: the cases asked for are of a GPU's size, expected --device cuda");
  }
  if (out.empty() && !wants_plan_overhead(flags)) {
    return invalid("bench: --filter: " + flags.filter +
                   " is in no case's name, expected part of \"OP CASE\" as bench prints them");
  }
  return out;
}

Status run(const BenchFlags& flags, char** argv) {
  pin_threads(argv);  // first: the restarted program needs the original standard output
  BITTERN_TRY(check_json_flag(flags.common));
  const auto choice = choose_device(flags.common);
  if (!choice) return choice.status();
  const auto todo = tasks(flags, *choice);
  if (!todo) return todo.status();
  BITTERN_TRY(use_threads(flags.common));

  const bool print = !flags.common.quiet;
  if (print) {
    const std::int64_t less = shrink_factor(flags);
    fmt::print("bittern {} bench{}{}{}\n", version(),
               flags.quick ? ", QUICK: few samples, not for the record" : "",
               less > 1 ? fmt::format(", 1/{} of the elements", less) : "",
               choice->automatic ? ", device auto: " + name(choice->device) : "");
  }
  Machine machine(flags);
  Progress progress(flags.common.quiet);
  Json rows = Json::array();
  Status refused;
  std::optional<Device::Type> heading;
  for (const Task& task : *todo) {
    const AnyDesc& desc = *task.problem.desc;
    const std::string& label = task.problem.label;
    Device device = choice->device;
    auto plan = desc.select(device, task.problem.preference);
    if (!plan && choice->automatic && !task.problem.gpu_only && device.type == Device::Type::cuda) {
      device = {};
      plan = desc.select(device, task.problem.preference);
    }
    Result<Row> row = plan.status();
    if (plan) {
      progress.show(fmt::format("{} {}", task.op->name(), label));
      const auto meter = machine.meter(device);
      if (!meter) return meter.status();
      if (print && heading != device.type) {
        print_heading(device.type);
        heading = device.type;
      }
      const double gemm_gflop_s = machine.gemm_gflop_s(device, (*plan)->sku().element);
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
    const bool host = device.type == Device::Type::cpu;
    if (print) {
      fmt::print(kLine, task.op->name(), label,
                 row->kernel + (row->architecture == "any" ? "" : " " + row->architecture),
                 fmt::format("{:.3f}", 1e3 * row->seconds),
                 row->by_gflops ? rate(row->gflop_s, "GF/s") : rate(row->gb_s, "GB/s"),
                 row->by_gflops ? rate(row->limit_gflop_s, "GF/s") : rate(row->limit_gb_s, "GB/s"),
                 fmt::format("{:.2f}", row->ratio),
                 host                   ? fmt::format("{:.0f}", 1e-6 * row->elements_s_core)
                 : row->gflop_ratio > 0 ? fmt::format("{:.3f}", row->gflop_ratio)
                                        : "-");
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
           {"limit", kLimitNames[static_cast<std::size_t>(row->limit)]},
           {"ratio", row->ratio},
           {"ratio_quartiles", {row->ratio_low, row->ratio_high}},
           {"repeat", row->repeat},
           {"calls", row->calls},
           {"sets", row->sets}};
    if (host) j["elements_s_core"] = row->elements_s_core;
    if (row->gflop_s > 0) j["gflop_s"] = row->gflop_s;
    if (row->limit_gb_s > 0) {
      j["limit_gb_s"] = row->limit_gb_s;
      j["traffic_ratio"] = row->traffic_ratio;
    }
    if (row->gflop_ratio > 0) {
      j["limit_gflop_s"] = row->limit_gflop_s;
      j[row->limit == Limit::copy ? "gemm_ratio" : "peak_ratio"] = row->gflop_ratio;
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
      "bench", "time each op and compare it with this machine's copy bandwidth and GEMM rate");
  verb->add_option("OP", flags->ops, "time only these ops (default: all)");
  verb->add_option("--filter", flags->filter, "time only cases whose \"OP CASE\" contains TEXT")
      ->option_text("TEXT");
  verb->add_option("--repeat", flags->repeat,
                   "take N samples of each case (default: 15, fewer for slow cases)")
      ->option_text("N")
      ->check(integer_in(1, 100000));
  verb->add_option("--shrink", flags->shrink,
                   "use 1/N of each case's elements (default: 1, or 8 with --quick)")
      ->option_text("N")
      ->check(integer_in(1, 1 << 20));
  verb->add_flag("--quick", flags->quick,
                 "use small problems and few samples: a first look, not a result");
  add_common_flags(*verb, flags->common);
  verb->footer("Example: bittern bench quantize_per_group --threads 2 --json results.json");
  return {verb, [flags, argv] { return run(*flags, argv); }};
}

}  // namespace bittern::cli
