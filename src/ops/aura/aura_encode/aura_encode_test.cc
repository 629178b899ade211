#include <bit>

#include "bittern/codec.h"
#include "ops/aura/aura.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(AuraEncode, MatchesRefEverywhere) { oracle::expect_parity("aura_encode"); }

std::string text_of(float v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(v));
  return text;
}

// ---- running it ----

struct Encoded {
  std::vector<std::uint32_t> packed;
  std::vector<float> norms;  // widened, if f16
  std::uint32_t code(const AuraDesc& d, std::int64_t row, std::int64_t j) const {
    return packed_code(packed.data() + row * d.packed_shape()[1], j, d.bits);
  }
};

struct Tables {
  Codebook book;
  std::vector<float> rotation;
  Tables(const AuraDesc& d, std::uint64_t seed = 1)
      : book(*sphere_codebook(d.axis_size, d.bits)),
        rotation(*make_rotation(d.rotation, d.axis_size, seed)) {}
};

// Rows over outputs that are dirty.
template <class X = float>
Encoded encode(AuraDesc& d, const std::vector<X>& x, const Tables& t,
               std::string_view kernel = {}) {
  d.outer_size = static_cast<std::int64_t>(x.size()) / d.axis_size;
  const auto rows = static_cast<std::size_t>(d.outer_size);
  Encoded out{std::vector<std::uint32_t>(static_cast<std::size_t>(d.packed_shape().numel()), ~0u),
              std::vector<float>(rows, -7)};
  std::vector<f16> half(rows);
  AuraEncode::Args args{.x = view(x.data(), d.tensor_shape()),
                        .boundaries = view(t.book.boundaries.data(), {d.levels() - 1}),
                        .codebook = view(t.book.levels.data(), {d.levels()}),
                        .packed = view(out.packed.data(), d.packed_shape()),
                        .norms = view(out.norms.data(), d.norm_shape())};
  if (d.f16_norm) args.norms = view(half.data(), d.norm_shape());
  if (d.rotation != Rotation::identity) args.table = view(t.rotation.data(), d.rotation_shape());
  expect_ok(run_op<AuraEncode>(d, args, kernel));
  for (std::size_t i = 0; d.f16_norm && i < rows; ++i) out.norms[i] = to_f32(half[i]);
  return out;
}

std::vector<float> decode(const AuraDesc& d, const Encoded& e, const Tables& t) {
  std::vector<float> y(static_cast<std::size_t>(d.tensor_shape().numel()));
  AuraDesc plain = d;
  plain.f16_norm = false;
  AuraDecode::Args args{.packed = view(e.packed.data(), d.packed_shape()),
                        .norms = view(e.norms.data(), d.norm_shape()),
                        .codebook = view(t.book.levels.data(), {d.levels()}),
                        .y = view(y.data(), d.tensor_shape())};
  if (d.rotation != Rotation::identity) args.table = view(t.rotation.data(), d.rotation_shape());
  expect_ok(run_op<AuraDecode>(plain, args));
  return y;
}

// Independent Gaussians, so rows point anywhere: drawn from 64 Ki samples.
class Gaussians {
 public:
  explicit Gaussians(std::uint64_t seed) : rng_(seed), samples_(1 << 16) {
    for (std::size_t i = 0; i < samples_.size(); i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - rng_.uniform()));
      const double angle = 2 * M_PI * rng_.uniform();
      samples_[i] = static_cast<float>(radius * std::cos(angle));
      samples_[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
  std::vector<float> rows(std::int64_t count, std::int64_t dim) {
    std::vector<float> x(static_cast<std::size_t>(count * dim));
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < x.size(); ++i, bits >>= 16) {
      if (i % 4 == 0) bits = rng_.next();
      x[i] = samples_[bits & 0xffff];
    }
    return x;
  }

 private:
  oracle::Rng rng_;
  std::vector<float> samples_;
};

// The mean over rows of |x - x'|^2 / |x|^2.
double relative_error(const AuraDesc& d, const std::vector<float>& x, const std::vector<float>& y) {
  const auto n = static_cast<std::size_t>(d.axis_size);
  double total = 0;
  for (std::size_t i = 0; i < x.size(); i += n) {
    double error = 0, size = 0;
    for (std::size_t j = i; j < i + n; ++j) {
      const auto a = static_cast<double>(x[j]), e = a - static_cast<double>(y[j]);
      error += e * e;
      size += a * a;
    }
    total += error / size;
  }
  return total * static_cast<double>(n) / static_cast<double>(x.size());
}
double round_trip_error(AuraDesc d, const std::vector<float>& x, const Tables& t) {
  const Encoded e = encode(d, x, t);
  return relative_error(d, x, decode(d, e, t));
}

// ---- quality ----

// Random directions: the codec's error is what the codebook promises. (1 % is many standard errors
// of so many rows.)
TEST(AuraEncode, DistortionIsThatOfTheCodebook) {
  Gaussians gaussians(1);
  for (const std::int64_t dim : {64, 128, 256}) {
    const auto x = gaussians.rows(100000, dim);
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      const AuraDesc d{.axis_size = dim, .bits = bits, .scale_rule = ScaleRule::none};
      const Tables t(d);
      EXPECT_NEAR(round_trip_error(d, x, t) / t.book.distortion, 1, 0.01) << dim << " " << bits;
    }
  }
}

