#include <algorithm>

#include "core/dot.h"
#include "ops/aura/aura.h"
#include "ops/aura/aura_aims.h"

namespace bittern::oracle {

std::vector<AuraDesc> aura_encode_check_cases() { return aura_cases(); }

std::vector<BenchCase<AuraDesc>> aura_encode_bench_cases() {
  const AuraDesc hadamard{.rows = 1 << 16, .dim = 128};
  const auto with = [&](auto change) {
    AuraDesc d = hadamard;
    change(d);
    return d;
  };
  using D = AuraDesc&;
  std::vector<BenchCase<AuraDesc>> cases = {
      {"hadamard d128 4 bit f32", hadamard, fill_aura},
      {"hadamard d128 4 bit bf16", with([](D d) { d.element = DType::bf16; }), fill_aura},
      {"hadamard d128 3 bit f32", with([](D d) { d.bits = 3; }), fill_aura},
      {"hadamard d128 8 bit f32", with([](D d) { d.bits = 8; }), fill_aura},
      {"hadamard d64 4 bit f32", with([](D d) { d.dim = 64; }), fill_aura},
      {"hadamard d80 4 bit f32", with([](D d) { d.dim = 80; }), fill_aura},
      {"hadamard d192 4 bit f32", with([](D d) { d.dim = 192; }), fill_aura},
      {"hadamard d512 4 bit f32", with([](D d) { d.dim = 512; }), fill_aura},
      {"dense d128 4 bit f32", with([](D d) { d.rotation = Rotation::dense; }), fill_aura}};
  const auto add_large = [&](std::int64_t dim, std::int32_t bits, Rotation rotation,
                             Preference preference = Preference::exact) {
    const AuraDesc d{
        .rows = 1 << 20, .dim = dim, .bits = bits, .element = DType::bf16, .rotation = rotation};
    cases.push_back({"bf16 d" + std::to_string(dim) + " " + std::to_string(bits) + " bit " +
                         std::string(kRotationNames[static_cast<std::size_t>(rotation)]) +
                         (preference == Preference::fastest ? " fastest" : "") + " 1Mi rows",
                     d, fill_aura, "", preference, true});
  };
  for (const std::int64_t dim : {128, 64, 80, 256, 512}) add_large(dim, 4, Rotation::hadamard);
  for (const std::int32_t bits : {2, 3, 8}) add_large(128, bits, Rotation::hadamard);
  add_large(128, 4, Rotation::dense);
  add_large(128, 4, Rotation::dense, Preference::fastest);
  return cases;
}

// What the kernel on tensor cores treats differently.
std::vector<AuraDesc> aura_encode_bounded_cases(bool) {
  std::vector<AuraDesc> cases;
  for (const std::int64_t dim : {64, 128}) {
    for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
      for (std::int32_t bits = 1; bits <= 8; ++bits) {
        AuraDesc d{.rows = 70 - 8 * bits,
                   .dim = dim,
                   .bits = bits,
                   .element = element,
                   .rotation = Rotation::dense};
        d.scale_rule = static_cast<ScaleRule>(cases.size() / 2 % 4);
        d.f16_scale = cases.size() % 5 == 0;
        cases.push_back(d);
      }
    }
  }
  return cases;
}

