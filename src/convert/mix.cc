#include "convert/mix.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <numeric>

namespace bittern {
namespace {

enum FileType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 7,
  kQ5_0 = 8,
  kQ5_1 = 9,
  kQ2_K = 10,
  kQ3_K_S = 11,
  kQ3_K_M = 12,
  kQ3_K_L = 13,
  kQ4_K_S = 14,
  kQ4_K_M = 15,
  kQ5_K_S = 16,
  kQ5_K_M = 17,
  kQ6_K = 18,
  kQ2_K_S = 21,
  kBF16 = 32,
};

constexpr Mix kMixes[] = {{"Q2_K", GgmlType::q2_k, kQ2_K},     {"Q3_K_S", GgmlType::q3_k, kQ3_K_S},
                          {"Q3_K_M", GgmlType::q3_k, kQ3_K_M}, {"Q3_K_L", GgmlType::q3_k, kQ3_K_L},
                          {"Q4_0", GgmlType::q4_0, kQ4_0},     {"Q4_1", GgmlType::q4_1, kQ4_1},
                          {"Q4_K_S", GgmlType::q4_k, kQ4_K_S}, {"Q4_K_M", GgmlType::q4_k, kQ4_K_M},
                          {"Q5_0", GgmlType::q5_0, kQ5_0},     {"Q5_1", GgmlType::q5_1, kQ5_1},
                          {"Q5_K_S", GgmlType::q5_k, kQ5_K_S}, {"Q5_K_M", GgmlType::q5_k, kQ5_K_M},
                          {"Q6_K", GgmlType::q6_k, kQ6_K},     {"Q8_0", GgmlType::q8_0, kQ8_0},
                          {"F16", GgmlType::f16, kF16},        {"BF16", GgmlType::bf16, kBF16},
                          {"F32", GgmlType::f32, kF32},        {"Q2_K_S", GgmlType::q2_k, kQ2_K_S}};

constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"Q3_K", "Q3_K_M"}, {"Q4_K", "Q4_K_M"}, {"Q5_K", "Q5_K_M"}};

bool has(std::string_view name, std::string_view part) { return name.find(part) != name.npos; }

// Attention's values, alone or together with queries and keys.
bool is_value(std::string_view name) {
  return has(name, "attn_qkv.weight") || has(name, "attn_kv_b.weight") ||
         has(name, "attn_v.weight");
}

bool is_embedding(std::string_view name) {
  return name == "token_embd.weight" || name == "per_layer_token_embd.weight";
}

std::int64_t layer_of(std::string_view name) {
  constexpr std::string_view kBlock = "blk.";
  std::int64_t layer = -1;
  if (name.starts_with(kBlock))
    std::from_chars(name.data() + kBlock.size(), name.data() + name.size(), layer);
  return layer;
}

