// distill_model on tiny models: what is learned, the same bytes however it runs, going on after a
// stop, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>
#include <stdexcept>

#include "bittern/convert.h"
#include "bittern/distill.h"
#include "core/test_ranks.h"
#include "cpu/bf16.h"
#include "cpu/dispatch.h"
#include "distill/gradient_sum.h"
#include "formats/checkpoint.h"
#include "formats/grid.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class DistillModel : public TestFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put("text.txt", tiny_text(1600));
  }
  void TearDown() override { cpu::force_isa(cpu::Isa::none); }

  DistillOptions options() const {
    return {.bits = 3,
            .group_size = 32,
            .embedding_bits = 0,
            .scale_dtype = "f32",
            .data = {path("text.txt")},
            .context = 32,
            .calibration = 16,
            .validation = 4,
            .steps = 6,
            .batch = 3,
            .rate = 0.003,
            .threads = 1};
  }
  // On the grids of GGUF.
  DistillOptions blocks() const {
    DistillOptions how = options();
    how.bits = 4;
    how.group_size.reset();
    how.scale_dtype.reset();
    how.rate = 0.0003;
    return how;
  }
  // Everything learns, and at a rate at which codes move.
  DistillOptions codes() const {
    DistillOptions how = options();
    how.bits = 2;
    how.embedding_bits = 4;
    how.rate = 0.008;
    how.learn_codes = true;
    return how;
  }
  DistillReport made(const std::string& teacher, const std::string& out,
                     const DistillOptions& how) const {
    auto report = distill_model(teacher, path(out), how);
    if (!report) throw std::runtime_error(std::string(report.status().message()));
    return std::move(*report);
  }
  std::string refusal(const std::string& teacher, const std::string& out,
                      const DistillOptions& how) const {
    const auto report = distill_model(teacher, path(out), how);
    EXPECT_FALSE(report.ok());
    return std::string(report.status().message());
  }
};

TEST_F(DistillModel, LowersTheLossOfEveryKindOfModel) {
  for (const char* name : {"llama", "gemma2", "qwen3_moe", "qwen3_next"}) {
    SCOPED_TRACE(name);
    DistillOptions how = options();
    how.force = true;
    const DistillReport report = made(put_tiny_model(*this, name), "out", how);
    EXPECT_LT(report.kl, report.start_kl);
    EXPECT_GT(report.best_step, 0);
    EXPECT_EQ(report.steps, 6);
    EXPECT_GT(report.learned, 0);
    EXPECT_GT(report.peak_bytes, std::uint64_t{1} << 20);
    EXPECT_EQ(report.train_pieces + report.validation_pieces, 50);
    EXPECT_EQ(names().size(), 3u);  // the text, the teacher, the output
    ASSERT_GT(report.points.size(), 1u);
    // What was written is what was judged.
    DistillOptions again = how;
    again.steps = 0;
    const DistillReport start = made(path(name), "start", again);
    EXPECT_EQ(start.kl, report.start_kl);
    EXPECT_TRUE(contents("start") != contents("out"));
    std::filesystem::remove_all(path("start"));
    std::filesystem::remove_all(path("out"));
    std::filesystem::remove_all(path(name));
  }
}

TEST_F(DistillModel, TheBytesDependOnNothingElse) {
  const std::string model = put_tiny_model(*this, "llama");
  std::string first;
  for (const DistillOptions& what : {codes(), options()}) {
    DistillOptions how = what;
    how.force = true;
    made(model, "first", how);
    first = contents("first");
    for (const cpu::Isa isa : cpu::available_isas())
      for (const int threads : {1, 3}) {
        cpu::force_isa(isa);
        how.threads = threads;
        made(model, "again", how);
        EXPECT_TRUE(contents("again") == first) << threads << " threads, " << cpu::name(isa);
      }
    cpu::force_isa(cpu::Isa::none);
  }
  DistillOptions other = options();
  other.seed = 1;
  made(model, "other", other);
  EXPECT_TRUE(contents("other") != first);
}

