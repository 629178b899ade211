#include "convert/importance.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "convert/output.h"
#include "convert/replace.h"
#include "convert/tokenizer_table.h"
#include "core/guarded.h"
#include "formats/fingerprint.h"
#include "formats/gguf_contents.h"

namespace bittern {
namespace {

constexpr std::int32_t kMostNameBytes = 4096;

// Means of the matrices' sums, in place. A matrix without inputs weighs its columns alike.
void divide(std::vector<float>& sums, std::int64_t matrices, std::int64_t columns,
            const auto& count_of) {
  for (std::int64_t m = 0; m < matrices; ++m) {
    const float n = count_of(m);
    float* const row = sums.data() + m * columns;
    if (n > 0) {
      for (std::int64_t i = 0; i < columns; ++i) row[i] /= n;
    } else {
      std::fill_n(row, columns, 1.0f);
    }
  }
}

// Only a want of memory is an error: it says nothing about the file.
Result<bool> is_importance_matrix(const std::string& path) {
  const auto gguf = GgufFile::open(path, /*alone=*/true);
  if (gguf.status().code() == Code::out_of_memory) return gguf.status();
  if (!gguf) return false;
  const auto type = gguf->string("general.type");
  if (type.status().code() == Code::out_of_memory) return type.status();
  return type && *type == "imatrix";
}

}  // namespace

Result<ImportanceMatrix> ImportanceMatrix::open(const std::string& path) noexcept try {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  ImportanceMatrix matrix;
  matrix.path_ = path;
  const auto bytes = file->bytes();
  if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0) {
    matrix.legacy_.emplace(std::move(*file));
    BITTERN_TRY(matrix.read_legacy());
    return matrix;
  }
  auto gguf = GgufFile::open(path);
  if (!gguf) return gguf.status();
  const auto type = gguf->string("general.type");
  if (!type || *type != "imatrix")
    return invalid(path + ": general.type is not imatrix; expected an importance matrix");
  matrix.gguf_.emplace(std::move(*gguf));
  return matrix;
} catch (...) {
  return caught(path);
}

Status ImportanceMatrix::read_legacy() {
  std::span<const std::byte> rest = legacy_->bytes();
  const auto whole = rest.size();
  const auto refuse = [&](const std::string& what) {
    return invalid(path_ + ": byte " + std::to_string(whole - rest.size()) + ": " + what +
                   "; expected an importance matrix of llama.cpp, as GGUF or as legacy .dat");
  };
  const auto take = [&](std::int32_t& x) {
    if (rest.size() < sizeof x) return false;
    std::memcpy(&x, rest.data(), sizeof x);
    rest = rest.subspan(sizeof x);
    return true;
  };
  std::int32_t entries = 0;
  if (!take(entries)) return refuse("the file ends before the number of entries");
  if (entries < 1) return refuse(std::to_string(entries) + " entries");
  for (std::int32_t i = 0; i < entries; ++i) {
    const std::string of = "entry " + std::to_string(i) + " of " + std::to_string(entries) + ": ";
    std::int32_t length = 0, count = 0;
    if (!take(length)) return refuse(of + "the file ends before its name");
    if (length < 1 || length > kMostNameBytes)
      return refuse(of + "a name of " + std::to_string(length) + " bytes");
    if (rest.size() < static_cast<std::size_t>(length))
      return refuse(of + "the file ends within its name");
    std::string name(reinterpret_cast<const char*>(rest.data()), static_cast<std::size_t>(length));
    if (!is_utf8(name) || std::any_of(name.begin(), name.end(),
                                      [](char c) { return static_cast<unsigned char>(c) < 32; }))
      return refuse(of + "a name with control characters, or not UTF-8");
    rest = rest.subspan(static_cast<std::size_t>(length));
    Entry entry;
    if (!take(entry.calls) || !take(count)) return refuse(of + name + ": the file ends in it");
    if (entry.calls < 0) return refuse(of + name + ": " + std::to_string(entry.calls) + " calls");
    if (count < 1) return refuse(of + name + ": " + std::to_string(count) + " values");
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    if (rest.size() < bytes)
      return refuse(of + name + ": " + std::to_string(count) + " values, but only " +
                    std::to_string(rest.size()) + " bytes are left");
    entry.values = rest.first(bytes);
    rest = rest.subspan(bytes);
    if (!entries_.emplace(std::move(name), entry).second) return refuse(of + "a name given twice");
  }
  // What follows is a count of chunks and the data set's name, in newer files.
  std::int32_t chunks = 0, length = 0;
  if (rest.empty() || (take(chunks) && rest.empty())) return {};
  if (!take(length) || length < 0 || rest.size() != static_cast<std::size_t>(length))
    return refuse(std::to_string(rest.size()) + " bytes after the last entry");
  return {};
}

