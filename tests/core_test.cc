// Dtypes, shapes, scalar arithmetic and descriptor fields.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <new>
#include <random>
#include <stdexcept>
#include <system_error>

#include "core/guarded.h"
#include "core/numerics.h"
#include "plan/any_op.h"
#include "plan/fields.h"

namespace bittern {
namespace {

// ---- errors ----

static_assert(std::is_nothrow_copy_constructible_v<Status>);
static_assert(std::is_nothrow_move_constructible_v<Status>);
static_assert(std::is_nothrow_copy_assignable_v<Status>);
static_assert(std::is_nothrow_constructible_v<Status, Code, std::string_view>);
static_assert(sizeof(Status) == sizeof(void*));

TEST(Status, IsACodeAndAMessage) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().code(), Code::ok);
  EXPECT_EQ(Status().message(), "");
  EXPECT_TRUE(Status(Code::ok, "all is well").ok());
  EXPECT_EQ(Status(Code::ok, "all is well").message(), "");
  const std::string text(1000, 'x');
  Status status = invalid(text);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_EQ(status.message(), text);
  const Status copy = status;
  const Status moved = std::move(status);
  status = unsupported("other");
  EXPECT_EQ(copy.message(), text);
  EXPECT_EQ(moved.message(), text);
  EXPECT_EQ(status.message(), "other");
  const Status& itself = status;
  status = itself;
  EXPECT_EQ(status.message(), "other");
  status = copy;
  EXPECT_EQ(status.message(), text);
  status = {};
  EXPECT_TRUE(status.ok());
}

TEST(Status, OutOfMemoryIsOneForAll) {
  Status status = Status::out_of_memory();
  const Status copy = status;
  EXPECT_EQ(status.code(), Code::out_of_memory);
  EXPECT_EQ(copy.message(), "out of memory");
  EXPECT_EQ(copy.message().data(), Status::out_of_memory().message().data());
}

TEST(Result, HasAValueOrAReason) {
  const Result<int> value = 3;
  EXPECT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  const Result<int> reason = invalid("why");
  EXPECT_FALSE(reason.ok());
  EXPECT_EQ(reason.status().message(), "why");
}

// Never one that is neither.
TEST(Result, RefusesAnOkStatus) {
  const Result<int> neither = Status();
  EXPECT_FALSE(neither.ok());
  EXPECT_FALSE(neither.status().ok());
  EXPECT_EQ(neither.status().code(), Code::internal);
  EXPECT_EQ(neither.status().message(), "a Result of an ok Status, which has no value");
}

TEST(Guarded, TurnsWhatIsThrownIntoAStatus) {
  const auto expect = [](auto error, Code code, std::string_view message) {
    const Status status = guarded("name", [&]() -> Status { throw error; });
    EXPECT_EQ(status.code(), code);
    EXPECT_EQ(status.message(), message);
    const Result<int> result = guarded("name", [&]() -> Result<int> { throw error; });
    EXPECT_EQ(result.status().code(), code);
  };
  expect(std::bad_alloc(), Code::out_of_memory, "name: out of memory");
  expect(std::bad_array_new_length(), Code::out_of_memory, "name: out of memory");
  expect(std::length_error("vector"), Code::out_of_memory, "name: out of memory");
  expect(std::runtime_error("odd"), Code::internal, "name: odd");
  expect(3, Code::internal, "name: unknown exception");
  const auto again = std::make_error_code(std::errc::resource_unavailable_try_again);
  expect(std::system_error(again, "thread"), Code::unavailable,
         "name: thread: Resource temporarily unavailable");
  const auto full = std::make_error_code(std::errc::no_space_on_device);
  expect(std::filesystem::filesystem_error("copy", full), Code::io_error,
         "name: filesystem error: copy: No space left on device");
  const auto memory = std::make_error_code(std::errc::not_enough_memory);
  expect(std::system_error(memory), Code::out_of_memory, "out of memory");
  EXPECT_EQ(guarded("", []() -> Status { throw std::bad_alloc(); }).message(), "out of memory");
  EXPECT_EQ(guarded(std::string(5000, 'n'), []() -> Status { throw std::bad_alloc(); }).message(),
            std::string(256, 'n') + ": out of memory");
  EXPECT_EQ(*guarded("", []() -> Result<int> { return 4; }), 4);
}

// The value of an f16 from its definition.
double f16_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(DType, F16WidensByDefinition) {
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float x = to_f32(f16{bits});
    if (std::isnan(f16_value(bits))) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_TRUE(std::isnan(to_f32(to_f16(x))));
    } else {
      ASSERT_EQ(static_cast<double>(x), f16_value(bits));
      ASSERT_EQ(to_f16(x).bits, bits) << "not kept by a round trip";
    }
  }
}

