// What `bittern inspect` knows of a model, and how it tells it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/cli.h"
#include "convert/compare.h"
#include "formats/checkpoint.h"

namespace bittern::cli {

// A tensor as it is listed.
struct Listed {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::string storage;
  std::uint64_t parameters = 0, bytes = 0;
  bool decodable = true;
};

// All that is known of a model; what is not stays empty.
struct Summary {
  std::string path, kind, form;    // kind: a word for programs; form: words for people
  std::vector<std::string> files;  // that were read
  std::optional<std::string> architecture, model_class, name;
  std::optional<std::uint64_t> layers, hidden_size, heads, key_value_heads, experts, vocabulary,
      context;
  Json quantization;  // as the folder's config.json has it
  std::vector<Listed> tensors;
  std::vector<std::string> notes;

  std::uint64_t parameters() const {
    std::uint64_t n = 0;
    for (const Listed& tensor : tensors) n += tensor.parameters;
    return n;
  }
  std::uint64_t bytes() const {
    std::uint64_t n = 0;
    for (const Listed& tensor : tensors) n += tensor.bytes;
    return n;
  }
};

// ---- inspect_summary.cc ----

std::vector<std::uint64_t> dims(const Shape& shape);
Summary summarize(const Checkpoint& model);
// Also of a model that bittern cannot read, as far as its files tell.
Result<Summary> summarize(const std::string& path);

struct StorageTotal {
  std::string storage;
  std::uint64_t tensors = 0, parameters = 0, bytes = 0;
};

// The largest first.
std::vector<StorageTotal> totals(const Summary& summary);

// A member that is there and not null, or else null.
const Json* member(const Json& object, std::string_view key);
std::optional<std::string> text_in(const Json* value);

// ---- inspect_report.cc: as text, and as JSON (docs/inspect.md) ----

void print_summary(const Summary& summary);
void print_tensors(const Summary& summary);
void print_comparison(const Comparison& comparison);
Json summary_json(const Summary& summary);
Json comparison_json(const Comparison& comparison);

}  // namespace bittern::cli
