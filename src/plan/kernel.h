// What a backend supplies for an op, and the table of all of them.
#pragma once
#include <span>

#include "bittern/bittern.h"

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

#define BITTERN_IF_0(...)
#define BITTERN_IF_1(...) __VA_ARGS__
#define BITTERN_OP(T, f, CPU, CUDA)                       \
  std::span<const Kernel<T>> f##_ref();                   \
  BITTERN_IF_##CPU(std::span<const Kernel<T>> f##_cpu();) \
      BITTERN_IF_##CUDA(std::span<const Kernel<T>> f##_cuda();)
#include "ops/ops.inc"

}  // namespace bittern
