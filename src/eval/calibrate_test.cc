// Sums of squares against plain f64 sums: of inputs that follow from the weights alone, and of all
// rows that a watcher sees; from every kind of file, on any number of threads.
#include "bittern/calibrate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

#include "bittern/convert.h"
#include "convert/importance.h"
#include "core/numerics.h"
#include "formats/gguf.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

const std::vector<std::string> kGoldenModels = {
    "llama",   "llama3",     "mistral",      "mixtral",         "qwen2", "qwen2_moe",
    "qwen3",   "qwen3_moe",  "gemma2",       "gemma3",          "phi3",  "olmo2",
    "smollm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"};

class GoldenModels : public TestFolder {
 protected:
  std::string folder(const std::string& model) { return put_tiny_model(*this, model); }
  template <class T>
  static std::vector<T> golden(const std::string& name) {
    const auto* tensor = tiny_models().find(name);
    EXPECT_NE(tensor, nullptr) << name;
    const auto bytes = tiny_models().bytes(*tensor);
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  static Model load(const std::string& path, const LoadOptions& options = {}) {
    auto model = Model::load(path, options);
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    return *model;
  }
};

using Entries = std::map<std::string, MatrixInputs>;

class Calibrate : public GoldenModels {
 protected:
  static Result<Calibration> calibrated(const Model& model, const std::string& name,
                                        const CalibrateOptions& options = {.context = 20}) {
    return calibrate(model, golden<std::int32_t>(name + ".tokens"), options);
  }
  static Entries entries_of(const Model& model, const std::string& name,
                            const CalibrateOptions& options = {.context = 20}) {
    const auto result = calibrated(model, name, options);
    if (!result) throw std::runtime_error(std::string(result.status().message()));
    Entries entries;
    for (const MatrixInputs& inputs : result->matrices) {
      EXPECT_EQ(inputs.squares.size(),
                inputs.rows.size() * static_cast<std::size_t>(inputs.columns));
      EXPECT_TRUE(entries.emplace(inputs.name, inputs).second) << inputs.name;
    }
    return entries;
  }
  static Model exact(const std::string& path, int threads = 0) {
    return load(path, {.activations = Activations::exact, .threads = threads});
  }
  static std::vector<double> numbers(const std::string& name) {
    std::vector<double> values;
    for (const bf16 x : golden<bf16>(name)) values.push_back(to_f32(x));
    return values;
  }
  // The file of the same numbers in another format; empty where there can be none.
  std::string converted(const std::string& name, const std::string& format) {
    const std::string out = path(name + "-" + format + (format == "gguf" ? ".gguf" : ""));
    QuantizeOptions options;
    options.format = format;
    options.dtype = "f32";
    const auto report = quantize_model(folder(name), out, options);
    if (report) return out;
    EXPECT_EQ(report.status().code(), Code::unsupported) << report.status().message();
    return {};
  }
  static void expect_near(const Entries& a, const Entries& b) {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, inputs] : a) {
      ASSERT_TRUE(b.contains(name)) << name;
      const MatrixInputs& other = b.at(name);
      EXPECT_EQ(inputs.rows, other.rows) << name;
      ASSERT_EQ(inputs.squares.size(), other.squares.size()) << name;
      for (std::size_t i = 0; i < inputs.squares.size(); ++i)
        ASSERT_NEAR(inputs.squares[i], other.squares[i], 1e-4 * inputs.squares[i] + 1e-9)
            << name << " " << i;
    }
  }
};

class CalibrateEach : public Calibrate, public testing::WithParamInterface<std::string> {};

// Keeps all rows that enter products.
class Recorder : public Watcher {
 public:
  using Key = std::tuple<std::int64_t, ProductPlace, std::int64_t, bool>;
  void product(const ProductInput& input) override {
    auto& rows = seen[{input.layer, input.place, input.expert, input.shared}];
    for (std::int64_t r = 0; r < input.x.shape[0]; ++r) {
      const float* const row = input.x.as<float>() + r * input.x.stride[0];
      rows.emplace_back(row, row + input.x.shape[1]);
    }
  }
  std::map<Key, std::vector<std::vector<float>>> seen;
};

