// How far a compressed KV cache is from what it holds. Plain host functions, in f64;
// NaN of spans whose lengths differ.
#pragma once
#include <cstdint>
#include <span>

#include "bittern/aura_desc.h"

namespace bittern {

// sum |x - y|^2 / sum |x|^2; 0 where both are 0, infinite where only the error is not.
double relative_mse(std::span<const float> x, std::span<const float> y) noexcept;

// <x, y> / (|x| |y|); 1 where both are zero, 0 where one is.
double cosine_similarity(std::span<const float> x, std::span<const float> y) noexcept;

// max |x - y| / max |x|: the error of logits relative to the largest of them.
double logit_error(std::span<const float> x, std::span<const float> y) noexcept;

// KL(p || p') of p = softmax(x) and p' = softmax(y), in nats.
double attention_kl(std::span<const float> x, std::span<const float> y) noexcept;

// The cost of a row of `dim` values, including its scale and the unused bits of its last word.
double bits_per_value(std::int64_t dim, std::int32_t bits, DType scale = DType::f32) noexcept;

}  // namespace bittern
