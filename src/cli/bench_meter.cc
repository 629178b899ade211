#include "cli/bench_meter.h"

#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "cli/bench_random.h"
#include "cli/gemm.h"
#include "cpu/bf16.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/plugin.h"

namespace bittern::cli {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Zero pages, 2 MiB each where the system allows, not touched yet.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : size_((bytes / kHugePage + 2) * kHugePage) {
    void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
    base_ = p;
    (void)madvise(p, size_, MADV_HUGEPAGE);
  }
  ~Pages() {
    if (base_ != nullptr) munmap(base_, size_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const {
    if (base_ == nullptr) return nullptr;
    const auto at = reinterpret_cast<std::uintptr_t>(base_);
    return static_cast<std::byte*>(base_) + (kHugePage - at % kHugePage) % kHugePage;
  }

 private:
  std::size_t size_;
  void* base_ = nullptr;
};

// Each thread's share, a multiple of 4 KiB, the same for every pass over the same bytes.
template <class F>
void over_threads(std::size_t bytes, F&& f) {
  cpu::parallel(
      static_cast<std::int64_t>(bytes), 1 << 16,
      [&](std::int64_t begin, std::int64_t end) {
        f(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
      },
      4096);
}

// `bytes` is a multiple of 256 and both ends are aligned to lines.
constexpr std::size_t kAhead = 1024;  // of prefetches, which may run past the end
using CopyLoop = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from,
                                                      std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 256) {
    for (std::size_t line = 0; line < 256; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + i + line + kAhead), _MM_HINT_T0);
    const __m512i a = _mm512_load_si512(from + i), b = _mm512_load_si512(from + i + 64);
    const __m512i c = _mm512_load_si512(from + i + 128), d = _mm512_load_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
  _mm_sfence();
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from,
                                                 std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 128) {
    for (std::size_t line = 0; line < 128; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + i + line + kAhead), _MM_HINT_T0);
    const auto* source = reinterpret_cast<const __m256i*>(from + i);
    auto* target = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_load_si256(source), b = _mm256_load_si256(source + 1);
    const __m256i c = _mm256_load_si256(source + 2), d = _mm256_load_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  _mm_sfence();
}

void library_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

// Reads [from, from + bytes) in whole lines; what it returns keeps the loads.
std::uint64_t read_lines(const std::byte* from, std::size_t bytes) {
  __m128i sum[4] = {};
  for (std::size_t i = 0; i < bytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 4 * kAhead), _MM_HINT_T0);
    const auto* line = reinterpret_cast<const __m128i*>(from + i);
    for (int k = 0; k < 4; ++k) sum[k] = _mm_xor_si128(sum[k], _mm_load_si128(line + k));
  }
  const __m128i all = _mm_xor_si128(_mm_xor_si128(sum[0], sum[1]), _mm_xor_si128(sum[2], sum[3]));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(all));
}

// kPeakRounds times kPeakSums multiply-adds that do not wait for each other, on registers alone.
constexpr std::int64_t kPeakRounds = 100000;
constexpr int kPeakSums = 12;

#define BITTERN_TWELVE(LINE) \
  LINE("0")                  \
  LINE("1")                  \
  LINE("2")                  \
  LINE("3") LINE("4") LINE("5") LINE("6") LINE("7") LINE("8") LINE("9") LINE("10") LINE("11")
#define BITTERN_PEAK(NAME, TARGET, LINE)                                                         \
  __attribute__((target(TARGET))) void NAME() {                                                  \
    for (std::int64_t i = 0; i < kPeakRounds; ++i)                                               \
      asm volatile(BITTERN_TWELVE(LINE)::                                                        \
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                         "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");          \
  }
#define BITTERN_F32_512(N) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" N "\n\t"
#define BITTERN_BF16_512(N) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" N "\n\t"
#define BITTERN_INT8_512(N) "vpdpbusd %%zmm12, %%zmm13, %%zmm" N "\n\t"
#define BITTERN_F32_256(N) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" N "\n\t"
// Without vpdpbusd: products of pairs, their sums in pairs, an addition.
#define BITTERN_INT8_256(N)                  \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n\t" \
  "vpmaddwd %%ymm14, %%ymm15, %%ymm14\n\t"   \
  "vpaddd %%ymm14, %%ymm" N ", %%ymm" N "\n\t"
