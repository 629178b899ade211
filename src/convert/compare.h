// How far apart two models are, between what compare_models opens and what it tells.
#pragma once
#include <cstddef>

#include "bittern/convert.h"
#include "bittern/status.h"
#include "formats/checkpoint.h"

namespace bittern {

// Sums are f64 in the order of the numbers: the same bits for any number of threads. Rows are
// streamed: memory does not grow with the models. Where one is a GGUF file and the other a
// folder, or the folders name tensors differently, b's tensors are those it would have in a's world
// (convert/architecture.h), and what a has no place for is only in b. Folders without a common name
// are compared under llama.cpp's. `model` and `other` of the result are left empty.
Result<ModelComparison> compare(const Checkpoint& a, const Checkpoint& b, std::size_t worst_groups,
                                const ModelProgressFunction& progress) noexcept;

}  // namespace bittern
