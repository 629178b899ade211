// What the tests of the quantise family share: tensors of values, and the errors all of them give.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "oracle/op_test.h"
#include "oracle/oracle.h"

namespace bittern::oracle {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::int32_t kIntMin = std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kIntMax = std::numeric_limits<std::int32_t>::max();

// Runs `body(kernel)` for ref and, where this CPU has it, cpu.
template <class Body>
void for_each_kernel(Body&& body) {
  for (const char* kernel : {"ref", "cpu"}) {
    if (kernel == std::string("cpu") && !cpu::supported().ok()) continue;
    SCOPED_TRACE(kernel);
    body(kernel);
  }
}

// Changes one operand at a time into everything that is refused, and sees that it is, that the
// message names it, and that no output was touched.
template <class Op>
void expect_operand_errors(const typename Op::Desc& desc) {
  using Args = typename Op::Args;
  Problem<Op> problem = make_problem<Op>(desc, 1, {});
  const Problem<Op> before = problem;  // the stores' bytes; its views point into `problem`
  const auto expect = [&](const Args& args, Code code, const std::string& message) {
    expect_error(run_op<Op>(desc, args), code, std::string(Op::kName) + ": " + message);
    for (std::size_t i = 0; i < problem.stores.size(); ++i)
      EXPECT_EQ(problem.stores[i].bytes, before.stores[i].bytes) << problem.stores[i].name;
  };
  const auto change = [&](const std::string& operand, auto&& edit) {
    Args args = problem.args;
    Op::operands(desc, args, [&](const char* n, auto& v, const Operand&) {
      if (operand == n) edit(v);
    });
    return args;
  };
  for (const Store& s : problem.stores) {
    if ((s.expected.flags & Operand::kUnread) != 0) continue;
    SCOPED_TRACE(s.name);
    const Shape& shape = s.expected.shape;
    const std::string dtype = name(s.expected.dtype);
    if ((s.expected.flags & Operand::kOptional) == 0) {
      expect(change(s.name, [](auto& v) { v.data = nullptr; }), Code::invalid_argument,
             s.name + ": null, expected " + dtype + " " + shape.str());
    }
    expect(change(s.name, [](auto& v) { v.dtype = DType::u32; }), Code::invalid_argument,
           s.name + ": dtype u32, expected " + dtype);
    Shape wrong = shape;
    wrong[shape.rank - 1] += 1;
    expect(change(s.name, [&](auto& v) { v.shape = wrong; }), Code::invalid_argument,
           s.name + ": shape " + wrong.str() + ", expected " + shape.str() + " = " +
               s.expected.shape.names_str());
    expect(change(s.name, [](auto& v) { v.device.type = Device::Type::cuda; }),
           Code::invalid_argument, s.name + ": on cuda:0, expected cpu");
    if (shape[shape.rank - 1] > 1) {
      const std::string axis = std::to_string(shape.rank - 1);
      expect(change(s.name, [&](auto& v) { v.stride[shape.rank - 1] = 2; }), Code::unsupported,
             s.name + ": stride 2 of axis " + axis + ", expected 1");
    }
    if ((s.expected.flags & Operand::kRowStride) != 0) {
      const std::int64_t row = shape.numel() / shape[0];
      expect(change(s.name, [&](auto& v) { v.stride[0] = row - 1; }), Code::unsupported,
             s.name + ": stride " + std::to_string(row - 1) + " of axis 0, expected at least " +
                 std::to_string(row));
    }
    if (const std::size_t size = size_of(s.expected.dtype); size > 1) {
      expect(change(s.name,
                    [](auto& v) {
                      v.data = reinterpret_cast<decltype(v.data)>(
                          reinterpret_cast<std::uintptr_t>(v.data) + 1);
                    }),
             Code::invalid_argument,
             s.name + ": address is not a multiple of " + std::to_string(size));
    }
    if (!s.output) continue;
    // Eight bytes into another operand is never "in place"; the smaller one moves into the larger.
    for (Store& in : problem.stores) {
      if (in.output) continue;
      Store& out = problem.stores[static_cast<std::size_t>(&s - problem.stores.data())];
      Store &moved = out.bytes.size() > in.bytes.size() ? in : out,
            &host = &moved == &in ? out : in;
      std::byte* inside = host.bytes.data() + host.offset + 8;
      expect(change(moved.name, [&](auto& v) { v.data = inside; }), Code::invalid_argument,
             s.name + ": overlaps " + in.name + ", expected memory of its own");
    }
  }
}

// Every way a QuantizeDesc can be malformed.
template <class Op>
void expect_quantize_desc_errors() {
  const auto expect = [](auto&& edit, Code code, const std::string& message) {
    QuantizeDesc d{.outer_size = 2, .axis_size = 128, .group_size = 64};
    edit(d);
    const auto plan = Plan<Op>::select(d);
    EXPECT_FALSE(plan.ok()) << message;
    expect_error(plan.status(), code, std::string(Op::kName) + ": " + message);
  };
  constexpr Code kInvalid = Code::invalid_argument, kUnsupported = Code::unsupported;
  expect([](auto& d) { d.outer_size = -1; }, kInvalid, "outer_size: -1, expected at least 0");
  expect([](auto& d) { d.axis_size = -64; }, kInvalid, "axis_size: -64, expected at least 0");
  expect([](auto& d) { d.group_size = 0; }, kInvalid, "group_size: 0, expected at least 1");
  expect([](auto& d) { d.group_size = -3; }, kInvalid, "group_size: -3, expected at least 1");
  expect([](auto& d) { d.axis_size = 100; }, kInvalid,
         "axis_size: 100, expected a multiple of group_size 64");
  expect([](auto& d) { d.inner_size = 2; }, kInvalid,
         "inner_size: 2 with granularity group, which takes the last axis only: expected 1 (or "
         "granularity channel, which takes any axis)");
  expect(
      [](auto& d) {
        d.granularity = Granularity::channel;
        d.inner_size = -1;
      },
      kInvalid, "inner_size: -1, expected at least 0");
  expect([](auto& d) { d.granularity = static_cast<Granularity>(7); }, kInvalid,
         "granularity: 7, expected 0..3");
  expect([](auto& d) { d.outer_size = d.axis_size = std::int64_t{1} << 40; }, kInvalid,
         "sizes: more than 2^59 elements");
  expect([](auto& d) { d.element = DType::s32; }, kUnsupported,
         "element: s32, expected f32, f64, f16 or bf16");
  expect(
      [](auto& d) {
        d.element = DType::f64;
        d.f32_scale = true;
      },
      kUnsupported, "element: f64 with f32_scale");
  if (Op::kFields.range) {
    expect(
        [](auto& d) {
          d.q_min = 4;
          d.q_max = 3;
        },
        kInvalid, "q_max: 3, expected at least 4");
  }
  if (Op::kFields.code) {
    expect([](auto& d) { d.code = DType::s32; }, kUnsupported, "code: s32, expected s8 or u8");
  }
  if (Op::kFields.code && Op::kFields.range) {
    expect([](auto& d) { d.q_min = -129; }, kInvalid, "q_min: -129, expected -128..127");
    expect([](auto& d) { d.q_max = 128; }, kInvalid, "q_max: 128, expected -128..127");
    expect([](auto& d) { d.code = DType::u8; }, kInvalid, "q_min: -128, expected 0..255");
    expect(
        [](auto& d) {
          d.code = DType::u8;
          d.q_min = 0;
          d.q_max = 256;
        },
        kInvalid, "q_max: 256, expected 0..255");
  }
}

// A tensor without elements is no error, and nothing is read.
template <class Op>
void expect_empty_is_ok() {
  for (const Granularity granularity :
       {Granularity::group, Granularity::token, Granularity::channel, Granularity::tensor}) {
    for (const bool no_rows : {true, false}) {
      const QuantizeDesc d{.outer_size = no_rows ? 0 : 3,
                           .axis_size = no_rows ? 64 : 0,
                           .group_size = 64,
                           .granularity = granularity};
      Problem<Op> p = make_problem<Op>(d, 1, {});
      const auto before = p.stores;
      EXPECT_TRUE(run_op<Op>(d, p.args).ok());
      for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(p.stores[i].bytes, before[i].bytes);
    }
  }
}

// All 65536 half values through one scale per row, cpu against ref: what no sample can miss.
template <class Op>
void expect_parity_on_every_half(int scales, std::uint64_t seed) {
  constexpr std::int64_t kAll = 1 << 16;
  if (!cpu::supported().ok()) GTEST_SKIP() << "no SIMD target";
  for (const DType element : {DType::bf16, DType::f16}) {
    QuantizeDesc d{.outer_size = scales,
                   .axis_size = kAll,
                   .granularity = Granularity::token,
                   .element = element};
    Problem<Op> ref = make_problem<Op>(d, seed, {}, false);
    Rng rng(seed);
    for (std::int64_t i = 0; i < scales; ++i) {
      // Significands at random, exponents where R(x / s) has something to decide.
      const double significand = 1 + rng.uniform();
      const double s = std::ldexp(significand, static_cast<int>(rng.below(20)) - 10);
      put(ref.args.scale, i, i % 3 == 0 ? -s : s);
      const std::int64_t zero_point = rng.below(7);
      put(ref.args.zero_point, i, static_cast<double>(zero_point * (rng.below(3) - 1)));
      auto* x = static_cast<std::uint16_t*>(const_cast<void*>(ref.args.x.data)) + i * kAll;
      for (std::int64_t j = 0; j < kAll; ++j) x[j] = static_cast<std::uint16_t>(j);
    }
    Problem<Op> cpu = make_problem<Op>(d, seed, {}, false);
    for (std::size_t i = 0; i < ref.stores.size(); ++i)
      std::copy(ref.stores[i].bytes.begin(), ref.stores[i].bytes.end(),
                cpu.stores[i].bytes.begin());
    ASSERT_TRUE(run_op<Op>(d, ref.args, "ref").ok());
    ASSERT_TRUE(run_op<Op>(d, cpu.args, "cpu").ok());
    const MutView *want = nullptr, *got = nullptr;
    Op::operands(d, ref.args, [&](const char*, auto& v, const Operand&) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) want = &v;
    });
    Op::operands(d, cpu.args, [&](const char*, auto& v, const Operand&) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) got = &v;
    });
    int wrong = 0;
    for (std::int64_t i = 0; i < scales * kAll && wrong < 5; ++i) {
      const double a = get(as_const(*got), i), b = get(as_const(*want), i);
      if (std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b)) continue;
      if (std::isnan(a) && std::isnan(b)) continue;
      ++wrong;
      ADD_FAILURE() << name(element) << " x bits " << i % kAll << " s "
                    << get(ref.args.scale, i / kAll) << ": " << a << ", expected " << b;
    }
  }
}

}  // namespace bittern::oracle
