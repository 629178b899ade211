// For tests: models of each architecture, a few numbers large.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "convert/architecture.h"

namespace bittern::tiny_models {

using Json = nlohmann::ordered_json;

struct Tiny {
  const char* name;
  const char* config;
  const char* once;       // names and shapes
  const char* attention;  // of a layer with full attention
  const char* delta;      // of a gated delta net
  const char* mlp;        // of both
  const char* experts = "";
};

const std::vector<Tiny>& tiny();
const Tiny& tiny(std::string_view name);

Json config_of(const Tiny& model);
Json config_of(std::string_view name);
// That of a model that sees, around its language model's.
Json vision(std::string_view type, const Json& text);

// "NAME DIM DIM..." in each line.
void add_shapes(const std::string& text, const std::string& prefix, std::vector<NamedShape>& out);
// What transformers 5.22 saves.
std::vector<NamedShape> hf_tensors(const Tiny& model);

struct Values {
  Shape shape;
  std::vector<float> data;
};
using Tensors = std::map<std::string, Values>;

// Numbers that all differ, and whose +1 is exact.
Tensors numbered(const std::vector<NamedShape>& shapes);
std::vector<NamedShape> shapes_of(const Tensors& tensors);

// As a recipe says, one number after the other.
Tensors carried_out(const Renaming& renaming, const Tensors& from);
Tensors renamed(const Json& config, const Tensors& tensors, World from, World to);
void expect_same(const Tensors& a, const Tensors& b);

}  // namespace bittern::tiny_models
