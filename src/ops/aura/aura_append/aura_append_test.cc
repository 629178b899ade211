#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/codec.h"
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using Op = AuraAppend;
using Desc = AuraAppendDesc;

TEST(AuraAppend, MatchesRefEverywhere) { oracle::expect_parity("aura_append"); }

constexpr std::uint32_t kOld = 0xdeadbeefu;

// One page of 4 tokens, rows of two elements: 1-bit codes of their signs, and their norms.
struct Signs {
  Desc d{.tokens = 2,
         .dim = 2,
         .page_size = 4,
         .pages = 1,
         .k_bits = 1,
         .v_bits = 1,
         .k_rotation = Rotation::identity,
         .v_rotation = Rotation::identity,
         .k_scale_rule = ScaleRule::none,
         .v_scale_rule = ScaleRule::none};
  float k[4] = {3, 4, -6, 8}, v[4] = {-5, -12, 0, 0};
  std::int32_t slots[2] = {2, 0}, kept_slots[2] = {-1, -1};
  float boundary = 0, levels[2] = {-0.7f, 0.7f};
  std::uint32_t packed[2][4] = {{kOld, kOld, kOld, kOld}, {kOld, kOld, kOld, kOld}};
  float scales[2][4] = {{9, 9, 9, 9}, {9, 9, 9, 9}};
  Op::Args a{.k = view(static_cast<const float*>(k), {2, 1, 2}),
             .v = view(static_cast<const float*>(v), {2, 1, 2}),
             .slots = view(static_cast<const std::int32_t*>(slots), {2}),
             .k_boundaries = view(static_cast<const float*>(&boundary), {1}),
             .v_boundaries = view(static_cast<const float*>(&boundary), {1}),
             .k_codebook = view(static_cast<const float*>(levels), {2}),
             .v_codebook = view(static_cast<const float*>(levels), {2}),
             .k_packed = view(packed[0], {1, 1, 4, 1}),
             .k_scales = view(scales[0], {1, 1, 4}),
             .v_packed = view(packed[1], {1, 1, 4, 1}),
             .v_scales = view(scales[1], {1, 1, 4})};
};

TEST(AuraAppend, MatchesAnExampleWorkedByHand) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    Signs s;
    const float mean[] = {0, 8};
    s.a.k_mean = view(mean, {1, 2});
    expect_ok(oracle::run_op<Op>(s.d, s.a, kernel));
    // K: (3, 4) - (0, 8) and (-6, 8) - (0, 8); 0 is not above the boundary.
    EXPECT_EQ(s.packed[0][2], 1u);
    EXPECT_EQ(s.scales[0][2], 5);
    EXPECT_EQ(s.packed[0][0], 0u);
    EXPECT_EQ(s.scales[0][0], 6);
    EXPECT_EQ(s.packed[1][2], 0u);
    EXPECT_EQ(s.scales[1][2], 13);
    EXPECT_EQ(s.packed[1][0], 0u);
    EXPECT_EQ(s.scales[1][0], 0);
    for (const int side : {0, 1}) {
      for (const int row : {1, 3}) {  // nobody's slots
        EXPECT_EQ(s.packed[side][row], kOld);
        EXPECT_EQ(s.scales[side][row], 9);
      }
    }
  }
}

TEST(AuraAppend, ANewTokenTakesThePlaceOfTheOneThatLeaves) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    Signs s;
    s.d.kept = 3;
    s.d.exact = DType::f32;
    float kept[2][6] = {{1, 1, 8, -15, 1, 1}, {1, 1, -24, 7, 1, 1}};
    s.kept_slots[1] = 1;  // the second token; the first is coded at once
    s.a.kept_slots = view(static_cast<const std::int32_t*>(s.kept_slots), {2});
    s.a.k_kept = view(kept[0], {1, 1, 3, 2});
    s.a.v_kept = view(kept[1], {1, 1, 3, 2});
    expect_ok(oracle::run_op<Op>(s.d, s.a, kernel));
    EXPECT_EQ(s.packed[0][2], 3u);
    EXPECT_EQ(s.scales[0][2], 5);
    EXPECT_EQ(s.packed[0][0], 1u);
    EXPECT_EQ(s.scales[0][0], 17);
    EXPECT_EQ(s.packed[1][0], 2u);
    EXPECT_EQ(s.scales[1][0], 25);
    const float want[2][6] = {{1, 1, -6, 8, 1, 1}, {1, 1, 0, 0, 1, 1}};
    EXPECT_EQ(std::memcmp(kept, want, sizeof want), 0);
  }
}

