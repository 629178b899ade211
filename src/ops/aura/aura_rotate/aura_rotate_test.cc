#include "bittern/codec.h"
#include "ops/aura/aura.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(AuraRotate, MatchesRefEverywhere) { oracle::expect_parity("aura_rotate"); }

std::vector<float> rotate(AuraDesc d, const std::vector<float>& x, const std::vector<float>& table,
                          std::string_view kernel = {}) {
  d.rows = static_cast<std::int64_t>(x.size()) / d.dim;
  std::vector<float> y(x.size());
  AuraRotate::Args args{.x = view(x.data(), d.tensor_shape()),
                        .y = view(y.data(), d.tensor_shape())};
  if (d.rotation != Rotation::identity) args.table = view(table.data(), d.rotation_shape());
  expect_ok(run_op<AuraRotate>(d, args, kernel));
  return y;
}

// 4 values: 1/2 of the sums with Sylvester's signs; the signs come first.
TEST(AuraRotate, HadamardByHand) {
  for (const auto kernel : kBothKernels) {
    const AuraDesc d{.dim = 4};
    EXPECT_EQ(rotate(d, {1, 2, 3, 4}, {1, 1, 1, 1}, kernel), (std::vector<float>{5, -1, -2, 0}));
    EXPECT_EQ(rotate(d, {1, 2, 3, 4}, {-1, 1, 1, -1}, kernel), (std::vector<float>{0, 2, 1, -5}));
    AuraDesc back = d;
    back.inverse = true;
    EXPECT_EQ(rotate(back, {5, -1, -2, 0}, {1, 1, 1, 1}, kernel), (std::vector<float>{1, 2, 3, 4}));
  }
}

TEST(AuraRotate, DenseByHandAndItsTranspose) {
  for (const auto kernel : kBothKernels) {
    AuraDesc d{.dim = 2, .rotation = Rotation::dense};
    EXPECT_EQ(rotate(d, {1, 10}, {1, 2, 3, 4}, kernel), (std::vector<float>{21, 43}));
    d.inverse = true;
    EXPECT_EQ(rotate(d, {1, 10}, {1, 2, 3, 4}, kernel), (std::vector<float>{31, 42}));
  }
}

TEST(AuraRotate, IdentityCopies) {
  const std::vector<float> x = {1, -0.0f, 3e38f};
  EXPECT_EQ(rotate({.dim = 3, .rotation = Rotation::identity}, x, {}), x);
}

// Lengths and angles stay, and the inverse brings every row back.
TEST(AuraRotate, IsOrthogonal) {
  for (const std::int64_t dim :
       {2, 12, 28, 36, 44, 60, 64, 80, 96, 112, 128, 192, 576, 640, 1024}) {
    for (const Rotation kind : {Rotation::hadamard, Rotation::dense}) {
      if (kind == Rotation::dense && dim > 200) continue;
      const AuraDesc d{.dim = dim, .rotation = kind};
      const auto table = *make_rotation(kind, dim, 3);
      oracle::Rng rng(static_cast<std::uint64_t>(dim));
      std::vector<float> x(static_cast<std::size_t>(3 * dim));
      for (float& v : x) v = static_cast<float>(rng.normal());
      const auto y = rotate(d, x, table);
      AuraDesc back = d;
      back.inverse = true;
      const auto again = rotate(back, y, table);
      const auto dot = [&](const std::vector<float>& v, std::int64_t a, std::int64_t b) {
        double sum = 0;
        for (std::int64_t j = 0; j < dim; ++j)
          sum += static_cast<double>(v[static_cast<std::size_t>(a * dim + j)]) *
                 static_cast<double>(v[static_cast<std::size_t>(b * dim + j)]);
        return sum;
      };
      for (std::int64_t a = 0; a < 3; ++a)
        for (std::int64_t b = 0; b < 3; ++b)
          EXPECT_NEAR(dot(x, a, b), dot(y, a, b), 2e-6 * static_cast<double>(dim)) << dim;
      for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], again[i], 1e-5) << dim;
    }
  }
}

