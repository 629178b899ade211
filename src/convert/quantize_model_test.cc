// quantize_model, inspect_model and compare_models as a program calls them.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <stdexcept>
#include <thread>

#include "bittern/convert.h"
#include "bittern/device.h"
#include "bittern/environment.h"
#include "convert/option_names.h"
#include "core/test_ranks.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

class QuantizeModel : public TestFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put_model("hf", {{"a.weight", {96, 256}, numbers(96 * 256)},
                     {"b.weight", {64, 128}, numbers(64 * 128)},
                     {"c.norm.weight", {64}, numbers(64)}});
  }
  static std::vector<float> numbers(std::size_t n) {
    std::vector<float> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = std::sin(static_cast<float>(3 * i + 1));
    return values;
  }
  // The message; empty where it succeeds.
  std::string refusal(const QuantizeOptions& options, const std::string& out = "out") const {
    const auto report = quantize_model(path("hf"), out.empty() ? out : path(out), options);
    EXPECT_EQ(report.ok(), report.status().ok());
    return std::string(report.status().message());
  }
};

TEST_F(QuantizeModel, WritesAndReports) {
  const auto report = quantize_model(path("hf"), path("out"), {.bits = 4});
  ASSERT_TRUE(report) << report.status().message();
  EXPECT_EQ(report->model, path("hf"));
  EXPECT_EQ(report->output, path("out"));
  EXPECT_EQ(report->outputs, std::vector<std::string>{path("out")});
  EXPECT_EQ(report->format, "mlx");
  EXPECT_EQ(report->weights, 96u * 256 + 64 * 128 + 64);
  ASSERT_EQ(report->tensors.size(), 3u);
  EXPECT_EQ(report->tensors[0].name, "a.weight");
  EXPECT_EQ(report->tensors[0].shape, (std::vector<std::int64_t>{96, 256}));
  EXPECT_EQ(report->tensors[0].from, "F32");
  EXPECT_EQ(report->tensors[0].to, "4 bit, group 64, F32");
  EXPECT_EQ(report->tensors[0].way, "quantised");
  EXPECT_EQ(report->tensors[2].way, "copied");
  EXPECT_FALSE(report->scale_change);

  const auto model = inspect_model(path("out"));
  ASSERT_TRUE(model) << model.status().message();
  EXPECT_EQ(model->kind, "mlx");
  EXPECT_EQ(model->architecture, "nobodys");
  EXPECT_EQ(model->parameters(), report->weights);
  ASSERT_TRUE(model->bits_per_weight());
  EXPECT_DOUBLE_EQ(*model->bits_per_weight(), report->bits_per_weight);
  ASSERT_EQ(model->storages.size(), 2u);
  EXPECT_EQ(model->storages[0].storage, "4 bit, group 64, F32");
  EXPECT_EQ(model->quantization, "4 bit, group 64, affine");
  ASSERT_TRUE(model->quantization_json);
  EXPECT_NE(model->quantization_json->find("\"bits\":4"), std::string::npos);

  const auto comparison = compare_models(path("hf"), path("out"));
  ASSERT_TRUE(comparison) << comparison.status().message();
  EXPECT_EQ(comparison->tensors.size(), 3u);
  EXPECT_EQ(comparison->equal(), 1u);
  EXPECT_GT(comparison->relative_error(), 0.0);
  EXPECT_LT(comparison->relative_error(), 0.2);
  EXPECT_EQ(comparison->model.path, path("hf"));
  EXPECT_EQ(comparison->other.path, path("out"));
  EXPECT_EQ(comparison->worst_groups.size(), 10u);
  const auto none = compare_models(path("hf"), path("out"), {.worst_groups = 0});
  ASSERT_TRUE(none);
  EXPECT_TRUE(none->worst_groups.empty());
}

struct Wrong {
  QuantizeOptions options;
  const char* message;
};

