#include "convert/architecture.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

#include "convert/model_config.h"
#include "convert/naming.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

ValueMap inverse(ValueMap map) {
  switch (map) {
    case ValueMap::plus_one: return ValueMap::minus_one;
    case ValueMap::minus_one: return ValueMap::plus_one;
    case ValueMap::negative_exp: return ValueMap::log_negative;
    case ValueMap::log_negative: return ValueMap::negative_exp;
    case ValueMap::same: break;
  }
  return ValueMap::same;
}

// One of the two is Hugging Face's, or they are the same.
ValueMap between(ValueMap from, ValueMap to) {
  if (from == to) return ValueMap::same;
  return from == ValueMap::same ? to : inverse(from);
}

// ---- from one world's tensors to the other's ----

struct Place {
  std::int32_t part = -1;  // of the source's
  std::int64_t row = 0;
};

// Where the rows of a quantity lie in the source.
struct Where {
  std::int32_t whole = -1;  // the part that is the quantity
  std::vector<Place> rows;  // else

  Place at(std::int64_t row) const {
    if (whole >= 0) return {whole, row};
    return std::size_t(row) < rows.size() ? rows[std::size_t(row)] : Place{};
  }
};

Status missing(const std::vector<Part>& parts, Q quantity, std::int64_t row) {
  for (const Part& part : parts) {
    for (const Rows& run : part.rows) {
      if (run.quantity != quantity) continue;
      if (part.whole || (row >= run.first && row < run.first + run.count * run.step))
        return invalid("no tensor " + in_quotes(part.name) + "; the config requires it");
    }
  }
  return {Code::internal, "a tensor's rows are nowhere"};
}

// Of a vision model, but not of its language model.
bool sees(std::string_view name) {
  return name.find("visual.") != name.npos || name.find("vision_tower.") != name.npos ||
         name.find("multi_modal_projector.") != name.npos;
}

class Renamer {
 public:
  Renamer(const ModelConfig& model, std::span<const NamedShape> tensors, World from, World to)
      : m_(model), from_(from), to_(to) {
    for (const NamedShape& tensor : tensors) shapes_.emplace(tensor.name, &tensor.shape);
  }

  Result<Renaming> run() {
    const Prefixes source = source_prefixes();
    const bool wrapped =
        to_ == World::mlx && (m_.arch() == Arch::qwen35 || m_.arch() == Arch::qwen35moe);
    const Prefixes target =
        wrapped ? Prefixes{"language_model.model.", "language_model."} : Prefixes{"model.", ""};
    for (std::int64_t layer = -1; layer < m_.layers; ++layer)
      BITTERN_TRY(rename(tensors_of(m_, from_, source, layer, false),
                         tensors_of(m_, to_, target, layer, true)));
    move_rotary_factors();
    out_.notes = differences(m_, to_);
    for (const auto& [name, shape] : shapes_) {
      if (used_.contains(name)) continue;
      if (!may_be_left_out(name))
        return unsupported("tensor " + in_quotes(name) + " " + shape->str() +
                           " does not belong to a " + m_.type->name + " model");
      out_.left_out.push_back(std::string(name));
    }
    return std::move(out_);
  }

 private:
  // Factors of rotary frequencies are numbers of the config, but tensors of llama.cpp.
  void move_rotary_factors() {
    for (auto& [name, values] : rotary_factors(m_)) {
      if (to_ == World::gguf) {
        const auto count = static_cast<std::int64_t>(values.size());
        out_.tensors.push_back({.name = name, .shape = {count}, .values = std::move(values)});
      } else if (const auto found = shapes_.find(name); found != shapes_.end()) {
        used_.insert(found->first);
      }
    }
  }

  Prefixes source_prefixes() const {
    for (const char* prefix : {"model.language_model.", "language_model.model."}) {
      if (!shapes_.contains(std::string(prefix) + "embed_tokens.weight")) continue;
      const bool inside = shapes_.contains("language_model.lm_head.weight");
      return {prefix, inside ? "language_model." : ""};
    }
    return {"model.", ""};
  }

  bool may_be_left_out(std::string_view name) const {
    const auto contains = [&](std::string_view what) { return name.find(what) != name.npos; };
    if (from_ == World::gguf) {
      if (name == "rope_freqs.weight") return true;
      if (!m_.gated_delta() || !name.starts_with("blk.")) return false;
      std::int64_t layer = -1;  // those that predict further tokens come after the model's
      std::from_chars(name.data() + 4, name.data() + name.size(), layer);
      return layer >= m_.layers;
    }
    if (name.ends_with("lm_head.weight")) return m_.tied;
    if (contains("rotary_emb.inv_freq")) return true;
    if (m_.gated_delta() && (name.starts_with("mtp.") || contains(".mtp."))) return true;
    return m_.in_vision && sees(name);
  }

