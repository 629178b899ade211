// bittern ops [OP]: which backend does what here, and what an op takes.
#include <fmt/format.h>

#include <algorithm>

#include "cli/cli.h"
#include "cuda/plugin.h"

namespace bittern::cli {
namespace {

struct OpsFlags {
  CommonFlags common;
  std::string op;
};

// One backend of one op on this machine.
struct Support {
  std::string_view backend;
  bool exists = false;              // is there a kernel at all
  std::vector<std::string> dtypes;  // elements it takes here
  std::string architecture;         // of the kernel chosen for the first of them
  std::string why_not;              // when none
  PrecisionGuarantee guarantee;
};

// A kernel that is weaker than the op's contract, for the first dtype that it takes here.
struct Weaker {
  std::string kernel;
  std::vector<std::string> dtypes;  // elements it takes here
  std::string architecture;
  std::string why_not;  // when none
  PrecisionGuarantee guarantee;
};

// What serves a plan that names no kernel, BITTERN_KERNEL considered.
struct Chosen {
  std::string backend, architecture;
  std::string why_not;  // when none
  PrecisionGuarantee guarantee;

  std::string text() const { return backend.empty() ? "none" : backend + " " + architecture; }
};

// The op's first benchmark problem: valid sizes to ask with.
std::unique_ptr<AnyDesc> example(const AnyOp& op) {
  auto problems = bench_problems(op);
  return problems.empty() ? op.make_desc() : std::move(problems.front().desc);
}

// The example with fields of the caller's.
Result<std::unique_ptr<AnyDesc>> example(const AnyOp& op, const Fields& fields) {
  auto desc = example(op);
  for (const auto& [field, text] : fields)
    if (Status s = desc->set(field, std::string_view(text)); !s.ok()) return s;
  if (Status s = desc->check(); !s.ok()) return s;
  return desc;
}

// f(desc) for each dtype an element may have, until it returns true.
template <class F>
void each_element(const AnyOp& op, const F& f) {
  const auto desc = example(op);
  if (!desc->get("element")) {
    f(*desc);
    return;
  }
  for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16})
    if (desc->set("element", static_cast<std::int64_t>(element)).ok() && f(*desc)) return;
}

Support support(const AnyOp& op, std::string_view backend) {
  Support s;
  s.backend = backend;
  s.exists = backend == "ref" || (backend == "cpu" ? op.has_cpu() : op.has_cuda());
  if (!s.exists) return s;
  const Device device{backend == "cuda" ? Device::Type::cuda : Device::Type::cpu, 0};
  const std::string_view kernel = backend == "cuda" ? "" : backend;
  each_element(op, [&](const AnyDesc& desc) {
    const auto plan = desc.select(device, Preference::exact, kernel);
    if (!plan) {
      if (s.why_not.empty()) s.why_not = plan.status().message();
      return false;
    }
    const Sku sku = (*plan)->sku();
    if (s.dtypes.empty()) {
      s.architecture = sku.architecture;
      s.guarantee = (*plan)->precision_guarantee();
    }
    s.dtypes.emplace_back(name(sku.element));
    return false;
  });
  return s;
}

std::vector<Weaker> weaker_kernels(const AnyOp& op) {
  std::vector<Weaker> all;
  for (const Device device : {Device{}, Device{Device::Type::cuda, 0}}) {
    const auto kernels = op.kernels(device);
    if (!kernels) continue;
    for (const KernelInfo& k : *kernels) {
      if (!k.weaker) continue;
      Weaker w;
      w.kernel = k.name;
      // The sizes of any benchmark: the first one's need not be what this kernel is for.
      for (const Problem& problem : bench_problems(op)) {
        for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
          const auto desc = problem.desc->clone();
          (void)desc->set("element", static_cast<std::int64_t>(element));
          const auto plan = desc->select(device, Preference::fastest, k.name);
          if (!plan) {
            if (w.why_not.empty()) w.why_not = plan.status().message();
            continue;
          }
          if (w.dtypes.empty()) {
            w.architecture = (*plan)->sku().architecture;
            w.guarantee = (*plan)->precision_guarantee();
          }
          const std::string text((*plan)->sku().element == element ? name(element) : "");
          if (!text.empty() && std::find(w.dtypes.begin(), w.dtypes.end(), text) == w.dtypes.end())
            w.dtypes.push_back(text);
        }
      }
      all.push_back(std::move(w));
    }
  }
  return all;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}

