// evaluate() against transformers' logits (tests/golden/tiny_models.safetensors) and against plain
// formulas in f64 over the logits of a Session.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <stdexcept>

#include "bittern/convert.h"
#include "bittern/device.h"
#include "bittern/eval.h"
#include "core/test_ranks.h"
#include "cpu/dispatch.h"
#include "eval/pieces.h"
#include "eval/row_sums.h"
#include "eval/statistics.h"
#include "formats/safetensors.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

constexpr std::int64_t kVocab = 96;
const SessionOptions kExact{.kv = "f32"};

class Evaluate : public TestFolder {
 protected:
  static const SafetensorsFile& goldens() {
    static const auto file = SafetensorsFile::open(BITTERN_GOLDEN "/tiny_models.safetensors");
    if (!file) throw std::runtime_error(std::string(file.status().message()));
    return *file;
  }
  template <class T>
  static std::vector<T> golden(const std::string& name) {
    const auto bytes = goldens().bytes(*goldens().find(name));
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  // The model's folder, as transformers would have saved it; `change` sees each tensor.
  template <class Change>
  std::string folder(const std::string& model, const std::string& name, const Change& change,
                     std::string config = {}) {
    std::vector<StoredTensor> tensors;
    for (const auto& tensor : goldens().tensors()) {
      if (!tensor.name.starts_with(model + "/")) continue;
      const auto data = goldens().bytes(tensor);
      StoredTensor own{{tensor.name.substr(model.size() + 1), tensor.dtype, tensor.shape},
                       std::string(reinterpret_cast<const char*>(data.data()), data.size())};
      change(own);
      tensors.push_back(std::move(own));
    }
    put_tensors(name + "/model.safetensors", tensors, {{"format", "pt"}});
    for (const auto& [key, text] : goldens().metadata())
      if (key == model && config.empty()) config = text;
    put(name + "/config.json", config);
    return path(name);
  }
  std::string folder(const std::string& model) {
    return folder(model, model, [](StoredTensor&) {});
  }
  static Model load(const std::string& path) {
    auto model = Model::load(path, {.activations = Activations::exact});
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    return *model;
  }
  static EvalResult take(Result<EvalResult> result) {
    if (!result) throw std::runtime_error(std::string(result.status().message()));
    return std::move(*result);
  }
  static EvalResult run(const Model& model, std::span<const std::int32_t> tokens,
                        const EvalOptions& options) {
    const EvalModel one{&model, kExact};
    return take(evaluate({&one, 1}, tokens, options));
  }
  static std::vector<std::int32_t> text(std::size_t count) {
    std::mt19937 random(7);
    std::vector<std::int32_t> tokens(count);
    for (auto& t : tokens) t = static_cast<std::int32_t>(random() % kVocab);
    return tokens;
  }

  // ---- the formulas, once more ----

  using Rows = std::vector<std::vector<double>>;
  static Rows log_softmax(const std::vector<float>& logits) {
    Rows rows;
    for (std::size_t at = 0; at < logits.size(); at += kVocab) {
      const std::vector<double> x(logits.begin() + static_cast<std::ptrdiff_t>(at),
                                  logits.begin() + static_cast<std::ptrdiff_t>(at) + kVocab);
      double sum = 0;
      for (const double v : x) sum += std::exp(v);
      rows.emplace_back();
      for (const double v : x) rows.back().push_back(v - std::log(sum));
    }
    return rows;
  }
  static Rows predictions(const Model& model, std::span<const std::int32_t> tokens) {
    auto session = Session::make(model, kExact);
    std::vector<float> logits(tokens.size() * kVocab);
    const Status status = session->append(
        tokens, view(logits.data(), {static_cast<std::int64_t>(tokens.size()), kVocab}));
    EXPECT_TRUE(status.ok()) << status.message();
    return log_softmax(logits);
  }
};

TEST_F(Evaluate, DialectsAreTransformers) {
  const Model model = load(folder("llama"));
  const auto tokens = golden<std::int32_t>("llama.tokens");
  const Rows expected = log_softmax(golden<float>("llama.logits"));
  const auto mean = [&](std::size_t first) {  // of what is predicted from `first` on
    double sum = 0;
    for (std::size_t i = first; i + 1 < tokens.size(); ++i)
      sum -= expected[i][static_cast<std::size_t>(tokens[i + 1])];
    return sum / static_cast<double>(tokens.size() - 1 - first);
  };
  const auto context = static_cast<std::int64_t>(tokens.size());
  for (const auto& [dialect, first] : {std::pair(PerplexityDialect::llama, tokens.size() / 2),
                                       std::pair(PerplexityDialect::segments, std::size_t{0}),
                                       std::pair(PerplexityDialect::windows, std::size_t{0})}) {
    const EvalResult result = run(model, tokens, {.dialect = dialect, .context = context});
    EXPECT_NEAR(result.models[0].nll, mean(first), 2e-5);
    EXPECT_NEAR(result.models[0].perplexity, std::exp(mean(first)), 2e-3);
    EXPECT_EQ(result.scored, context - 1 - static_cast<std::int64_t>(first));
    EXPECT_EQ(result.tokens, context);
    EXPECT_EQ(result.pieces, 1);
    EXPECT_GT(result.models[0].error, 0);
    EXPECT_GT(result.models[0].seconds, 0);
  }
}

TEST_F(Evaluate, ScoresTheTokensOfEachDialect) {
  const Model model = load(folder("qwen2"));
  const auto tokens = text(53);
  // Of each piece: where it begins, its length, the first position that predicts a scored token.
  using Pieces = std::vector<std::array<std::size_t, 3>>;
  const auto expect = [&](PerplexityDialect dialect, std::int64_t context, std::int32_t first,
                          const Pieces& pieces) {
    std::vector<double> nll, means;
    for (const auto& [begin, length, from] : pieces) {
      std::vector<std::int32_t> in(tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                                   tokens.begin() + static_cast<std::ptrdiff_t>(begin + length));
      if (first >= 0) in[0] = first;
      const Rows rows = predictions(model, in);
      double sum = 0;
      for (std::size_t i = from; i + 1 < length; ++i) {
        nll.push_back(-rows[i][static_cast<std::size_t>(tokens[begin + i + 1])]);
        sum += nll.back();
      }
      means.push_back(sum / static_cast<double>(length - 1 - from));
    }
    const auto& counted = dialect == PerplexityDialect::segments ? means : nll;
    const double mean =
        std::accumulate(counted.begin(), counted.end(), 0.0) / static_cast<double>(counted.size());
    const EvalResult result =
        run(model, tokens, {.dialect = dialect, .context = context, .first = first});
    EXPECT_NEAR(result.models[0].nll, mean, 1e-5);
    EXPECT_EQ(result.scored, static_cast<std::int64_t>(nll.size()));
    EXPECT_EQ(result.pieces, static_cast<std::int64_t>(pieces.size()));
  };
  expect(PerplexityDialect::llama, 16, -1, {{0, 16, 8}, {16, 16, 8}, {32, 16, 8}});
  expect(PerplexityDialect::llama, 17, 5, {{0, 17, 8}, {17, 17, 8}, {34, 17, 8}});
  expect(PerplexityDialect::llama, 2, -1, [&] {
    Pieces all;
    for (std::size_t i = 0; i + 2 <= tokens.size(); i += 2) all.push_back({i, 2, 0});
    return all;
  }());
  expect(PerplexityDialect::segments, 16, 9, {{0, 16, 0}, {16, 16, 0}, {32, 16, 0}});
  expect(PerplexityDialect::windows, 16, -1,
         {{0, 16, 0}, {8, 16, 7}, {16, 16, 7}, {24, 16, 7}, {32, 16, 7}, {37, 16, 10}});
  expect(PerplexityDialect::windows, 100, -1, {{0, 53, 0}});
}

// A session is used again for every piece: windows, states and experts start anew.
TEST_F(Evaluate, PiecesOfEveryArchitectureAreApart) {
  for (const char* name : {"llama3", "mistral", "mixtral", "qwen2_moe", "qwen3", "gemma2", "gemma3",
                           "phi3", "olmo2", "smollm3", "qwen3_next", "qwen3_5_text"}) {
    SCOPED_TRACE(name);
    const Model model = load(folder(name));
    const auto tokens = golden<std::int32_t>(std::string(name) + ".tokens");
    double sum = 0;
    for (std::size_t begin = 0; begin < 40; begin += 20) {
      const Rows rows = predictions(model, std::span(tokens).subspan(begin, 20));
      for (std::size_t i = 0; i + 1 < 20; ++i)
        sum -= rows[i][static_cast<std::size_t>(tokens[begin + i + 1])];
    }
    const EvalResult result =
        run(model, tokens, {.dialect = PerplexityDialect::segments, .context = 20});
    EXPECT_NEAR(result.models[0].nll, sum / 38, 1e-5);
  }
}

TEST(Pieces, CoverEveryTokenOnce) {
  for (const std::int64_t context : {2, 3, 4, 7, 16, 64}) {
    for (std::int64_t tokens = 2; tokens < 70; ++tokens) {
      const auto pieces =
          cut_pieces(tokens, {.dialect = PerplexityDialect::windows, .context = context});
      ASSERT_TRUE(pieces);
      std::int64_t next = 1;
      for (const Piece& piece : *pieces) {
        EXPECT_LE(piece.length, context);
        EXPECT_LE(piece.begin + piece.length, tokens);
        EXPECT_GE(piece.begin, 0);
        EXPECT_EQ(piece.begin + piece.from + 1, next);
        // After at least half a context, where there is one.
        EXPECT_GE(piece.from + 1, std::min(next, context / 2));
        next += piece.scored();
      }
      EXPECT_EQ(next, tokens);
    }
  }
  const auto two = cut_pieces(70, {.context = 16, .pieces = 2});
  EXPECT_EQ(two->size(), 2u);
}

TEST_F(Evaluate, DivergenceIsThatOfTheFormula) {
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(40);
  const EvalOptions options{.dialect = PerplexityDialect::segments, .context = 20, .layers = true};
  const EvalModel models[] = {{&student, kExact}, {&teacher, kExact}};
  const EvalResult result = take(evaluate(models, tokens, options, EvalModel{&teacher, kExact}));

  std::vector<double> kl, dp;
  double same1 = 0, same5 = 0;
  std::array<double, kEvalParts> sums{}, counts{};
  for (std::size_t begin = 0; begin < 40; begin += 20) {
    const auto in = std::span(tokens).subspan(begin, 20);
    const Rows p = predictions(teacher, in), q = predictions(student, in);
    for (std::size_t i = 0; i + 1 < 20; ++i) {
      double sum = 0;
      for (std::size_t v = 0; v < kVocab; ++v) sum += std::exp(p[i][v]) * (p[i][v] - q[i][v]);
      kl.push_back(sum);
      const auto right = static_cast<std::size_t>(in[i + 1]);
      dp.push_back(std::exp(q[i][right]) - std::exp(p[i][right]));
      const auto five = [](const std::vector<double>& row) {
        std::vector<int> order(row.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int a, int b) {
          return row[static_cast<std::size_t>(a)] > row[static_cast<std::size_t>(b)];
        });
        order.resize(5);
        return order;
      };
      auto a = five(p[i]), b = five(q[i]);
      same1 += a[0] == b[0];
      std::sort(a.begin(), a.end());
      std::sort(b.begin(), b.end());
      same5 += a == b;
      sums[i * kEvalParts / 20] += sum;
      counts[i * kEvalParts / 20] += 1;
    }
  }
  const Divergence& d = result.models[0].divergence;
  const double n = static_cast<double>(kl.size());
  const double mean = std::accumulate(kl.begin(), kl.end(), 0.0) / n;
  EXPECT_NEAR(d.kl.mean, mean, 2e-5);
  double squares = 0, dps = 0;
  for (const double x : kl) squares += (x - mean) * (x - mean);
  for (const double x : dp) dps += x * x;
  EXPECT_NEAR(d.kl.error, std::sqrt(squares / (n - 1) / n), 2e-5);
  EXPECT_NEAR(d.rms_dp, std::sqrt(dps / n), 1e-5);
  EXPECT_NEAR(d.top1, same1 / n, 1e-12);
  EXPECT_NEAR(d.top5, same5 / n, 1e-12);
  EXPECT_FALSE(d.lower_bound);
  std::sort(kl.begin(), kl.end());
  EXPECT_NEAR(d.kl.max, kl.back(), 1e-4);
  EXPECT_NEAR(d.kl.median, (kl[18] + kl[19]) / 2, 1e-4);
  ASSERT_EQ(d.by_position.size(), kEvalParts);
  for (std::size_t i = 0; i < kEvalParts; ++i) {
    if (counts[i] == 0) {
      EXPECT_TRUE(std::isnan(d.by_position[i]));
    } else {
      EXPECT_NEAR(d.by_position[i], sums[i] / counts[i], 1e-4);
    }
  }
  ASSERT_EQ(d.histogram.size(), kEvalBins);
  EXPECT_EQ(std::accumulate(d.histogram.begin(), d.histogram.end(), std::uint64_t{0}), kl.size());

