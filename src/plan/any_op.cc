#include "plan/any_op.h"

#include <algorithm>
#include <array>
#include <optional>

#include "core/float_mode.h"
#include "plan/fields.h"
#include "plan/kernels.h"
#include "plan/names.h"

namespace bittern {
namespace {

template <class Op>
std::vector<OperandInfo> operand_infos(const typename Op::Desc& desc) {
  std::vector<OperandInfo> infos;
  const typename Op::Args args;
  Op::operands(desc, args, [&](const char* n, const auto& v, const Operand& expected) {
    infos.push_back({n, expected, std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>});
  });
  return infos;
}

// Whether an axis' name tells `field`: it is the name, or a factor or the first term in it.
bool tells(std::string_view axis, std::string_view field) {
  const std::size_t at = axis.find_first_of("+-*/");
  return axis.substr(0, at) == field ||
         (at != std::string_view::npos && axis[at] == '*' && axis.substr(at + 1) == field);
}

// f(desc) for the default descriptor, and for it with one field of named values at each of them:
// some axes are there, and some dtypes differ, for one value of another field only.
template <class Op, class F>
void for_each_choice(F&& f) {
  typename Op::Desc desc;
  f(desc);
  Op::fields(desc, [&](const char*, auto& member, const char*) {
    using T = std::remove_cvref_t<decltype(member)>;
    if constexpr (kIsNamed<T>) {
      const T value = member;
      for (std::size_t i = 0; i < field_names<T>().size(); ++i) {
        member = static_cast<T>(i);
        f(desc);
      }
      member = value;
    }
  });
}

// What the table of operands says about a field of a descriptor, from the operands with each value
// of it.
template <class Op>
void describe_field(typename Op::Desc desc, std::string_view name, FieldInfo& info) {
  const auto before = operand_infos<Op>(desc);
  const auto has_axis = [&](const std::vector<OperandInfo>& operands) {
    for (const OperandInfo& o : operands)
      for (int i = 0; i < o.expected.shape.rank; ++i)
        if (tells(o.expected.shape.name(i), name)) return true;
    return false;
  };
  Op::fields(desc, [&](const char* n, auto& member, const char*) {
    using T = std::remove_cvref_t<decltype(member)>;
    const T value = member;
    if constexpr (kIsNamed<T>) {
      if (name != n) return;
      info.is_dtype = std::is_same_v<T, DType>;
      for (std::size_t i = 0; i < field_names<T>().size(); ++i) {
        member = static_cast<T>(i);
        for (const OperandInfo& now : operand_infos<Op>(desc))
          for (const OperandInfo& then : before)
            info.decides_dtype = info.decides_dtype || (now.name == then.name &&
                                                        now.expected.dtype != then.expected.dtype);
      }
    } else if constexpr (std::is_integral_v<T>) {
      // Some axes are there, or are a field's, only where a field is not 0 or not 1.
      info.is_size = info.is_size || has_axis(before);
      if (value == 0 || value == 1) {
        member = static_cast<T>(value + 1);
        info.is_size = info.is_size || has_axis(operand_infos<Op>(desc));
      }
    }
    member = value;
  });
}

// The choices of a field that the op takes, which are fewer than there are names.
template <class Op>
std::vector<std::string_view> accepted_choices(std::string_view name) {
  std::vector<std::string_view> accepted;
  const std::string where = std::string(Op::kName).append(": ").append(name).append(": ");
  typename Op::Desc desc;
  Op::fields(desc, [&](const char* n, auto& member, const char*) {
    using T = std::remove_cvref_t<decltype(member)>;
    if constexpr (kIsNamed<T>) {
      if (name != n) return;
      const T value = member;
      for (std::size_t i = 0; i < field_names<T>().size(); ++i) {
        member = static_cast<T>(i);
        // Whether a switch may be on depends on other fields.
        if (std::is_same_v<T, bool> || !Op::check(desc).message().starts_with(where))
          accepted.push_back(field_names<T>()[i]);
      }
      member = value;
    }
  });
  return accepted;
}

template <class Op>
class PlanOf final : public AnyPlan {
 public:
  explicit PlanOf(Plan<Op> plan) : plan_(std::move(plan)) {}
  Status can_implement(std::span<const MutView> views) const override {
    typename Op::Args args;
    BITTERN_TRY(bind(views, args));
    return plan_.can_implement(args);
  }
  Status run(std::span<const MutView> views, Stream stream, Workspace workspace) const override {
    typename Op::Args args;
    BITTERN_TRY(bind(views, args));
    return plan_.run(args, stream, workspace);
  }
  std::size_t workspace_bytes() const override { return plan_.workspace_bytes(); }
  Sku sku() const override { return plan_.sku(); }
  PrecisionGuarantee precision_guarantee() const override { return plan_.precision_guarantee(); }
  std::vector<OperandInfo> operands() const override { return operand_infos<Op>(plan_.desc()); }
  Status no_operand(std::string_view name) const override {
    const auto refuse = [](const std::string& what) {
      return invalid(std::string(Op::kName).append(": ") + what);
    };
    std::vector<std::string_view> known;
    for (const OperandInfo& info : operands()) known.push_back(info.name);
    std::string why;
    typename Op::Desc desc = plan_.desc();
    Op::fields(desc, [&](const char* field, auto& member, const char*) {
      using T = std::remove_cvref_t<decltype(member)>;
      if constexpr (kIsNamed<T>) {
        const T before = member;
        std::vector<std::string_view> with;
        for (std::size_t i = 0; i < field_names<T>().size(); ++i) {
          member = static_cast<T>(i);
          const auto infos = operand_infos<Op>(desc);
          if (std::any_of(infos.begin(), infos.end(), [&](auto& o) {
                return o.name == name && (o.expected.flags & Operand::kUnread) == 0;
              }))
            with.push_back(field_names<T>()[i]);
        }
        member = before;
        if (!with.empty() && why.empty()) {
          why = std::string(name).append(": ").append(field).append(" is ") + field_text(member) +
                "; " + std::string(name).append(" goes with ").append(field).append(" ") +
                either(with) + " only";
        }
      }
    });
    return refuse(why.empty() ? unknown_name("operand", name, known) : why);
  }

