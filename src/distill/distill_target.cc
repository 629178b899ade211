#include "distill/distill_target.h"

#include <cstdint>

#include "convert/call.h"
#include "convert/encode.h"
#include "convert/parse_options.h"
#include "formats/grid.h"

namespace bittern {
namespace {

Status in_range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid(std::string("@{") + field + "}: " + std::to_string(value) +
                 ", expected an integer " + std::to_string(least) + ".." + std::to_string(most));
}

}  // namespace

Status check_numbers(const DistillOptions& options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (options.data.empty() && !options.self_text)
    return invalid(
        "@{data}: no text given, expected the path of one to learn from, or @{self_text}");
  if (!options.data.empty() && options.self_text)
    return invalid("@{data} and @{self_text} exclude each other");
  BITTERN_TRY(in_range("context", options.context, 2, std::int64_t{1} << 20));
  if (const int bits = options.embedding_bits.value_or(0);
      bits < 0 || bits == 1 || bits == 7 || bits > 8)
    return invalid("@{embedding_bits}: " + std::to_string(bits) +
                   ", expected 0, 2, 3, 4, 5, 6 or 8");
  BITTERN_TRY(in_range("calibration", options.calibration, 1, kMost));
  BITTERN_TRY(in_range("validation", options.validation, 1, kMost));
  BITTERN_TRY(in_range("steps", options.steps, 0, kMost));
  BITTERN_TRY(in_range("batch", options.batch, 1, kMost));
  if (options.rate && !(*options.rate > 0 && *options.rate <= 1))
    return invalid("@{rate}: " + std::to_string(*options.rate) +
                   ", expected a number above 0 and up to 1");
  BITTERN_TRY(in_range("teacher_top", options.teacher_top, 5, kMost));
  if (!(options.checkpoint_minutes >= 0))
    return invalid("@{checkpoint_minutes}: " + std::to_string(options.checkpoint_minutes) +
                   ", expected a number of 0 or more");
  return check_threads(options.threads);
}

Result<DistillTarget> target_of(const DistillOptions& options, const std::string& out) {
  const auto parsed = parse_options(
      {.format = options.format, .zero_points = options.zero_points, .type = options.type}, out,
      /*coder=*/nullptr);
  if (!parsed) return parsed.status();
  if (parsed->format == ModelFormat::safetensors)
    return invalid(
        "@{format}: safetensors, which has no codes, expected mlx, gguf or compressed-tensors");
  if (parsed->format != ModelFormat::gguf) {
    if (options.type)
      return invalid("@{type} " + *options.type + ": the format is " + name(parsed->format) +
                     ", expected @{format} gguf");
    const bool compressed = parsed->format == ModelFormat::compressed_tensors;
    return DistillTarget{.bits = options.bits.value_or(4),
                         .group = options.group_size.value_or(64),
                         .scale_dtype = options.scale_dtype,
                         .compressed = compressed,
                         .integer_zeros = compressed || parsed->integer_zeros.value_or(false)};
  }
  if (options.zero_points)
    return invalid(
        "@{zero_points}: the format is gguf, expected @{format} mlx or compressed-tensors");
  if (options.type && options.bits) return invalid("@{type} and @{bits} both given, expected one");
  const int bits = options.bits.value_or(4);
  if (bits != 4 && bits != 5)
    return invalid("@{bits}: " + std::to_string(bits) +
                   " in a GGUF file, expected 4 (Q4_1), 5 (Q5_1), a @{type} or @{format} mlx");
  if (options.group_size.value_or(32) != 32)
    return invalid("@{group_size}: " + std::to_string(*options.group_size) +
                   ": groups of GGUF have 32 weights, expected 32");
  if (options.scale_dtype.value_or("f16") != "f16")
    return invalid("@{scale_dtype}: " + *options.scale_dtype +
                   ": scales of GGUF are f16, expected f16");
  const Mix* const mix = options.type ? parsed->mix : find_mix(bits == 4 ? "Q4_1" : "Q5_1");
  const Storage storage = storage_of(mix->type);
  if (!is_fitted(storage))
    return invalid("@{type}: " + std::string(mix->name) +
                   " has no scales and biases that could learn, expected Q4_1, Q5_1, Q4_K_S, "
                   "Q4_K_M, Q5_K_S or Q5_K_M");
  return DistillTarget{
      .mix = mix, .bits = grid_of(storage)->bits, .group = 32, .scale_dtype = "f16"};
}

}  // namespace bittern