TEST_F(Calibrate, TheFirstInputsAreNormedEmbeddings) {
  for (const auto& [name, scale, offset] :
       {std::tuple{"llama", 1.0, 0.0}, std::tuple{"gemma3", 8.0, 1.0},
        std::tuple{"qwen3_moe", 1.0, 0.0}}) {
    SCOPED_TRACE(name);
    const std::string model = name;
    const auto entries = entries_of(exact(folder(model)), model, {.context = 40});
    const auto embedding = numbers(model + "/model.embed_tokens.weight");
    const auto weight = numbers(model + "/model.layers.0.input_layernorm.weight");
    const std::size_t hidden = weight.size();
    std::vector<double> sums(hidden);
    for (const std::int32_t token : golden<std::int32_t>(model + ".tokens")) {
      const double* const row = embedding.data() + static_cast<std::size_t>(token) * hidden;
      double square = 0;
      for (std::size_t j = 0; j < hidden; ++j) square += scale * scale * row[j] * row[j];
      const double factor = 1 / (square / static_cast<double>(hidden) + 1e-6);
      for (std::size_t j = 0; j < hidden; ++j)
        sums[j] += std::pow(scale * row[j] * (weight[j] + offset), 2) * factor;
    }
    for (const char* part : {"q", "k", "v"}) {
      const MatrixInputs& inputs = entries.at(std::string("blk.0.attn_") + part + ".weight");
      EXPECT_EQ(inputs.rows, std::vector<std::uint64_t>{40});
      ASSERT_EQ(inputs.squares.size(), hidden);
      for (std::size_t j = 0; j < hidden; ++j)
        EXPECT_NEAR(inputs.squares[j], sums[j], 1e-5 * sums[j]) << part << j;
    }
  }
}

TEST_P(CalibrateEach, SumsAreThoseOfTheRowsThatEnterProducts) {
  const std::string name = GetParam();
  const Model model = exact(folder(name));
  const auto tokens = golden<std::int32_t>(name + ".tokens");
  const auto entries = entries_of(model, name);
  Recorder recorder;
  std::vector<std::vector<float>> last;
  for (std::size_t first = 0; first < tokens.size(); first += 20) {
    auto session = Session::make(model, {.kv = "f32"});
    ASSERT_TRUE(session);
    const std::int64_t hidden = model.info().hidden;
    std::vector<float> out(static_cast<std::size_t>(20 * hidden));
    const SessionTokens step{&*session, std::span(tokens).subspan(first, 20)};
    ASSERT_TRUE(model.hidden(std::span(&step, 1), view(out.data(), {20, hidden}), &recorder).ok());
    for (std::int64_t r = 0; r < 20; ++r)
      last.emplace_back(out.begin() + r * hidden, out.begin() + (r + 1) * hidden);
  }
  // Value heads of qwen3_5 have another order in GGUF: 0 of each key head, then 1 of each.
  const bool tiled = name.starts_with("qwen3_5");
  std::size_t compared = 0;
  const auto expect_sums = [&](const std::string& tensor,
                               const std::vector<std::vector<float>>& rows,
                               std::size_t matrix = 0) {
    const auto found = entries.find(tensor);
    if (found == entries.end()) return;
    ++compared;
    const auto columns = static_cast<std::size_t>(found->second.columns);
    EXPECT_EQ(found->second.rows.at(matrix), rows.size()) << tensor;
    for (std::size_t j = 0; j < columns; ++j) {
      std::size_t from = j;
      if (tiled && tensor.ends_with("ssm_out.weight"))
        from = (j / 32 % 2 * 2 + j / 64) * 32 + j % 32;
      double sum = 0;
      for (const auto& row : rows) sum += double{row.at(from)} * row.at(from);
      ASSERT_EQ(found->second.squares[matrix * columns + j], sum) << tensor << " " << j;
    }
  };
  for (const auto& [key, rows] : recorder.seen) {
    const auto [layer, place, expert, shared] = key;
    const std::string at = "blk." + std::to_string(layer) + ".";
    const auto matrix = static_cast<std::size_t>(std::max<std::int64_t>(expert, 0));
    const std::string kind = expert >= 0 ? "_exps" : shared ? "_shexp" : "";
    switch (place) {
      case ProductPlace::mixer_in:
        for (const char* part : {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "ssm_ba",
                                 "ssm_alpha", "ssm_beta"})
          expect_sums(at + part + ".weight", rows);
        break;
      case ProductPlace::mixer_out:
        for (const char* part : {"attn_output", "ssm_out"})
          expect_sums(at + part + ".weight", rows);
        break;
      case ProductPlace::mlp_in:
        for (const char* part : {"ffn_gate", "ffn_up"})
          expect_sums(at + part + kind + ".weight", rows, matrix);
        if (expert < 0 && !shared) expect_sums(at + "ffn_gate_inp.weight", rows);
        break;
      case ProductPlace::mlp_down: expect_sums(at + "ffn_down" + kind + ".weight", rows, matrix);
    }
  }
  expect_sums("output.weight", last);
  // Experts without any token are in no row.
  std::size_t all = 0;
  for (const auto& [tensor, inputs] : entries)
    all += inputs.rows.size() - static_cast<std::size_t>(std::count(
                                    inputs.rows.begin(), inputs.rows.end(), std::uint64_t{0}));
  EXPECT_EQ(compared, all);
}

