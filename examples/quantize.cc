// Quantises two rows of weights to 8-bit codes, one scale per row.
#include <bittern/bittern.h>

#include <cstdio>
#include <vector>

int main() {
  using namespace bittern;
  const std::vector<float> weights = {0.5f, -1.0f, 0.25f, 1.0f, 3.0f, 2.0f, -1.5f, 0.0f};
  const std::vector<float> scale = {0.0078125f, 0.03125f};
  std::vector<std::int8_t> codes(weights.size());

  const QuantizeDesc desc{.outer_size = 2, .axis_size = 4, .granularity = Granularity::token};
  const auto plan = Plan<QuantizePerGroup>::select(desc);
  if (!plan) return std::fprintf(stderr, "%s\n", plan.status().message().data()), 1;

  const Status status = plan->run({.x = view(weights.data(), {2, 4}),
                                   .scale = view(scale.data(), {2}),
                                   .q = view(codes.data(), {2, 4})});
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().data()), 1;

  for (std::size_t i = 0; i < codes.size(); ++i)
    std::printf("%5d%s", codes[i], i % 4 == 3 ? "\n" : "");
}