  // The teacher as its own student.
  const Divergence& none = result.models[1].divergence;
  EXPECT_EQ(none.kl.max, 0);
  EXPECT_EQ(none.rms_dp, 0);
  EXPECT_EQ(none.top1, 1);
  EXPECT_EQ(none.top5, 1);
  EXPECT_EQ(none.histogram[0], kl.size());
  EXPECT_EQ(result.models[1].layers, (std::vector<double>{0, 0}));
  EXPECT_EQ(result.models[1].perplexity, result.teacher.perplexity);
}

TEST_F(Evaluate, LayersAreHowFarTheStreamsAre) {
  struct Keeper : Watcher {
    std::vector<std::vector<float>> streams{2};
    void layer(std::int64_t index, const ConstView& stream) override {
      auto& to = streams[static_cast<std::size_t>(index)];
      to.insert(to.end(), stream.as<float>(), stream.as<float>() + stream.shape.numel());
    }
  };
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(32);
  std::vector<double> expected(2);
  for (std::size_t begin = 0; begin < 32; begin += 16) {
    Keeper kept[2];
    for (int i = 0; i < 2; ++i) {
      const Model& model = i == 0 ? student : teacher;
      auto session = Session::make(model, kExact);
      std::vector<float> hidden(16 * 64);
      const SessionTokens step{&*session, std::span(tokens).subspan(begin, 16)};
      ASSERT_TRUE(model.hidden({&step, 1}, view(hidden.data(), {16, 64}), &kept[i]).ok());
    }
    for (std::size_t layer = 0; layer < 2; ++layer)
      for (std::size_t r = 8; r < 15; ++r) {
        double off = 0, all = 0;
        for (std::size_t i = r * 64; i < (r + 1) * 64; ++i) {
          const double t = kept[1].streams[layer][i], d = kept[0].streams[layer][i] - t;
          off += d * d;
          all += t * t;
        }
        expected[layer] += off / all / 14;
      }
  }
  const EvalModel one{&student, kExact};
  const EvalResult result = take(
      evaluate({&one, 1}, tokens, {.context = 16, .layers = true}, EvalModel{&teacher, kExact}));
  ASSERT_EQ(result.models[0].layers.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(result.models[0].layers[i], expected[i], 1e-9 * expected[i]);
}

TEST_F(Evaluate, ThreadsAndTargetsChangeNoBit) {
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(64);
  const EvalModel one{&student, {}};
  const auto once = [&] {
    return take(evaluate({&one, 1}, tokens, {.context = 32, .layers = true}, EvalModel{&teacher}));
  };
  const EvalResult first = once();
  const auto same = [&](const EvalResult& other) {
    EXPECT_EQ(other.models[0].nll, first.models[0].nll);
    EXPECT_EQ(other.models[0].divergence.kl.mean, first.models[0].divergence.kl.mean);
    EXPECT_EQ(other.models[0].divergence.kl.max, first.models[0].divergence.kl.max);
    EXPECT_EQ(other.models[0].layers, first.models[0].layers);
  };
  const int before = num_threads();
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    same(once());
  }
  set_num_threads(before);
  for (const cpu::Isa isa : cpu::available_isas()) {
    cpu::force_isa(isa);
    same(once());
  }
  cpu::force_isa(cpu::Isa::none);
}

