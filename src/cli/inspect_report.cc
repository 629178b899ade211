// A summary and a comparison as text, and as JSON.
#include <fmt/format.h>

#include <algorithm>

#include "cli/inspect.h"

namespace bittern::cli {

namespace {

std::string with_commas(std::uint64_t n) {
  std::string text = std::to_string(n);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::optional<double> bits_per_weight(std::uint64_t bytes, std::uint64_t parameters) {
  if (parameters == 0) return std::nullopt;
  return 8 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

std::string bits_text(std::uint64_t bytes, std::uint64_t parameters) {
  const auto bits = bits_per_weight(bytes, parameters);
  return bits ? fmt::format("{:.3f}", *bits) : "-";
}

// "4 bit, group 64, affine; 3 modules differ"
std::string quantization_text(const Json& settings) {
  std::vector<std::string> words;
  if (const auto method = text_in(member(settings, "quant_method"))) words.push_back(*method);
  const auto whole = [&](std::string_view key, std::string_view other) -> std::string {
    const Json* value = member(settings, key);
    if (value == nullptr) value = member(settings, other);
    return value != nullptr && value->is_number_integer() ? value->dump() : "";
  };
  if (const auto bits = whole("bits", "w_bit"); !bits.empty()) words.push_back(bits + " bit");
  if (const auto group = whole("group_size", "q_group_size"); !group.empty())
    words.push_back("group " + group);
  if (const auto mode = text_in(member(settings, "mode"))) words.push_back(*mode);
  std::string line = fmt::format("{}", fmt::join(words, ", "));
  std::size_t modules = 0;
  if (!member(settings, "quant_method")) {
    for (const auto& [key, value] : settings.items())
      modules += value.is_object() || value.is_boolean();
  }
  if (modules > 0) line += fmt::format("; {} module{} apart", modules, modules == 1 ? "" : "s");
  return line.empty() ? "settings in config.json" : line;
}

std::size_t name_width(const Summary& summary) {
  std::size_t width = 10;
  for (const Listed& tensor : summary.tensors) width = std::max(width, tensor.name.size());
  return std::min<std::size_t>(width, 72);
}

}  // namespace

// ---- as text ----

void print_summary(const Summary& summary) {
  fmt::print("{}: {}\n", printable(summary.path), summary.form);
  const auto line = [](const char* label, const std::string& value) {
    fmt::print("  {:<14} {}\n", label, printable(value));
  };
  const auto number = [&](const char* label, const std::optional<std::uint64_t>& value) {
    if (value) line(label, std::to_string(*value));
  };
  if (summary.architecture || summary.model_class) {
    std::string text = summary.architecture.value_or("");
    if (summary.model_class)
      text += text.empty() ? *summary.model_class : " (" + *summary.model_class + ")";
    line("architecture", text);
  }
  if (summary.name) line("name", *summary.name);
  number("layers", summary.layers);
  number("hidden size", summary.hidden_size);
  if (summary.heads) {
    line("heads", summary.key_value_heads ? fmt::format("{}, {} for keys and values",
                                                        *summary.heads, *summary.key_value_heads)
                                          : std::to_string(*summary.heads));
  }
  number("experts", summary.experts);
  number("vocabulary", summary.vocabulary);
  number("context", summary.context);
  if (!summary.quantization.is_null()) line("quantised", quantization_text(summary.quantization));
  const std::uint64_t parameters = summary.parameters(), bytes = summary.bytes();
  line("parameters", with_commas(parameters));
  line("size",
       fmt::format("{}, {} bits per weight", size_text(bytes), bits_text(bytes, parameters)));
  fmt::print("\n  {:<26} {:>8} {:>16} {:>10} {:>7}\n", "storage", "tensors", "parameters", "bytes",
             "share");
  for (const StorageTotal& total : totals(summary)) {
    const double share =
        100 * static_cast<double>(total.bytes) / static_cast<double>(std::max(bytes, {1}));
    fmt::print("  {:<26} {:>8} {:>16} {:>10} {:>5.1f} %\n", total.storage, total.tensors,
               with_commas(total.parameters), size_text(total.bytes), share);
  }
  for (const std::string& note : summary.notes) fmt::print("note: {}\n", printable(note));
}

void print_tensors(const Summary& summary) {
  const std::size_t width = name_width(summary);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>12} {:>7}\n", "tensor", width, "shape", "storage", "bytes",
             "bits");
  for (const Listed& tensor : summary.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>12} {:>7}\n", printable(tensor.name), width,
               fmt::format("[{}]", fmt::join(tensor.shape, ",")), tensor.storage, tensor.bytes,
               bits_text(tensor.bytes, tensor.parameters));
  }
}

