#include "ops/aura/aura.h"
#include "ops/aura/aura_aims.h"

namespace bittern::oracle {

std::vector<AuraDesc> aura_encode_check_cases() { return aura_cases(); }

std::vector<BenchCase<AuraDesc>> aura_encode_bench_cases() {
  const AuraDesc hadamard{.outer_size = 1 << 16, .axis_size = 128};
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
      {"hadamard d64 4 bit f32", with([](D d) { d.axis_size = 64; }), fill_aura},
      {"hadamard d80 4 bit f32", with([](D d) { d.axis_size = 80; }), fill_aura},
      {"hadamard d192 4 bit f32", with([](D d) { d.axis_size = 192; }), fill_aura},
      {"hadamard d512 4 bit f32", with([](D d) { d.axis_size = 512; }), fill_aura},
      {"dense d128 4 bit f32", with([](D d) { d.rotation = Rotation::dense; }), fill_aura}};
  const auto add_large = [&](std::int64_t dim, std::int32_t bits, Rotation rotation,
                             Preference preference = Preference::exact) {
    const AuraDesc d{.outer_size = 1 << 20,
                     .axis_size = dim,
                     .bits = bits,
                     .element = DType::bf16,
                     .rotation = rotation};
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

namespace {

// x whose rotated coordinates lie on boundaries, or a few ulps beside them: those of a unit vector,
// as far as boundaries allow, turned back and scaled by a power of two.
void aim_at_boundaries(const AuraDesc& d, const AuraEncode::Args& a, std::int64_t row, Rng& rng) {
  std::vector<float> x(static_cast<std::size_t>(d.axis_size));
  double rest = 1;
  for (float& v : x) {
    const float at = a.boundaries.as<float>()[rng.below(d.levels() - 1)];
    v = static_cast<float>(step(DType::f32, at, static_cast<int>(rng.below(5)) - 2));
    if (&v == &x.back() || rest <= static_cast<double>(v) * static_cast<double>(v)) {
      v = static_cast<float>(std::sqrt(rest));
    }
    rest -= static_cast<double>(v) * static_cast<double>(v);
    if (!(rest > 0)) rest = 0;
  }
  rotate_row(d.rotation, d.axis_size, a.table.as<float>(), true, x.data());
  const double scale = std::ldexp(1.0, static_cast<int>(rng.below(9)) - 4);
  for (std::int64_t j = 0; j < d.axis_size; ++j)
    put(a.x, row * d.axis_size + j, scale * static_cast<double>(x[static_cast<std::size_t>(j)]));
}

}  // namespace

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
  for (std::int64_t i = 0; i < d.outer_size; ++i)
    if (rng.chance(2)) aim_at_boundaries(d, a, i, rng);
}

}  // namespace bittern::oracle