TEST(AuraAppend, NegativeSlotsAreSkipped) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    Signs s;
    s.slots[0] = -1;
    s.slots[1] = std::numeric_limits<std::int32_t>::min();
    const Signs before = s;
    expect_ok(oracle::run_op<Op>(s.d, s.a, kernel));
    EXPECT_EQ(std::memcmp(s.packed, before.packed, sizeof s.packed), 0);
    EXPECT_EQ(std::memcmp(s.scales, before.scales, sizeof s.scales), 0);
  }
}

// x - mean overflows: the direction stays, and the length is the largest there is.
TEST(AuraAppend, ACentredRowThatOverflowsKeepsItsDirection) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    Signs s;
    const float mean[] = {-3e38f, 0};
    s.k[0] = 3e38f;
    s.k[1] = -1;
    s.a.k_mean = view(mean, {1, 2});
    expect_ok(oracle::run_op<Op>(s.d, s.a, kernel));
    EXPECT_EQ(s.packed[0][2], 1u);
    EXPECT_EQ(s.scales[0][2], std::numeric_limits<float>::max());
    // Half of the row fits, and so does its scale: 1.5e38 + 0.5e38.
    Signs half;
    const float less[] = {-1e38f, 0};
    half.k[0] = 3e38f;
    half.k[1] = 0;
    half.levels[1] = 2;
    half.d.k_scale_rule = ScaleRule::matched;  // the length of (2, -0.7)
    half.a.k_mean = view(less, {1, 2});
    expect_ok(oracle::run_op<Op>(half.d, half.a, kernel));
    EXPECT_NEAR(static_cast<double>(half.scales[0][2]) / (4e38 / std::sqrt(4.49)), 1, 1e-6);
  }
}

