// The oracle's templates. oracle.cc instantiates them for every op; the oracle's own test uses them
// with kernels that are wrong on purpose.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>

#include "core/scratch.h"
#include "oracle/oracle.h"

namespace bittern::oracle {

// The shape and strides of an operand's view; `which` one of the op's it is.
void lay_out(const Operand& expected, const Layout& layout, std::size_t which, Store& s);
// An operand's own random numbers: they follow from its name, not from its place among the others,
// nor from which of these are left out.
Rng numbers_of(std::string_view operand, std::uint64_t seed);
// Random content for a float, integer or code operand, before aim().
void fill(const ConstView& v, Rng& rng);
// NaN payloads are not promised: every NaN of a float output becomes the same one.
void canonicalise_nans(Store& store);
// Where two stores differ, as text: "q[5,17]: 3, expected 2", or an overrun, or an input changed.
std::string difference(const Store& got, const Store& want);

template <class Op>
Problem<Op> make_problem(const typename Op::Desc& desc, std::uint64_t seed, const Layout& layout,
                         bool aimed) {
  Problem<Op> p{desc, {}, {}, {}};
  int optional = 0;
  // Two visits: vectors of stores must not move once views point into them.
  Op::operands(desc, p.args, [&](const char* n, auto& v, const Operand& expected) {
    Store& s = p.stores.emplace_back();
    s.name = n;
    s.expected = expected;
    s.output = std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>;
    if ((expected.flags & Operand::kUnread) != 0) {
      s.present = false;
    } else if ((expected.flags & Operand::kOptional) != 0 && expected.shape.numel() != 0) {
      s.present = (layout.left_out >> optional++ & 1) == 0;
    }
    lay_out(expected, layout, p.stores.size(), s);
    const std::size_t size = size_of(expected.dtype);
    s.offset = kCanary + (layout.unaligned ? size : 0);
    std::int64_t span = s.shape.numel() == 0 ? 0 : 1;
    for (int i = 0; i < s.shape.rank && span > 0; ++i) span += (s.shape[i] - 1) * s.stride[i];
    s.bytes.assign(s.offset + static_cast<std::size_t>(span) * size + kCanary, kPoison);
  });
  std::size_t i = 0;
  int pair = 0;
  Op::operands(desc, p.args, [&](const char* n, auto& v, const Operand& expected) {
    Store* s = &p.stores[i++];
    v.dtype = expected.dtype;
    v.shape = s->shape;
    v.stride = s->stride;
    if (!s->present) return;
    if (s->output && (expected.flags & Operand::kInPlace) != 0) {
      for (Store& in : p.stores) {
        const bool partner =
            !in.output && in.present && (in.expected.flags & Operand::kInPlace) != 0 &&
            in.expected.dtype == expected.dtype && in.expected.shape == expected.shape;
        if (partner && pair++ == layout.in_place && p.shared_input.empty()) {
          p.shared_input = in.name;
          s->present = false;
          s = &in;
        }
      }
    }
    v.data = s->bytes.data() + s->offset;
    constexpr bool kOutput = std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>;
    if (!kOutput || (expected.flags & Operand::kInOut) != 0) {
      Rng rng = numbers_of(n, seed);
      fill(v, rng);
    }
  });
  if (aimed) {
    Rng rng(seed);
    Cases<Op>::aim(desc, p.args, rng);
  }
  return p;
}

// Takes the elements of an output over, and nothing around them.
void copy_elements(const Store& from, Store& to);
// Another poison in the elements of outputs that are not read first and that ref has written.
void poison_elements(std::vector<Store>& stores, const std::vector<Store>& ref);
// The outputs of two runs of one kernel, bit for bit.
std::string compare_runs(const std::vector<Store>& got, const std::vector<Store>& want);

// The outputs of `got` and the untouched rest, against `want` made with the same layout but never
// in place. `any_elements`: not the values of outputs, only that nothing else was written.
template <class Op>
std::string compare(Problem<Op>& got, Problem<Op>& want, bool any_elements = false) {
  // In place, the shared input holds the output that was not allocated.
  const auto find = [](Problem<Op>& p, const std::string& n) -> Store& {
    return *std::find_if(p.stores.begin(), p.stores.end(),
                         [&](const Store& s) { return s.name == n; });
  };
  std::string shared_output;
  if (!got.shared_input.empty()) {
    const std::byte* shared = find(got, got.shared_input).bytes.data();
    Op::operands(got.desc, got.args, [&](const char* n, const auto& v, const Operand&) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) {
        const Store& s = find(got, got.shared_input);
        if (v.data == shared + s.offset) shared_output = n;
      }
    });
  }
  for (Store& g : got.stores) {
    if (!g.present) continue;
    const bool shared = g.name == got.shared_input;
    Store& w = find(want, shared ? shared_output : g.name);
    Store as_output = g;
    as_output.output = g.output || shared;
    as_output.name = w.name;
    if (as_output.output && any_elements) {
      Store mixed = w;
      copy_elements(as_output, mixed);
      if (std::string text = difference(as_output, mixed); !text.empty()) return text;
      continue;
    }
    if (as_output.output) {
      canonicalise_nans(as_output);
      canonicalise_nans(w);
    }
    if (std::string text = difference(as_output, w); !text.empty()) return text;
  }
  return {};
}

