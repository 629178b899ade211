// What config.json says about quantised tensors, in the forms that are read as affine groups.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "formats/json_tree.h"

namespace bittern {

struct QuantizationConfig {
  // none: not quantised, or by a method whose tensors are shown as they are stored.
  enum class Method : std::uint8_t { none, mlx, awq, gptq, compressed };
  struct Module {
    int bits = 0;
    std::int64_t group = 0;   // -1: all of a row (not mlx)
    bool zero_points = true;  // compressed: false if all are 2^(bits - 1)
  };

  Method method = Method::none;
  Module all;
  // For mlx: the settings of single modules; nothing means that the module is not quantised.
  std::map<std::string, std::optional<Module>, std::less<>> modules;
  bool zeros_minus_one = true;  // gptq: zero points are stored minus one
  // For compressed: what modules may be; `all` is the first. Names of modules that each is for are
  // patterns of Python, which are not read: a module's shapes tell which it is.
  std::vector<Module> choices;
};

// Messages begin with `where`. A config that is null has no settings.
Result<QuantizationConfig> read_quantization_config(const std::string& where,
                                                    const OrderedJson& config);

}  // namespace bittern