// r and T of a row as the header of the op has them, the codes that were found against r, and s
// against the formula for those codes.
void aura_encode_judge(const AuraDesc& d, const AuraEncode::Args& got, const AuraEncode::Args& want,
                       Judge& judge) {
  const auto n = static_cast<std::size_t>(d.dim);
  const auto words = static_cast<std::size_t>(packed_words(d.dim, d.bits));
  const float *boundaries = want.boundaries.as<float>(), *codebook = want.codebook.as<float>();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double bound = judge.bound();
  for (std::int64_t row = 0; row < d.rows; ++row) {
    std::vector<std::uint32_t> packed(words), again(words), codes(n);
    for (std::size_t i = 0; i < words; ++i)
      packed[i] = static_cast<std::uint32_t>(
          get(as_const(got.packed),
              row * static_cast<std::int64_t>(words) + static_cast<std::int64_t>(i)));
    for (std::size_t i = 0; i < n; ++i) {
      codes[i] = packed_code(packed.data(), static_cast<std::int64_t>(i), d.bits);
      put_packed_code(again.data(), static_cast<std::int64_t>(i), d.bits, codes[i]);
    }
    if (packed != again) judge.fail("packed", row, "spare bits of the row are not 0");

    // Steps 1 and 2 of the contract.
    std::vector<float> x(n);
    std::uint32_t most = 0;
    for (std::size_t j = 0; j < n; ++j) {
      x[j] = static_cast<float>(get(want.x, row * d.dim + static_cast<std::int64_t>(j)));
      most = std::max(most, std::bit_cast<std::uint32_t>(std::fabs(x[j])));
    }
    if (most >= kAuraNotFinite) {
      for (std::size_t i = 0; i < n; ++i)
        if (codes[i] != 0)
          judge.fail(
              "packed", row,
              "code " + std::to_string(codes[i]) + " of a row that is not finite, expected 0");
      judge.value("scales", as_const(got.scales), as_const(want.scales), row, std::nan(""));
      continue;
    }
    const auto squares = [&] { return dot<32>(x.data(), x.data(), d.dim); };
    const bool ordinary = squares() >= kAuraLeastSquares && std::isfinite(squares());
    const AuraRange range = ordinary ? AuraRange{1, 1} : aura_range(most);
    for (float& v : x) v *= range.down;
    float norm = std::sqrt(squares());
    const float inv = norm > 0 ? 1 / norm : 0;
    norm = std::min(norm * range.up, max_finite<float>());
    std::vector<float> r = x;
    rotate_row(d.rotation, d.dim, want.table.as<float>(), false, r.data(), inv);

    double cc = 0, rc = 0, terms = 0;  // C, D and sum T |c|
    for (std::size_t i = 0; i < n; ++i) {
      double unit = 0;
      for (std::size_t j = 0; j < n; ++j) {
        // A kernel with a bound for rotations that are not matrices would need its own T.
        const double entry = d.rotation == Rotation::dense
                                 ? std::fabs(static_cast<double>(want.table.as<float>()[i * n + j]))
                                 : 1;
        unit += (entry + 0x1p-16) * (std::fabs(static_cast<double>(x[j] * inv)) + 0x1p-16);
      }
      // How far r lies outside the cell of the code.
      const std::uint32_t code = codes[i];
      const double at = static_cast<double>(r[i]);
      double outside = 0;
      if (code > 0) outside = std::max(outside, static_cast<double>(boundaries[code - 1]) - at);
      if (code + 1 < static_cast<std::uint32_t>(d.levels()))
        outside = std::max(outside, at - static_cast<double>(boundaries[code]));
      const double expected = static_cast<double>(std::count_if(
          boundaries, boundaries + d.levels() - 1, [&](float b) { return b < r[i]; }));
      judge.distance("packed", row * d.dim + static_cast<std::int64_t>(i), code, expected, outside,
                     unit);
      const auto c = static_cast<double>(codebook[code]);
      cc += c * c;
      rc += at * c;
      terms += unit * std::fabs(c);
    }
    const auto size = static_cast<double>(norm);
    const double near = 2 * bound * terms, tiny = static_cast<double>(kAuraTiny);
    const bool long_enough = std::sqrt(cc) > tiny;
    double s = size, unit = size;
    if (d.scale_rule == ScaleRule::matched && long_enough) s = unit = size / std::sqrt(cc);
    if (d.scale_rule == ScaleRule::least_squares && long_enough) {
      s = size * (rc / cc);
      unit = 2 * size * terms / cc;
    }
    if (d.scale_rule == ScaleRule::unbiased) {
      if (rc > tiny) {
        s = size / rc;
        unit = 2 * s * terms / rc;
      }
      if (std::fabs(rc) <= near || std::fabs(rc - tiny) <= near) unit = kInf;
    }
    if (d.scale_rule != ScaleRule::none && std::fabs(std::sqrt(cc) - tiny) <= 1e-6 * tiny)
      unit = kInf;
    // As it is stored: of either dtype to the largest finite value.
    const double limit = d.f16_scale ? 65504 : static_cast<double>(max_finite<float>());
    const double found = get(as_const(got.scales), row), stored = std::clamp(s, -limit, limit);
    if (std::isnan(found) && !std::isinf(unit)) {
      judge.fail("scales", row, "NaN, expected " + std::to_string(stored));
      continue;
    }
    const double ulp =
        d.f16_scale ? std::max(std::ldexp(std::fabs(stored), -10), 0x1p-24) : 0x1p-149;
    judge.distance("scales", row, found, stored, std::fabs(found - stored), unit, ulp);
  }
}

void aura_encode_aim(const AuraDesc& d, const AuraEncode::Args& a, Rng& rng) {
  if (a.table) fill_aura(d, "table", a.table, rng);
  fill_aura(d, "boundaries", a.boundaries, rng);
  fill_aura(d, "codebook", a.codebook, rng);
  if (rng.chance(4)) {  // equal neighbours, and levels without order
    float* boundaries = data<float>(a.boundaries);
    for (std::int64_t i = 1; i + 1 < d.levels(); ++i)
      if (rng.chance(3)) boundaries[i] = boundaries[i - 1];
    for (std::int64_t i = 0; i < d.levels(); ++i) put(a.codebook, i, rng.normal());
  }
  aim_rows(a.x, rng);
  for (std::int64_t i = 0; i < d.rows; ++i)
    if (rng.chance(2))
      aim_at_boundaries(d, a.table.as<float>(), a.boundaries.as<float>(), a.x, i, rng);
}

}  // namespace bittern::oracle
