#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "convert/model_config.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

struct ArchName {
  Arch arch;
  const char* gguf;
  const char* model_type;
};
constexpr ArchName kArchs[] = {
    {Arch::llama, "llama", "llama"},
    {Arch::qwen2, "qwen2", "qwen2"},
    {Arch::qwen2moe, "qwen2moe", "qwen2_moe"},
    {Arch::qwen3, "qwen3", "qwen3"},
    {Arch::qwen3moe, "qwen3moe", "qwen3_moe"},
    {Arch::phi3, "phi3", "phi3"},
    {Arch::olmo2, "olmo2", "olmo2"},
    {Arch::smollm3, "smollm3", "smollm3"},
    {Arch::gemma2, "gemma2", "gemma2"},
    {Arch::gemma3, "gemma3", "gemma3_text"},
    {Arch::qwen3next, "qwen3next", "qwen3_next"},
    {Arch::qwen35, "qwen35", "qwen3_5_text"},
    {Arch::qwen35moe, "qwen35moe", "qwen3_5_moe_text"},
};

// Keys below the architecture's name. The first thing wrong is kept.
class Keys {
 public:
  Keys(const GgufFile& file, std::string arch) : file_(file), arch_(std::move(arch)) {}

  bool has(const char* key) const { return file_.find(full(key)) != nullptr; }

  // One number, or a list with one for each layer that are all the same or 0 (a layer without).
  std::int64_t count(const char* key) {
    std::int64_t x = 0;
    const GgufValue* value = file_.find(full(key));
    if (value != nullptr && value->type() == GgufType::array) {
      const auto all = file_.integers(full(key));
      if (!all) return fail(all.status());
      for (const std::int64_t y : *all) {
        if (x != 0 && y != 0 && x != y)
          return fail(unsupported(name(key) + "differs between layers, expected one number"));
        if (y != 0) x = y;
      }
    } else {
      const auto one = file_.integer(full(key));
      if (!one) return fail(one.status());
      x = *one;
    }
    if (x < 1 || x > std::numeric_limits<std::int32_t>::max())
      return fail(invalid(name(key) + std::to_string(x) + ", expected 1 or more, below 2^31"));
    return x;
  }
  std::int64_t count_or(const char* key, std::int64_t otherwise) {
    return has(key) ? count(key) : otherwise;
  }
  // Of a number that is 0 where there is none.
  std::int64_t count_or_none(const char* key) {
    const GgufValue* value = file_.find(full(key));
    return value == nullptr || value->as_integer() == 0 ? 0 : count(key);
  }
  double number(const char* key) {
    const auto x = file_.number(full(key));
    if (!x) {
      fail(x.status());
      return 1;
    }
    if (!std::isfinite(*x) || *x <= 0)
      fail(invalid(name(key) + std::to_string(*x) + ", expected a number above 0"));
    return *x;
  }
  double number_or(const char* key, double otherwise) { return has(key) ? number(key) : otherwise; }
  std::string text_or(const char* key, const char* otherwise) {
    if (!has(key)) return otherwise;
    const auto x = file_.string(full(key));
    if (!x) fail(x.status());
    return x ? std::string(*x) : otherwise;
  }
  std::optional<std::int64_t> token(const char* key) const {
    const GgufValue* value = file_.find(key);
    return value == nullptr ? std::nullopt : value->as_integer();
  }

  std::int64_t fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
    return 1;
  }
  std::string name(const char* key) const { return file_.path() + ": " + full(key) + ": "; }
  std::string full(const char* key) const { return arch_ + "." + key; }
  const Status& status() const { return status_; }

 private:
  const GgufFile& file_;
  std::string arch_;
  Status status_;
};

// A number that was made of a decimal one and lost digits as an f32: 1e-6, not 9.99999997e-07.
double decimal(double x) {
  std::array<char, 32> text{};
  for (int digits = 1; digits < 9; ++digits) {
    std::snprintf(text.data(), text.size(), "%.*g", digits, x);
    const double shorter = std::strtod(text.data(), nullptr);
    if (static_cast<float>(shorter) == static_cast<float>(x)) return shorter;
  }
  return x;
}

Result<std::vector<float>> read_factors(const GgufFile& file, const GgufTensor& tensor,
                                        std::int64_t dim) {
  if (tensor.type != GgmlType::f32 || tensor.shape != Shape{dim / 2})
    return unsupported(file.path() + ": tensor " + std::string(tensor.name) + ": " +
                       info(tensor.type).name + " " + tensor.shape.str() + ", expected F32 " +
                       Shape{dim / 2}.str());
  std::vector<float> factors(static_cast<std::size_t>(dim / 2));
  std::memcpy(factors.data(), tensor.bytes.data(), tensor.bytes.size());
  return factors;
}