// Kernels with a bound give other bytes, where there are any, and as good a student; still the same
// for any number of threads and processes.
TEST_F(DistillModel, TheFastestBytesDependOnTheMachineAlone) {
  for (const char* name : {"llama", "qwen3_next"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    DistillOptions how = options();
    how.embedding_bits = 4;
    how.rules = {{.match = "experts", .bits = 4, .group_size = 32}};
    how.fisher = how.force = true;
    if (name != std::string("llama")) how.rate = 0.001;
    made(model, "exact", how);
    how.preference = Preference::fastest;
    const DistillReport report = made(model, "fastest", how);
    EXPECT_LT(report.kl, report.start_kl);
    const std::string fastest = contents("fastest");
    EXPECT_EQ(contents("exact") != fastest, cpu::has_bf16());
    how.threads = 3;
    made(model, "again", how);
    EXPECT_TRUE(contents("again") == fastest);
    std::filesystem::remove_all(path(name));
  }
}

// Zero points stay while scales learn, and codes if they may; what was learned is what is read
// again.
TEST_F(DistillModel, IntegerZeroPoints) {
  struct Case {
    const char *name, *format, *dtype;
    bool moving;
  };
  for (const auto& [name, format, dtype, moving] :
       {Case{"llama", "mlx", "f32", false}, Case{"llama", "mlx", "bf16", true},
        Case{"llama", "compressed-tensors", "f32", true},
        Case{"llama", "compressed-tensors", "bf16", false},
        Case{"qwen3_next", "compressed-tensors", "bf16", false}}) {
    SCOPED_TRACE(std::string(name) + " " + format + " " + dtype + (moving ? ", codes" : ""));
    const std::string model = put_tiny_model(*this, name);
    DistillOptions how = moving ? codes() : options();
    how.format = format;
    how.zero_points = "integer";
    how.scale_dtype = dtype;
    how.embedding_bits = how.format == "mlx" ? 4 : 0;
    how.rules = {{.match = "experts", .keep = true}};
    how.force = true;
    if (name != std::string("llama")) how.rate = 0.001;
    const DistillReport report = made(model, "out", how);
    EXPECT_LT(report.kl, report.start_kl);
    EXPECT_EQ(report.written_kl, report.kl);
    EXPECT_EQ(report.codes_moved > 0, moving);
    how.steps = 0;
    made(model, "start", how);
    const auto start = Checkpoint::open(path("start")), out = Checkpoint::open(path("out"));
    ASSERT_TRUE(start.ok() && out.ok());
    std::int64_t scales = 0, learned = 0;
    for (const CheckpointTensor& tensor : out->tensors()) {
      if (!tensor.storage.quantized()) continue;
      EXPECT_EQ(tensor.storage.zeros == Storage::Zeros::packed, how.format != "mlx");
      GridRows before, after;
      ASSERT_TRUE(decode_grid(tensor, 0, tensor.rows(), after).ok());
      ASSERT_TRUE(decode_grid(*start->find(tensor.name), 0, tensor.rows(), before).ok());
      for (std::size_t i = 0; i < after.scales.size(); ++i) {
        learned += after.scales[i] != before.scales[i];
        const float zero = std::nearbyint(0 - after.biases[i] / after.scales[i]);
        ASSERT_EQ(zero, std::nearbyint(0 - before.biases[i] / before.scales[i]));
        ASSERT_TRUE(zero >= 0 && zero < static_cast<float>(1 << after.bits));
        const float bias = 0 - zero * after.scales[i];
        ASSERT_EQ(after.biases[i],
                  how.format == "mlx" && how.scale_dtype == "bf16" ? to_f32(to_bf16(bias)) : bias);
      }
      scales += static_cast<std::int64_t>(after.scales.size());
    }
    EXPECT_EQ(report.learned, scales);
    EXPECT_GT(learned, scales / 16);  // of bf16, most are rounded to what they were
  }
}

// Tied and untied, plain and with the columns of value heads in another order.
// A matrix of more rows than are written at once, whose number 32 does not divide: zero points of
// 32 rows share words.
TEST_F(DistillModel, ZeroPointsOfManyRows) {
  const std::string model = put_wide_model(*this, 2080);
  DistillOptions how = options();
  how.format = "compressed-tensors";
  how.bits = 4;
  how.steps = 2;
  how.calibration = 4;
  const DistillReport report = made(model, "out", how);
  EXPECT_NEAR(report.written_kl, report.kl, 1e-3 * report.kl);
}

// Nothing is written that is half of one teacher and half of another.
TEST_F(DistillModel, ATeacherThatChangesIsNoticed) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.progress = [&](const DistillProgress& state) {
    if (state.step == 2) {
      std::string bytes = text_of("llama/model.safetensors");
      bytes.back() ^= 1;
      put("llama/model.safetensors", bytes);
    }
    return DistillNext::go_on;
  };
  EXPECT_NE(refusal(model, "out", how).find("llama/model.safetensors"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path("out")));
  how.progress = {};
  how.resume = true;
  EXPECT_NE(refusal(model, "out", how).find("another teacher"), std::string::npos);
}

TEST_F(DistillModel, CodesMove) {
  for (const char* name : {"llama", "gemma2", "qwen3_moe", "qwen3_next"}) {
    SCOPED_TRACE(name);
    const std::string model = put_tiny_model(*this, name);
    DistillOptions how = codes();
    if (name == std::string("gemma2")) how.rate = 0.002;  // its start is good
    how.force = true;
    const DistillReport report = made(model, "out", how);
    EXPECT_LT(report.kl, report.start_kl);
    EXPECT_GT(report.best_step, 0);
    EXPECT_GT(report.codes_moved, report.codes / 1000);
    EXPECT_LT(report.codes_moved, report.codes / 4);
    how.steps = 0;
    const DistillReport still = made(model, "start", how);
    EXPECT_EQ(still.codes_moved, 0);
    EXPECT_EQ(still.kl, report.start_kl);
    // The files differ in as many codes; embedding and head differ in their scales alone.
    const auto start = Checkpoint::open(path("start")), out = Checkpoint::open(path("out"));
    ASSERT_TRUE(start.ok() && out.ok());
    std::int64_t moved = 0, learned_ends = 0;
    for (const CheckpointTensor& tensor : out->tensors()) {
      if (tensor.storage.kind != Storage::Kind::affine) continue;
      const CheckpointTensor& before = *start->find(tensor.name);
      const bool end = tensor.name.find("layers") == std::string::npos;
      learned_ends += end && !std::ranges::equal(tensor.scales, before.scales);
      const std::int64_t bits = end ? 4 : 2;
      for (std::size_t i = 0; i < tensor.data.size(); ++i) {
        const auto changed = static_cast<unsigned>(tensor.data[i] ^ before.data[i]);
        EXPECT_TRUE(!end || changed == 0);
        for (unsigned j = 0; j < 8; j += static_cast<unsigned>(bits))
          moved += (changed >> j & ((1u << bits) - 1)) != 0;
      }
    }
    EXPECT_EQ(moved, report.codes_moved);
    EXPECT_GT(learned_ends, 0);
    for (const char* made_here : {"start", "out", name})
      std::filesystem::remove_all(path(made_here));
  }
  // What a file holds exactly is read again and judged.
  DistillOptions how = blocks();
  how.learn_codes = true;
  how.rate = 0.001;
  how.steps = 20;
  const DistillReport report = made(put_tiny_model(*this, "llama"), "out.gguf", how);
  EXPECT_GT(report.codes_moved, 0);
  EXPECT_NEAR(report.written_kl, report.kl, 1e-4 * report.kl);
}