BITTERN_PEAK(f32_peak_avx512, "avx512f", BITTERN_F32_512)
BITTERN_PEAK(bf16_peak_avx512, "avx512f", BITTERN_BF16_512)
BITTERN_PEAK(int8_peak_avx512, "avx512f", BITTERN_INT8_512)
BITTERN_PEAK(f32_peak_avx2, "avx2,fma", BITTERN_F32_256)
BITTERN_PEAK(int8_peak_avx2, "avx2", BITTERN_INT8_256)

struct Peak {
  void (*loop)();
  int products;  // of an instruction
};
Peak f32_peak() {
  if (cpu::isa() == cpu::Isa::avx2) return {f32_peak_avx2, 8};
  return {f32_peak_avx512, 16};
}
Peak bf16_peak() {
  if (!cpu::has_bf16()) return f32_peak();
  return {bf16_peak_avx512, 32};
}
Peak int8_peak() {
  if (cpu::isa() == cpu::Isa::avx3_dl) return {int8_peak_avx512, 64};
  return {int8_peak_avx2, 32};
}

// Bytes of the largest cache.
std::size_t cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0)
    return static_cast<std::size_t>(bytes);
#endif
  return std::size_t{32} << 20;
}

CopyLoop streaming_loop() {
  switch (cpu::isa()) {
    case cpu::Isa::avx3_dl:
    case cpu::Isa::avx3: return stream_avx512;
    case cpu::Isa::avx2: return stream_avx2;
    case cpu::Isa::none: break;
  }
  return library_copy;
}

class CpuMeter final : public Meter {
 public:
  explicit CpuMeter(std::size_t copy_bytes)
      : Meter({}, copy_bytes), from_(copy_bytes), to_(copy_bytes) {}

  Status prepare(int gemm_size, int repeat, CpuLimits& limits) {
    if (from_.data() == nullptr || to_.data() == nullptr) {
      return Status(Code::out_of_memory, "bench: no memory for the copy");
    }
    over_threads(copy_bytes_, [&](std::size_t begin, std::size_t end) {
      std::memset(from_.data() + begin, 1, end - begin);
      std::memset(to_.data() + begin, 2, end - begin);
    });
    std::vector<double> streaming, library, reading;
    for (int i = -1; i < repeat; ++i) {
      const double s = timed_copy(streaming_loop()), m = timed_copy(library_copy), r = timed_read();
      if (i < 0) continue;
      reading.push_back(r);
      streaming.push_back(s);
      library.push_back(m);
    }
    const double gigabytes = 2e-9 * static_cast<double>(copy_bytes_);
    limits.streaming_gb_s = gigabytes / median(streaming);
    limits.memcpy_gb_s = gigabytes / median(library);
    limits.read_gb_s = 1e-9 * static_cast<double>(copy_bytes_) / median(reading);
    best_ = limits.streaming_gb_s >= limits.memcpy_gb_s ? streaming_loop() : library_copy;
    if (cpu::isa() != cpu::Isa::none) {
      limits.f32_gflop_s = timed_peak(f32_peak());
      limits.int8_gflop_s = timed_peak(int8_peak());
      if (cpu::has_bf16()) limits.bf16_gflop_s = timed_peak(bf16_peak());
    }
    return measure_gemm(gemm_size, repeat, limits);
  }