std::string bound_text(const PrecisionGuarantee& g) {
  if (g.error_norm == ErrorNorm::exact) return "exact";
  return fmt::format("error at most {:.3g} x {}", g.error_bound, name(g.error_norm));
}

std::string guarantee_text(const PrecisionGuarantee& g) {
  return g.same_bits_on_all_backends     ? "same bits on all backends"
         : g.bit_stable_on_same_hardware ? "same bits on the same hardware"
         : g.deterministic               ? "same bits on every run"
                                         : "may vary from run to run";
}

std::string cell(const Support& s) {
  return !s.exists ? "unsupported" : s.dtypes.empty() ? "not here" : join(s.dtypes);
}

// For the first dtype that is taken; with `--device auto`, by the GPU or else the CPU.
Chosen chosen(const AnyOp& op, const DeviceChoice& choice) {
  Chosen chosen;
  std::vector<Device> devices = {choice.device};
  if (choice.automatic && choice.device.type == Device::Type::cuda) devices.emplace_back();
  for (const Device device : devices) {
    each_element(op, [&](const AnyDesc& desc) {
      const auto plan = desc.select(device, Preference::exact);
      if (!plan) {
        if (chosen.why_not.empty()) chosen.why_not = plan.status().message();
        return false;
      }
      const Sku sku = (*plan)->sku();
      chosen.backend = sku.backend;
      chosen.architecture = sku.architecture;
      chosen.guarantee = (*plan)->precision_guarantee();
      return true;
    });
    if (!chosen.backend.empty()) break;
  }
  return chosen;
}

Json guarantee_json(const PrecisionGuarantee& g) {
  return {{"math_precision", name(g.math_precision)},
          {"accumulator", name(g.accumulator)},
          {"deterministic", g.deterministic},
          {"bit_stable_on_same_hardware", g.bit_stable_on_same_hardware},
          {"same_bits_on_all_backends", g.same_bits_on_all_backends},
          {"error_norm", name(g.error_norm)},
          {"error_bound", g.error_bound}};
}

Json support_json(const Support& s) {
  Json json{{"backend", s.backend}, {"exists", s.exists}, {"dtypes", s.dtypes}};
  if (s.dtypes.empty()) {
    if (s.exists) json["why_not"] = s.why_not;
    return json;
  }
  json["architecture"] = s.architecture;
  json["guarantee"] = guarantee_json(s.guarantee);
  return json;
}

Json weaker_json(const Weaker& w) {
  Json json{{"kernel", w.kernel}, {"dtypes", w.dtypes}};
  if (w.dtypes.empty()) {
    json["why_not"] = w.why_not;
    return json;
  }
  json["architecture"] = w.architecture;
  json["guarantee"] = guarantee_json(w.guarantee);
  return json;
}

std::vector<std::string> operand_flags(const OperandInfo& o) {
  std::vector<std::string> flags;
  if ((o.expected.flags & Operand::kOptional) != 0) flags.emplace_back("optional");
  if ((o.expected.flags & Operand::kRowStride) != 0) flags.emplace_back("row stride");
  if ((o.expected.flags & Operand::kStrided) != 0) flags.emplace_back("any strides");
  if ((o.expected.flags & Operand::kExtra) != 0) flags.emplace_back("extra");
  if ((o.expected.flags & Operand::kInPlace) != 0) flags.emplace_back("in place");
  if ((o.expected.flags & Operand::kInOut) != 0) flags.emplace_back("read and written");
  return flags;
}

std::string default_text(const FieldInfo& f) {
  if (!f.choices.empty()) return std::string(f.choices[static_cast<std::size_t>(f.default_value)]);
  return f.real ? bittern::field_text(f.default_real) : std::to_string(f.default_value);
}

// " --dim=64 ...": the fields that are not what they are by default.
std::string flags_text(const AnyDesc& desc) {
  std::string text;
  for (const FieldInfo& f : desc.op().fields())
    if (const std::string value = field_text(desc, f); value != default_text(f))
      text += fmt::format(" --{}={}", f.name, value);
  return text;
}