  Status rename(const std::vector<Part>& source, const std::vector<Part>& target) {
    std::map<Q, Where> where;
    for (std::size_t p = 0; p < source.size(); ++p) BITTERN_TRY(place(source, p, where));
    for (const Part& part : target) {
      if (!part.written) continue;
      Recipe recipe;
      recipe.name = part.name;
      recipe.shape = part.shape;
      BITTERN_TRY(fill(source, where, part, recipe));
      out_.tensors.push_back(std::move(recipe));
    }
    return {};
  }

  // Notes where the rows of a part are that the source has.
  Status place(const std::vector<Part>& source, std::size_t p, std::map<Q, Where>& where) {
    const Part& part = source[p];
    const auto index = static_cast<std::int32_t>(p);
    const auto found = shapes_.find(part.name);
    if (found == shapes_.end()) return {};
    if (*found->second != part.shape)
      return invalid("tensor " + in_quotes(part.name) + " is " + found->second->str() +
                     ", expected " + part.shape.str() + " as the config says");
    used_.insert(found->first);
    std::int64_t row = 0;
    for (const Rows& run : part.rows) {
      Where& there = where[run.quantity];
      const auto twice = [&](std::int32_t other) {
        return invalid("tensors " + in_quotes(source[std::size_t(other)].name) + " and " +
                       in_quotes(part.name) + " hold the same weights, expected one of them");
      };
      if (there.whole >= 0) return twice(there.whole);
      if (part.whole) {
        if (!there.rows.empty()) return twice(there.rows.back().part);
        there.whole = index;
        break;
      }
      // Experts come in order: what is missing shows before room is made for those after it.
      if (part.rows.size() == 1 && run.first > std::int64_t(there.rows.size()))
        return missing(source, run.quantity, std::int64_t(there.rows.size()));
      const auto size = std::size_t(run.first + (run.count - 1) * run.step + 1);
      if (there.rows.size() < size) there.rows.resize(size);
      for (std::int64_t i = 0; i < run.count; ++i) {
        Place& at = there.rows[std::size_t(run.first + i * run.step)];
        if (at.part >= 0) return twice(at.part);
        at = {index, row++};
      }
    }
    return {};
  }

  static Status fill(const std::vector<Part>& source, const std::map<Q, Where>& where,
                     const Part& part, Recipe& recipe) {
    std::vector<std::int32_t> parts;  // behind recipe.sources
    std::size_t last = 0;             // rows of a part follow each other
    const auto source_of = [&](std::int32_t p) {
      if (last >= parts.size() || parts[last] != p)
        last = static_cast<std::size_t>(std::find(parts.begin(), parts.end(), p) - parts.begin());
      if (last == parts.size()) {
        parts.push_back(p);
        recipe.sources.push_back(source[std::size_t(p)].name);
      }
      return static_cast<std::uint32_t>(last);
    };
    for (Rows run : part.rows) {
      const auto found = where.find(run.quantity);
      if (found == where.end()) return missing(source, run.quantity, run.first);
      const Where& there = found->second;
      if (part.whole && there.whole >= 0) {
        source_of(there.whole);
        continue;
      }
      // Where one of the two is the quantity itself, the other tells how long its rows are.
      if (part.whole && there.rows.front().part >= 0) {
        recipe.width = source[std::size_t(there.rows.front().part)].width;
        run.count = part.shape.numel() / recipe.width;
      } else {
        recipe.width = part.width;
      }
      for (std::int64_t i = 0; i < run.count; ++i) {
        const Place at = there.at(run.first + i * run.step);
        if (at.part < 0) return missing(source, run.quantity, run.first + i * run.step);
        add_row(recipe.rows, source_of(at.part), at.row);
      }
    }
    const Part& first = source[std::size_t(parts.front())];
    if (parts.size() == 1 && recipe.rows.size() == 1 && recipe.rows[0].first == 0 &&
        recipe.rows[0].step == 1 && recipe.rows[0].count == first.shape.numel() / recipe.width) {
      recipe.rows.clear();
      recipe.width = 0;
    }
    recipe.map = between(first.map, part.map);
    recipe.column_block = std::max(part.column_block, first.column_block);
    recipe.columns = part.columns;
    if (!first.columns.empty()) {
      recipe.columns.resize(first.columns.size());
      for (std::size_t b = 0; b < first.columns.size(); ++b)
        recipe.columns[std::size_t(first.columns[b])] = static_cast<std::int64_t>(b);
    }
    return {};
  }

  // Runs as long as can be: a second row sets the step.
  static void add_row(std::vector<RowRun>& rows, std::uint32_t source, std::int64_t row) {
    if (!rows.empty() && rows.back().source == source) {
      RowRun& run = rows.back();
      if (run.count == 1 && row > run.first) {
        run.step = row - run.first;
        run.count = 2;
        return;
      }
      if (run.count > 1 && row == run.first + run.count * run.step) {
        ++run.count;
        return;
      }
    }
    rows.push_back({.source = source, .first = row, .count = 1, .step = 1});
  }

