#include "convert/output.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "formats/fingerprint.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

// Two tensors of 4 bytes behind a head of 2, and padding to 16.
OutputLayout layout() {
  return {.files = {{.name = "a", .head = "hd", .bytes = 16}},
          .tensors = {{.file = 0, .begin = 2, .bytes = 4}, {.file = 0, .begin = 6, .bytes = 4}}};
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

class Outputs : public TestFolder {
 protected:
  static Status write(ModelOutput& output, std::size_t tensor, std::uint64_t offset,
                      std::string_view text) {
    return output.write(tensor, offset, as_bytes(text), Checksum::of(as_bytes(text)));
  }
  std::string message(const std::string& name, const OutputOptions& options) const {
    const auto output = ModelOutput::create(path(name), layout(), options);
    return output ? std::string("made") : std::string(output.status().message());
  }
  static bool has(const std::string& text, std::string_view part) {
    return text.find(part) != text.npos;
  }
  // A folder as the command leaves it.
  void put_ours(const std::string& name) const {
    put(name + "/config.json", "old");
    put(name + "/model.safetensors.index.json",
        R"({"metadata": {"written_by": "bittern",
            "files": ["config.json", "a", "model.safetensors.index.json"]}})");
  }
};

TEST_F(Outputs, AppearOnlyWhole) {
  const std::string out = path("out");
  {
    auto output = ModelOutput::create(out, layout(), {.fingerprint = 1});
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_TRUE(write(*output, 0, 0, "1234").ok());
    EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
    EXPECT_EQ(write(*output, 1, 2, "123").code(), Code::internal);  // past its end
  }
  EXPECT_TRUE(names().empty());  // given up
  auto output = ModelOutput::create(out, layout(), {.fingerprint = 1});
  ASSERT_TRUE(output);
  EXPECT_TRUE(write(*output, 1, 0, "5678").ok());
  EXPECT_TRUE(write(*output, 0, 2, "34").ok());
  EXPECT_TRUE(write(*output, 0, 0, "12").ok());
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(text_of("out"), std::string("hd12345678\0\0\0\0\0\0", 16));
}

TEST_F(Outputs, ResumeWithTheTensorsThatAreWhole) {
  const std::string out = path("out");
  const OutputOptions options{
      .folder = true, .resume = true, .fingerprint = 7, .texts = {"config.json"}};
  {
    auto output = ModelOutput::create(out, layout(), options);
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_FALSE(output->finished(1));
    ASSERT_TRUE(write(*output, 1, 0, "56").ok());
    ASSERT_TRUE(write(*output, 1, 2, "78").ok());
    ASSERT_TRUE(write(*output, 0, 2, "34").ok());  // half of it
    output->keep();
  }
  // A line that was being written when the power went counts for nothing.
  put("out.partial.journal", text_of("out.partial.journal") + "piece 0 0 2");
  {
    auto output = ModelOutput::create(out, layout(), options);
    ASSERT_TRUE(output) << output.status().message();
    EXPECT_TRUE(output->finished(1));
    EXPECT_FALSE(output->finished(0));
    EXPECT_FALSE(output->finished(0, 2));
    ASSERT_TRUE(write(*output, 0, 0, "1234").ok());
    output->keep();
  }
  auto output = ModelOutput::create(out, layout(), options);
  ASSERT_TRUE(output);
  EXPECT_TRUE(output->finished(0, 2));
  ASSERT_TRUE(output->add_file("config.json", "{}").ok());
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(text_of("out/a").substr(0, 10), "hd12345678");
  EXPECT_EQ(text_of("out/config.json"), "{}");
}

// ---- what happens to a partial output between two runs ----