// Whether the outputs are there. An op may tell of its inputs by an error and write them all the
// same.
template <class Op>
bool has_outputs(const Status& status) {
  if constexpr (requires { Op::not_finite(); })
    if (status.message() == Op::not_finite().message()) return true;
  return status.ok();
}

// Runs `plan` on the CPU's memory, or through device memory for a CUDA plan.
template <class Op, class Run>
Status run_on(Device device, Problem<Op>& p, std::size_t workspace_bytes, Run&& run) {
  if (device.type == Device::Type::cpu) {
    AlignedScratch scratch(workspace_bytes);
    return run(p.args, scratch.workspace());
  }
  auto plugin = cuda_plugin(device.index);
  if (!plugin) return plugin.status();
  struct Allocation {
    const CudaPlugin* plugin;
    int device;
    void* data = nullptr;
    ~Allocation() {
      if (data != nullptr) plugin->release(device, data);
    }
  };
  std::vector<std::unique_ptr<Allocation>> memory;
  const auto allocate = [&](std::size_t bytes) -> Result<void*> {
    auto& m = memory.emplace_back(std::make_unique<Allocation>(Allocation{*plugin, device.index}));
    if (Status s = (*plugin)->alloc(device.index, std::max<std::size_t>(bytes, 1), &m->data);
        !s.ok())
      return s;
    return m->data;
  };
  std::vector<std::pair<Store*, std::byte*>> copies;
  for (Store& s : p.stores) {
    if (!s.present) continue;
    auto there = allocate(s.bytes.size());
    if (!there) return there.status();
    BITTERN_TRY((*plugin)->copy(*there, s.bytes.data(), s.bytes.size()));
    copies.emplace_back(&s, static_cast<std::byte*>(*there));
  }
  auto scratch = allocate(workspace_bytes);
  if (!scratch) return scratch.status();
  typename Op::Args args = p.args;
  Op::operands(p.desc, args, [&](const char*, auto& v, const Operand&) {
    v.device = device;
    for (const auto& [store, there] : copies) {
      const std::byte* first = store->bytes.data() + store->offset;
      if (v.data == first) {
        v.data = there + store->offset;
        break;
      }
    }
  });
  BITTERN_TRY(run(args, Workspace{*scratch, workspace_bytes}));
  BITTERN_TRY((*plugin)->synchronize(device.index));
  for (const auto& [store, there] : copies) {
    BITTERN_TRY((*plugin)->copy(store->bytes.data(), there, store->bytes.size()));
  }
  return {};
}

struct Target {
  std::string name;
  Device device;
  std::string kernel;
  cpu::Isa isa = cpu::Isa::none;
  int threads = 1;
};

