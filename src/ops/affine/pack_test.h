// What the tests of pack_codes and unpack_codes share: one row through an op, and the errors both
// give.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "oracle/op_test.h"

namespace bittern::oracle {

// One row, over words that are dirty.
inline std::vector<std::uint32_t> pack(const std::vector<std::uint8_t>& codes, std::int32_t bits,
                                       std::string_view kernel) {
  const PackDesc d{
      .outer_size = 1, .axis_size = static_cast<std::int64_t>(codes.size()), .bits = bits};
  std::vector<std::uint32_t> words(static_cast<std::size_t>(d.packed_shape()[1]), 0xffffffffu);
  expect_ok(run_op<PackCodes>(
      d, {view(codes.data(), d.code_shape()), view(words.data(), d.packed_shape())}, kernel));
  return words;
}
inline std::vector<std::uint8_t> unpack(const std::vector<std::uint32_t>& words, std::int64_t count,
                                        std::int32_t bits, std::string_view kernel) {
  const PackDesc d{.outer_size = 1, .axis_size = count, .bits = bits};
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(count), 0xff);
  expect_ok(run_op<UnpackCodes>(
      d, {view(words.data(), d.packed_shape()), view(codes.data(), d.code_shape())}, kernel));
  return codes;
}

// Every error names the field or operand and leaves the output alone.
template <class Op>
void expect_pack_errors() {
  std::vector<std::uint8_t> codes(64, 0xcd);
  std::vector<std::uint32_t> words(8, 0x12345678u);
  const auto old_codes = codes;
  const auto old_words = words;
  const PackDesc good{.outer_size = 2, .axis_size = 32, .bits = 4};
  typename Op::Args args;
  args.codes = view(codes.data(), good.code_shape());
  args.packed = view(words.data(), good.packed_shape());
  const auto with = [&](auto change) {
    PackDesc d = good;
    change(d);
    return run_op<Op>(d, args);
  };
  const auto operand = [&](auto change) {
    typename Op::Args a = args;
    change(a);
    return run_op<Op>(good, a);
  };
  const auto refused = [](const Status& status, Code code, const char* text) {
    expect_error(status, code, std::string(Op::kName) + ": " + text);
  };
  using D = PackDesc&;
  using A = typename Op::Args&;
  const Code bad = Code::invalid_argument;
  refused(with([](D d) { d.bits = 0; }), bad, "bits: 0, expected 1..8");
  refused(with([](D d) { d.bits = 9; }), bad, "bits: 9, expected 1..8");
  refused(with([](D d) { d.outer_size = -1; }), bad, "outer_size: -1, expected at least 0");
  refused(with([](D d) { d.axis_size = -7; }), bad, "axis_size: -7, expected at least 0");
  refused(with([](D d) { d.bits = 5; }), bad,
          "packed: shape [2,4], expected [2,5] = [outer_size,words]");
  refused(operand([](A a) { a.codes.dtype = DType::s8; }), bad, "codes: dtype s8, expected u8");
  refused(operand([](A a) { a.packed.dtype = DType::s32; }), bad,
          "packed: dtype s32, expected u32");
  refused(operand([](A a) { a.codes = {}; }), bad, "codes: null, expected u8 [2,32]");
  refused(operand([](A a) { a.codes.stride[1] = 2; }), Code::unsupported,
          "codes: stride 2 of axis 1, expected 1");
  refused(operand([](A a) { a.packed.stride[0] = 3; }), Code::unsupported,
          "packed: stride 3 of axis 0, expected at least 4");
  refused(operand([&](A a) { a.codes.data = words.data(); }), bad,
          std::is_same_v<Op, PackCodes> ? "packed: overlaps codes, expected memory of its own"
                                        : "codes: overlaps packed, expected memory of its own");
  EXPECT_EQ(codes, old_codes);
  EXPECT_EQ(words, old_words);
  expect_ok(run_op<Op>(good, args));
  EXPECT_NE(codes == old_codes, words == old_words);  // the output has changed, the input has not
  args.codes.shape = {0, 32};
  args.packed.shape = {0, 4};
  expect_ok(run_op<Op>({.outer_size = 0, .axis_size = 32, .bits = 4}, args));
}

}  // namespace bittern::oracle