TEST_P(CalibrateEach, HasAllMatricesOfAGgufFile) {
  const std::string name = GetParam(), gguf = converted(name, "gguf");
  if (gguf.empty()) GTEST_SKIP();
  const auto from_folder = entries_of(exact(folder(name)), name);
  const auto from_gguf = entries_of(exact(gguf), name);
  const auto file = GgufFile::open(gguf);
  ASSERT_TRUE(file);
  std::set<std::string> expected, found;
  for (const GgufTensor& tensor : file->tensors()) {
    const std::string tensor_name(tensor.name);
    if (tensor.shape.rank > 1 && !tensor_name.starts_with("token_embd") &&
        tensor_name.find("conv1d") == tensor_name.npos)
      expected.insert(tensor_name);
  }
  // A copy of a tied embedding.
  if (name == "olmo2" || name == "qwen2_moe")
    if (!from_folder.contains("output.weight")) expected.erase("output.weight");
  for (const auto& [tensor, inputs] : from_folder) found.insert(tensor);
  EXPECT_EQ(found, expected);
  for (const auto& [tensor, inputs] : from_folder) {
    const GgufTensor* const other = file->tensor(tensor);
    ASSERT_NE(other, nullptr);
    EXPECT_EQ(inputs.columns, other->shape[other->shape.rank - 1]) << tensor;
    std::uint64_t rows = 0;
    for (const std::uint64_t n : inputs.rows) rows += n;
    EXPECT_EQ(rows, tensor.find("_exps") == tensor.npos ? 40u : 80u) << tensor;
  }
  expect_near(from_folder, from_gguf);
}

TEST_P(CalibrateEach, TheSameFromMlx) {
  const std::string name = GetParam(), mlx = converted(name, "mlx");
  if (mlx.empty()) GTEST_SKIP();
  expect_near(entries_of(exact(folder(name)), name), entries_of(exact(mlx), name));
}