// All operands, those that the problem has as it has them.
std::vector<OperandInfo> operands_of(const AnyDesc& desc) {
  std::vector<OperandInfo> all = desc.op().operands();
  for (const OperandInfo& now : desc.operands())
    for (OperandInfo& o : all)
      if (o.name == now.name) o = now;
  return all;
}

bool has(const AnyDesc& desc, std::string_view operand) {
  const auto operands = desc.operands();
  return std::any_of(operands.begin(), operands.end(), [&](const OperandInfo& o) {
    return o.name == operand && (o.expected.flags & Operand::kUnread) == 0;
  });
}

Json op_json(const AnyDesc& desc, const std::vector<Support>& all,
             const std::vector<Weaker>& weaker, const Chosen& here) {
  const AnyOp& op = desc.op();
  Json json{{"op", op.name()}, {"category", op.category()}};
  if (here.backend.empty()) {
    json["chosen_here"] = {{"backend", nullptr}, {"why_not", here.why_not}};
  } else {
    json["chosen_here"] = {{"backend", here.backend}, {"architecture", here.architecture}};
  }
  for (const Support& s : all) json["backends"].push_back(support_json(s));
  json["weaker_kernels"] = Json::array();
  for (const Weaker& w : weaker) json["weaker_kernels"].push_back(weaker_json(w));
  for (const FieldInfo& f : op.fields()) {
    Json field{{"name", f.name}, {"default", nullptr}, {"help", f.help}};
    if (f.real) {
      field["default"] = f.default_real;
    } else if (f.choices.empty()) {
      field["default"] = f.default_value;
    } else {
      field["default"] = default_text(f);
      field["choices"] = f.accepted;
    }
    json["fields"].push_back(field);
  }
  for (const OperandInfo& o : operands_of(desc)) {
    std::vector<std::string> axes;
    for (int i = 0; i < o.expected.shape.rank; ++i) axes.emplace_back(o.expected.shape.name(i));
    json["operands"].push_back({{"name", o.name},
                                {"output", o.output},
                                {"dtype", name(o.expected.dtype)},
                                {"rank", o.expected.shape.rank},
                                {"axes", axes},
                                {"flags", operand_flags(o)}});
  }
  return json;
}

void print_op(const AnyDesc& desc, const Fields& fields, const std::vector<Support>& all,
              const std::vector<Weaker>& weaker, const Chosen& here) {
  const AnyOp& op = desc.op();
  fmt::print("{} ({})\n\nfields\n", op.name(), op.category());
  for (const FieldInfo& f : op.fields()) {
    std::string choices;
    if (!f.choices.empty() && !f.is_dtype) {  // the help names dtypes
      for (const std::string_view c : f.choices) choices.append(" ").append(c);
      choices = ":" + choices;
    }
    fmt::print("  --{:<19} {:>8}  {}{}\n", f.name, default_text(f), f.help, choices);
  }
  fmt::print("\noperands, for{}\n", flags_text(desc));
  std::size_t width = 0;
  for (const OperandInfo& o : operands_of(desc))
    width = std::max(width, o.expected.shape.names_str().size());
  for (const OperandInfo& o : operands_of(desc)) {
    std::string flags;
    for (const std::string& f : operand_flags(o)) flags += (flags.empty() ? "" : ", ") + f;
    const bool used = has(desc, o.name);
    fmt::print("  {:<3}  {:<15} {:<4}  {:<{}}  {:<16} {}\n", o.output ? "out" : "in", o.name,
               name(o.expected.dtype), o.expected.shape.names_str(), width,
               used ? o.expected.shape.str() : "not for these", used ? flags : "");
  }
  fmt::print("\nkernels\n");
  for (const Support& s : all) {
    if (!s.exists) {
      fmt::print("  {:<4}  none\n", s.backend);
    } else if (s.dtypes.empty()) {
      fmt::print("  {:<4}  not here: {}\n", s.backend, s.why_not);
    } else {
      fmt::print("  {:<4}  {:<8} {:<18} math {}, sums {}, {}, {}{}\n", s.backend, s.architecture,
                 join(s.dtypes), name(s.guarantee.math_precision), name(s.guarantee.accumulator),
                 guarantee_text(s.guarantee), bound_text(s.guarantee),
                 s.backend == here.backend ? "  <- chosen here" : "");
    }
  }
  for (const Weaker& w : weaker) {
    if (w.dtypes.empty()) {
      fmt::print("  {}  not here: {}\n", w.kernel, w.why_not);
    } else {
      fmt::print("  {}  {} {}, math {}, sums {}, {}, {} (preference fastest)\n", w.kernel,
                 w.architecture, join(w.dtypes), name(w.guarantee.math_precision),
                 name(w.guarantee.accumulator), guarantee_text(w.guarantee),
                 bound_text(w.guarantee));
    }
  }
  if (here.backend.empty()) fmt::print("  none is chosen here: {}\n", here.why_not);
  auto small = small_problem(op);
  bool fits = true;
  for (const auto& [field, text] : fields)
    fits = fits && small->set(field, std::string_view(text)).ok();
  const std::string flags = flags_text(fits && small->check().ok() ? *small : desc);
  fmt::print("\nExample: bittern check {}{}\n", op.name(), flags);
}