Result<std::vector<float>> ImportanceMatrix::values(const std::string& name,
                                                    std::span<const std::byte> bytes,
                                                    const std::string& what,
                                                    std::int64_t count) const {
  if (bytes.size() != static_cast<std::size_t>(count) * sizeof(float)) {
    return invalid(path_ + ": " + name + ": " + what + "; expected F32 with " +
                   std::to_string(count) + " numbers");
  }
  std::vector<float> numbers(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  if (legacy_) BITTERN_TRY(legacy_->unchanged());
  if (gguf_)
    for (const MappedFile& part : gguf_->parts()) BITTERN_TRY(part.unchanged());
  for (const float x : numbers) {
    if (!std::isfinite(x) || x < 0)
      return invalid(path_ + ": " + name + ": holds " + std::to_string(x) +
                     "; expected finite numbers from 0");
  }
  return numbers;
}

Result<std::vector<float>> ImportanceMatrix::find(const std::string& name, std::int64_t columns,
                                                  std::int64_t matrices) const {
  if (legacy_) {
    const auto entry = entries_.find(name);
    if (entry == entries_.end()) return std::vector<float>{};
    const auto bytes = entry->second.values;
    auto weights =
        values("tensor " + name, bytes, std::to_string(bytes.size() / sizeof(float)) + " numbers",
               columns * matrices);
    if (!weights) return weights.status();
    divide(*weights, matrices, columns,
           [&](std::int64_t) { return static_cast<float>(entry->second.calls); });
    return weights;
  }
  const GgufTensor* sums = gguf_->tensor(name + ".in_sum2");
  const GgufTensor* counts = gguf_->tensor(name + ".counts");
  if (sums == nullptr || counts == nullptr) return std::vector<float>{};
  const auto numbers = [&](const GgufTensor& tensor, std::int64_t count) {
    const bool f32 = tensor.type == GgmlType::f32;
    return values("tensor " + std::string(tensor.name),
                  f32 ? tensor.bytes : std::span<const std::byte>(),
                  info(tensor.type).name + (" " + tensor.shape.str()), count);
  };
  auto weights = numbers(*sums, columns * matrices);
  if (!weights) return weights.status();
  const auto seen = numbers(*counts, matrices);
  if (!seen) return seen.status();
  divide(*weights, matrices, columns,
         [&](std::int64_t m) { return (*seen)[static_cast<std::size_t>(m)]; });
  return weights;
}

Status check_importance_output(const std::string& path, bool force) {
  const auto there = thing_at(path);
  if (!there) return there.status();
  std::error_code error;
  if (force && *there == Thing::file && !std::filesystem::is_empty(path, error)) {
    const auto is_matrix = is_importance_matrix(path);
    if (!is_matrix) return is_matrix.status();
    if (!*is_matrix)
      return invalid(path +
                     ": not an importance matrix in GGUF (general.type imatrix); @{force} replaces "
                     "only one of those");
  }
  return check_output(path, {.force = force});
}

Status write_importance(const std::string& path, const ImportanceContents& contents, bool force) {
  BITTERN_TRY(check_importance_output(path, force));
  GgufContents file(path);
  std::vector<std::string_view> datasets(contents.datasets.begin(), contents.datasets.end());
  BITTERN_TRY(file.add("general.type", GgufData("imatrix")));
  BITTERN_TRY(file.add("imatrix.datasets", GgufData::strings(datasets)));
  BITTERN_TRY(file.add("imatrix.chunk_count", GgufData(contents.chunks)));
  BITTERN_TRY(file.add("imatrix.chunk_size", GgufData(contents.chunk_size)));
  std::vector<std::vector<float>> tensors;
  for (const ImportanceContents::Entry& entry : contents.entries) {
    const auto matrices = static_cast<std::int64_t>(entry.counts.size());
    BITTERN_TRY(file.add_tensor(entry.name + ".in_sum2", GgmlType::f32, {matrices, entry.columns}));
    BITTERN_TRY(file.add_tensor(entry.name + ".counts", GgmlType::f32, {matrices, 1}));
    tensors.emplace_back(entry.sums.begin(), entry.sums.end());
    tensors.emplace_back(entry.counts.begin(), entry.counts.end());
  }
  auto output = ModelOutput::create(path, file.lay_out(), {.force = force});
  if (!output) return output.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = std::as_bytes(std::span(tensors[i]));
    BITTERN_TRY(output->write(i, 0, bytes, Checksum::of(bytes)));
  }
  return output->commit();
}

}  // namespace bittern
