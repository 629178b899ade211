// Instructions that CUDA C++ has no name for. Register layouts are the PTX manual's; each function
// says which element of a tile a lane holds.
#pragma once
#include <cstdint>

namespace bittern::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define BITTERN_WARPGROUP_CODE 1
#else
#define BITTERN_WARPGROUP_CODE 0
#endif

// Makes x count as used here: the load it comes from is not moved behind a later branch. Nothing
// waits for it.
__device__ inline void pin(std::uint32_t& x) { asm volatile("" : "+r"(x)); }

// *p, loaded here: not moved behind a later branch, nor loaded again there. (Where the compiler was
// free to, fake_quantize_per_group_backward had more in registers than there are.)
__device__ inline uint4 load_here(const uint4* p) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// Asks for the line at p to be brought into the L2. Nothing waits for it.
__device__ inline void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 1 / x rounded to nearest, for x far from the ends of the exponent range: what 1.0f / x compiles
// to, less the test for all other x.
__device__ inline float ordinary_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, -fmaf(x, r, -1.0f), r);
}

// ---- asynchronous copies into shared memory (sm_80) ----

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// A table's entry of 4 or 8 bytes, in shared memory that stays as it is. (An address that is
// computed as one number: a pointer takes another addition.)
template <class T>
__device__ inline T load_shared(unsigned address) {
  T x;
  if constexpr (sizeof(T) == 4) {
    asm("ld.shared.u32 %0, [%1];" : "=r"(reinterpret_cast<std::uint32_t&>(x)) : "r"(address));
  } else {
    static_assert(sizeof(T) == 8);
    auto& words = reinterpret_cast<uint2&>(x);
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
  }
  return x;
}

// 16 bytes, of which the first `bytes` are read and the rest set to zero. Both ends 16-aligned.
__device__ inline void copy_async_16(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
// 4 bytes, both ends 4-aligned.
__device__ inline void copy_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- bulk copies (sm_90): a multiple of 16 bytes, both ends 16-aligned ----

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopies = true;
#else
inline constexpr bool kHasBulkCopies = false;
#endif

// Makes this thread's stores to shared memory, and stores of others that it has seen at a barrier,
// visible to bulk copies and to the tensor cores. If other threads start those, a barrier must
// follow. The fence waits for this thread's loads and copies under way, so a thread that copies
// should not execute it.
__device__ inline void fence_shared() {
  if constexpr (kHasBulkCopies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What this thread began to copy out since its last commit is one for bulk_copy_out_wait.
__device__ inline void bulk_copies_commit() {
  if constexpr (kHasBulkCopies) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Starts copying.
__device__ inline void bulk_copy_out(void* global, const void* shared, int bytes) {
  if constexpr (kHasBulkCopies)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
  bulk_copies_commit();
}
// Waits until what this thread began to copy has been read, but for the last kPending copies.
template <int kPending = 0>
__device__ inline void bulk_copy_out_wait() {
  if constexpr (kHasBulkCopies)
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Makes a barrier of 8 bytes in shared memory that copies complete. One thread does so; the others
// must be synchronised with it before they use the barrier.
__device__ inline void arrival_init(std::uint64_t* barrier) {
  if constexpr (kHasBulkCopies) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier))
                 : "memory");
    fence_shared();
  }
}
// By one thread, in every round: so many bytes will come.
__device__ inline void arrival_expect(std::uint64_t* barrier, int bytes) {
  if constexpr (kHasBulkCopies)
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
// Until all of round 0, 1, .. have come. No thread may be a round behind.
__device__ inline void arrival_wait(std::uint64_t* barrier, std::uint32_t round) {
  if constexpr (kHasBulkCopies)
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(round & 1)
        : "memory");
}

// A warp's copies into shared memory. Every round, one lane says how many bytes will come; each
// lane may start some of them; all wait for all of them.
class BulkCopiesIn {
 public:
  // 8 bytes in shared memory. By the whole warp.
  __device__ explicit BulkCopiesIn(std::uint64_t* barrier) : barrier_(barrier) {
    if constexpr (kHasBulkCopies) {
      if (threadIdx.x % 32 == 0) arrival_init(barrier_);
      __syncwarp();
    }
  }
  __device__ void expect(int bytes) const { arrival_expect(barrier_, bytes); }
  __device__ void start(void* shared, const void* global, int bytes) const {
    if constexpr (kHasBulkCopies)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_address(shared)),
          "l"(global), "r"(bytes), "r"(shared_address(barrier_))
          : "memory");
  }
  __device__ void wait() { arrival_wait(barrier_, round_++); }

 private:
  std::uint64_t* barrier_;
  std::uint32_t round_ = 0;
};

// ---- barriers of some of a block's threads: 1..15, for `threads` of them, whole warps ----

// Waits for all.
__device__ inline void barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts as one of all, and goes on.
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- kernels that follow each other (sm_90; Grid::waits) ----

