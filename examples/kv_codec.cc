// A round trip through the KV codec: two rows of 64 values, 4 bits each, and how far they moved.
#include <bittern/bittern.h>
#include <bittern/codec.h>

#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

int main() {
  using namespace bittern;
  const AuraDesc desc{.rows = 2, .dim = 64, .bits = 4};
  const auto book = sphere_codebook(desc.dim, desc.bits);
  const auto signs = make_rotation(desc.rotation, desc.dim, /*seed=*/42);
  const auto encode = Plan<AuraEncode>::select(desc);
  const auto decode = Plan<AuraDecode>::select(desc);
  if (!book || !signs || !encode || !decode) return std::fprintf(stderr, "no codec\n"), 1;

  std::vector<float> x(128), y(128), scales(2);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i));
  std::vector<std::uint32_t> packed(static_cast<std::size_t>(desc.packed_shape().numel()));
  const ConstView table = view(signs->data(), desc.rotation_shape());
  const ConstView levels = view(book->levels.data(), {desc.levels()});

  Status status = encode->run({.x = view(std::as_const(x).data(), desc.tensor_shape()),
                               .table = table,
                               .boundaries = view(book->boundaries.data(), {desc.levels() - 1}),
                               .codebook = levels,
                               .packed = view(packed.data(), desc.packed_shape()),
                               .scales = view(scales.data(), desc.scale_shape())});
  if (status.ok()) {
    status = decode->run({.packed = view(std::as_const(packed).data(), desc.packed_shape()),
                          .scales = view(std::as_const(scales).data(), desc.scale_shape()),
                          .table = table,
                          .codebook = levels,
                          .y = view(y.data(), desc.tensor_shape())});
  }
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().data()), 1;

  float error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - y[i]) * (x[i] - y[i]);
    size += x[i] * x[i];
  }
  std::printf("%zu bytes became %zu, relative error %.4f (the table promises about %.4f)\n",
              x.size() * sizeof(float), packed.size() * 4 + scales.size() * 4,
              static_cast<double>(error / size), book->distortion);
}
