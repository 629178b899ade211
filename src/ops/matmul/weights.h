// A row of stored weights, or of panels, in plain scalar form: for `ref`.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bittern/matmul_desc.h"
#include "core/blocks.h"
#include "core/numerics.h"
#include "ops/matmul/panels.h"

namespace bittern::matmul {

// The pieces of a stored row; those that its type lacks are empty.
struct StoredRow {
  std::vector<std::uint8_t> plain;  // bytes of w
  std::vector<std::uint32_t> packed;
  std::vector<std::uint8_t> scales, biases;
  std::vector<std::uint8_t> blocks;

  explicit StoredRow(const WeightDesc& d) {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    if (d.plain()) plain.resize(size(d.row_bytes()));
    if (d.affine()) {
      packed.resize(size(d.words()));
      scales.resize(size(d.groups()) * size_of(d.scale_element));
      biases.resize(scales.size());
    }
    if (d.blocks()) blocks.resize(size(d.row_bytes()));
  }
};

// Calls f(bytes of the row, bytes of the view's row n) for each operand of the stored weights.
template <class Args, class F>
void for_stored(const WeightDesc& d, const Args& a, std::int64_t n, StoredRow& row, F&& f) {
  const auto at = [&](const auto& v) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(v.data)>>,
                                    const std::uint8_t, std::uint8_t>;
    return static_cast<Byte*>(v.data) +
           n * v.row_stride() * static_cast<std::int64_t>(size_of(v.dtype));
  };
  if (d.inputs == 0) return;
  if (d.plain()) f(row.plain.data(), at(a.w), row.plain.size());
  if (d.affine()) {
    f(reinterpret_cast<std::uint8_t*>(row.packed.data()), at(a.packed), 4 * row.packed.size());
    f(row.scales.data(), at(a.scales), row.scales.size());
    f(row.biases.data(), at(a.biases), row.biases.size());
  }
  if (d.blocks()) f(row.blocks.data(), at(a.blocks), row.blocks.size());
}

// Calls header(panel's byte, row's byte) for each byte of the headers, and code(panel's byte, its
// bit, unit, j, bit of the code) for each bit of the codes, of row r of a panel.
template <class Header, class Code>
void for_panel_row(const WeightDesc& d, StoredRow& row, int r, Header&& header, Code&& code) {
  const PanelFormat format = panel_format(d);
  const std::int64_t units = d.inputs / format.unit;
  for (std::int64_t u = 0; u < units; ++u) {
    std::int64_t at = format.header_at(u);
    for (int i = 0; i < format.num_fields; ++i) {
      const HeaderField& field = format.fields[i];
      std::uint8_t* from = d.blocks()
                               ? row.blocks.data() + u * block_size(d.block_type()).bytes + field.at
                           : field.at == 0 ? row.scales.data() + u * field.size
                                           : row.biases.data() + u * field.size;
      for (int b = 0; b < field.size; ++b) header(at + r * field.size + b, from[b]);
      at += std::int64_t{kLanes} * field.size;
    }
    for (int j = 0; j < format.unit; ++j) {
      for (int bit = 0; bit < format.bits; ++bit) {
        const BitAt where = code_bit_at(format.bits, j, bit, r);
        code(format.codes_at(u, units) + where.byte, where.bit, u, j, bit);
      }
    }
  }
}

// Code j of unit u of a row, and its inverse into zeros.
inline int stored_code(const WeightDesc& d, const StoredRow& row, std::int64_t u, int j) {
  if (d.affine())
    return static_cast<int>(packed_code(row.packed.data(), u * d.group_size + j, d.bits));
  return unsigned_code(d.block_type(), row.blocks.data() + u * block_size(d.block_type()).bytes, j);
}
inline void put_stored_code(const WeightDesc& d, StoredRow& row, std::int64_t u, int j, int code) {
  if (d.affine()) {
    put_packed_code(row.packed.data(), u * d.group_size + j, d.bits,
                    static_cast<std::uint32_t>(code));
  } else {
    put_unsigned_code(d.block_type(), row.blocks.data() + u * block_size(d.block_type()).bytes, j,
                      code);
  }
}

