#include "convert/general_metadata.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>

#include "convert/tokenizer_files.h"
#include "convert/tokenizer_table.h"
#include "formats/json_events.h"
#include "formats/mapped_file.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFile = "gguf_metadata.json";
constexpr const char* kCard = "README.md";
constexpr std::size_t kMostCardBytes = std::size_t{1} << 20;
constexpr const char* kHub = "https://huggingface.co/";

// Keys that follow from the tensors and are made again.
bool is_made(std::string_view key) {
  for (const std::string_view made : {"general.architecture", "general.type", "general.file_type",
                                      "general.quantization_version", "general.alignment"})
    if (key == made) return true;
  return false;
}

// ---- JSON and GGUF values ----

std::optional<Json> json_of(const GgufValue& value) {
  if (const auto text = value.as_string()) {
    if (!is_utf8(*text)) return std::nullopt;
    return Json(std::string(*text));
  }
  if (const auto truth = value.as_bool()) return Json(*truth);
  if (const auto whole = value.as_uint()) return Json(*whole);
  if (const auto whole = value.as_integer()) return Json(*whole);
  if (const auto number = value.as_number()) {
    if (!std::isfinite(*number)) return std::nullopt;
    return Json(*number);
  }
  if (value.type() != GgufType::array) return std::nullopt;
  Json list = Json::array();
  bool all = true;
  value.each([&](const GgufValue& element) {
    const auto one = json_of(element);
    if (one) list.push_back(*one);
    all = all && one && !one->is_array();
  });
  if (!all) return std::nullopt;
  return list;
}

// Types are those llama.cpp's converter gives such keys.
std::optional<GgufData> data_of(std::string_view key, const Json& value) {
  if (value.is_string()) return GgufData(std::string_view(value.get_ref<const std::string&>()));
  if (value.is_boolean()) return GgufData(value.get<bool>());
  if (value.is_number_integer()) {
    const bool sampling = key.starts_with("general.sampling.");
    if (value.is_number_unsigned() && !sampling) {
      const auto x = value.get<std::uint64_t>();
      if (x <= std::numeric_limits<std::uint32_t>::max())
        return GgufData(static_cast<std::uint32_t>(x));
      return GgufData(x);
    }
    const auto x = value.get<std::int64_t>();
    if (x >= std::numeric_limits<std::int32_t>::min() &&
        x <= std::numeric_limits<std::int32_t>::max())
      return GgufData(static_cast<std::int32_t>(x));
    return GgufData(x);
  }
  if (value.is_number_float()) return GgufData(static_cast<float>(value.get<double>()));
  if (!value.is_array()) return std::nullopt;
  std::vector<std::string_view> texts;
  for (const Json& x : value) {
    if (!x.is_string()) return std::nullopt;
    texts.push_back(x.get_ref<const std::string&>());
  }
  return GgufData::strings(texts);
}

// ---- the model card ----

// Reads the lines between two lines of three dashes at the top of README.md. Of YAML it knows only
// what model cards use: strings, and lists of strings in either form.
class CardFields {
 public:
  explicit CardFields(std::string_view text) {
    std::string_view line = next(text);
    if (line != "---") return;
    std::string key;
    while (!text.empty()) {
      line = next(text);
      if (line == "---") {
        whole_ = true;
        break;
      }
      const std::string_view bare = trimmed(line);
      if (bare.empty() || bare.front() == '#') continue;
      const bool indented = line.front() == ' ' || line.front() == '\t';
      if (bare == "-" || bare.starts_with("- ")) {
        add_item(key, trimmed(bare.substr(1)));
      } else if (indented) {
        spoil(key);
      } else {
        key = begin_field(bare);
      }
    }
    if (!whole_) fields_.clear();
  }

  // Nothing: not there, or not understood.
  const std::vector<std::string>* find(const char* key, std::vector<std::string>& notes) {
    for (const Field& field : fields_) {
      if (field.key != key) continue;
      if (!field.spoilt) return field.values.empty() ? nullptr : &field.values;
      notes.push_back(std::string(kCard) + ": \"" + key +
                      "\" is not a string or a list of strings, and is left out");
    }
    return nullptr;
  }

 private:
  struct Field {
    std::string key;
    std::vector<std::string> values;
    bool spoilt = false;
  };