// Every field that can be wrong by itself, or beside another: the message opens with its name.
TEST_F(QuantizeModel, NamesTheFieldThatIsWrong) {
  const int most = max_threads();
  const std::string threads =
      "threads: " + std::to_string(most + 1) + ", expected an integer 1.." + std::to_string(most);
  const Wrong wrong[] = {
      {{}, "nothing asked for, expected bits, type, target_bpw, transcode, dequantize or dtype"},
      {{.bits = 7}, "bits: 7, expected 2, 3, 4, 5, 6 or 8"},
      {{.bits = 0}, "bits: 0, expected 2, 3, 4, 5, 6 or 8"},
      {{.bits = -4}, "bits: -4, expected 2, 3, 4, 5, 6 or 8"},
      {{.bits = 4, .group_size = 48}, "group_size: 48, expected 32, 64 or 128"},
      {{.bits = 4, .group_size = 0}, "group_size: 0, expected 32, 64 or 128"},
      {{.bits = 4, .group_size = -64}, "group_size: -64, expected 32, 64 or 128"},
      {{.bits = 4, .group_size = 64, .format = "gguf"}, "group_size: 64: the type decides it"},
      {{.group_size = 64, .transcode = true}, "group_size: has no effect with transcode; leave"},
      {{.bits = 4, .method = "best"}, "method: best, expected minmax, mlx, lsq or gptq"},
      {{.bits = 4, .method = ""}, "method: empty, expected minmax, mlx, lsq or gptq"},
      {{.bits = 4, .format = "onnx"},
       "format: onnx, expected mlx, gguf, safetensors or "
       "compressed-tensors"},
      {{.bits = 4, .zero_points = "half"}, "zero_points: half, expected real or integer"},
      {{.bits = 4, .zero_points = ""}, "zero_points: empty, expected real or integer"},
      {{.bits = 4, .method = "mlx", .zero_points = "integer"},
       "method mlx: makes biases of its own, expected minmax, lsq or gptq with zero_points"},
      {{.bits = 4, .format = "gguf", .zero_points = "integer"},
       "zero_points: the format is gguf, expected format mlx (GGUF's types have minima"},
      {{.zero_points = "real", .transcode = true}, "zero_points: has no effect with transcode"},
      {{.zero_points = "integer", .dequantize = "f32"}, "zero_points: has no effect with"},
      {{.bits = 4, .format = "compressed-tensors", .zero_points = "real"},
       "zero_points: real, expected integer for format compressed-tensors"},
      {{.bits = 4, .method = "mlx", .format = "compressed-tensors"},
       "method mlx: makes biases of its own, expected minmax"},
      {{.format = "compressed-tensors", .dequantize = "f16"},
       "dequantize writes plain numbers, expected format safetensors"},
      {{.format = "compressed-tensors", .dtype = "f16"},
       "dtype alone writes plain numbers, expected format safetensors"},
      {{.format = "compressed-tensors", .type = "Q8_0"},
       "type Q8_0: the format is compressed-tensors, expected format gguf"},
      {{.bits = 7, .format = "compressed-tensors"}, "bits: 7, expected 2, 3, 4, 5, 6 or 8"},
      {{.bits = 4, .group_size = 48, .format = "compressed-tensors"},
       "group_size: 48, expected 32, 64 or 128"},
      {{.type = "Q9"}, "type: Q9: no type of GGUF, expected one of Q4_K Q5_K Q3_K"},
      {{.type = ""}, "type: empty: no type of GGUF"},
      {{.type = "IQ4_NL"}, "type IQ4_NL: not written, expected one of"},
      {{.format = "mlx", .type = "Q8_0"}, "type Q8_0: the format is mlx, expected format gguf"},
      {{.bits = 4, .type = "Q8_0"}, "type and bits both given, expected one"},
      {{.type = "Q8_0", .output_tensor_type = "Q9"}, "output_tensor_type: Q9: no type of GGUF"},
      {{.type = "Q8_0", .token_embedding_type = "x"}, "token_embedding_type: x: no type of GGUF"},
      {{.type = "Q8_0", .output_tensor_type = "Q8_0", .leave_output_tensor = true},
       "leave_output_tensor and output_tensor_type both given"},
      {{.leave_output_tensor = true, .transcode = true}, "leave_output_tensor: has no effect"},
      {{.target_bpw = 0.5}, "target_bpw: 0.5"},
      {{.target_bpw = 0}, "target_bpw: 0, expected 1 to 32"},
      {{.target_bpw = std::nan("")}, "target_bpw: nan"},
      {{.target_bpw = std::numeric_limits<double>::infinity()}, "target_bpw: inf"},
      {{.bits = 4, .target_bpw = 5}, "bits and target_bpw both given"},
      {{.target_bpw = 1}, "target_bpw 1: the smallest possible is"},
      {{.bits = 4, .rules = {{.match = "a", .bits = 9}}}, "rules: a: bits: 9, expected 2, 3"},
      {{.bits = 4, .rules = {{.match = "a", .bits = 4, .group_size = 0}}},
       "rules: a: group_size: 0, expected"},
      {{.bits = 4, .rules = {{.match = "a", .bits = 4, .group_size = 48}}},
       "a: group_size: 48, expected"},
      {{.bits = 4, .rules = {{.match = "a", .type = "Q9"}}}, "rules: a: type: Q9: no type of GGUF"},
      {{.bits = 4, .rules = {{.match = "a"}}}, "rules: a: nothing asked for, expected keep, bits"},
      {{.bits = 4, .rules = {{.match = "", .keep = true}}}, "rules: an empty match, expected"},
      {{.bits = 4, .rules = {{.match = "(", .keep = true}}}, "rules: \"(\": missing ): ("},
      {{.bits = 4, .rules = {{.match = "a", .keep = true, .bits = 4}}}, "a: a rule says one of"},
      {{.rules = {{.match = "a", .keep = true}}, .transcode = true}, "rules: has no effect with"},
      {{.bits = 4, .policy = ""}, "policy: empty, expected the path of a file"},
      {{.policy = "/nowhere", .transcode = true}, "policy: has no effect with transcode; leave"},
      {{.bits = 4, .imatrix = ""}, "imatrix: empty, expected the path of a file"},
      {{.imatrix = "/nowhere", .transcode = true}, "imatrix: has no effect with transcode"},
      {{.bits = 4, .method = "mlx", .imatrix = "/nowhere"}, "imatrix: only method lsq uses it"},
      {{.bits = 4, .transcode = true}, "bits and transcode exclude each other, expected one"},
      {{.lossy = true}, "nothing asked for"},
      {{.dequantize = "f8"}, "dequantize: f8, expected f32, f16 or bf16"},
      {{.dequantize = ""}, "dequantize: empty, expected f32, f16 or bf16"},
      {{.dtype = "f64"}, "dtype: f64, expected f32, f16 or bf16"},
      {{.bits = 4, .scale_dtype = "int8"}, "scale_dtype: int8, expected f32, f16 or bf16"},
      {{.dequantize = "f32", .scale_dtype = "f16"}, "scale_dtype: has no effect with dequantize"},
      {{.transcode = true, .pure = true}, "pure: has no effect with transcode"},
      {{.transcode = true, .allow_requantize = true}, "allow_requantize: has no effect with"},
      {{.transcode = true, .quantize = true}, "quantize: has no effect with transcode"},
      {{.type = "Q8_0", .split_max_size = "1"}, "split_max_size: 1, expected 1 to 1000000 with M"},
      {{.type = "Q8_0", .split_max_size = "0G"}, "split_max_size: 0G, expected 1 to 1000000"},
      {{.type = "Q8_0", .split_max_size = ""}, "split_max_size: empty, expected 1 to 1000000"},
      {{.type = "Q8_0", .split_max_tensors = 0}, "split_max_tensors: 0, expected an integer 1.."},
      {{.type = "Q8_0", .split_max_tensors = 1 << 21}, "split_max_tensors: 2097152, expected an"},
      {{.type = "Q8_0", .split_max_size = "1G", .split_max_tensors = 1},
       "split_max_size and split_max_tensors both given"},
      {{.bits = 4, .format = "mlx", .split_max_size = "1G"}, "split_max_size: the format is mlx"},
      {{.bits = 4, .resume = true, .dry_run = true}, "resume: has no effect with dry_run"},
      {{.bits = 4, .threads = 0}, "threads: 0, expected an integer 1.."},
      {{.bits = 4, .threads = -1}, "threads: -1, expected an integer 1.."},
      {{.bits = 4, .threads = most + 1}, threads.c_str()},
  };
  for (const Wrong& one : wrong) {
    const std::string message = refusal(one.options);
    EXPECT_TRUE(message.starts_with(one.message)) << message << "\nexpected " << one.message;
    EXPECT_EQ(message.find("--"), std::string::npos) << message;  // flags are the command's
    EXPECT_EQ(message.find("@{"), std::string::npos) << message;
    EXPECT_EQ(names(), std::vector<std::string>{"hf"}) << message;
  }
  EXPECT_EQ(refusal({.bits = 4}, ""),
            "out: not given, expected the name of the output (or dry_run)");
  EXPECT_NE(refusal({.bits = 4}, "hf").find("exists, expected a new name (force replaces it)"),
            std::string::npos);
  EXPECT_EQ(std::string(quantize_model("", path("out"), {.bits = 4}).status().message()),
            "source: empty, expected a model to read");
  EXPECT_EQ(quantize_model(path("no"), path("out"), {.bits = 4}).status().code(),
            Code::unavailable);
  EXPECT_EQ(inspect_model(path("no")).status().code(), Code::unavailable);
  EXPECT_EQ(std::string(inspect_model("").status().message()),
            "path: empty, expected a model to read");
  EXPECT_EQ(std::string(compare_models("", path("hf")).status().message()),
            "model: empty, expected a model to read");
  EXPECT_EQ(std::string(compare_models(path("hf"), "").status().message()),
            "other: empty, expected a model to read");
  EXPECT_TRUE(compare_models(path("hf"), path("hf"), {.threads = 0})
                  .status()
                  .message()
                  .starts_with("threads: 0, expected"));
}