TEST(AuraEncode, EachScaleRuleDoesWhatItSays) {
  Gaussians gaussians(2);
  const auto x = gaussians.rows(20000, 128);
  constexpr ScaleRule kRules[] = {ScaleRule::none, ScaleRule::matched, ScaleRule::least_squares,
                                  ScaleRule::unbiased};
  struct Row {
    std::int32_t bits;
    double error[4];
  };
  for (const Row& row :
       {Row{2, {.11607, .11891, .11530, .13067}}, Row{3, {.03396, .03380, .03351, .03471}},
        Row{4, {.00929, .00915, .00913, .00922}}}) {
    for (std::size_t i = 0; i < 4; ++i) {
      const AuraDesc d{.axis_size = 128, .bits = row.bits, .scale_rule = kRules[i]};
      EXPECT_NEAR(round_trip_error(d, x, Tables(d)) / row.error[i], 1, 0.01)
          << row.bits << " bits, rule " << i;
    }
  }
  // Lengths, projections and least squares, row by row.
  const std::vector<float> few(x.begin(), x.begin() + 64 * 128);
  double error[4][64];
  for (std::size_t rule = 0; rule < 4; ++rule) {
    AuraDesc d{.axis_size = 128, .bits = 2, .scale_rule = kRules[rule]};
    const Tables t(d);
    const auto y = decode(d, encode(d, few, t), t);
    for (std::size_t i = 0; i < 64; ++i) {
      double xx = 0, xy = 0, yy = 0;
      for (std::size_t j = i * 128; j < (i + 1) * 128; ++j) {
        const auto a = static_cast<double>(few[j]), b = static_cast<double>(y[j]);
        xx += a * a, xy += a * b, yy += b * b;
      }
      error[rule][i] = xx - 2 * xy + yy;
      if (kRules[rule] == ScaleRule::matched) {
        EXPECT_NEAR(yy / xx, 1, 1e-5);
      }
      if (kRules[rule] == ScaleRule::unbiased) {
        EXPECT_NEAR(xy / xx, 1, 1e-5);
      }
    }
  }
  for (std::size_t i = 0; i < 64; ++i)
    for (const std::size_t other : {0u, 1u, 3u}) EXPECT_LE(error[2][i], error[other][i] * 1.00001);
}

// Rows that are not random, relative error at 4 bits: the reason for a rotation, and for its signs.
TEST(AuraEncode, RotationsTameAwkwardRows) {
  const auto error = [](Rotation rotation, const std::vector<float>& x, bool signs = true) {
    const AuraDesc d{.axis_size = 128, .rotation = rotation};
    double sum = 0;
    for (std::uint64_t seed = 1; seed <= 16; ++seed) {
      Tables t(d, seed);
      if (!signs) t.rotation.assign(128, 1.0f);
      sum += round_trip_error(d, x, t) / 16;
    }
    return sum;
  };
  const std::vector<float> constant(128, 3.0f);
  EXPECT_LT(error(Rotation::identity, constant), 1e-10);
  EXPECT_NEAR(error(Rotation::hadamard, constant, false), 0.237, 0.005);
  EXPECT_LT(error(Rotation::hadamard, constant), 0.0092);
  EXPECT_NEAR(error(Rotation::dense, constant), 0.0092, 0.001);
  std::vector<float> one_hot(128);
  one_hot[77] = -2;
  EXPECT_NEAR(error(Rotation::identity, one_hot), 0.237, 0.005);
  EXPECT_LT(error(Rotation::hadamard, one_hot), 1e-10);
  EXPECT_NEAR(error(Rotation::dense, one_hot), 0.0093, 0.001);
  Gaussians gaussians(3);
  auto outliers = gaussians.rows(200, 128);
  for (std::size_t i = 0; i < outliers.size(); i += 128)
    for (const std::size_t j : {3u, 40u, 41u, 99u}) outliers[i + j] *= 30;
  EXPECT_NEAR(error(Rotation::identity, outliers), 0.209, 0.01);
  EXPECT_NEAR(error(Rotation::hadamard, outliers), 0.0080, 0.0008);
  EXPECT_NEAR(error(Rotation::dense, outliers), 0.0095, 0.0008);
}

// ---- the seed's contract ----

// Its pipeline in f64, against dense rotations and a uniform codebook; a code may differ only where
// the rotated value all but touches a boundary.
TEST(AuraEncode, AgreesWithTheSeedsOracle) {
  Gaussians gaussians(4);
  for (const auto kernel : kBothKernels) {
    for (const std::int64_t dim : {32, 64, 80, 96, 128, 192, 256}) {
      for (const std::int32_t bits : {2, 3, 4, 6, 8}) {
        AuraDesc d{.axis_size = dim, .bits = bits, .rotation = Rotation::dense};
        Tables t(d);
        if (bits == 4) {
          for (int i = 0; i < 16; ++i)
            t.book.levels[static_cast<std::size_t>(i)] = (2.0f * static_cast<float>(i) - 15) / 15;
          t.book = *user_codebook(t.book.levels);
        }
        const auto x = gaussians.rows(3, dim);
        const Encoded e = encode(d, x, t, kernel);
        for (std::int64_t row = 0; row < 3; ++row) {
          const float* at = x.data() + row * dim;
          double norm = 0, recon = 0;
          for (std::int64_t j = 0; j < dim; ++j)
            norm += static_cast<double>(at[j]) * static_cast<double>(at[j]);
          norm = std::sqrt(norm);
          for (std::int64_t i = 0; i < dim; ++i) {
            double rotated = 0;
            for (std::int64_t j = 0; j < dim; ++j)
              rotated += static_cast<double>(t.rotation[static_cast<std::size_t>(i * dim + j)]) *
                         static_cast<double>(at[j]) / norm;
            std::uint32_t index = 0;
            double nearest = 1;
            for (const float boundary : t.book.boundaries) {
              index += rotated > static_cast<double>(boundary) ? 1 : 0;
              nearest = std::min(nearest, std::fabs(rotated - static_cast<double>(boundary)));
            }
            const std::uint32_t code = e.code(d, row, i);
            if (nearest > 1e-6) {
              ASSERT_EQ(code, index) << dim << " " << bits;
            }
            const auto level = static_cast<double>(t.book.levels[code]);
            recon += level * level;
          }
          EXPECT_NEAR(e.norms[static_cast<std::size_t>(row)] * std::sqrt(recon) / norm, 1, 1e-5);
        }
      }
    }
  }
}

