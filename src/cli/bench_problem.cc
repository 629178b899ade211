#include "cli/bench_problem.h"

#include <algorithm>

#include "cli/bench_random.h"

namespace bittern::cli {
namespace {

constexpr double kSigma = 0.02;  // of a trained weight

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
    const std::vector<float>& table = gaussians();
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

Result<Operands> make_operands(const Problem& problem, Meter& meter, Limit limit) {
  const AnyDesc& desc = *problem.desc;
  const auto fill_input = [&](const OperandInfo& o, MutView view, void* data, std::uint64_t seed) {
    BITTERN_TRY(fill(desc, o, data, seed << 40));
    view.data = data;
    oracle::Rng rng(seed);
    if (problem.fill) problem.fill(desc, o.name, view, rng);
    return Status();
  };
  const std::vector<OperandInfo> infos = desc.operands();
  const std::string left_out = " " + problem.left_out + " ";
  const auto present = [&](const OperandInfo& o) {
    return (o.expected.flags & Operand::kUnread) == 0 &&
           left_out.find(" " + std::string(o.name) + " ") == std::string::npos;
  };
  const auto bytes_of = [](const OperandInfo& o) {
    return static_cast<std::size_t>(o.expected.shape.numel()) * size_of(o.expected.dtype);
  };
  Operands out;
  std::size_t memory = 0;
  for (const OperandInfo& o : infos) {
    if (!present(o)) continue;
    memory += bytes_of(o);
    out.bytes += (o.expected.flags & Operand::kInOut) != 0 ? 2 * bytes_of(o) : bytes_of(o);
  }
  out.sets.resize(static_cast<std::size_t>(meter.sets(memory, limit)));
  std::uint64_t seed = 1;
  for (const OperandInfo& o : infos) {
    MutView v;
    v.dtype = o.expected.dtype;
    v.shape = o.expected.shape;
    v.stride = o.expected.shape.dense_strides();
    v.device = meter.device();
    for (auto& set : out.sets) {
      if (present(o)) {
        auto data = meter.allocate(bytes_of(o));
        if (!data) return data.status();
        v.data = *data;
      }
      set.push_back(v);
    }
    const bool both = (o.expected.flags & Operand::kInOut) != 0;
    if (!present(o) || (o.output && !both)) continue;
    // Every set holds the same values.
    if (meter.host()) {
      for (auto& set : out.sets)
        if (Status s = fill_input(o, v, set.back().data, seed); !s.ok()) return s;
    } else {
      std::vector<std::byte> staged(bytes_of(o));
      if (Status s = fill_input(o, v, staged.data(), seed); !s.ok()) return s;
      for (auto& set : out.sets)
        if (Status s = meter.upload(set.back().data, staged.data(), staged.size()); !s.ok())
          return s;
    }
    ++seed;
  }
  return out;
}

void shrink(AnyDesc& desc, std::int64_t factor) {
  for (const std::string_view field :
       {"outer_size", "inner_size", "axis_size", "outputs", "rows", "tokens", "seq_len", "batch"}) {
    const std::int64_t size = field_or(desc, field, 0);
    std::int64_t less = size / factor;
    if (field == "axis_size") {
      const std::int64_t group = field_or(desc, "group_size", 1);
      less -= group > 0 ? less % group : 0;
    }
    if (less < 1) continue;
    if (desc.set(field, less).ok() && desc.check().ok()) {
      // A pool of states shrinks with the sequences that use it, or its traffic would count whole.
      const std::int64_t pool = field == "batch" ? field_or(desc, "pool", 0) / factor : 0;
      if (pool > 0) (void)desc.set("pool", pool);
      return;
    }
    (void)desc.set(field, size);
  }
}

}  // namespace bittern::cli