TEST_P(CalibrateEach, ThreadsChangeNoBit) {
  const std::string name = GetParam(), source = folder(name);
  const auto one = entries_of(exact(source, 1), name);
  for (const int threads : {2, 3, 7}) {
    const auto many = entries_of(exact(source, threads), name);
    ASSERT_EQ(one.size(), many.size());
    for (const auto& [tensor, inputs] : one) {
      EXPECT_EQ(inputs.squares, many.at(tensor).squares) << tensor << ", " << threads;
      EXPECT_EQ(inputs.rows, many.at(tensor).rows) << tensor << ", " << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, CalibrateEach, testing::ValuesIn(kGoldenModels),
                         [](const auto& i) { return i.param; });

TEST_F(Calibrate, PiecesBeginAnew) {
  const Model model = exact(folder("llama"));
  auto tokens = golden<std::int32_t>("llama.tokens");
  const auto first = calibrate(model, std::span(tokens).first(15), {.context = 15});
  const auto limited = calibrate(model, tokens, {.context = 15, .pieces = 1});
  const auto both = calibrate(model, tokens, {.context = 15});
  ASSERT_TRUE(first && limited && both);
  EXPECT_EQ(both->pieces, 2);  // the last 10 tokens are no piece
  EXPECT_EQ(both->tokens, 30);
  EXPECT_EQ(limited->tokens, 15);
  std::rotate(tokens.begin(), tokens.begin() + 15, tokens.end());
  const auto second = calibrate(model, tokens, {.context = 15, .pieces = 1});
  ASSERT_TRUE(second);
  for (std::size_t i = 0; i < both->matrices.size(); ++i) {
    EXPECT_EQ(first->matrices[i].squares, limited->matrices[i].squares);
    for (std::size_t j = 0; j < both->matrices[i].squares.size(); ++j) {
      const double sum = first->matrices[i].squares[j] + second->matrices[i].squares[j];
      ASSERT_NEAR(both->matrices[i].squares[j], sum, 1e-12 * sum);
    }
  }
  // Another first token.
  std::rotate(tokens.begin(), tokens.end() - 15, tokens.end());
  const auto begun = calibrate(model, tokens, {.context = 15, .pieces = 1, .first = 1});
  tokens[0] = 1;
  const auto written = calibrate(model, tokens, {.context = 15, .pieces = 1});
  ASSERT_TRUE(begun && written);
  EXPECT_EQ(begun->matrices[0].squares, written->matrices[0].squares);
  EXPECT_NE(begun->matrices[0].squares, first->matrices[0].squares);
}

TEST_F(Calibrate, Refuses) {
  const Model model = exact(folder("llama"));
  const auto tokens = golden<std::int32_t>("llama.tokens");
  const auto message = [&](std::span<const std::int32_t> in, const CalibrateOptions& options) {
    const auto result = calibrate(model, in, options);
    return result ? std::string() : std::string(result.status().message());
  };
  EXPECT_EQ(message(tokens, {.context = 0}), "context: 0, expected 1 or more");
  EXPECT_EQ(message(tokens, {.pieces = -1}), "pieces: -1, expected 0 or more");
  EXPECT_EQ(message(tokens, {.context = 41}),
            "tokens: 40, expected at least 41, a context of them");
  EXPECT_EQ(message({}, {.context = 1}), "tokens: 0, expected at least 1, a context of them");
  const std::vector<std::int32_t> strange(8, 96);
  EXPECT_EQ(message(strange, {.context = 8}), "tokens: 96 at 0, expected 0 to 95");
  std::vector<std::int64_t> told;
  CalibrateOptions stopped{.context = 10, .progress = [&](const CalibrateProgress& state) {
                             EXPECT_EQ(state.total, 40);
                             told.push_back(state.done);
                             return told.size() < 2;
                           }};
  EXPECT_EQ(message(tokens, stopped), "cancelled by the callback");
  EXPECT_EQ(told, (std::vector<std::int64_t>{10, 20}));
}

TEST_F(Calibrate, TheFileIsReadAgain) {
  const auto result = calibrated(exact(folder("qwen3_5_moe_text")), "qwen3_5_moe_text");
  ASSERT_TRUE(result);
  const std::string out = path("imatrix.gguf");
  ASSERT_TRUE(write_imatrix(*result, out, {.dataset = "text.txt"}).ok());
  const auto gguf = GgufFile::open(out);
  ASSERT_TRUE(gguf);
  EXPECT_EQ(*gguf->string("general.type"), "imatrix");
  EXPECT_EQ(gguf->tensors().size(), 2 * result->matrices.size());
  const auto read = ImportanceMatrix::open(out);
  ASSERT_TRUE(read) << read.status().message();
  for (const MatrixInputs& inputs : result->matrices) {
    const auto matrices = static_cast<std::int64_t>(inputs.rows.size());
    const auto means = read->find(inputs.name, inputs.columns, matrices);
    ASSERT_TRUE(means) << means.status().message();
    ASSERT_EQ(means->size(), inputs.squares.size());
    for (std::size_t i = 0; i < means->size(); ++i) {
      const auto rows = inputs.rows[i / static_cast<std::size_t>(inputs.columns)];
      EXPECT_EQ(
          (*means)[i],
          rows == 0 ? 1.0f : static_cast<float>(inputs.squares[i]) / static_cast<float>(rows));
    }
  }
  // It replaces nothing unless told to.
  const Status again = write_imatrix(*result, out);
  EXPECT_EQ(again.message(), out + ": exists, expected a new name (force replaces it)");
  EXPECT_TRUE(write_imatrix(*result, out, {.force = true}).ok());
  put("notes.txt", "something else");
  EXPECT_FALSE(write_imatrix(*result, path("notes.txt"), {.force = true}).ok());
  // Nor a GGUF file that is something else.
  std::string model = text_of("imatrix.gguf");
  model.replace(model.find("imatrix"), 7, "weights");  // the value of general.type
  for (const std::string& other : {model, std::string("GGUF and more")}) {
    put("model.gguf", other);
    EXPECT_EQ(write_imatrix(*result, path("model.gguf"), {.force = true}).message(),
              path("model.gguf") +
                  ": not an importance matrix in GGUF (general.type imatrix); force replaces only "
                  "one of those");
    EXPECT_EQ(text_of("model.gguf"), other);
  }
  put("model.gguf", "");
  EXPECT_TRUE(write_imatrix(*result, path("model.gguf"), {.force = true}).ok());
  EXPECT_FALSE(write_imatrix(*result, path("nowhere/imatrix.gguf")).ok());
}

}  // namespace
}  // namespace bittern