// Two values, by hand: norm 5, u = (0.6, 0.8), boundaries -0.7 0 0.8: 0.8 is not above 0.8.
TEST(AuraEncode, ByHand) {
  for (const auto kernel : kBothKernels) {
    AuraDesc d{.axis_size = 2, .bits = 2, .rotation = Rotation::identity};
    Tables t(d);
    t.book.boundaries = {-0.7f, 0, 0.8f};
    t.book.levels = {-0.75f, -0.25f, 0.75f, 1};
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).packed[0], 2u | 2u << 2);
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).norms[0], 5 / std::sqrt(1.125f));
    EXPECT_EQ(encode(d, {-4, 0}, t, kernel).packed[0], 0u | 1u << 2);
    d.scale_rule = ScaleRule::none;
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).norms[0], 5);
    d.scale_rule = ScaleRule::unbiased;
    EXPECT_EQ(encode(d, {0, -4}, t, kernel).norms[0], 4 / 0.75f);
    d.scale_rule = ScaleRule::least_squares;
    EXPECT_EQ(encode(d, {0, -4}, t, kernel).norms[0], 4 * (0.75f / 0.625f));
  }
}

// ---- dense rotations on a GPU's tensor cores ----

// What a view of host memory holds, on the device for as long as this lives.
class OnDevice {
 public:
  template <class T>
  explicit OnDevice(const std::vector<T>& from) : bytes_(from.size() * sizeof(T)) {
    expect_ok(gpu().alloc(0, bytes_, &data_));
    expect_ok(gpu().copy(data_, from.data(), bytes_));
  }
  ~OnDevice() { gpu().release(0, data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  std::vector<T> back() const {
    std::vector<T> to(bytes_ / sizeof(T));
    expect_ok(gpu().copy(to.data(), data_, bytes_));
    return to;
  }

 private:
  static const CudaPlugin& gpu() { return **cuda_plugin(0); }
  std::size_t bytes_;
  void* data_ = nullptr;
};

// Runs a kernel `runs` times over dirty outputs; all must agree.
template <class X>
Encoded encode_on_gpu(const AuraDesc& d, const std::vector<X>& x, const Tables& t, int runs,
                      std::string_view kernel) {
  constexpr Device kDevice{Device::Type::cuda, 0};
  const auto plan = Plan<AuraEncode>::select(d, kDevice, Preference::fastest, kernel);
  expect_ok(plan.status());
  const OnDevice rows(x), table(t.rotation), boundaries(t.book.boundaries), codebook(t.book.levels);
  Encoded first;
  for (int i = 0; i < runs; ++i) {
    const OnDevice packed(
        std::vector<std::uint32_t>(static_cast<std::size_t>(d.packed_shape().numel()), ~0u));
    const OnDevice norms(std::vector<float>(static_cast<std::size_t>(d.outer_size), -7));
    expect_ok(
        plan->run({.x = view(rows.as<const X>(), d.tensor_shape(), kDevice),
                   .table = view(table.as<const float>(), d.rotation_shape(), kDevice),
                   .boundaries = view(boundaries.as<const float>(), {d.levels() - 1}, kDevice),
                   .codebook = view(codebook.as<const float>(), {d.levels()}, kDevice),
                   .packed = view(packed.as<std::uint32_t>(), d.packed_shape(), kDevice),
                   .norms = view(norms.as<float>(), d.norm_shape(), kDevice)}));
    Encoded now{packed.back<std::uint32_t>(), norms.back<float>()};
    if (i == 0) first = now;
    EXPECT_EQ(now.packed, first.packed) << "run " << i;
    for (std::size_t row = 0; row < now.norms.size(); ++row)  // the bits, for NaN
      EXPECT_EQ(std::bit_cast<std::uint32_t>(now.norms[row]),
                std::bit_cast<std::uint32_t>(first.norms[row]));
  }
  return first;
}

// The kernel that Preference::fastest takes.
template <class X>
Encoded encode_fastest(const AuraDesc& d, const std::vector<X>& x, const Tables& t, int runs) {
  constexpr Device kDevice{Device::Type::cuda, 0};
  const auto plan = Plan<AuraEncode>::select(d, kDevice, Preference::fastest);
  expect_ok(plan.status());
  EXPECT_EQ(plan->sku().kernel, "cuda_tensor");
  return encode_on_gpu(d, x, t, runs, "cuda_tensor");
}

template <class X>
std::vector<X> stored(const std::vector<float>& x) {
  std::vector<X> to(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) to[i] = from_math<X>(x[i]);
  return to;
}

// Codes against a rotation in f64: 99.99 % agree; s to 1e-6 of that of the codes found.
TEST(AuraEncode, TensorCoresAgreeWithF64) {
  BITTERN_NEEDS_CUDA();
  Gaussians gaussians(9);
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int32_t bits : {2, 4, 8}) {
      for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
        const AuraDesc d{.outer_size = 203,
                         .axis_size = dim,
                         .bits = bits,
                         .element = element,
                         .rotation = Rotation::dense};
        const Tables t(d);
        auto x = gaussians.rows(d.outer_size, dim);
        for (std::size_t i = 0; i < x.size(); ++i)  // rows of any size, with outliers
          x[i] = std::ldexp(x[i], static_cast<int>(i / static_cast<std::size_t>(dim) % 13) - 9);
        for (std::size_t i = 5; i < x.size(); i += 997) x[i] *= 40;
        std::int64_t different = 0;
        expect_ok(visit<float, f16, bf16>(element, [&]<class X>(Type<X>) {
          const std::vector<X> rows = stored<X>(x);
          const Encoded e = encode_fastest(d, rows, t, 1);
          for (std::int64_t row = 0; row < d.outer_size; ++row) {
            const X* at = rows.data() + row * dim;
            double norm = 0, recon = 0;
            for (std::int64_t j = 0; j < dim; ++j)
              norm += static_cast<double>(to_math(at[j])) * static_cast<double>(to_math(at[j]));
            norm = std::sqrt(norm);
            for (std::int64_t i = 0; i < dim; ++i) {
              double rotated = 0;
              for (std::int64_t j = 0; j < dim; ++j)
                rotated += static_cast<double>(t.rotation[static_cast<std::size_t>(i * dim + j)]) *
                           static_cast<double>(to_math(at[j])) / norm;
              std::uint32_t index = 0;
              for (const float boundary : t.book.boundaries)
                index += rotated > static_cast<double>(boundary) ? 1 : 0;
              const std::uint32_t code = e.code(d, row, i);
              different += code != index ? 1 : 0;
              const auto level = static_cast<double>(t.book.levels[code]);
              recon += level * level;
            }
            EXPECT_NEAR(e.norms[static_cast<std::size_t>(row)] * std::sqrt(recon) / norm, 1, 1e-6);
          }
          return Status();
        }));
        EXPECT_LE(static_cast<double>(different),
                  1e-4 * static_cast<double>(d.tensor_shape().numel()))
            << dim << " " << bits << " " << name(element);
      }
    }
  }
}

