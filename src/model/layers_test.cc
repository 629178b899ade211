// A decoder run layer by layer has the bits of a whole pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "formats/test_folder.h"
#include "model/forward.h"
#include "model/test_model.h"

namespace bittern {
namespace {

using LayerByLayer = TestFolder;

TEST_F(LayerByLayer, HasTheBitsOfAWholePass) {
  constexpr std::int64_t kTokens = 20;
  for (const char* name :
       {"llama", "mixtral", "gemma2", "olmo2", "phi3", "qwen3_next", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(name);
    const auto model = Model::load(put_tiny_model(*this, name), {.threads = 1});
    ASSERT_TRUE(model.ok()) << model.status().message();
    const ModelData& data = ModelAccess::data(*model);
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < kTokens; ++i) tokens.push_back(7 * i % 90);
    const std::int64_t width = model->info().hidden;
    std::vector<float> whole(static_cast<std::size_t>(kTokens * width)), stream(whole.size());
    auto first = Session::make(*model, {.context = kTokens});
    auto second = Session::make(*model, {.context = kTokens});
    ASSERT_TRUE(first.ok() && second.ok());
    const SessionTokens step{&*first, tokens};
    ASSERT_TRUE(model->hidden(std::span(&step, 1), view(whole.data(), {kTokens, width})).ok());

    // What is left of an earlier text is forgotten.
    ASSERT_TRUE(second->append(std::span(tokens).first(5)).ok());
    SessionData& session = ModelAccess::data(*second);
    forget_all(session);
    ASSERT_TRUE(session.reserve(kTokens).ok());
    const Segment segment{.session = &session, .tokens = tokens};
    ASSERT_TRUE(embed_pass(data, segment, stream.data()).ok());
    for (std::int64_t layer = 0; layer < model->info().layers; ++layer)
      ASSERT_TRUE(layer_pass(data, segment, layer, stream.data(), nullptr).ok());
    ASSERT_TRUE(norm_pass(data, segment, stream.data()).ok());
    EXPECT_EQ(std::memcmp(whole.data(), stream.data(), whole.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace bittern