TEST_F(QuantizeModel, CallsOptionsAsTheProgramDoes) {
  const QuantizeOptions options{
      .bits = 4, .transcode = true, .option_name = [](std::string_view field) {
        return "<" + std::string(field) + ">";
      }};
  EXPECT_EQ(refusal(options), "<bits> and <transcode> exclude each other, expected one");
  // Notes, too.
  const auto report = quantize_model(path("hf"), path("out"),
                                     {.bits = 4, .pure = true, .option_name = options.option_name});
  ASSERT_TRUE(report) << report.status().message();
  EXPECT_TRUE(std::any_of(report->notes.begin(), report->notes.end(), [](const std::string& note) {
    return note.starts_with("<pure> has no effect");
  }));
  EXPECT_EQ(with_option_names("@{a_b}: @{, @{} and @{Q} x@{c}", {}), "a_b: @{, @{} and @{Q} xc");
}

TEST_F(QuantizeModel, KeepsWhatTheCallerWritesApart) {
  QuantizeOptions options{.bits = 4, .also_written = {path("hf/report.json")}};
  EXPECT_TRUE(refusal(options).starts_with("also_written: ")) << refusal(options);
  options.also_written = {path("out/report.json")};
  EXPECT_TRUE(refusal(options).starts_with("also_written: ")) << refusal(options);
  EXPECT_EQ(names(), std::vector<std::string>{"hf"});
  EXPECT_TRUE(compare_models(path("hf"), path("hf"), {.also_written = {path("hf/config.json")}})
                  .status()
                  .message()
                  .starts_with("also_written: "));
}

