// The gradients of a decoder's loss, for every kind of layer, against differences of the loss
// itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bittern/convert.h"
#include "bittern/eval.h"
#include "distill/kl_pass.h"
#include "distill/learned_grids.h"
#include "eval/targets_file.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class Gradients : public TestFolder {
 protected:
  static constexpr std::int64_t kTokens = 24;

  // A student of a tiny model, 4 bits, embedding and head 8, with scales in f32.
  void make(const std::string& name, bool integer_zeros = false) {
    const std::string model = put_tiny_model(*this, name);
    const auto report = quantize_model(model, path("student"),
                                       {.bits = 4,
                                        .group_size = 32,
                                        .method = "minmax",
                                        .zero_points = integer_zeros ? "integer" : "real",
                                        .rules = {{.match = "embed|lm_head", .bits = 8}},
                                        .scale_dtype = "f32",
                                        .force = true,
                                        .threads = 1});
    if (!report) throw std::runtime_error(std::string(report.status().message()));
    const LoadOptions load{.activations = Activations::exact, .threads = 1, .context = kTokens};
    const auto teacher = Model::load(model, load);
    auto data = load_model_data(path("student"), load);
    const auto source = Checkpoint::open(path("student"));
    if (!teacher || !data || !source) throw std::runtime_error("a model does not load");
    auto grids = LearnedGrids::make(*data, *source, /*codes_move=*/true, integer_zeros);
    if (!grids) throw std::runtime_error(std::string(grids.status().message()));
    grids_.emplace(std::move(*grids));
    teacher_ = *teacher;
    auto pass = KlPass::make(*teacher, *data, kTokens);
    if (!pass) throw std::runtime_error(std::string(pass.status().message()));
    pass_.emplace(std::move(*pass));
    tokens_.clear();
    for (std::int32_t i = 0; i < kTokens; ++i) tokens_.push_back((3 * i * i + 17 * i + 1) % 90);
    taught_.resize(static_cast<std::size_t>(kTokens * pass_->teacher_width()));
    ASSERT_TRUE(pass_->teach(tokens_, taught_.data()).ok());
  }

  Taught taught() const {
    return targets_ ? Taught{.targets = &*targets_} : Taught{.hidden = taught_.data()};
  }
  double loss() {
    const auto kl = pass_->loss(tokens_, taught());
    if (!kl) throw std::runtime_error(std::string(kl.status().message()));
    return *kl;
  }
  // The same; its gradients are in scales_, biases_ and weights_ then.
  double loss_and_gradients() {
    PieceStreams piece;
    SliceGradients ends(*grids_, grids_->ends());
    const auto kl = pass_->loss(tokens_, taught(), piece, ends);
    if (!kl) throw std::runtime_error(std::string(kl.status().message()));
    scales_.clear(), biases_.clear(), weights_.clear();
    std::vector<std::vector<float>> slices(grids_->slices().size());
    for (std::int64_t i = pass_->layers(); i-- > 0;) {
      const auto layer = static_cast<std::size_t>(i);
      SliceGradients gradients(*grids_, grids_->slices()[layer]);
      EXPECT_TRUE(pass_->layer_backward(i, piece, gradients).ok());
      slices[layer] = gradients.numbers;
    }
    EXPECT_TRUE(pass_->embedding_backward(piece, ends).ok());
    slices.back() = ends.numbers;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      const auto count = grids_->slices()[i].count;
      const auto first = slices[i].begin();
      scales_.insert(scales_.end(), first, first + count);
      biases_.insert(biases_.end(), first + count, first + 2 * count);
      weights_.insert(weights_.end(), first + 2 * count, slices[i].end());
    }
    return *kl;
  }

  void expect_slopes();

  std::optional<Model> teacher_;
  std::optional<LearnedGrids> grids_;
  std::optional<KlPass> pass_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> taught_;
  std::optional<TargetsFile> targets_;
  std::vector<float> scales_, biases_, weights_;
};