TEST_F(DistillModel, TheTeacherIsAskedOnce) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.teacher_cache = path("targets");
  how.teacher_top = 16;
  int read = 0;
  how.progress = [&](const DistillProgress& state) {
    read += state.doing == "reading";
    return DistillNext::go_on;
  };
  const DistillReport report = made(model, "out", how);
  EXPECT_LT(report.kl, report.start_kl);
  EXPECT_GT(read, 0);
  read = 0;
  made(model, "again", how);
  EXPECT_EQ(read, 0);
  EXPECT_TRUE(contents("again") == contents("out"));

  const std::string file = path("targets") + ": made ";
  const std::string rest = "; expected another name for the new one, or force";
  DistillOptions other = how;
  other.teacher_top = 8;
  EXPECT_EQ(refusal(model, "new", other), "teacher_cache: " + file + "with teacher_top 16" + rest);
  other = how;
  other.validation = 5;
  EXPECT_NE(refusal(model, "new", other).find(file + "of other pieces of text"), std::string::npos);
  other = how;
  other.preference = Preference::fastest;
  EXPECT_EQ(refusal(model, "new", other), "teacher_cache: " + file + "without fastest" + rest);
  other = how;
  other.teacher_top = 4;
  EXPECT_EQ(refusal(model, "new", other), "teacher_top: 4, expected an integer 5..16777216");
  other = how;
  other.teacher_cache = path("text.txt");
  EXPECT_NE(refusal(model, "new", other).find("text.txt"), std::string::npos);
  EXPECT_EQ(text_of("text.txt"), tiny_text(1600));
  EXPECT_EQ(refusal(put_tiny_model(*this, "gemma2"), "new", how),
            "teacher_cache: " + file + "by another teacher" + rest);
  EXPECT_FALSE(std::filesystem::exists(path("new.distill")));  // before any work
  other = how;
  other.validation = 5;
  other.force = true;
  made(model, "other", other);
  EXPECT_GT(read, 0);
}

// A batch of three: some processes have more pieces than others, and the fourth has none.
TEST_F(DistillModel, ProcessesMakeTheSameBytes) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions codes = options(), text = options(), blocks_of_gguf = blocks();
  codes.embedding_bits = 4;
  codes.learn_codes = true;
  codes.batch = 7;
  codes.judge = true;
  text.data.clear();
  text.self_text = true;
  text.preference = Preference::fastest;
  DistillOptions cached = options();
  cached.teacher_cache = path("targets");
  for (DistillOptions how : {codes, text, cached, blocks_of_gguf}) {
    how.steps = 2;
    how.calibration = 5;
    how.force = true;
    const std::string out = how.bits == 4 ? "out.gguf" : "out";
    const auto bytes = [&] { return how.bits == 4 ? text_of(out) : contents(out); };
    const DistillReport one = made(model, out, how);
    const std::string whole = bytes();
    const std::string targets = how.teacher_cache.empty() ? "" : text_of("targets");
    for (const int count : {2, 3, 4}) {
      if (count == 3) std::filesystem::remove(path("targets"));  // of four it is there
      if (how.bits == 4 && count != 3) continue;                 // that is slow
      SCOPED_TRACE(count);
      ThreadRanks::run(count, [&](Ranks& ranks) {
        DistillOptions own = how;
        own.ranks = &ranks;
        const auto report = distill_model(model, path(out), own);
        ASSERT_TRUE(report) << report.status().message();
        EXPECT_EQ(report->start_kl, one.start_kl);
        EXPECT_EQ(report->kl, one.kl);
        EXPECT_EQ(report->written_kl, one.written_kl);
        EXPECT_EQ(report->rate, one.rate);
        EXPECT_EQ(report->codes_moved, one.codes_moved);
        EXPECT_EQ(report->points.back().train_kl, one.points.back().train_kl);
        EXPECT_EQ(report->judged.has_value(), how.judge);
        if (how.judge) {
          EXPECT_EQ(report->judged->models[1].layers, one.judged->models[1].layers);
        }
      });
      EXPECT_EQ(bytes(), whole);
      EXPECT_EQ(how.teacher_cache.empty() ? "" : text_of("targets"), targets);
      EXPECT_FALSE(std::filesystem::exists(path(out + ".distill")));
    }
  }
}

TEST_F(DistillModel, ProcessesStopTogetherAndGoOn) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  made(model, "whole", how);
  const std::string whole = contents("whole");
  for (const int who : {0, 1}) {  // is told to stop, at a step and before
    for (const std::string_view when : {"calibrating", "learning"}) {
      ThreadRanks::run(2, [&](Ranks& ranks) {
        DistillOptions own = how;
        own.ranks = &ranks;
        own.progress = [&](const DistillProgress& state) {
          return ranks.rank() == who && state.doing == when &&
                         (when != "learning" || state.step == 3)
                     ? DistillNext::stop
                     : DistillNext::go_on;
        };
        EXPECT_EQ(distill_model(model, path("out"), own).status().code(), Code::cancelled);
      });
      EXPECT_EQ(std::filesystem::exists(path("out.distill/state")), when == "learning");
      std::int64_t first = 0;  // step of the run that goes on, as another number of processes
      ThreadRanks::run(3, [&](Ranks& ranks) {
        DistillOptions own = how;
        own.ranks = &ranks;
        own.resume = true;
        own.progress = [&](const DistillProgress& state) {
          if (ranks.rank() == 0 && first == 0) first = state.step;
          return DistillNext::go_on;
        };
        const auto report = distill_model(model, path("out"), own);
        ASSERT_TRUE(report) << report.status().message();
      });
      EXPECT_EQ(first, when == "learning" ? 4 : 1);
      EXPECT_EQ(contents("out"), whole);
      std::filesystem::remove_all(path("out"));
    }
  }
  // One that is told to finish makes all of them.
  std::atomic<int> early = 0;
  ThreadRanks::run(2, [&](Ranks& ranks) {
    DistillOptions own = how;
    own.ranks = &ranks;
    own.progress = [&](const DistillProgress& state) {
      return ranks.rank() == 1 && state.step == 2 ? DistillNext::finish : DistillNext::go_on;
    };
    const auto report = distill_model(model, path("out"), own);
    ASSERT_TRUE(report) << report.status().message();
    EXPECT_EQ(report->steps, 2);
    early += report->finished_early;
  });
  EXPECT_EQ(early, 2);
}