// Two shards of several tensors each, with gaps between them as GGUF has.
class DamagedPartials : public Outputs {
 protected:
  static OutputLayout shards() {
    OutputLayout layout{.files = {{.name = "model-1", .head = "head of one", .bytes = 640},
                                  {.name = "model-2", .head = "head of two", .bytes = 640}},
                        .tensors = {}};
    for (std::uint32_t i = 0; i < 8; ++i)
      layout.tensors.push_back({.file = i / 4, .begin = 32 + i % 4 * 150, .bytes = 70 + i * 9});
    return layout;
  }
  static std::string tensor(std::size_t i) {
    std::string text(shards().tensors[i].bytes, ' ');
    for (std::size_t j = 0; j < text.size(); ++j) text[j] = static_cast<char>(j * 37 + i * 11);
    return text;
  }
  OutputOptions options() const {
    return {.folder = folder_, .resume = true, .fingerprint = 7, .texts = {}};
  }
  OutputLayout layout_of() const {
    OutputLayout layout = shards();
    if (folder_) return layout;
    layout.files.pop_back();
    layout.tensors.resize(4);
    return layout;
  }
  // Makes what is missing, in pieces; false when it is refused.
  bool run(bool stop) {
    const OutputLayout layout = layout_of();
    auto output = ModelOutput::create(path("out"), layout, options());
    message_ = output ? "" : std::string(output.status().message());
    if (!output) return false;
    finished_ = 0;
    for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
      finished_ += output->finished(i);
      if (output->finished(i)) continue;
      const std::string text = tensor(i);
      for (std::size_t at = 0; at < text.size(); at += 33)
        EXPECT_TRUE(write(*output, i, at, std::string_view(text).substr(at, 33)).ok());
    }
    if (stop) {
      output->keep();
      return true;
    }
    const Status status = output->commit();
    EXPECT_TRUE(status.ok()) << status.message();
    return status.ok();
  }
  void expect_whole() {
    for (std::size_t i = 0; i < layout_of().files.size(); ++i) {
      std::string expected(640, '\0');
      expected.replace(0, 11, shards().files[i].head);
      for (std::size_t t = 0; t < layout_of().tensors.size(); ++t)
        if (shards().tensors[t].file == i)
          expected.replace(shards().tensors[t].begin, tensor(t).size(), tensor(t));
      ASSERT_EQ(text_of(folder_ ? "out/" + shards().files[i].name : "out"), expected);
    }
  }
  void clear() {
    std::filesystem::remove_all(path("out"));
    std::filesystem::remove_all(path("out.partial"));
    std::filesystem::remove_all(path("out.partial.journal"));
  }
  // Stops a run, changes a file of it, and resumes.
  template <class F>
  void damage(const std::string& file, F&& change) {
    clear();
    ASSERT_TRUE(run(true));
    std::string text = text_of(file);
    change(text);
    put(file, text);
    ASSERT_TRUE(run(false)) << message_;
    expect_whole();
  }
  std::vector<std::string> partial_files() const {
    if (!folder_) return {"out.partial", "out.partial.journal"};
    return {"out.partial/model-1", "out.partial/model-2", "out.partial.journal"};
  }

  bool folder_ = true;
  std::size_t finished_ = 0;
  std::string message_;
};

TEST_F(DamagedPartials, FlippedBytesAreMadeAgain) {
  for (const bool folder : {true, false}) {
    folder_ = folder;
    damage(partial_files()[0], [](std::string&) {});
    EXPECT_EQ(finished_, layout_of().tensors.size());
    for (const std::string& file : partial_files()) {
      clear();
      ASSERT_TRUE(run(true));
      const std::size_t size = text_of(file).size();
      // Without its fingerprint or its stamp, a journal vouches for nothing.
      const std::size_t head = journal_opening(0, 0, {}).size();
      for (std::size_t at = 0; at < size; at += at < 40 ? 1 : 13) {
        damage(file,
               [&](std::string& text) { text[at] = static_cast<char>(text[at] ^ 1 << at % 8); });
        EXPECT_GE(finished_,
                  file.ends_with("journal") && at < head ? 0 : layout_of().tensors.size() - 2);
      }
    }
  }
}

TEST_F(DamagedPartials, MissingBytesAreMadeAgain) {
  for (const bool folder : {true, false}) {
    folder_ = folder;
    for (const std::string& file : partial_files()) {
      clear();
      ASSERT_TRUE(run(true));
      const std::size_t size = text_of(file).size();
      for (std::size_t cut = 0; cut <= size; cut += cut < 20 ? 1 : 17) {
        damage(file, [&](std::string& text) { text.resize(cut); });
        damage(file, [&](std::string& text) { text.resize(cut), text.resize(size); });  // zeros
      }
      damage(file, [&](std::string& text) { text += "more than there was"; });
    }
  }
}

TEST_F(DamagedPartials, MissingAndSwappedFilesAreMadeAgain) {
  for (const bool folder : {true, false}) {
    folder_ = folder;
    for (const std::string& file : partial_files()) {
      clear();
      ASSERT_TRUE(run(true));
      std::filesystem::remove(path(file));
      ASSERT_TRUE(run(false)) << message_;
      expect_whole();
    }
  }
  clear();
  folder_ = true;
  ASSERT_TRUE(run(true));
  std::filesystem::rename(path("out.partial/model-1"), path("aside"));
  std::filesystem::rename(path("out.partial/model-2"), path("out.partial/model-1"));
  std::filesystem::rename(path("aside"), path("out.partial/model-2"));
  ASSERT_TRUE(run(false)) << message_;
  EXPECT_EQ(finished_, 0u);
  expect_whole();
  // The folder is gone, and its journal vouches for nothing.
  clear();
  ASSERT_TRUE(run(true));
  std::filesystem::remove_all(path("out.partial"));
  ASSERT_TRUE(run(false)) << message_;
  expect_whole();
}

