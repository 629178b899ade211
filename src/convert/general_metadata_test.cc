#include "convert/general_metadata.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "formats/test_folder.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Notes = std::vector<std::string>;

class GeneralMetadata : public TestFolder {
 protected:
  Result<GgufFile> file(const GgufMetadata& keys) const {
    GgufContents contents(path("m.gguf"));
    for (const auto& [key, value] : keys) BITTERN_TRY(contents.add(key, value));
    put("m.gguf", file_text(contents.lay_out(), {}));
    return GgufFile::open(path("m.gguf"));
  }
  // Keys as text, or the error.
  std::map<std::string, std::string> read(Notes& notes) const {
    const auto keys = general_to_gguf(path(), notes);
    if (!keys) return {{"error", std::string(keys.status().message())}};
    const auto written = file(*keys);
    EXPECT_TRUE(written.ok()) << written.status().message();
    std::map<std::string, std::string> out;
    for (const GgufKey& entry : written->keys()) {
      std::string text;
      if (const auto string = entry.value.as_string()) text = std::string(*string);
      if (const auto number = entry.value.as_integer()) text = std::to_string(*number);
      if (entry.value.type() == GgufType::array)
        entry.value.each(
            [&](const GgufValue& x) { text += std::string(x.as_string().value_or("?")) + ";"; });
      out[std::string(entry.key)] = text;
    }
    return out;
  }
};

TEST_F(GeneralMetadata, GoesThroughAFolderBitForBit) {
  const std::vector<std::string_view> tags{"text-generation", "q\"uote", "\u00e9"}, none;
  const GgufMetadata keys = {
      {"general.architecture", GgufData("llama")},
      {"general.type", GgufData("model")},
      {"general.name", GgufData("A Model: v1")},
      {"general.author", GgufData("Somebody")},
      {"general.license", GgufData("apache-2.0")},
      {"general.license.link", GgufData("https://example.org/l")},
      {"general.size_label", GgufData("1.7B")},
      {"general.tags", GgufData::strings(tags)},
      {"general.languages", GgufData::strings(none)},
      {"general.base_model.count", GgufData(std::uint32_t{1})},
      {"general.base_model.0.name", GgufData("Base")},
      {"general.base_model.0.repo_url", GgufData("https://huggingface.co/org/Base")},
      {"general.sampling.top_k", GgufData(std::int32_t{40})},
      {"general.sampling.temp", GgufData(0.7f)},
      {"general.description", GgufData("two\nlines")},
      {"general.file_type", GgufData(std::uint32_t{7})},
  };
  const auto source = file(keys);
  ASSERT_TRUE(source.ok()) << source.status().message();
  Notes notes;
  for (const TextFile& text : general_from_gguf(*source, notes)) put(text.name, text.text);
  EXPECT_EQ(notes, Notes{});
  const auto back = general_to_gguf(path(), notes);
  ASSERT_TRUE(back.ok()) << back.status().message();
  std::size_t found = 0;
  for (const auto& [key, value] : *back) {
    const auto same = std::find_if(keys.begin(), keys.end(), [&wanted = key](const auto& pair) {
      return pair.first == wanted;
    });
    ASSERT_NE(same, keys.end()) << key;
    EXPECT_EQ(value.type(), same->second.type()) << key;
    EXPECT_TRUE(std::ranges::equal(value.encoded(), same->second.encoded())) << key;
    ++found;
  }
  EXPECT_EQ(found, keys.size() - 3);  // all but those that are made anew

  // The card alone says the same of what cards have words for.
  fs::remove(path("gguf_metadata.json"));
  const auto card = read(notes);
  EXPECT_EQ(card.at("general.license"), "apache-2.0");
  EXPECT_EQ(card.at("general.name"), "A Model: v1");
  EXPECT_EQ(card.at("general.author"), "Somebody");
  EXPECT_EQ(card.at("general.tags"), "text-generation;q\"uote;\u00e9;");
  EXPECT_EQ(card.at("general.base_model.0.repo_url"), "https://huggingface.co/org/Base");
  EXPECT_EQ(notes, Notes{});
}

