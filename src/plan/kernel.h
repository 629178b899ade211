// What a backend supplies for an op.
#pragma once
#include <span>

#include "bittern/plan.h"

namespace bittern {

template <class Op>
struct Kernel {
  using Desc = typename Op::Desc;
  using Args = typename Op::Args;

  std::string_view name;     // unique in its backend, and the backend's name if it has only one
  std::string_view backend;  // "ref", "cpu", "cuda"
  // The bound this kernel declares when it is weaker than Op::contract; null: it meets the
  // contract.
  PrecisionGuarantee (*weaker)(const Desc&) = nullptr;
  // Null: everything. The message says why not.
  Status (*supports)(const Desc&, Device) = nullptr;
  std::size_t (*workspace)(const Desc&, Device) = nullptr;  // null: none
  // What cannot be known before the operands are: the alignment of addresses and strides. Null:
  // every layout that the op allows, as all kernels take that meet the contract. The message reads
  // "operand: what was found, expected what".
  Status (*accepts)(const Desc&, const Args&) = nullptr;
  std::string_view (*architecture)(Device) = nullptr;  // null: "any"
  Status (*run)(const Desc&, const Args&, Stream, Workspace) = nullptr;
};

}  // namespace bittern
