// The text of tokenizer.json, and what byte-level BPE has in it.
#include "convert/tokenizer_source.h"
#include "formats/json_events.h"

namespace bittern::tokenizer_detail {

namespace {

void put_string(std::string& out, std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (u < 32) {
      out.append("\\u00").append(1, kHex[u >> 4]).append(1, kHex[u & 15]);
    } else {
      out += c;
    }
  }
  out += '"';
}

Json template_of(const Source& s) {
  Json single = Json::array(), pair = Json::array(), specials = Json::object();
  const auto special = [&](std::size_t id, int type) {
    specials[s.token(id)] = {{"id", s.token(id)}, {"ids", {id}}, {"tokens", {s.token(id)}}};
    return Json{{"SpecialToken", {{"id", s.token(id)}, {"type_id", type}}}};
  };
  const auto sequence = [&](Json& to, const char* name, int type) {
    if (s.add_bos) to.push_back(special(*s.named[kBos], type));
    to.push_back({{"Sequence", {{"id", name}, {"type_id", type}}}});
    if (s.add_eos) to.push_back(special(*s.named[kEos], type));
  };
  sequence(single, "A", 0);
  sequence(pair, "A", 0);
  sequence(pair, "B", 1);
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", pair},
          {"special_tokens", specials}};
}

void put_added_tokens(std::string& out, const Source& s) {
  const char* separator = "\n";
  for (std::size_t id = 0; id < s.tokens.size(); ++id) {
    if (!s.added(id)) continue;
    out.append(separator)
        .append("    {\"id\": ")
        .append(std::to_string(id))
        .append(", \"content\": ");
    put_string(out, s.tokens[id]);
    out += ", \"single_word\": false, \"lstrip\": false, \"rstrip\": ";
    out += s.phi3 && phi3_strips(s.tokens[id]) ? "true" : "false";
    out += ", \"normalized\": false, \"special\": ";
    out += s.types[id] == TokenType::user_defined ? "false}" : "true}";
    separator = ",\n";
  }
}

void put_vocabulary(std::string& out, const Source& s) {
  const char* separator = "\n";
  for (std::size_t id = 0; id < s.tokens.size(); ++id) {
    if (s.filler(id)) continue;
    out.append(separator).append("      ");
    put_string(out, s.tokens[id]);
    out.append(": ").append(std::to_string(id));
    separator = ",\n";
  }
}

// {"a": 1} without its closing brace, so that more can follow.
std::string open_object(const Json& object) {
  std::string text = object.dump();
  text.pop_back();
  return text;
}

}  // namespace

void put_merge(std::string& out, std::string_view left, std::string_view right, bool first) {
  out += first ? "\n      [" : ",\n      [";
  put_string(out, left);
  out += ", ";
  put_string(out, right);
  out += ']';
}

Result<TextFile> tokenizer_json(const Source& s, const Frame& shape, std::size_t merge_bytes,
                                const std::function<Status(std::string&)>& put_merges) {
  std::size_t room = merge_bytes + 65536;
  for (std::size_t id = 0; id < s.tokens.size(); ++id)
    room += s.tokens[id].size() + 20 + (s.added(id) ? s.tokens[id].size() + 130 : 0);
  if (room > kMostWrittenBytes)
    return invalid(s.where("ggml.tokens") + "tokenizer.json would have " + std::to_string(room) +
                   " bytes, expected at most " + std::to_string(kMostWrittenBytes));
  TextFile json{"tokenizer.json", {}};
  std::string& out = json.text;
  out.reserve(room);
  out += "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  out += "  \"added_tokens\": [";
  put_added_tokens(out, s);
  out += "],\n  \"normalizer\": " + shape.normalizer.dump();
  out += ",\n  \"pre_tokenizer\": " + shape.pre_tokenizer.dump();
  out += ",\n  \"post_processor\": " + template_of(s).dump();
  out += ",\n  \"decoder\": " + shape.decoder.dump();
  out += ",\n  \"model\": " + open_object(shape.model) + ",\n    \"vocab\": {";
  put_vocabulary(out, s);
  out += "\n    },\n    \"merges\": [";
  BITTERN_TRY(put_merges(out));
  out += "\n    ]\n  }\n}\n";
  return json;
}

Json bpe_model(const Json& unk, bool byte_fallback, bool ignore_merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unk},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", byte_fallback},
          {"byte_fallback", byte_fallback},
          {"ignore_merges", ignore_merges}};
}

// ---- byte-level BPE ----

namespace {

Json byte_level() {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", false}};
}

Result<const PreTokenizer*> pre_tokenizer_of(const Source& s) {
  std::string_view name = "default";
  if (s.file.find("tokenizer.ggml.pre") != nullptr) {
    const auto value = s.file.string("tokenizer.ggml.pre");
    if (!value) return value.status();
    name = *value;
  }
  if (const PreTokenizer* row = find_pre_tokenizer(name)) return row;
  return unsupported(s.where("ggml.pre") + in_quotes(name) + ", expected one of " +
                     pre_tokenizer_names());
}

// Merges as they lie in the file: "left right", cut at the first space that leaves a left part.
Status put_file_merges(const Source& s, const GgufValue& merges, std::string& out) {
  const std::string where = s.where("ggml.merges");
  Status status;
  std::size_t i = 0;
  std::string joined;
  merges.each([&](const GgufValue& value) {
    if (!status.ok()) return;
    const std::string_view merge = *value.as_string();
    const auto refuse = [&](const std::string& why) {
      status = invalid(where + "merge " + std::to_string(i) + ", " + in_quotes(merge) + ": " + why);
    };
    const std::size_t space = merge.size() > 1 ? merge.find(' ', 1) : merge.npos;
    if (space == merge.npos) return refuse("no space, expected two tokens");
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    joined.assign(left).append(right);
    for (const std::string_view part : {left, right, std::string_view(joined)}) {
      if (s.index.find(s.tokens, part) < 0)
        return refuse(in_quotes(part) + " is not a token of the vocabulary");
    }
    put_merge(out, left, right, i == 0);
    ++i;
  });
  return status;
}

}  // namespace

Result<TextFile> byte_level_tokenizer(Source& s) {
  const auto pre = pre_tokenizer_of(s);
  if (!pre) return pre.status();
  const PreTokenizer& row = **pre;
  s.add_bos = row.add_bos;
  BITTERN_TRY(read_specials(s));
  const auto merges = s.file.array("tokenizer.ggml.merges");
  if (!merges) return merges.status();
  if (merges->element() != GgufType::string || merges->size() > kMostMerges)
    return invalid(s.where("ggml.merges") + std::to_string(merges->size()) + " of type " +
                   name(merges->element()) + ", expected at most " + std::to_string(kMostMerges) +
                   " strings");

  Json steps = Json::array();
  for (const std::string& cut : row.cuts) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", cut}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back(byte_level());
  const Frame shape{
      .normalizer = row.nfc ? Json{{"type", "NFC"}} : Json(),
      .pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", steps}},
      .decoder = byte_level(),
      .model = bpe_model(nullptr, false, row.ignore_merges),
  };
  const std::size_t merge_bytes = merges->encoded().size() + 12 * merges->size();
  return tokenizer_json(s, shape, merge_bytes,
                        [&](std::string& out) { return put_file_merges(s, *merges, out); });
}

}  // namespace bittern::tokenizer_detail