// The ops that it fuses, one after the other.
template <class X>
void expect_fused(bool interleaved, Rotation rotation, std::string_view kernel) {
  constexpr std::int64_t kTokens = 5, kHeads = 3, kDim = 24, kPage = 4, kPages = 3;
  constexpr DType kElement = dtype_of<X>();
  oracle::Rng rng(7);
  const auto normals = [&](std::int64_t n) {
    std::vector<X> x(static_cast<std::size_t>(n));
    for (X& value : x) value = from_math<X>(static_cast<float>(rng.normal()));
    return x;
  };
  const Shape shape{kTokens, kHeads, kDim};
  const std::vector<X> k = normals(shape.numel()), v = normals(shape.numel());
  const std::int32_t positions[] = {0, 1, 77, 4095, 100000}, slots[] = {7, -1, 0, 3, 10};
  std::vector<float> frequencies;
  for (int i = 0; i < 8; ++i) frequencies.push_back(std::pow(10.0f, static_cast<float>(-i) / 2));
  const Desc d{.tokens = kTokens,
               .kv_heads = kHeads,
               .dim = kDim,
               .page_size = kPage,
               .pages = kPages,
               .rotary_dim = 16,
               .factor = 1.5,
               .interleaved = interleaved,
               .k_bits = 5,
               .v_bits = 3,
               .k_rotation = rotation,
               .v_rotation = rotation,
               .k_scale_rule = ScaleRule::unbiased,
               .v_scale_rule = ScaleRule::least_squares,
               .element = kElement,
               .f16_scale = interleaved};
  const auto table = *make_rotation(rotation, kDim, 3);
  const auto k_book = *sphere_codebook(kDim, 5), v_book = *sphere_codebook(kDim, 3);
  const ConstView table_view =
      rotation == Rotation::identity ? ConstView{} : view(table.data(), d.rotation_shape(rotation));

  std::vector<X> turned(k.size());
  const RopeDesc rope{.tokens = kTokens,
                      .heads = kHeads,
                      .dim = kDim,
                      .rotary_dim = 16,
                      .factor = 1.5,
                      .element = kElement,
                      .layout = interleaved ? RopeLayout::interleaved : RopeLayout::half};
  expect_ok(oracle::run_op<Rope>(rope, {.x = view(k.data(), shape),
                                        .positions = view(positions, {kTokens}),
                                        .inverse_frequencies = view(frequencies.data(), {8}),
                                        .y = view(turned.data(), shape)}));
  struct Coded {
    std::vector<std::uint32_t> packed;
    std::vector<std::byte> scales;
  };
  const auto size = static_cast<std::size_t>(d.f16_scale ? 2 : 4);
  const auto encode = [&](const std::vector<X>& x, std::int32_t bits, ScaleRule rule,
                          const Codebook& book) {
    const AuraDesc e{.rows = kTokens * kHeads,
                     .dim = kDim,
                     .bits = bits,
                     .element = kElement,
                     .rotation = rotation,
                     .scale_rule = rule,
                     .f16_scale = d.f16_scale};
    Coded c{std::vector<std::uint32_t>(static_cast<std::size_t>(e.packed_shape().numel())),
            std::vector<std::byte>(size * static_cast<std::size_t>(e.rows))};
    expect_ok(oracle::run_op<AuraEncode>(
        e, {.x = view(x.data(), e.tensor_shape()),
            .table = table_view,
            .boundaries = view(book.boundaries.data(), {e.levels() - 1}),
            .codebook = view(book.levels.data(), {e.levels()}),
            .packed = view(c.packed.data(), e.packed_shape()),
            .scales = {c.scales.data(), e.scale_element(), {}, e.scale_shape(), {1, 1}}}));
    return c;
  };
  const Coded want[] = {encode(turned, 5, d.k_scale_rule, k_book),
                        encode(v, 3, d.v_scale_rule, v_book)};

  const std::size_t words[] = {static_cast<std::size_t>(packed_words(kDim, 5)),
                               static_cast<std::size_t>(packed_words(kDim, 3))};
  constexpr std::size_t kRows = kPages * kHeads * kPage;
  Coded got[2];
  for (std::size_t s = 0; s < 2; ++s)
    got[s] = {std::vector<std::uint32_t>(kRows * words[s], kOld),
              std::vector<std::byte>(kRows * size, std::byte{0x5a})};
  const auto scales = [&](Coded& c) {
    return MutView{
        c.scales.data(), d.scale_element(), {}, d.scale_shape(), d.scale_shape().dense_strides()};
  };
  expect_ok(oracle::run_op<Op>(d,
                               {.k = view(k.data(), shape),
                                .v = view(v.data(), shape),
                                .slots = view(slots, {kTokens}),
                                .k_boundaries = view(k_book.boundaries.data(), d.boundary_shape(5)),
                                .v_boundaries = view(v_book.boundaries.data(), d.boundary_shape(3)),
                                .k_codebook = view(k_book.levels.data(), d.codebook_shape(5)),
                                .v_codebook = view(v_book.levels.data(), d.codebook_shape(3)),
                                .k_table = table_view,
                                .v_table = table_view,
                                .positions = view(positions, {kTokens}),
                                .inverse_frequencies = view(frequencies.data(), {8}),
                                .k_packed = view(got[0].packed.data(), d.packed_shape(5)),
                                .k_scales = scales(got[0]),
                                .v_packed = view(got[1].packed.data(), d.packed_shape(3)),
                                .v_scales = scales(got[1])},
                               kernel));
  for (std::size_t s = 0; s < 2; ++s) {
    Coded expected{std::vector<std::uint32_t>(kRows * words[s], kOld),
                   std::vector<std::byte>(kRows * size, std::byte{0x5a})};
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t h = 0; h < kHeads && slots[t] >= 0; ++h) {
        const auto slot = static_cast<std::size_t>(slots[t]);
        const std::size_t to = (slot / kPage * kHeads + h) * kPage + slot % kPage,
                          from = t * kHeads + h;
        std::copy_n(want[s].packed.data() + from * words[s], words[s],
                    expected.packed.data() + to * words[s]);
        std::copy_n(want[s].scales.data() + from * size, size, expected.scales.data() + to * size);
      }
    }
    EXPECT_EQ(got[s].packed, expected.packed) << s;
    EXPECT_EQ(got[s].scales, expected.scales) << s;
  }
}

