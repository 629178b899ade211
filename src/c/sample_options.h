#pragma once
#include "bittern/c/decoding.h"
#include "bittern/sample.h"

namespace bittern::c_api {

// Null: all zeros.
inline SampleOptions to_sample_options(const bittern_sample_options* options) {
  SampleOptions o;
  o.temperature = 0;
  if (options == nullptr) return o;
  o.temperature = options->temperature;
  o.top_k = options->top_k;
  if (options->top_p != 0) o.top_p = options->top_p;
  o.min_p = options->min_p;
  if (options->repetition_penalty != 0) o.repetition_penalty = options->repetition_penalty;
  o.seed = options->seed;
  return o;
}

}  // namespace bittern::c_api