// In `make`'s state.
void Gradients::expect_slopes() {
  const double at_start = loss_and_gradients();
  EXPECT_GT(at_start, 1e-3);
  EXPECT_EQ(at_start, loss());
  double all = 0;
  for (const float g : scales_) all = std::max(all, std::fabs(double{g}));
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
        const double d_bias = biases_[j];
        g.push_back(centre ? d_bias : scales_[j] - double{grids_->mean_codes()[j]} * d_bias);
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

  // Those of weights add up to those of biases, to the bit, and of embedding and head there are
  // none.
  std::size_t j = 0;
  for (const LearnedGrids::Tensor& tensor : grids_->tensors()) {
    const std::int64_t group = tensor.part.weights.group_size;
    EXPECT_EQ(tensor.weights, tensor.part.name.starts_with("layers.") ? tensor.count * group : 0);
    for (std::int64_t i = 0; i < tensor.weights / group; ++i) {
      float sum = 0;
      for (std::int64_t k = 0; k < group; ++k) sum += weights_[j++];
      ASSERT_EQ(sum, biases_[static_cast<std::size_t>(tensor.first + i)]) << tensor.part.name;
    }
  }
  EXPECT_EQ(j, weights_.size());
}

TEST_F(Gradients, AreTheSlopesOfTheLoss) {
  for (const char* name :
       {"llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "phi3",
        "olmo2", "smollm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(name);
    make(name);
    expect_slopes();
  }
}

// Of logits that are capped, too.
TEST_F(Gradients, OfATeacherInAFile) {
  for (const char* name : {"llama", "gemma2"}) {
    const EvalOptions how{.dialect = PerplexityDialect::segments, .context = kTokens};
    for (const std::int64_t top : {std::int64_t{8}, std::int64_t{1} << 20}) {
      SCOPED_TRACE(std::string(name) + ", " + std::to_string(top));
      make(name);
      const EvalModel teacher{&*teacher_, {.kv = "f32"}};
      const Status written =
          write_targets(path("targets"), teacher, tokens_, how, {.top = top, .replace = true});
      ASSERT_TRUE(written.ok()) << written.message();
      auto targets = TargetsFile::open(path("targets"));
      ASSERT_TRUE(targets.ok());
      targets_.emplace(std::move(*targets));
      // As eval computes it, from the same file.
      const auto student = Model::load(
          path("student"), {.activations = Activations::exact, .threads = 1, .context = kTokens});
      const auto opened = TeacherTargets::open(path("targets"));
      ASSERT_TRUE(student.ok() && opened.ok());
      const EvalModel model{&*student, {.kv = "f32"}};
      const auto judged = evaluate(std::span(&model, 1), tokens_, how, *opened);
      ASSERT_TRUE(judged.ok()) << judged.status().message();
      const double kl = judged->models[0].divergence.kl.mean;
      EXPECT_NEAR(loss(), kl, 1e-5 * kl);
      expect_slopes();
      targets_.reset();
    }
  }
}

// w = s (q - z): the gradient of s is d_scale - z d_bias, and no bias moves without it.
TEST_F(Gradients, OfScalesWithIntegerZeroPoints) {
  make("llama", /*integer_zeros=*/true);
  loss_and_gradients();
  const std::vector<float> scales(grids_->scales().begin(), grids_->scales().end());
  for (const float centre : grids_->centres()) ASSERT_EQ(centre, 0);
  for (const float zero : grids_->mean_codes()) ASSERT_EQ(zero, std::nearbyint(zero));
  for (const LearnedGrids::Tensor& tensor : grids_->tensors()) {
    SCOPED_TRACE(tensor.part.name);
    const auto first = static_cast<std::size_t>(tensor.first),
               count = static_cast<std::size_t>(tensor.count);
    std::vector<double> g;
    double square = 0;
    for (std::size_t j = first; j < first + count; ++j) {
      g.push_back(double{scales_[j]} - double{grids_->mean_codes()[j]} * double{biases_[j]});
      square += g.back() * g.back();
    }
    const double norm = std::sqrt(square);
    const auto shifted = [&](double step) {
      std::copy(scales.begin(), scales.end(), grids_->scales().begin());
      for (std::size_t i = 0; i < count; ++i)
        grids_->scales()[first + i] += static_cast<float>(step * g[i] / norm);
      EXPECT_TRUE(grids_->store().ok());
      return loss();
    };
    const double step = 0.01 * tensor.unit * std::sqrt(static_cast<double>(count));
    const double wide = (shifted(step) - shifted(-step)) / (2 * step),
                 narrow = (shifted(step / 2) - shifted(-step / 2)) / step;
    EXPECT_NEAR((4 * narrow - wide) / 3, norm, 0.03 * norm + 1e-6 / step);
  }
}

}  // namespace
}  // namespace bittern