TEST(GradientSum, PartsAddUpToTheSameTree) {
  const auto number = [](std::int64_t i) {
    return std::ldexp(1.0f + 0x1p-20f * float(i), int(i % 9));
  };
  for (const std::int64_t batch : {1, 2, 3, 5, 8, 11, 13}) {
    GradientSum one;
    for (std::int64_t i = 0; i < batch; ++i) one.add({number(i), 1});
    const std::vector<float> whole = one.take();
    EXPECT_EQ(whole[1], static_cast<float>(batch));
    for (const int count : {2, 3, 4})
      ThreadRanks::run(count, [&](Ranks& ranks) {
        const std::int64_t first = batch * ranks.rank() / count;
        GradientSum sum(first);
        for (std::int64_t i = first; i < batch * (ranks.rank() + 1) / count; ++i)
          sum.add({number(i), 1});
        const auto all = sum.take(&ranks, {});
        ASSERT_TRUE(all);
        EXPECT_EQ(*all, whole);
      });
  }
  // The tree itself: ((a + b) + (c + d)) + e.
  GradientSum five;
  for (const float x : {1.0f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-23f}) five.add({x});
  EXPECT_EQ(five.take()[0], ((1.0f + 0x1p-24f) + (0x1p-24f + 0x1p-24f)) + 0x1p-23f);
}

TEST_F(DistillModel, LearnsFromATextOfTheTeachersOwn) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.data.clear();
  how.self_text = true;
  const DistillReport report = made(model, "out", how);
  EXPECT_LT(report.kl, report.start_kl);
  EXPECT_EQ(report.validation_pieces, 4);
  EXPECT_EQ(report.train_pieces, 18);  // for 6 steps of 3
  how.progress = [](const DistillProgress& state) {
    return state.doing == "sampling" && state.share > 0.5 ? DistillNext::stop : DistillNext::go_on;
  };
  EXPECT_EQ(refusal(model, "again", how), "distill: cancelled; resume goes on from here");
  how.progress = {};
  how.resume = true;
  made(model, "again", how);
  EXPECT_TRUE(contents("again") == contents("out"));
}

TEST_F(DistillModel, GoesOnWhereItWasStopped) {
  const std::string model = put_tiny_model(*this, "llama");
  for (const std::string out : {"out", "out.gguf"}) {
    DistillOptions how = out == "out" ? codes() : blocks();
    how.rate.reset();
    const auto bytes_of = [&](const std::string& name) {
      return out == "out" ? contents(name) : text_of(name);
    };
    int calls = 0;
    how.progress = [&](const DistillProgress&) {
      return ++calls > 0 ? DistillNext::go_on : DistillNext::stop;
    };
    made(model, "whole-" + out, how);
    const std::string whole = bytes_of("whole-" + out);
    const int all = calls;
    ASSERT_GT(all, 20);
    for (int stop = 1; stop < all; stop += out == "out" ? 7 : 13) {
      SCOPED_TRACE(out + ", " + std::to_string(stop));
      calls = 0;
      DistillOptions stopped = how;
      stopped.checkpoint_minutes = stop % 2 == 0 ? 0 : 5;
      stopped.progress = [&](const DistillProgress&) {
        return ++calls < stop ? DistillNext::go_on : DistillNext::stop;
      };
      const auto report = distill_model(model, path(out), stopped);
      ASSERT_FALSE(report.ok());
      EXPECT_EQ(report.status().code(), Code::cancelled);
      EXPECT_FALSE(std::filesystem::exists(path(out)));
      DistillOptions again = how;
      again.progress = {};
      if (std::filesystem::exists(path(out + ".distill"))) {
        EXPECT_GT(stop, 1);
        EXPECT_NE(refusal(model, out, again).find("resume"), std::string::npos);
      }
      again.resume = true;
      made(model, out, again);
      EXPECT_TRUE(bytes_of(out) == whole);
      EXPECT_FALSE(std::filesystem::exists(path(out + ".distill")));
      std::filesystem::remove_all(path(out));
    }
  }
}

// The command says `finish` from Ctrl-C on, also while the result is written.
TEST_F(DistillModel, FinishKeepsTheBestSoFar) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  bool pressed = false;
  how.progress = [&](const DistillProgress& state) {
    pressed = pressed || state.step == 2;
    return pressed ? DistillNext::finish : DistillNext::go_on;
  };
  const DistillReport report = made(model, "out", how);
  EXPECT_TRUE(report.finished_early);
  EXPECT_EQ(report.steps, 2);
  EXPECT_LE(report.kl, report.start_kl);
}

// ---- GGUF ----

// The codes, scales and biases of the file are those of MLX's folder, which learned on the same
// grids.
TEST_F(DistillModel, BlocksHoldWhatWasLearnedExactly) {
  for (const char* name : {"llama", "qwen3_moe", "phi3"})
    for (const int bits : {4, 5}) {
      SCOPED_TRACE(std::string(name) + ", " + std::to_string(bits) + " bits");
      const std::string model = put_tiny_model(*this, name);
      DistillOptions how = blocks();
      how.bits = bits;
      how.force = true;
      const DistillReport report = made(model, "out.gguf", how);
      EXPECT_EQ(report.type, bits == 4 ? "Q4_1" : "Q5_1");
      EXPECT_EQ(report.bits, bits);
      EXPECT_LT(report.kl, report.start_kl);
      EXPECT_NEAR(report.written_kl, report.kl, 1e-4 * report.kl);
      std::size_t learned = 0;
      for (const QuantizedTensor& tensor : report.output.tensors)
        learned += tensor.to == report.type;
      EXPECT_GE(learned, 8u);
      how.group_size = 32;
      how.scale_dtype = "f16";
      const DistillReport folder = made(model, "out", how);
      EXPECT_EQ(folder.kl, report.kl);
      EXPECT_EQ(folder.written_kl, folder.kl);
      const auto back =
          quantize_model(path("out.gguf"), path("back"),
                         {.format = "mlx", .transcode = true, .scale_dtype = "f16", .force = true});
      ASSERT_TRUE(back.ok()) << back.status().message();
      EXPECT_EQ(back->scale_change, 0);
      const auto difference = compare_models(path("back"), path("out"));
      ASSERT_TRUE(difference.ok()) << difference.status().message();
      EXPECT_EQ(difference->equal(), difference->tensors.size());
      EXPECT_TRUE(difference->only_in_model.empty() && difference->shapes_differ.empty());
      std::filesystem::remove_all(path(name));
    }
}

