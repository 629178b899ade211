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
  Status (*supports)(const Desc&) = nullptr;           // null: everything; the message says why not
  std::size_t (*workspace)(const Desc&) = nullptr;     // null: none
  std::string_view (*architecture)(Device) = nullptr;  // null: "any"
  Status (*run)(const Desc&, const Args&, Stream, Workspace) = nullptr;
};

}  // namespace bittern
