#include "ops/matmul/matmul_aims.h"

namespace bittern::oracle {

std::vector<EmbeddingDesc> embedding_check_cases() {
  std::vector<EmbeddingDesc> cases;
  constexpr DType kElements[] = {DType::f32, DType::f16, DType::bf16};
  std::size_t i = 0;
  for (const WeightDesc& stored : weight_cases()) {
    for (const WeightLayout layout : {WeightLayout::stored, WeightLayout::panels}) {
      WeightDesc w = stored;
      w.layout = layout;
      cases.push_back({w.outputs == 0 ? 0 : 9, w, kElements[i++ % 3]});
    }
  }
  cases.push_back({0, {.outputs = 5, .inputs = 64}});
  return cases;
}

void fill_ids(const EmbeddingDesc& d, std::string_view operand, const ConstView& v, Rng& rng) {
  if (operand != "ids" || d.weights.outputs == 0) return;
  for (std::int64_t i = 0; i < d.rows; ++i)
    data<std::int32_t>(v)[i] = static_cast<std::int32_t>(rng.below(d.weights.outputs));
}

std::vector<BenchCase<EmbeddingDesc>> embedding_bench_cases() {
  EmbeddingDesc affine{2048, {.outputs = 49152, .inputs = 2048}};
  EmbeddingDesc panels = affine, q4_k = affine;
  panels.weights.layout = WeightLayout::panels;
  q4_k.weights.type = WeightType::q4_k;
  return {{.label = "affine 4 bit", .desc = affine, .fill = fill_ids},
          {.label = "affine 4 bit panels", .desc = panels, .fill = fill_ids},
          {.label = "Q4_K", .desc = q4_k, .fill = fill_ids}};
}

void embedding_aim(const EmbeddingDesc& d, const Embedding::Args& a, Rng& rng) {
  aim_weights(d.weights, weight_views(a), rng);
  fill_ids(d, "ids", a.ids, rng);
}

}  // namespace bittern::oracle
