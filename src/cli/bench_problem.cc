#include "cli/bench_problem.h"

#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"

namespace bittern::cli {
namespace {

constexpr double kSigma = 0.02;  // of a trained weight

std::uint64_t hash(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// 64 Ki samples of N(0, 1), to be drawn from at random: quick, and Gaussian enough.
const std::vector<float>& gaussian() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (std::size_t i = 0; i < t.size(); i += 2) {
      const double u = (static_cast<double>(hash(i) >> 11) + 0.5) * 0x1p-53;
      const double v = (static_cast<double>(hash(i + 1) >> 11) + 0.5) * 0x1p-53;
      const double r = std::sqrt(-2 * std::log(u));
      t[i] = static_cast<float>(r * std::cos(2 * 3.14159265358979323846 * v));
      t[i + 1] = static_cast<float>(r * std::sin(2 * 3.14159265358979323846 * v));
    }
    return t;
  }();
  return table;
}

// Calls make(64 random bits) for each of n elements, on the threads that will use them.
template <class T, class F>
void generate(void* data, std::int64_t n, std::uint64_t seed, F&& make) {
  T* to = static_cast<T*>(data);
  cpu::parallel(n, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      to[i] = make(hash(seed + static_cast<std::uint64_t>(i)));
  });
}

std::int64_t field_or(const AnyDesc& desc, std::string_view field, std::int64_t otherwise) {
  const auto value = desc.get(field);
  return value ? *value : otherwise;
}

struct CodeRange {
  std::int64_t low = 0;
  std::int64_t high = 255;
};

CodeRange code_range(const AnyDesc& desc, DType dtype) {
  const bool is_signed = dtype == DType::s8;
  CodeRange range{is_signed ? -128 : 0, is_signed ? 127 : 255};
  range.low = std::max(range.low, field_or(desc, "q_min", range.low));
  range.high = std::min(range.high, field_or(desc, "q_max", range.high));
  const std::int64_t bits = field_or(desc, "bits", 0), bins = field_or(desc, "n_bins", 0);
  if (bins > 0) {
    range.high = bins - 1;
  } else if (desc.get("bits")) {
    range.high = (std::int64_t{1} << (bits > 0 ? bits : 4)) - 1;
  }
  return range;
}

Status fill(const AnyDesc& desc, const OperandInfo& o, void* data, std::uint64_t seed) {
  const std::int64_t n = o.expected.shape.numel();
  const DType dtype = o.expected.dtype;
  if (is_float(dtype)) {
    const bool scale = o.name.find("scale") != std::string_view::npos;
    const bool gradient = o.name.starts_with("d");
    // Affine codes span min..max; quantise's reach from the middle to q_max.
    const double reach = desc.get("q_max") ? static_cast<double>(field_or(desc, "q_max", 127))
                         : desc.get("storage")
                             ? static_cast<double>(code_range(desc, DType::u8).high) / 2
                             : 127.0;
    const double size = scale ? 3 * kSigma / std::max(reach, 0.5) : gradient ? 1.0 : kSigma;
    const std::vector<float>& table = gaussian();
    return visit_float(dtype, [&]<class T>(Type<T>) {
      generate<T>(data, n, seed, [&](std::uint64_t bits) {
        const double spread = scale ? 0.75 + 0.5 * static_cast<double>(bits & 0xffff) * 0x1p-16
                                    : static_cast<double>(table[bits & 0xffff]);
        return from_math<T>(static_cast<Math<T>>(size * spread));
      });
      return Status();
    });
  }
  if (dtype == DType::u32) {
    generate<std::uint32_t>(data, n, seed,
                            [](std::uint64_t bits) { return static_cast<std::uint32_t>(bits); });
    return {};
  }
  const CodeRange range = dtype == DType::s32 ? CodeRange{-3, 3} : code_range(desc, dtype);
  const auto count = static_cast<std::uint64_t>(range.high - range.low + 1);
  return visit<std::int8_t, std::uint8_t, std::int32_t>(dtype, [&]<class T>(Type<T>) {
    generate<T>(data, n, seed, [&](std::uint64_t bits) {
      return static_cast<T>(range.low + static_cast<std::int64_t>((bits >> 32) * count >> 32));
    });
    return Status();
  });
}

}  // namespace

Result<Operands> make_operands(const Problem& problem, Meter& meter) {
  const AnyDesc& desc = *problem.desc;
  const auto fill_input = [&](const OperandInfo& o, MutView view, void* data, std::uint64_t seed) {
    BITTERN_TRY(fill(desc, o, data, seed << 40));
    view.data = data;
    oracle::Rng rng(seed);
    if (problem.fill) problem.fill(o.name, view, rng);
    return Status();
  };
  Operands out;
  std::uint64_t seed = 1;
  for (const OperandInfo& o : desc.operands()) {
    MutView& v = out.views.emplace_back();
    v.dtype = o.expected.dtype;
    v.shape = o.expected.shape;
    v.stride = o.expected.shape.dense_strides();
    v.device = meter.device();
    const std::string left_out = " " + problem.left_out + " ";
    if (left_out.find(" " + std::string(o.name) + " ") != std::string::npos) continue;
    const std::size_t bytes =
        static_cast<std::size_t>(o.expected.shape.numel()) * size_of(o.expected.dtype);
    auto data = meter.allocate(bytes);
    if (!data) return data.status();
    v.data = *data;
    const bool both = (o.expected.flags & Operand::kInOut) != 0;
    out.bytes += both ? 2 * bytes : bytes;
    if (o.output && !both) continue;
    if (meter.host()) {
      if (Status s = fill_input(o, v, v.data, seed++); !s.ok()) return s;
    } else {
      std::vector<std::byte> host(bytes);
      if (Status s = fill_input(o, v, host.data(), seed++); !s.ok()) return s;
      if (Status s = meter.upload(v.data, host.data(), bytes); !s.ok()) return s;
    }
  }
  return out;
}

void shrink(AnyDesc& desc, std::int64_t factor) {
  for (const std::string_view field :
       {"outer_size", "inner_size", "axis_size", "rows", "tokens", "seq_len", "batch"}) {
    const std::int64_t size = field_or(desc, field, 0);
    std::int64_t less = size / factor;
    if (field == "axis_size") {
      const std::int64_t group = field_or(desc, "group_size", 1);
      less -= group > 0 ? less % group : 0;
    }
    if (less < 1) continue;
    if (desc.set(field, less).ok() && desc.check().ok()) return;
    (void)desc.set(field, size);
  }
}

}  // namespace bittern::cli