// Seven pieces, the last of which is shorter, for up to four processes.
TEST_F(Evaluate, ProcessesChangeNoBit) {
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(60);
  const EvalModel models[] = {{&student, {}}, {&teacher, {}}};
  EvalOptions options{.dialect = PerplexityDialect::windows, .context = 16, .layers = true};
  const EvalModel judge{&teacher, kExact};
  const EvalResult first = take(evaluate(models, tokens, options, judge));
  ASSERT_EQ(first.pieces, 7);
  ASSERT_TRUE(write_targets(path("whole"), judge, tokens, options, {.top = 5}).ok());
  const std::string whole = text_of("whole");
  options.layers = false;
  const auto read = TeacherTargets::open(path("whole"));
  const EvalResult bound = take(evaluate(models, tokens, options, *read));
  const auto same = [](const ModelScore& a, const ModelScore& b) {
    EXPECT_EQ(a.nll, b.nll);
    EXPECT_EQ(a.error, b.error);
    EXPECT_EQ(a.layers, b.layers);
    const Divergence &c = a.divergence, &d = b.divergence;
    EXPECT_EQ(c.kl.mean, d.kl.mean);
    EXPECT_EQ(c.kl.error, d.kl.error);
    EXPECT_EQ(c.kl.p90, d.kl.p90);
    EXPECT_EQ(c.rms_dp, d.rms_dp);
    EXPECT_EQ(c.top1, d.top1);
    EXPECT_EQ(c.top5, d.top5);
    EXPECT_EQ(c.lower_bound, d.lower_bound);
    EXPECT_EQ(c.histogram, d.histogram);
  };
  const int before = num_threads();
  set_num_threads(1);
  for (const int count : {1, 2, 3, 4, 9}) {
    SCOPED_TRACE(count);
    ThreadRanks::run(count, [&](Ranks& ranks) {
      EvalOptions own = options;
      own.ranks = &ranks;
      own.layers = true;
      std::int64_t done = 0, total = 0;
      own.progress = [&](const EvalProgress& state) {
        EXPECT_GE(state.done, done);
        done = state.done;
        total = state.total;
        return true;
      };
      const EvalResult result = take(evaluate(models, tokens, own, judge));
      for (std::size_t i = 0; i < 2; ++i) same(result.models[i], first.models[i]);
      same(result.teacher, first.teacher);
      EXPECT_EQ(result.scored, first.scored);
      EXPECT_LE(done, total);
      EXPECT_GT(result.models[0].seconds, 0);
      own.layers = false;
      own.progress = {};
      ASSERT_TRUE(write_targets(path("shared"), judge, tokens, own, {.top = 5}).ok());
      const auto targets = TeacherTargets::open(path("shared"));
      ASSERT_TRUE(targets) << targets.status().message();
      const EvalResult other = take(evaluate(models, tokens, own, *targets));
      for (std::size_t i = 0; i < 2; ++i) same(other.models[i], bound.models[i]);
      same(other.teacher, bound.teacher);
    });
    EXPECT_EQ(text_of("shared"), whole);
    std::filesystem::remove(path("shared"));
  }
  set_num_threads(before);
}