 private:
  Status bind(std::span<const MutView> views, typename Op::Args& args) const {
    std::size_t count = 0;
    Op::operands(plan_.desc(), args, [&](const char*, auto& v, const Operand&) {
      if (count < views.size()) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) {
          v = views[count];
        } else {
          v = as_const(views[count]);
        }
      }
      ++count;
    });
    if (count == views.size()) return {};
    return invalid(std::string(Op::kName) + ": " + std::to_string(views.size()) +
                   " operands, expected " + std::to_string(count));
  }
  Plan<Op> plan_;
};

template <class Op>
const AnyOp& any_op();

template <class Op>
class DescOf final : public AnyDesc {
 public:
  const AnyOp& op() const override { return any_op<Op>(); }
  std::unique_ptr<AnyDesc> clone() const override { return std::make_unique<DescOf>(*this); }
  Status set(std::string_view field, std::int64_t value) override {
    const FloatMode mode;
    return explained(field, {}, set_field<Op>(desc_, field, value));
  }
  Status set(std::string_view field, double value) override {
    const FloatMode mode;
    return explained(field, {}, set_field<Op>(desc_, field, value));
  }
  Status set(std::string_view field, std::string_view text) override {
    const FloatMode mode;
    return explained(field, text, set_field<Op>(desc_, field, text));
  }
  Result<std::int64_t> get(std::string_view field) const override {
    return read<std::int64_t>(field);
  }
  Result<double> get_real(std::string_view field) const override { return read<double>(field); }
  Status check() const override {
    const FloatMode mode;
    return Op::check(desc_);
  }
  std::int64_t num_groups() const override {
    if constexpr (requires { desc_.num_groups(); }) {
      return desc_.num_groups();
    } else {
      return 0;
    }
  }
  double flops() const override {
    if constexpr (requires { Op::flops(desc_); }) {
      return Op::flops(desc_);
    } else {
      return 0;
    }
  }
  std::int64_t elements() const override {
    if constexpr (requires { Op::elements(desc_); }) {
      return Op::elements(desc_);
    } else {
      std::int64_t product = 1;
      for (const std::string_view field : {"outer_size", "axis_size", "inner_size"}) {
        const auto size = get(field);
        product *= size ? *size : 1;
      }
      return product;
    }
  }
  std::vector<OperandInfo> operands() const override { return operand_infos<Op>(desc_); }
  Result<std::unique_ptr<AnyPlan>> select(Device device, Preference preference,
                                          std::string_view kernel, int threads) const override {
    auto plan = Plan<Op>::select(desc_, device, preference, kernel, threads);
    if (!plan) return plan.status();
    return std::unique_ptr<AnyPlan>(std::make_unique<PlanOf<Op>>(std::move(*plan)));
  }

