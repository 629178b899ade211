#include "ops/affine/affine_aims.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"

namespace bittern::oracle {

std::vector<AffineDesc> qdq_affine_init_check_cases() {
  std::vector<AffineDesc> cases;
  for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
    for (AffineDesc d : affine_cases()) {
      d.method = method;
      cases.push_back(d);
    }
    // More groups than a block of them holds, in rows that blocks straddle; the bench's shape.
    for (const CodeStorage storage : {CodeStorage::u8, CodeStorage::packed}) {
      cases.push_back({.outer_size = 7,
                       .axis_size = 64 * 37,
                       .group_size = 64,
                       .bits = 4,
                       .storage = storage,
                       .method = method});
      cases.push_back({.outer_size = 3,
                       .axis_size = 5 * 301,
                       .group_size = 5,
                       .bits = 3,
                       .storage = storage,
                       .method = method});
      for (const std::int64_t rows : {1, 40}) {
        cases.push_back({.outer_size = rows,
                         .axis_size = 192,
                         .group_size = 64,
                         .bits = 4,
                         .storage = storage,
                         .method = method,
                         .expect_finite = true});
      }
    }
  }
  return cases;
}

std::vector<BenchCase<AffineDesc>> qdq_affine_init_bench_cases() {
  const AffineDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 64, .bits = 4};
  std::vector<BenchCase<AffineDesc>> cases = {{"minmax f32->u8 group 64", base}};
  AffineDesc d = base;
  d.method = AffineMethod::mlx;
  d.storage = CodeStorage::packed;
  cases.push_back({"mlx f32->packed 4 bit group 64", d});
  d = base;
  d.method = AffineMethod::lsq;
  cases.push_back({"lsq f32->u8 4 bit group 64", d});
  // Every method and storage: from bf16, which most models have, also on the CPU.
  for (const DType element : {DType::bf16, DType::f32}) {
    const bool half = element == DType::bf16;
    for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::mlx, AffineMethod::lsq}) {
      for (const CodeStorage storage : {CodeStorage::u8, CodeStorage::packed}) {
        d = base;
        d.element = element;
        d.method = method;
        d.storage = storage;
        const std::string label =
            std::string(kAffineMethodNames[static_cast<int>(method)]) + (half ? " bf16" : " f32") +
            (storage == CodeStorage::packed ? "->packed 4 bit" : "->u8 4 bit") + " group 64";
        if (half) cases.push_back({label, d});
        d.outer_size = 16384;
        d.axis_size = 8192;
        cases.push_back({.label = label + " 16384x8192", .desc = d, .gpu_only = true});
      }
    }
  }
  for (auto& c : cases) c.left_out = "importance";
  return cases;
}

namespace {

// Values that a group of weights is drawn from.
struct Draw {
  DType element;
  double largest;  // finite, of the element
  Rng& rng;

  double heavy_tailed() {
    const double x = rng.normal();
    return x / (0.02 + rng.uniform());
  }
  double denormal() {
    const double least = step(element, 0.0, 1);
    return least * static_cast<double>(rng.below(64) - 20);
  }
  double huge() {
    const double x = largest * (1 - 0.5 * rng.uniform());
    return rng.chance(2) ? x : -x;
  }
};

}  // namespace

void qdq_affine_init_aim(const AffineDesc& d, const QdqAffineInit::Args& a, Rng& rng) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  double largest = 0;
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    largest = static_cast<double>(max_finite<X>());
    return Status();
  });
  Draw draw{d.element, largest, rng};
  const std::int64_t size = d.group_size, groups = d.outer_size * d.num_groups();
  const int n = d.bins() - 1;
  for (std::int64_t g = 0; g < groups; ++g) {
    const auto set = [&](std::int64_t j, double x) { put(a.w, g * size + j, x); };
    const auto set_all = [&](auto&& x) {
      for (std::int64_t j = 0; j < size; ++j) set(j, x());
    };
    const double magnitude = std::ldexp(1.0, static_cast<int>(rng.below(25)) - 12);
    double centre = rng.normal() * magnitude;
    centre *= static_cast<double>(rng.below(3));
    switch (rng.below(18)) {
      case 0: break;  // as filled: now and then NaN, infinite or huge
      case 1: set_all([&] { return centre; }); break;
      case 2: set_all([&] { return -std::abs(magnitude * (3 + rng.normal())); }); break;
      case 3: set_all([&] { return rng.chance(2) ? 0.0 : -0.0; }); break;
      case 4: set_all([&] { return draw.denormal(); }); break;
      case 5: set_all([&] { return draw.huge(); }); break;
      case 6: set_all([&] { return rng.chance(3) ? draw.huge() : rng.awkward(); }); break;
      case 7: set_all([&] { return rng.chance(5) ? kNan : rng.normal(); }); break;
      case 8:
        set_all([&] { return rng.chance(5) ? kInf : rng.chance(9) ? -kInf : rng.normal(); });
        break;
      case 9: set_all([&] { return rng.chance(3) ? kInf : rng.chance(2) ? -kInf : kNan; }); break;
      case 10:
        set_all([&] { return rng.chance(2) ? largest : rng.chance(2) ? -largest : 0; });
        break;
      case 11: set_all([&] { return 1e-7 * n * rng.normal(); }); break;  // about mlx's eps
      case 12: set_all([&] { return magnitude * draw.heavy_tailed(); }); break;
      case 13:
        set_all([&] { return step(d.element, centre, static_cast<int>(rng.below(9))); });
        break;
      case 14: set_all([&] { return magnitude * rng.normal(); }); break;
      default: {
        // Ties of the very s and b that minmax or mlx will find: the ends first.
        const double low = rng.chance(3) ? 0.0 : centre, high = low + magnitude * (1 + n);
        set(0, low);
        set(1, high);
        (void)visit_float(d.element, [&]<class X>(Type<X>) {
          using F = Math<X>;
          const affine::Range<F> r{static_cast<F>(get(a.w, g * size)),
                                   static_cast<F>(get(a.w, g * size + 1))};
          const affine::Params<F> p = d.method == AffineMethod::mlx
                                          ? affine::mlx_params(r, d.bins())
                                          : affine::minmax_params<X>(r, d.bins());
          for (std::int64_t j = 2; j < size; ++j) {
            double code = static_cast<double>(rng.below(n));
            if (!rng.chance(4)) code += 0.5;
            set(j, step(d.element, code * static_cast<double>(p.s) + static_cast<double>(p.b),
                        static_cast<int>(rng.below(5)) - 2));
          }
          return Status();
        });
      }
    }
  }
  if (!a.importance) return;
  const bool ordinary = rng.chance(2);
  for (std::int64_t j = 0; j < d.axis_size; ++j) {
    if (ordinary || !rng.chance(6)) put(a.importance, j, 0.01 + rng.uniform());
  }
}

}  // namespace bittern::oracle