TEST_F(Evaluate, OneProcessThatStopsOrFailsEndsAll) {
  const Model model = load(folder("llama"));
  const auto tokens = text(64);
  const EvalModel one{&model, kExact};
  ThreadRanks::run(3, [&](Ranks& ranks) {
    EvalOptions options{.context = 16, .ranks = &ranks};
    options.progress = [&](const EvalProgress&) { return ranks.rank() != 1; };
    EXPECT_EQ(evaluate({&one, 1}, tokens, options).status().code(), Code::cancelled);
  });
  ThreadRanks::run(3, [&](Ranks& ranks) {
    const EvalModel own = ranks.rank() == 2 ? EvalModel{} : one;
    EXPECT_EQ(evaluate({&own, 1}, tokens, {.context = 16, .ranks = &ranks}).status().message(),
              "models[0]: null, expected a model");
  });
  put("taken", "no targets");
  ThreadRanks::run(2, [&](Ranks& ranks) {
    EXPECT_NE(write_targets(path("taken"), one, tokens, {.context = 16, .ranks = &ranks})
                  .message()
                  .find("exists"),
              std::string_view::npos);
  });
}

TEST(RowSums, AreTheSameWithAndWithoutSimd) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(-20, 15);
  for (const std::int64_t count : {1, 7, 8, 15, 16, 17, 33, 96, 1000, 1023}) {
    std::vector<float> p(static_cast<std::size_t>(count)), q = p;
    for (auto& x : p) x = std::min(normal(random), 0.0f);
    for (auto& x : q) x = std::min(normal(random), 0.0f);
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      EXPECT_EQ(kl_of_row(p.data(), q.data(), count), kl_of_row_ref(p.data(), q.data(), count));
      EXPECT_EQ(mass_of_row(p.data(), count), mass_of_row_ref(p.data(), count));
    }
    double sum = 0;
    for (const float x : p) sum += std::exp(double{x});
    EXPECT_NEAR(mass_of_row(p.data(), count), sum, 1e-6 * sum);
    p[0] = -INFINITY;
    EXPECT_EQ(mass_of_row(p.data(), count), mass_of_row_ref(p.data(), count));
  }
  cpu::force_isa(cpu::Isa::none);
}

