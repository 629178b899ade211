#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(PackPanels, MatchesRefEverywhere) { oracle::expect_parity("pack_panels"); }

// 17 rows of 32 codes; row 16 is alone in the second panel.
TEST(PackPanels, FourBitsByHand) {
  const WeightDesc d{.outputs = 17, .inputs = 32, .group_size = 32};
  std::vector<std::uint32_t> packed(17 * 4);
  std::vector<f16> scales(17), biases(17);
  for (std::uint32_t r = 0; r < 17; ++r) {
    packed[4 * r + 1] = 0x76543210u;  // codes 8 .. 15 are 0 .. 7
    scales[r].bits = static_cast<std::uint16_t>(0x100 + r);
    biases[r].bits = static_cast<std::uint16_t>(0x200 + r);
  }
  for (const auto kernel : kBothKernels) {
    std::vector<std::uint8_t> panels(2 * 16 * 20, 0xee);
    expect_ok(run_op<PackPanels>(d,
                                 {.w = {},
                                  .packed = view(std::as_const(packed).data(), d.packed_shape()),
                                  .scales = view(std::as_const(scales).data(), d.grid_shape()),
                                  .biases = view(std::as_const(biases).data(), d.grid_shape()),
                                  .blocks = {},
                                  .panels = view(panels.data(), d.panel_shape())},
                                 kernel));
    for (std::size_t r = 0; r < 16; ++r) {
      EXPECT_EQ(panels[2 * r], r);
      EXPECT_EQ(panels[2 * r + 1], 1);
      EXPECT_EQ(panels[32 + 2 * r + 1], 2);
      // Vector 1, lane r: byte t has code 8 + t below code 12 + t.
      const std::uint8_t* lane = panels.data() + 64 + 64 + 4 * r;
      EXPECT_EQ(lane[0], 0x40);
      EXPECT_EQ(lane[1], 0x51);
      EXPECT_EQ(lane[2], 0x62);
      EXPECT_EQ(lane[3], 0x73);
    }
    EXPECT_EQ(panels[64], 0);
    const std::uint8_t* second = panels.data() + 320;
    EXPECT_EQ(second[0], 16);
    EXPECT_EQ(second[2], 0);  // no such row
    EXPECT_EQ(second[64 + 64 + 3], 0x73);
    EXPECT_EQ(second[64 + 64 + 4 + 3], 0);
  }
}

// Six bits: the low four of code 5 (quad 1, byte 1), and the high two.
TEST(PackPanels, PlanesByHand) {
  const WeightDesc d{.outputs = 16, .inputs = 32, .bits = 6, .group_size = 32};
  std::vector<std::uint32_t> packed(16 * 6);
  packed[2 * 6] = 0b101101u << 30;  // the low two bits of code 5 of row 2
  packed[2 * 6 + 1] = 0b1011u;      // and the others
  std::vector<f16> scales(16), biases(16);
  for (const auto kernel : kBothKernels) {
    std::vector<std::uint8_t> panels(16 * 28, 0xee);
    expect_ok(run_op<PackPanels>(d,
                                 {.w = {},
                                  .packed = view(std::as_const(packed).data(), d.packed_shape()),
                                  .scales = view(std::as_const(scales).data(), d.grid_shape()),
                                  .biases = view(std::as_const(biases).data(), d.grid_shape()),
                                  .blocks = {},
                                  .panels = view(panels.data(), d.panel_shape())},
                                 kernel));
    std::vector<std::uint8_t> want(16 * 28);
    want[64 + 4 * 2 + 1] = 0b1101 << 4;         // plane of 4, vector 0, second of its quads
    want[64 + 4 * 64 + 4 * 2 + 1] = 0b10 << 2;  // plane of 2, vector 0
    EXPECT_EQ(panels, want);
  }
}

TEST(PackPanels, Errors) {
  std::vector<std::uint8_t> blocks(3 * 288), panels(16 * 288, 7);
  const WeightDesc good{.outputs = 3, .inputs = 512, .type = WeightType::q4_k};
  const PackPanels::Args args{.w = {},
                              .packed = {},
                              .scales = {},
                              .biases = {},
                              .blocks = view(std::as_const(blocks).data(), good.block_shape()),
                              .panels = view(panels.data(), good.panel_shape())};
  const auto with = [&](auto change) {
    WeightDesc d = good;
    change(d);
    return run_op<PackPanels>(d, args);
  };
  using D = WeightDesc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.outputs = -1; }), bad,
               "pack_panels: outputs: -1, expected at least 0");
  expect_error(with([](D d) { d.inputs = 320; }), bad,
               "pack_panels: inputs: 320, expected a multiple of 256, the block of Q4_K");
  expect_error(with([](D d) { d.type = static_cast<WeightType>(17); }), bad,
               "pack_panels: type: 17, expected 0..16");
  expect_error(with([](D d) { d.type = WeightType::affine, d.bits = 7; }), bad,
               "pack_panels: bits: 7, expected one of 2 3 4 5 6 8");
  expect_error(with([](D d) { d.type = WeightType::affine, d.group_size = 16; }), bad,
               "pack_panels: group_size: 16, expected one of 32 64 128");
  expect_error(with([](D d) { d.type = WeightType::affine, d.inputs = 96; }), bad,
               "pack_panels: inputs: 96, expected a multiple of 64, the group_size");
  expect_error(with([](D d) { d.type = WeightType::affine, d.scale_element = DType::f64; }),
               Code::unsupported, "pack_panels: scale_element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.outputs = std::int64_t{1} << 50; }), bad,
               "pack_panels: sizes: more than 2^59 elements");
  expect_error(with([](D d) { d.outputs = 20; }), bad,
               "pack_panels: blocks: shape [3,288], expected [20,288] = [outputs,bytes]");
  EXPECT_EQ(panels, std::vector<std::uint8_t>(16 * 288, 7));
  expect_ok(run_op<PackPanels>(good, args));
}

}  // namespace
}  // namespace bittern
