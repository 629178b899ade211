#include "distill/learned_grids.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bittern/dtype.h"
#include "bittern/status.h"
#include "convert/row_reader.h"
#include "core/numerics.h"
#include "cpu/parallel.h"
#include "model/source.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::map<std::string, const Recipe*> by_name(const ModelSource& source) {
  std::map<std::string, const Recipe*> recipes;
  for (const Recipe& recipe : source.parts) recipes.emplace(recipe.name, &recipe);
  return recipes;
}

bool learns(const WeightPart& part) {
  return part.weights.affine() && part.name != "embedding" && part.name != "head";
}

// b = c - s m, as the model holds it.
float bias_of(float scale, float centre, float mean) { return std::fma(-scale, mean, centre); }

}  // namespace

Result<LearnedGrids> LearnedGrids::make(std::shared_ptr<ModelData> model,
                                        const Checkpoint& source) {
  LearnedGrids grids;
  const auto read = read_source(source);
  if (!read) return read.status();
  const auto recipes = by_name(*read);
  for (const WeightPart& part : model->weights.parts) {
    if (!learns(part)) continue;
    const WeightDesc& w = part.weights;
    const auto reader = RowReader::open(source, *recipes.at(part.name));
    if (!reader) return reader.status();
    Tensor tensor{.part = part, .first = grids.count(), .count = w.outputs * w.groups()};
    grids.by_offset_.emplace(part.offset, tensor.first);
    double sum = 0;
    GridRows rows;
    const std::int64_t length = rows_at_once(w.inputs);
    for (std::int64_t row = 0; row < w.outputs; row += length) {
      const std::int64_t count = std::min(length, w.outputs - row);
      if (const Status status = reader->grid(part.first + row, count, rows); !status.ok())
        return with_tensor(source, part.name, status);
      for (std::int64_t i = 0; i < count * w.groups(); ++i) {
        std::int64_t codes = 0;
        for (std::int64_t j = 0; j < w.group_size; ++j)
          codes += rows.codes[at(i * w.group_size + j)];
        const float mean = static_cast<float>(codes) / static_cast<float>(w.group_size);
        const float scale = rows.scales[at(i)], bias = rows.biases[at(i)];
        grids.scales_.push_back(scale);
        grids.means_.push_back(mean);
        grids.centres_.push_back(std::fma(scale, mean, bias));
        sum += std::fabs(double{scale});
      }
    }
    tensor.unit = tensor.count > 0 ? sum / static_cast<double>(tensor.count) : 0;
    grids.tensors_.push_back(std::move(tensor));
  }
  grids.model_ = std::move(model);
  return grids;
}

std::int64_t LearnedGrids::first_of(const Matrix::Piece& piece) const {
  const auto found = by_offset_.find(piece.offset);
  return found == by_offset_.end() ? -1 : found->second;
}

Status LearnedGrids::store() {
  for (const Tensor& tensor : tensors_) {
    const WeightDesc& w = tensor.part.weights;
    constexpr std::int64_t kRows = WeightDesc::kPanelRows;
    std::byte* const memory = model_->weights.memory.data() + tensor.part.offset;
    // A panel has, for each group, 16 scales, 16 biases and the codes (bittern/matmul_desc.h).
    const Status done = visit<float, f16, bf16>(w.scale_element, [&]<class T>(Type<T>) -> Status {
      const std::int64_t unit =
          kRows * (2 * static_cast<std::int64_t>(sizeof(T)) + w.group_size * w.bits / 8);
      std::vector<char> good(at(w.panels()), 1);
      cpu::parallel(w.panels(), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin * kRows; row < std::min(end * kRows, w.outputs); ++row)
          for (std::int64_t g = 0; g < w.groups(); ++g) {
            const std::size_t i = at(tensor.first + row * w.groups() + g);
            const T scale = from_math<T>(scales_[i]),
                    bias = from_math<T>(bias_of(scales_[i], centres_[i], means_[i]));
            if (!std::isfinite(to_math(scale)) || !std::isfinite(to_math(bias)))
              good[at(row / kRows)] = 0;
            std::byte* const header = memory + row / kRows * w.groups() * unit + g * unit +
                                      row % kRows * static_cast<std::int64_t>(sizeof(T));
            std::memcpy(header, &scale, sizeof scale);
            std::memcpy(header + kRows * static_cast<std::int64_t>(sizeof(T)), &bias, sizeof bias);
          }
      });
      if (std::find(good.begin(), good.end(), 0) == good.end()) return {};
      return invalid(tensor.part.name +
                     ": a scale or bias is no longer finite, expected a lower rate");
    });
    if (!done.ok()) return done;
  }
  return {};
}

