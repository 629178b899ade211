#include "convert/output.h"

#include <gtest/gtest.h>

#include "formats/test_folder.h"

namespace bittern {
namespace {

using Outputs = TestFolder;

// Two tensors of 4 bytes behind a head of 2, and padding to 16.
OutputLayout layout() {
  return {.files = {{.name = "a", .head = "hd", .bytes = 16}},
          .tensors = {{.file = 0, .begin = 2, .bytes = 4}, {.file = 0, .begin = 6, .bytes = 4}}};
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST_F(Outputs, AppearOnlyWhole) {
  const std::string out = path("out");
  {
    auto output = ModelOutput::create(out, layout(), {.fingerprint = 1});
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_TRUE(output->write(0, 0, as_bytes("1234")).ok());
    EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
    EXPECT_EQ(output->write(1, 2, as_bytes("123")).code(), Code::internal);  // past its end
  }
  EXPECT_TRUE(names().empty());  // given up
  auto output = ModelOutput::create(out, layout(), {.fingerprint = 1});
  ASSERT_TRUE(output);
  EXPECT_TRUE(output->write(1, 0, as_bytes("5678")).ok());
  EXPECT_TRUE(output->write(0, 2, as_bytes("34")).ok());
  EXPECT_TRUE(output->write(0, 0, as_bytes("12")).ok());
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(text_of("out"), std::string("hd12345678\0\0\0\0\0\0", 16));
}

TEST_F(Outputs, ResumeWithTheTensorsThatAreWhole) {
  const std::string out = path("out");
  const OutputOptions options{.folder = true, .resume = true, .fingerprint = 7};
  {
    auto output = ModelOutput::create(out, layout(), options);
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_EQ(output->finished(), 0u);
    ASSERT_TRUE(output->write(1, 0, as_bytes("5678")).ok());
    ASSERT_TRUE(output->finish(1).ok());
    output->keep();
  }
  // A line that was being written when the power went counts for nothing.
  put("out.partial.journal", text_of("out.partial.journal") + "0");
  {
    auto output = ModelOutput::create(out, layout(), options);
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_TRUE(output->finished(1));
    EXPECT_FALSE(output->finished(0));
    ASSERT_TRUE(output->write(0, 0, as_bytes("1234")).ok());
    ASSERT_TRUE(output->finish(0).ok());
    output->keep();
  }
  auto output = ModelOutput::create(out, layout(), options);
  ASSERT_TRUE(output);
  EXPECT_EQ(output->finished(), 2u);
  ASSERT_TRUE(output->add_file("config.json", "{}").ok());
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(text_of("out/a").substr(0, 10), "hd12345678");
  EXPECT_EQ(text_of("out/config.json"), "{}");
}

TEST_F(Outputs, OfAnotherBootBeginAnew) {
  const std::string out = path("out");
  const OutputOptions options{.resume = true, .fingerprint = 7};
  {
    auto output = ModelOutput::create(out, layout(), options);
    ASSERT_TRUE(output);
    ASSERT_TRUE(output->finish(0).ok());
    output->keep();
  }
  std::string journal = text_of("out.partial.journal");
  const std::size_t boot = journal.find(' ', journal.find("1 ") + 2);
  ASSERT_NE(boot, std::string::npos);
  journal.insert(boot + 1, "x");
  put("out.partial.journal", journal);
  auto output = ModelOutput::create(out, layout(), options);
  ASSERT_TRUE(output) << output.status().message();
  EXPECT_EQ(output->finished(), 0u);
}

TEST_F(Outputs, RefuseWhatIsNotTheirs) {
  const auto message = [&](const std::string& name, OutputOptions options) {
    const auto output = ModelOutput::create(path(name), layout(), options);
    return output ? std::string("made") : std::string(output.status().message());
  };
  put("there", "mine");
  EXPECT_NE(message("there", {}).find("there: exists, expected a new name"), std::string::npos);
  put("folder/notes.txt", "mine");
  EXPECT_NE(message("folder", {.force = true}).find("holds no model"), std::string::npos);
  EXPECT_EQ(text_of("folder/notes.txt"), "mine");
  {
    auto output = ModelOutput::create(path("out"), layout(), {.fingerprint = 1});
    ASSERT_TRUE(output);
    EXPECT_NE(message("out", {.resume = true, .fingerprint = 1}).find("another process"),
              std::string::npos);
    output->keep();
  }
  EXPECT_NE(message("out", {.fingerprint = 1}).find("left by a run that was stopped"),
            std::string::npos);
  EXPECT_NE(message("out", {.resume = true, .fingerprint = 2}).find("other options"),
            std::string::npos);
  put("out.partial.journal", text_of("out.partial.journal") + "99\n");
  EXPECT_NE(message("out", {.resume = true, .fingerprint = 1}).find("not a journal"),
            std::string::npos);
  EXPECT_EQ(message("out", {.force = true, .fingerprint = 2}), "made");
  OutputLayout huge = layout();
  huge.files[0].bytes = std::uint64_t{1} << 60;
  const auto output = ModelOutput::create(path("huge"), huge, {});
  ASSERT_FALSE(output);
  EXPECT_NE(output.status().message().find("disk has room for"), std::string_view::npos);
}

TEST_F(Outputs, ReplaceAFolderWhole) {
  put("out/config.json", "old");
  put("out/model-00002-of-00002.safetensors", "old");
  auto output = ModelOutput::create(path("out"), layout(), {.folder = true, .force = true});
  ASSERT_TRUE(output) << output.status().message();
  EXPECT_EQ(text_of("out/config.json"), "old");  // until the new one is whole
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(names("out"), std::vector<std::string>{"a"});
}

}  // namespace
}  // namespace bittern
