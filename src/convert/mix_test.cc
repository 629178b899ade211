#include "convert/mix.h"

#include <gtest/gtest.h>

namespace bittern {
namespace {

// The types of attn_v (or another tensor) of every layer.
std::string types(const char* mix, const MixModel& model, const std::string& tensor) {
  std::vector<std::string> names = {"token_embd.weight", "output.weight"};
  for (std::int64_t i = model.layers; i-- > 0;)  // the files' order does not matter
    for (const char* part : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"})
      names.push_back("blk." + std::to_string(i) + "." + part + ".weight");
  std::vector<MixTensor> tensors;
  for (const std::string& name : names) tensors.push_back({name, 256});
  const auto chosen = mix_types(*find_mix(mix), model, tensors);
  std::string text;
  for (std::size_t i = names.size(); i-- > 0;)
    if (names[i].find(tensor) != std::string::npos)
      text += std::string(text.empty() ? "" : " ") + info(chosen[i]).name;
  return text;
}

TEST(Mixes, NamesInAnyCaseAndAliases) {
  EXPECT_STREQ(find_mix("q4_k_m")->name, "Q4_K_M");
  EXPECT_STREQ(find_mix("Q4_K")->name, "Q4_K_M");
  EXPECT_STREQ(find_mix("q5_k")->name, "Q5_K_M");
  EXPECT_STREQ(find_mix("Q3_K")->name, "Q3_K_M");
  EXPECT_EQ(find_mix("Q4_K_M")->file_type, 15u);
  EXPECT_EQ(find_mix("Q4_K_L"), nullptr);
  EXPECT_EQ(find_mix(""), nullptr);
}

TEST(Mixes, ValuesAndDownProjectionsByLayer) {
  const MixModel eight{.layers = 8};
  // 8 / 8 = 1: the first layer, the last, and every third between.
  const std::string more = "Q6_K Q4_K Q4_K Q6_K Q4_K Q4_K Q6_K Q6_K";
  EXPECT_EQ(types("Q4_K_M", eight, "attn_v"), more);
  EXPECT_EQ(types("Q4_K_M", eight, "ffn_down"), more);
  EXPECT_EQ(types("Q5_K_M", {.layers = 4}, "ffn_down"), "Q5_K Q5_K Q6_K Q6_K");
  EXPECT_EQ(types("Q4_K_S", eight, "attn_v"), "Q5_K Q5_K Q5_K Q5_K Q4_K Q4_K Q4_K Q4_K");
  EXPECT_EQ(types("Q4_K_S", eight, "ffn_down"), "Q5_K Q4_K Q4_K Q4_K Q4_K Q4_K Q4_K Q4_K");
  EXPECT_EQ(types("Q3_K_M", {.layers = 4}, "attn_v"), "Q5_K Q5_K Q4_K Q4_K");
  EXPECT_EQ(types("Q3_K_M", {.layers = 4}, "ffn_down"), "Q4_K Q4_K Q4_K Q4_K");
  EXPECT_EQ(types("Q3_K_L", {.layers = 2}, "attn_output"), "Q5_K Q5_K");
  EXPECT_EQ(types("Q2_K", {.layers = 2}, "attn_v"), "Q3_K Q3_K");
  EXPECT_EQ(types("Q2_K", {.layers = 2, .queries_per_key = 4}, "attn_v"), "Q4_K Q4_K");
  EXPECT_EQ(types("Q5_K_S", eight, "ffn_down"), "Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K");
  EXPECT_EQ(types("Q4_0", {.layers = 8, .imatrix = true}, "ffn_down"),
            "Q4_1 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0");
}

TEST(Mixes, TheHeadTheEmbeddingAndExperts) {
  EXPECT_EQ(types("Q4_K_M", {.layers = 1}, "output.weight"), "Q4_K Q6_K");  // attn_output, output
  EXPECT_EQ(types("Q4_K_M", {.layers = 1}, "token_embd"), "Q4_K");
  EXPECT_EQ(types("Q8_0", {.layers = 1}, "output.weight"), "Q8_0 Q8_0");
  EXPECT_EQ(types("F16", {.layers = 1}, "output.weight"), "F16 F16");
  const MixModel eight{.layers = 1, .experts = 8};
  EXPECT_EQ(types("Q4_K_M", eight, "attn_v"), "Q8_0");
  EXPECT_EQ(types("Q4_K_M", eight, "attn_k"), "Q8_0");
  EXPECT_EQ(types("Q4_K_M", eight, "attn_output"), "Q5_K");
  EXPECT_EQ(types("Q4_K_S", {.layers = 6, .large = true}, "attn_v"),
            "Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K");
  // An embedding that is the head has the head's type; rows that do not fit get Q8_0 at once.
  const MixTensor tied[] = {{"token_embd.weight", 512}}, odd[] = {{"token_embd.weight", 288}};
  EXPECT_EQ(mix_types(*find_mix("Q4_K_M"), {}, tied)[0], GgmlType::q6_k);
  EXPECT_EQ(mix_types(*find_mix("Q4_K_M"), {}, odd)[0], GgmlType::q8_0);
}

}  // namespace
}  // namespace bittern