TEST_F(DistillModel, TheEmbeddingIsTheTeachersOrQuantised) {
  const std::string model = put_tiny_model(*this, "qwen2");
  ASSERT_TRUE(quantize_model(model, path("teacher.gguf"), {.type = "Q8_0"}).ok());
  const auto stored = [&](const std::string& file, const char* name) {
    const auto opened = Checkpoint::open(path(file));
    if (!opened) throw std::runtime_error(std::string(opened.status().message()));
    const CheckpointTensor& tensor = *opened->find(name);
    return tensor.storage.str() + ":" +
           std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  };
  DistillOptions how = blocks();
  how.steps = 2;
  made(path("teacher.gguf"), "kept.gguf", how);
  for (const char* name : {"token_embd.weight", "output.weight"}) {
    EXPECT_TRUE(stored("kept.gguf", name) == stored("teacher.gguf", name));
    EXPECT_TRUE(stored("kept.gguf", name).starts_with("Q8_0:"));
  }
  how.embedding_bits = 5;  // of rows that are too short for Q5_K
  const DistillReport report = made(model, "coarse.gguf", how);
  EXPECT_TRUE(stored("coarse.gguf", "token_embd.weight").starts_with("Q5_1:"));
  EXPECT_GT(report.written_kl, report.kl);
  EXPECT_TRUE(std::isfinite(report.written_kl));
}

