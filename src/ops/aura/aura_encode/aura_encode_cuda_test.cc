// aura_encode on a GPU: the kernel for dense rotations on tensor cores, and sides of boundaries.
#include <bit>

#include "ops/aura/aura_encode/aura_encode_test.h"

namespace bittern {
namespace {

using namespace aura_encode_test;

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
    const OnDevice scales(std::vector<float>(static_cast<std::size_t>(d.rows), -7));
    expect_ok(
        plan->run({.x = view(rows.as<const X>(), d.tensor_shape(), kDevice),
                   .table = view(table.as<const float>(), d.rotation_shape(), kDevice),
                   .boundaries = view(boundaries.as<const float>(), {d.levels() - 1}, kDevice),
                   .codebook = view(codebook.as<const float>(), {d.levels()}, kDevice),
                   .packed = view(packed.as<std::uint32_t>(), d.packed_shape(), kDevice),
                   .scales = view(scales.as<float>(), d.scale_shape(), kDevice)}));
    Encoded now{packed.back<std::uint32_t>(), scales.back<float>()};
    if (i == 0) first = now;
    EXPECT_EQ(now.packed, first.packed) << "run " << i;
    for (std::size_t row = 0; row < now.scales.size(); ++row)  // the bits, for NaN
      EXPECT_EQ(std::bit_cast<std::uint32_t>(now.scales[row]),
                std::bit_cast<std::uint32_t>(first.scales[row]));
  }
  return first;
}

// Is the kernel on tensor cores for this device?
bool has_tensor_kernel() {
  const AuraDesc d{.rows = 1, .dim = 64, .rotation = Rotation::dense};
  return Plan<AuraEncode>::select(d, {Device::Type::cuda, 0}, Preference::fastest, "cuda_tensor")
      .ok();
}
#define BITTERN_NEEDS_TENSOR_KERNEL() \
  BITTERN_NEEDS_CUDA();               \
  if (!has_tensor_kernel()) GTEST_SKIP() << "no cuda_tensor on this device"

// A device whose sums are as wrong as the bound allows: figures measured on a GPU are not for it.
bool is_emulated() {
  CudaDeviceInfo info;
  return (*cuda_plugin(0))->info(0, &info).ok() && info.name == "emulated";
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

// Codes against a rotation in f64: 99.99 % agree; s to 1e-6 of that of the codes found.
TEST(AuraEncode, TensorCoresAgreeWithF64) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  Gaussians gaussians(9);
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int32_t bits : {2, 4, 8}) {
      for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
        const AuraDesc d{
            .rows = 203, .dim = dim, .bits = bits, .element = element, .rotation = Rotation::dense};
        const Tables t(d);
        auto x = gaussians.rows(d.rows, dim);
        for (std::size_t i = 0; i < x.size(); ++i)  // rows of any size, with outliers
          x[i] = std::ldexp(x[i], static_cast<int>(i / static_cast<std::size_t>(dim) % 13) - 9);
        for (std::size_t i = 5; i < x.size(); i += 997) x[i] *= 40;
        std::int64_t different = 0;
        expect_ok(visit<float, f16, bf16>(element, [&]<class X>(Type<X>) {
          const std::vector<X> rows = stored<X>(x);
          const Encoded e = encode_fastest(d, rows, t, 1);
          for (std::int64_t row = 0; row < d.rows; ++row) {
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
            EXPECT_NEAR(e.scales[static_cast<std::size_t>(row)] * std::sqrt(recon) / norm, 1, 1e-6);
          }
          return Status();
        }));
        EXPECT_LE(static_cast<double>(different),
                  (is_emulated() ? 4e-3 : 1e-4) * static_cast<double>(d.tensor_shape().numel()))
            << dim << " " << bits << " " << name(element);
      }
    }
  }
}