TEST_F(QuantizeModel, DryRunDecidesAndWritesNothing) {
  int planned = 0;
  const QuantizeOptions options{
      .bits = 4, .dry_run = true, .planned = [&](const QuantizeReport& report) {
        ++planned;
        EXPECT_TRUE(report.dry_run);
        EXPECT_EQ(report.tensors.size(), 3u);
        return true;
      }};
  for (const std::string out : {"", "out"}) {
    const auto report = quantize_model(path("hf"), out.empty() ? out : path(out), options);
    ASSERT_TRUE(report) << report.status().message();
    EXPECT_EQ(report->tensors[1].to, "4 bit, group 64, F32");
    EXPECT_EQ(names(), std::vector<std::string>{"hf"});
  }
  EXPECT_EQ(planned, 2);
}

TEST_F(QuantizeModel, TellsItsProgressOnTheCallersThread) {
  for (const QuantizeOptions& what : {QuantizeOptions{.bits = 4}, QuantizeOptions{.target_bpw = 6},
                                      QuantizeOptions{.dequantize = "f16"}}) {
    for (const int threads : {1, 2, 7}) {
      QuantizeOptions options = what;
      options.threads = threads;
      options.force = true;
      std::vector<std::string> phases;
      std::uint64_t done = 0, total = 0;
      const auto caller = std::this_thread::get_id();
      options.progress = [&](const ModelProgress& state) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        if (phases.empty() || phases.back() != state.doing) {
          EXPECT_EQ(done, total);  // each one is complete when the next begins
          phases.emplace_back(state.doing);
          done = 0;
          total = state.total;
        }
        EXPECT_GE(state.done, done);
        EXPECT_LE(state.done, state.total);
        EXPECT_EQ(state.total, total);
        EXPECT_EQ(state.source_bpw, 32.0);
        done = state.done;
        return true;
      };
      const auto report = quantize_model(path("hf"), path("out"), options);
      ASSERT_TRUE(report) << report.status().message();
      EXPECT_EQ(done, total);
      EXPECT_EQ(total, report->weights);
      EXPECT_EQ(phases, what.target_bpw
                            ? (std::vector<std::string>{"planning", "measuring", "writing"})
                            : (std::vector<std::string>{"planning", "writing"}));
    }
  }
  std::uint64_t done = 0;
  const auto comparison =
      compare_models(path("hf"), path("hf"), {.progress = [&](const ModelProgress& state) {
                       EXPECT_EQ(state.doing, "comparing");
                       EXPECT_GE(state.done, done);
                       done = state.done;
                       return true;
                     }});
  ASSERT_TRUE(comparison);
  EXPECT_EQ(done, 96u * 256 + 64 * 128 + 64);
}