constexpr const char* kLongFactors = "rope_factors_long.weight";
constexpr const char* kShortFactors = "rope_factors_short.weight";

// Both sets of factors, or none.
Status read_longrope(const GgufFile& file, Keys& keys, ModelConfig& m) {
  m.rope.context = keys.count_or("rope.scaling.original_context_length", m.context);
  const std::pair<const char*, std::vector<double>*> sets[] = {
      {kLongFactors, &m.rope.long_factors}, {kShortFactors, &m.rope.short_factors}};
  for (const auto& [name, to] : sets) {
    const GgufTensor* tensor = file.tensor(name);
    if (tensor == nullptr) continue;
    const auto factors = read_factors(file, *tensor, m.rotary_dim());
    if (!factors) return factors.status();
    for (const float x : *factors) {
      if (!std::isfinite(x) || x <= 0)
        return invalid(file.path() + ": tensor " + name + ": a factor is " + std::to_string(x) +
                       ", expected a number above 0");
      to->push_back(decimal(x));
    }
  }
  if (m.rope.long_factors.size() != m.rope.short_factors.size())
    return invalid(file.path() + ": only one of the tensors " + kLongFactors + " and " +
                   kShortFactors + ", expected both or none");
  const double usual = usual_longrope_attention(m.context, m.rope.context);
  const double attention = keys.number_or("rope.scaling.attn_factor", 1);
  if (!m.rope.long_factors.empty()) {
    m.rope.type = "longrope";
    if (static_cast<float>(attention) != static_cast<float>(usual))
      m.rope.attention = decimal(attention);
  } else if (attention != 1) {
    keys.fail(unsupported(keys.name("rope.scaling.attn_factor") + std::to_string(attention) +
                          ", expected 1 where there are no tensors " + kLongFactors + " and " +
                          kShortFactors));
  }
  return {};
}

Status read_llama3(const GgufFile& file, const GgufTensor& tensor, Keys& keys, ModelConfig& m) {
  const auto refuse = [&](const std::string& what) {
    return unsupported(file.path() + ": tensor rope_freqs.weight: " + what);
  };
  const auto factors = read_factors(file, tensor, m.head_dim);
  if (!factors) return factors.status();
  for (const float f : *factors)
    if (!(f >= 1) || !std::isfinite(f))
      return refuse("a factor is " + std::to_string(f) + ", expected 1 or more");
  if (!solve_llama3(*factors, keys.count_or("rope.scaling.original_context_length", 0), m.context,
                    m.rope))
    return refuse("no llama3 rotary embedding has these factors");
  return {};
}

void put(GgufMetadata& out, std::string key, std::int64_t x) {
  out.emplace_back(std::move(key), GgufData(static_cast<std::uint32_t>(x)));
}
void put(GgufMetadata& out, std::string key, double x) {
  out.emplace_back(std::move(key), GgufData(static_cast<float>(x)));
}

}  // namespace

const char* gguf_name(Arch arch) {
  for (const ArchName& row : kArchs)
    if (row.arch == arch) return row.gguf;
  return "";
}

std::vector<std::pair<std::string, std::vector<float>>> rotary_factors(const ModelConfig& m) {
  if (m.rope.type == "llama3") return {{"rope_freqs.weight", llama3_factors(m.rope, m.head_dim)}};
  if (m.rope.type != "longrope") return {};
  const auto rounded = [](const std::vector<double>& all) {
    std::vector<float> out;
    for (const double x : all) out.push_back(static_cast<float>(x));
    return out;
  };
  return {{kLongFactors, rounded(m.rope.long_factors)},
          {kShortFactors, rounded(m.rope.short_factors)}};
}