// Rows out of the ordinary are the exact kernel's, and every run gives the same bits.
TEST(AuraEncode, TensorCoresAreDeterministic) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  AuraDesc d{.rows = 67, .dim = 128, .rotation = Rotation::dense};
  const Tables t(d);
  Gaussians gaussians(10);
  auto x = gaussians.rows(d.rows, 128);
  const float odd[] = {NAN, INFINITY, 3e38f, 1e-20f, 0};
  for (std::size_t row = 0; row < 67; row += 6)
    for (std::size_t j = 0; j < 128; ++j) x[row * 128 + j] = odd[row / 6 % 5];
  const Encoded e = encode_fastest(d, x, t, 100);
  AuraDesc same = d;
  const Encoded want = encode(same, x, t, "ref");
  for (std::size_t row = 0; row < 67; row += 6) {
    for (std::size_t w = row * 16; w < (row + 1) * 16; ++w) EXPECT_EQ(e.packed[w], want.packed[w]);
    if (std::isnan(want.scales[row])) {
      EXPECT_TRUE(std::isnan(e.scales[row]));
    } else {
      EXPECT_NEAR(e.scales[row], want.scales[row], 1e-6 * static_cast<double>(want.scales[row]));
    }
  }
}

// Rows that do not begin where 16 bytes do are refused, by address or by stride.
TEST(AuraEncode, TensorCoresRefuseUnalignedRows) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  constexpr Device kDevice{Device::Type::cuda, 0};
  const AuraDesc d{.rows = 6, .dim = 64, .rotation = Rotation::dense};
  const auto plan = Plan<AuraEncode>::select(d, kDevice, Preference::fastest, "cuda_tensor");
  const auto exact = Plan<AuraEncode>::select(d, kDevice);
  ASSERT_TRUE(plan.ok() && exact.ok());
  const Tables t(d);
  const OnDevice rows(std::vector<float>(1000)), table(t.rotation), boundaries(t.book.boundaries),
      codebook(t.book.levels);
  const OnDevice packed(std::vector<std::uint32_t>(100)), scales(std::vector<float>(6));
  AuraEncode::Args args{.x = view(rows.as<const float>(), d.tensor_shape(), kDevice),
                        .table = view(table.as<const float>(), d.rotation_shape(), kDevice),
                        .boundaries = view(boundaries.as<const float>(), {d.levels() - 1}, kDevice),
                        .codebook = view(codebook.as<const float>(), {d.levels()}, kDevice),
                        .packed = view(packed.as<std::uint32_t>(), d.packed_shape(), kDevice),
                        .scales = view(scales.as<float>(), d.scale_shape(), kDevice)};
  const auto refused = [&](std::string_view what) {
    expect_ok(exact->can_implement(args));
    oracle::expect_error(plan->can_implement(args), Code::unsupported,
                         "aura_encode: x: " + std::string(what) + " for kernel cuda_tensor");
  };
  expect_ok(plan->can_implement(args));
  args.x.data = rows.as<const float>() + 1;
  refused("address is 4 bytes past a multiple of 16, expected a multiple of 16");
  args.x.data = rows.as<const float>();
  args.x.stride[0] = 65;
  refused("stride 65 of axis 0, expected a multiple of 4");
  // Rows as axes: each piece begins somewhere else.
  args.x.shape = {2, 3, 64};
  args.x.stride = {3 * 64 + 2, 64, 1};
  refused("address is 8 bytes past a multiple of 16, expected a multiple of 16");
  args.x.stride = {3 * 64 + 8, 64, 1};
  expect_ok(plan->can_implement(args));
}

