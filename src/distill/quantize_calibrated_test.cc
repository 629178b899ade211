// quantize_calibrated on models of every architecture: nearer to the model than lsq on what it was
// shown, from every kind of file; the same bytes however it runs; what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>

#include "bittern/distill.h"
#include "bittern/model.h"
#include "bittern/tokenizer.h"
#include "convert/encode.h"
#include "convert/row_reader.h"
#include "core/test_ranks.h"
#include "cpu/dispatch.h"
#include "distill/calibration_text.h"
#include "distill/layer_inputs.h"
#include "distill/rounding.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class QuantizeCalibrated : public TestFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put("text.txt", tiny_text(1200));
  }
  void TearDown() override { cpu::force_isa(cpu::Isa::none); }

  QuantizeOptions gptq(int bits = 3) const {
    return {.bits = bits,
            .group_size = 32,
            .method = "gptq",
            .data = path("text.txt"),
            .pieces = 30,
            .context = 32,
            .rules = {{.match = "embed|lm_head|token_embd", .keep = true}},
            .threads = 1};
  }
  static std::string refusal(const Result<QuantizeReport>& report) {
    EXPECT_FALSE(report.ok());
    return std::string(report.status().message());
  }
  QuantizeReport made(const std::string& source, const std::string& out,
                      const QuantizeOptions& options) const {
    auto report = quantize_calibrated(source, path(out), options);
    if (!report) throw std::runtime_error(std::string(report.status().message()));
    return std::move(*report);
  }

  // What the last layer gives for the text.
  std::vector<float> hidden(const std::string& model_path) const {
    auto model =
        Model::load(model_path, {.activations = Activations::exact, .threads = 1, .context = 32});
    auto tokenizer = Tokenizer::load(model_path);
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    const auto tokens = tokenizer->encode(text_of("text.txt"), {.add_special = false});
    auto session = Session::make(*model, {.context = 32, .kv = "f32"});
    const std::int64_t width = model->info().hidden;
    std::vector<float> all;
    for (std::size_t first = 0; first + 32 <= 960; first += 32) {
      EXPECT_TRUE(session->truncate(0).ok());
      std::vector<float> rows(static_cast<std::size_t>(32 * width));
      const SessionTokens step{&*session, std::span(*tokens).subspan(first, 32)};
      EXPECT_TRUE(model->hidden(std::span(&step, 1), view(rows.data(), {32, width})).ok());
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }
  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      sum += (double{a[i]} - double{b[i]}) * (double{a[i]} - double{b[i]});
    return std::sqrt(sum);
  }
};