TEST_F(GeneralMetadata, AFileThatSaysNothingMakesNoFiles) {
  Notes notes;
  const auto source = file({{"general.architecture", GgufData("llama")}});
  EXPECT_TRUE(general_from_gguf(*source, notes).empty());
  EXPECT_TRUE(read(notes).empty());
  EXPECT_EQ(notes, Notes{});
}

TEST_F(GeneralMetadata, ModelCardsAreRead) {
  put("README.md",
      "---\r\n"
      "license: other  # see below\r\n"
      "license_name: 'it''s mine'\n"
      "license_link: \"https://example.org/#a\"\n"
      "language:\n- en\n  - \"fr\"\n"
      "tags: [chat, 'a b', \"c,d\"]\n"
      "pipeline_tag: text-generation\n"
      "base_model:\n- org/Base\n- https://example.org/x\n"
      "datasets: org/data\n"
      "widget:\n- text: hello\n  more: 1\n"
      "model-index:\n  - name: x\n"
      "---\n# Title\nlicense: not this\n");
  Notes notes;
  const auto keys = read(notes);
  EXPECT_EQ(notes, Notes{});
  const std::map<std::string, std::string> expected = {
      {"general.license", "other"},
      {"general.license.name", "it's mine"},
      {"general.license.link", "https://example.org/#a"},
      {"general.languages", "en;fr;"},
      {"general.tags", "chat;a b;c,d;text-generation;"},
      {"general.base_model.count", "2"},
      {"general.base_model.0.name", "Base"},
      {"general.base_model.0.organization", "org"},
      {"general.base_model.0.repo_url", "https://huggingface.co/org/Base"},
      {"general.base_model.1.repo_url", "https://example.org/x"},
      {"general.dataset.count", "1"},
      {"general.dataset.0.name", "data"},
      {"general.dataset.0.organization", "org"},
      {"general.dataset.0.repo_url", "https://huggingface.co/datasets/org/data"},
  };
  EXPECT_EQ(keys, expected);
}

TEST_F(GeneralMetadata, ACardThatIsALinkOutOfTheFolderIsNotRead) {
  const fs::path outside = path() + "_card";
  std::ofstream(outside) << "---\nlicense: a secret of the user\n---\n";
  fs::create_symlink(outside, path("README.md"));
  Notes notes;
  EXPECT_TRUE(read(notes).empty());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(notes[0].starts_with("not read: " + path("README.md") + ": a symbolic link to "))
      << notes[0];
  fs::rename(path("README.md"), path("own"));
  put("card.txt", "---\nlicense: mit\n---\n");
  fs::create_symlink("card.txt", path("README.md"));
  EXPECT_EQ(read(notes).at("general.license"), "mit");
  fs::remove(outside);
}

TEST_F(GeneralMetadata, WhatIsNotUnderstoodIsSaid) {
  Notes notes;
  put("README.md", "---\nlicense: |\n  folded\ntags: {a: b}\nlanguage: [en\n---\n");
  EXPECT_TRUE(read(notes).empty());
  EXPECT_EQ(notes.size(), 3u);
  EXPECT_EQ(notes[0],
            "README.md: \"license\" is not a string or a list of strings, and is left out");
  for (const char* text :
       {"", "---", "---\n", "---\nlicense: mit\n", "# no card\n", "---\n: x\n---\n",
        "---\n- a\n---\n", "---\nlicense:\n---\n", "---\nlicense: null\n---\n"}) {
    notes.clear();
    put("README.md", text);
    EXPECT_TRUE(read(notes).empty()) << text;
    EXPECT_EQ(notes, Notes{}) << text;
  }
  const auto error = [&](const char* text) {
    put("gguf_metadata.json", text);
    const auto keys = read(notes);
    return keys.contains("error") ? keys.at("error").substr(path().size() + 1) : "";
  };
  EXPECT_EQ(error("[]"), "gguf_metadata.json: expected an object");
  EXPECT_EQ(error(R"({"name": "x"})"),
            "gguf_metadata.json: \"name\", expected keys that begin with general.");
  EXPECT_EQ(error(R"({"general.tags": [1]})"),
            "gguf_metadata.json: \"general.tags\" is no string, number, truth value or list of "
            "strings, expected one of them");
  EXPECT_EQ(error(R"({"general.architecture": "made anew"})"), "");
}

}  // namespace
}  // namespace bittern
