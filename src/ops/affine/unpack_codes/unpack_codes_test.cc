#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(UnpackCodes, MatchesRefEverywhere) { oracle::expect_parity("unpack_codes"); }

std::vector<std::uint8_t> unpack(const std::vector<std::uint32_t>& words, std::int64_t count,
                                 std::int32_t bits, std::string_view kernel) {
  const PackDesc d{.outer_size = 1, .axis_size = count, .bits = bits};
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(count), 0xff);
  expect_ok(run_op<UnpackCodes>(
      d, {view(words.data(), d.word_shape()), view(codes.data(), d.code_shape())}, kernel));
  return codes;
}

TEST(UnpackCodes, ReadsFromTheLowestBitOn) {
  for (const auto kernel : kBothKernels) {
    EXPECT_EQ(unpack({0x92E5173Au}, 8, 4, kernel),
              (std::vector<std::uint8_t>{0xA, 3, 7, 1, 5, 0xE, 2, 9}));
    EXPECT_EQ(unpack({02107654321u | 3u << 30, 1}, 11, 3, kernel),
              (std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 7}));
    EXPECT_EQ(unpack({0x44332211u, 0x55u}, 5, 8, kernel),
              (std::vector<std::uint8_t>{0x11, 0x22, 0x33, 0x44, 0x55}));
  }
}

TEST(UnpackCodes, SpareBitsAreIgnored) {
  for (const auto kernel : kBothKernels)
    EXPECT_EQ(unpack({0xfffffff5u}, 1, 4, kernel), std::vector<std::uint8_t>{5});
}

TEST(UnpackCodes, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  std::vector<std::uint32_t> words(8, 0x12345678u);
  std::vector<std::uint8_t> codes(64, 0xcd);
  const auto untouched = codes;
  const PackDesc good{.outer_size = 2, .axis_size = 32, .bits = 4};
  const UnpackCodes::Args args{view(std::as_const(words).data(), good.word_shape()),
                               view(codes.data(), good.code_shape())};
  const auto with = [&](auto change) {
    PackDesc d = good;
    change(d);
    return run_op<UnpackCodes>(d, args);
  };
  const auto operand = [&](auto change) {
    UnpackCodes::Args a = args;
    change(a);
    return run_op<UnpackCodes>(good, a);
  };
  using D = PackDesc&;
  using A = UnpackCodes::Args&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.bits = 0; }), bad, "unpack_codes: bits: 0, expected 1..8");
  expect_error(with([](D d) { d.bits = 9; }), bad, "unpack_codes: bits: 9, expected 1..8");
  expect_error(with([](D d) { d.axis_size = -7; }), bad,
               "unpack_codes: axis_size: -7, expected at least 0");
  expect_error(with([](D d) { d.bits = 3; }), bad,
               "unpack_codes: words: shape [2,4], expected [2,3]");
  expect_error(operand([](A a) { a.words.dtype = DType::s32; }), bad,
               "unpack_codes: words: dtype s32, expected u32");
  expect_error(operand([](A a) { a.codes = {}; }), bad,
               "unpack_codes: codes: null, expected u8 [2,32]");
  expect_error(operand([](A a) { a.codes.stride[1] = 2; }), Code::unsupported,
               "unpack_codes: codes: stride 2 of axis 1, expected 1");
  expect_error(operand([&](A a) { a.words.data = codes.data(); }), bad,
               "unpack_codes: codes: overlaps words, expected memory of its own");
  EXPECT_EQ(codes, untouched);
  expect_ok(run_op<UnpackCodes>(good, args));
  EXPECT_NE(codes, untouched);
}

}  // namespace
}  // namespace bittern