 private:
  // A refusal to set `field`, with the name that was probably meant, or the choices that the op
  // takes, which are fewer than there are names.
  Status explained(std::string_view field, std::optional<std::string_view> text,
                   Status status) const {
    if (status.ok()) return status;
    std::vector<std::string_view> known, accepted;
    const std::string where = std::string(Op::kName).append(": ").append(field).append(": ");
    for (const FieldInfo& f : op().fields()) {
      known.push_back(f.name);
      if (f.name == field && text) accepted = f.accepted;
    }
    if (std::find(known.begin(), known.end(), field) == known.end())
      return invalid(std::string(Op::kName).append(": ") + unknown_name("field", field, known));
    if (accepted.empty()) return status;
    return invalid(where + std::string(text->empty() ? "empty" : *text).append(", expected ") +
                   either(accepted));
  }
  template <class T>
  Result<T> read(std::string_view field) const {
    const FloatMode mode;
    Result<T> value = explained(field, {}, invalid(std::string()));
    Op::fields(desc_, [&](const char* n, const auto& member, const char*) {
      if (field != n) return;
      if constexpr (kIsReal<std::remove_cvref_t<decltype(member)>> && !kIsReal<T>) {
        value = invalid(std::string(Op::kName).append(": ").append(field) +
                        ": a real number, expected an integer field");
      } else {
        value = static_cast<T>(member);
      }
    });
    return value;
  }
  typename Op::Desc desc_;
};

template <class Op, bool kCpu, bool kCuda>
class OpOf final : public AnyOp {
 public:
  OpOf() {
    const typename Op::Desc defaults;
    Op::fields(defaults, [&](const char* n, const auto& member, const char* help) {
      const auto names = field_names<std::remove_cvref_t<decltype(member)>>();
      FieldInfo& field = fields_.emplace_back(FieldInfo{n, help, {names.begin(), names.end()}});
      field.real = kIsReal<std::remove_cvref_t<decltype(member)>>;
      field.default_real = static_cast<double>(member);
      if (!field.real) field.default_value = static_cast<std::int64_t>(member);
      field.accepted = accepted_choices<Op>(n);
      for_each_choice<Op>(
          [&](const typename Op::Desc& desc) { describe_field<Op>(desc, n, field); });
    });
  }
  std::string_view name() const override { return Op::kName; }
  std::string_view category() const override { return Op::kCategory; }
  const std::vector<FieldInfo>& fields() const override { return fields_; }
  std::vector<OperandInfo> operands() const override {
    // The descriptor with every operand: some are there for one choice of a field only.
    std::vector<OperandInfo> most = operand_infos<Op>({});
    typename Op::Desc desc;
    Op::fields(desc, [&](const char*, auto& member, const char*) {
      using T = std::remove_cvref_t<decltype(member)>;
      if constexpr (kIsNamed<T>) {
        const T before = member;
        for (std::size_t i = 0; i < field_names<T>().size(); ++i) {
          member = static_cast<T>(i);
          auto infos = operand_infos<Op>(desc);
          if (infos.size() > most.size()) most = std::move(infos);
        }
        member = before;
      }
    });
    return most;
  }
  bool has_cpu() const override { return kCpu; }
  bool has_cuda() const override { return kCuda; }
  Result<std::vector<KernelInfo>> kernels(Device device) const override {
    const auto lists = kernels_for<Op>(device);
    if (!lists) return lists.status();
    std::vector<KernelInfo> all;
    for (const auto& list : *lists)
      for (const Kernel<Op>& k : list) all.push_back({k.name, k.backend, k.weaker != nullptr});
    return all;
  }
  std::unique_ptr<AnyDesc> make_desc() const override { return std::make_unique<DescOf<Op>>(); }

 private:
  std::vector<FieldInfo> fields_;
};

#define BITTERN_OP(T, f, CPU, CUDA)           \
  template <>                                 \
  const AnyOp& any_op<T>() {                  \
    static const OpOf<T, CPU, CUDA> instance; \
    return instance;                          \
  }
#include "ops/ops.inc"

}  // namespace

std::span<const AnyOp* const> all_ops() {
  static const std::array ops = {
#define BITTERN_OP(T, f, CPU, CUDA) &any_op<T>(),
#include "ops/ops.inc"
  };
  return ops;
}

std::span<const std::string_view> op_names() noexcept {
  static constexpr std::string_view kNames[] = {
#define BITTERN_OP(T, f, CPU, CUDA) T::kName,
#include "ops/ops.inc"
  };
  return kNames;
}

Result<const AnyOp*> find_op(std::string_view name) {
  std::vector<std::string_view> known;
  for (const AnyOp* op : all_ops()) {
    if (op->name() == name) return op;
    known.push_back(op->name());
  }
  return invalid(unknown_name("op called", name, known));
}

}  // namespace bittern
