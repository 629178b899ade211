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

std::string bits_text(const std::optional<double>& bits) {
  return bits ? fmt::format("{:.3f}", *bits) : "-";
}

template <class T>
std::string shape_text(const std::vector<T>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

std::size_t name_width(const ModelDescription& model) {
  std::size_t width = 10;
  for (const TensorDescription& tensor : model.tensors) width = std::max(width, tensor.name.size());
  return std::min<std::size_t>(width, 72);
}

}  // namespace

// ---- as text ----

void print_summary(const ModelDescription& model) {
  fmt::print("{}: {}\n", printable(model.path), model.form);
  const auto line = [](const char* label, const std::string& value) {
    fmt::print("  {:<14} {}\n", label, printable(value));
  };
  const auto number = [&](const char* label, const std::optional<std::uint64_t>& value) {
    if (value) line(label, std::to_string(*value));
  };
  if (model.architecture || model.model_class) {
    std::string text = model.architecture.value_or("");
    if (model.model_class)
      text += text.empty() ? *model.model_class : " (" + *model.model_class + ")";
    line("architecture", text);
  }
  if (model.name) line("name", *model.name);
  number("layers", model.layers);
  number("hidden size", model.hidden_size);
  if (model.heads) {
    line("heads", model.key_value_heads ? fmt::format("{}, {} for keys and values", *model.heads,
                                                      *model.key_value_heads)
                                        : std::to_string(*model.heads));
  }
  number("experts", model.experts);
  number("vocabulary", model.vocabulary);
  number("context", model.context);
  if (model.quantization) line("quantised", *model.quantization);
  const std::uint64_t bytes = model.bytes();
  line("parameters", with_commas(model.parameters()));
  line("size",
       fmt::format("{}, {} bits per weight", size_text(bytes), bits_text(model.bits_per_weight())));
  fmt::print("\n  {:<26} {:>8} {:>16} {:>10} {:>7}\n", "storage", "tensors", "parameters", "bytes",
             "share");
  for (const StorageTotal& total : model.storages) {
    const double share =
        100 * static_cast<double>(total.bytes) / static_cast<double>(std::max(bytes, {1}));
    fmt::print("  {:<26} {:>8} {:>16} {:>10} {:>5.1f} %\n", total.storage, total.tensors,
               with_commas(total.parameters), size_text(total.bytes), share);
  }
  for (const std::string& note : model.notes) fmt::print("note: {}\n", printable(note));
}

void print_tensors(const ModelDescription& model) {
  const std::size_t width = name_width(model);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>12} {:>7}\n", "tensor", width, "shape", "storage", "bytes",
             "bits");
  for (const TensorDescription& tensor : model.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>12} {:>7}\n", printable(tensor.name), width,
               shape_text(tensor.shape), tensor.storage, tensor.bytes,
               bits_text(tensor.bits_per_weight()));
  }
}

void print_comparison(const ModelComparison& comparison) {
  std::size_t width = 10;
  for (const TensorDifference& tensor : comparison.tensors)
    width = std::max(width, tensor.name.size());
  width = std::min<std::size_t>(width, 72);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>26} {:>14} {:>13}\n", "tensor", width, "shape", "storage",
             "of the other", "relative error", "max abs error");
  for (const TensorDifference& tensor : comparison.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>26} {:>14.4g} {:>13.4g}{}\n", printable(tensor.name), width,
               shape_text(tensor.shape), tensor.storage, tensor.other_storage,
               tensor.relative_error(), tensor.max_abs_error,
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
  names("the model", comparison.only_in_model);
  names("the other", comparison.only_in_other);
  if (!comparison.shapes_differ.empty()) fmt::print("\nof other shapes:\n");
  for (const ModelComparison::Shapes& shapes : comparison.shapes_differ)
    fmt::print("  {} {} and {}\n", printable(shapes.name), shape_text(shapes.shape),
               shape_text(shapes.other_shape));
  if (!comparison.not_compared.empty()) fmt::print("\nnot compared:\n");
  for (const ModelComparison::Skipped& skipped : comparison.not_compared)
    fmt::print("  {}: {}\n", printable(skipped.name), printable(skipped.reason));
  fmt::print(
      "\n{} tensors compared, {} equal; over all numbers: relative error {:.6g}, "
      "max abs error {:.6g}\n",
      comparison.tensors.size(), comparison.equal(), comparison.relative_error(),
      comparison.max_abs_error());
  if (comparison.not_finite.empty()) return;
  fmt::print("{} tensors hold infinities or NaN, which these totals leave out:\n",
             comparison.not_finite.size());
  for (const std::size_t i : comparison.not_finite) {
    const TensorDifference& tensor = comparison.tensors[i];
    fmt::print("  {}: {} in the model, {} in the other\n", printable(tensor.name),
               tensor.not_finite_in_model, tensor.not_finite_in_other);
  }
}

