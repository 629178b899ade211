// bittern check [OP] [--field=value ...]: every kernel of this machine against ref, bit for bit or
// within the bound that it declares.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cli/cli.h"
#include "oracle/oracle.h"

namespace bittern::cli {
namespace {

struct CheckFlags {
  CommonFlags common;
  std::string op;
  std::uint64_t seed = 1;
  bool quick = false;
};

Status run(const CheckFlags& flags, const std::vector<std::string>& rest) {
  BITTERN_TRY(check_json_flag(flags.common));
  const auto fields = parse_fields("check", rest);
  if (!fields) return fields.status();
  if (flags.op.empty() && !fields->empty()) {
    return invalid("check: --" + fields->front().first +
                   ": a field of no op, expected bittern check OP --field=value");
  }
  std::vector<const AnyOp*> ops(all_ops().begin(), all_ops().end());
  if (!flags.op.empty()) {
    const auto op = find_op(flags.op);
    if (!op) return op.status();
    ops = {*op};
  }
  if (!fields->empty()) {  // refused before anything is printed
    const auto desc = ops.front()->make_desc();
    for (const auto& [field, text] : *fields) BITTERN_TRY(desc->set(field, std::string_view(text)));
    BITTERN_TRY(desc->check());
  }
  const auto choice = choose_device(flags.common);
  if (!choice) return choice.status();
  const bool cuda = choice->device.type == Device::Type::cuda;

  oracle::Settings settings;
  settings.seed = flags.seed;
  settings.cpu = choice->automatic || !cuda;
  settings.cuda = cuda;
  settings.cuda_index = choice->device.index;
  if (flags.quick) {
    settings.every = 8;
    settings.threads = {2};
  }
  BITTERN_TRY(use_threads(flags.common));
  if (flags.common.threads > 0) settings.threads = {flags.common.threads};

  if (!flags.op.empty() && !settings.cpu && !ops.front()->has_cuda()) {
    return unsupported(fmt::format("{}: no kernel on {}", flags.op, name(choice->device)));
  }
  const bool print = !flags.common.quiet;
  if (print) {
    std::string on = settings.cpu ? "cpu" : "";
    if (cuda) on += (on.empty() ? "" : " and ") + name(choice->device);
    fmt::print("every kernel of {} against ref: bit for bit, or within its declared bound{}\n", on,
               flags.quick ? " (quick: one case in 8)" : "");
    fmt::print("{:<33} {:>9} {:>9} {:>8}\n", "op", "compared", "failures", "seconds");
  }
  Progress progress(flags.common.quiet);
  Json rows = Json::array();
  std::size_t failures = 0;
  for (const AnyOp* op : ops) {
    if (!settings.cpu && !op->has_cuda()) {  // nothing to compare
      if (print) fmt::print("{:<33} {:>9}\n", op->name(), "unsupported");
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    oracle::Report report;
    if (fields->empty()) {
      settings.progress = [&](std::size_t done, std::size_t total) {
        progress.show(fmt::format("{} {}/{}", op->name(), done, total));
      };
      report = oracle::check_op(op->name(), settings);
    } else {
      auto one = oracle::check_flags(op->name(), *fields, settings);
      if (!one) return one.status();
      report = std::move(*one);
    }
    progress.clear();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    failures += report.failures.size();
    if (print) {
      fmt::print("{:<33} {:>9} {:>9} {:>8.1f}\n", op->name(), report.compared,
                 report.failures.size(), took.count());
      std::fflush(stdout);
    }
    Json kernels = Json::object();
    for (const auto& [kernel, seen] : report.kernels) {
      Json row{{"compared", seen.compared}};
      if (seen.bounded) row["share_of_bound"] = seen.worst;
      if (seen.refused > 0) row["layouts_refused"] = seen.refused;
      if (seen.compared == 0) row["why_not"] = seen.why_not;
      kernels[kernel] = row;
      if (!print) continue;
      if (seen.compared == 0) {
        fmt::print("  {}: not compared: {}\n", kernel, seen.why_not);
      } else if (seen.bounded) {
        fmt::print("  {}: errors up to {:.2f} of its declared bound, in {} runs\n", kernel,
                   seen.worst, seen.compared);
      }
    }
    for (const std::string& failure : report.failures) tell(failure + "\n");
    rows.push_back({{"op", op->name()},
                    {"compared", report.compared},
                    {"kernels", kernels},
                    {"failures", report.failures},
                    {"seconds", took.count()}});
  }
  BITTERN_TRY(write_json(flags.common, rows));
  if (failures == 0) return {};
  return Status(Code::internal,
                fmt::format("check: {} failures, expected none; each line above ends with the "
                            "command that reproduces it",
                            failures));
}

}  // namespace

Verb check_verb(CLI::App& main) {
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* verb =
      main.add_subcommand("check", "compare every kernel on this machine with the reference");
  verb->add_option("OP", flags->op, "check only this op (default: all)");
  verb->add_option("--seed", flags->seed, "make the input data from seed N (default: 1)")
      ->option_text("N")
      ->check(seed_check());
  verb->add_flag("--quick", flags->quick, "check one case in 8");
  add_common_flags(*verb, flags->common);
  verb->footer(
      "Kernels that meet the op's contract must give the same bits. Weaker ones (bittern ops OP\n"
      "lists them) must be within the error bound that they declare.\n"
      "--FIELD=VALUE after OP checks one problem of that op (bittern ops OP lists its fields).\n"
      "Example: bittern check quantize_per_group --outer_size=5 --axis_size=96 --group_size=32");
  return {verb, [flags, verb] { return run(*flags, verb->remaining()); }, true};
}

}  // namespace bittern::cli
