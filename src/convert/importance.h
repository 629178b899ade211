// llama.cpp's importance matrix: for each weight NAME [matrices, rows, columns] the sum of the
// squares of its inputs. Two kinds of file hold it:
//   GGUF     NAME.in_sum2 [matrices, columns], summed over NAME.counts [matrices] rows
//   legacy   i32 entries; each: i32 length, name, i32 calls, i32 values, f32 value[values], where
//            a value is the mean square times the calls; then perhaps i32 chunks, i32 length and
//            the data set's name
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "formats/gguf.h"
#include "formats/mapped_file.h"

namespace bittern {

class ImportanceMatrix {
 public:
  // A file that begins with "GGUF" is of the first kind; any other must be of the second.
  static Result<ImportanceMatrix> open(const std::string& path) noexcept;

  // The mean squares of the inputs of tensor `name`, [matrices, columns]; all ones for a matrix
  // that saw no input; empty where the file has no such tensor.
  Result<std::vector<float>> find(const std::string& name, std::int64_t columns,
                                  std::int64_t matrices) const;

 private:
  struct Entry {  // of a legacy file
    std::int32_t calls = 0;
    std::span<const std::byte> values;  // f32, not aligned
  };
  ImportanceMatrix() = default;
  Status read_legacy();
  Result<std::vector<float>> values(const std::string& name, std::span<const std::byte> bytes,
                                    const std::string& what, std::int64_t count) const;

  std::string path_;
  std::optional<GgufFile> gguf_;
  std::optional<MappedFile> legacy_;
  std::map<std::string, Entry, std::less<>> entries_;
};

// A matrix to be written, as GGUF.
struct ImportanceContents {
  struct Entry {
    std::string name;
    std::int64_t columns = 0;
    std::vector<double> sums;           // [matrices, columns]: of the squares of inputs
    std::vector<std::uint64_t> counts;  // [matrices]: rows that were summed
  };
  std::vector<Entry> entries;
  std::vector<std::string> datasets;
  std::uint32_t chunks = 0, chunk_size = 0;
};
// The file appears under its name when it is whole. `force`: another importance matrix, in GGUF,
// may have it now.
Status write_importance(const std::string& path, const ImportanceContents& contents, bool force);
// What of that can be refused before there are contents.
Status check_importance_output(const std::string& path, bool force);

}  // namespace bittern