TEST(FindLargest, IsTheBeginningOfASort) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<float> row(1 + random() % 200);
    for (auto& x : row) x = static_cast<float>(random() % 12);  // with ties
    std::vector<std::int32_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return row[static_cast<std::size_t>(a)] > row[static_cast<std::size_t>(b)];
    });
    std::vector<std::int32_t> found(1 + random() % row.size());
    find_largest(row.data(), static_cast<std::int64_t>(row.size()), found);
    order.resize(found.size());
    EXPECT_EQ(found, order);
  }
}

// ---- a teacher's targets in a file ----

TEST_F(Evaluate, TargetsOfAllTokensGiveTheSameKl) {
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(70);
  const EvalModel one{&student, kExact}, judge{&teacher, kExact};
  const EvalOptions options{.context = 32, .first = 3};
  const EvalResult exact = take(evaluate({&one, 1}, tokens, options, judge));
  const Divergence& d = exact.models[0].divergence;
  double before = 0;
  for (const std::int64_t top : {5, 20, 95, 96, 1000}) {
    const std::string file = path("targets" + std::to_string(top));
    const Status written =
        write_targets(file, judge, tokens, options, {.top = top, .teacher = "llama"});
    ASSERT_TRUE(written.ok()) << written.message();
    const auto targets = TeacherTargets::open(file);
    ASSERT_TRUE(targets) << targets.status().message();
    EXPECT_EQ(targets->teacher(), "llama");
    EXPECT_EQ(targets->top(), std::min(top, kVocab));
    const EvalResult result = take(evaluate({&one, 1}, tokens, options, *targets));
    const Divergence& own = result.models[0].divergence;
    EXPECT_EQ(own.lower_bound, top < kVocab);
    EXPECT_LE(own.kl.mean, d.kl.mean + 1e-6);
    EXPECT_GE(own.kl.mean, before - 1e-6);  // more tokens, nearer to it
    before = own.kl.mean;
    // A tail of one token is that token.
    if (top >= kVocab - 1) {
      EXPECT_NEAR(own.kl.mean, d.kl.mean, 2e-6);
    }
    EXPECT_EQ(own.top1, d.top1);
    EXPECT_EQ(own.top5, d.top5);
    EXPECT_EQ(own.rms_dp, d.rms_dp);
    EXPECT_EQ(result.models[0].nll, exact.models[0].nll);
    EXPECT_EQ(result.teacher.nll, exact.teacher.nll);
    EXPECT_EQ(result.teacher.error, exact.teacher.error);
    EXPECT_EQ(result.teacher.seconds, 0);
  }
  EXPECT_GT(before, 0.1);  // models that differ
}

