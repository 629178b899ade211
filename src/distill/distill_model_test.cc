// distill_model on tiny models: what is learned, the same bytes however it runs, going on after a
// stop, what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <stdexcept>

#include "bittern/distill.h"
#include "cpu/dispatch.h"
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
  made(model, "first", options());
  const std::string first = contents("first");
  for (const cpu::Isa isa : cpu::available_isas())
    for (const int threads : {1, 3}) {
      cpu::force_isa(isa);
      DistillOptions how = options();
      how.threads = threads;
      how.force = true;
      made(model, "again", how);
      EXPECT_TRUE(contents("again") == first) << threads << " threads, " << cpu::name(isa);
    }
  cpu::force_isa(cpu::Isa::none);
  DistillOptions other = options();
  other.seed = 1;
  made(model, "other", other);
  EXPECT_TRUE(contents("other") != first);
}

TEST_F(DistillModel, GoesOnWhereItWasStopped) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.rate.reset();
  made(model, "whole", how);
  const std::string whole = contents("whole");
  int calls = 0;
  how.progress = [&](const DistillProgress&) {
    return ++calls > 0 ? DistillNext::go_on : DistillNext::stop;
  };
  made(model, "counted", how);
  const int all = calls;
  ASSERT_GT(all, 20);
  for (int stop = 1; stop < all; stop += 7) {
    SCOPED_TRACE(stop);
    calls = 0;
    DistillOptions stopped = how;
    stopped.checkpoint_minutes = stop % 2 == 0 ? 0 : 5;
    stopped.progress = [&](const DistillProgress&) {
      return ++calls < stop ? DistillNext::go_on : DistillNext::stop;
    };
    const auto report = distill_model(model, path("out"), stopped);
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), Code::cancelled);
    EXPECT_FALSE(std::filesystem::exists(path("out")));
    EXPECT_NE(refusal(model, "out", options()).find("resume"), std::string::npos);
    DistillOptions again = how;
    again.progress = {};
    again.resume = true;
    made(model, "out", again);
    EXPECT_TRUE(contents("out") == whole);
    EXPECT_FALSE(std::filesystem::exists(path("out.distill")));
    std::filesystem::remove_all(path("out"));
  }
}

TEST_F(DistillModel, FinishKeepsTheBestSoFar) {
  const std::string model = put_tiny_model(*this, "llama");
  DistillOptions how = options();
  how.progress = [](const DistillProgress& state) {
    return state.step == 2 ? DistillNext::finish : DistillNext::go_on;
  };
  const DistillReport report = made(model, "out", how);
  EXPECT_TRUE(report.finished_early);
  EXPECT_EQ(report.steps, 2);
  EXPECT_LE(report.kl, report.start_kl);
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
  DistillOptions other = how;
  other.steps = 7;
  EXPECT_NE(refusal(model, "out", other).find("another teacher, text or options"),
            std::string::npos);
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

TEST_F(DistillModel, Refusals) {
  const std::string model = put_tiny_model(*this, "llama");
  const auto with = [&](const auto& change) {
    DistillOptions how = options();
    change(how);
    return refusal(model, "out", how);
  };
  EXPECT_EQ(with([](DistillOptions& o) { o.data.clear(); }),
            "data: no text given, expected the path of one to learn from");
  EXPECT_EQ(with([](DistillOptions& o) { o.batch = 0; }),
            "batch: 0, expected an integer 1..16777216");
  EXPECT_EQ(with([](DistillOptions& o) { o.steps = -1; }),
            "steps: -1, expected an integer 0..16777216");
  EXPECT_NE(with([](DistillOptions& o) { o.rate = 2.0; }).find("rate"), std::string::npos);
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