Result<ModelConfig> model_from_gguf(const GgufFile& file) {
  const auto arch_name = file.string("general.architecture");
  if (!arch_name) return arch_name.status();
  const auto known = std::find_if(std::begin(kArchs), std::end(kArchs),
                                  [&](const ArchName& row) { return *arch_name == row.gguf; });
  if (known == std::end(kArchs)) {
    std::string all;
    for (const ArchName& row : kArchs) all.append(all.empty() ? "" : ", ").append(row.gguf);
    return unsupported(file.path() + ": architecture " + in_quotes(*arch_name) +
                       " is not known, expected one of " + all);
  }
  Keys keys(file, known->gguf);
  ModelConfig m;
  const char* type = known->model_type;
  if (known->arch == Arch::llama && keys.has("attention.sliding_window")) type = "mistral";
  if (known->arch == Arch::llama && keys.has("expert_count")) type = "mixtral";
  m.type = model_type(type);

  m.layers = keys.count("block_count") - keys.count_or("nextn_predict_layers", 0);
  if (m.layers < 1)
    keys.fail(invalid(keys.name("block_count") + "expected more than nextn_predict_layers"));
  m.hidden = keys.count("embedding_length");
  m.heads = keys.count("attention.head_count");
  m.kv_heads = keys.count_or("attention.head_count_kv", m.heads);
  if (m.heads % m.kv_heads != 0)
    keys.fail(
        invalid(keys.name("attention.head_count") + "not a multiple of attention.head_count_kv"));
  m.head_dim = keys.count_or("attention.key_length", m.hidden / m.heads);
  if (const auto dim = keys.count_or("attention.value_length", m.head_dim); dim != m.head_dim)
    keys.fail(unsupported(keys.name("attention.value_length") + std::to_string(dim) +
                          ", expected attention.key_length, " + std::to_string(m.head_dim)));
  if (m.head_dim < 1)
    keys.fail(invalid(keys.name("embedding_length") + "less than attention.head_count"));
  m.context = keys.count("context_length");
  m.eps = decimal(keys.number("attention.layer_norm_rms_epsilon"));
  if (known->arch != Arch::qwen35moe) m.feed_forward = keys.count("feed_forward_length");
  const bool gemma = m.arch() == Arch::gemma2 || m.arch() == Arch::gemma3;
  m.activation = gemma ? "gelu_pytorch_tanh" : "silu";

  const GgufTensor* embedding = file.tensor("token_embd.weight");
  if (embedding == nullptr || embedding->shape.rank != 2)
    return invalid(file.path() + ": no tensor token_embd.weight of rank 2, expected one");
  m.vocab = embedding->shape[0];
  m.tied = file.tensor("output.weight") == nullptr;
  m.bos = keys.token("tokenizer.ggml.bos_token_id");
  m.eos = keys.token("tokenizer.ggml.eos_token_id");
  m.pad = keys.token("tokenizer.ggml.padding_token_id");

  // ---- rotary embedding ----
  m.rope.theta = decimal(keys.number_or("rope.freq_base", 1e4));
  m.rope.local_theta = decimal(keys.number_or("rope.freq_base_swa", 1e4));
  const std::int64_t turning = keys.count_or("rope.dimension_count", m.head_dim);
  m.rope.part = double(turning) / double(m.head_dim);
  const bool may_turn_part = m.gated_delta() || m.arch() == Arch::phi3;
  if (turning > m.head_dim || turning % 2 != 0 || (turning != m.head_dim && !may_turn_part))
    keys.fail(unsupported(keys.name("rope.dimension_count") + std::to_string(turning) +
                          " of a head's " + std::to_string(m.head_dim) +
                          ", expected all of them, or an even number in a phi3, qwen3next or "
                          "qwen35"));
  const std::string scaling = keys.text_or("rope.scaling.type", "none");
  const double factor =
      keys.number_or("rope.scaling.factor", keys.number_or("rope.scale_linear", 1));
  if (scaling == "yarn") {
    m.rope.type = "yarn";
    m.rope.context = keys.count_or("rope.scaling.original_context_length", m.context);
    if (const double attention = keys.number_or("rope.scaling.attn_factor", 1); attention != 1)
      keys.fail(unsupported(keys.name("rope.scaling.attn_factor") + std::to_string(attention) +
                            ", expected 1"));
  } else if ((scaling == "linear" || scaling == "none") && factor != 1) {
    m.rope.type = "linear";
  } else if (scaling != "none" && scaling != "linear" &&
             (scaling != "longrope" || m.arch() != Arch::phi3)) {
    keys.fail(unsupported(keys.name("rope.scaling.type") + in_quotes(scaling) +
                          ", expected none, linear or yarn"));
  }
  if (m.rope.type != "default") m.rope.factor = decimal(factor);
  if (m.arch() == Arch::phi3 && m.rope.type != "default")
    keys.fail(unsupported(keys.name("rope.scaling.type") + in_quotes(m.rope.type) +
                          ": transformers has no such phi3, expected longrope or none"));
  if (keys.has("rope.dimension_sections")) {
    const auto sections = file.integers(keys.full("rope.dimension_sections"));
    if (!sections) return sections.status();
    if (sections->size() != 4 || (*sections)[3] != 0)
      return unsupported(keys.name("rope.dimension_sections") + "expected three and a 0");
    m.rope.sections.assign(sections->begin(), sections->end() - 1);
  }
  if (!keys.status().ok()) return keys.status();
  // Only llama's graph uses them.
  if (const GgufTensor* factors = file.tensor("rope_freqs.weight"))
    if (known->arch == Arch::llama) BITTERN_TRY(read_llama3(file, *factors, keys, m));

  // ---- what only some have ----
  if (known->arch == Arch::llama) {
    m.window = keys.count_or("attention.sliding_window", 0);
    m.attention_bias = file.tensor("blk.0.attn_q.bias") != nullptr;
    m.mlp_bias = file.tensor("blk.0.ffn_gate.bias") != nullptr;
    if (m.is("mixtral")) m.expert_feed_forward = m.feed_forward;
  }
  if (m.arch() == Arch::phi3) {
    BITTERN_TRY(read_longrope(file, keys, m));
    m.window = keys.count_or_none("attention.sliding_window");
  }
  if (m.arch() == Arch::olmo2 && keys.count_or_none("attention.sliding_window") != 0)
    keys.fail(unsupported(keys.name("attention.sliding_window") +
                          "this is an olmo3, which is not known, expected an olmo2"));
  if (m.arch() == Arch::smollm3 && check_sizes(m).ok())
    for (std::int64_t i = 0; i < m.layers; ++i) m.turning.push_back((i + 1) % 4 != 0);
  if (m.arch() == Arch::qwen2) m.attention_bias = true;
  if (m.arch() == Arch::qwen2moe) m.attention_bias = file.tensor("blk.0.attn_q.bias") != nullptr;
  if (gemma) {
    const bool second = m.arch() == Arch::gemma2;
    m.window = keys.count_or("attention.sliding_window", second ? 4096 : 0);
    m.period =
        m.window == 0 ? 1 : keys.count_or("attention.sliding_window_pattern", second ? 2 : 6);
    m.query_scale = double(llama_cpp_query_scale(m));
    m.logit_softcap = decimal(keys.number_or("final_logit_softcapping", second ? 30 : 0));
    if (second) m.attention_softcap = decimal(keys.number_or("attn_logit_softcapping", 50));
  }
  if (m.gated_delta()) {
    m.period = keys.count_or("full_attention_interval", 4);
    m.conv_kernel = keys.count("ssm.conv_kernel");
    m.key_heads = keys.count("ssm.group_count");
    m.value_heads = keys.count("ssm.time_step_rank");
    m.key_dim = m.value_dim = keys.count("ssm.state_size");
    if (m.value_heads % m.key_heads != 0 ||
        keys.count("ssm.inner_size") != m.value_dim * m.value_heads)
      keys.fail(invalid(keys.name("ssm.inner_size") +
                        "the heads of the gated delta net do not fit together, expected "
                        "ssm.state_size x ssm.time_step_rank, which is a multiple of "
                        "ssm.group_count"));
    if (keys.has("attention.recurrent_layers")) {
      const auto recurrent = file.array(keys.full("attention.recurrent_layers"));
      if (!recurrent) return recurrent.status();
      std::int64_t layer = 0, wrong = 0;
      recurrent->each([&](const GgufValue& x) {
        const bool is = x.as_bool().value_or(x.as_integer().value_or(0) != 0);
        if (layer < m.layers && is != m.is_linear(layer)) ++wrong;
        ++layer;
      });
      if (wrong != 0 || layer < m.layers)
        return unsupported(keys.name("attention.recurrent_layers") +
                           "expected all layers but every full_attention_interval-th");
    }
  }
  if (keys.has("expert_count")) {
    m.experts = keys.count("expert_count");
    m.experts_used = keys.count("expert_used_count");
    if (m.experts_used > m.experts)
      keys.fail(invalid(keys.name("expert_used_count") + std::to_string(m.experts_used) + " of " +
                        std::to_string(m.experts) + " experts, expected no more than there are"));
    m.norm_topk = m.arch() != Arch::qwen2moe;
    if (m.arch() == Arch::qwen2moe) {  // of which the first files leave out what this gives
      m.expert_feed_forward =
          keys.count_or("expert_feed_forward_length", m.feed_forward / m.experts_used);
      m.shared_feed_forward = keys.count_or("expert_shared_feed_forward_length", m.feed_forward);
    } else if (!m.is("mixtral")) {
      m.expert_feed_forward = keys.count("expert_feed_forward_length");
      m.shared_feed_forward = m.gated_delta() ? keys.count("expert_shared_feed_forward_length") : 0;
    }
  }
  if (!keys.status().ok()) return keys.status();
  if (const Status sizes = check_sizes(m); !sizes.ok())
    return invalid(file.path() + ": " + std::string(sizes.message()));
  return m;
}