Status run(const OpsFlags& flags, const std::vector<std::string>& rest) {
  BITTERN_TRY(check_json_flag(flags.common));
  const auto fields = parse_fields("ops", rest);
  if (!fields) return fields.status();
  if (flags.op.empty() && !fields->empty()) {
    return invalid("ops: --" + fields->front().first +
                   ": a field of no op, expected bittern ops OP --field=value");
  }
  const auto choice = choose_device(flags.common);
  if (!choice) return choice.status();
  std::vector<const AnyOp*> ops(all_ops().begin(), all_ops().end());
  if (!flags.op.empty()) {
    const auto op = find_op(flags.op);
    if (!op) return op.status();
    ops = {*op};
  }
  Json json = Json::array();
  if (!flags.common.quiet && flags.op.empty()) {
    fmt::print("{:<33} {:<17} {:<17} {:<17} {:<13} {}\n", "op", "ref", "cpu", "cuda", "chosen here",
               "guarantee");
  }
  bool cuda_missing = false;
  std::string none;  // why the first op without a choice has none
  for (const AnyOp* op : ops) {
    const std::vector<Support> all = {support(*op, "ref"), support(*op, "cpu"),
                                      support(*op, "cuda")};
    const std::vector<Weaker> weaker = weaker_kernels(*op);
    const Chosen here = chosen(*op, *choice);
    if (none.empty() && here.backend.empty()) none = here.why_not;
    const auto desc = example(*op, *fields);
    if (!desc) return desc.status();
    json.push_back(op_json(**desc, all, weaker, here));
    cuda_missing = cuda_missing || (all[2].exists && all[2].dtypes.empty());
    if (flags.common.quiet) continue;
    if (!flags.op.empty()) {
      print_op(**desc, *fields, all, weaker, here);
    } else {
      fmt::print("{:<33} {:<17} {:<17} {:<17} {:<13} {}\n", op->name(), cell(all[0]), cell(all[1]),
                 cell(all[2]), here.text(),
                 here.backend.empty() ? "" : guarantee_text(here.guarantee));
      for (const Weaker& w : weaker) {
        if (!w.dtypes.empty())
          fmt::print("  with preference fastest also {}: {}, {}\n", w.kernel, join(w.dtypes),
                     bound_text(w.guarantee));
      }
    }
  }
  if (!flags.common.quiet && flags.op.empty()) {
    if (cuda_missing) {
      if (const auto plugin = cuda_plugin(0); !plugin)
        fmt::print("no CUDA here: {}\n", plugin.status().message());
    }
    if (!none.empty()) fmt::print("none: {}\n", none);
    fmt::print("bittern ops OP shows an op's fields and operands.\n");
  }
  return write_json(flags.common, json);
}

}  // namespace

Verb ops_verb(CLI::App& main) {
  auto flags = std::make_shared<OpsFlags>();
  CLI::App* verb =
      main.add_subcommand("ops", "list the ops, their dtypes, and the kernel that runs each");
  verb->add_option("OP", flags->op, "show this op's fields, operands and kernels");
  add_common_flags(*verb, flags->common);
  verb->footer(
      "With --field=value after OP, its operands for that field.\n"
      "Example: bittern ops quantize_per_group --element bf16");
  return {verb, [flags, verb] { return run(*flags, verb->remaining()); }, true};
}

}  // namespace bittern::cli