void print_comparison(const Comparison& comparison) {
  std::size_t width = 10, equal = 0;
  for (const TensorDifference& tensor : comparison.tensors) {
    width = std::max(width, tensor.name.size());
    equal += tensor.different == 0;
  }
  width = std::min<std::size_t>(width, 72);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>26} {:>14} {:>13}\n", "tensor", width, "shape", "storage",
             "of the other", "relative error", "max abs error");
  for (const TensorDifference& tensor : comparison.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>26} {:>14.4g} {:>13.4g}{}\n", printable(tensor.name), width,
               tensor.shape.str(), tensor.a.str(), tensor.b.str(), tensor.relative_error(),
               tensor.max_abs_error,
               tensor.not_finite == 0
                   ? ""
                   : fmt::format("  {} infinite or NaN in one alone", tensor.not_finite));
  }
  if (!comparison.worst_groups.empty()) {
    fmt::print(
        "\nworst groups of {} columns: their root mean square error over that of the "
        "tensor's numbers\n",
        kComparedGroup);
    for (const GroupDifference& group : comparison.worst_groups) {
      fmt::print("{:<{}} row {}, column {}: {:.4g}\n",
                 printable(comparison.tensors[group.tensor].name), width, group.row, group.column,
                 group.error);
    }
  }
  const auto names = [](const char* where, const std::vector<std::string>& all) {
    if (all.empty()) return;
    fmt::print("\nonly in {}:\n", where);
    for (const std::string& name : all) fmt::print("  {}\n", printable(name));
  };
  names("the model", comparison.only_in_a);
  names("the other", comparison.only_in_b);
  if (!comparison.shapes_differ.empty()) fmt::print("\nof other shapes:\n");
  for (const Comparison::Shapes& shapes : comparison.shapes_differ)
    fmt::print("  {} {} and {}\n", printable(shapes.name), shapes.a.str(), shapes.b.str());
  if (!comparison.not_compared.empty()) fmt::print("\nnot compared:\n");
  for (const Comparison::Skipped& skipped : comparison.not_compared)
    fmt::print("  {}: {}\n", printable(skipped.name), printable(skipped.reason));
  fmt::print(
      "\n{} tensors compared, {} equal; over all numbers: relative error {:.6g}, "
      "max abs error {:.6g}\n",
      comparison.tensors.size(), equal, comparison.relative_error(), comparison.max_abs_error());
  const std::vector<const TensorDifference*> sick = comparison.not_finite();
  if (sick.empty()) return;
  fmt::print("{} tensors hold infinities or NaN, which these totals leave out:\n", sick.size());
  for (const TensorDifference* tensor : sick)
    fmt::print("  {}: {} in the model, {} in the other\n", printable(tensor->name),
               tensor->not_finite_a, tensor->not_finite_b);
}

// ---- as JSON ----

namespace {

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace

Json summary_json(const Summary& summary) {
  Json storages = Json::array(), tensors = Json::array();
  for (const StorageTotal& total : totals(summary)) {
    storages.push_back({{"storage", total.storage},
                        {"tensors", total.tensors},
                        {"parameters", total.parameters},
                        {"bytes", total.bytes}});
  }
  for (const Listed& tensor : summary.tensors) {
    tensors.push_back(
        {{"name", tensor.name},
         {"shape", tensor.shape},
         {"storage", tensor.storage},
         {"bytes", tensor.bytes},
         {"bits_per_weight", or_null(bits_per_weight(tensor.bytes, tensor.parameters))},
         {"decodable", tensor.decodable}});
  }
  return {{"path", summary.path},
          {"kind", summary.kind},
          {"architecture", or_null(summary.architecture)},
          {"class", or_null(summary.model_class)},
          {"name", or_null(summary.name)},
          {"layers", or_null(summary.layers)},
          {"hidden_size", or_null(summary.hidden_size)},
          {"heads", or_null(summary.heads)},
          {"key_value_heads", or_null(summary.key_value_heads)},
          {"experts", or_null(summary.experts)},
          {"vocabulary", or_null(summary.vocabulary)},
          {"context", or_null(summary.context)},
          {"quantization", summary.quantization},
          {"parameters", summary.parameters()},
          {"bytes", summary.bytes()},
          {"bits_per_weight", or_null(bits_per_weight(summary.bytes(), summary.parameters()))},
          {"storages", storages},
          {"notes", summary.notes},
          {"tensors", tensors}};
}

Json comparison_json(const Comparison& comparison) {
  Json tensors = Json::array(), groups = Json::array(), shapes = Json::array(),
       skipped = Json::array();
  std::size_t equal = 0;
  for (const TensorDifference& tensor : comparison.tensors) {
    equal += tensor.different == 0;
    tensors.push_back({{"name", tensor.name},
                       {"shape", dims(tensor.shape)},
                       {"storage", tensor.a.str()},
                       {"other_storage", tensor.b.str()},
                       {"relative_error", tensor.relative_error()},
                       {"max_abs_error", tensor.max_abs_error},
                       {"different", tensor.different},
                       {"not_finite", tensor.not_finite},
                       {"not_finite_in_model", tensor.not_finite_a},
                       {"not_finite_in_other", tensor.not_finite_b}});
  }
  for (const GroupDifference& group : comparison.worst_groups) {
    groups.push_back({{"tensor", comparison.tensors[group.tensor].name},
                      {"row", group.row},
                      {"column", group.column},
                      {"error", group.error}});
  }
  for (const Comparison::Shapes& one : comparison.shapes_differ) {
    shapes.push_back({{"name", one.name}, {"shape", dims(one.a)}, {"other_shape", dims(one.b)}});
  }
  for (const Comparison::Skipped& one : comparison.not_compared)
    skipped.push_back({{"name", one.name}, {"reason", one.reason}});
  Json sick = Json::array();
  for (const TensorDifference* tensor : comparison.not_finite()) sick.push_back(tensor->name);
  return {{"relative_error", comparison.relative_error()},
          {"max_abs_error", comparison.max_abs_error()},
          {"not_finite_tensors", sick},
          {"equal", equal},
          {"group_columns", kComparedGroup},
          {"tensors", tensors},
          {"worst_groups", groups},
          {"only_in_model", comparison.only_in_a},
          {"only_in_other", comparison.only_in_b},
          {"shapes_differ", shapes},
          {"not_compared", skipped}};
}

}  // namespace bittern::cli