Result<nlohmann::ordered_json> config_from_gguf(const GgufFile& file, std::string_view dtype) {
  const auto model = model_from_gguf(file);
  if (!model) return model.status();
  return config_from_model(*model, dtype);
}

Status add_metadata(const ModelConfig& m, GgufMetadata& out) {
  BITTERN_TRY(check_llama_cpp(m));
  const std::string arch = gguf_name(m.arch());
  const auto key = [&](const char* name) { return arch + "." + name; };
  put(out, key("block_count"), m.layers);
  put(out, key("context_length"), m.context);
  put(out, key("embedding_length"), m.hidden);
  if (m.feed_forward != 0) put(out, key("feed_forward_length"), m.feed_forward);
  put(out, key("attention.head_count"), m.heads);
  put(out, key("attention.head_count_kv"), m.kv_heads);
  put(out, key("attention.key_length"), m.head_dim);
  put(out, key("attention.value_length"), m.head_dim);
  put(out, key("attention.layer_norm_rms_epsilon"), m.eps);
  put(out, key("vocab_size"), m.vocab);
  put(out, key("rope.freq_base"), m.rope.theta);
  put(out, key("rope.dimension_count"), m.rotary_dim());
  if (m.rope.type == "linear" || m.rope.type == "yarn") {
    out.emplace_back(key("rope.scaling.type"), GgufData(std::string_view(m.rope.type)));
    put(out, key("rope.scaling.factor"), m.rope.factor);
    if (m.rope.type == "yarn")
      put(out, key("rope.scaling.original_context_length"), m.rope.context);
  }
  // Of llama3 llama.cpp has the factors alone; this is for those who want the numbers again.
  if (m.arch() == Arch::phi3 || m.rope.type == "llama3")
    put(out, key("rope.scaling.original_context_length"), m.rope.context);
  if (m.rope.type == "longrope")
    put(out, key("rope.scaling.attn_factor"),
        m.rope.attention != 0 ? m.rope.attention
                              : usual_longrope_attention(m.context, m.rope.context));
  if (m.window != 0 || m.arch() == Arch::phi3) put(out, key("attention.sliding_window"), m.window);
  if (m.arch() == Arch::gemma2) {
    put(out, key("attention.sliding_window_pattern"), m.period);
    put(out, key("attn_logit_softcapping"), m.attention_softcap);
    put(out, key("final_logit_softcapping"), m.logit_softcap);
  }
  if (m.arch() == Arch::gemma3) {
    put(out, key("attention.sliding_window_pattern"), m.period);
    put(out, key("rope.freq_base_swa"), m.rope.local_theta);
    if (m.logit_softcap != 0) put(out, key("final_logit_softcapping"), m.logit_softcap);
  }
  if (m.experts != 0) {
    put(out, key("expert_count"), m.experts);
    put(out, key("expert_used_count"), m.experts_used);
    if (!m.is("mixtral")) {
      put(out, key("expert_feed_forward_length"), m.expert_feed_forward);
      if (m.shared_feed_forward != 0)
        put(out, key("expert_shared_feed_forward_length"), m.shared_feed_forward);
    }
  }
  if (!m.gated_delta()) return {};
  put(out, key("ssm.conv_kernel"), m.conv_kernel);
  put(out, key("ssm.state_size"), m.key_dim);
  put(out, key("ssm.group_count"), m.key_heads);
  put(out, key("ssm.time_step_rank"), m.value_heads);
  put(out, key("ssm.inner_size"), m.value_heads * m.value_dim);
  put(out, key("full_attention_interval"), m.period);
  if (m.arch() != Arch::qwen3next) {
    // Frequencies turn with time, height and width in turns; text has the same of all three.
    const std::int64_t turning = m.rotary_dim() / 2;
    std::array<std::int32_t, 4> sections{};
    for (std::size_t i = 0; i < 3; ++i)
      sections[i] = static_cast<std::int32_t>(
          m.rope.sections.empty() ? (turning + 2 - std::int64_t(i)) / 3 : m.rope.sections[i]);
    out.emplace_back(key("rope.dimension_sections"),
                     GgufData::array(std::span<const std::int32_t>(sections)));
  }
  return {};
}

}  // namespace bittern
