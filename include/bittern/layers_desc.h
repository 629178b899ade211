// The problems of the small layers of a decoder (rms_norm, rope, gated_activation, log_softmax) and
// of learning: their gradients, kl_loss, adam.
#pragma once
#include "bittern/norm_desc.h"
#include "bittern/plan.h"

namespace bittern {

struct RmsNormDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;
  double eps = 1e-6;
  double offset = 0;                           // added to the weight: 1 in Gemma
  DType element = DType::f32;                  // f32 f16 bf16
  NormRounding rounding = NormRounding::once;  // read by the forward
  bool operator==(const RmsNormDesc&) const = default;

  static constexpr std::int64_t kBlock = 64;  // rows that the backward sums one after the other
  std::int64_t blocks() const { return (rows + kBlock - 1) / kBlock; }
  Axes shape() const { return {{"rows", rows}, {"dim", dim}}; }
  Axes weight_shape() const { return {{"dim", dim}}; }
};
Status check_rms_norm_desc(std::string_view op, const RmsNormDesc& d) noexcept;

// Which elements of a head are rotated together.
enum class RopeLayout : std::int32_t {
  half,         // i and i + rotary_dim / 2: GPT-NeoX, Hugging Face
  interleaved,  // 2 i and 2 i + 1: GPT-J, llama in GGUF
};
inline constexpr std::string_view kRopeLayoutNames[] = {"half", "interleaved"};
constexpr auto& enum_names(RopeLayout) { return kRopeLayoutNames; }

struct RopeDesc {
  std::int64_t tokens = 0;
  std::int64_t heads = 1;
  std::int64_t dim = 128;
  std::int64_t rotary_dim = 128;  // the first elements of a head, which are rotated
  double factor = 1;              // of cos and sin
  DType element = DType::f32;     // f32 f16 bf16
  RopeLayout layout = RopeLayout::half;
  bool operator==(const RopeDesc&) const = default;

  Axes shape() const { return {{"tokens", tokens}, {"heads", heads}, {"dim", dim}}; }
  Axes frequency_shape() const { return {{"rotary_dim/2", rotary_dim / 2}}; }
};
Status check_rope_desc(std::string_view op, const RopeDesc& d) noexcept;

enum class GatedKind : std::int32_t {
  swiglu,      // silu
  geglu_tanh,  // gelu by its approximation with tanh: gelu_pytorch_tanh
  geglu_erf,   // gelu itself
};
inline constexpr std::string_view kGatedKindNames[] = {"swiglu", "geglu_tanh", "geglu_erf"};
constexpr auto& enum_names(GatedKind) { return kGatedKindNames; }

struct GatedActivationDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;
  GatedKind kind = GatedKind::swiglu;
  DType element = DType::f32;                  // f32 f16 bf16
  NormRounding rounding = NormRounding::once;  // read by the forward
  bool operator==(const GatedActivationDesc&) const = default;

  Axes shape() const { return {{"rows", rows}, {"dim", dim}}; }
};
Status check_gated_activation_desc(std::string_view op, const GatedActivationDesc& d) noexcept;

struct LogSoftmaxDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;
  double softcap = 0;  // 0: none
  double temperature = 1;
  DType element = DType::f32;  // of x: f32 f16 bf16
  bool operator==(const LogSoftmaxDesc&) const = default;

  Axes shape() const { return {{"rows", rows}, {"dim", dim}}; }
};
Status check_log_softmax_desc(std::string_view op, const LogSoftmaxDesc& d) noexcept;

struct KlLossDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;
  std::int64_t top = 0;  // tokens that the teacher gives; 0: all, as logits
  double softcap = 0;    // of the student's logits; 0: none
  double temperature = 1;
  bool operator==(const KlLossDesc&) const = default;

  Axes shape() const { return {{"rows", rows}, {"dim", dim}}; }
  Axes top_shape() const { return {{"rows", rows}, {"top", top}}; }
  Axes row_shape() const { return {{"rows", rows}}; }
};
Status check_kl_loss_desc(std::string_view op, const KlLossDesc& d) noexcept;

struct AdamDesc {
  std::int64_t count = 0;
  double rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  std::int64_t step = 1;
  bool operator==(const AdamDesc&) const = default;

  Axes shape() const { return {{"count", count}}; }
};
Status check_adam_desc(std::string_view op, const AdamDesc& d) noexcept;

}  // namespace bittern