TEST_F(QuantizeCalibrated, IsNearerToEveryModelThanLsq) {
  for (const char* name : {"llama", "llama3", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3",
                           "qwen3_moe", "gemma2", "gemma3", "phi3", "olmo2", "smollm3",
                           "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    const std::vector<float> whole = hidden(model);
    QuantizeOptions lsq{
        .bits = 3, .group_size = 32, .rules = gptq().rules, .force = true, .threads = 1};
    QuantizeOptions ours = gptq();
    ours.force = true;
    made(model, "lsq", lsq);
    const QuantizeReport report = made(model, "gptq", ours);
    const double before = distance(whole, hidden(path("lsq")));
    EXPECT_LT(distance(whole, hidden(path("gptq"))), 0.9 * before);
    std::size_t coded = 0;
    for (const QuantizedTensor& tensor : report.tensors) {
      coded += tensor.way == "quantised" && tensor.note.empty();
      EXPECT_EQ(tensor.note.find("not by method gptq"), std::string::npos) << tensor.name;
    }
    EXPECT_GT(coded, 0u);
  }
}

// Every expert as if it were a matrix of its own, with the inputs that it has. With few tokens some
// have none: all columns are alike then.
TEST_F(QuantizeCalibrated, EachExpertByItsOwnTokens) {
  const std::string model = put_tiny_model(*this, "qwen3_moe");
  const auto loaded = Model::load(model, {.activations = Activations::exact, .threads = 1});
  const auto source = Checkpoint::open(model);
  ASSERT_TRUE(loaded && source);
  struct Kind {
    const char* name;
    ProductPlace place;
    std::int64_t rows, columns;
  };
  for (const std::int64_t pieces : {30, 1}) {
    QuantizeOptions ours = gptq(4);
    ours.pieces = pieces;
    ours.scale_dtype = "f32";
    if (pieces == 1) ours.context = 2;
    ours.force = true;
    made(model, "out", ours);
    const auto out = Checkpoint::open(path("out"));
    const auto text = read_calibration_text(model, path("text.txt"), pieces, *ours.context);
    ASSERT_TRUE(out && text);
    auto inputs = LayerInputs::make(*loaded, *text);
    ASSERT_TRUE(inputs);
    bool unused = false;
    for (std::int64_t layer = 0; layer < loaded->info().layers; ++layer) {
      std::set<InputPlace> wanted;
      for (std::int64_t e = 0; e < 4; ++e)
        for (const ProductPlace place : {ProductPlace::mlp_in, ProductPlace::mlp_down})
          wanted.insert({layer, place, false, e});
      const auto sums = inputs->next(wanted, false, [] { return Status(); });
      ASSERT_TRUE(sums);
      for (const Kind& kind : {Kind{"gate_proj", ProductPlace::mlp_in, 32, 64},
                               Kind{"up_proj", ProductPlace::mlp_in, 32, 64},
                               Kind{"down_proj", ProductPlace::mlp_down, 64, 32}})
        for (std::int64_t e = 0; e < 4; ++e) {
          const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.";
          const std::string name = mlp + "experts." + std::to_string(e) + "." + kind.name;
          SCOPED_TRACE(name);
          const Recipe from{
              .name = name, .shape = {kind.rows, kind.columns}, .sources = {name + ".weight"}};
          const Recipe to{.name = name,
                          .shape = {4, kind.rows, kind.columns},
                          .sources = {mlp + "switch_mlp." + kind.name + ".weight"}};
          const auto reader = RowReader::open(*source, from), coded = RowReader::open(*out, to);
          ASSERT_TRUE(reader) << reader.status().message();
          ASSERT_TRUE(coded) << coded.status().message();
          RowNumbers numbers;
          GridRows expected, got;
          ASSERT_TRUE(reader->numbers(0, kind.rows, numbers).ok());
          std::vector<float> w(static_cast<std::size_t>(kind.rows * kind.columns));
          ASSERT_TRUE(as_f32(numbers, w).ok());
          const auto gram = sums->find({layer, kind.place, false, e});
          unused |= gram == sums->end();
          const auto errors = InputErrors::make(
              gram == sums->end() ? Gram(kind.columns) : gram->second, {}, std::array{32});
          ASSERT_TRUE(errors);
          RowRounder rounder;
          const RoundingGrid grid{.bits = 4, .group = 32, .params = DType::f32};
          for (std::int64_t row = 0; row < kind.rows; row += lanes::kRows) {
            const std::int64_t count = std::min(lanes::kRows, kind.rows - row);
            const float* const rows = w.data() + row * kind.columns;
            ASSERT_TRUE(rounder.round(*errors, grid, rows, count, expected).ok());
            ASSERT_TRUE(coded->grid(e * kind.rows + row, count, got).ok());
            ASSERT_EQ(got.codes, expected.codes);
            ASSERT_EQ(got.scales, expected.scales);
            ASSERT_EQ(got.biases, expected.biases);
          }
        }
    }
    EXPECT_EQ(unused, pieces == 1);
  }
}

// In a GGUF file q and k have other rows. (tests/python/test_gptq.py has other columns.)
TEST_F(QuantizeCalibrated, FromAndToGguf) {
  for (const char* name : {"llama", "qwen3_moe"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    const std::vector<float> whole = hidden(model);
    made(model, "f32.gguf", {.dtype = "f32", .force = true});
    QuantizeOptions ours = gptq(4);
    ours.force = true;
    QuantizeOptions lsq{
        .bits = 4, .group_size = 32, .rules = ours.rules, .force = true, .threads = 1};
    made(model, "lsq", lsq);
    made(path("f32.gguf"), "gptq", ours);
    EXPECT_LT(distance(whole, hidden(path("gptq"))), 0.9 * distance(whole, hidden(path("lsq"))));

    QuantizeOptions blocks = ours;
    blocks.bits.reset();
    blocks.group_size.reset();
    blocks.type = "Q4_1";
    blocks.pure = true;
    QuantizeOptions plain{
        .type = "Q4_1", .rules = ours.rules, .pure = true, .force = true, .threads = 1};
    const bool delicate = std::string(name) != "llama";  // --pure quantises its gates, too
    if (delicate) blocks.pure = plain.pure = false;
    for (const std::string& source : {model, path("f32.gguf")}) {
      const QuantizeReport report = made(source, "gptq.gguf", blocks);
      made(source, "plain.gguf", plain);
      EXPECT_LT(distance(whole, hidden(path("gptq.gguf"))),
                0.9 * distance(whole, hidden(path("plain.gguf"))));
      EXPECT_TRUE(std::any_of(report.tensors.begin(), report.tensors.end(),
                              [](const QuantizedTensor& t) { return t.to == "Q4_1"; }));
    }
  }
}

// On rows of 256, which super-blocks divide. o_proj has 128: Q5_0 for Q4_K, Q5_1 for Q5_K.
TEST_F(QuantizeCalibrated, EveryTypeOfGgufWithGrids) {
  const std::string model = put_wide_model(*this, 256);
  const std::vector<float> whole = hidden(model);
  for (const char* type : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_S", "Q5_K_M"}) {
    SCOPED_TRACE(type);
    QuantizeOptions ours = gptq();
    ours.bits.reset();
    ours.group_size.reset();
    ours.type = type;
    ours.pure = true;
    ours.force = true;
    QuantizeOptions plain{
        .type = type, .rules = ours.rules, .pure = true, .force = true, .threads = 1};
    const QuantizeReport report = made(model, "gptq.gguf", ours);
    std::set<std::string> types;
    for (const QuantizedTensor& tensor : report.tensors) {
      if (tensor.way != "quantised") continue;
      types.insert(tensor.to);
      EXPECT_EQ(tensor.note.find("gptq"), std::string::npos) << tensor.name << ": " << tensor.note;
    }
    const std::string name = type;
    if (name == "Q4_K_S")
      EXPECT_EQ(types, (std::set<std::string>{"Q4_K", "Q5_0"}));
    else if (name == "Q5_K_M")
      EXPECT_EQ(types, (std::set<std::string>{"Q5_K", "Q5_1"}));
    else
      EXPECT_EQ(types, std::set<std::string>{name});
    made(model, "plain.gguf", plain);
    EXPECT_LT(distance(whole, hidden(path("gptq.gguf"))),
              0.9 * distance(whole, hidden(path("plain.gguf"))));
    const std::string bytes = text_of("gptq.gguf");
    ours.threads = 3;
    made(model, "gptq.gguf", ours);
    EXPECT_TRUE(text_of("gptq.gguf") == bytes);
  }
}

// With zero points that are integers, in either folder; of f32 scales both hold the same numbers.
TEST_F(QuantizeCalibrated, IntegerZeroPoints) {
  for (const char* name : {"llama", "qwen3_5_text"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    const std::vector<float> whole = hidden(model);
    std::map<std::string, std::vector<float>> of;
    for (const char* dtype : {"f32", "bf16"})
      for (const char* format : {"mlx", "compressed-tensors"})
        for (const char* method : {"minmax", "lsq", "gptq"}) {
          QuantizeOptions how = gptq();
          how.format = format;
          how.zero_points = "integer";
          how.scale_dtype = dtype;
          how.dtype = "f32";  // MLX adds 1 to norms
          how.method = method;
          how.force = true;
          if (how.method != "gptq") {
            how.data.reset();
            how.pieces.reset();
            how.context.reset();
          }
          made(model, "out", how);
          of[std::string(method) + " " + format + " " + dtype] = hidden(path("out"));
        }
    for (const char* method : {"minmax ", "lsq ", "gptq "})
      EXPECT_EQ(of[method + std::string("mlx f32")],
                of[method + std::string("compressed-tensors f32")]);
    for (const char* kind : {"mlx bf16", "compressed-tensors bf16"}) {
      const double minmax = distance(whole, of["minmax " + std::string(kind)]),
                   lsq = distance(whole, of["lsq " + std::string(kind)]);
      EXPECT_LT(lsq, minmax);
      EXPECT_LT(distance(whole, of["gptq " + std::string(kind)]), 0.9 * lsq);
    }
  }
}

TEST_F(QuantizeCalibrated, TokensMayCountByWhatTheirErrorsCost) {
  for (const char* name : {"llama", "gemma2", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    const std::vector<float> whole = hidden(model);
    QuantizeOptions lsq{
        .bits = 3, .group_size = 32, .rules = gptq().rules, .force = true, .threads = 1};
    QuantizeOptions plain = gptq(), ours = gptq();
    plain.force = ours.force = ours.fisher = true;
    made(model, "lsq", lsq);
    made(model, "plain", plain);
    made(model, "fisher", ours);
    const std::string fisher = contents("fisher");
    EXPECT_TRUE(fisher != contents("plain"));
    EXPECT_LT(distance(whole, hidden(path("fisher"))), distance(whole, hidden(path("lsq"))));
    ours.threads = 3;
    made(model, "fisher", ours);
    EXPECT_TRUE(contents("fisher") == fisher);
  }
}

TEST_F(QuantizeCalibrated, AHeadOfItsOwnIsCoded) {
  const std::string model = put_tiny_model(*this, "qwen2");
  QuantizeOptions ours = gptq();
  ours.rules.clear();
  const QuantizeReport report = made(model, "out", ours);
  std::map<std::string, std::string> notes;
  for (const QuantizedTensor& tensor : report.tensors) notes[tensor.name] = tensor.note;
  EXPECT_EQ(notes.at("lm_head.weight"), "");
  EXPECT_EQ(notes.at("model.embed_tokens.weight"),
            "not by method gptq: it is looked up, not multiplied");
}

TEST_F(QuantizeCalibrated, TheBytesDependOnNothingElse) {
  const std::string model = put_tiny_model(*this, "qwen3_next");
  made(model, "first", gptq());
  const std::string first = contents("first");
  for (const cpu::Isa isa : cpu::available_isas())
    for (const int threads : {1, 2, 5}) {
      cpu::force_isa(isa);
      QuantizeOptions options = gptq();
      options.threads = threads;
      options.force = true;
      made(model, "again", options);
      EXPECT_EQ(contents("again"), first) << threads << " threads, " << cpu::name(isa);
    }
  cpu::force_isa(cpu::Isa::none);
  QuantizeOptions other = gptq();
  other.pieces = 29;
  made(model, "other", other);
  EXPECT_NE(contents("other"), first);
}

// 30 pieces, and matrices of fewer rows than one process takes at once.
TEST_F(QuantizeCalibrated, ProcessesMakeTheSameBytes) {
  for (const bool fisher : {false, true}) {
    const std::string model = put_tiny_model(*this, fisher ? "qwen2_moe" : "qwen3_next");
    QuantizeOptions options = gptq();
    options.fisher = fisher;
    options.force = true;
    options.pieces = 7;
    options.rules.clear();  // the head, too
    made(model, "whole", options);
    const std::string whole = contents("whole");
    for (const int count : {1, 2, 3, 4}) {
      SCOPED_TRACE(count);
      ThreadRanks::run(count, [&](Ranks& ranks) {
        QuantizeOptions own = options;
        own.ranks = &ranks;
        const auto report = quantize_calibrated(model, path("out"), own);
        ASSERT_TRUE(report) << report.status().message();
      });
      EXPECT_EQ(contents("out"), whole);
    }
  }
}

TEST_F(QuantizeCalibrated, GoesOnWhereItWasStopped) {
  const std::string model = put_tiny_model(*this, "llama");
  made(model, "whole", gptq());
  const std::string whole = contents("whole");
  int calls = 0;
  QuantizeOptions counting = gptq();
  std::string last;
  std::uint64_t done = 0, total = 0;
  counting.progress = [&](const ModelProgress& state) {
    const bool calibrated = last == "calibrating" && state.doing != last;
    EXPECT_TRUE(state.doing != last || state.done >= done);
    EXPECT_TRUE(!calibrated || done == total);
    last = state.doing;
    done = state.done;
    total = state.total;
    EXPECT_LE(done, total);
    return ++calls > 0;
  };
  made(model, "counted", counting);
  for (const int at : {calls / 4, calls / 2, 3 * calls / 4, calls - 3}) {
    QuantizeOptions stopped = gptq();
    int seen = 0;
    stopped.progress = [&](const ModelProgress&) { return ++seen < at; };
    EXPECT_EQ(quantize_calibrated(model, path("out"), stopped).status().code(), Code::cancelled);
    QuantizeOptions going_on = gptq();
    going_on.resume = true;
    // Codes of another text are not mixed with these.
    QuantizeOptions other = going_on;
    other.pieces = 7;
    EXPECT_NE(refusal(quantize_calibrated(model, path("out"), other)), "");
    made(model, "out", going_on);
    EXPECT_EQ(contents("out"), whole) << at;
    std::filesystem::remove_all(path("out"));
  }
}

TEST_F(QuantizeCalibrated, RefusesBeforeItWorks) {
  const std::string model = put_tiny_model(*this, "llama");
  put("short.txt", "abc");
  put("empty.txt", "");
  put("bytes.txt", "abc\xff");
  put("nobodys/config.json", R"({"model_type": "nobodys"})");
  put_floats("nobodys/model.safetensors", {{"a.weight", {4, 64}, std::vector<float>(256)}});
  struct Case {
    std::function<void(QuantizeOptions&)> change;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](auto& o) { o.data.reset(); }, "method gptq: no text given, expected data"},
      {[](auto& o) { o.data = ""; }, "method gptq: no text given, expected data"},
      {[&](auto& o) { o.data = path("none.txt"); }, "none.txt: cannot be opened"},
      {[&](auto& o) { o.data = path("llama"); }, "llama: a folder, expected a file of text"},
      {[&](auto& o) { o.data = path("empty.txt"); }, "empty.txt: empty, expected text"},
      {[&](auto& o) { o.data = path("bytes.txt"); }, "bytes.txt: byte 3 is not UTF-8"},
      {[&](auto& o) { o.data = path("short.txt"); },
       "short.txt: 3 tokens, expected at least 32, a piece of them (context makes it shorter)"},
      {[](auto& o) { o.pieces = 0; }, "pieces: 0, expected an integer 1.."},
      {[](auto& o) { o.context = -1; }, "context: -1, expected an integer 2.."},
      {[](auto& o) { o.context = 1; }, "context: 1, expected an integer 2..1048576"},
      {[](auto& o) { o.method = "lsq"; }, "data: has no effect without method gptq"},
      {[](auto& o) { o.imatrix = "x"; }, "imatrix: method gptq measures the inputs itself"},
      {[](auto& o) { o.format = "safetensors"; },
       "method gptq: the format is safetensors, expected format mlx, gguf or "
       "compressed-tensors"},
      {[](auto& o) { o.rules = {{.match = ".", .keep = true}}; },
       "method gptq has no effect: it codes none of the matrices that are quantised"},
      {[](auto& o) {
         o.bits.reset();
         o.group_size.reset();
         o.rules.clear();
         o.transcode = true;
       },
       "method: has no effect with transcode"},
  };
  for (const Case& wrong : cases) {
    QuantizeOptions options = gptq();
    wrong.change(options);
    const auto report = quantize_calibrated(model, path("out"), options);
    EXPECT_NE(refusal(report).find(wrong.message), std::string::npos) << refusal(report);
    EXPECT_FALSE(std::filesystem::exists(path("out")));
    EXPECT_FALSE(std::filesystem::exists(path("out.partial")));
  }
  QuantizeOptions blocks = gptq();
  blocks.bits.reset();
  blocks.group_size.reset();
  blocks.type = "Q6_K";
  blocks.rules.push_back({.match = "o_proj", .keep = true});  // of 128 columns: Q8_0
  EXPECT_NE(refusal(quantize_calibrated(put_wide_model(*this, 256), path("out"), blocks))
                .find("method gptq has no effect: it codes none of the matrices that are "
                      "quantised; expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K or Q5_K"),
            std::string::npos);
  EXPECT_NE(refusal(quantize_calibrated(path("nobodys"), path("out"), gptq())).find("nobodys"),
            std::string::npos);
  EXPECT_EQ(refusal(quantize_model(model, path("out"), gptq())),
            "method gptq: runs the model; call quantize_calibrated of bittern/distill.h");
  // The text is an input like any other.
  QuantizeOptions over = gptq();
  over.also_written = {path("text.txt")};
  EXPECT_NE(refusal(quantize_calibrated(model, path("out"), over)).find("text.txt"),
            std::string::npos);
}

// A weight so large that the model overflows is told before it is coded.
TEST_F(QuantizeCalibrated, RefusesInputsThatAreNotFinite) {
  const std::string model = put_tiny_model(*this, "llama");
  const auto file = SafetensorsFile::open(model + "/model.safetensors");
  std::vector<StoredTensor> tensors;
  for (const auto& tensor : file->tensors()) {
    const auto data = file->bytes(tensor);
    std::string bytes(reinterpret_cast<const char*>(data.data()), data.size());
    if (tensor.name == "model.layers.0.mlp.up_proj.weight") {
      const bf16 large = to_bf16(3e38f);
      for (std::size_t i = 0; i < bytes.size(); i += sizeof large)
        std::memcpy(bytes.data() + i, &large, sizeof large);
    }
    tensors.push_back({{tensor.name, tensor.dtype, tensor.shape}, bytes});
  }
  put_tensors("llama/model.safetensors", tensors, {{"format", "pt"}});
  const std::string message = refusal(quantize_calibrated(model, path("out"), gptq()));
  EXPECT_NE(message.find("down_proj.weight: its inputs hold infinities or NaN"), std::string::npos)
      << message;
  EXPECT_FALSE(std::filesystem::exists(path("out.partial")));
}

}  // namespace
}  // namespace bittern
