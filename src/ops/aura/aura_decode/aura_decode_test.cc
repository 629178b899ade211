#include "bittern/codec.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(AuraDecode, MatchesRefEverywhere) { oracle::expect_parity("aura_decode"); }

// 11 codes of 3 bits, the last one across two words; the scale multiplies first.
TEST(AuraDecode, ByHand) {
  const std::vector<std::uint32_t> packed = {02107654321u | 3u << 30, 0};
  const std::vector<float> codebook = {-4, -3, -2, -1, 1, 2, 3, 4}, scale = {0.5f};
  for (const auto kernel : kBothKernels) {
    std::vector<float> y(11);
    const AuraDesc d{.rows = 1, .dim = 11, .bits = 3, .rotation = Rotation::identity};
    expect_ok(run_op<AuraDecode>(d,
                                 {.packed = view(packed.data(), {1, 2}),
                                  .scales = view(scale.data(), {1, 1}),
                                  .codebook = view(codebook.data(), {8}),
                                  .y = view(y.data(), {1, 11})},
                                 kernel));
    EXPECT_EQ(y, (std::vector<float>{-1.5f, -1, -0.5f, 0.5f, 1, 1.5f, 2, -2, -1.5f, -1, -0.5f}));
  }
}

// Turning the rotated form back gives the other form, bit for bit.
TEST(AuraDecode, IsTheInverseRotationOfTheRotatedForm) {
  for (const std::int64_t dim : {64, 80, 100}) {
    for (const Rotation rotation : {Rotation::hadamard, Rotation::dense}) {
      if (rotation == Rotation::hadamard && hadamard_factor(dim) == 0) continue;
      AuraDesc d{.rows = 5, .dim = dim, .bits = 5, .rotation = rotation};
      const auto table = *make_rotation(rotation, dim, 4);
      const Codebook book = *sphere_codebook(dim, 5);
      oracle::Rng rng(1);
      std::vector<std::uint32_t> packed(static_cast<std::size_t>(d.packed_shape().numel()));
      for (auto& word : packed) word = static_cast<std::uint32_t>(rng.next());
      const std::vector<float> scales = {1, 0.3f, 0, 700, -2};
      std::vector<float> y(static_cast<std::size_t>(5 * dim)), rotated = y, back = y;
      AuraDecode::Args args{.packed = view(packed.data(), d.packed_shape()),
                            .scales = view(scales.data(), {5, 1}),
                            .table = view(table.data(), d.rotation_shape()),
                            .codebook = view(book.levels.data(), {32}),
                            .y = view(y.data(), d.tensor_shape())};
      expect_ok(run_op<AuraDecode>(d, args));
      d.rotated = true;
      args.table = {};
      args.y = view(rotated.data(), d.tensor_shape());
      expect_ok(run_op<AuraDecode>(d, args));
      d.inverse = true;
      expect_ok(run_op<AuraRotate>(d, {.x = view(std::as_const(rotated).data(), d.tensor_shape()),
                                       .table = view(table.data(), d.rotation_shape()),
                                       .y = view(back.data(), d.tensor_shape())}));
      EXPECT_EQ(y, back) << dim;
      EXPECT_NE(y, rotated) << dim;
    }
  }
}

TEST(AuraDecode, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  const AuraDesc good{.rows = 2, .dim = 64, .bits = 2};
  std::vector<std::uint32_t> packed(8, 0x12345678u);
  std::vector<float> scales = {1, 2}, signs(64, 1), codebook = {3, 1, 0, 2}, y(128, 7);
  const auto untouched = y;
  const AuraDecode::Args args{.packed = view(std::as_const(packed).data(), {2, 4}),
                              .scales = view(std::as_const(scales).data(), {2, 1}),
                              .table = view(std::as_const(signs).data(), {64}),
                              .codebook = view(std::as_const(codebook).data(), {4}),
                              .y = view(y.data(), {2, 64})};
  const auto with = [&](auto change) {
    AuraDesc d = good;
    change(d);
    return run_op<AuraDecode>(d, args);
  };
  using D = AuraDesc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.bits = 9; }), bad, "aura_decode: bits: 9, expected 1..8");
  expect_error(with([](D d) { d.dim = 2000; }), bad, "aura_decode: dim: 2000, expected 2..1024");
  expect_error(with([](D d) { d.bits = 3; }), bad,
               "aura_decode: packed: shape [2,4], expected [2,6] = [rows,words]: 3-bit codes have "
               "6 words a row, and 4 "
               "are of 2 bits");
  expect_error(with([](D d) { d.f16_scale = true; }), bad,
               "aura_decode: scales: dtype f32, expected f16");
  expect_error(with([](D d) { d.element = DType::bf16; }), bad,
               "aura_decode: y: dtype f32, expected bf16");
  expect_error(with([](D d) { d.rotation = Rotation::dense; }), bad,
               "aura_decode: table: shape [64], expected [64,64] = [dim,dim]: rotation dense takes "
               "a matrix; signs go with rotation hadamard");
  signs[0] = 0;
  expect_error(run_op<AuraDecode>(good, args), bad,
               "aura_decode: table: [0] is 0, expected 1 or -1");
  signs[0] = 1;
  codebook[3] = NAN;
  expect_error(run_op<AuraDecode>(good, args), bad,
               "aura_decode: codebook: [3] is nan, expected a finite value");
  codebook[3] = 2;
  EXPECT_EQ(y, untouched);
  expect_ok(run_op<AuraDecode>(good, args));
  EXPECT_NE(y, untouched);
}

}  // namespace
}  // namespace bittern