  Result<void*> allocate(std::size_t bytes) override {
    auto pages = std::make_unique<Pages>(bytes);
    if (pages->data() == nullptr) {
      return Status(Code::out_of_memory,
                    "bench: no memory for an operand of " + std::to_string(bytes >> 20) + " MiB");
    }
    operands_.push_back(std::move(pages));
    std::byte* data = operands_.back()->data();
    // First touched by the threads that will use it.
    over_threads(bytes, [&](std::size_t begin, std::size_t end) {
      std::memset(data + begin, 0, end - begin);
    });
    return static_cast<void*>(data);
  }
  void release_all() override { operands_.clear(); }
  Status upload(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  bool host() const override { return true; }
  // A CPU's operands are larger than its caches, unless it shall be seen how fast they are read.
  int sets(std::size_t bytes, Limit limit) const override {
    if (limit != Limit::read) return 1;
    const std::size_t enough = 4 * cache_bytes() / std::max<std::size_t>(bytes, 1) + 1;
    return static_cast<int>(std::min<std::size_t>(enough, 512));
  }
  // Its calls are longer than a clock's tick.
  int calls(double) const override { return 1; }

  Result<double> time(const Work& work, int calls) override {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i)
      if (Status status = work(i); !status.ok()) return status;
    return seconds_since(start) / calls;
  }
  Result<double> rate(Limit limit) override {
    const double gigabytes = 1e-9 * static_cast<double>(copy_bytes_);
    switch (limit) {
      case Limit::copy:
        // An op may leave dirty lines that the next copy would write back: an untimed copy goes
        // first.
        (void)timed_copy(best_);
        return 2 * gigabytes / timed_copy(best_);
      case Limit::read: return gigabytes / timed_read();
      case Limit::f32_peak:
      case Limit::bf16_peak:
      case Limit::int8_peak: break;
    }
    if (cpu::isa() == cpu::Isa::none)
      return unsupported("bench: the peak of multiply-adds needs a CPU with AVX2");
    return timed_peak(limit == Limit::f32_peak    ? f32_peak()
                      : limit == Limit::bf16_peak ? bf16_peak()
                                                  : int8_peak());
  }
  double seconds(Limit limit) const override {
    return limit == Limit::copy ? 2e-2 : limit == Limit::read ? 4e-3 : 1e-3;
  }

 private:
  double timed_copy(CopyLoop loop) {
    const auto start = std::chrono::steady_clock::now();
    over_threads(copy_bytes_, [&](std::size_t begin, std::size_t end) {
      loop(to_.data() + begin, from_.data() + begin, end - begin);
    });
    return seconds_since(start);
  }

  double timed_read() {
    std::atomic<std::uint64_t> seen{0};
    const auto start = std::chrono::steady_clock::now();
    over_threads(copy_bytes_, [&](std::size_t begin, std::size_t end) {
      seen += read_lines(from_.data() + begin, end - begin);
    });
    const double seconds = seconds_since(start);
    // The sum is used, so the reads are made.
    return seen == 0x5eed ? seconds * (1 + 1e-15) : seconds;
  }

  // GFLOP/s of all threads.
  static double timed_peak(const Peak& peak) {
    const int threads = std::max(num_threads(), 1);
    const auto start = std::chrono::steady_clock::now();
    cpu::parallel(threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) peak.loop();
    });
    const double seconds = seconds_since(start);
    return 2e-9 * static_cast<double>(kPeakRounds) * kPeakSums * peak.products * threads / seconds;
  }

  static Status measure_gemm(int size, int repeat, CpuLimits& limits) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<float> a(n * n), b(n * n), c(n * n);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<float>(i % 7) - 3.0f;
      b[i] = static_cast<float>(i % 5) - 2.0f;
    }
    const auto rate = [&](auto&& gemm) -> Result<double> {
      std::vector<double> seconds;
      for (int i = -1; i < std::min(repeat, 5); ++i) {
        const auto start = std::chrono::steady_clock::now();
        if (Status s = gemm(); !s.ok()) return s;
        if (i >= 0) seconds.push_back(seconds_since(start));
      }
      return 2e-9 * static_cast<double>(size) * size * size / median(seconds);
    };
    const auto f32 =
        rate([&] { return cpu::gemm_f32(size, size, size, a.data(), b.data(), c.data()); });
    if (!f32) return f32.status().code() == Code::unsupported ? Status() : f32.status();
    limits.gemm_gflop_s = *f32;
    std::vector<bf16> half_a, half_b, half_c(n * n);
    for (const float x : a) half_a.push_back(to_bf16(x));
    for (const float x : b) half_b.push_back(to_bf16(x));
    const auto half = rate([&] {
      return cpu::gemm_bf16(size, size, size, half_a.data(), half_b.data(), half_c.data());
    });
    if (!half && half.status().code() != Code::unsupported) return half.status();
    limits.gemm_bf16_gflop_s = half ? *half : 0;
    return {};
  }

  Pages from_, to_;
  CopyLoop best_ = library_copy;
  std::vector<std::unique_ptr<Pages>> operands_;
};

