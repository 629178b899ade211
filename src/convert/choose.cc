// Steps over all tensors at once: llama-quantize's mix, a check that the run can make every tensor,
// and notes about options that have no effect.
#include <algorithm>
#include <cstring>
#include <map>

#include "convert/mix.h"
#include "convert/planner.h"
#include "convert/run.h"

namespace bittern {
namespace {

// An integer of metadata, or the first of an array of them; 0 where it is neither.
std::int64_t integer_of(GgufType type, std::span<const std::byte> encoded) {
  if (type == GgufType::array) {
    constexpr std::size_t kBefore = 12;  // element type and count
    std::uint32_t element = 0;
    if (encoded.size() <= kBefore) return 0;
    std::memcpy(&element, encoded.data(), sizeof element);
    return integer_of(static_cast<GgufType>(element), encoded.subspan(kBefore));
  }
  const bool wide = type == GgufType::u64 || type == GgufType::s64;
  if (!wide && type != GgufType::u32 && type != GgufType::s32) return 0;
  std::int64_t value = 0;
  if (encoded.size() < (wide ? 8 : 4)) return 0;
  std::memcpy(&value, encoded.data(), wide ? 8 : 4);
  return value;
}

}  // namespace

bool ConversionPlanner::is_output(const Recipe& recipe) const {
  return recipe.name == "output.weight" || recipe.name.ends_with("lm_head.weight");
}

bool ConversionPlanner::is_embedding(const Recipe& recipe) const {
  return recipe.name == "token_embd.weight" || recipe.name == "per_layer_token_embd.weight";
}

// What a mix depends on beside the tensors' names.
Result<MixModel> ConversionPlanner::mix_model() const {
  MixModel model{.imatrix = !options_.imatrix.empty()};
  std::string arch;
  std::map<std::string, std::int64_t, std::less<>> integers;
  const auto take = [&](std::string_view key, GgufType type, std::span<const std::byte> encoded) {
    if (key == "general.architecture" && type == GgufType::string && encoded.size() > 8)
      arch.assign(reinterpret_cast<const char*>(encoded.data()) + 8, encoded.size() - 8);
    for (const std::string_view end :
         {".block_count", ".expert_count", ".attention.head_count", ".attention.head_count_kv"})
      if (key.ends_with(end)) integers.emplace(key, integer_of(type, encoded));
  };
  if (source_.gguf() != nullptr) {
    for (const GgufKey& entry : source_.gguf()->keys())
      take(entry.key, entry.value.type(), entry.value.encoded());
  } else {
    const auto metadata = metadata_from_config(config_, shapes_, model_name());
    if (!metadata) return of_source(metadata.status());
    for (const auto& [key, value] : *metadata) take(key, value.type(), value.encoded());
  }
  const auto integer = [&](const char* key) {
    const auto found = integers.find(arch + "." + key);
    return found == integers.end() ? std::int64_t{0} : found->second;
  };
  model.layers = integer("block_count");
  model.experts = integer("expert_count");
  const std::int64_t heads = integer("attention.head_count"),
                     kv_heads = integer("attention.head_count_kv");
  if (heads > 0 && kv_heads > 0) model.queries_per_key = heads / kv_heads;
  model.large = model.layers == 80 &&
                ((arch == "llama" && model.experts != 8 && kv_heads > 0 && heads != kv_heads) ||
                 arch == "qwen2");
  return model;
}

// The type of each tensor in a mix, before a type whose block does not divide the row falls back.
std::vector<GgmlType> ConversionPlanner::types_of(const Mix& mix, const MixModel& model) const {
  std::vector<MixTensor> tensors;
  for (const OutputTensor& tensor : conversion_.tensors_) {
    const Recipe& recipe = tensor.recipe;
    const TensorRule* rule = rule_for(recipe);
    const bool named = why_kept(recipe) || fixed_type(recipe) ||
                       (rule != nullptr && (rule->bits > 0 || rule->type));
    tensors.push_back({recipe.name, columns_of(recipe.shape), named});
  }
  return mix_types(mix, model, tensors);
}

// Makes the first row of every tensor, as the run will. So the plan, and --dry-run, refuse what the
// run could not make.
Status ConversionPlanner::try_rows() {
  for (std::size_t i = 0; i < conversion_.tensors_.size(); ++i) {
    const OutputTensor& tensor = conversion_.tensors_[i];
    const std::span<const float> importance =
        conversion_.importance_.empty() ? std::span<const float>{} : conversion_.importance_[i];
    BITTERN_TRY(try_first_row(source_, tensor, options_.method, options_.lossy, importance));
  }
  return {};
}

// Whether --type gives some tensors a type that is not the mix's own.
bool ConversionPlanner::mixes_types() const {
  if (options_.mix == nullptr) return false;
  const auto model = mix_model();
  if (!model) return true;
  const std::vector<GgmlType> types = types_of(*options_.mix, *model);
  return std::any_of(types.begin(), types.end(),
                     [&](GgmlType type) { return type != options_.mix->type; });
}

// Why the rule, the first that matches the tensor, changes nothing about it, or null.
const char* ConversionPlanner::in_vain(const TensorRule& rule, const Recipe& recipe) const {
  if (!is_matrix(recipe)) return ", which is no matrix to be quantised";
  if (fixed_type(recipe)) return ", whose type another option gives";
  if (options_.leave_output && is_output(recipe)) return ", which @{leave_output_tensor} leaves";
  if (not_compressed(recipe) != nullptr) return ", which compressed-tensors' loaders read plain";
  if (rule.keep && !options_.pure && delicate(recipe.name) != nullptr)
    return ", which is left as it is without it";
  return nullptr;
}

void ConversionPlanner::note_unused() {
  for (std::size_t r = 0; r < options_.rules.size(); ++r) {
    const TensorRule& rule = options_.rules[r];
    const std::string of = "the rule " + pattern_text(rule);
    std::size_t found = 0, first = 0, able = 0;
    const Recipe* shown = nullptr;
    const char* why = "";  // it has no effect on that one
    for (const OutputTensor& tensor : conversion_.tensors_) {
      if (!matches(r, tensor.recipe)) continue;
      ++found;
      if (rule_for(tensor.recipe) != &rule) continue;
      ++first;
      const char* vain = in_vain(rule, tensor.recipe);
      able += vain == nullptr;
      if (shown == nullptr && vain != nullptr) {
        shown = &tensor.recipe;
        why = vain;
      }
      if (able > 0) break;  // it has an effect, and there is nothing to tell
    }
    if (found == 0) {
      note(of + " matches no tensor");
    } else if (first == 0) {
      note(of + " has no effect: earlier rules decide for all it matches");
    } else if (able == 0) {
      note(of + " has no effect: it matches " + shown->name +
           (first == 1 ? "" : " and " + std::to_string(first - 1) + " more") + why);
    }
  }
  if (options_.leave_output && tied_)
    note("@{leave_output_tensor} has no effect: the embedding is the head, and is quantised");
  if (options_.output_type && tied_ && options_.embedding_type)
    note("@{output_tensor_type} has no effect: the embedding is the head");
  if (options_.output_type && tied_ && !options_.embedding_type)
    note("@{output_tensor_type}: the embedding is the head, and gets that type");
  if (options_.embedding_type &&
      std::none_of(conversion_.tensors_.begin(), conversion_.tensors_.end(),
                   [&](const OutputTensor& tensor) { return is_embedding(tensor.recipe); }))
    note("@{token_embedding_type} has no effect: there is no token_embd.weight");
  if (options_.method && std::none_of(conversion_.tensors_.begin(), conversion_.tensors_.end(),
                                      [](const OutputTensor& tensor) {
                                        return tensor.way == OutputTensor::Way::quantize &&
                                               is_fitted(tensor.through.quantized() ? tensor.through
                                                                                    : tensor.to);
                                      }))
    note("@{method} " +
         std::string(kAffineMethodNames[static_cast<std::size_t>(*options_.method)]) +
         " has no effect: no tensor is fitted by it");
  const auto any = [&](auto&& is) {
    return std::any_of(conversion_.tensors_.begin(), conversion_.tensors_.end(), is);
  };
  if (options_.dtype && options_.format == ModelFormat::gguf &&
      !any([&](const OutputTensor& tensor) {
        return tensor.to.kind == Storage::Kind::plain && tensor.recipe.shape.rank >= 2 &&
               !delicate(tensor.recipe.name) && (casts_only() || why_kept(tensor.recipe));
      }))
    note(
        "@{dtype} has no effect: other options give every matrix its type, and the others are F32");
  const auto scaled = [](const OutputTensor& tensor) {
    return tensor.to.kind == Storage::Kind::affine || tensor.through.kind == Storage::Kind::affine;
  };
  if (options_.scale_dtype && !any(scaled))
    note("@{scale_dtype} has no effect: no tensor has scales");
  if (options_.allow_requantize &&
      !any([](const OutputTensor& tensor) { return tensor.from.quantized(); }))
    note("@{allow_requantize} has no effect: the model is not quantised");
  if (options_.pure && !mixes_types() && !any([&](const OutputTensor& tensor) {
        return is_matrix(tensor.recipe) && delicate(tensor.recipe.name) &&
               rule_for(tensor.recipe) == nullptr;
      }))
    note("@{pure} has no effect: no matrix is kept by default" +
         std::string(options_.mix == nullptr ? "" : ", and all have one type"));
  if (!options_.imatrix.empty()) note_importance();
  // llama-quantize refuses it, with the IQ types that are not written here.
  if (options_.imatrix.empty() && options_.mix == find_mix("Q2_K_S"))
    note(
        "Q2_K_S without @{imatrix}: much of the model is lost, and llama-quantize refuses to; give "
        "an importance matrix, or take Q2_K");
}

// Which tensors the importance matrix weighs, and which it does not; the others forget it.
void ConversionPlanner::note_importance() {
  std::size_t used = 0, missing = 0;
  std::map<std::string, std::size_t> deaf;  // tensors with an importance that is not used
  std::string first;
  for (std::size_t i = 0; i < conversion_.tensors_.size(); ++i) {
    const OutputTensor& tensor = conversion_.tensors_[i];
    std::vector<float>& importance = conversion_.importance_[i];
    const Storage& to = tensor.through.quantized() ? tensor.through : tensor.to;
    const bool weighs =
        tensor.way == OutputTensor::Way::quantize && uses_importance(to, options_.method);
    if (weighs && importance.empty()) {
      if (missing++ == 0) first = tensor.recipe.name;
    } else if (weighs) {
      ++used;
    } else if (!importance.empty()) {
      ++deaf[tensor.way == OutputTensor::Way::quantize ? to.str() : "tensors left plain"];
      importance.clear();
    }
  }
  const auto tensors = [](std::size_t n) {
    return std::to_string(n) + (n == 1 ? " tensor" : " tensors");
  };
  importance_used_ = used > 0;
  if (used > 0) {
    note("importance from " + options_.imatrix + " weighs the errors of " + tensors(used));
  } else {
    note("@{imatrix} " + options_.imatrix + " has no effect");
  }
  for (const auto& [what, n] : deaf) note("importance is not used by " + what + ": " + tensors(n));
  if (missing > 0)
    note(options_.imatrix + " has no entry for " + first +
         (missing == 1 ? "" : " and " + std::to_string(missing - 1) + " more") +
         ": their columns count alike");
}

}  // namespace bittern
