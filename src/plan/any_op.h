// Every op behind one interface, made from fields() and operands(): the C header, the Python module
// and the command line are written against this, once, for all ops.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/plan.h"

namespace bittern {

struct FieldInfo {
  std::string_view name;
  std::string_view help;
  std::vector<std::string_view> choices;  // empty: a number
  std::int64_t default_value = 0;         // for a choice, its index
  bool real = false;                      // a real number
  double default_real = 0;
  bool is_dtype = false;                     // its choices are dtypes
  bool decides_dtype = false;                // dtypes of operands follow from it
  bool is_size = false;                      // an axis of an operand tells it: Axes
  std::vector<std::string_view> accepted{};  // the choices that the op takes
};

struct OperandInfo {
  std::string_view name;
  Operand expected;
  bool output = false;
};

struct KernelInfo {
  std::string_view name, backend;
  bool weaker = false;  // than the op's contract: taken with Preference::fastest alone
};

class AnyPlan {
 public:
  virtual ~AnyPlan() = default;
  // `views` in the order of AnyDesc::operands(); a null view leaves an optional operand out.
  virtual Status can_implement(std::span<const MutView> views) const = 0;
  virtual Status run(std::span<const MutView> views, Stream stream, Workspace workspace) const = 0;
  virtual std::size_t workspace_bytes() const = 0;
  virtual Sku sku() const = 0;
  virtual PrecisionGuarantee precision_guarantee() const = 0;
  virtual std::vector<OperandInfo> operands() const = 0;
  // The error for an operand that operands() does not list: it names the field value that would add
  // the operand, or else lists the operands.
  virtual Status no_operand(std::string_view name) const = 0;
};

class AnyOp;

class AnyDesc {
 public:
  virtual ~AnyDesc() = default;
  virtual const AnyOp& op() const = 0;
  virtual std::unique_ptr<AnyDesc> clone() const = 0;
  virtual Status set(std::string_view field, std::int64_t value) = 0;
  virtual Status set(std::string_view field, double value) = 0;
  virtual Status set(std::string_view field, std::string_view text) = 0;
  virtual Result<std::int64_t> get(std::string_view field) const = 0;  // not of a real field
  virtual Result<double> get_real(std::string_view field) const = 0;   // of any field
  virtual Status check() const = 0;
  virtual std::int64_t num_groups() const = 0;            // 0 for an op without groups
  virtual double flops() const = 0;                       // 0 for an op limited by memory
  virtual std::int64_t elements() const = 0;              // of the main tensor, for rates
  virtual std::vector<OperandInfo> operands() const = 0;  // check() must be ok
  virtual Result<std::unique_ptr<AnyPlan>> select(Device device, Preference preference,
                                                  std::string_view kernel = {},
                                                  int threads = 0) const = 0;
};

class AnyOp {
 public:
  virtual ~AnyOp() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view category() const = 0;
  virtual const std::vector<FieldInfo>& fields() const = 0;
  // All operands that any descriptor can have, in order, with the dtype and shape that the default
  // descriptor gives them.
  virtual std::vector<OperandInfo> operands() const = 0;
  virtual bool has_cpu() const = 0;
  virtual bool has_cuda() const = 0;
  // Those of a device, in order of preference.
  virtual Result<std::vector<KernelInfo>> kernels(Device device) const = 0;
  virtual std::unique_ptr<AnyDesc> make_desc() const = 0;
};

std::span<const AnyOp* const> all_ops();
std::span<const std::string_view> op_names() noexcept;  // of all_ops(), without making them
Result<const AnyOp*> find_op(std::string_view name);    // the error lists the names

}  // namespace bittern