// Rows out of the ordinary are the exact kernel's, and every run gives the same bits.
TEST(AuraEncode, TensorCoresAreDeterministic) {
  BITTERN_NEEDS_CUDA();
  AuraDesc d{.outer_size = 67, .axis_size = 128, .rotation = Rotation::dense};
  const Tables t(d);
  Gaussians gaussians(10);
  auto x = gaussians.rows(d.outer_size, 128);
  const float odd[] = {NAN, INFINITY, 3e38f, 1e-20f, 0};
  for (std::size_t row = 0; row < 67; row += 6)
    for (std::size_t j = 0; j < 128; ++j) x[row * 128 + j] = odd[row / 6 % 5];
  const Encoded e = encode_fastest(d, x, t, 100);
  AuraDesc same = d;
  const Encoded want = encode(same, x, t, "ref");
  for (std::size_t row = 0; row < 67; row += 6) {
    for (std::size_t w = row * 16; w < (row + 1) * 16; ++w) EXPECT_EQ(e.packed[w], want.packed[w]);
    if (std::isnan(want.norms[row])) {
      EXPECT_TRUE(std::isnan(e.norms[row]));
    } else {
      EXPECT_NEAR(e.norms[row], want.norms[row], 1e-6 * static_cast<double>(want.norms[row]));
    }
  }
}

// Matrices that are not orthogonal, whose r may lie anywhere, or that f16 cannot hold; all rules,
// and codes that fill no byte.
TEST(AuraEncode, TensorCoresTakeAnyMatrix) {
  BITTERN_NEEDS_CUDA();
  Gaussians gaussians(11);
  for (const float factor : {0.25f, 5.0f, 1e4f}) {
    for (const std::int32_t bits : {3, 4, 5}) {
      AuraDesc d{.outer_size = 150, .axis_size = 64, .bits = bits, .rotation = Rotation::dense};
      Tables t(d);
      for (float& v : t.rotation) v *= factor;
      const auto x = gaussians.rows(d.outer_size, d.axis_size);
      for (const ScaleRule rule :
           {ScaleRule::matched, ScaleRule::none, ScaleRule::least_squares, ScaleRule::unbiased}) {
        d.scale_rule = rule;
        const Encoded e = encode_fastest(d, x, t, 1), want = encode(d, x, t, "ref");
        std::int64_t different = 0;
        for (std::int64_t row = 0; row < d.outer_size; ++row) {
          std::int64_t of_row = 0;
          for (std::int64_t j = 0; j < d.axis_size; ++j)
            of_row += e.code(d, row, j) != want.code(d, row, j) ? 1 : 0;
          different += of_row;
          const float norm = want.norms[static_cast<std::size_t>(row)];
          if (of_row == 0) {
            EXPECT_NEAR(e.norms[static_cast<std::size_t>(row)] / norm, 1, 1e-5);
          }
        }
        EXPECT_LE(different, 1) << factor << " " << bits;
      }
    }
  }
}