TEST(AuraAppend, IsRopeThenEncodeThenACopyToTheSlots) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    for (const bool interleaved : {false, true}) {
      expect_fused<float>(interleaved, Rotation::hadamard, kernel);
      expect_fused<bf16>(interleaved, Rotation::dense, kernel);
      expect_fused<f16>(interleaved, Rotation::identity, kernel);
    }
  }
}

// Nobody has checked them there.
TEST(AuraAppend, CudaSkipsSlotsBeyondTheLast) {
  BITTERN_NEEDS_CUDA();
  const Desc d{.tokens = 3, .kv_heads = 2, .dim = 16, .page_size = 4, .pages = 2, .kept = 3};
  constexpr Device kGpu{Device::Type::cuda, 0};
  const auto plan = Plan<Op>::select(d, kGpu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  auto got = oracle::make_problem<Op>(d, 1, {.left_out = ~0});
  auto untouched = oracle::make_problem<Op>(d, 1, {.left_out = ~0});
  for (auto* p : {&got, &untouched}) {
    const double slots[] = {8, 2147483647, -2147483648.0}, kept[] = {3, 2147483647, -1};
    for (std::int64_t t = 0; t < 3; ++t) {
      oracle::put(p->args.slots, t, slots[t]);
      oracle::put(p->args.kept_slots, t, kept[t]);
    }
  }
  expect_ok(oracle::run_on(kGpu, got, plan->workspace_bytes(),
                           [&](const auto& args, Workspace w) { return plan->run(args, {}, w); }));
  EXPECT_EQ(oracle::compare(got, untouched), "");
}

TEST(AuraAppend, RefusesWhatItCannotDo) {
  const auto refused = [](auto change, const char* message, Code code = Code::invalid_argument) {
    Signs s;
    change(s);
    expect_error(oracle::run_op<Op>(s.d, s.a), code, message);
  };
  refused([](Signs& s) { s.slots[1] = 4; },
          "aura_append: slots: [1] is 4, expected at most 3, or a negative number for none");
  refused([](Signs& s) { s.slots[1] = 2; },
          "aura_append: slots: 2 of two tokens, expected a slot for each");
  refused([](Signs& s) { s.boundary = std::numeric_limits<float>::infinity(); },
          "aura_append: k_boundaries: [0] is inf, expected a finite value");
  refused([](Signs& s) { s.a.kept_slots = s.a.slots; },
          "aura_append: kept_slots: given, but read only with kept; leave it out");
  refused([](Signs& s) { s.a.positions = s.a.slots; },
          "aura_append: positions: given, but read only with rotary_dim; leave it out");
  refused([](Signs& s) { s.d.kept = 1; }, "aura_append: kept_slots: null, expected s32 [2]");
  refused([](Signs& s) { s.d.rotary_dim = 1; },
          "aura_append: rotary_dim: 1, expected an even number");
  refused([](Signs& s) { s.d.rotary_dim = 4; }, "aura_append: rotary_dim: 4, expected 0..2");
  refused([](Signs& s) { s.d.page_size = 0; }, "aura_append: page_size: 0, expected 1..2147483647");
  refused([](Signs& s) { s.d.pages = std::int64_t{1} << 30; },
          "aura_append: pages: 1073741824, expected 0..536870911");
  refused([](Signs& s) { s.d.k_bits = 9; }, "aura_append: k_bits: 9, expected 1..8");
  refused([](Signs& s) { s.d.v_scale_rule = static_cast<ScaleRule>(4); },
          "aura_append: v_scale_rule: 4, expected 0..3");
  refused([](Signs& s) { s.d.exact = DType::s8; },
          "aura_append: exact: s8, expected f32, f16 or bf16", Code::unsupported);
}

}  // namespace
}  // namespace bittern