// The next kernel's blocks may take what place there is.
__device__ inline void begin_next_kernel() {
  if constexpr (kHasBulkCopies) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the last kernel has ended and its stores are visible.
__device__ inline void wait_for_last_kernel() {
  if constexpr (kHasBulkCopies) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- approximations ----

// 2^x within 2^-22 of it, 1 for 0 and subnormals; results below 2^-126 are 0.
__device__ inline float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within an ulp, exact for powers of two; for x neither subnormal nor above 2^126.
__device__ inline float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x within 2^-22 of 1 and of itself, -infinity for 0 and subnormals.
__device__ inline float approximate_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- the compiler ----

// The same value, about which the compiler knows nothing: what is computed from it in a loop is not
// moved in front of the loop, where it would take registers.
__device__ inline std::uint32_t opaque(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same of a pointer: addresses a constant away from it are not computed from the start.
template <class T>
__device__ inline T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// x, which is the same in all lanes of a warp. The compiler then knows that it is.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
// True in one lane of a warp, always the same one. All lanes must call it.
__device__ inline bool elected() {
  if constexpr (!kHasBulkCopies) return threadIdx.x % 32 == 0;
  unsigned yes;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(yes));
  return yes != 0;
}

// ---- matrix fragments ----

// Four 8x8 tiles of 16-bit elements: lane l gives the address of row l % 8 of tile l / 8 and gets,
// in to[i], elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of tile i.
__device__ inline void load_tiles(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same, each tile transposed: elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ inline void load_tiles_transposed(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// x + 0 y of two pairs of bf16: from 0, stays 0 as long as y is finite.
__device__ inline std::uint32_t add_zero_times_bf16(std::uint32_t x, std::uint32_t y) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(x) : "r"(y), "r"(0));
  return x;
}
__device__ inline std::uint32_t add_zero_times_f16(std::uint32_t x, std::uint32_t y) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(x) : "r"(y), "r"(0));
  return x;
}

// An 8x8 tile of 16-bit elements, of which lane l has (l / 4, 2 (l % 4)) and the next, transposed:
// it gets (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ inline std::uint32_t transpose_tile(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The reverse of load_tiles_transposed.
__device__ inline void store_tiles_transposed(void* row, const std::uint32_t (&from)[4]) {
#if BITTERN_WARPGROUP_CODE
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
#endif
}
// The reverse of load_tiles.
__device__ inline void store_tiles(void* row, const std::uint32_t (&from)[4]) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
      "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
      : "memory");
#endif
}

// d += a b for a [16, 16], b [16, 8], d [16, 8]. With r = l / 4, c = 2 (l % 4), lane l holds the
// pairs a(r, c..), a(r+8, c..), a(r, c+8..), a(r+8, c+8..);  b(c.., r), b(c+8.., r);  and
// d(r, c), d(r, c+1), d(r+8, c), d(r+8, c+1).
__device__ inline void multiply_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                     const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void multiply_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- products of a warpgroup: four warps, the first one's number a multiple of 4 (sm_90a) ----

// Registers of each thread of a warpgroup, a multiple of 8: more than the kernel started with, when
// others have given theirs back, or fewer. In one branch of an if for each.
template <int kCount>
__device__ inline void take_registers() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void give_registers() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Before the first product that uses registers written since the last one.
__device__ inline void warpgroup_begin() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Waits for all products begun; until then neither their registers nor b may be touched.
__device__ inline void warpgroup_end() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