// Matrices that are not orthogonal, whose r may lie anywhere, or that f16 cannot hold; all rules,
// and codes that fill no byte.
TEST(AuraEncode, TensorCoresTakeAnyMatrix) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  Gaussians gaussians(11);
  for (const float factor : {0.25f, 5.0f, 1e4f}) {
    for (const std::int32_t bits : {3, 4, 5}) {
      AuraDesc d{.rows = 150, .dim = 64, .bits = bits, .rotation = Rotation::dense};
      Tables t(d);
      for (float& v : t.rotation) v *= factor;
      const auto x = gaussians.rows(d.rows, d.dim);
      for (const ScaleRule rule :
           {ScaleRule::matched, ScaleRule::none, ScaleRule::least_squares, ScaleRule::unbiased}) {
        d.scale_rule = rule;
        const Encoded e = encode_fastest(d, x, t, 1), want = encode(d, x, t, "ref");
        std::int64_t different = 0;
        for (std::int64_t row = 0; row < d.rows; ++row) {
          std::int64_t of_row = 0;
          for (std::int64_t j = 0; j < d.dim; ++j)
            of_row += e.code(d, row, j) != want.code(d, row, j) ? 1 : 0;
          different += of_row;
          const float norm = want.scales[static_cast<std::size_t>(row)];
          if (of_row == 0) {
            EXPECT_NEAR(e.scales[static_cast<std::size_t>(row)] / norm, 1,
                        is_emulated() ? 1e-4 : 1e-5);
          }
        }
        EXPECT_LE(different, is_emulated() ? 20 : 1) << factor << " " << bits;
      }
    }
  }
}

// r of a row by the definition: steps 1 and 2.
std::vector<float> rotated(const AuraDesc& d, const std::vector<float>& x, const Tables& t) {
  AuraDesc plain = d;
  plain.element = DType::f32;
  plain.scale_rule = ScaleRule::none;
  const float inv = 1 / encode(plain, x, t, "ref").scales[0];
  std::vector<float> r = x;
  rotate_row(d.rotation, d.dim, t.rotation.data(), false, r.data(), inv);
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
        const AuraDesc d{.rows = 700, .dim = 128, .bits = bits, .element = element};
        Tables t(d);
        expect_ok(visit<f16, bf16>(element, [&]<class X>(Type<X>) {
          const std::vector<X> one = stored<X>(gaussians.rows(1, d.dim));
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
          for (std::int64_t row = 0; row < d.rows; ++row) {
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
          EXPECT_EQ(e.scales, want.scales) << bits << " bits, " << name(element) << " " << trial;
          return Status();
        }));
      }
    }
  }
}

// Every CUDA kernel: few rows and many, of tuned lengths and others, by lanes, warps and blocks.
TEST(AuraEncode, CudaTakesRowsOfAnySize) {
  BITTERN_NEEDS_CUDA();
  for (const Rotation rotation : {Rotation::hadamard, Rotation::dense}) {
    for (const std::int64_t dim : {64, 80, 128}) {
      for (const DType element : {DType::f32, DType::bf16}) {
        for (const std::int64_t copies : {1, 4}) {
          AuraDesc d{.dim = dim, .element = element, .rotation = rotation};
          const Tables t(d);
          auto x = rows_of_all_sizes(dim, kLeastPower, kMostPower);
          for (std::int64_t i = 0; i < dim; ++i) x.push_back(i % 2 == 0 ? 0.0f : -0.0f);
          const auto once = x;
          for (std::int64_t i = 1; i < copies; ++i) x.insert(x.end(), once.begin(), once.end());
          expect_ok(visit<float, bf16>(element, [&]<class X>(Type<X>) {
            const Encoded want = encode(d, stored<X>(x), t, "ref");
            const Encoded e = encode_on_gpu(d, stored<X>(x), t, 1, "cuda");
            EXPECT_EQ(e.packed, want.packed) << dim << " " << copies << " " << name(element);
            EXPECT_EQ(e.scales, want.scales) << dim << " " << copies << " " << name(element);
            if (rotation == Rotation::dense && dim != 80 && has_tensor_kernel()) {
              const Encoded fast = encode_on_gpu(d, stored<X>(x), t, 1, "cuda_tensor");
              std::int64_t different = 0;
              for (std::int64_t i = 0; i < d.tensor_shape().numel(); ++i)
                different += fast.code(d, i / dim, i % dim) != want.code(d, i / dim, i % dim);
              EXPECT_LE(different, d.rows / 100) << dim << " " << name(element);
              for (std::size_t i = 0; i < want.scales.size(); ++i)
                EXPECT_NEAR(fast.scales[i], want.scales[i],
                            1e-3 * static_cast<double>(want.scales[i]) + 0x1p-148);
            }
            return Status();
          }));
        }
      }
    }
  }
}

}  // namespace
}  // namespace bittern