TEST(DType, F16RoundsToNearestEven) {
  // Between each finite f16 and the next: the midpoint and its f32 neighbours.
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = f16_value(bits), high = f16_value(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
    const std::uint16_t even = bits % 2 == 0 ? bits : static_cast<std::uint16_t>(bits + 1);
    ASSERT_EQ(to_f16(middle).bits, even);
    ASSERT_EQ(to_f16(-middle).bits, even | 0x8000);
    ASSERT_EQ(to_f16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(to_f16(std::nextafter(middle, 1e9f)).bits, bits + 1);
  }
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(INFINITY).bits, 0x7c00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);
  EXPECT_EQ(to_f16(std::nextafter(0x1p-25f, 1.0f)).bits, 1);
}

TEST(DType, Bf16RoundsToNearestEvenAndKeepsSubnormals) {
  for (std::uint32_t high = 0; high < 0x7f80; ++high) {
    const auto at = [&](std::uint32_t low) { return std::bit_cast<float>(high << 16 | low); };
    ASSERT_EQ(to_bf16(at(0)).bits, high);
    ASSERT_EQ(to_bf16(at(0x7fff)).bits, high);
    ASSERT_EQ(to_bf16(at(0x8000)).bits, high + high % 2);
    ASSERT_EQ(to_bf16(at(0x8001)).bits, high + 1);
  }
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Numerics, ScaledIsOneRounding) {
  std::mt19937_64 rng(1);
  int inexact_in_double = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto difference =
        static_cast<std::int64_t>(rng() % (std::uint64_t{1} << 33)) - (std::int64_t{1} << 32);
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
    if (!std::isfinite(x)) continue;
    // 33 + 24 bits fit the 64-bit significand of x86's long double exactly.
    const long double product = static_cast<long double>(difference) * static_cast<long double>(x);
    inexact_in_double += static_cast<long double>(static_cast<double>(product)) != product;
    ASSERT_EQ(scaled(difference, x), static_cast<float>(product)) << difference << " * " << x;
  }
  EXPECT_GT(inexact_in_double, 1000);
}

TEST(Numerics, HalvingSumPadsWithZeros) {
  std::vector<float> three = {1, 2, 4};
  EXPECT_EQ(halving_sum(three), 7.0f);
  // ((a0 + a2) + (a1 + a3)): a tree no other order reproduces on these values.
  std::vector<float> four = {1e8f, 1.0f, -1e8f, 1.0f};
  EXPECT_EQ(halving_sum(four), 2.0f);
  std::vector<float> five = {1e8f, 3.0f, 0.0f, 0.0f, -1e8f};
  EXPECT_EQ(halving_sum(five), 3.0f);
  std::vector<double> none;
  EXPECT_EQ(halving_sum(none), 0.0);
  std::vector<float> minus_zero = {-0.0f, -0.0f, -0.0f};
  EXPECT_FALSE(std::signbit(halving_sum(minus_zero))) << "the padding takes part";
}

TEST(Numerics, QuotientAndCode) {
  EXPECT_EQ(quotient(5.0f, 0.0f), 0.0f);
  EXPECT_EQ(quotient(5.0f, NAN), 0.0f);
  EXPECT_EQ(quotient(NAN, 2.0f), 0.0f);
  EXPECT_EQ(quotient(INFINITY, INFINITY), 0.0f);
  EXPECT_EQ(quantize_code(2.5f, 0, -8, 7), 2);
  EXPECT_EQ(quantize_code(2.5f, 1, -8, 7), 3) << "rounded before the zero point";
  EXPECT_EQ(quantize_code(INFINITY, std::numeric_limits<std::int32_t>::min(), -8, 7), 7);
  EXPECT_EQ(quantize_code(-INFINITY, std::numeric_limits<std::int32_t>::max(), -8, 7), -8);
  EXPECT_EQ(quantize_code(0x1p31f, std::numeric_limits<std::int32_t>::min(), -8, 7), 0)
      << "the sum is exact";
}

TEST(Geometry, FourGranularitiesAreOneRule) {
  const QuantizeDesc group{.outer_size = 2, .axis_size = 6, .group_size = 3};
  EXPECT_EQ(group.geometry().param(1, 5), 3);
  EXPECT_EQ(group.param_shape(), (Shape{2, 2}));
  const QuantizeDesc token{.outer_size = 2, .axis_size = 6, .granularity = Granularity::token};
  EXPECT_EQ(token.geometry().param(1, 5), 1);
  EXPECT_EQ(token.param_shape(), (Shape{2}));
  const QuantizeDesc channel{
      .outer_size = 2, .axis_size = 6, .inner_size = 4, .granularity = Granularity::channel};
  EXPECT_EQ(channel.geometry().param(1, 23), 5);
  EXPECT_EQ(channel.geometry().count(), 8);
  EXPECT_EQ(channel.tensor_shape(), (Shape{2, 6, 4}));
  const QuantizeDesc tensor{.outer_size = 2, .axis_size = 6, .granularity = Granularity::tensor};
  EXPECT_EQ(tensor.geometry().param(1, 5), 0);
  EXPECT_EQ(tensor.geometry().count(), 12);
}

