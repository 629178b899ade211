// The tensors a model has in each world, as rows of the quantities it is made of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "convert/architecture.h"
#include "convert/model_config.h"
#include "convert/recipe.h"

namespace bittern {

// Each is numbers in rows, in Hugging Face's order. A world's tensor is rows of one or more of
// them.
enum class Q {
  embedding,
  final_norm,
  head,
  input_norm,
  q,
  k,
  v,
  o,
  q_bias,
  k_bias,
  v_bias,
  o_bias,
  q_norm,
  k_norm,
  attention_norm,  // after attention: before the feed forward unless there are two more
  before_ffn_norm,
  after_ffn_norm,
  gate,
  up,
  down,
  gate_bias,
  up_bias,
  down_bias,
  router,
  gate_experts,
  up_experts,
  down_experts,
  shared_router,
  shared_gate,
  shared_up,
  shared_down,
  delta_q,
  delta_k,
  delta_v,
  delta_z,
  delta_b,
  delta_a,
  conv_q,
  conv_k,
  conv_v,
  a_log,
  dt_bias,
  delta_norm,
  delta_out,
};
inline constexpr std::string_view kQuantityNames[] = {"embedding",
                                                      "final_norm",
                                                      "head",
                                                      "input_norm",
                                                      "q",
                                                      "k",
                                                      "v",
                                                      "o",
                                                      "q_bias",
                                                      "k_bias",
                                                      "v_bias",
                                                      "o_bias",
                                                      "q_norm",
                                                      "k_norm",
                                                      "attention_norm",
                                                      "before_ffn_norm",
                                                      "after_ffn_norm",
                                                      "gate",
                                                      "up",
                                                      "down",
                                                      "gate_bias",
                                                      "up_bias",
                                                      "down_bias",
                                                      "router",
                                                      "gate_experts",
                                                      "up_experts",
                                                      "down_experts",
                                                      "shared_router",
                                                      "shared_gate",
                                                      "shared_up",
                                                      "shared_down",
                                                      "delta_q",
                                                      "delta_k",
                                                      "delta_v",
                                                      "delta_z",
                                                      "delta_b",
                                                      "delta_a",
                                                      "conv_q",
                                                      "conv_k",
                                                      "conv_v",
                                                      "a_log",
                                                      "dt_bias",
                                                      "delta_norm",
                                                      "delta_out"};
constexpr std::string_view name(Q quantity) {
  return kQuantityNames[static_cast<std::size_t>(quantity)];
}

struct Rows {
  Q quantity;
  std::int64_t first, count, step = 1;
};

struct Part {
  std::string name;
  Shape shape;
  std::int64_t width = 1;  // of a row
  std::vector<Rows> rows;  // one that starts at 0 with step 1: the whole quantity
  ValueMap map = ValueMap::same;
  std::int64_t column_block = 0;  // of quantity's columns, permuted
  std::vector<std::int64_t> columns;
  bool written = true;  // or a form that is read only
  bool whole = true;    // the rows are one quantity in its own order

  std::int64_t row_count() const { return shape.numel() / width; }
};

// What transformers' names begin with, which differs between text and vision models and over the
// years: "model." and "lm_head" without any.
struct Prefixes {
  std::string body, head;
};

// All tensors of a layer; of the rest of the model where layer is -1. `target`: those to be
// written, among them the copy of a tied embedding where the world's program wants one.
std::vector<Part> tensors_of(const ModelConfig& model, World world, const Prefixes& prefixes,
                             std::int64_t layer, bool target);

}  // namespace bittern
