// A benchmark problem's operands, with data such as a model has.
#pragma once
#include <vector>

#include "cli/bench_meter.h"
#include "cli/cli.h"
#include "plan/any_op.h"

namespace bittern::cli {

struct Operands {
  std::vector<std::vector<MutView>> sets;  // each in the order of AnyDesc::operands()
  std::size_t bytes = 0;  // of one set: all that are present, read or written once (a state: both)
};

// Allocates and fills as many sets as the meter asks for with this limit: weights and activations
// are Gaussian, scales cover three sigma of them, zero points are small, codes uniform over their
// range; then the case's own fill.
Result<Operands> make_operands(const Problem& problem, Meter& meter, Limit limit);

// The same problem with about 1/factor of the rows (or of a lone row).
void shrink(AnyDesc& desc, std::int64_t factor);

}  // namespace bittern::cli