// A layer with rows of 256 and shorter ones.
TEST_F(DistillModel, SuperBlocksAreFittedToWhatWasLearned) {
  put_wide_model(*this, 64);
  DistillOptions how = blocks();
  how.bits.reset();
  how.type = "Q4_K_S";
  how.steps = 4;
  const DistillReport report = made(path("wide"), "out.gguf", how);
  EXPECT_EQ(report.type, "Q4_K_S");
  EXPECT_LT(report.kl, report.start_kl);
  EXPECT_NE(report.written_kl, report.kl);
  EXPECT_LT(report.written_kl, 3 * report.start_kl);
  std::map<std::string, std::string> types;
  for (const QuantizedTensor& tensor : report.output.tensors) types[tensor.name] = tensor.to;
  EXPECT_EQ(types.at("blk.0.attn_q.weight"), "Q4_K");
  EXPECT_EQ(types.at("blk.0.attn_v.weight"), "Q5_K");
  EXPECT_EQ(types.at("blk.0.attn_output.weight"), "Q5_0");
  EXPECT_EQ(types.at("token_embd.weight"), "F32");
  // q, k, gate and up with 4 bits, v with 5: a scale and a bias for 32 weights.
  EXPECT_EQ(report.learned, 2 * (128 + 64 + 64 + 64 + 64) * 256 / 32);

  // With nothing learned, the grids of a matrix are those of a folder, and the blocks are nearer to
  // them than to the teacher's numbers.
  how.steps = 0;
  how.force = true;
  made(path("wide"), "out.gguf", how);
  DistillOptions plain = how;
  plain.type.reset();
  plain.group_size = 32;
  plain.scale_dtype = "f16";
  made(path("wide"), "out", plain);
  const auto errors = [&](const std::string& model) {
    const auto difference = compare_models(path(model), path("out.gguf"));
    if (!difference) throw std::runtime_error(std::string(difference.status().message()));
    std::map<std::string, double> found;
    for (const TensorDifference& tensor : difference->tensors)
      found[tensor.name] = tensor.relative_error();
    return found;
  };
  const std::string layer = "model.layers.0.";
  const auto fitted = errors("out"), taught = errors("wide");
  for (const char* name : {"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                           "mlp.gate_proj.weight", "mlp.up_proj.weight"}) {
    EXPECT_GT(fitted.at(layer + name), 0) << name;
    EXPECT_LT(fitted.at(layer + name), 0.2 * taught.at(layer + name)) << name;
  }

  // The mix gives the values Q6_K, which has no biases; short rows have no super-blocks at all.
  how.type = "q4_k";
  EXPECT_EQ(made(path("wide"), "out.gguf", how).type, "Q4_K_M");
  EXPECT_EQ(refusal(put_tiny_model(*this, "llama"), "short.gguf", how),
            "type Q4_K_M: no matrix of a layer becomes Q4_1, Q5_1, Q4_K or Q5_K (rows of "
            "super-blocks are multiples of 256), expected Q4_1 or Q5_1");
}

// Super-blocks may lose more than was learned.
TEST_F(DistillModel, AFileIsNeverWorseThanItsStart) {
  put_wide_model(*this, 64);
  DistillOptions how = blocks();
  how.bits.reset();
  how.type = "Q4_K_S";
  how.force = true;
  how.steps = 0;
  const DistillReport start = made(path("wide"), "start.gguf", how);
  EXPECT_EQ(start.written_start_kl, start.written_kl);
  EXPECT_FALSE(start.start_written);
  how.steps = 1;
  how.rate = 0.0002;
  int starts = 0, learned = 0;
  for (how.seed = 0; how.seed < 6; ++how.seed) {
    const DistillReport report = made(path("wide"), "out.gguf", how);
    EXPECT_EQ(report.written_start_kl, start.written_kl);
    EXPECT_LE(report.written_kl, report.written_start_kl);
    if (report.best_step == 0) continue;
    EXPECT_LT(report.kl, report.start_kl);
    ++(report.start_written ? starts : learned);
    const bool same = text_of("out.gguf") == text_of("start.gguf");
    EXPECT_EQ(same, report.start_written) << how.seed;
  }
  EXPECT_GT(starts, 0);
  EXPECT_GT(learned, 0);
}

TEST_F(DistillModel, GgufRefusals) {
  const std::string model = put_tiny_model(*this, "llama");
  const auto with = [&](const auto& change) {
    DistillOptions how = blocks();
    change(how);
    return refusal(model, "out.gguf", how);
  };
  EXPECT_EQ(with([](DistillOptions& o) { o.bits = 3; }),
            "bits: 3 in a GGUF file, expected 4 (Q4_1), 5 (Q5_1), a type or format mlx");
  EXPECT_EQ(with([](DistillOptions& o) { o.group_size = 64; }),
            "group_size: 64: groups of GGUF have 32 weights, expected 32");
  EXPECT_EQ(with([](DistillOptions& o) { o.scale_dtype = "f32"; }),
            "scale_dtype: f32: scales of GGUF are f16, expected f16");
  EXPECT_EQ(with([](DistillOptions& o) { o.type = "Q4_1"; }),
            "type and bits both given, expected one");
  EXPECT_EQ(with([](DistillOptions& o) { o.format = "safetensors"; }),
            "format: safetensors, which has no codes, expected mlx, gguf or compressed-tensors");
  EXPECT_EQ(with([](DistillOptions& o) { o.zero_points = "integer"; }),
            "zero_points: the format is gguf, expected format mlx or compressed-tensors");
  EXPECT_EQ(with([](DistillOptions& o) {
              o.format = "compressed-tensors";
              o.zero_points = "real";
            }),
            "zero_points: real, expected integer for format compressed-tensors");
  EXPECT_EQ(with([](DistillOptions& o) {
              o.format = "compressed-tensors";
              o.type = "Q4_1";
            }),
            "type Q4_1: the format is compressed-tensors, expected format gguf");
  const auto of_type = [&](const char* type) {
    return with([&](DistillOptions& o) {
      o.bits.reset();
      o.type = type;
    });
  };
  for (const char* type : {"Q8_0", "Q6_K", "Q3_K_M", "Q4_0", "F16"})
    EXPECT_EQ(of_type(type), std::string("type: ") + type +
                                 " has no scales and biases that could learn, expected Q4_1, Q5_1, "
                                 "Q4_K_S, Q4_K_M, Q5_K_S or Q5_K_M");
  EXPECT_NE(of_type("Q9").find("type: Q9"), std::string::npos);
  EXPECT_EQ(with([](DistillOptions& o) {
              o.bits.reset();
              o.format = "mlx";
              o.type = "Q4_1";
            }),
            "type Q4_1: the format is mlx, expected format gguf");
  EXPECT_NE(refusal(model, "out.gguf/", blocks()).find("ends in '/'"), std::string::npos);
  EXPECT_EQ(names().size(), 2u);  // the text and the teacher
  put("out.gguf", "precious");
  EXPECT_NE(with([](DistillOptions&) {}).find("exists"), std::string::npos);
  EXPECT_NE(with([](DistillOptions& o) { o.force = true; }).find("out.gguf"), std::string::npos);
  EXPECT_EQ(text_of("out.gguf"), "precious");
  EXPECT_FALSE(std::filesystem::exists(path("out.gguf.distill")));
}

TEST_F(DistillModel, ADamagedOrForeignStateIsRefused) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.checkpoint_minutes = 0;
  how.progress = [](const DistillProgress& state) {
    return state.step == 3 ? DistillNext::stop : DistillNext::go_on;
  };
  ASSERT_FALSE(distill_model(model, path("out"), how).ok());
  how.progress = {};
  how.resume = true;
  // The first difference is told.
  const auto with = [&](const auto& change) {
    DistillOptions other = how;
    change(other);
    return refusal(model, "out", other);
  };
  const std::string of = path("out.distill") + ": left by a run with ",
                    same = "; give the same, or force without resume to start again";
  EXPECT_EQ(with([](DistillOptions& o) { o.steps = 7; }), of + "steps 6, and it is 7 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.seed = UINT64_MAX; }),
            of + "seed 0, and it is 18446744073709551615 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.rate = 0.0030000000000000005; }),
            of + "rate 0.003, and it is 0.0030000000000000005 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.rate.reset(); }),
            of + "rate 0.003, and it is searched now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.calibration = 8; }),
            of + "calibration 16, and it is 8 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.learn_codes = true; }),
            of + "learn_codes off, and it is on now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.context = 16; }),
            of + "context 32, and it is 16 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.fisher = true; }),
            of + "fisher off, and it is on now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.embedding_bits.reset(); }),
            of + "embedding_bits 0, and it is 6 now" + same);
  EXPECT_EQ(with([](DistillOptions& o) { o.bits = 2; }), of + "bits 3, and it is 2 now" + same);
  put("other.txt", tiny_text(1700));
  EXPECT_EQ(with([&](DistillOptions& o) { o.data = {path("other.txt")}; }),
            of + "another data" + same);
  EXPECT_EQ(with([](DistillOptions& o) {
              o.data.clear();
              o.self_text = true;
            }),
            of + "self_text off, and it is on now" + same);
  const std::string gemma = put_tiny_model(*this, "gemma2");
  EXPECT_EQ(refusal(gemma, "out", how), of + "another teacher" + same);
  const std::string state = text_of("out.distill/state");
  for (const std::size_t at : {std::size_t{0}, state.size() / 2, state.size() - 1}) {
    std::string damaged = state;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    put("out.distill/state", damaged);
    EXPECT_NE(refusal(model, "out", how).find("damaged"), std::string::npos);
  }
  put("out.distill/state", state.substr(0, state.size() - 9));
  EXPECT_NE(refusal(model, "out", how).find("damaged"), std::string::npos);
  put("out.distill/state", state);
  put("out.distill/mine.txt", "precious");
  EXPECT_NE(refusal(model, "out", how).find("mine.txt"), std::string::npos);
  EXPECT_EQ(text_of("out.distill/mine.txt"), "precious");
}