TEST_F(QuantizeModel, IsCancelledAtEveryCallAndResumes) {
  ASSERT_TRUE(quantize_model(path("hf"), path("whole"), {.bits = 4}));
  const std::string whole = contents("whole");
  for (const int threads : {1, 3}) {
    bool finished = false;
    int resumed = 0;
    for (int stop = 0; !finished; ++stop) {
      int calls = 0;
      bool writing = false;
      const auto cancelled = quantize_model(
          path("hf"), path("out"),
          {.bits = 4, .threads = threads, .progress = [&](const ModelProgress& state) {
             writing = state.doing == "writing";
             return calls++ != stop;
           }});
      finished = cancelled.ok();
      if (!finished) {
        EXPECT_EQ(cancelled.status().code(), Code::cancelled) << cancelled.status().message();
        EXPECT_EQ(cancelled.status().message(), "cancelled by the callback");
        const std::vector<std::string> left =
            writing ? std::vector<std::string>{"hf", "out.partial", "out.partial.journal", "whole"}
                    : std::vector<std::string>{"hf", "whole"};
        EXPECT_EQ(names(), left);
        if (writing) {
          EXPECT_NE(refusal({.bits = 4}).find("(resume goes on with it, force starts anew)"),
                    std::string::npos);
        }
        const auto report = quantize_model(path("hf"), path("out"), {.bits = 4, .resume = true});
        ASSERT_TRUE(report) << report.status().message();
        resumed += static_cast<int>(report->resumed);
      }
      EXPECT_EQ(contents("out"), whole);
      std::filesystem::remove_all(path("out"));
      EXPECT_EQ(names(), (std::vector<std::string>{"hf", "whole"}));
    }
    EXPECT_GT(resumed, 0);
  }
}

