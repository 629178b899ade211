#include "distill/learned_coder.h"

#include <algorithm>
#include <span>

#include "convert/architecture.h"
#include "convert/encode.h"
#include "convert/progress.h"
#include "convert/row_reader.h"
#include "formats/fingerprint.h"
#include "formats/grid.h"

namespace bittern {
namespace {

// Whether a matrix on this grid is written on another without its numbers being quantised anew:
// exactly, or fitted into super-blocks.
bool holds(const Storage& to, const Storage& from) {
  Storage as = to;  // biases of integer zero points are biases
  if (as.zeros == Storage::Zeros::integers) as.zeros = Storage::Zeros::biases;
  const auto grid = coded_grid(from), wanted = coded_grid(as);
  if (from.kind != Storage::Kind::affine || !grid) return false;
  if (wanted) return *wanted == *grid;
  const auto blocks = grid_of(to);
  return is_fitted(to) && blocks && blocks->bits == grid->bits && blocks->group == grid->group;
}

}  // namespace

Result<LearnedCoder> LearnedCoder::make(const std::string& start, LearnedGrids& grids, bool gguf) {
  auto opened = Checkpoint::open(start);
  if (!opened) return opened.status();
  BITTERN_TRY(grids.put_into(*opened));
  LearnedCoder coder(std::move(*opened), grids);
  std::vector<NamedShape> shapes;
  for (const CheckpointTensor& tensor : coder.start_.tensors())
    shapes.push_back({tensor.name, tensor.shape});
  if (!gguf) {
    for (const auto& [name, shape] : shapes)
      coder.recipes_.emplace(name, Recipe{.name = name, .shape = shape, .sources = {name}});
    return coder;
  }
  auto renamed =
      rename_tensors(coder.start_.config(), shapes, world_of_folder(shapes), World::gguf);
  if (!renamed) return renamed.status();
  for (Recipe& recipe : renamed->tensors) {
    std::string name = recipe.name;
    coder.recipes_.emplace(std::move(name), std::move(recipe));
  }
  return coder;
}

std::optional<std::string> LearnedCoder::declines(const OutputTensor& tensor) const {
  const auto recipe = recipes_.find(tensor.recipe.name);
  if (recipe != recipes_.end() && recipe->second.shape == tensor.recipe.shape) {
    const auto reader = RowReader::open(start_, recipe->second);
    if (!reader) return "";
    const bool packed = reader->storage().zeros == Storage::Zeros::packed && !reader->mixed();
    if ((reader->movable() || packed) && holds(tensor.to, reader->storage())) return {};
  }
  return "";
}

std::uint64_t LearnedCoder::fingerprint() const {
  Fingerprint hash;
  hash.add(start_.fingerprint());
  for (const std::span<const float> numbers : {grids_.scales(), grids_.centres()})
    hash.add(std::as_bytes(numbers));
  hash.add(std::as_bytes(grids_.codes()));
  return hash.value();
}

Result<std::vector<std::size_t>> LearnedCoder::code(const Checkpoint&,
                                                    const std::vector<Task>& tasks,
                                                    const Sink& take,
                                                    const ModelProgressFunction& progress) {
  GridRows rows;
  for (const Task& task : tasks) {
    const std::string& name = task.tensor->recipe.name;
    if (progress) BITTERN_TRY(ask([&] { return progress({.doing = "writing", .tensor = name}); }));
    const auto reader = RowReader::open(start_, recipes_.at(name));
    if (!reader) return reader.status();
    const auto bytes = row_bytes(task.tensor->to, reader->columns());
    if (!bytes) return bytes.status();
    const std::int64_t length = bytes->whole(rows_at_once(reader->columns()));
    for (std::int64_t row = 0; row < reader->rows(); row += length) {
      const std::int64_t count = std::min(length, reader->rows() - row);
      if (const Status read = reader->grid(row, count, rows); !read.ok())
        return with_tensor(start_, name, read);
      BITTERN_TRY(take(task.index, row, rows));
    }
  }
  return std::vector<std::size_t>{};
}

}  // namespace bittern