// The first and last eighth of the layers, and every third between.
bool more_bits(std::int64_t i, std::int64_t n) {
  return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

class Chooser {
 public:
  Chooser(const Mix& mix, const MixModel& model, std::span<const MixTensor> tensors)
      : mix_(mix), model_(model) {
    for (const MixTensor& tensor : tensors) {
      values_ += is_value(tensor.name);
      tied_ = tied_ && tensor.name != "output.weight";
    }
  }

  GgmlType choose(const MixTensor& tensor) {
    const std::string_view name = tensor.name;
    if (name == "output.weight" || (tied_ && is_embedding(name))) return output(tensor.columns);
    if (is_embedding(name)) return mix_.type;
    if (is_value(name)) return value();
    if (has(name, "attn_k.weight")) return model_.experts == 8 ? GgmlType::q8_0 : mix_.type;
    if (has(name, "attn_output.weight")) return attention_output();
    // Names are looked for in llama.cpp's order: a name with attn_q is no ffn_down.
    if (has(name, "attn_q.weight") || has(name, "ffn_up") || has(name, "ffn_gate"))
      return mix_.type;
    if (has(name, "ffn_down")) return down(name);
    return mix_.type;
  }

 private:
  bool is(FileType type) const { return mix_.file_type == type; }

  GgmlType output(std::int64_t columns) const {
    if (columns % info(mix_.type).block != 0 || is(kQ8_0)) return GgmlType::q8_0;
    return GgmlType::q6_k;
  }

  GgmlType value() {
    const std::int64_t i = value_++;
    const bool shared = model_.queries_per_key >= 4;
    GgmlType type = mix_.type;
    if (is(kQ2_K)) type = shared ? GgmlType::q4_k : GgmlType::q3_k;
    if (is(kQ2_K_S) && shared) type = GgmlType::q4_k;
    if (is(kQ3_K_M)) type = i < 2 ? GgmlType::q5_k : GgmlType::q4_k;
    if (is(kQ3_K_L)) type = GgmlType::q5_k;
    if ((is(kQ4_K_M) || is(kQ5_K_M)) && more_bits(i, values_)) type = GgmlType::q6_k;
    if (is(kQ4_K_S) && i < 4) type = GgmlType::q5_k;
    if (model_.large && (type == GgmlType::q3_k || type == GgmlType::q4_k)) type = GgmlType::q5_k;
    return model_.experts == 8 ? GgmlType::q8_0 : type;
  }

  GgmlType attention_output() const {
    if (model_.experts == 8)
      return is(kQ2_K) || is(kQ3_K_S) || is(kQ3_K_M) || is(kQ4_K_S) || is(kQ4_K_M) ? GgmlType::q5_k
                                                                                   : mix_.type;
    return is(kQ2_K)     ? GgmlType::q3_k
           : is(kQ3_K_M) ? GgmlType::q4_k
           : is(kQ3_K_L) ? GgmlType::q5_k
                         : mix_.type;
  }

  GgmlType down(std::string_view name) {
    const std::int64_t n = model_.layers;
    // With experts a layer has several such tensors, so it is not their number that tells it.
    const std::int64_t i = model_.experts > 1 ? layer_of(name) : down_;
    ++down_;
    if (is(kQ2_K)) return GgmlType::q3_k;
    if (is(kQ2_K_S) && i < n / 8) return GgmlType::q4_k;
    if (is(kQ3_K_M)) return i < n / 16 ? GgmlType::q5_k : GgmlType::q4_k;
    if (is(kQ3_K_L)) return GgmlType::q5_k;
    if ((is(kQ4_K_M) || is(kQ5_K_M)) && more_bits(i, n)) return GgmlType::q6_k;
    if (is(kQ4_K_S) && i < n / 8) return GgmlType::q5_k;
    if (model_.imatrix && i < n / 8 && is(kQ4_0)) return GgmlType::q4_1;
    if (model_.imatrix && i < n / 8 && is(kQ5_0)) return GgmlType::q5_1;
    return mix_.type;
  }

  const Mix& mix_;
  const MixModel& model_;
  std::int64_t values_ = 0, value_ = 0, down_ = 0;
  bool tied_ = true;  // the embedding is the head
};

}  // namespace

std::span<const Mix> mixes() { return kMixes; }

const Mix* find_mix(std::string_view name) {
  std::string upper(name);
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const auto& [alias, means] : kAliases)
    if (upper == alias) upper = means;
  const auto found = std::find_if(std::begin(kMixes), std::end(kMixes),
                                  [&](const Mix& m) { return upper == m.name; });
  return found == std::end(kMixes) ? nullptr : found;
}

std::vector<GgmlType> mix_types(const Mix& mix, const MixModel& model,
                                std::span<const MixTensor> tensors) {
  std::vector<GgmlType> types(tensors.size(), mix.type);
  const GgmlType plain[] = {GgmlType::f32, GgmlType::f16, GgmlType::bf16};
  if (std::find(std::begin(plain), std::end(plain), mix.type) != std::end(plain)) return types;
  // llama.cpp counts layer by layer and by name within a layer, wherever the tensors lie.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(layer_of(tensors[a].name), tensors[a].name) <
           std::pair(layer_of(tensors[b].name), tensors[b].name);
  });
  Chooser chooser(mix, model, tensors);
  for (const std::size_t i : order)
    if (!tensors[i].named) types[i] = chooser.choose(tensors[i]);
  return types;
}

}  // namespace bittern
