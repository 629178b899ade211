// The gradients of a decoder's loss, for every kind of layer, against differences of the loss
// itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bittern/convert.h"
#include "distill/kl_pass.h"
#include "distill/learned_grids.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class Gradients : public TestFolder {
 protected:
  static constexpr std::int64_t kTokens = 24;

  // A student of a tiny model, 4 bits with scales in f32.
  void make(const std::string& name) {
    const std::string model = put_tiny_model(*this, name);
    const auto report = quantize_model(model, path("student"),
                                       {.bits = 4,
                                        .group_size = 32,
                                        .method = "minmax",
                                        .rules = {{.match = "embed|lm_head", .keep = true}},
                                        .scale_dtype = "f32",
                                        .force = true,
                                        .threads = 1});
    if (!report) throw std::runtime_error(std::string(report.status().message()));
    const LoadOptions load{.activations = Activations::exact, .threads = 1, .context = kTokens};
    const auto teacher = Model::load(model, load);
    auto data = load_model_data(path("student"), load);
    const auto source = Checkpoint::open(path("student"));
    if (!teacher || !data || !source) throw std::runtime_error("a model does not load");
    auto grids = LearnedGrids::make(*data, *source);
    if (!grids) throw std::runtime_error(std::string(grids.status().message()));
    grids_.emplace(std::move(*grids));
    auto pass = KlPass::make(*teacher, *data, kTokens);
    if (!pass) throw std::runtime_error(std::string(pass.status().message()));
    pass_.emplace(std::move(*pass));
    tokens_.clear();
    for (std::int32_t i = 0; i < kTokens; ++i) tokens_.push_back((3 * i * i + 17 * i + 1) % 90);
    taught_.resize(static_cast<std::size_t>(kTokens * pass_->teacher_width()));
    ASSERT_TRUE(pass_->teach(tokens_, taught_.data()).ok());
  }

  double loss(GradientSink* sink = nullptr) {
    const auto kl = pass_->loss(tokens_, taught_.data(), sink);
    if (!kl) throw std::runtime_error(std::string(kl.status().message()));
    return *kl;
  }

  std::optional<LearnedGrids> grids_;
  std::optional<KlPass> pass_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> taught_;
};

TEST_F(Gradients, AreTheSlopesOfTheLoss) {
  for (const char* name :
       {"llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "phi3",
        "olmo2", "smollm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(name);
    make(name);
    GridGradients gradients(*grids_);
    const double at_start = loss(&gradients);
    EXPECT_GT(at_start, 1e-3);
    EXPECT_EQ(at_start, loss());
    double all = 0;
    for (const float g : gradients.scales) all = std::max(all, std::fabs(double{g}));
    const std::vector<float> scales(grids_->scales().begin(), grids_->scales().end());
    const std::vector<float> centres(grids_->centres().begin(), grids_->centres().end());
    for (const LearnedGrids::Tensor& tensor : grids_->tensors()) {
      SCOPED_TRACE(tensor.part.name + " from row " + std::to_string(tensor.part.first));
      for (const bool centre : {false, true}) {
        // Along the gradient the slope is |g|.
        std::vector<double> g;
        double square = 0;
        for (std::int64_t i = tensor.first; i < tensor.first + tensor.count; ++i) {
          const auto j = static_cast<std::size_t>(i);
          const double d_bias = gradients.biases[j];
          g.push_back(centre ? d_bias
                             : gradients.scales[j] - double{grids_->mean_codes()[j]} * d_bias);
          square += g.back() * g.back();
        }
        if (square == 0) continue;  // an expert that no token uses
        const double norm = std::sqrt(square);
        const auto shifted = [&](double step) {
          std::copy(scales.begin(), scales.end(), grids_->scales().begin());
          std::copy(centres.begin(), centres.end(), grids_->centres().begin());
          for (std::size_t i = 0; i < g.size(); ++i) {
            const auto j = static_cast<std::size_t>(tensor.first) + i;
            float& x = centre ? grids_->centres()[j] : grids_->scales()[j];
            x += static_cast<float>(step * g[i] / norm);
          }
          EXPECT_TRUE(grids_->store().ok());
          return loss();
        };
        // The slope from differences of two lengths. A token that changes its experts makes the
        // loss jump, so shorter ones are tried, down to where the loss' rounding shows.
        double slope = 0, step = 0.02 * tensor.unit * std::sqrt(static_cast<double>(tensor.count));
        const auto near = [&] { return std::fabs(slope - norm) <= 0.02 * norm + 1e-6 / step; };
        for (int i = 0; i < 4 && !near(); ++i, step /= 5) {
          const double wide = (shifted(step) - shifted(-step)) / (2 * step),
                       narrow = (shifted(step / 2) - shifted(-step / 2)) / step;
          slope = (4 * narrow - wide) / 3;
          if (near()) break;
        }
        EXPECT_TRUE(near()) << (centre ? "centres " : "scales ") << slope << " of " << norm;
      }
    }
    std::copy(scales.begin(), scales.end(), grids_->scales().begin());
    std::copy(centres.begin(), centres.end(), grids_->centres().begin());
    ASSERT_TRUE(grids_->store().ok());
    EXPECT_NEAR(loss(), at_start, 1e-5);
  }
}

}  // namespace
}  // namespace bittern