// r of a row by the definition: steps 1 and 2.
std::vector<float> rotated(const AuraDesc& d, const std::vector<float>& x, const Tables& t) {
  AuraDesc plain = d;
  plain.element = DType::f32;
  plain.scale_rule = ScaleRule::none;
  const float inv = 1 / encode(plain, x, t, "ref").norms[0];
  std::vector<float> r = x;
  rotate_row(d.rotation, d.axis_size, t.rotation.data(), false, r.data(), inv);
  return r;
}

// Boundaries that lie on r of the rows, or next to it: what a kernel finds out about r by other
// sums than the definition's does not decide there.
TEST(AuraEncode, CudaTellsTheSideOfABoundary) {
  BITTERN_NEEDS_CUDA();
  Gaussians gaussians(12);
  for (const std::int32_t bits : {2, 3, 4}) {
    for (const DType element : {DType::f16, DType::bf16}) {
      for (int trial = 0; trial < 9; ++trial) {
        const AuraDesc d{.outer_size = 700, .axis_size = 128, .bits = bits, .element = element};
        Tables t(d);
        expect_ok(visit<f16, bf16>(element, [&]<class X>(Type<X>) {
          const std::vector<X> one = stored<X>(gaussians.rows(1, d.axis_size));
          std::vector<float> widened(one.size());
          for (std::size_t j = 0; j < one.size(); ++j) widened[j] = to_math(one[j]);
          const std::vector<float> r = rotated(d, widened, t);
          for (float& boundary : t.book.boundaries) {
            float nearest = r[0];
            for (const float v : r)
              if (std::fabs(v - boundary) < std::fabs(nearest - boundary)) nearest = v;
            boundary = trial % 3 == 0   ? nearest
                       : trial % 3 == 1 ? std::nextafter(nearest, -2.0f)
                                        : std::nextafter(nearest, 2.0f);
          }
          std::vector<X> rows;
          std::vector<float> same;
          for (std::int64_t row = 0; row < d.outer_size; ++row) {
            for (const float v : widened) {  // powers of two leave u as it is
              same.push_back(std::ldexp(v, static_cast<int>(row % 5) - 2));
              rows.push_back(from_math<X>(same.back()));
            }
          }
          const Encoded e = encode_on_gpu(d, rows, t, 1, "cuda");
          AuraDesc plain = d;
          plain.element = DType::f32;
          const Encoded want = encode(plain, same, t, "ref");
          EXPECT_EQ(e.packed, want.packed) << bits << " bits, " << name(element) << " " << trial;
          EXPECT_EQ(e.norms, want.norms) << bits << " bits, " << name(element) << " " << trial;
          return Status();
        }));
      }
    }
  }
}

// ---- rows of any size ----

constexpr ScaleRule kAllRules[] = {ScaleRule::matched, ScaleRule::none, ScaleRule::least_squares,
                                   ScaleRule::unbiased};
constexpr Rotation kAllRotations[] = {Rotation::identity, Rotation::hadamard, Rotation::dense};

// f(desc, tables, kernel) for each rotation, rule and kernel, with rows of 128 and of 20.
template <class F>
void for_all(F&& f) {
  for (const std::int64_t dim : {128, 20}) {
    for (const Rotation rotation : kAllRotations) {
      AuraDesc d{.axis_size = dim, .rotation = rotation};
      const Tables t(d);
      for (const ScaleRule rule : kAllRules) {
        d.scale_rule = rule;
        for (const auto kernel : kBothKernels) f(d, t, kernel);
      }
    }
  }
}

TEST(AuraEncode, ZeroRowsDecodeToZeros) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    std::vector<float> x(static_cast<std::size_t>(2 * d.axis_size));
    x[1] = -0.0f;
    const Encoded e = encode(d, x, t, kernel);
    EXPECT_EQ(e.norms, (std::vector<float>{0, 0}));
    for (std::int64_t j = 0; j < d.axis_size; ++j)
      EXPECT_EQ(e.code(d, 1, j), 7u);  // just below the middle: 0 > 0 is false
    for (const float y : decode(d, e, t)) EXPECT_EQ(y, 0);
  });
}

// Rows of 8 significant bits, which every element type holds, times each power of two that leaves
// them exact: from the type's subnormals (for f32 the powers named here) to its largest. Row 0 is
// the plain one.
constexpr int kLeastPower = -143, kMostPower = 126;
std::vector<float> rows_of_all_sizes(std::int64_t dim, int least, int most) {
  Gaussians gaussians(13);
  auto x = gaussians.rows(1, dim);
  for (float& v : x) v = std::clamp(std::round(v * 64) / 64, -3.0f, 3.0f);
  x[0] = 3;
  std::vector<float> all = x;
  for (int power = least; power <= most; ++power)
    for (const float v : x) all.push_back(std::ldexp(v, power));
  return all;
}