TEST_F(DamagedPartials, ThingsOfAnotherKindAreRefused) {
  const auto refused = [&](const std::string& what) {
    EXPECT_FALSE(run(false));
    EXPECT_TRUE(has(message_, what)) << message_;
    EXPECT_EQ(text_of("mine"), "mine");
  };
  put("mine", "mine");
  for (const char* file : {"out.partial/model-1", "out.partial", "out.partial.journal"}) {
    clear();
    ASSERT_TRUE(run(true));
    std::filesystem::remove_all(path(file));
    std::filesystem::create_symlink(path("mine"), path(file));
    refused(path(file));
  }
  clear();
  ASSERT_TRUE(run(true));
  std::filesystem::remove_all(path("out.partial/model-1"));
  std::filesystem::create_directory(path("out.partial/model-1"));
  refused("model-1: a folder that bittern did not write");
  clear();
  ASSERT_TRUE(run(true));
  std::filesystem::remove_all(path("out.partial/model-1"));
  std::filesystem::create_hard_link(path("mine"), path("out.partial/model-1"));
  refused("model-1: a file with 2 names");
  clear();
  ASSERT_TRUE(run(true));
  put("out.partial/thesis.tex", "mine");
  refused("thesis.tex: a file that bittern did not write");
  EXPECT_EQ(text_of("out.partial/thesis.tex"), "mine");
  clear();
  ASSERT_TRUE(run(true));
  std::filesystem::remove_all(path("out.partial"));
  put("out.partial", "a file");
  refused("out.partial: expected a folder");
  EXPECT_EQ(text_of("out.partial"), "a file");
}

// ---- what is not touched ----

TEST_F(Outputs, RefuseWhatIsNotTheirs) {
  put("there", "mine");
  EXPECT_TRUE(has(message("there", {}), "there: exists, expected a new name"));
  EXPECT_TRUE(has(message("there", {.force = true}), "there: not a GGUF file"));
  EXPECT_TRUE(
      has(message("there", {.folder = true, .force = true}), "there: a file, and the output"));
  EXPECT_EQ(text_of("there"), "mine");
  put("folder/config.json", "{}");
  put("folder/thesis.tex", "mine");
  EXPECT_TRUE(has(message("folder", {.folder = true, .force = true}), "bittern did not write"));
  EXPECT_TRUE(
      has(message("folder", {.force = true}), "folder: a folder, and the output is a file"));
  EXPECT_EQ(names("folder"), (std::vector<std::string>{"config.json", "thesis.tex"}));
  put_ours("ours");
  put("ours/thesis.tex", "mine");
  EXPECT_TRUE(
      has(message("ours", {.folder = true, .force = true}), "ours/thesis.tex: a file that"));
  EXPECT_EQ(text_of("ours/thesis.tex"), "mine");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(path("there"), path("link"));
  std::filesystem::create_symlink(path("nowhere"), path("dangling"));
  for (const char* name : {"pipe", "link", "dangling"}) {
    for (const bool folder : {false, true}) {
      EXPECT_TRUE(has(message(name, {.folder = folder, .force = true}), path(name) + ": a "));
      EXPECT_TRUE(has(message(name, {.folder = folder}), path(name) + ": a "));
    }
  }
  EXPECT_TRUE(has(message("no/out", {}), "no/ cannot be used"));
  EXPECT_TRUE(has(message("there/out", {}), "cannot be "));
  EXPECT_TRUE(has(message("out/", {}), "ends in '/'"));
  for (const char* name : {".", "..", "folder/."})
    EXPECT_TRUE(
        has(message(name, {.folder = true, .force = true}), "expected the name of a folder"));
  OutputLayout huge = layout();
  huge.files[0].bytes = std::uint64_t{1} << 60;
  const auto output = ModelOutput::create(path("huge"), huge, {});
  ASSERT_FALSE(output);
  EXPECT_NE(output.status().message().find("disk has room for"), std::string_view::npos);
}