TEST(Fields, TextAndIntegersReachADescriptor) {
  QuantizeDesc d;
  EXPECT_TRUE(set_field<QuantizePerGroup>(d, "outer_size", std::string_view("5")).ok());
  EXPECT_TRUE(set_field<QuantizePerGroup>(d, "element", std::string_view("bf16")).ok());
  EXPECT_TRUE(set_field<QuantizePerGroup>(d, "granularity", std::int64_t{2}).ok());
  EXPECT_EQ(d.outer_size, 5);
  EXPECT_EQ(d.element, DType::bf16);
  EXPECT_EQ(d.granularity, Granularity::channel);
  EXPECT_EQ(set_field<QuantizePerGroup>(d, "element", std::string_view("f8")).message(),
            "quantize_per_group: element: f8, expected f32 f64 f16 bf16 u8 s8 s32 u32");
  EXPECT_EQ(set_field<QuantizePerGroup>(d, "q_min", std::int64_t{1} << 40).message(),
            "quantize_per_group: q_min: 1099511627776 does not fit 32 bits");
  EXPECT_EQ(set_field<QuantizePerGroup>(d, "q_min", std::string_view("1x")).message(),
            "quantize_per_group: q_min: 1x, expected an integer");
  EXPECT_EQ(set_field<QuantizePerGroup>(d, "granularity", std::int64_t{4}).message(),
            "quantize_per_group: granularity: 4, expected 0..3");
  EXPECT_NE(set_field<QuantizePerGroup>(d, "group", std::int64_t{1})
                .message()
                .find("no field group, expected one of outer_size"),
            std::string_view::npos);
}

TEST(AnyOp, RefusalsNameWhatWasMeantAndWhatIsTaken) {
  const auto set = [](std::string_view op, std::string_view field, std::string_view text) {
    return std::string((*find_op(op))->make_desc()->set(field, text).message());
  };
  EXPECT_EQ(set("quantize_per_group", "grop_size", "16").substr(0, 83),
            "quantize_per_group: no field grop_size (did you mean group_size?), expected one of ");
  EXPECT_EQ(set("quantize_per_group", "group", "16").substr(0, 66),
            "quantize_per_group: no field group (did you mean group_size?), exp");
  EXPECT_EQ(set("quantize_per_group", "xyzzy", "16").substr(0, 52),
            "quantize_per_group: no field xyzzy, expected one of ");
  EXPECT_EQ(
      (*find_op("pack_codes"))->make_desc()->get("bit").status().message(),
      "pack_codes: no field bit (did you mean bits?), expected one of outer_size axis_size bits");
  // Of all dtypes those that the op takes.
  EXPECT_EQ(set("quantize_per_group", "code", "int8"),
            "quantize_per_group: code: int8, expected u8 or s8");
  EXPECT_EQ(set("gdn_chunk_forward", "element", "float32"),
            "gdn_chunk_forward: element: float32, expected f32, f16 or bf16");
  EXPECT_EQ(set("gguf_quantize", "type", "Q9_0").find("IQ4_NL"), std::string::npos);
  EXPECT_NE(set("gguf_dequantize", "type", "Q9_0").find("IQ4_NL"), std::string::npos);
  EXPECT_EQ(find_op("quantize_per_grop").status().message().substr(0, 68),
            "no op called quantize_per_grop (did you mean quantize_per_group?), e");
  const auto lsq = (*find_op("qdq_affine_init"))->make_desc();
  const auto plan = lsq->select({}, Preference::exact);
  ASSERT_TRUE(plan);
  EXPECT_EQ((*plan)->no_operand("importance").message(),
            "qdq_affine_init: importance: method is minmax; importance goes with method lsq only");
  EXPECT_EQ((*plan)->no_operand("weight").message().substr(0, 34),
            "qdq_affine_init: no operand weight");
}

TEST(AnyOp, EveryOpIsListedWithItsOperands) {
  for (const AnyOp* op : all_ops()) {
    EXPECT_FALSE(op->fields().empty()) << op->name();
    EXPECT_GE(op->operands().size(), 2u) << op->name();
    const auto desc = op->make_desc();
    for (const FieldInfo& field : op->fields()) {
      if (field.real) {
        EXPECT_EQ(*desc->get_real(field.name), field.default_real) << op->name() << field.name;
      } else {
        EXPECT_EQ(*desc->get(field.name), field.default_value) << op->name() << field.name;
      }
      // Keywords of one Python function.
      for (const OperandInfo& operand : op->operands())
        EXPECT_NE(operand.name, field.name) << op->name();
      EXPECT_FALSE(field.help.empty()) << op->name() << " " << field.name;
    }
    EXPECT_TRUE(find_op(op->name()));
  }
  EXPECT_EQ(find_op("nothing").status().code(), Code::invalid_argument);
}

TEST(AnyOp, CountsOperands) {
  const auto desc = (*find_op("quantize_per_group"))->make_desc();
  const auto plan = desc->select({}, Preference::exact);
  ASSERT_TRUE(plan);
  const MutView two[2];
  EXPECT_EQ((*plan)->run(two, {}, {}).message(), "quantize_per_group: 2 operands, expected 4");
}

}  // namespace
}  // namespace bittern