TEST(AuraEncode, RowsOfAnySizeKeepTheirCodes) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      d.element = element;
      const bool half = element == DType::f16;
      const int least = half ? -18 : element == DType::bf16 ? -127 : kLeastPower;
      const int most = half ? 14 : kMostPower;
      const auto x = rows_of_all_sizes(d.axis_size, least, most);
      Encoded e;
      expect_ok(visit<float, f16, bf16>(element, [&]<class X>(Type<X>) {
        e = encode(d, stored<X>(x), t, kernel);
        return Status();
      }));
      const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
      constexpr double kMost = 3.4028234663852886e38;
      AuraDesc plain = d;
      plain.element = DType::f32;
      const auto y = decode(plain, e, t);
      const auto n = static_cast<std::size_t>(d.axis_size);
      double first = 0, length = 0;
      for (std::size_t j = 0; j < n; ++j) length = std::hypot(length, static_cast<double>(x[j]));
      for (std::size_t row = 0; row < e.norms.size(); ++row) {
        const int power = row == 0 ? 0 : static_cast<int>(row) - 1 + least;
        for (std::size_t w = 0; w < words; ++w)
          ASSERT_EQ(e.packed[row * words + w], e.packed[w]) << power;
        const double s = std::ldexp(static_cast<double>(e.norms[0]), power);
        const double norm = std::ldexp(length, power);
        const bool saturates = norm > kMost || s > kMost;
        if (!saturates) {
          EXPECT_LE(std::fabs(static_cast<double>(e.norms[row]) - s), s < 0x1p-125 ? 0x1p-148 : 0)
              << power;
        }
        double error = 0;
        for (std::size_t j = 0; j < n; ++j)
          error = std::hypot(
              error, static_cast<double>(x[row * n + j]) - static_cast<double>(y[row * n + j]));
        error /= norm;
        if (row == 0) first = error;
        // Subnormal numbers have fewer bits, in s and in y.
        const double granularity = 0x1p-148 * std::sqrt(static_cast<double>(n)) / norm;
        if (!saturates) {
          EXPECT_NEAR(error, first, 1e-5 + granularity) << power;
        }
      }
    }
    d.element = DType::f32;
  });
}

// The same at every width, and rows whose elements are of all sizes: the largest decides.
TEST(AuraEncode, RowsOfAnySizeAtEveryWidth) {
  for (const auto kernel : kBothKernels) {
    for (const Rotation rotation : kAllRotations) {
      for (std::int32_t bits = 1; bits <= 8; ++bits) {
        for (const std::int64_t dim : {2, 33, 64, 80}) {
          if (rotation == Rotation::hadamard && hadamard_factor(dim) == 0) continue;
          AuraDesc d{.axis_size = dim, .bits = bits, .rotation = rotation};
          const Tables t(d);
          const auto n = static_cast<std::size_t>(dim);
          const auto x = rows_of_all_sizes(dim, kLeastPower, kMostPower);
          const Encoded e = encode(d, x, t, kernel);
          const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
          for (std::size_t w = words; w < e.packed.size(); ++w)
            ASSERT_EQ(e.packed[w], e.packed[w % words]) << dim << " " << bits << " " << w / words;
          // One element is the row, however small the others are beside it.
          std::vector<float> one(n, 1e-30f), same(n);
          one[1] = same[1] = 3e20f;
          const Encoded with = encode(d, one, t, kernel), without = encode(d, same, t, kernel);
          if (rotation != Rotation::identity) {
            EXPECT_EQ(with.packed, without.packed);
          }
          EXPECT_EQ(with.norms, without.norms);
        }
      }
    }
  }
}

// A single element, down to the least there is.
TEST(AuraEncode, TheLeastRowHasADirection) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    std::vector<float> x(static_cast<std::size_t>(d.axis_size));
    x[2] = 1;
    const Encoded want = encode(d, x, t, kernel);
    for (const float v :
         {0x1p-149f, 0x1.8p-148f, 0x1p-126f, 9e-9f, 1e-8f, 1.85e19f, 7.9e20f, 0x1.fffffep127f}) {
      x[2] = v;
      const Encoded e = encode(d, x, t, kernel);
      EXPECT_EQ(e.packed, want.packed) << v;
      const double s = std::min(static_cast<double>(want.norms[0]) * static_cast<double>(v),
                                3.4028234663852886e38);
      EXPECT_NEAR(e.norms[0], s, 1e-6 * s + 0x1p-149) << v;
    }
  });
}

// Every CUDA kernel: few rows and many, of tuned lengths and others, by lanes, warps and blocks.
TEST(AuraEncode, CudaTakesRowsOfAnySize) {
  BITTERN_NEEDS_CUDA();
  for (const Rotation rotation : {Rotation::hadamard, Rotation::dense}) {
    for (const std::int64_t dim : {64, 80, 128}) {
      for (const DType element : {DType::f32, DType::bf16}) {
        for (const std::int64_t copies : {1, 4}) {
          AuraDesc d{.axis_size = dim, .element = element, .rotation = rotation};
          const Tables t(d);
          auto x = rows_of_all_sizes(dim, kLeastPower, kMostPower);
          for (std::int64_t i = 0; i < dim; ++i) x.push_back(i % 2 == 0 ? 0.0f : -0.0f);
          const auto once = x;
          for (std::int64_t i = 1; i < copies; ++i) x.insert(x.end(), once.begin(), once.end());
          expect_ok(visit<float, bf16>(element, [&]<class X>(Type<X>) {
            const Encoded want = encode(d, stored<X>(x), t, "ref");
            const Encoded e = encode_on_gpu(d, stored<X>(x), t, 1, "cuda");
            EXPECT_EQ(e.packed, want.packed) << dim << " " << copies << " " << name(element);
            EXPECT_EQ(e.norms, want.norms) << dim << " " << copies << " " << name(element);
            if (rotation == Rotation::dense && dim != 80) {
              const Encoded fast = encode_on_gpu(d, stored<X>(x), t, 1, "cuda_tensor");
              std::int64_t different = 0;
              for (std::int64_t i = 0; i < d.tensor_shape().numel(); ++i)
                different += fast.code(d, i / dim, i % dim) != want.code(d, i / dim, i % dim);
              EXPECT_LE(different, d.outer_size / 100) << dim << " " << name(element);
              for (std::size_t i = 0; i < want.norms.size(); ++i)
                EXPECT_NEAR(fast.norms[i], want.norms[i],
                            1e-3 * static_cast<double>(want.norms[i]) + 0x1p-148);
            }
            return Status();
          }));
        }
      }
    }
  }
}