TEST_F(Outputs, KeepWhatHasTheNamesTheyNeed) {
  for (const char* suffix : {".partial", ".partial.journal"}) {
    for (const bool folder : {false, true}) {
      const std::string name = std::string("out") + suffix;
      put(name, "mine");
      for (const bool resume : {false, true})
        EXPECT_NE(message("out", {.folder = folder, .force = !resume, .resume = resume}), "made");
      EXPECT_EQ(names(), std::vector<std::string>{name});
      EXPECT_EQ(text_of(name), "mine");
      std::filesystem::remove(path(name));
      put(name + "/mine", "mine");
      for (const bool resume : {false, true})
        EXPECT_NE(message("out", {.folder = folder, .force = !resume, .resume = resume}), "made");
      EXPECT_EQ(text_of(name + "/mine"), "mine");
      std::filesystem::remove_all(path(name));
    }
  }
  // A model of somebody at OUT.partial.
  put("out.partial/a", "his model");
  put("out.partial/config.json", "his");
  const OutputOptions options{.folder = true, .resume = true, .texts = {"config.json"}};
  EXPECT_TRUE(has(message("out", options), "no journal of bittern beside it"));
  EXPECT_EQ(text_of("out.partial/a"), "his model");
  EXPECT_EQ(names(), std::vector<std::string>{"out.partial"});
  std::filesystem::remove_all(path("out.partial"));

  put_ours("out");
  put("out.replaced/mine", "mine");
  EXPECT_TRUE(has(message("out", {.folder = true, .force = true}), "out.replaced: exists"));
  EXPECT_EQ(text_of("out.replaced/mine"), "mine");
}

TEST_F(Outputs, TellALiveRunFromOneThatWasStopped) {
  {
    auto output = ModelOutput::create(path("out"), layout(), {.fingerprint = 1});
    ASSERT_TRUE(output);
    for (const bool force : {false, true}) {
      for (const bool resume : {false, true}) {
        const OutputOptions options{.force = force, .resume = resume, .fingerprint = 1};
        EXPECT_TRUE(has(message("out", options), "out: another run is writing it"));
        EXPECT_TRUE(has(std::string(check_output(path("out"), options).message()), "another run"));
      }
    }
    EXPECT_EQ(names(), (std::vector<std::string>{"out.partial", "out.partial.journal"}));
    output->keep();
  }
  EXPECT_TRUE(has(message("out", {.fingerprint = 1}), "left by a run that was stopped"));
  EXPECT_TRUE(has(message("out", {.resume = true, .fingerprint = 2}), "other options"));
  EXPECT_EQ(message("out", {.force = true, .fingerprint = 2}), "made");
}

TEST_F(Outputs, ReplaceAFolderWhole) {
  put_ours("out");
  auto output = ModelOutput::create(path("out"), layout(), {.folder = true, .force = true});
  ASSERT_TRUE(output) << output.status().message();
  EXPECT_EQ(text_of("out/config.json"), "old");  // until the new one is whole
  ASSERT_TRUE(output->commit().ok());
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_EQ(names("out"), std::vector<std::string>{"a"});
  // What came into OUT in the meantime is kept, and so is the partial.
  put_ours("other");
  auto late = ModelOutput::create(path("other"), layout(), {.folder = true, .force = true});
  ASSERT_TRUE(late) << late.status().message();
  put("other/thesis.tex", "mine");
  EXPECT_TRUE(has(std::string(late->commit().message()), "thesis.tex"));
  EXPECT_EQ(text_of("other/thesis.tex"), "mine");
  EXPECT_TRUE(std::filesystem::exists(path("other.partial")));
}

TEST_F(Outputs, ReplaceAFileAndAnEmptyFolder) {
  put("out", "GGUF old");
  std::filesystem::create_directory(path("empty"));
  for (const char* name : {"out", "empty"}) {
    const bool folder = std::string_view(name) == "empty";
    auto output = ModelOutput::create(path(name), layout(), {.folder = folder, .force = true});
    ASSERT_TRUE(output) << output.status().message();
    ASSERT_TRUE(output->commit().ok());
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"empty", "out"}));
  EXPECT_EQ(text_of("out").substr(0, 2), "hd");
}

TEST(Checksum, OfPartsIsThatOfTheWhole) {
  std::vector<std::byte> bytes(300);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(7 * i);
  for (const std::size_t size : {0, 1, 63, 64, 65, 128, 192, 200, 256, 300}) {
    for (const std::size_t part : {Checksum::kBlock, 2 * Checksum::kBlock}) {
      const auto all = std::span(bytes).first(size);
      Checksum sum;
      for (std::size_t at = 0; at < size; at += part)
        sum.add(all.subspan(at, std::min(part, size - at)));
      EXPECT_EQ(sum.value(), Checksum::of(all)) << size << " in parts of " << part;
    }
  }
}

}  // namespace
}  // namespace bittern