Status LearnedGrids::put_into(Checkpoint& source) {
  const auto read = read_source(source);
  if (!read) return read.status();
  const auto recipes = by_name(*read);
  written_.clear();
  for (const Tensor& tensor : tensors_) {
    const Recipe& recipe = *recipes.at(tensor.part.name);
    const WeightDesc& w = tensor.part.weights;
    if (!recipe.columns.empty() && recipe.column_block % w.group_size != 0)
      return internal(recipe.name + ": columns move within a group");
    struct Target {
      std::byte *scales, *biases;
    };
    std::vector<Target> targets;  // of the recipe's sources
    for (const std::string& name : recipe.sources) {
      const CheckpointTensor* const from = source.find(name);
      if (from == nullptr) return internal(name + ": no such tensor");
      auto [found, is_new] = written_.try_emplace(name);
      auto& [scales, biases] = found->second;
      if (is_new) {
        scales.assign(from->scales.begin(), from->scales.end());
        biases.assign(from->biases.begin(), from->biases.end());
      }
      targets.push_back({scales.data(), biases.data()});
    }
    // Where each row and group of the part is in its source.
    std::vector<std::pair<std::uint32_t, std::int64_t>> places;
    for (const RowRun& run : recipe.rows)
      for (std::int64_t i = 0; i < run.count; ++i)
        places.emplace_back(run.source, run.first + i * run.step);
    const std::int64_t groups_of_block =
        recipe.columns.empty() ? w.groups() : recipe.column_block / w.group_size;
    const Status done = visit<float, f16, bf16>(w.scale_element, [&]<class T>(Type<T>) -> Status {
      for (std::int64_t row = 0; row < w.outputs; ++row) {
        const std::int64_t of_part = tensor.part.first + row;
        const auto [from, to] =
            places.empty() ? std::pair(std::uint32_t{0}, of_part) : places[at(of_part)];
        for (std::int64_t g = 0; g < w.groups(); ++g) {
          const std::size_t i = at(tensor.first + row * w.groups() + g);
          const std::int64_t block = g / groups_of_block;
          const std::int64_t place =
              (recipe.columns.empty() ? block : recipe.columns[at(block)]) * groups_of_block +
              g % groups_of_block;
          const T scale = from_math<T>(scales_[i]),
                  bias = from_math<T>(bias_of(scales_[i], centres_[i], means_[i]));
          const std::int64_t byte =
              (to * w.groups() + place) * static_cast<std::int64_t>(sizeof(T));
          std::memcpy(targets[from].scales + byte, &scale, sizeof scale);
          std::memcpy(targets[from].biases + byte, &bias, sizeof bias);
        }
      }
      return {};
    });
    if (!done.ok()) return done;
  }
  for (const auto& [name, grid] : written_) source.replace_grid(name, grid.first, grid.second);
  return {};
}

GradientSink::Grids GridGradients::grids(const Matrix::Piece& piece) {
  const std::int64_t first = grids_.first_of(piece);
  if (first < 0) return {};
  const std::int64_t rows = piece.weights.outputs, groups = piece.weights.groups();
  return {view(scales.data() + first, {rows, groups}), view(biases.data() + first, {rows, groups})};
}

}  // namespace bittern