// Everything this machine can run beside ref: each kernel, a CPU's with every SIMD target and
// number of threads.
template <class Op>
std::vector<Target> targets(const Settings& settings) {
  std::vector<Target> out;
  const auto for_kernels = [](Device device, auto&& f) {
    const auto lists = kernels_for<Op>(device);
    if (!lists) return;
    for (const auto& list : *lists)
      for (const Kernel<Op>& k : list)
        if (k.backend != "ref") f(std::string(k.name));
  };
  if (settings.cpu) {
    for_kernels({}, [&](const std::string& kernel) {
      for (const cpu::Isa isa : cpu::available_isas())
        for (const int threads : settings.threads)
          out.push_back({kernel + "/" + std::string(cpu::name(isa)) + "/" + std::to_string(threads),
                         {},
                         kernel,
                         isa,
                         threads});
    });
  }
  if (settings.cuda) {
    const Device device{Device::Type::cuda, settings.cuda_index};
    for_kernels(device, [&](const std::string& kernel) {
      out.push_back({kernel, device, kernel, cpu::Isa::none, 1});
    });
  }
  return out;
}

// Judges a bounded kernel's outputs; "" when they are within its bound.
template <class Op>
std::string judge(const PrecisionGuarantee& guarantee, const Problem<Op>& got,
                  const Problem<Op>& want, KernelReport& kernel) {
  if constexpr (kBounded<Op>) {
    Judge judge(guarantee.error_bound);
    Cases<Op>::judge(got.desc, got.args, want.args, judge);
    kernel.bounded = true;
    kernel.worst = std::max(kernel.worst, judge.worst());
    return judge.failure();
  } else {
    return "a kernel declares a bound, and the op has no judge (kBounded)";
  }
}

// The layouts worth trying for an op with these operands.
std::vector<Layout> layouts(int optional_operands, int in_place_pairs, bool strided,
                            std::uint64_t seed);

