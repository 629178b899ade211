// The row of an op's one cpu kernel, which meets the op's contract.
#pragma once
#include "cpu/dispatch.h"
#include "plan/kernel.h"

namespace bittern::cpu {

template <class Op>
constexpr Kernel<Op> exact_kernel(decltype(Kernel<Op>::run) run,
                                  decltype(Kernel<Op>::workspace) workspace = nullptr) {
  return {.name = "cpu",
          .backend = "cpu",
          .supports = [](const typename Op::Desc&, Device) { return supported(); },
          .workspace = workspace,
          .architecture = architecture,
          .run = run};
}

}  // namespace bittern::cpu
