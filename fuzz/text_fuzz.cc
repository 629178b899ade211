// The first byte says what the others are: a tokenizer.json, a GGUF file, a text, or a chat
// template and messages. What must hold: nothing crashes; an error is one line; ids are within
// range; text comes back; a stream gives whole characters; no message makes a control token.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "bittern/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "formats/test_files.h"
#include "text/chat.h"
#include "text/tables.h"
#include "text/utf8.h"

namespace {

using namespace bittern;
namespace fs = std::filesystem;

void must(bool holds) {
  if (!holds) std::abort();
}

// sentencepiece writes spaces as U+2581, so that a text's own come back as spaces.
std::string with_spaces(std::string text) {
  for (std::size_t at; (at = text.find("\xe2\x96\x81")) != std::string::npos;)
    text.replace(at, 3, " ");
  return text;
}

class Files {
 public:
  Files() {
    const std::string text = "/proc/self/fd/" + std::to_string(fd_);
    fs::create_directory(root_.path("hf"));
    fs::create_symlink(text, root_.path("hf/tokenizer.json"));
    fs::create_symlink(text, root_.path("m.gguf"));
    std::string vocab, tokens;
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::string& letter = text::byte_letters()[byte];
      vocab += (letter == "\"" || letter == "\\" ? "\"\\" : "\"") + letter +
               "\":" + std::to_string(byte) + ",";
    }
    root_.put("bytes/tokenizer.json",
              R"({"added_tokens":[{"id":258,"content":"<|im_start|>","special":true},)"
              R"({"id":259,"content":"<|im_end|>","special":true},)"
              R"({"id":260,"content":"<t>","special":false,"normalized":false}],)"
              R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},)"
              R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{)" +
                  vocab + R"("ab":256,"abab":257},"merges":["a b","ab ab"]}})");
    std::string pieces;
    for (int byte = 0; byte < 256; ++byte)
      pieces += "\"" + byte_token(byte) + "\":" + std::to_string(byte) + ",";
    root_.put(
        "pieces/tokenizer.json",
        R"({"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"\u2581"},)"
        R"({"type":"Replace","pattern":{"String":" "},"content":"\u2581"}]},)"
        R"("decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},)"
        R"({"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","vocab":{)" +
            pieces + R"("\u2581":256,"a":257,"\u2581a":258},"merges":["\u2581 a"]}})");
    for (const char* name : {"bytes", "pieces"}) {
      auto made = Tokenizer::load(root_.path(name));
      must(made.ok());
      fixed_.push_back(*made);
    }
  }
  std::string folder() const { return root_.path("hf"); }
  std::string gguf() const { return root_.path("m.gguf"); }
  const std::vector<Tokenizer>& fixed() const { return fixed_; }
  void put(std::string_view data) const {
    must(::ftruncate(fd_, static_cast<off_t>(data.size())) == 0);
    must(::pwrite(fd_, data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
  }

 private:
  TempFolder root_;
  int fd_ = ::memfd_create("bittern_text", 0);
  std::vector<Tokenizer> fixed_;
};

void check_line(const Status& status) {
  must(status.ok() ||
       (!status.message().empty() && status.message().find('\n') == std::string_view::npos));
}

std::string as_utf8(std::string_view text) {
  std::string rest(text), out = text::take_complete(rest);
  return rest.empty() ? out : out + std::string(text::kReplacement);
}

// Returns what decode makes of the ids.
std::string use(const Tokenizer& t, std::string_view text, const EncodeOptions& options) {
  const auto ids = t.encode(text, options);
  if (!ids) {
    check_line(ids.status());
    return {};
  }
  for (const std::int32_t id : *ids) must(id >= 0 && id < t.size());
  const auto back = t.decode(*ids);
  must(back.ok());
  TokenStream stream(t, false);
  std::string streamed;
  for (const std::int32_t id : *ids) {
    const auto part = stream.push(id);
    must(part.ok() && is_utf8(*part));
    streamed += *part;
  }
  must(streamed + stream.finish() == as_utf8(*back));
  return *back;
}

void load(const std::string& path, const std::string& begins) {
  const auto t = Tokenizer::load(path);
  if (!t) {
    check_line(t.status());
    must(t.status().message().starts_with(begins));
    return;
  }
  for (std::int64_t id = 0; id < std::min<std::int64_t>(t->size(), 300); ++id) {
    const auto token = t->token(static_cast<std::int32_t>(id));
    must(token.ok() && t->id(*token) == id);
  }
  use(*t, "Hello  w\xc3\xb6rld 123 <|im_end|>\n\xe4\xbd\xa0\xff ab", {});
  const std::vector<ChatMessage> talk = {{"user", "a"}};
  check_line(t->apply_chat(talk).status());
}

void chat(const Tokenizer& t, std::string_view text) {
  const std::size_t cut = std::min(text.find('\0'), text.size());
  check_line(text::chat_format(text.substr(0, cut), "").status());
  const std::string content(text.substr(cut));
  const std::vector<ChatMessage> talk = {
      {"system", content}, {"user", content}, {"assistant", content}};
  for (const char* format : {"chatml", "llama-3", "gemma", "qwen"}) {
    const ChatOptions options{.format = format};
    const auto ids = t.apply_chat(talk, options);
    must(ids.ok());
    const auto all = t.chat_text(talk, options);
    must(all.ok());
    const auto starts = std::ranges::count(*ids, *t.id("<|im_start|>"));
    must(starts ==
         (std::string_view(format) == "chatml" || std::string_view(format) == "qwen" ? 4 : 0));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Files files;
  if (size < 2) return -1;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      files.put(text);
      load(files.folder(), files.folder());
      break;
    case 1:
      files.put(text);
      load(files.gguf(), files.gguf());
      break;
    case 2:
      for (std::size_t i = 0; i < files.fixed().size(); ++i)
        for (const bool special : {false, true})
          must(use(files.fixed()[i], text, {false, special}) ==
               (i == 0 ? as_utf8(text) : with_spaces(as_utf8(text))));
      break;
    default: chat(files.fixed()[0], text); break;
  }
  return 0;
}
