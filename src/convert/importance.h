// llama.cpp's importance matrix, a GGUF file: for each weight NAME [matrices, rows, columns] the
// sum of the squares of its inputs, NAME.in_sum2 [matrices, columns], over NAME.counts [matrices]
// rows.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "formats/gguf.h"

namespace bittern {

class ImportanceMatrix {
 public:
  static Result<ImportanceMatrix> open(const std::string& path);

  // The mean squares of the inputs of tensor `name`, [matrices, columns]; all ones for a matrix
  // that saw no input; empty where the file has no such tensor.
  Result<std::vector<float>> find(const std::string& name, std::int64_t columns,
                                  std::int64_t matrices) const;

 private:
  explicit ImportanceMatrix(GgufFile file) : file_(std::move(file)) {}
  Result<std::vector<float>> values(const GgufTensor& tensor, std::int64_t count) const;

  GgufFile file_;
};

}  // namespace bittern
