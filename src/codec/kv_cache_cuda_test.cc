// KvCache on a CUDA device: the bytes and the bits of the same cache on the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "bittern/kv_cache.h"
#include "oracle/oracle_test.h"
#include "oracle/status_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::Rng;

constexpr Device kGpu{Device::Type::cuda, 0};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
const CudaPlugin& plugin() { return **cuda_plugin(0); }
bool is_emulated() {
  CudaDeviceInfo info;
  return plugin().info(0, &info).ok() && info.name == "emulated";
}

// An array on the host and its copy on the device.
class Both {
 public:
  Both(DType dtype, const Shape& shape, Rng* rng = nullptr)
      : dtype_(dtype), shape_(shape), host_(at(shape.numel()) * size_of(dtype)) {
    for (std::int64_t i = 0; rng != nullptr && i < shape.numel(); ++i)
      oracle::put(host(), i, rng->normal());
    expect_ok(plugin().alloc(0, std::max<std::size_t>(host_.size(), 1), &there_));
    expect_ok(plugin().copy(there_, host_.data(), host_.size()));
  }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;
  ~Both() { plugin().release(0, there_); }
  MutView host() { return {host_.data(), dtype_, {}, shape_, shape_.dense_strides()}; }
  MutView gpu() { return {there_, dtype_, kGpu, shape_, shape_.dense_strides()}; }
  const std::vector<std::byte>& bytes() const { return host_; }
  std::vector<std::byte> bytes_of_gpu() const {
    std::vector<std::byte> bytes(host_.size());
    expect_ok(plugin().synchronize(0));
    expect_ok(plugin().copy(bytes.data(), there_, bytes.size()));
    return bytes;
  }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<std::byte> host_;
  void* there_ = nullptr;
};

KvCacheConfig small(std::int64_t first, std::int64_t recent, std::int64_t window) {
  KvCacheConfig c{.kv_heads = 2, .dim = 16, .page_size = 16};
  c.first = first;
  c.recent = recent;
  c.window = window;
  c.slack = window / 8;
  c.f16_scale = recent % 2 == 1;
  c.k.bits = 5;
  c.v.bits = 3;
  c.v.rotation = Rotation::dense;
  c.v.scale_rule = ScaleRule::least_squares;
  Rng rng(99);
  for (KvSide* side : {&c.k, &c.v}) {
    side->mean.resize(at(c.kv_heads * c.dim));
    for (float& x : side->mean) x = static_cast<float>(rng.normal());
  }
  return c;
}

KvCache make(const KvCacheConfig& config, Device device) {
  auto made = KvCache::make(config, device);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(*made);
}

struct Pair {
  KvCache cpu, gpu;

  void append(std::int64_t tokens, DType dtype, Rng& rng) {
    const KvCacheConfig& c = cpu.config();
    Both k(dtype, {tokens, c.kv_heads, c.dim}, &rng), v(dtype, {tokens, c.kv_heads, c.dim}, &rng);
    expect_ok(cpu.append(k.host(), v.host()));
    expect_ok(gpu.append(k.gpu(), v.gpu()));
  }
  void expect_same() const {
    EXPECT_EQ(cpu.size(), gpu.size());
    EXPECT_EQ(cpu.coded(), gpu.coded());
    EXPECT_EQ(cpu.recent(), gpu.recent());
    EXPECT_EQ(cpu.bytes().pages, gpu.bytes().pages);
    EXPECT_EQ(cpu.bytes().shared, gpu.bytes().shared);
    EXPECT_EQ(cpu.bytes().regions, gpu.bytes().regions);
    ASSERT_EQ(*cpu.serialize(), *gpu.serialize());
  }
  void expect_same_attention(DType dtype, Rng& rng) const {
    const KvCacheConfig& c = cpu.config();
    const std::int64_t queries = std::min<std::int64_t>(cpu.size(), 1 + rng.below(2)), heads = 4;
    if (!cpu.check_query(view(static_cast<const float*>(nullptr), {0, heads, c.dim})).ok()) return;
    Both q(dtype, {queries, heads, c.dim}, &rng), out(dtype, {queries, heads, c.dim}),
        sinks(DType::f32, {heads}, &rng);
    const bool sunk = rng.chance(2);
    const Status status =
        cpu.attend(q.host(), out.host(), {.sinks = sunk ? sinks.host() : ConstView{}});
    const Status there =
        gpu.attend(q.gpu(), out.gpu(), {.sinks = sunk ? sinks.gpu() : ConstView{}});
    ASSERT_EQ(status.message(), there.message());
    if (!status.ok()) return;
    ASSERT_EQ(out.bytes(), out.bytes_of_gpu());
  }
};

