#include "convert/importance.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace bittern {

Result<ImportanceMatrix> ImportanceMatrix::open(const std::string& path) {
  auto file = GgufFile::open(path);
  if (!file) return file.status();
  const auto type = file->string("general.type");
  if (!type || *type != "imatrix")
    return invalid(path + ": general.type is not imatrix, expected an importance matrix as GGUF");
  return ImportanceMatrix(std::move(*file));
}

Result<std::vector<float>> ImportanceMatrix::values(const GgufTensor& tensor,
                                                    std::int64_t count) const {
  if (tensor.type != GgmlType::f32 || tensor.shape.numel() != count) {
    return invalid(file_.path() + ": tensor " + std::string(tensor.name) + ": " +
                   info(tensor.type).name + " " + tensor.shape.str() + ", expected F32 with " +
                   std::to_string(count) + " numbers");
  }
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::memcpy(numbers.data(), tensor.bytes.data(), tensor.bytes.size());
  for (const MappedFile& part : file_.parts()) BITTERN_TRY(part.unchanged());
  for (const float x : numbers) {
    if (!std::isfinite(x) || x < 0)
      return invalid(file_.path() + ": tensor " + std::string(tensor.name) + ": holds " +
                     std::to_string(x) + ", expected finite numbers from 0");
  }
  return numbers;
}

Result<std::vector<float>> ImportanceMatrix::find(const std::string& name, std::int64_t columns,
                                                  std::int64_t matrices) const {
  const GgufTensor* sums = file_.tensor(name + ".in_sum2");
  const GgufTensor* counts = file_.tensor(name + ".counts");
  if (sums == nullptr || counts == nullptr) return std::vector<float>{};
  auto weights = values(*sums, columns * matrices);
  if (!weights) return weights.status();
  const auto seen = values(*counts, matrices);
  if (!seen) return seen.status();
  for (std::int64_t m = 0; m < matrices; ++m) {
    const float n = (*seen)[static_cast<std::size_t>(m)];
    float* const row = weights->data() + m * columns;
    if (n > 0) {
      for (std::int64_t i = 0; i < columns; ++i) row[i] /= n;
    } else {
      std::fill_n(row, columns, 1.0f);
    }
  }
  return weights;
}

}  // namespace bittern