  const ModelConfig& m_;
  World from_, to_;
  std::map<std::string, const Shape*, std::less<>> shapes_;
  std::set<std::string_view> used_;
  Renaming out_;
};

// "135M", "8x7B": as llama.cpp's converter rounds.
std::string size_label(std::int64_t parameters, std::int64_t in_experts, std::int64_t experts) {
  double count = double(parameters);
  if (experts > 0) count += double(in_experts) / double(experts) - double(in_experts);
  const char* unit = "K";
  double scale = 1e-3;
  if (count > 1e12) {
    unit = "T", scale = 1e-12;
  } else if (count > 1e9) {
    unit = "B", scale = 1e-9;
  } else if (count > 1e6) {
    unit = "M", scale = 1e-6;
  }
  const double scaled = count * scale;
  const double rounded = std::nearbyint(scaled);
  const int digits = rounded >= 10 ? 0 : rounded >= 1 ? 1 : 2;
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f%s", digits, scaled, unit);
  return (experts > 0 ? std::to_string(experts) + "x" : "") + text.data();
}

bool in_experts(std::string_view name) {
  return name.find(".experts.") != name.npos || name.find(".switch_mlp.") != name.npos;
}

// "model.layers.N.mlp.gate.weight" and "model.visual.*".
std::string kind_of(std::string_view name) {
  for (const std::string_view part :
       {"visual.", "vision_tower.", "multi_modal_projector.", "mtp.", "nextn."})
    if (const std::size_t at = name.find(part); at == 0 || (at != name.npos && name[at - 1] == '.'))
      return kind_of(name.substr(0, at)) + std::string(part) + "*";
  std::string kind;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (std::size_t i = 0; i < name.size(); ++i) {
    std::size_t end = i;
    if (i == 0 || name[i - 1] == '.')
      while (end < name.size() && digit(name[end])) ++end;
    if (end > i && (end == name.size() || name[end] == '.')) {
      kind += 'N';
      i = end - 1;
    } else {
      kind += name[i];
    }
  }
  return kind;
}

}  // namespace

std::vector<std::string> kinds_left_out(std::span<const std::string> names, World to) {
  const std::string world = to == World::gguf  ? "GGUF"
                            : to == World::mlx ? "MLX"
                                               : "Hugging Face's layout";
  std::map<std::string, std::vector<std::string_view>> kinds;
  for (const std::string& name : names) kinds[kind_of(name)].push_back(name);
  std::vector<std::string> lines;
  for (const auto& [kind, members] : kinds)
    lines.push_back(members.size() == 1
                        ? "left out, as " + world +
                              " has no place for it: " + std::string(members[0])
                        : "left out " + std::to_string(members.size()) + " tensors that " + world +
                              " has no place for: " + kind);
  return lines;
}

World world_of_folder(std::span<const NamedShape> tensors) {
  for (const NamedShape& tensor : tensors) {
    const std::string_view name = tensor.name;
    if (name.find(".switch_mlp.") != name.npos) return World::mlx;
    if (name.ends_with(".conv1d.weight") && tensor.shape.rank == 3)
      return tensor.shape[2] == 1 ? World::mlx : World::hf;
  }
  return World::hf;
}

Result<GgufMetadata> metadata_from_config(const Json& config, std::span<const NamedShape> tensors,
                                          std::string_view model_name) {
  const auto model = model_from_config(config);
  if (!model) return model.status();
  std::int64_t parameters = 0, expert_parameters = 0;
  for (const NamedShape& tensor : tensors) {
    if (sees(tensor.name)) continue;
    parameters += tensor.shape.numel();
    if (in_experts(tensor.name)) expert_parameters += tensor.shape.numel();
  }
  GgufMetadata out;
  out.emplace_back("general.architecture", GgufData(gguf_name(model->arch())));
  out.emplace_back("general.type", GgufData("model"));
  if (!model_name.empty()) out.emplace_back("general.name", GgufData(model_name));
  out.emplace_back(
      "general.size_label",
      GgufData(std::string_view(size_label(parameters, expert_parameters, model->experts))));
  BITTERN_TRY(add_metadata(*model, out));
  return out;
}

Result<Renaming> rename_tensors(const Json& config, std::span<const NamedShape> tensors, World from,
                                World to) {
  if (from == to) {
    Renaming same;
    for (const NamedShape& tensor : tensors) {
      Recipe& recipe = same.tensors.emplace_back();
      recipe.name = tensor.name;
      recipe.shape = tensor.shape;
      recipe.sources = {tensor.name};
    }
    return same;
  }
  const auto model = model_from_config(config);
  if (!model) return model.status();
  return Renamer(*model, tensors, from, to).run();
}

Result<Renaming> parts_of(const ModelConfig& model, std::span<const NamedShape> tensors,
                          World from) {
  return Renamer(model, tensors, from, World::parts).run();
}

}  // namespace bittern