TEST(AuraEncode, RowsWhoseNormOverflowsKeepTheirCodes) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(5);
    auto x = gaussians.rows(1, d.axis_size);
    double length = 0;
    for (float& v : x) {
      v = std::clamp(v, -3.0f, 3.0f);
      length += static_cast<double>(v) * static_cast<double>(v);
    }
    length = std::sqrt(length);
    const Encoded want = encode(d, x, t, kernel);
    constexpr double kMost = 3.4028234663852886e38;
    for (const float size : {0x1p62f, 0x1p65f, 0x1p70f, 0x1p120f, 0x1p126f}) {
      auto large = x;
      for (float& v : large) v *= size;
      const Encoded e = encode(d, large, t, kernel);
      EXPECT_EQ(e.packed, want.packed);
      const double norm = std::min(length * static_cast<double>(size), kMost);
      const double s = norm * static_cast<double>(want.norms[0]) / length;
      EXPECT_NEAR(e.norms[0] / std::min(s, kMost), 1, 1e-6) << size;
      for (const float y : decode(d, e, t)) EXPECT_TRUE(std::isfinite(y));
    }
  });
}

TEST(AuraEncode, RowsThatAreNotFiniteDecodeToNan) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x(static_cast<std::size_t>(d.axis_size), 1.0f);
      x[static_cast<std::size_t>(d.axis_size - 2)] = bad;
      const Encoded e = encode(d, x, t, kernel);
      for (const std::uint32_t word : e.packed) EXPECT_EQ(word, 0u);
      EXPECT_TRUE(std::isnan(e.norms[0]));
      for (const float y : decode(d, e, t)) EXPECT_TRUE(std::isnan(y));
    }
  });
}

TEST(AuraEncode, NoRowDisturbsAnother) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(6);
    const auto n = static_cast<std::size_t>(d.axis_size);
    auto x = gaussians.rows(40, d.axis_size);
    const Encoded clean = encode(d, x, t, kernel);
    const float bad[] = {NAN, INFINITY, 3e38f, 1e-30f, 0};
    for (std::size_t row = 0; row < 40; row += 3)
      for (std::size_t j = 0; j < n; ++j) x[row * n + j] = bad[row % 5];
    const Encoded dirty = encode(d, x, t, kernel);
    const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
    for (std::size_t row = 0; row < 40; ++row) {
      if (row % 3 == 0) continue;
      EXPECT_EQ(clean.norms[row], dirty.norms[row]);
      for (std::size_t w = row * words; w < (row + 1) * words; ++w)
        EXPECT_EQ(clean.packed[w], dirty.packed[w]);
    }
  });
}

TEST(AuraEncode, HalfNormsSaturate) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(7);
    auto x = gaussians.rows(3, d.axis_size);
    for (std::size_t j = 0; j < static_cast<std::size_t>(d.axis_size); ++j) {
      x[j] *= 1e6f;
      x[static_cast<std::size_t>(2 * d.axis_size) + j] = 1;
    }
    x.back() = NAN;
    const Encoded full = encode(d, x, t, kernel);
    d.f16_norm = true;
    const Encoded half = encode(d, x, t, kernel);
    d.f16_norm = false;
    EXPECT_EQ(half.packed, full.packed);
    EXPECT_EQ(half.norms[0], 65504);
    EXPECT_EQ(half.norms[1], to_f32(to_f16(full.norms[1])));
    EXPECT_TRUE(std::isnan(half.norms[2]));
  });
}

// ---- layout ----

// One token of three heads straight into a cache [heads, capacity, words].
TEST(AuraEncode, WritesIntoACache) {
  Gaussians gaussians(8);
  AuraDesc d{.axis_size = 128, .bits = 3};
  const Tables t(d);
  const auto x = gaussians.rows(3, 128);
  const Encoded want = encode(d, x, t);
  constexpr std::int64_t kCapacity = 5, kSlot = 2;
  const std::int64_t words = d.packed_shape()[1];
  std::vector<std::uint32_t> cache(static_cast<std::size_t>(3 * kCapacity * words), 0xabababab);
  std::vector<float> norms(3 * kCapacity, -1);
  expect_ok(run_op<AuraEncode>(
      d, {.x = view(x.data(), {3, 128}),
          .table = view(t.rotation.data(), {128}),
          .boundaries = view(t.book.boundaries.data(), {7}),
          .codebook = view(t.book.levels.data(), {8}),
          .packed = view(cache.data() + kSlot * words, {3, words}, kCapacity * words),
          .norms = view(norms.data() + kSlot, {3, 1}, kCapacity)}));
  for (std::int64_t head = 0; head < 3; ++head) {
    for (std::int64_t slot = 0; slot < kCapacity; ++slot) {
      const auto at = static_cast<std::size_t>(head * kCapacity + slot);
      EXPECT_EQ(norms[at], slot == kSlot ? want.norms[static_cast<std::size_t>(head)] : -1);
      for (std::int64_t w = 0; w < words; ++w)
        EXPECT_EQ(
            cache[at * static_cast<std::size_t>(words) + static_cast<std::size_t>(w)],
            slot == kSlot ? want.packed[static_cast<std::size_t>(head * words + w)] : 0xabababab);
    }
  }
}