// Row r of a panel, into zeros.
inline void row_to_panel(const WeightDesc& d, StoredRow& row, int r, std::uint8_t* panel) {
  if (d.plain()) {
    const auto size = static_cast<std::int64_t>(size_of(d.plain_element()));
    for (std::int64_t k = 0; k < d.inputs; ++k)
      std::memcpy(panel + (k * kLanes + r) * size, row.plain.data() + k * size,
                  static_cast<std::size_t>(size));
    return;
  }
  for_panel_row(
      d, row, r, [&](std::int64_t at, std::uint8_t byte) { panel[at] = byte; },
      [&](std::int64_t at, int to, std::int64_t u, int j, int bit) {
        const int one = stored_code(d, row, u, j) >> bit & 1;
        panel[at] = static_cast<std::uint8_t>(panel[at] | one << to);
      });
}
inline void row_from_panel(const WeightDesc& d, const std::uint8_t* panel, int r, StoredRow& row) {
  if (d.plain()) {
    const auto size = static_cast<std::int64_t>(size_of(d.plain_element()));
    for (std::int64_t k = 0; k < d.inputs; ++k)
      std::memcpy(row.plain.data() + k * size, panel + (k * kLanes + r) * size,
                  static_cast<std::size_t>(size));
    return;
  }
  row = StoredRow(d);
  std::vector<int> codes(static_cast<std::size_t>(d.inputs));
  const int unit = panel_format(d).unit;
  for_panel_row(
      d, row, r, [&](std::int64_t at, std::uint8_t& byte) { byte = panel[at]; },
      [&](std::int64_t at, int from, std::int64_t u, int j, int bit) {
        codes[static_cast<std::size_t>(u * unit + j)] |= (panel[at] >> from & 1) << bit;
      });
  for (std::int64_t k = 0; k < d.inputs; ++k)
    put_stored_code(d, row, k / unit, static_cast<int>(k % unit),
                    codes[static_cast<std::size_t>(k)]);
}

// Row n of W, from its operands in either layout.
template <class Args>
StoredRow read_row(const WeightDesc& d, const Args& a, std::int64_t n) {
  StoredRow row(d);
  if (d.stored()) {
    for_stored(d, a, n, row, [](std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
      if (bytes != 0) std::memcpy(to, from, bytes);
    });
  } else if (d.inputs != 0) {
    row_from_panel(d, a.panels.template as<std::uint8_t>() + n / kLanes * kLanes * d.row_bytes(),
                   static_cast<int>(n % kLanes), row);
  }
  return row;
}

// A weight: w = c s + b.
struct Weight {
  int code = 0;
  float s = 0, b = 0;
  float value = 0;  // the number it stands for
};
inline Weight weight_of(const WeightDesc& d, const StoredRow& row, std::int64_t k) {
  Weight w;
  if (d.plain()) {
    (void)visit<float, f16, bf16>(d.plain_element(), [&]<class T>(Type<T>) {
      T x;
      std::memcpy(&x, row.plain.data() + static_cast<std::size_t>(k) * sizeof x, sizeof x);
      w.value = to_math(x);
      return Status();
    });
  } else if (d.affine()) {
    const std::int64_t g = k / d.group_size;
    w.code = static_cast<int>(packed_code(row.packed.data(), k, d.bits));
    (void)visit<float, f16, bf16>(d.scale_element, [&]<class T>(Type<T>) {
      T x;
      std::memcpy(&x, row.scales.data() + static_cast<std::size_t>(g) * sizeof x, sizeof x);
      w.s = to_math(x);
      std::memcpy(&x, row.biases.data() + static_cast<std::size_t>(g) * sizeof x, sizeof x);
      w.b = to_math(x);
      return Status();
    });
    w.value = std::fma(static_cast<float>(w.code), w.s, w.b);
  } else {
    const BlockSize size = block_size(d.block_type());
    const std::uint8_t* block = row.blocks.data() + k / size.weights * size.bytes;
    const int j = static_cast<int>(k % size.weights);
    const GroupGrid grid = block_grid(d.block_type(), block, j);
    w.code = block_code(d.block_type(), block, j);
    w.s = grid.s;
    w.b = -grid.m;
    const float product = grid.s * static_cast<float>(w.code);
    w.value = product - grid.m;
  }
  return w;
}

}  // namespace bittern::matmul