TEST_F(Evaluate, TargetsAreTheTextbookBound) {
  const Model student = load(folder("qwen2")), teacher = load(folder("llama"));
  const auto tokens = text(16);
  const EvalModel one{&student, kExact}, judge{&teacher, kExact};
  const EvalOptions options{.dialect = PerplexityDialect::segments, .context = 16};
  ASSERT_TRUE(write_targets(path("t"), judge, tokens, options, {.top = 7}).ok());
  const Rows p = predictions(teacher, tokens), q = predictions(student, tokens);
  double sum = 0;
  for (std::size_t i = 0; i < 15; ++i) {
    std::vector<std::size_t> order(kVocab);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return p[i][a] > p[i][b]; });
    double p_tail = 0, q_tail = 0;
    for (std::size_t k = 0; k < kVocab; ++k) {
      const std::size_t v = order[k];
      if (k < 7) {
        sum += std::exp(p[i][v]) * (p[i][v] - q[i][v]);
      } else {
        p_tail += std::exp(p[i][v]);
        q_tail += std::exp(q[i][v]);
      }
    }
    sum += p_tail * std::log(p_tail / q_tail);
  }
  const auto targets = TeacherTargets::open(path("t"));
  const EvalResult result = take(evaluate({&one, 1}, tokens, options, *targets));
  EXPECT_NEAR(result.models[0].divergence.kl.mean, sum / 15, 2e-6);
}

TEST_F(Evaluate, TargetsOfSomethingElseAreRefused) {
  const Model teacher = load(folder("llama"));
  const auto tokens = text(70);
  const EvalModel judge{&teacher, kExact};
  const EvalOptions options{.context = 16, .first = 3};
  ASSERT_TRUE(write_targets(path("t"), judge, tokens, options).ok());
  const auto targets = TeacherTargets::open(path("t"));
  ASSERT_TRUE(targets) << targets.status().message();
  EXPECT_TRUE(targets->check(tokens, options).ok());
  const auto refused = [&](std::span<const std::int32_t> other, const EvalOptions& o,
                           const std::string& why) {
    const Status status = evaluate({&judge, 1}, other, o, *targets).status();
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(status.message(), why);
  };
  const std::string t = path("t");
  refused(tokens, {.context = 17, .first = 3}, t + ": made with context 16, expected 17");
  refused(tokens, {.context = 16}, t + ": made with first token 3, expected -1");
  refused(tokens, {.context = 16, .pieces = 2, .first = 3}, t + ": made of 4 pieces, expected 2");
  refused(tokens, {.dialect = PerplexityDialect::windows, .context = 16, .first = 3},
          t + ": made with dialect llama, expected windows");
  refused(std::span(tokens).first(69), options,
          t + ": made of other tokens, expected those of this text");
  refused(tokens, {.context = 16, .first = 3, .layers = true},
          "layers: targets of a file, expected a teacher that runs");

  // Files that are damaged, cut off, or something else.
  const std::string whole = text_of("t");
  const auto broken = [&](const std::string& contents, const std::string& why) {
    put("broken", contents);
    const auto opened = TeacherTargets::open(path("broken"));
    EXPECT_FALSE(opened.ok());
    EXPECT_NE(opened.status().message().find(why), std::string::npos) << opened.status().message();
  };
  broken(whole.substr(0, whole.size() - 100), "broken");
  broken(whole.substr(0, 50), "broken");
  broken("no such thing", "broken");
  broken(text_of("llama/model.safetensors"), "expected a file of a teacher's targets");
  for (const std::size_t at : {whole.size() - 1, whole.size() - 4000}) {
    std::string flipped = whole;
    flipped[at] ^= 4;
    broken(flipped, "damaged");
  }
  std::string version = whole;
  version.replace(version.find("\"bittern.targets\":\"1\""), 21, "\"bittern.targets\":\"2\"");
  broken(version, "version 2, expected 1");
  EXPECT_FALSE(TeacherTargets::open(path("nothing")).ok());
}