TEST_F(QuantizeModel, ProcessesMakeTheSameBytes) {
  put_model("larger", {{"a.weight", {300, 256}, numbers(300 * 256)},
                       {"b.weight", {2, 70, 256}, numbers(2 * 70 * 256)},
                       {"c.weight", {65, 512}, numbers(65 * 512)},
                       {"d.norm.weight", {64}, numbers(64)}});
  const QuantizeOptions kinds[] = {{.bits = 4, .method = "minmax"},
                                   {.bits = 3, .method = "lsq"},
                                   {.target_bpw = 5},
                                   {.lossy = true, .dtype = "f16"},
                                   {.dequantize = "bf16"}};
  for (const QuantizeOptions& kind : kinds) {
    const auto alone = quantize_model(path("larger"), path("out"), kind);
    ASSERT_TRUE(alone) << alone.status().message();
    const std::string whole = contents("out");
    std::filesystem::remove_all(path("out"));
    for (const int count : {1, 2, 3, 4}) {
      SCOPED_TRACE(count);
      ThreadRanks::run(count, [&](Ranks& ranks) {
        QuantizeOptions own = kind;
        own.ranks = &ranks;
        own.threads = kind.method ? 1 + ranks.rank() % 2 : 1;
        std::uint64_t done = 0, total = 0;
        own.progress = [&](const ModelProgress& state) {
          done = state.done;
          total = state.total;
          return true;
        };
        const auto report = quantize_model(path("larger"), path("out"), own);
        ASSERT_TRUE(report) << report.status().message();
        EXPECT_EQ(report->tensors.size(), 4u);
        if (ranks.rank() == 0) {
          EXPECT_EQ(done, total);
        }
      });
      EXPECT_EQ(contents("out"), whole);
      std::filesystem::remove_all(path("out"));
    }
  }
}

TEST_F(QuantizeModel, ProcessesEndTogetherAndGoOn) {
  ASSERT_TRUE(quantize_model(path("hf"), path("whole"), {.bits = 4}));
  const std::string whole = contents("whole");
  for (const int who : {0, 1}) {  // is told to stop
    ThreadRanks::run(2, [&](Ranks& ranks) {
      QuantizeOptions own{.bits = 4, .threads = 1, .ranks = &ranks};
      own.progress = [&](const ModelProgress& state) {
        return ranks.rank() != who || state.doing != "writing" || state.tensor != "b.weight";
      };
      const auto report = quantize_model(path("hf"), path("out"), own);
      EXPECT_EQ(report.status().code(), Code::cancelled);
    });
    EXPECT_TRUE(std::filesystem::exists(path("out.partial")));
    ThreadRanks::run(3, [&](Ranks& ranks) {  // as another number of processes
      const auto report = quantize_model(
          path("hf"), path("out"), {.bits = 4, .resume = true, .threads = 1, .ranks = &ranks});
      ASSERT_TRUE(report) << report.status().message();
      // The second process says so when b is written.
      EXPECT_EQ(report->resumed, who == 0 ? 1u : 2u);
    });
    EXPECT_EQ(contents("out"), whole);
    // What only the first one sees, all of them say.
    ThreadRanks::run(2, [&](Ranks& ranks) {
      const auto report = quantize_model(path("hf"), path("out"), {.bits = 4, .ranks = &ranks});
      EXPECT_NE(report.status().message().find("exists"), std::string_view::npos);
    });
    std::filesystem::remove_all(path("out"));
  }
  // A number that is none, in rows of the second process: nothing is left.
  std::vector<float> bad = numbers(128 * 256);
  bad[100 * 256] = std::numeric_limits<float>::quiet_NaN();
  put_model("bad", {{"a.weight", {128, 256}, bad}});
  const std::string alone(quantize_model(path("bad"), path("out"), {.bits = 4}).status().message());
  EXPECT_NE(alone.find("row 100"), std::string::npos) << alone;
  ThreadRanks::run(2, [&](Ranks& ranks) {
    const auto report =
        quantize_model(path("bad"), path("out"), {.bits = 4, .threads = 1, .ranks = &ranks});
    EXPECT_EQ(report.status().message(), alone);
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"bad", "hf", "whole"}));
}