// A call takes microseconds, so a sample is many calls, captured once as a graph. This times the
// device, not the launches of the host. Copies take long enough to be launched one by one.
class CudaMeter final : public Meter {
 public:
  CudaMeter(int index, const CudaPlugin* plugin)
      : Meter({Device::Type::cuda, index}, 0), plugin_(plugin) {}
  ~CudaMeter() override {
    release_all();
    for (void* p : {from_, to_})
      if (p != nullptr) plugin_->release(device_.index, p);
    if (stream_.native != nullptr) plugin_->end_stream(device_.index, stream_);
  }

  Status prepare(int caches, int gemm_size, int repeat, CudaLimits& limits) {
    CudaDeviceInfo info;
    BITTERN_TRY(plugin_->info(device_.index, &info));
    l2_bytes_ = std::max<std::size_t>(info.l2_bytes, std::size_t{1} << 20);
    copy_bytes_ = static_cast<std::size_t>(caches) * l2_bytes_ / kHugePage * kHugePage;
    limits.name = info.name;
    limits.multiprocessors = info.multiprocessors;
    limits.l2_bytes = info.l2_bytes;
    BITTERN_TRY(plugin_->make_stream(device_.index, &stream_));
    BITTERN_TRY(plugin_->alloc(device_.index, copy_bytes_, &from_));
    BITTERN_TRY(plugin_->alloc(device_.index, copy_bytes_, &to_));
    // Not zeros, which memory may move faster.
    std::vector<std::uint64_t> noise(copy_bytes_ / sizeof(std::uint64_t));
    generate<std::uint64_t>(noise.data(), static_cast<std::int64_t>(noise.size()), 0,
                            [](std::uint64_t bits) { return bits; });
    BITTERN_TRY(upload(from_, noise.data(), copy_bytes_));
    std::vector<double> library, kernel;
    for (int i = -1; i < repeat; ++i) {
      const auto l = timed_copy(plugin_->stream_copy), k = timed_copy(plugin_->kernel_copy);
      if (!l) return l.status();
      if (!k) return k.status();
      if (i < 0) continue;
      library.push_back(*l);
      kernel.push_back(*k);
    }
    const double gigabytes = 2e-9 * static_cast<double>(copy_bytes_);
    limits.memcpy_gb_s = gigabytes / median(library);
    limits.kernel_gb_s = gigabytes / median(kernel);
    best_ = limits.kernel_gb_s > limits.memcpy_gb_s ? plugin_->kernel_copy : plugin_->stream_copy;
    const Status measured = measure_gemm(gemm_size, repeat, limits.gemm_bf16_gflop_s);
    release_all();
    if (measured.code() != Code::unavailable) return measured;
    limits.no_gemm = measured.message();
    return {};
  }

  Stream stream() const override { return stream_; }
  Result<void*> allocate(std::size_t bytes) override {
    void* p = nullptr;
    if (Status s = plugin_->alloc(device_.index, std::max<std::size_t>(bytes, 1), &p); !s.ok())
      return s;
    operands_.push_back(p);
    return p;
  }
  void release_all() override {
    for (void* p : operands_) plugin_->release(device_.index, p);
    operands_.clear();
  }
  Status upload(void* to, const void* from, std::size_t bytes) override {
    return plugin_->copy(to, from, bytes);
  }
  bool host() const override { return false; }

