#include "convert/parse_options.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <tuple>
#include <utility>

#include "bittern/environment.h"
#include "convert/mix.h"
#include "convert/planner.h"

namespace bittern {
namespace {

using Text = std::optional<std::string>;

constexpr std::uint64_t kMostTensors = std::uint64_t{1} << 20;

std::string or_empty(const std::string& text) { return text.empty() ? "empty" : text; }

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

Result<GgmlType> parse_type(const std::string& where, const std::string& text) {
  if (const GgmlTypeInfo* type = ggml_type(std::string_view(text))) return type->type;
  return invalid(where + ": " + or_empty(text) +
                 ": no type of GGUF, expected one like Q4_K or Q8_0");
}

Result<const Mix*> parse_mix(const std::string& text) {
  if (const Mix* mix = find_mix(text)) return mix;
  std::string names;
  for (const Mix& mix : mixes()) names += std::string(" ") + mix.name;
  if (ggml_type(std::string_view(text)) != nullptr)
    return unsupported("@{type} " + text + ": not written, expected one of" + names);
  return invalid("@{type}: " + or_empty(text) +
                 ": no type of GGUF, expected one of Q4_K Q5_K Q3_K" + names);
}

// As llama-gguf-split reads it: 500M is 500 * 10^6 bytes, 2G is 2 * 10^9.
Result<std::uint64_t> parse_size(const std::string& where, const std::string& text) {
  std::uint64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  const std::string unit = upper(std::string(end, text.data() + text.size()));
  const std::uint64_t scale = unit == "M" ? 1000'000 : unit == "G" ? 1000'000'000 : 0;
  if (error == std::errc() && scale > 0 && n > 0 && n <= 1'000'000) return n * scale;
  return invalid(where + ": " + or_empty(text) +
                 ", expected 1 to 1000000 with M or G, such as 500M or 2G");
}

Result<SafeDType> parse_float(const std::string& where, const std::string& text) {
  std::string name = upper(text);
  if (const std::size_t word = name.find("FLOAT"); word != std::string::npos)
    name.replace(word, 5, "F");  // float16, as mlx_lm.convert spells it
  const auto dtype = find_safe_dtype(name);
  if (dtype && (*dtype == SafeDType::f32 || *dtype == SafeDType::f16 || *dtype == SafeDType::bf16))
    return *dtype;
  return invalid(where + ": " + or_empty(text) + ", expected f32, f16 or bf16");
}

Result<ModelFormat> parse_format(const QuantizeOptions& asked, const std::string& out) {
  if (!asked.format) {
    const bool gguf_name = out.substr(0, out.find_last_not_of('/') + 1).ends_with(".gguf");
    const bool for_gguf = asked.type || asked.output_tensor_type || asked.token_embedding_type ||
                          asked.split_max_size || asked.split_max_tensors;
    if (gguf_name || for_gguf) return ModelFormat::gguf;
    return asked.dequantize ? ModelFormat::safetensors : ModelFormat::mlx;
  }
  for (const ModelFormat format : {ModelFormat::mlx, ModelFormat::gguf, ModelFormat::safetensors,
                                   ModelFormat::compressed_tensors})
    if (*asked.format == name(format)) return format;
  return invalid("@{format}: " + or_empty(*asked.format) +
                 ", expected mlx, gguf, safetensors or compressed-tensors");
}

Result<TensorRule> parse_rule(const QuantizeRule& asked) {
  TensorRule rule{.pattern = asked.match, .keep = asked.keep};
  if (asked.match.empty()) return invalid("@{rule}: an empty match, expected a regular expression");
  const std::string where = "@{rule}: " + pattern_text(rule);
  if (!asked.keep && !asked.bits && !asked.group_size && !asked.type)
    return invalid(where + ": nothing asked for, expected keep, bits, group_size or type");
  if (asked.bits) BITTERN_TRY(check_bits(*asked.bits, where + ": bits"));
  if (asked.group_size && *asked.group_size < 1)
    return invalid(where + ": group_size: " + std::to_string(*asked.group_size) +
                   ", expected 32, 64 or 128");
  rule.bits = asked.bits.value_or(0);
  rule.group = asked.group_size.value_or(0);
  if (asked.type) {
    const auto type = parse_type(where + ": type", *asked.type);
    if (!type) return type.status();
    rule.type = *type;
  }
  return rule;
}

template <class T, class Parse>
Status parse_into(const char* field, const Text& text, std::optional<T>& to, const Parse& parse) {
  if (!text) return {};
  auto value = parse(std::string("@{") + field + "}", *text);
  if (!value) return value.status();
  to = *value;
  return {};
}

}  // namespace

Status check_threads(const std::optional<int>& threads) {
  if (!threads) return {};
  if (*threads < 1 || *threads > max_threads())
    return invalid("@{threads}: " + std::to_string(*threads) + ", expected an integer 1.." +
                   std::to_string(max_threads()));
  if (const Status status = check_num_threads(*threads); !status.ok())
    return {status.code(), "@{threads}: " + std::string(status.message())};
  return {};
}

Result<ConversionOptions> parse_options(const QuantizeOptions& asked, const std::string& out,
                                        MatrixCoder* coder) {
  ConversionOptions options;
  options.coder = coder;
  options.ranks = asked.ranks;
  const auto format = parse_format(asked, out);
  if (!format) return format.status();
  options.format = *format;
  if (asked.bits) BITTERN_TRY(check_bits(*asked.bits, "@{bits}"));
  if (asked.group_size && *asked.group_size < 1)
    return invalid("@{group_size}: " + std::to_string(*asked.group_size) +
                   ", expected 32, 64 or 128");
  options.bits = asked.bits.value_or(0);
  options.group = asked.group_size.value_or(0);
  if (asked.type) {
    const auto mix = parse_mix(*asked.type);
    if (!mix) return mix.status();
    options.mix = *mix;
  }
  BITTERN_TRY(
      parse_into("output_tensor_type", asked.output_tensor_type, options.output_type, parse_type));
  BITTERN_TRY(parse_into("token_embedding_type", asked.token_embedding_type, options.embedding_type,
                         parse_type));
  options.leave_output = asked.leave_output_tensor;
  if (asked.split_max_size) {
    const auto size = parse_size("@{split_max_size}", *asked.split_max_size);
    if (!size) return size.status();
    options.split_bytes = *size;
  }
  if (asked.split_max_tensors &&
      (*asked.split_max_tensors < 1 || *asked.split_max_tensors > kMostTensors))
    return invalid("@{split_max_tensors}: " + std::to_string(*asked.split_max_tensors) +
                   ", expected an integer 1.." + std::to_string(kMostTensors));
  options.split_tensors = asked.split_max_tensors.value_or(0);
  if (asked.method && coder == nullptr) {
    if (*asked.method == "gptq")
      return unsupported(
          "@{method} gptq: runs the model; call quantize_calibrated of bittern/distill.h");
    const auto found =
        std::find(std::begin(kAffineMethodNames), std::end(kAffineMethodNames), *asked.method);
    if (found == std::end(kAffineMethodNames))
      return invalid("@{method}: " + or_empty(*asked.method) +
                     ", expected minmax, mlx, lsq or gptq");
    options.method = static_cast<AffineMethod>(found - std::begin(kAffineMethodNames));
  }
  if (asked.zero_points) {
    if (*asked.zero_points != "real" && *asked.zero_points != "integer")
      return invalid("@{zero_points}: " + or_empty(*asked.zero_points) +
                     ", expected real or integer");
    options.integer_zeros = *asked.zero_points == "integer";
  }
  for (const auto& [field, given] :
       {std::pair("data", asked.data.has_value()), std::pair("pieces", asked.pieces.has_value()),
        std::pair("fisher", asked.fisher), std::pair("context", asked.context.has_value())})
    if (given && coder == nullptr)
      return invalid(std::string("@{") + field + "}: has no effect without @{method} gptq");
  for (const QuantizeRule& rule : asked.rules) {
    auto parsed = parse_rule(rule);
    if (!parsed) return parsed.status();
    options.rules.push_back(std::move(*parsed));
  }
  BITTERN_TRY(parse_into("dequantize", asked.dequantize, options.dequantize, parse_float));
  BITTERN_TRY(parse_into("scale_dtype", asked.scale_dtype, options.scale_dtype, parse_float));
  BITTERN_TRY(parse_into("dtype", asked.dtype, options.dtype, parse_float));
  if (asked.target_bpw && !(*asked.target_bpw >= 1 && *asked.target_bpw <= 32)) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", *asked.target_bpw);
    return invalid(std::string("@{target_bpw}: ") + text + ", expected 1 to 32");
  }
  options.target_bpw = asked.target_bpw.value_or(0);
  options.pure = asked.pure;
  options.allow_requantize = asked.allow_requantize;
  options.transcode = asked.transcode;
  options.lossy = asked.lossy;
  options.imatrix = asked.imatrix.value_or("");
  for (const auto& [field, path] :
       {std::pair("imatrix", &asked.imatrix), std::pair("policy", &asked.policy)})
    if (*path && (*path)->empty())
      return invalid(std::string("@{") + field + "}: empty, expected the path of a file");
  for (const auto& [field, given] :
       {std::pair("policy", asked.policy.has_value()), std::pair("quantize", asked.quantize)}) {
    if (given && (asked.transcode || options.dequantize))
      return invalid(std::string("@{") + field + "}: has no effect with " +
                     (asked.transcode ? "@{transcode}" : "@{dequantize}") +
                     "; leave one of them out");
  }
  if (asked.policy) BITTERN_TRY(read_policy(*asked.policy, options));
  // As mlx_lm.convert -q.
  if (asked.quantize && options.bits == 0 && options.mix == nullptr && options.target_bpw == 0)
    options.bits = 4;
  return options;
}

}  // namespace bittern