TEST_F(QuantizeModel, IsCancelledWhileItChecksWhatIsThere) {
  ASSERT_TRUE(quantize_model(path("hf"), path("whole"), {.bits = 4}));
  const auto stopped_at = [&](const char* doing, std::uint64_t part, bool resume) {
    return quantize_model(
        path("hf"), path("out"),
        {.bits = 4, .resume = resume, .progress = [&](const ModelProgress& state) {
           return state.doing != doing || state.done * 4 < state.total * part;
         }});
  };
  EXPECT_EQ(stopped_at("writing", 3, false).status().code(), Code::cancelled);
  std::vector<std::string> phases;
  for (const std::uint64_t part : {0u, 2u, 4u})
    EXPECT_EQ(stopped_at("checking", part, true).status().code(), Code::cancelled) << part;
  const auto report =
      quantize_model(path("hf"), path("out"),
                     {.bits = 4, .resume = true, .progress = [&](const ModelProgress& state) {
                        if (phases.empty() || phases.back() != state.doing)
                          phases.emplace_back(state.doing);
                        EXPECT_EQ(state.source_bpw, state.doing == "checking" ? 8.0 : 32.0);
                        return true;
                      }});
  ASSERT_TRUE(report) << report.status().message();
  EXPECT_GT(report->resumed, 0u);  // nothing was lost on the way
  EXPECT_EQ(phases, (std::vector<std::string>{"planning", "checking", "writing"}));
  EXPECT_EQ(contents("out"), contents("whole"));
}

TEST_F(QuantizeModel, IsCancelledByAnExceptionAndByPlanned) {
  const auto thrown = quantize_model(path("hf"), path("out"),
                                     {.bits = 4, .progress = [](const ModelProgress&) -> bool {
                                        throw std::runtime_error("no!");
                                      }});
  EXPECT_EQ(thrown.status().code(), Code::cancelled);
  EXPECT_EQ(thrown.status().message(), "cancelled: the callback threw: no!");
  const auto odd =
      quantize_model(path("hf"), path("out"),
                     {.bits = 4, .planned = [](const QuantizeReport&) -> bool { throw 3; }});
  EXPECT_EQ(odd.status().code(), Code::cancelled);
  EXPECT_EQ(odd.status().message(), "cancelled: the callback threw");
  const auto planned = quantize_model(
      path("hf"), path("out"), {.bits = 4, .planned = [](const QuantizeReport&) { return false; }});
  EXPECT_EQ(planned.status().code(), Code::cancelled);
  const auto measured = quantize_model(
      path("hf"), path("out"), {.target_bpw = 6, .progress = [](const ModelProgress& state) {
                                  return state.doing != "measuring";
                                }});
  EXPECT_EQ(measured.status().code(), Code::cancelled);
  EXPECT_EQ(measured.status().message(), "cancelled by the callback");
  EXPECT_EQ(names(), std::vector<std::string>{"hf"});
  const auto compared = compare_models(path("hf"), path("hf"),
                                       {.progress = [](const ModelProgress&) { return false; }});
  EXPECT_EQ(compared.status().code(), Code::cancelled);
}

TEST_F(QuantizeModel, LeavesTheNumberOfThreadsAsItWas) {
  const int before = num_threads();
  for (const int threads : {1, 2, 7})
    ASSERT_TRUE(
        quantize_model(path("hf"), path("out"), {.bits = 4, .force = true, .threads = threads}));
  EXPECT_EQ(num_threads(), before);
}

TEST_F(QuantizeModel, RunsFromSeveralThreadsAtOnce) {
  ASSERT_TRUE(quantize_model(path("hf"), path("whole"), {.bits = 4}));
  std::vector<std::thread> threads;
  std::atomic<int> good = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string out = path("out" + std::to_string(i));
      const auto report = quantize_model(path("hf"), out, {.bits = 4, .threads = 1 + i % 3});
      const auto comparison = compare_models(path("whole"), out);
      good += report.ok() && comparison.ok() && comparison->equal() == 3;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 4);
}

}  // namespace
}  // namespace bittern