  static std::string_view next(std::string_view& text) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    return line;
  }
  static std::string_view trimmed(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t");
    if (first == text.npos) return {};
    return text.substr(first, text.find_last_not_of(" \t") - first + 1);
  }

  // The scalar at the front of text, which moves past it; nothing where it is more than that.
  static std::optional<std::string> scalar(std::string_view& text, std::string_view ends) {
    std::string out;
    if (!text.empty() && (text.front() == '"' || text.front() == '\'')) {
      const char quote = text.front();
      std::size_t i = 1;
      for (; i < text.size(); ++i) {
        if (text[i] == quote) {
          if (quote == '"' || text.substr(i, 2) != "''") break;
          ++i;
        } else if (quote == '"' && text[i] == '\\') {
          if (++i == text.size()) return std::nullopt;
          if (text[i] != '"' && text[i] != '\\' && text[i] != '/') {
            if (text[i] != 'n') return std::nullopt;
            out += '\n';
            continue;
          }
        }
        out += text[i];
      }
      if (i >= text.size()) return std::nullopt;
      text = trimmed(text.substr(i + 1));
      return out;
    }
    const std::size_t end = std::min(text.find_first_of(ends), text.size());
    std::string_view bare = text.substr(0, end);
    if (const std::size_t comment = bare.find(" #"); comment != bare.npos) {
      bare = bare.substr(0, comment);
      text = {};
    } else {
      text = text.substr(end);
    }
    bare = trimmed(bare);
    // Anchors, maps, folded text and whatever else YAML has.
    if (!bare.empty() && std::string_view("&*!|>{}[]%@`").find(bare.front()) != bare.npos)
      return std::nullopt;
    if (bare.find(": ") != bare.npos || bare.ends_with(":")) return std::nullopt;
    return std::string(bare);
  }

  static bool rest_is_comment(std::string_view text) {
    text = trimmed(text);
    return text.empty() || text.front() == '#';
  }

  std::string begin_field(std::string_view line) {
    const std::size_t colon = line.find(':');
    if (colon == line.npos) return "";
    Field field{.key = std::string(trimmed(line.substr(0, colon))), .values = {}, .spoilt = false};
    std::string_view text = trimmed(line.substr(colon + 1));
    if (text.starts_with("[")) {
      text = trimmed(text.substr(1));
      while (!field.spoilt && !text.starts_with("]")) {
        const auto item = scalar(text, ",]");
        if (!item || text.empty()) {
          field.spoilt = true;
        } else {
          field.values.push_back(*item);
          if (text.front() == ',') text = trimmed(text.substr(1));
        }
      }
      field.spoilt = field.spoilt || !rest_is_comment(text.substr(1));
    } else if (!text.empty() && text.front() != '#') {
      const auto value = scalar(text, "\n");
      field.spoilt = !value || !rest_is_comment(text);
      if (value && !field.spoilt && *value != "null" && *value != "~")
        field.values.push_back(*value);
    }
    fields_.push_back(std::move(field));
    return fields_.back().key;
  }

  void add_item(const std::string& key, std::string_view text) {
    if (fields_.empty() || fields_.back().key != key) return;
    const auto item = scalar(text, "\n");
    if (!item || !rest_is_comment(text)) {
      fields_.back().spoilt = true;
    } else {
      fields_.back().values.push_back(*item);
    }
  }
  void spoil(const std::string& key) {
    if (!fields_.empty() && fields_.back().key == key) fields_.back().spoilt = true;
  }

  std::vector<Field> fields_;
  bool whole_ = false;
};

std::string joined(const std::vector<std::string>& values) {
  std::string all;
  for (const std::string& value : values) all.append(all.empty() ? "" : ",").append(value);
  return all;
}

GgufData list_of(const std::vector<std::string>& values) {
  const std::vector<std::string_view> views(values.begin(), values.end());
  return GgufData::strings(views);
}

// general.base_model.0.name and the like of "organization/name" or an address.
void put_works(const char* kind, const std::vector<std::string>& ids, GgufMetadata& out) {
  const std::string general = std::string("general.") + kind + ".";
  out.emplace_back(general + "count", GgufData(static_cast<std::uint32_t>(ids.size())));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto put = [&](const char* key, std::string_view value) {
      out.emplace_back(general + std::to_string(i) + "." + key, GgufData(value));
    };
    const std::string_view id = ids[i];
    if (id.find("://") != id.npos) {
      put("repo_url", id);
      continue;
    }
    const std::size_t slash = id.find('/');
    put("name", slash == id.npos ? id : id.substr(slash + 1));
    if (slash == id.npos) continue;
    put("organization", id.substr(0, slash));
    const std::string hub =
        std::string(kHub) + (std::string_view(kind) == "dataset" ? "datasets/" : "");
    put("repo_url", hub + std::string(id));
  }
}

Result<GgufMetadata> from_card(const std::string& path, std::vector<std::string>& notes) {
  GgufMetadata out;
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) ||
      std::filesystem::file_size(path, error) == 0)
    return out;
  if (const Status status = check_side_file(path); !status.ok()) {
    notes.push_back("not read: " + std::string(status.message()));
    return out;
  }
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  const auto bytes = file->bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()),
                              std::min(bytes.size(), kMostCardBytes));
  CardFields card(text);

  struct Row {
    const char* card;
    const char* gguf;
  };
  constexpr Row kTexts[] = {
      {"license", "license"},           {"license_name", "license.name"},
      {"license_link", "license.link"}, {"name", "name"},
      {"model_name", "name"},           {"author", "author"},
      {"model_author", "author"},       {"model_creator", "author"},
      {"version", "version"},           {"model_version", "version"},
      {"organization", "organization"}, {"model_organization", "organization"},
      {"description", "description"},   {"model_description", "description"},
      {"finetune", "finetune"},         {"model_finetune", "finetune"},
      {"basename", "basename"},         {"model_basename", "basename"},
      {"quantized_by", "quantized_by"},
  };
  for (const Row& row : kTexts) {
    const std::string key = std::string("general.") + row.gguf;
    const auto said = [&](const auto& pair) { return pair.first == key; };
    if (std::any_of(out.begin(), out.end(), said)) continue;
    if (const auto* values = card.find(row.card, notes))
      out.emplace_back(key, GgufData(std::string_view(joined(*values))));
  }
  std::vector<std::string> tags;
  for (const char* key : {"tags", "pipeline_tag"})
    if (const auto* values = card.find(key, notes))
      tags.insert(tags.end(), values->begin(), values->end());
  if (!tags.empty()) out.emplace_back("general.tags", list_of(tags));
  for (const char* key : {"language", "languages"})
    if (const auto* values = card.find(key, notes)) {
      out.emplace_back("general.languages", list_of(*values));
      break;
    }
  if (const auto* ids = card.find("base_model", notes)) put_works("base_model", *ids, out);
  if (const auto* ids = card.find("datasets", notes)) put_works("dataset", *ids, out);
  return out;
}

