// What config.json says of quantised tensors, in the dialects that are read as affine groups.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "bittern/status.h"
#include "formats/json_tree.h"

namespace bittern {

struct QuantizationConfig {
  // none: not quantised, or by a method whose tensors are shown as they are stored.
  enum class Method : std::uint8_t { none, mlx, awq, gptq };
  struct Module {
    int bits = 0;
    std::int64_t group = 0;  // -1: all of a row (awq, gptq)
  };

  Method method = Method::none;
  Module all;
  // Of mlx: what is said of single modules; nothing: it is not quantised.
  std::map<std::string, std::optional<Module>, std::less<>> modules;
  bool zeros_minus_one = true;  // of gptq: zero points are stored less one
};

// `where` opens the messages. A config that is null says nothing.
Result<QuantizationConfig> read_quantization_config(const std::string& where,
                                                    const OrderedJson& config);

}  // namespace bittern