  int sets(std::size_t bytes, Limit) const override {
    const std::size_t enough = (4 * l2_bytes_ + bytes) / std::max<std::size_t>(bytes, 1);
    return static_cast<int>(std::min<std::size_t>(enough, kMostCalls));
  }
  int calls(double seconds) const override {
    return static_cast<int>(std::clamp<double>(kSampleSeconds / seconds, 1, kMostCalls));
  }
  Result<double> time(const Work& work, int calls) override {
    // Outside a graph first: loading a kernel cannot be captured.
    double seconds = 0;
    if (Status s = plugin_->time(
            device_.index, stream_, [&] { return work(0); }, &seconds);
        !s.ok())
      return s;
    const auto all = [&] {
      for (int i = 0; i < calls; ++i) BITTERN_TRY(work(i));
      return Status();
    };
    if (Status s = plugin_->replay(device_.index, stream_, all, 1, &seconds); !s.ok()) return s;
    return seconds / calls;
  }
  Result<double> rate(Limit limit) override {
    if (limit != Limit::copy) return unsupported("bench: a GPU is compared with its copy alone");
    const auto seconds = timed_copy(best_);
    if (!seconds) return seconds.status();
    return 2e-9 * static_cast<double>(copy_bytes_) / *seconds;
  }
  double seconds(Limit) const override { return 2e-3; }

 private:
  static constexpr double kSampleSeconds = 2e-3;
  static constexpr int kMostCalls = 256;
  using Copy = decltype(CudaPlugin::stream_copy);

  Result<double> timed_copy(Copy copy) {
    constexpr int kCopies = 4;
    const auto work = [&] {
      for (int i = 0; i < kCopies; ++i)
        BITTERN_TRY(copy(device_.index, stream_, to_, from_, copy_bytes_));
      return Status();
    };
    double seconds = 0;
    if (Status s = plugin_->time(device_.index, stream_, work, &seconds); !s.ok()) return s;
    return seconds / kCopies;
  }

  Status measure_gemm(int size, int repeat, double& gflop_s) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<bf16> values(n * n);
    void* matrices[3];
    for (std::uint64_t i = 0; i < 3; ++i) {
      const auto memory = allocate(n * n * sizeof(bf16));
      if (!memory) return memory.status();
      matrices[i] = *memory;
      if (i == 2) break;
      generate<bf16>(values.data(), static_cast<std::int64_t>(values.size()), i << 40,
                     [](std::uint64_t bits) { return to_bf16(gaussians()[bits & 0xffff]); });
      BITTERN_TRY(upload(matrices[i], values.data(), n * n * sizeof(bf16)));
    }
    std::vector<double> times;
    for (int i = -1; i < repeat; ++i) {
      double seconds = 0;
      BITTERN_TRY(
          plugin_->gemm_bf16(device_.index, size, matrices[0], matrices[1], matrices[2], &seconds));
      if (i >= 0) times.push_back(seconds);
    }
    gflop_s = 2e-9 * static_cast<double>(size) * size * size / median(times);
    return {};
  }

  const CudaPlugin* plugin_;
  std::size_t l2_bytes_ = 0;
  Stream stream_;
  void* from_ = nullptr;
  void* to_ = nullptr;
  Copy best_ = nullptr;
  std::vector<void*> operands_;
};

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

Result<std::unique_ptr<Meter>> cpu_meter(std::size_t copy_bytes, int gemm_size, int repeat,
                                         CpuLimits& limits) {
  auto meter = std::make_unique<CpuMeter>(copy_bytes);
  if (Status s = meter->prepare(gemm_size, repeat, limits); !s.ok()) return s;
  return std::unique_ptr<Meter>(std::move(meter));
}

Result<std::unique_ptr<Meter>> cuda_meter(int index, int caches, int gemm_size, int repeat,
                                          CudaLimits& limits) {
  const auto plugin = cuda_plugin(index);
  if (!plugin) return plugin.status();
  auto meter = std::make_unique<CudaMeter>(index, *plugin);
  if (Status s = meter->prepare(caches, gemm_size, repeat, limits); !s.ok()) return s;
  return std::unique_ptr<Meter>(std::move(meter));
}

}  // namespace bittern::cli