// ---- as JSON ----

namespace {

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace

Json summary_json(const ModelDescription& model) {
  Json storages = Json::array(), tensors = Json::array();
  for (const StorageTotal& total : model.storages) {
    storages.push_back({{"storage", total.storage},
                        {"tensors", total.tensors},
                        {"parameters", total.parameters},
                        {"bytes", total.bytes}});
  }
  for (const TensorDescription& tensor : model.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"storage", tensor.storage},
                       {"bytes", tensor.bytes},
                       {"bits_per_weight", or_null(tensor.bits_per_weight())},
                       {"decodable", tensor.decodable}});
  }
  return {
      {"path", model.path},
      {"kind", model.kind},
      {"architecture", or_null(model.architecture)},
      {"class", or_null(model.model_class)},
      {"name", or_null(model.name)},
      {"layers", or_null(model.layers)},
      {"hidden_size", or_null(model.hidden_size)},
      {"heads", or_null(model.heads)},
      {"key_value_heads", or_null(model.key_value_heads)},
      {"experts", or_null(model.experts)},
      {"vocabulary", or_null(model.vocabulary)},
      {"context", or_null(model.context)},
      {"quantization", model.quantization_json ? Json::parse(*model.quantization_json) : Json()},
      {"parameters", model.parameters()},
      {"bytes", model.bytes()},
      {"bits_per_weight", or_null(model.bits_per_weight())},
      {"storages", storages},
      {"notes", model.notes},
      {"tensors", tensors}};
}

Json comparison_json(const ModelComparison& comparison) {
  Json tensors = Json::array(), groups = Json::array(), shapes = Json::array(),
       skipped = Json::array();
  for (const TensorDifference& tensor : comparison.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"storage", tensor.storage},
                       {"other_storage", tensor.other_storage},
                       {"relative_error", tensor.relative_error()},
                       {"max_abs_error", tensor.max_abs_error},
                       {"different", tensor.different},
                       {"not_finite", tensor.not_finite},
                       {"not_finite_in_model", tensor.not_finite_in_model},
                       {"not_finite_in_other", tensor.not_finite_in_other}});
  }
  for (const GroupDifference& group : comparison.worst_groups) {
    groups.push_back({{"tensor", comparison.tensors[group.tensor].name},
                      {"row", group.row},
                      {"column", group.column},
                      {"error", group.error}});
  }
  for (const ModelComparison::Shapes& one : comparison.shapes_differ) {
    shapes.push_back({{"name", one.name}, {"shape", one.shape}, {"other_shape", one.other_shape}});
  }
  for (const ModelComparison::Skipped& one : comparison.not_compared)
    skipped.push_back({{"name", one.name}, {"reason", one.reason}});
  Json sick = Json::array();
  for (const std::size_t i : comparison.not_finite) sick.push_back(comparison.tensors[i].name);
  return {{"relative_error", comparison.relative_error()},
          {"max_abs_error", comparison.max_abs_error()},
          {"not_finite_tensors", sick},
          {"equal", comparison.equal()},
          {"group_columns", kComparedGroup},
          {"tensors", tensors},
          {"worst_groups", groups},
          {"only_in_model", comparison.only_in_model},
          {"only_in_other", comparison.only_in_other},
          {"shapes_differ", shapes},
          {"not_compared", skipped}};
}

}  // namespace bittern::cli