TEST(AuraRotate, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  std::vector<float> x(256, 1), y(256, 7), signs(128, 1);
  const auto untouched = y;
  const AuraDesc good{.rows = 2, .dim = 128};
  const AuraRotate::Args args{.x = view(std::as_const(x).data(), {2, 128}),
                              .table = view(std::as_const(signs).data(), {128}),
                              .y = view(y.data(), {2, 128})};
  const auto with = [&](auto change) {
    AuraDesc d = good;
    change(d);
    return run_op<AuraRotate>(d, args);
  };
  using D = AuraDesc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.dim = 1; }), bad, "aura_rotate: dim: 1, expected 2..1024");
  expect_error(with([](D d) { d.dim = 1025; }), bad, "aura_rotate: dim: 1025, expected 2..1024");
  expect_error(with([](D d) { d.dim = 100; }), bad,
               "aura_rotate: dim: 100 with rotation hadamard, expected a power of two times "
               "one of 1 12 20 28 36 44 60");
  expect_error(with([](D d) { d.rows = -1; }), bad, "aura_rotate: rows: -1, expected at least 0");
  expect_error(with([](D d) { d.rotation = static_cast<Rotation>(3); }), bad,
               "aura_rotate: rotation: 3, expected 0..2");
  expect_error(with([](D d) { d.element = DType::f64; }), Code::unsupported,
               "aura_rotate: element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.rotation = Rotation::dense; }), bad,
               "aura_rotate: table: shape [128], expected [128,128] = [dim,dim]: rotation dense "
               "takes a matrix; signs go with rotation hadamard");
  signs[77] = 0.5f;
  expect_error(run_op<AuraRotate>(good, args), bad,
               "aura_rotate: table: [77] is 0.5, expected 1 or -1");
  signs[77] = -1;
  AuraRotate::Args no_table = args;
  no_table.table = {};
  expect_error(run_op<AuraRotate>(good, no_table), bad,
               "aura_rotate: table: null, expected f32 [128]");
  AuraRotate::Args same = args;
  same.y.data = x.data();
  expect_error(run_op<AuraRotate>(good, same), bad,
               "aura_rotate: y: overlaps x, expected memory of its own");
  EXPECT_EQ(y, untouched);
  expect_ok(run_op<AuraRotate>(good, args));
  EXPECT_NE(y, untouched);
}

// [batch, tokens, heads, dim] seen as [batch, heads, tokens, dim]: no one distance from row to row.
TEST(AuraRotate, RowsMayBeSeveralAxes) {
  const std::int64_t batch = 2, tokens = 5, heads = 3, dim = 16;
  const std::vector<float> signs = *make_rotation(Rotation::hadamard, dim, 4);
  const AuraDesc d{.rows = batch * heads * tokens, .dim = dim};
  std::vector<float> x(static_cast<std::size_t>(d.rows * dim));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 37) - 9;
  const std::vector<float> want = rotate(d, x, signs);  // in x's own order
  const Shape turned{batch, heads, tokens, dim};
  const Shape stride{tokens * heads * dim, dim, heads * dim, 1};
  for (const auto kernel : kBothKernels) {
    std::vector<float> y(x.size());
    AuraRotate::Args a{.x = view(std::as_const(x).data(), turned),
                       .table = view(signs.data(), {dim}),
                       .y = view(y.data(), turned)};
    a.x.stride = a.y.stride = stride;
    expect_ok(run_op<AuraRotate>(d, a, kernel));
    EXPECT_EQ(y, want);
    // Into a slice of a larger array, from a batch that is one row after the other.
    std::vector<float> cache(static_cast<std::size_t>(batch * heads * 20 * dim), 7.0f);
    a.y = view(cache.data() + 4 * dim, turned);
    a.y.stride = {heads * 20 * dim, 20 * dim, dim, 1};
    expect_ok(run_op<AuraRotate>(d, a, kernel));
    for (std::size_t i = 0; i < cache.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / dim, t = row % 20 - 4, bh = row / 20;
      const auto at = ((bh / heads * tokens + t) * heads + bh % heads) * dim;
      EXPECT_EQ(cache[i], t < 0 || t >= tokens
                              ? 7.0f
                              : want[static_cast<std::size_t>(at) + i % std::size_t{dim}]);
    }
    const auto refuse = [&](auto change, Code code, std::string_view message) {
      AuraRotate::Args bad = a;
      change(bad);
      expect_error(run_op<AuraRotate>(d, bad, kernel), code, message);
    };
    using Args = AuraRotate::Args&;
    refuse([](Args b) { b.x.stride[3] = 2; }, Code::unsupported,
           "aura_rotate: x: stride 2 of axis 3, expected 1");
    refuse([](Args b) { b.x.stride[1] = -16; }, Code::unsupported,
           "aura_rotate: x: stride -16 of axis 1, expected at least 0");
    refuse([](Args b) { b.y.stride[1] = 0; }, Code::unsupported,
           "aura_rotate: y: stride 0 of axis 1, expected at least 1");
    refuse([](Args b) { b.y.stride[2] = 15; }, Code::unsupported,
           "aura_rotate: y: stride 15 of axis 2, expected at least 16");
    refuse([](Args b) { b.x.shape[1] = 4; }, Code::invalid_argument,
           "aura_rotate: x: shape [2,4,5,16], expected [30,16] = "
           "[rows,dim]");
    refuse([](Args b) { b.x.stride[0] = std::int64_t{1} << 60; }, Code::invalid_argument,
           "aura_rotate: x: stride 1152921504606846976 spans more than 2^59 elements");
    a.x.stride[0] = 0;  // an input may repeat itself
    expect_ok(run_op<AuraRotate>(d, a, kernel));
  }
  AuraDesc identity = d;
  identity.rotation = Rotation::identity;
  std::vector<float> y(x.size());
  expect_error(run_op<AuraRotate>(identity, {.x = view(std::as_const(x).data(), d.tensor_shape()),
                                             .table = view(signs.data(), {dim}),
                                             .y = view(y.data(), d.tensor_shape())}),
               Code::invalid_argument,
               "aura_rotate: table: given, but read only with a hadamard or dense rotation; "
               "leave it out");
}

}  // namespace
}  // namespace bittern
