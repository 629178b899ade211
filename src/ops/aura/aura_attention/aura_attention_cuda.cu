#include "ops/aura/aura_attention/attend_exact.cuh"
#include "ops/aura/aura_attention/decode_tensor.cuh"
#include "ops/aura/aura_attention/prompt_warpgroup.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraAttention;

// ---- the bits of ref ----

std::size_t workspace(const Op::Desc& d, Device device) {
  return attend::partials_bytes(d, device.index);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.out.device.index;
  const attend::Problem p = attend::problem(d, a);
  attend::Cut cut = attend::cut_of(d);
  if (attend::partials_bytes(d, device) != 0) cut.partials = static_cast<float*>(workspace.data);
  switch (attend::rows_at_once(d)) {
    case 1: return attend::run_exact<1>(p, cut, device, stream);
    case 4: return attend::run_exact<4>(p, cut, device, stream);
    case 8: return attend::run_exact<8>(p, cut, device, stream);
    default: return attend::run_exact<16>(p, cut, device, stream);
  }
}

// ---- decoding on tensor cores ----

using attend::refuse;

// The pairs of widths that have a kernel: f(shape) for that of `d`.
template <int kDim, class F>
Status visit_widths(const Op::Desc& d, F&& f) {
  switch (10 * d.k_bits + d.v_bits) {
    case 22: return f(attend::DecodeShape<2, 2, kDim>());
    case 32: return f(attend::DecodeShape<3, 2, kDim>());
    case 33: return f(attend::DecodeShape<3, 3, kDim>());
    case 42: return f(attend::DecodeShape<4, 2, kDim>());
    case 43: return f(attend::DecodeShape<4, 3, kDim>());
    case 44: return f(attend::DecodeShape<4, 4, kDim>());
    case 84: return f(attend::DecodeShape<8, 4, kDim>());
    case 88: return f(attend::DecodeShape<8, 8, kDim>());
    default:
      return unsupported("k_bits, v_bits: " + std::to_string(d.k_bits) + ", " +
                         std::to_string(d.v_bits) +
                         ", expected 2, 2; 3, 2; 3, 3; 4, 2; 4, 3; 4, 4; 8, 4 or 8, 8");
  }
}

template <class F>
Status visit_shape(const Op::Desc& d, F&& f) {
  return attend::visit_dims<64, 80, 96, 128, 192, 256, 512>(
      d, [&]<int kDim>(std::integral_constant<int, kDim>) { return visit_widths<kDim>(d, f); });
}

Status supports_decode(const Op::Desc& d, Device device) {
  if (d.queries != 1) return refuse("queries", d.queries, "1");
  if (d.group() > attend::kHeadsAtOnce)
    return refuse("heads / kv_heads", d.group(), "1.." + std::to_string(attend::kHeadsAtOnce));
  const std::string multiple = "a multiple of " + std::to_string(attend::kTile);
  if (d.capacity == 0 || d.capacity % attend::kTile != 0)
    return refuse("capacity", d.capacity, multiple + " above 0");
  if (d.page_size % attend::kTile != 0) return refuse("page_size", d.page_size, multiple);
  if (d.first + d.recent > attend::kMostExact)
    return refuse("first + recent", d.first + d.recent,
                  "at most " + std::to_string(attend::kMostExact));
  constexpr std::int64_t kMostHeads = 1 << 24;
  if (d.sequences * d.heads > kMostHeads)
    return refuse("sequences * heads", d.sequences * d.heads,
                  "at most " + std::to_string(kMostHeads));
  if (cuda::limits(device.index).capability < 90)
    return unsupported("device: " + std::string(cuda::architecture(device)) +
                       ", expected sm_90 or later");
  return visit_shape(d, [&]<class Shape>(Shape) {
    return cuda::needs_shared(device, attend::kDecodeShared<Shape>);
  });
}

// Codes and scales are read 16 bytes at a time: whole tiles of a page or a KV head.
Status accepts_decode(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t rows = d.page_size == 0 ? d.sequences * d.kv_heads : d.pages;
  for (const auto& [operand, view] : {std::pair{"k_packed", &a.k_packed},
                                      {"v_packed", &a.v_packed},
                                      {"k_scales", &a.k_scales},
                                      {"v_scales", &a.v_scales}}) {
    BITTERN_TRY(cuda::starts_aligned(operand, view->data));
    const auto each = static_cast<std::int64_t>(16 / size_of(view->dtype));
    if (rows > 1 && view->row_stride() % each != 0)
      return unsupported(std::string(operand) + ": stride " + std::to_string(view->row_stride()) +
                         " of axis 0, expected a multiple of " + std::to_string(each));
  }
  return {};
}