TEST(AuraEncode, ErrorsNameTheFieldAndLeaveTheOutputsAlone) {
  const AuraDesc good{.outer_size = 2, .axis_size = 128};
  Tables t(good);
  std::vector<float> x(256, 1), norms(2, 7);
  std::vector<std::uint32_t> packed(64, 0xabcdef01u);
  const auto untouched = packed;
  const AuraEncode::Args args{.x = view(std::as_const(x).data(), {2, 128}),
                              .table = view(std::as_const(t.rotation).data(), {128}),
                              .boundaries = view(std::as_const(t.book.boundaries).data(), {15}),
                              .codebook = view(std::as_const(t.book.levels).data(), {16}),
                              .packed = view(packed.data(), {2, 16}),
                              .norms = view(norms.data(), {2, 1})};
  const auto with = [&](auto change) {
    AuraDesc d = good;
    change(d);
    return run_op<AuraEncode>(d, args);
  };
  const auto operand = [&](auto change) {
    AuraEncode::Args a = args;
    change(a);
    return run_op<AuraEncode>(good, a);
  };
  const auto table = [&](std::vector<float>& values, std::size_t i, float value) {
    const float before = values[i];
    values[i] = value;
    const Status status = run_op<AuraEncode>(good, args);
    values[i] = before;
    return status;
  };
  using D = AuraDesc&;
  using A = AuraEncode::Args&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.bits = 0; }), bad, "aura_encode: bits: 0, expected 1..8");
  expect_error(with([](D d) { d.bits = 9; }), bad, "aura_encode: bits: 9, expected 1..8");
  expect_error(with([](D d) { d.axis_size = 1; }), bad,
               "aura_encode: axis_size: 1, expected 2..1024");
  expect_error(with([](D d) { d.axis_size = 1025; }), bad,
               "aura_encode: axis_size: 1025, expected 2..1024");
  expect_error(with([](D d) { d.axis_size = 100; }), bad,
               "aura_encode: axis_size: 100 with rotation hadamard, expected a power of two times "
               "one of 1 12 20 28 36 44 60");
  expect_error(with([](D d) { d.outer_size = -3; }), bad,
               "aura_encode: outer_size: -3, expected at least 0");
  expect_error(with([](D d) { d.scale_rule = static_cast<ScaleRule>(4); }), bad,
               "aura_encode: scale_rule: 4, expected 0..3");
  expect_error(with([](D d) { d.element = DType::f64; }), Code::unsupported,
               "aura_encode: element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.f16_norm = true; }), bad,
               "aura_encode: norms: dtype f32, expected f16");
  expect_error(
      with([](D d) { d.bits = 3; }), bad,
      "aura_encode: boundaries: shape [15], expected [7]: 3-bit codes have 7 boundaries, and "
      "15 are of 4 bits");
  expect_error(
      operand([](A a) { a.boundaries.shape[0] = 16; }), bad,
      "aura_encode: boundaries: shape [16], expected [15]: 4-bit codes have 15 boundaries");
  expect_error(operand([](A a) { a.codebook.shape[0] = 15; }), bad,
               "aura_encode: codebook: shape [15], expected [16]: 4-bit codes have 16 levels");
  expect_error(
      operand([](A a) { a.packed.shape[1] = 17; }), bad,
      "aura_encode: packed: shape [2,17], expected [2,16]: 4-bit codes have 16 words a row");
  expect_error(operand([](A a) { a.packed.stride[0] = 15; }), Code::unsupported,
               "aura_encode: packed: stride 15 of axis 0, expected at least 16");
  expect_error(operand([](A a) { a.norms.shape = {2}; }), bad,
               "aura_encode: norms: shape [2], expected [2,1]: the axes are [outer_size,1]");
  expect_error(table(t.book.boundaries, 5, 1.0f), bad,
               "aura_encode: boundaries: [6] is " + text_of(t.book.boundaries[6]) +
                   ", expected no less than the value before it");
  expect_error(table(t.book.boundaries, 14, INFINITY), bad,
               "aura_encode: boundaries: [14] is inf, expected a finite value");
  expect_error(table(t.book.levels, 0, NAN), bad,
               "aura_encode: codebook: [0] is nan, expected a finite value");
  expect_error(table(t.rotation, 127, 2.0f), bad,
               "aura_encode: table: [127] is 2, expected 1 or -1");
  EXPECT_EQ(packed, untouched);
  EXPECT_EQ(norms, std::vector<float>(2, 7));
  expect_ok(run_op<AuraEncode>(good, args));
  EXPECT_NE(packed, untouched);
}

}  // namespace
}  // namespace bittern
