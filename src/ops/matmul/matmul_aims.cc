#include "ops/matmul/matmul_aims.h"

#include "ops/matmul/weights.h"

namespace bittern::oracle {
namespace {

std::int64_t unit_of(const WeightDesc& d) { return d.plain() ? 1 : matmul::panel_format(d).unit; }

// A scale or bias: mostly ordinary; `awkward` ones are sometimes not finite, denormal or huge.
double grid_value(Rng& rng, bool awkward) {
  if (awkward && rng.chance(3)) return rng.awkward();
  double value = 0.01 * rng.normal();
  if (rng.chance(6)) value = std::ldexp(1.0, static_cast<int>(rng.below(12)) - 9);
  return value;
}

// Ordinary scales.
void tame_block(BlockType type, std::uint8_t* block, Rng& rng) {
  const auto put_f16 = [&](int at) {
    const f16 x = to_f16(static_cast<float>(grid_value(rng, false)));
    std::memcpy(block + at, &x, sizeof x);
  };
  switch (type) {
    case BlockType::q4_1:
    case BlockType::q5_1:
    case BlockType::q4_k:
    case BlockType::q5_k: put_f16(2); [[fallthrough]];
    case BlockType::q4_0:
    case BlockType::q5_0:
    case BlockType::q8_0:
    case BlockType::iq4_nl:
    case BlockType::iq4_xs: put_f16(0); break;
    case BlockType::q2_k: put_f16(80); [[fallthrough]];
    case BlockType::q3_k:
    case BlockType::q6_k: put_f16(block_size(type).bytes - 2); break;
    case BlockType::mxfp4: *block = static_cast<std::uint8_t>(115 + rng.below(20)); break;
  }
}

void aim_row(const WeightDesc& d, matmul::StoredRow& row, Rng& rng) {
  const bool awkward = rng.chance(8);
  const auto floats = [&](DType dtype, std::vector<std::uint8_t>& bytes) {
    (void)visit<float, f16, bf16>(dtype, [&]<class T>(Type<T>) {
      for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
        const T x = from_math<T>(static_cast<float>(grid_value(rng, awkward)));
        std::memcpy(bytes.data() + at, &x, sizeof x);
      }
      return Status();
    });
  };
  if (d.plain()) floats(d.plain_element(), row.plain);
  if (d.affine()) {
    for (std::uint32_t& word : row.packed) word = static_cast<std::uint32_t>(rng.next());
    floats(d.scale_element, row.scales);
    floats(d.scale_element, row.biases);
  }
  if (d.blocks()) {
    for (std::uint8_t& byte : row.blocks) byte = static_cast<std::uint8_t>(rng.next());
    const BlockSize size = block_size(d.block_type());
    const auto blocks = view(row.blocks.data(), {1, static_cast<std::int64_t>(row.blocks.size())});
    aim_blocks(d.block_type(), blocks, rng);
    if (awkward) return;
    for (std::size_t at = 0; at < row.blocks.size(); at += static_cast<std::size_t>(size.bytes))
      tame_block(d.block_type(), row.blocks.data() + at, rng);
  }
}

}  // namespace

std::vector<WeightDesc> weight_cases() {
  std::vector<WeightDesc> cases;
  const auto add = [&](WeightDesc d) {
    const std::int64_t unit = unit_of(d);
    for (const std::int64_t units : {1, 3, 6}) {
      // Beyond whole panels, a whole one, and less than one.
      d.outputs = units == 1 ? 5 : units == 3 ? 37 : 16;
      d.inputs = d.plain() ? 7 * units : units * unit;
      cases.push_back(d);
    }
  };
  for (const WeightType type : {WeightType::f32, WeightType::f16, WeightType::bf16})
    add({.type = type});
  constexpr DType kScales[] = {DType::f32, DType::f16, DType::bf16};
  int i = 0;
  for (const std::int32_t bits : {2, 3, 4, 5, 6, 8})
    for (const std::int64_t group : {32, 64, 128})
      add({.bits = bits, .group_size = group, .scale_element = kScales[i++ % 3]});
  for (const DType scales : {DType::f32, DType::bf16}) add({.bits = 4, .scale_element = scales});
  for (std::size_t type = 0; type < std::size(kBlockTypeNames); ++type)
    add({.type = weight_type(static_cast<BlockType>(type))});
  cases.push_back({.outputs = 0, .inputs = 64});
  cases.push_back({.outputs = 20, .inputs = 0});
  cases.push_back({.outputs = 20, .inputs = 0, .type = WeightType::q4_k});
  cases.push_back({.outputs = 20, .inputs = 0, .type = WeightType::f32});
  return cases;
}

void aim_weights(const WeightDesc& d, const WeightViews& v, Rng& rng) {
  if (d.inputs == 0) return;
  // Also the rows that the last panel lacks: nothing may depend on them.
  const std::int64_t rows = d.stored() ? d.outputs : d.panels() * matmul::kLanes;
  for (std::int64_t n = 0; n < rows; ++n) {
    matmul::StoredRow row(d);
    aim_row(d, row, rng);
    if (d.stored()) {
      matmul::for_stored(d, v, n, row,
                         [](const std::uint8_t* from, const std::uint8_t* to, std::size_t bytes) {
                           std::memcpy(const_cast<std::uint8_t*>(to), from, bytes);
                         });
    } else {
      const std::int64_t bytes = d.panel_shape()[1];
      auto* panel = data<std::uint8_t>(v.panels) + n / matmul::kLanes * bytes;
      if (n % matmul::kLanes == 0) std::fill_n(panel, bytes, std::uint8_t{0});
      matmul::row_to_panel(d, row, static_cast<int>(n % matmul::kLanes), panel);
    }
  }
}

void fill_panels(const WeightDesc& d, const ConstView& panels, Rng& rng) {
  WeightViews views;
  views.panels = panels;
  WeightDesc panel = d;
  panel.outputs = std::min<std::int64_t>(panel.outputs, matmul::kLanes);
  aim_weights(panel, views, rng);
  const std::int64_t bytes = panel.panel_shape().numel();
  for (std::int64_t p = 1; p < d.panels(); ++p)
    std::memcpy(data<std::uint8_t>(panels) + p * bytes, panels.data,
                static_cast<std::size_t>(bytes));
}

}  // namespace bittern::oracle