std::size_t decode_workspace(const Op::Desc& d, Device device) {
  return attend::decode_bytes(d, attend::decode_cut(d, device.index).splits);
}

Status run_decode(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.out.device.index;
  const attend::Problem p = attend::problem(d, a);
  attend::DecodeCut cut = attend::decode_cut(d, device);
  cut.page_tiles = cuda::Divisor32(std::max<std::int64_t>(d.page_size / attend::kTile, 1));
  if (attend::decode_bytes(d, cut.splits) > 0) cut.partials = static_cast<float*>(workspace.data);
  return visit_shape(
      d, [&]<class Shape>(Shape) { return attend::run_decode<Shape>(p, cut, device, stream); });
}

// The bound is that of cpu_int8 with another e: its X_t and N are for factors that are off by e / 2
// of their largest magnitude, and a level and a query in f16 are each off by 2^-11 of themselves,
// as are a level of V and a weight. That is 2^-10 = e (1 - 0.024). What remains is far less:
// products on tensor cores 2^-17 of a sum of magnitudes, exp2 2^-22, and what f16 loses below
// 2^-14.
PrecisionGuarantee decode_guarantee(const Op::Desc&) {
  return {.math_precision = DType::f16,
          .accumulator = DType::f32,
          .bit_stable_on_same_hardware = true,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = 1.0 / 1000};
}

// ---- prompts on tensor cores ----

Status supports_prompt(const Op::Desc& d, Device device) {
  if (d.queries < 2) return refuse("queries", d.queries, "2 or more");
  BITTERN_TRY(attend::visit_prompt_dim(d, [](auto) { return Status(); }));
  for (const auto& [field, rotation] :
       {std::pair{"k_rotation", d.k_rotation}, {"v_rotation", d.v_rotation}}) {
    if (rotation == Rotation::dense)
      return unsupported(std::string(field) + ": dense, expected hadamard or identity");
  }
  constexpr std::int64_t kMost = 1 << 30;
  const std::int64_t tokens = std::max({d.first, d.capacity, d.recent});
  if (tokens > kMost) return refuse("tokens", tokens, "at most " + std::to_string(kMost));
  const std::int64_t rows = d.sequences * d.queries * d.heads;
  if (rows > kMost)
    return refuse("sequences * queries * heads", rows, "at most " + std::to_string(kMost));
  return cuda::needs_warpgroups(device);
}

Status accepts_prompt(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::rows_aligned("q", a.q));
  BITTERN_TRY(cuda::rows_aligned("out", as_const(a.out)));
  for (const auto& [operand, view] :
       {std::pair{"k_packed", &a.k_packed}, {"v_packed", &a.v_packed}}) {
    const bool pairs = view->shape[view->shape.rank - 1] % 2 == 0;  // of words
    BITTERN_TRY(cuda::rows_aligned(operand, *view, pairs ? 8 : 4));
  }
  BITTERN_TRY(cuda::rows_aligned("k_first", a.k_first));
  BITTERN_TRY(cuda::rows_aligned("v_first", a.v_first));
  BITTERN_TRY(cuda::rows_aligned("k_recent", a.k_recent));
  return cuda::rows_aligned("v_recent", a.v_recent);
}

std::size_t prompt_workspace(const Op::Desc& d, Device device) {
  return attend::prompt_bytes(d, device.index);
}

Status run_prompt(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return attend::run_prompt(d, attend::problem(d, a), a.out.device.index, stream, workspace);
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_tensor",
                                    .backend = "cuda",
                                    .weaker = decode_guarantee,
                                    .supports = supports_decode,
                                    .workspace = decode_workspace,
                                    .accepts = accepts_decode,
                                    .architecture = cuda::architecture,
                                    .run = run_decode},
                                   {.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = decode_guarantee,
                                    .supports = supports_prompt,
                                    .workspace = prompt_workspace,
                                    .accepts = accepts_prompt,
                                    .architecture = cuda::architecture,
                                    .run = run_prompt},
                                   cuda::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<AuraAttention>> aura_attention_cuda() { return kKernels; }

}  // namespace bittern