TEST_F(Evaluate, TargetsNeedNotBeTrusted) {
  const Model teacher = load(folder("llama"));
  const auto tokens = text(40);
  const EvalModel judge{&teacher, kExact};
  const EvalOptions options{.context = 16};
  ASSERT_TRUE(write_targets(path("t"), judge, tokens, options, {.top = 9}).ok());
  const std::string whole = text_of("t");
  std::mt19937 random(11);
  int opened = 0;
  for (int round = 0; round < 600; ++round) {
    std::string broken = whole;
    // Most of them in the header.
    const std::size_t at = random() % (round % 4 == 0 ? whole.size() : std::size_t{800});
    broken[at] = static_cast<char>(broken[at] ^ (1 << random() % 8));
    if (round % 5 == 0) broken.resize(random() % broken.size());
    put("broken", broken);
    const auto targets = TeacherTargets::open(path("broken"));
    if (!targets) {
      EXPECT_FALSE(targets.status().message().empty());
      continue;
    }
    ++opened;  // such as another name of the teacher
    const auto result = evaluate({&judge, 1}, tokens, options, *targets);
    if (result) {
      EXPECT_LT(result->models[0].divergence.kl.max, 1e-5);
    }
  }
  EXPECT_LT(opened, 300);
}

TEST_F(Evaluate, TargetsReplaceOnlyTargets) {
  const Model teacher = load(folder("llama"));
  const auto tokens = text(40);
  const EvalModel judge{&teacher, kExact};
  const auto write = [&](const std::string& name, bool replace) {
    return write_targets(path(name), judge, tokens, {.context = 16}, {.replace = replace});
  };
  ASSERT_TRUE(write("t", false).ok());
  EXPECT_EQ(write("t", false).message(), path("t") + ": exists, expected a new name");
  EXPECT_TRUE(write("t", true).ok());
  put("mine", "a letter to my mother");
  EXPECT_EQ(write("mine", true).code(), Code::invalid_argument);
  EXPECT_EQ(text_of("mine"), "a letter to my mother");
  EXPECT_FALSE(write("llama", true).ok());  // a folder
  // What a run that was killed left behind is taken over; what it did not is not.
  put("u.partial", text_of("t").substr(0, 3000));
  EXPECT_TRUE(write("u", false).ok());
  put("v.partial", "another letter");
  EXPECT_FALSE(write("v", false).ok());
  EXPECT_EQ(text_of("v.partial"), "another letter");
  EXPECT_EQ(names(), (std::vector<std::string>{"llama", "mine", "t", "u", "v.partial"}));
  EXPECT_FALSE(write("no/such/folder", false).ok());
}

TEST_F(Evaluate, StopsWhenItIsAskedTo) {
  const Model model = load(folder("llama"));
  const auto tokens = text(64);
  const EvalModel one{&model, kExact};
  std::vector<EvalProgress> told;
  EvalOptions options{.context = 16, .progress = [&](const EvalProgress& state) {
                        told.push_back(state);
                        return told.size() < 3;
                      }};
  EXPECT_EQ(evaluate({&one, 1}, tokens, options).status().code(), Code::cancelled);
  EXPECT_EQ(told.size(), 3u);
  EXPECT_EQ(told[2].done, 48);
  EXPECT_EQ(told[2].total, 64);
  EXPECT_EQ(told[0].perplexity, 0);
  EXPECT_GT(told[2].perplexity, 1);
  told.clear();
  EXPECT_EQ(write_targets(path("t"), one, tokens, options).code(), Code::cancelled);
  EXPECT_EQ(names(), std::vector<std::string>{"llama"});  // nothing half-written
}

