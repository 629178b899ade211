#include <numeric>

#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(PackCodes, MatchesRefEverywhere) { oracle::expect_parity("pack_codes"); }

// One row, over words that are dirty.
std::vector<std::uint32_t> pack(const std::vector<std::uint8_t>& codes, std::int32_t bits,
                                std::string_view kernel) {
  const PackDesc d{
      .outer_size = 1, .axis_size = static_cast<std::int64_t>(codes.size()), .bits = bits};
  std::vector<std::uint32_t> words(static_cast<std::size_t>(d.word_shape()[1]), 0xffffffffu);
  expect_ok(run_op<PackCodes>(
      d, {view(codes.data(), d.code_shape()), view(words.data(), d.word_shape())}, kernel));
  return words;
}

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
                                      view(words.data(), d.word_shape())}));
      expect_ok(run_op<UnpackCodes>(d, {view(std::as_const(words).data(), d.word_shape()),
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
  std::vector<std::uint8_t> codes(64, 1);
  std::vector<std::uint32_t> words(32, 0xabcdef01u);
  const auto untouched = words;
  const PackDesc good{.outer_size = 2, .axis_size = 32, .bits = 4};
  const PackCodes::Args args{view(std::as_const(codes).data(), good.code_shape()),
                             view(words.data(), good.word_shape())};
  const auto with = [&](auto change) {
    PackDesc d = good;
    change(d);
    return run_op<PackCodes>(d, args);
  };
  const auto operand = [&](auto change) {
    PackCodes::Args a = args;
    change(a);
    return run_op<PackCodes>(good, a);
  };
  using D = PackDesc&;
  using A = PackCodes::Args&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.bits = 0; }), bad, "pack_codes: bits: 0, expected 1..8");
  expect_error(with([](D d) { d.bits = 9; }), bad, "pack_codes: bits: 9, expected 1..8");
  expect_error(with([](D d) { d.outer_size = -1; }), bad,
               "pack_codes: outer_size: -1, expected at least 0");
  expect_error(with([](D d) { d.axis_size = -7; }), bad,
               "pack_codes: axis_size: -7, expected at least 0");
  expect_error(with([](D d) { d.bits = 5; }), bad,
               "pack_codes: words: shape [2,4], expected [2,5]");
  expect_error(operand([](A a) { a.codes.dtype = DType::s8; }), bad,
               "pack_codes: codes: dtype s8, expected u8");
  expect_error(operand([](A a) { a.codes = {}; }), bad,
               "pack_codes: codes: null, expected u8 [2,32]");
  expect_error(operand([](A a) { a.codes.stride[1] = 2; }), Code::unsupported,
               "pack_codes: codes: stride 2 of axis 1, expected 1");
  expect_error(operand([](A a) { a.words.stride[0] = 3; }), Code::unsupported,
               "pack_codes: words: stride 3 of axis 0, expected at least 4");
  expect_error(operand([&](A a) { a.codes.data = words.data(); }), bad,
               "pack_codes: words: overlaps codes, expected memory of its own");
  EXPECT_EQ(words, untouched);
  expect_ok(run_op<PackCodes>(good, args));
  EXPECT_NE(words, untouched);
  expect_ok(
      run_op<PackCodes>({.outer_size = 0, .axis_size = 32, .bits = 4},
                        {view(std::as_const(codes).data(), {0, 32}), view(words.data(), {0, 4})}));
}

}  // namespace
}  // namespace bittern