template <class Op>
Report parity(const typename Op::Desc& desc, const Settings& settings,
              const Kernel<Op>* candidate) {
  Report report;
  const auto fail = [&](const std::string& where, const std::string& what) {
    if (report.failures.size() >= settings.max_failures) return;
    report.failures.push_back(where + ": " + what + "   bittern check " + std::string(Op::kName) +
                              " " + flags_text<Op>(desc) +
                              " --seed=" + std::to_string(settings.seed));
  };
  const auto ref = Plan<Op>::select(desc, {}, Preference::exact, "ref");
  if (!ref) {
    fail("ref", std::string(ref.status().message()));
    return report;
  }
  int optional = 0, pairs = 0;
  bool strided = false;
  {
    const Problem<Op> probe = make_problem<Op>(desc, settings.seed, {}, false);
    for (const Store& s : probe.stores) {
      optional += (s.expected.flags & Operand::kOptional) != 0 &&
                  (s.expected.flags & Operand::kUnread) == 0 && s.expected.shape.numel() != 0;
      strided = strided || (candidate == nullptr && (s.expected.flags & Operand::kStrided) != 0);
      for (const Store& in : probe.stores) {
        pairs += s.output && !in.output &&
                 (s.expected.flags & in.expected.flags & Operand::kInPlace) != 0 &&
                 s.expected.dtype == in.expected.dtype && s.expected.shape == in.expected.shape;
      }
    }
  }
  const std::vector<Target> all = candidate != nullptr
                                      ? std::vector<Target>{{"candidate", {}, "candidate"}}
                                      : targets<Op>(settings);
  for (const Layout& layout : layouts(optional, pairs, strided, settings.seed)) {
    Layout apart = layout;
    apart.in_place = -1;
    Problem<Op> want = make_problem<Op>(desc, settings.seed, apart);
    if (Status s = ref->can_implement(want.args); !s.ok()) {
      // The refusals a layout can bring about: all outputs, or what one of them needs, left out.
      if (s.message().find("left out") == std::string_view::npos)
        fail("ref", std::string(s.message()));
      continue;
    }
    const Status told =
        run_on(Device{}, want, ref->workspace_bytes(),
               [&](const auto& args, Workspace w) { return ref->run(args, {}, w); });
    if (!has_outputs<Op>(told)) {
      fail("ref", std::string(told.message()));
      continue;
    }
    // Made once, then restored for each target: filling costs far more than running.
    Problem<Op> got = make_problem<Op>(desc, settings.seed, layout);
    const std::vector<Store> fresh = got.stores;
    // Of each bounded kernel that promises the same bits everywhere, its first result.
    std::map<std::string, std::vector<Store>> firsts;
    for (const Target& t : all) {
      KernelReport& seen = report.kernels[t.kernel];
      cpu::force_isa(t.isa);
      set_num_threads(t.threads);
      cpu::ignore_grain(true);
      const auto restore = [&] {
        for (std::size_t i = 0; i < fresh.size(); ++i)
          std::copy(fresh[i].bytes.begin(), fresh[i].bytes.end(), got.stores[i].bytes.begin());
      };
      restore();
      PrecisionGuarantee guarantee = Op::contract(desc);
      std::function<Status()> run;
      std::optional<Plan<Op>> plan;
      if (candidate != nullptr) {
        if (candidate->weaker != nullptr) guarantee = candidate->weaker(desc);
        run = [&] {
          return run_on(
              t.device, got, candidate->workspace ? candidate->workspace(desc, t.device) : 0,
              [&](const auto& args, Workspace w) { return candidate->run(desc, args, {}, w); });
        };
      } else {
        auto selected = Plan<Op>::select(desc, t.device, Preference::fastest, t.kernel);
        if (!selected) {
          if (selected.status().code() != Code::unsupported)
            fail(t.name, std::string(selected.status().message()));
          if (seen.compared == 0) seen.why_not = selected.status().message();
          continue;
        }
        plan.emplace(std::move(*selected));
        guarantee = plan->precision_guarantee();
        run = [&] {
          return run_on(t.device, got, plan->workspace_bytes(),
                        [&](const auto& args, Workspace w) { return plan->run(args, {}, w); });
        };
      }
      const bool bounded = guarantee.error_norm != ErrorNorm::exact;
      const Status status = run();
      // A kernel with a bound may want its operands aligned; one that meets the contract may not.
      const bool plain = !layout.unaligned && !layout.padded_rows && layout.axis_order == 0;
      if (bounded && !plain && status.code() == Code::unsupported) {
        ++seen.refused;
        continue;
      }
      ++report.compared;
      ++seen.compared;
      report.compared_cuda += t.device.type == Device::Type::cuda;
      if (!has_outputs<Op>(status)) {
        fail(t.name, std::string(status.message()));
        continue;
      }
      if (status.ok() != told.ok()) {
        fail(t.name, status.ok() ? "no error where ref has one" : "an error where ref has none");
        continue;
      }
      if (std::string text = compare(got, want, bounded); !text.empty()) {
        fail(t.name, text);
        continue;
      }
      if (!bounded) continue;
      if (std::string text = judge(guarantee, got, want, seen); !text.empty()) {
        fail(t.name, text);
        continue;
      }
      // What it says of repeating itself. The poison differs, so that what it does not write shows.
      const std::vector<Store> once = got.stores;
      if (guarantee.deterministic) {
        restore();
        poison_elements(got.stores, want.stores);
        if (const Status again = run(); !has_outputs<Op>(again)) {
          fail(t.name, std::string(again.message()));
        } else if (std::string text = compare_runs(got.stores, once); !text.empty()) {
          fail(t.name, text + ", in a second run of a deterministic kernel");
        }
      }
      if (guarantee.bit_stable_on_same_hardware) {
        const auto [first, added] = firsts.try_emplace(t.kernel, once);
        if (std::string text = added ? "" : compare_runs(once, first->second); !text.empty())
          fail(t.name, text + ", with another SIMD target or number of threads");
      }
    }
  }
  cpu::force_isa(cpu::Isa::none);
  set_num_threads(0);
  cpu::ignore_grain(false);
  return report;
}

}  // namespace bittern::oracle