// What was begun since the last call is a group of its own.
__device__ inline void warpgroup_commit() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most `kPending` groups are under way. Results are then passed to warpgroup_hold.
template <int kPending>
__device__ inline void warpgroup_wait() {
#if BITTERN_WARPGROUP_CODE
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
// Keeps the compiler from using results before the wait that precedes this.
template <int kCount>
__device__ inline void warpgroup_hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A matrix b in shared memory, by columns: column n at 128 n bytes from an address aligned to 1024
// bytes, its 16-byte pieces permuted, piece p in place p ^ (n % 8).
struct WarpgroupMatrix {
  std::uint32_t address;
  // What lies `bytes` on: another matrix, or with 32 s the rows from 16 s on.
  __device__ WarpgroupMatrix at(int bytes) const {
    return {address + (static_cast<std::uint32_t>(bytes) >> 4)};
  }
  __device__ std::uint64_t descriptor() const {
    constexpr std::uint64_t kPermuted128 = std::uint64_t{1} << 62, kEightColumns = 1024 >> 4;
    return kPermuted128 | kEightColumns << 32 | address;
  }
  // For b by rows, in parts of 64 columns that lie `part` bytes apart: row k of a part at 128 k
  // bytes, its pieces permuted in the same way.
  template <int kPart>
  __device__ std::uint64_t rows_descriptor() const {
    return descriptor() | std::uint64_t{kPart >> 4} << 16;
  }
};
__device__ inline WarpgroupMatrix warpgroup_matrix(const void* b) {
  return {(shared_address(b) & 0x3ffff) >> 4};
}

// Sums of a thread as operands of an instruction, and their names there.
#define BITTERN_SUMS_8(d, i)                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define BITTERN_SUMS_32(d, i)                                                \
  BITTERN_SUMS_8(d, i), BITTERN_SUMS_8(d, i + 8), BITTERN_SUMS_8(d, i + 16), \
      BITTERN_SUMS_8(d, i + 24)
#define BITTERN_SUMS_16(d) BITTERN_SUMS_8(d, 0), BITTERN_SUMS_8(d, 8)
#define BITTERN_SUMS_64(d) BITTERN_SUMS_32(d, 0), BITTERN_SUMS_32(d, 32)
#define BITTERN_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BITTERN_NAMES_32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BITTERN_NAMES_64                                                                       \
  BITTERN_NAMES_32                                                                             \
  ", "                                                                                         \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b + (add ? d : 0) for a [64, 16], b [16, n], d [64, n], n = 64, or 128 of f16. Warp w has
// rows 16 w .. 16 w + 15 of a and d, laid out as for multiply_bf16: d[4 i ..] is the tile of
// columns 8 i .. 8 i + 7.
__device__ inline void warpgroup_multiply_bf16(float (&d)[32], const std::uint32_t (&a)[4],
                                               WarpgroupMatrix b, bool add = true) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" BITTERN_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
      : BITTERN_SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_f16(float (&d)[32], const std::uint32_t (&a)[4],
                                              WarpgroupMatrix b, bool add = true) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{" BITTERN_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
      : BITTERN_SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_f16(float (&d)[64], const std::uint32_t (&a)[4],
                                              WarpgroupMatrix b, bool add = true) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %69, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{" BITTERN_NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
      : BITTERN_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}

// d += a b for a [64, 16], b [16, 128], d [64, 128], b by rows (WarpgroupMatrix::rows_descriptor).
template <int kPart>
__device__ inline void warpgroup_multiply_rows_bf16(float (&d)[64], const std::uint32_t (&a)[4],
                                                    WarpgroupMatrix b) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" BITTERN_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : BITTERN_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.rows_descriptor<kPart>())
      : "memory");
#endif
}
template <int kPart>
__device__ inline void warpgroup_multiply_rows_f16(float (&d)[64], const std::uint32_t (&a)[4],
                                                   WarpgroupMatrix b) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{" BITTERN_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : BITTERN_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.rows_descriptor<kPart>())
      : "memory");
#endif
}

// d = a b + (add ? d : 0), b by rows too, for d [64, 64].
__device__ inline void warpgroup_multiply_rows_bf16(float (&d)[32], const std::uint32_t (&a)[4],
                                                    WarpgroupMatrix b, bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" BITTERN_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
      : BITTERN_SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_rows_f16(float (&d)[32], const std::uint32_t (&a)[4],
                                                   WarpgroupMatrix b, bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{" BITTERN_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
      : BITTERN_SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}

// The same with a [64, 16] in shared memory as well, by rows of 16 elements: laid out as b is by
// columns. b by columns for d [64, 32], by rows for d [64, 64].
__device__ inline void warpgroup_multiply_bf16(float (&d)[16], WarpgroupMatrix a, WarpgroupMatrix b,
                                               bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{" BITTERN_NAMES_16 "}, %16, %17, add, 1, 1, 0, 0;}"
      : BITTERN_SUMS_16(d)
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_f16(float (&d)[16], WarpgroupMatrix a, WarpgroupMatrix b,
                                              bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{" BITTERN_NAMES_16 "}, %16, %17, add, 1, 1, 0, 0;}"
      : BITTERN_SUMS_16(d)
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_rows_bf16(float (&d)[32], WarpgroupMatrix a,
                                                    WarpgroupMatrix b, bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" BITTERN_NAMES_32 "}, %32, %33, add, 1, 1, 0, 1;}"
      : BITTERN_SUMS_32(d, 0)
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}
__device__ inline void warpgroup_multiply_rows_f16(float (&d)[32], WarpgroupMatrix a,
                                                   WarpgroupMatrix b, bool add) {
#if BITTERN_WARPGROUP_CODE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{" BITTERN_NAMES_32 "}, %32, %33, add, 1, 1, 0, 1;}"
      : BITTERN_SUMS_32(d, 0)
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(add ? 1 : 0)
      : "memory");
#endif
}

#undef BITTERN_SUMS_8
#undef BITTERN_SUMS_16
#undef BITTERN_SUMS_32
#undef BITTERN_SUMS_64
#undef BITTERN_NAMES_16
#undef BITTERN_NAMES_32
#undef BITTERN_NAMES_64

}  // namespace bittern::cuda