// ---- a card of general.* ----

std::string yaml_text(std::string_view text) {
  return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string card_of(const Json& general) {
  std::string out;
  const auto text = [&](const char* key) {
    const auto found = general.find(std::string("general.") + key);
    return found != general.end() && found->is_string() ? found->get<std::string>() : "";
  };
  const auto add = [&](const char* field, const std::string& value) {
    if (!value.empty()) out += std::string(field) + ": " + yaml_text(value) + "\n";
  };
  const auto add_list = [&](const char* field, const std::vector<std::string>& values) {
    if (!values.empty()) out += std::string(field) + ":\n";
    for (const std::string& value : values) out += "- " + yaml_text(value) + "\n";
  };
  const auto list = [&](const char* key) {
    std::vector<std::string> values;
    const auto found = general.find(std::string("general.") + key);
    if (found != general.end() && found->is_array())
      for (const Json& x : *found)
        if (x.is_string()) values.push_back(x.get<std::string>());
    return values;
  };
  const auto works = [&](const std::string& kind, const std::string& hub) {
    std::vector<std::string> ids;
    for (int i = 0; i < 64; ++i) {
      const std::string at = kind + "." + std::to_string(i) + ".";
      std::string id = text((at + "repo_url").c_str());
      if (id.starts_with(hub)) id = id.substr(hub.size());
      if (id.empty()) id = text((at + "name").c_str());
      if (!id.empty()) ids.push_back(id);
    }
    return ids;
  };
  add("license", text("license"));
  add("license_name", text("license.name"));
  add("license_link", text("license.link"));
  add_list("language", list("languages"));
  add_list("tags", list("tags"));
  add_list("base_model", works("base_model", kHub));
  add_list("datasets", works("dataset", std::string(kHub) + "datasets/"));
  add("model_name", text("name"));
  add("model_creator", text("author"));
  if (out.empty()) return out;
  const std::string name = text("name"), about = text("description");
  return "---\n" + out + "---\n" + (name.empty() ? "" : "\n# " + name + "\n") +
         (about.empty() ? "" : "\n" + about + "\n");
}

}  // namespace

std::vector<TextFile> general_from_gguf(const GgufFile& file, std::vector<std::string>& notes) {
  Json all = Json::object();
  for (const GgufKey& entry : file.keys()) {
    if (!entry.key.starts_with("general.") || is_made(entry.key)) continue;
    auto value = is_utf8(entry.key) ? json_of(entry.value) : std::nullopt;
    const auto again = value ? data_of(entry.key, *value) : std::nullopt;
    if (!again) {
      notes.push_back("left out, as " + std::string(kFile) +
                      " cannot say it: " + in_quotes(entry.key));
      continue;
    }
    if (again->type() != entry.value.type() ||
        !std::ranges::equal(again->encoded(), entry.value.encoded()))
      notes.push_back(std::string(kFile) + ": the number type of " + in_quotes(entry.key) +
                      " is not kept");
    all[std::string(entry.key)] = std::move(*value);
  }
  std::vector<TextFile> files;
  if (all.empty()) return files;
  files.push_back({kFile, all.dump(2) + "\n"});
  if (std::string card = card_of(all); !card.empty()) files.push_back({kCard, std::move(card)});
  return files;
}

Result<GgufMetadata> general_to_gguf(const std::string& folder, std::vector<std::string>& notes) {
  const std::string path = folder + "/" + kFile;
  const auto json = read_json_file(path);
  if (!json) return json.status();
  if (json->is_null()) return from_card(folder + "/" + kCard, notes);
  GgufMetadata out;
  for (const auto& [key, value] : json->items()) {
    if (!key.starts_with("general."))
      return invalid(path + ": " + in_quotes(key) + ", expected keys that begin with general.");
    if (is_made(key)) continue;
    auto data = data_of(key, value);
    if (!data)
      return invalid(path + ": " + in_quotes(key) +
                     " is no string, number, truth value or list of strings, expected one of them");
    out.emplace_back(key, std::move(*data));
  }
  return out;
}

}  // namespace bittern