TEST_F(Evaluate, RefusesWhatItCannotDo) {
  const Model model = load(folder("llama"));
  const EvalModel one{&model, kExact};
  const auto tokens = text(40);
  const auto refused = [&](const Result<EvalResult>& result, const std::string& why) {
    EXPECT_EQ(result.status().code(), Code::invalid_argument);
    EXPECT_EQ(result.status().message(), why);
  };
  refused(evaluate({}, tokens), "models: none, expected at least one");
  const EvalModel null{};
  refused(evaluate({&null, 1}, tokens, {.context = 16}), "models[0]: null, expected a model");
  refused(evaluate({&one, 1}, tokens), "tokens: 40, expected at least 512, the context");
  refused(evaluate({&one, 1}, std::span(tokens).first(0), {.context = 16}),
          "tokens: 0, expected at least 16, the context");
  refused(evaluate({&one, 1}, std::span(tokens).first(1),
                   {.dialect = PerplexityDialect::windows, .context = 16}),
          "tokens: 1, expected at least 2");
  refused(evaluate({&one, 1}, tokens, {.context = 1}), "context: 1, expected 2 or more");
  refused(evaluate({&one, 1}, tokens, {.context = 16, .pieces = -1}),
          "pieces: -1, expected 0 or more");
  refused(
      evaluate({&one, 1}, tokens, {.dialect = static_cast<PerplexityDialect>(7), .context = 16}),
      "dialect: 7, expected llama, segments or windows");
  refused(evaluate({&one, 1}, tokens, {.context = 16, .first = 96}),
          "first: 96, expected -1 to 95");
  refused(evaluate({&one, 1}, tokens, {.context = 16, .first = -2}),
          "first: -2, expected -1 to 95");
  refused(evaluate({&one, 1}, tokens, {.context = 16, .layers = true}),
          "layers: no teacher, expected one that runs");
  const EvalModel kind{&model, {.kv = "f17"}};
  EXPECT_EQ(evaluate({&kind, 1}, tokens, {.context = 16}).status().code(), Code::invalid_argument);
  for (const std::int32_t bad : {-1, 96, INT32_MAX}) {
    auto wrong = tokens;
    wrong[39] = bad;  // beyond the last piece, and yet
    refused(evaluate({&one, 1}, wrong, {.context = 16}),
            "tokens: " + std::to_string(bad) + " at 39, expected 0 to 95");
  }
  EXPECT_EQ(write_targets(path("t"), one, tokens, {.context = 16}, {.top = 4}).message(),
            "top: 4, expected 5 or more");
}

TEST_F(Evaluate, RefusesModelsThatDoNotFit) {
  const Model teacher = load(folder("llama"));
  const auto tokens = text(40);
  // A vocabulary of 90.
  std::string config;
  for (const auto& [key, value] : goldens().metadata())
    if (key == "llama") config = value;
  config.replace(config.find("\"vocab_size\": 96"), 16, "\"vocab_size\": 90");
  const Model fewer = load(folder(
      "llama", "fewer",
      [](StoredTensor& tensor) {
        if (tensor.spec.name != "model.embed_tokens.weight") return;
        tensor.spec.shape[0] = 90;
        tensor.bytes.resize(90 * 64 * 2);
      },
      config));
  const EvalModel models[] = {{&teacher, kExact}, {&fewer, kExact}};
  EXPECT_EQ(evaluate(models, tokens, {.context = 16}).status().message(),
            "models[1]: a vocabulary of 90 tokens, expected 96 as models[0] has");
  EXPECT_EQ(evaluate({models, 1}, tokens, {.context = 16}, models[1]).status().message(),
            "teacher: a vocabulary of 90 tokens, expected 96 as models[0] has");
  ASSERT_TRUE(write_targets(path("t"), models[0], tokens, {.context = 16}).ok());
  const auto targets = TeacherTargets::open(path("t"));
  EXPECT_EQ(evaluate({models + 1, 1}, tokens, {.context = 16}, *targets).status().message(),
            path("t") + ": made with a vocabulary of 96 tokens, expected 90 as models[0] has");
}

TEST_F(Evaluate, SaysThatWeightsAreNotNumbers) {
  const Model sick = load(folder("llama", "sick", [](StoredTensor& tensor) {
    if (tensor.spec.name == "model.layers.1.mlp.down_proj.weight") {
      tensor.bytes[0] = static_cast<char>(0xc0);  // a NaN of bf16
      tensor.bytes[1] = 0x7f;
    }
  }));
  const Model well = load(folder("llama"));
  const auto tokens = text(40);
  const EvalModel models[] = {{&well, kExact}, {&sick, kExact}};
  const std::string why = " is not finite; do its weights hold a NaN or an infinity?";
  for (const auto& [result, name] :
       {std::pair(evaluate(models, tokens, {.context = 16}), "models[1]"),
        std::pair(evaluate({models, 1}, tokens, {.context = 16}, models[1]), "teacher")}) {
    const std::string said(result.status().message());
    EXPECT_EQ(result.status().code(), Code::invalid_argument);
    EXPECT_TRUE(said.starts_with(name) && said.ends_with(why)) << said;
  }
  EXPECT_FALSE(write_targets(path("t"), models[1], tokens, {.context = 16}).ok());
  EXPECT_EQ(names(), (std::vector<std::string>{"llama", "sick"}));
}

}  // namespace
}  // namespace bittern