TEST_F(DistillModel, ADamagedStartIsRefused) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.progress = [](const DistillProgress& state) {
    return state.doing == "learning" ? DistillNext::stop : DistillNext::go_on;
  };
  ASSERT_FALSE(distill_model(model, path("out"), how).ok());
  how.progress = {};
  how.resume = true;
  const std::string file = "out.distill/start/model.safetensors";
  const std::string good = text_of(file);
  std::string bad = good;
  bad[bad.size() - 50] ^= 1;
  put(file, bad);
  EXPECT_NE(refusal(model, "out", how).find("out.distill/start: damaged"), std::string::npos);
  put(file, good);
  put("out.distill/start/mine.txt", "precious");
  EXPECT_NE(refusal(model, "out", how).find("mine.txt"), std::string::npos);
  std::filesystem::remove(path("out.distill/start/mine.txt"));
  // Damage before anything was learned.
  std::filesystem::remove(path("out.distill/state"));
  put(file, bad);
  EXPECT_NE(refusal(model, "out", how).find("out.distill/start: damaged"), std::string::npos);
  put(file, good);
  made(model, "out", how);
}

// Nothing of somebody else's is removed, whatever its name.
TEST_F(DistillModel, AFolderOfTheSameName) {
  const std::string model = put_tiny_model(*this, "llama");
  for (const char* name : {"asked", "state", "removed/mine.txt", "start.partial/mine.txt"}) {
    put(std::string("out.distill/") + name, "precious");
    for (const bool resume : {false, true})
      for (const bool force : {false, true}) {
        DistillOptions how = options();
        how.resume = resume;
        how.force = force;
        EXPECT_NE(refusal(model, "out", how).find("out.distill"), std::string::npos);
        EXPECT_EQ(text_of(std::string("out.distill/") + name), "precious");
      }
    std::filesystem::remove_all(path("out.distill"));
  }
}

// What a kill leaves while a folder is emptied or removed does not stand in the way, nor is it
// taken for what it is not.
TEST_F(DistillModel, AFolderThatIsHalfRemoved) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  const DistillReport whole = made(model, "whole", how);
  const auto stop = [&] {
    DistillOptions stopped = options();
    stopped.force = true;
    stopped.progress = [](const DistillProgress& state) {
      return state.doing == "learning" ? DistillNext::stop : DistillNext::go_on;
    };
    ASSERT_FALSE(distill_model(model, path("out"), stopped).ok());
  };
  const auto lose = [&](const char* name) { std::filesystem::remove_all(path(name)); };
  stop();
  lose("out.distill/state");
  std::filesystem::rename(path("out.distill/start"), path("out.distill/removed"));
  lose("out.distill/removed/model.safetensors.index.json");
  how.resume = true;
  made(model, "out", how);
  EXPECT_EQ(contents("out"), contents("whole"));
  EXPECT_FALSE(std::filesystem::exists(path("out.distill")));

  // While an earlier result gave way to a new one.
  lose("out");
  stop();
  for (const char* name : {"out.distill/result", "out.distill/result.replaced"})
    std::filesystem::copy(path("whole"), path(name));
  made(model, "out", how);
  EXPECT_EQ(contents("out"), contents("whole"));

  lose("out");
  stop();
  lose("out.distill/asked");
  for (const bool resume : {true, false}) {
    how.resume = resume;
    how.force = true;
    EXPECT_NE(refusal(model, "out", how).find("but no `asked`"), std::string::npos);
    EXPECT_TRUE(std::filesystem::exists(path("out.distill/start")));
  }
  lose("out.distill");
  made(model, "out", how);

  // Whoever goes on with a run that was done learns what is left of it.
  std::filesystem::create_directory(path("out.distill"));
  how.force = false;
  how.resume = true;
  EXPECT_NE(refusal(model, "out", how).find("out.distill made, that folder is no longer needed"),
            std::string::npos);
}

TEST_F(DistillModel, OneRunAtATime) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  int asked = 0;
  how.progress = [&](const DistillProgress& state) {
    if (state.doing == "learning" && asked++ == 0)
      for (const bool force : {false, true}) {
        DistillOptions second = options();
        second.force = force;
        second.resume = !force;
        EXPECT_NE(refusal(model, "out", second).find("another run is using this folder"),
                  std::string::npos);
      }
    return DistillNext::go_on;
  };
  made(model, "out", how);
  EXPECT_GT(asked, 0);
}

// A run that fails before it has anything to go on from leaves nothing in the way.
TEST_F(DistillModel, LeavesNoEmptyFolder) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.data.clear();
  how.self_text = true;
  how.progress = [](const DistillProgress&) { return DistillNext::stop; };
  ASSERT_FALSE(distill_model(model, path("out"), how).ok());
  EXPECT_FALSE(std::filesystem::exists(path("out.distill")));
}