TEST(KvCache, CudaHasTheBytesAndTheBitsOfTheCpu) {
  BITTERN_NEEDS_CUDA();
  constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  std::uint64_t seed = 1;
  for (const KvCacheConfig& config :
       {small(0, 0, 0), small(3, 5, 0), small(2, 4, 40), small(4, 20, 20)}) {
    Rng rng(seed++);
    std::vector<Pair> pairs;
    pairs.push_back({make(config, {}), make(config, kGpu)});
    EXPECT_EQ(pairs[0].gpu.device(), kGpu);
    for (int step = 0; step < 40; ++step) {
      Pair& pair = pairs[at(rng.below(static_cast<std::int64_t>(pairs.size())))];
      const DType dtype = kElements[rng.below(3)];
      switch (rng.below(7)) {
        case 0:
        case 1:
        case 2: pair.append(rng.chance(3) ? rng.below(40) : 1, dtype, rng); break;
        case 3: {
          const std::int64_t size = std::max<std::int64_t>(pair.cpu.size() - rng.below(6), 0);
          EXPECT_EQ(pair.cpu.truncate(size).message(), pair.gpu.truncate(size).message());
          break;
        }
        case 4: {
          Pair forked{*pair.cpu.fork(), *pair.gpu.fork()};
          if (pairs.size() < 3) {
            pairs.push_back(std::move(forked));
          } else {
            pairs[at(rng.below(3))] = std::move(forked);
          }
          break;
        }
        case 5: {  // each to the other's place, and back
          const auto there = pair.cpu.to(kGpu), here = pair.gpu.to({});
          ASSERT_TRUE(there.ok() && here.ok());
          EXPECT_EQ(there->device(), kGpu);
          EXPECT_EQ(here->device(), Device{});
          EXPECT_EQ(*here->serialize(), *there->serialize());
          pair = {*pair.gpu.to({}), *pair.gpu.to(kGpu)};
          break;
        }
        default: pair.expect_same_attention(dtype, rng);
      }
      if (step % 8 == 7) {
        for (const Pair& each : pairs) {
          each.expect_same();
          each.expect_same_attention(dtype, rng);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// A prompt and then tokens one by one, as they are decoded, on a stream of the caller's.
TEST(KvCache, CudaDecodesOnAStream) {
  BITTERN_NEEDS_CUDA();
  Stream stream;
  expect_ok(plugin().make_stream(0, &stream));
  {
    KvCacheConfig config{.kv_heads = 2, .dim = 128, .page_size = 16, .first = 2, .recent = 8};
    Pair pair{make(config, {}), make(config, kGpu)};
    pair.gpu.set_stream(stream);
    EXPECT_EQ(pair.gpu.fork()->stream().native, stream.native);
    Rng rng(5);
    pair.append(30, DType::bf16, rng);
    for (int i = 0; i < 20; ++i) {
      pair.append(1, DType::bf16, rng);
      pair.expect_same_attention(DType::bf16, rng);
    }
    pair.expect_same();
    std::vector<float> k(256), v(256), k_gpu(256), v_gpu(256);
    for (const std::int64_t token : {0, 20, 49}) {
      expect_ok(pair.cpu.read(token, k, v));
      expect_ok(pair.gpu.read(token, k_gpu, v_gpu));
      EXPECT_EQ(k, k_gpu);
      EXPECT_EQ(v, v_gpu);
    }
  }
  plugin().end_stream(0, stream);
}

TEST(KvCache, CudaWritesTheLayoutOfTheSeedsFamily) {
  BITTERN_NEEDS_CUDA();
  const auto config = aura_config({4, 2}, 2, 64, 3);
  ASSERT_TRUE(config.ok());
  Pair pair{make(*config, {}), make(*config, kGpu)};
  Rng rng(8);
  pair.append(20, DType::f32, rng);
  struct Layout {
    std::vector<std::uint32_t> k = std::vector<std::uint32_t>(2 * 20 * 8),
                               v = std::vector<std::uint32_t>(2 * 20 * 4);
    std::vector<float> k_scales = std::vector<float>(40), v_scales = std::vector<float>(40);
    KvCache::AuraViews views() {
      return {view(k.data(), {2, 20, 8}), view(k_scales.data(), {2, 20}),
              view(v.data(), {2, 20, 4}), view(v_scales.data(), {2, 20})};
    }
    bool operator==(const Layout&) const = default;
  } cpu, gpu;
  expect_ok(pair.cpu.write_aura(cpu.views()));
  expect_ok(pair.gpu.write_aura(gpu.views()));
  EXPECT_EQ(cpu, gpu);
}

TEST(KvCache, CudaErrorsNameWhatIsWrong) {
  BITTERN_NEEDS_CUDA();
  const KvCacheConfig config = small(1, 2, 0);
  Pair pair{make(config, {}), make(config, kGpu)};
  Rng rng(6);
  pair.append(5, DType::f32, rng);
  const auto before = *pair.gpu.serialize();
  Both k(DType::f32, {3, 2, 16}, &rng), v(DType::bf16, {3, 2, 16}, &rng),
      out(DType::f32, {3, 2, 16});
  constexpr Code bad = Code::invalid_argument;
  expect_error(pair.gpu.append(k.host(), k.gpu()), bad, "kv_cache: k: on cpu, expected cuda:0");
  expect_error(pair.gpu.append(k.gpu(), k.host()), bad, "kv_cache: v: on cpu, expected cuda:0");
  expect_error(pair.cpu.append(k.gpu(), k.gpu()), bad, "kv_cache: k: on cuda:0, expected cpu");
  expect_error(pair.gpu.append(k.gpu(), v.gpu()), bad,
               "kv_cache: v: dtype bf16, expected that of k, f32, on cuda:0");
  ConstView backwards = k.gpu();
  backwards.stride[0] = -32;
  expect_error(pair.gpu.append(backwards, k.gpu()), Code::unsupported,
               "kv_cache: k and v: negative strides, expected none on cuda:0");
  ConstView lie = k.host();
  lie.device = kGpu;
  expect_error(pair.gpu.append(lie, k.gpu()), bad,
               "aura_append: k: host memory, expected memory of cuda:0");
  expect_error(pair.gpu.attend(k.host(), out.gpu()), bad, "kv_cache: q: on cpu, expected cuda:0");
  expect_error(pair.gpu.attend(k.gpu(), out.host()), bad, "kv_cache: out: on cpu, expected cuda:0");
  Both sinks(DType::f32, {2}, &rng);
  expect_error(pair.gpu.attend(k.gpu(), out.gpu(), {.sinks = sinks.host()}), bad,
               "aura_attention: sinks: on cpu, expected cuda:0");
  EXPECT_EQ(*pair.gpu.serialize(), before);
  const int devices = is_emulated() ? 1 : 99;
  expect_error(KvCache::make(config, {Device::Type::cuda, devices}).status(), Code::unavailable,
               is_emulated()
                   ? "kv_cache: device: cuda:1: no such device, there are 1"
                   : KvCache::make(config, {Device::Type::cuda, devices}).status().message());
}

TEST(KvCache, CudaWithoutMemoryTheCacheStaysAsItWas) {
  BITTERN_NEEDS_CUDA();
  if (!is_emulated()) GTEST_SKIP() << "a device with more memory than the test asks for";
  // Two pages of 2^33 bytes.
  KvCacheConfig config{.kv_heads = 1 << 16, .dim = 1024, .page_size = 128};
  config.k.bits = config.v.bits = 8;
  config.k.rotation = config.v.rotation = Rotation::identity;
  KvCache cache = make(config, kGpu);
  Rng rng(1);
  Both row(DType::f32, {1, 1, 1024}, &rng);
  ConstView x = row.gpu();
  x.shape = {129, 1 << 16, 1024};
  x.stride = {0, 0, 1};  // every head has the same row
  const Status status = cache.append(x, x);
  EXPECT_EQ(status.code(), Code::out_of_memory);
  EXPECT_TRUE(status.message().starts_with("memory: 17179869184 bytes on cuda:0: "))
      << status.message();
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.bytes().pages, 0u);
}

}  // namespace
}  // namespace bittern
