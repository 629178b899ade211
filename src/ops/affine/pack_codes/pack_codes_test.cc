#include "ops/affine/pack_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::pack;
using oracle::run_op;

TEST(PackCodes, MatchesRefEverywhere) { oracle::expect_parity("pack_codes"); }

TEST(PackCodes, FirstCodeIsLowest) {
  for (const auto kernel : kBothKernels) {
    EXPECT_EQ(pack({0xA, 3, 7, 1, 5, 0xE, 2, 9}, 4, kernel),
              std::vector<std::uint32_t>{0x92E5173Au});
    EXPECT_EQ(pack({1, 0, 1, 1}, 1, kernel), std::vector<std::uint32_t>{0b1101});
    EXPECT_EQ(pack({0x11, 0x22, 0x33, 0x44, 0x55}, 8, kernel),
              (std::vector<std::uint32_t>{0x44332211u, 0x55u}));
  }
}

// 11 codes of 3 bits are 33: the last one starts at bit 30. An octal digit is a code.
TEST(PackCodes, CodesSpillIntoTheNextWord) {
  for (const auto kernel : kBothKernels) {
    const std::uint32_t ten = 02107654321u;
    EXPECT_EQ(pack({1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3}, 3, kernel),
              (std::vector<std::uint32_t>{ten | 3u << 30, 0}));
    EXPECT_EQ(pack({1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 4}, 3, kernel),
              (std::vector<std::uint32_t>{ten, 1}));
  }
}

TEST(PackCodes, LargeCodesAreMasked) {
  for (const auto kernel : kBothKernels) {
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      for (const std::size_t n : {1u, 5u, 64u, 131u}) {
        std::vector<std::uint8_t> codes(n), masked(n);
        for (std::size_t i = 0; i < n; ++i) {
          codes[i] = static_cast<std::uint8_t>(255 - 3 * i);
          masked[i] = static_cast<std::uint8_t>(codes[i] & ((1 << bits) - 1));
        }
        EXPECT_EQ(pack(codes, bits, kernel), pack(masked, bits, "ref")) << bits << " bits";
      }
    }
  }
}

TEST(PackCodes, UnpackBringsEveryCodeBack) {
  std::vector<std::uint8_t> codes(700), back(700);
  std::vector<std::uint32_t> words(200);
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    for (std::size_t i = 0; i < codes.size(); ++i)
      codes[i] = static_cast<std::uint8_t>((i * 167 + i / 5) & ((1u << bits) - 1));
    for (std::int64_t length = 0; length <= 530; length += length < 140 ? 1 : 13) {
      const std::int64_t offset = length % 9;
      const PackDesc d{.outer_size = 1, .axis_size = length, .bits = bits};
      std::fill(back.begin(), back.end(), std::uint8_t{0xee});
      expect_ok(run_op<PackCodes>(d, {view(std::as_const(codes).data() + offset, d.code_shape()),
                                      view(words.data(), d.packed_shape())}));
      expect_ok(run_op<UnpackCodes>(d, {view(std::as_const(words).data(), d.packed_shape()),
                                        view(back.data() + offset, d.code_shape())}));
      EXPECT_TRUE(std::equal(codes.begin() + offset, codes.begin() + offset + length,
                             back.begin() + offset))
          << bits << " bits, " << length << " codes";
    }
  }
}

TEST(PackCodes, SkuAndGuaranteeSpeakOfIntegers) {
  const auto plan = Plan<PackCodes>::select({.outer_size = 1, .axis_size = 8, .bits = 4});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->sku().category, "packing");
  EXPECT_EQ(plan->sku().op, "pack_codes");
  EXPECT_EQ(plan->sku().element, DType::u8);
  EXPECT_EQ(plan->sku().aux_element, DType::u32);
  EXPECT_EQ(plan->precision_guarantee().math_precision, DType::u32);
  EXPECT_EQ(plan->workspace_bytes(), 0u);
}

TEST(PackCodes, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  oracle::expect_pack_errors<PackCodes>();
}

}  // namespace
}  // namespace bittern
