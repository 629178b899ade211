// quantize_per_group on a GPU beside a device-to-device copy, timed in the same run:
//   cuda_bench [LOG2_ELEMENTS]
// Ratios are of bytes read and written per second, medians over rounds that interleave both.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bittern/bittern.h"
#include "cuda/plugin.h"

namespace bittern {
namespace {

constexpr int kRounds = 15, kLaunches = 20;
constexpr Device kDevice{Device::Type::cuda, 0};

[[noreturn]] void die(const Status& status) {
  std::fprintf(stderr, "cuda_bench: %s\n", std::string(status.message()).c_str());
  std::exit(status.code() == Code::unavailable ? 4 : 1);
}
void need(const Status& status) {
  if (!status.ok()) die(status);
}

struct Gpu {
  const CudaPlugin* plugin;
  std::vector<void*> memory;
  ~Gpu() {
    for (void* p : memory) plugin->release(kDevice.index, p);
  }
  void* alloc(std::size_t bytes) {
    need(plugin->alloc(kDevice.index, bytes, &memory.emplace_back()));
    return memory.back();
  }
};

// Seconds for one launch, of many between two waits for the device.
template <class F>
double seconds(const Gpu& gpu, F&& launch) {
  using Clock = std::chrono::steady_clock;
  need(gpu.plugin->synchronize(kDevice.index));
  const auto start = Clock::now();
  for (int i = 0; i < kLaunches; ++i) need(launch());
  need(gpu.plugin->synchronize(kDevice.index));
  return std::chrono::duration<double>(Clock::now() - start).count() / kLaunches;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void measure(const CudaPlugin* plugin, DType element, std::int64_t elements) {
  constexpr std::int64_t kAxis = 4096, kGroup = 128;
  const QuantizeDesc d{
      .outer_size = elements / kAxis, .axis_size = kAxis, .group_size = kGroup, .element = element};
  const auto plan = Plan<QuantizePerGroup>::select(d, kDevice);
  if (!plan) die(plan.status());

  const auto n = static_cast<std::size_t>(d.outer_size * kAxis), groups = n / kGroup;
  const std::size_t size = size_of(element);
  std::vector<std::byte> x(n * size), scale(groups * size);
  std::uint32_t random = 1;
  const auto fill = [&](std::vector<std::byte>& bytes, std::size_t count, float low, float high) {
    for (std::size_t i = 0; i < count; ++i) {
      random = random * 1664525u + 1013904223u;
      const float value = low + (high - low) * static_cast<float>(random >> 8) * 0x1p-24f;
      if (element == DType::f32) {
        reinterpret_cast<float*>(bytes.data())[i] = value;
      } else {
        reinterpret_cast<bf16*>(bytes.data())[i] = to_bf16(value);
      }
    }
  };
  fill(x, n, -1, 1);
  fill(scale, groups, 0.008f, 0.01f);

  Gpu gpu{plugin, {}};
  void* const x_there = gpu.alloc(x.size());
  void* const scale_there = gpu.alloc(scale.size());
  void* const zero_there = gpu.alloc(groups * 4);
  void* const q_there = gpu.alloc(n);
  need(plugin->copy(x_there, x.data(), x.size()));
  need(plugin->copy(scale_there, scale.data(), scale.size()));
  const std::vector<std::int32_t> zero(groups, 3);
  need(plugin->copy(zero_there, zero.data(), groups * 4));

  const auto at = [&](auto* data, DType dtype, const Shape& shape) {
    using Void = std::remove_pointer_t<decltype(data)>;
    return View<Void>{data, dtype, kDevice, shape, shape.dense_strides()};
  };
  const QuantizePerGroup::Args args{.x = at(x_there, element, d.tensor_shape()),
                                    .scale = at(scale_there, element, d.param_shape()),
                                    .zero_point = at(zero_there, DType::s32, d.param_shape()),
                                    .q = at(q_there, DType::s8, d.tensor_shape())};
  // The copy moves as many bytes as the op: half of them read, half written.
  const double traffic = static_cast<double>(x.size() + scale.size() + groups * 4 + n);
  const std::size_t half = std::min(x.size(), static_cast<std::size_t>(traffic / 2));
  void* const copied = gpu.alloc(half);
  const auto op = [&] { return plan->run(args); };
  const auto copy = [&] { return plugin->copy(copied, x_there, half); };
  (void)seconds(gpu, op), (void)seconds(gpu, copy);
  std::vector<double> op_rate, copy_rate, ratio;
  for (int i = 0; i < kRounds; ++i) {
    copy_rate.push_back(2e-9 * static_cast<double>(half) / seconds(gpu, copy));
    op_rate.push_back(1e-9 * traffic / seconds(gpu, op));
    ratio.push_back(op_rate.back() / copy_rate.back());
  }
  std::printf(
      "quantize_per_group %s->s8 group %lld, %lld elements, %s: %.0f GB/s, copy %.0f GB/s, "
      "ratio %.2f\n",
      name(element), static_cast<long long>(kGroup), static_cast<long long>(n),
      std::string(plan->sku().architecture).c_str(), median(op_rate), median(copy_rate),
      median(ratio));
}

}  // namespace
}  // namespace bittern

int main(int argc, char** argv) {
  using namespace bittern;
  const int log2 = argc > 1 ? std::atoi(argv[1]) : 28;
  if (log2 < 12 || log2 > 34) return std::fprintf(stderr, "usage: cuda_bench [12..34]\n"), 2;
  const auto plugin = cuda_plugin(0);
  if (!plugin) die(plugin.status());
  measure(*plugin, DType::f32, std::int64_t{1} << log2);
  measure(*plugin, DType::bf16, std::int64_t{1} << log2);
}