TEST_F(DistillModel, AStartOfOtherOptionsIsRefused) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = blocks();
  how.progress = [](const DistillProgress& state) {
    return state.doing == "searching" ? DistillNext::stop : DistillNext::go_on;
  };
  ASSERT_FALSE(distill_model(model, path("out.gguf"), how).ok());
  EXPECT_FALSE(std::filesystem::exists(path("out.gguf.distill/state")));
  how.progress = {};
  how.resume = true;
  const std::string of = path("out.gguf.distill") + ": left by a run with ",
                    same = "; give the same, or force without resume to start again";
  DistillOptions other = how;
  other.bits = 5;
  EXPECT_EQ(refusal(model, "out.gguf", other), of + "type Q4_1, and it is Q5_1 now" + same);
  other = how;
  other.rules = {{.match = "v_proj", .bits = 5}, {.match = "o_proj", .keep = true}};
  EXPECT_EQ(refusal(model, "out.gguf", other),
            of + "rules none, and it is v_proj=5, o_proj=keep now" + same);
  other = how;
  put("other.txt", tiny_text(1700));
  other.data = {path("other.txt")};
  EXPECT_EQ(refusal(model, "out.gguf", other), of + "another data" + same);
  other = how;
  other.preference = Preference::fastest;
  EXPECT_EQ(
      refusal(model, "out.gguf", other),
      of + "fastest off, and it is on (" + (cpu::has_bf16() ? "" : "no ") + "bf16) now" + same);
  // Without that file nothing is known.
  std::filesystem::rename(path("out.gguf.distill/asked"), path("asked"));
  EXPECT_EQ(
      refusal(model, "out.gguf", how),
      path("out.gguf.distill") +
          ": holds start, but no `asked`, as a run of bittern has; remove the folder, or choose "
          "another output");
  std::filesystem::rename(path("asked"), path("out.gguf.distill/asked"));
  // The tensors of the start count, too.
  other = blocks();
  other.bits = 5;
  other.progress = [](const DistillProgress& state) {
    return state.doing == "searching" ? DistillNext::stop : DistillNext::go_on;
  };
  ASSERT_FALSE(distill_model(model, path("five.gguf"), other).ok());
  std::filesystem::rename(path("out.gguf.distill/start"), path("start"));
  std::filesystem::rename(path("five.gguf.distill/start"), path("out.gguf.distill/start"));
  EXPECT_EQ(refusal(model, "out.gguf", how),
            path("out.gguf.distill/start") +
                ": written by a run with other options; give the same options, or force without "
                "resume to start again");
  std::filesystem::remove_all(path("out.gguf.distill/start"));
  std::filesystem::rename(path("start"), path("out.gguf.distill/start"));
  // How it will learn is free as long as nothing is learned.
  other = how;
  other.steps = 3;
  EXPECT_EQ(made(model, "out.gguf", other).steps, 3);
}

// Before there is anything to keep, a run that is to finish is stopped and can go on.
TEST_F(DistillModel, ATooEarlyFinishSaysSo) {
  const std::string model = put_tiny_model(*this, "llama");
  made(model, "whole", options());
  for (const char* doing : {"calibrating", "searching", "writing"})
    for (const DistillNext next : {DistillNext::finish, DistillNext::stop}) {
      const bool finish = next == DistillNext::finish;
      if (finish && doing == std::string("writing")) continue;  // it is finishing already
      SCOPED_TRACE(std::string(doing) + (finish ? ", finish" : ", stop"));
      DistillOptions how = options();
      how.progress = [&](const DistillProgress& state) {
        return state.doing == doing && (state.share > 0.3 || state.doing != "calibrating")
                   ? next
                   : DistillNext::go_on;
      };
      const auto report = distill_model(model, path("out"), how);
      EXPECT_EQ(report.status().code(), Code::cancelled);
      EXPECT_EQ(report.status().message(),
                finish ? std::string("distill: stopped while ") + doing +
                             ", before anything was learned; resume goes on from here"
                       : "distill: cancelled; resume goes on from here");
      how.progress = {};
      how.resume = true;
      made(model, "out", how);
      EXPECT_TRUE(contents("out") == contents("whole"));
      std::filesystem::remove_all(path("out"));
    }
}

// A run that was to replace its output and was stopped goes on with both options.
TEST_F(DistillModel, AStoppedRunMayStillReplace) {
  const std::string model = put_tiny_model(*this, "llama");
  made(model, "out", options());
  const std::string first = contents("out");
  DistillOptions how = options();
  how.seed = 1;
  how.force = true;
  how.progress = [](const DistillProgress& state) {
    return state.step == 3 ? DistillNext::stop : DistillNext::go_on;
  };
  ASSERT_FALSE(distill_model(model, path("out"), how).ok());
  how.progress = {};
  how.force = false;
  how.resume = true;
  EXPECT_NE(refusal(model, "out", how).find("exists"), std::string::npos);
  EXPECT_TRUE(contents("out") == first);
  how.force = true;
  bool calibrated = false;
  how.progress = [&](const DistillProgress& state) {
    calibrated = calibrated || state.doing == "calibrating" || state.doing == "searching";
    return DistillNext::go_on;
  };
  made(model, "out", how);
  EXPECT_FALSE(calibrated);
  EXPECT_TRUE(contents("out") != first);
}

TEST_F(DistillModel, Refusals) {
  const std::string model = put_tiny_model(*this, "llama");
  const auto with = [&](const auto& change) {
    DistillOptions how = options();
    change(how);
    return refusal(model, "out", how);
  };
  EXPECT_EQ(with([](DistillOptions& o) { o.data.clear(); }),
            "data: no text given, expected the path of one to learn from, or self_text");
  EXPECT_EQ(with([](DistillOptions& o) { o.self_text = true; }),
            "data and self_text exclude each other");
  EXPECT_EQ(with([](DistillOptions& o) { o.batch = 0; }),
            "batch: 0, expected an integer 1..16777216");
  EXPECT_EQ(with([](DistillOptions& o) { o.steps = -1; }),
            "steps: -1, expected an integer 0..16777216");
  EXPECT_NE(with([](DistillOptions& o) { o.rate = 2.0; }).find("rate"), std::string::npos);
  EXPECT_EQ(with([](DistillOptions& o) { o.embedding_bits = 1; }),
            "embedding_bits: 1, expected 0, 2, 3, 4, 5, 6 or 8");
  EXPECT_EQ(with([](DistillOptions& o) { o.data = {"/dev/zero"}; }),
            "/dev/zero: a device, expected a file of text");
  EXPECT_NE(with([](DistillOptions& o) { o.bits = 7; }).find("bits: 7"), std::string::npos);
  EXPECT_NE(with([](DistillOptions& o) { o.validation = 50; }).find("50 pieces of 32 tokens"),
            std::string::npos);
  EXPECT_NE(with([](DistillOptions& o) { o.data = {"/none.txt"}; }).find("/none.txt"),
            std::string::npos);
  put("out/mine.txt", "precious");
  EXPECT_NE(with([](DistillOptions&) {}).find("out"), std::string::npos);
  EXPECT_EQ(names("out").size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(path("out.distill")));
}

}  // namespace
}  // namespace bittern
