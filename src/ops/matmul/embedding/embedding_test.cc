#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(Embedding, MatchesRefEverywhere) { oracle::expect_parity("embedding"); }

TEST(Embedding, PicksRowsAndRoundsThem) {
  const std::vector<float> w = {1, 2, 3, 4, 5, 1.00390625f};
  const std::vector<std::int32_t> ids = {2, 0, 2};
  const EmbeddingDesc d{3, {.outputs = 3, .inputs = 2, .type = WeightType::f32}, DType::bf16};
  for (const auto kernel : kBothKernels) {
    std::vector<bf16> y(6);
    Embedding::Args a;
    a.ids = view(ids.data(), d.id_shape());
    a.w = view(w.data(), d.weights.plain_shape());
    a.y = view(y.data(), d.y_shape());
    expect_ok(run_op<Embedding>(d, a, kernel));
    const float want[] = {5, 1, 1, 2, 5, 1};  // a tie to even
    for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(to_f32(y[i]), want[i]) << i;
  }
}

TEST(Embedding, RefusesIdsOutOfRange) {
  std::vector<float> w(6), y(4, 7);
  std::vector<std::int32_t> ids = {0, 3};
  const EmbeddingDesc d{2, {.outputs = 3, .inputs = 2, .type = WeightType::f32}};
  Embedding::Args a;
  a.ids = view(std::as_const(ids).data(), d.id_shape());
  a.w = view(std::as_const(w).data(), d.weights.plain_shape());
  a.y = view(y.data(), d.y_shape());
  const Code bad = Code::invalid_argument;
  expect_error(run_op<Embedding>(d, a), bad, "embedding: ids: [1] is 3, expected 0..2");
  ids[1] = -1;
  expect_error(run_op<Embedding>(d, a), bad, "embedding: ids: [1] is -1, expected 0..2");
  EmbeddingDesc wrong = d;
  wrong.element = DType::f64;
  expect_error(run_op<Embedding>(wrong, a), Code::unsupported,
               "embedding: element: f64, expected f32, f16 or bf16");
  wrong = d;
  wrong.rows = -1;
  expect_error(run_op<Embedding>(wrong, a), bad, "embedding: rows: -1, expected at least 0");
  EXPECT_EQ(y, std::vector<float>(4, 7));
}

}  // namespace
}  // namespace bittern
