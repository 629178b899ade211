// How `bittern inspect` tells what is known of a model: as text, and as JSON (docs/inspect.md).
#pragma once
#include "bittern/convert.h"
#include "cli/cli.h"

namespace bittern::cli {

void print_summary(const ModelDescription& model);
void print_tensors(const ModelDescription& model);
void print_comparison(const ModelComparison& comparison);
Json summary_json(const ModelDescription& model);
Json comparison_json(const ModelComparison& comparison);

}  // namespace bittern::cli
