// How the numbers of a tensor are stored:
//
//   plain    numbers of one dtype
//   blocks   a block format of ggml: scales and codes in one run of bytes
//   affine   w = scale * code + bias, codes packed apart from scales and biases (MLX, AWQ, GPTQ)
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/ggml_type.h"
#include "formats/safe_dtype.h"

namespace bittern {

// How a tensor's numbers are, or are to be, stored.
struct Storage {
  enum class Kind : std::uint8_t { plain, blocks, affine };
  // What an affine group has beside its scale.
  enum class Zeros : std::uint8_t {
    biases,    // any number: w = code * scale + bias
    integers,  // a bias of -scale times a zero point 0 .. 2^bits - 1, rounded to dtype
    packed,    // the zero point: w = (code - zero) * scale, as compressed-tensors has it
  };
  Kind kind = Kind::plain;
  SafeDType dtype = SafeDType::f32;  // plain; of scales and biases where affine
  GgmlType type = GgmlType::f32;     // blocks: never a type that is plain numbers
  int bits = 0, group = 0;           // affine
  Zeros zeros = Zeros::biases;       // affine

  static Storage plain(SafeDType dtype) { return {.kind = Kind::plain, .dtype = dtype}; }
  static Storage blocks(GgmlType type) { return {.kind = Kind::blocks, .type = type}; }
  static Storage affine(int bits, int group, SafeDType params, Zeros zeros = Zeros::biases) {
    return {.kind = Kind::affine, .dtype = params, .bits = bits, .group = group, .zeros = zeros};
  }
  bool operator==(const Storage&) const = default;

  bool quantized() const { return kind != Kind::plain; }
  std::string str() const;  // "BF16", "Q4_K", "4 bit, group 64, BF16"
  // All bytes of a tensor of this shape: codes, scales and biases or zero points; or why it is
  // impossible.
  Result<std::uint64_t> bytes(const Shape& shape) const;
};

// GGUF's type as a storage, and back where it has one.
Storage storage_of(GgmlType type);
std::optional<GgmlType> ggml_type_of(const Storage& storage);

}  // namespace bittern
