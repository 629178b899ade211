#include "distill/learned_grids.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "bittern/dtype.h"
#include "bittern/ops/pack_codes.h"
#include "bittern/ops/pack_panels.h"
#include "bittern/plan.h"
#include "convert/encode.h"
#include "convert/row_reader.h"
#include "convert/zero_points.h"
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

// b = c - s m, as the model holds it.
float bias_of(float scale, float centre, float mean) { return std::fma(-scale, mean, centre); }

template <class T>
void put(std::vector<std::byte>& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof value);
}

MutView as_view(std::vector<std::byte>& bytes, DType dtype, const Axes& shape) {
  return {bytes.data(), dtype, {}, shape, shape.dense_strides()};
}

}  // namespace

Result<LearnedGrids> LearnedGrids::make(std::shared_ptr<ModelData> model, const Checkpoint& source,
                                        bool codes_move, bool integer_zeros) {
  LearnedGrids grids;
  grids.integer_zeros_ = integer_zeros;
  const auto read = read_source(source);
  if (!read) return read.status();
  const auto recipes = by_name(*read);
  // Layer by layer, and embedding and head behind them.
  const auto layers = static_cast<std::int64_t>(model->decoder.layers.size());
  std::vector<std::vector<const WeightPart*>> parts(at(layers + 1));
  for (const WeightPart& part : model->weights.parts) {
    if (!part.weights.affine()) continue;
    const std::int64_t layer = layer_of_part(part.name);
    parts[at(layer < 0 ? layers : layer)].push_back(&part);
  }
  for (std::int64_t layer = 0; layer <= layers; ++layer) {
    Slice slice{.first_tensor = grids.tensors_.size(),
                .first = grids.count(),
                .first_weight = static_cast<std::int64_t>(grids.codes_.size())};
    for (const WeightPart* const part : parts[at(layer)]) {
      const WeightDesc& w = part->weights;
      const auto reader = RowReader::open(source, *recipes.at(part->name));
      if (!reader) return reader.status();
      const bool moves = codes_move && layer < layers;
      Tensor tensor{.part = *part,
                    .first = grids.count(),
                    .count = w.outputs * w.groups(),
                    .first_weight = static_cast<std::int64_t>(grids.codes_.size()),
                    .weights = moves ? w.outputs * w.inputs : 0,
                    .stored = *to_dtype(reader->storage().dtype)};
      grids.by_offset_.emplace(part->offset, grids.tensors_.size());
      double sum = 0;
      GridRows rows;
      const std::int64_t length = rows_at_once(w.inputs);
      for (std::int64_t row = 0; row < w.outputs; row += length) {
        const std::int64_t count = std::min(length, w.outputs - row);
        if (const Status status = reader->grid(part->first + row, count, rows); !status.ok())
          return with_tensor(source, part->name, status);
        for (std::int64_t i = 0; i < count * w.groups(); ++i) {
          std::int64_t codes = 0;
          for (std::int64_t j = 0; j < w.group_size; ++j)
            codes += rows.codes[at(i * w.group_size + j)];
          const float scale = rows.scales[at(i)], bias = rows.biases[at(i)];
          // The bias is rounded by less than half a step: 255 / 2^9 of it.
          const float mean = integer_zeros
                                 ? std::nearbyint(scale == 0 ? 0 : 0 - bias / scale)
                                 : static_cast<float>(codes) / static_cast<float>(w.group_size);
          if (integer_zeros && zero_point_bias(scale, mean, w.scale_element) != bias)
            return invalid(source.path() +
                           ": written by a run with other @{zero_points}; give the same, or "
                           "@{force} without @{resume} to start again");
          grids.scales_.push_back(scale);
          grids.means_.push_back(mean);
          grids.centres_.push_back(integer_zeros ? 0 : std::fma(scale, mean, bias));
          sum += std::fabs(double{scale});
        }
        if (moves)
          grids.codes_.insert(grids.codes_.end(), rows.codes.begin(),
                              rows.codes.begin() + count * w.inputs);
      }
      tensor.unit = tensor.count > 0 ? sum / static_cast<double>(tensor.count) : 0;
      grids.tensors_.push_back(std::move(tensor));
    }
    slice.tensors = grids.tensors_.size() - slice.first_tensor;
    slice.count = grids.count() - slice.first;
    slice.weights = static_cast<std::int64_t>(grids.codes_.size()) - slice.first_weight;
    grids.slices_.push_back(slice);
  }
  grids.model_ = std::move(model);
  return grids;
}

Result<std::vector<float>> LearnedGrids::latents(const Checkpoint& teacher) const {
  std::vector<float> z(codes_.size());
  if (z.empty()) return z;
  const auto read = read_source(teacher, HeadOrder::of_config);
  if (!read) return read.status();
  const auto recipes = by_name(*read);
  RowNumbers numbers;
  std::vector<float> weights;
  for (const Tensor& tensor : tensors_) {
    if (tensor.weights == 0) continue;
    const WeightDesc& w = tensor.part.weights;
    const auto recipe = recipes.find(tensor.part.name);
    if (recipe == recipes.end()) return internal(tensor.part.name + ": not in the teacher");
    const auto reader = RowReader::open(teacher, *recipe->second);
    if (!reader) return reader.status();
    const std::int64_t length = rows_at_once(w.inputs);
    for (std::int64_t row = 0; row < w.outputs; row += length) {
      const std::int64_t count = std::min(length, w.outputs - row), n = count * w.inputs;
      BITTERN_TRY(reader->numbers(tensor.part.first + row, count, numbers));
      weights.resize(at(n));
      BITTERN_TRY(as_f32(numbers, weights));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::size_t j = at(tensor.first_weight + row * w.inputs + i);
        const std::size_t g = at(tensor.first + (row * w.inputs + i) / w.group_size);
        const float code = codes_[j];
        const float place = means_[g] + (weights[at(i)] - centres_[g]) / scales_[g];
        z[j] = std::fabs(place - code) < 0.5f ? place : code;
      }
    }
  }
  return z;
}

Result<std::int64_t> LearnedGrids::codes_moved(const Checkpoint& source) const {
  std::int64_t moved = 0;
  const auto read = read_source(source);
  if (!read) return read.status();
  const auto recipes = by_name(*read);
  GridRows rows;
  for (const Tensor& tensor : tensors_) {
    if (tensor.weights == 0) continue;
    const WeightDesc& w = tensor.part.weights;
    const auto reader = RowReader::open(source, *recipes.at(tensor.part.name));
    if (!reader) return reader.status();
    BITTERN_TRY(reader->grid(tensor.part.first, w.outputs, rows));
    for (std::int64_t i = 0; i < tensor.weights; ++i)
      moved += rows.codes[at(i)] != codes_[at(tensor.first_weight + i)];
  }
  return moved;
}

void LearnedGrids::round_codes(const Slice& slice, std::span<float> latents) {
  for (std::size_t i = slice.first_tensor; i < slice.first_tensor + slice.tensors; ++i) {
    const Tensor& tensor = tensors_[i];
    const float most = static_cast<float>((1 << tensor.part.weights.bits) - 1);
    cpu::parallel(tensor.weights, std::int64_t{1} << 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t j = tensor.first_weight + begin; j < tensor.first_weight + end; ++j) {
        // Not beyond the last code, from where there would be a long way back.
        float& z = latents[at(j)];
        z = std::clamp(z, -0.49f, most + 0.49f);
        codes_[at(j)] = z > 0 ? static_cast<std::uint8_t>(std::nearbyint(z)) : std::uint8_t{0};
      }
    });
  }
}

Result<LearnedGrids::Stored> LearnedGrids::stored(const Tensor& tensor, DType dtype) const {
  WeightDesc w = tensor.part.weights;
  w.layout = WeightLayout::stored;
  Stored to;
  const Status done = visit<float, f16, bf16>(dtype, [&]<class T>(Type<T>) -> Status {
    to.scales.resize(at(tensor.count) * sizeof(T));
    to.biases.resize(to.scales.size());
    for (std::size_t i = 0; i < at(tensor.count); ++i) {
      const std::size_t j = at(tensor.first) + i;
      const float own =
          integer_zeros_ ? zero_point_scale(scales_[j], tensor.stored, w.bits) : scales_[j];
      const T scale = from_math<T>(own),
              bias = from_math<T>(integer_zeros_ ? zero_point_bias(own, means_[j], DType::f32)
                                                 : bias_of(own, centres_[j], means_[j]));
      if (!std::isfinite(to_math(scale)) || !std::isfinite(to_math(bias)))
        return {kDiverged, tensor.part.name +
                               ": a scale or bias is infinite or NaN; start again with @{force} "
                               "and a lower @{rate}"};
      put(to.scales, i, scale);
      put(to.biases, i, bias);
    }
    return {};
  });
  if (!done.ok()) return done;
  if (tensor.weights == 0) return to;
  to.codes.resize(at(w.packed_shape().numel()) * sizeof(std::uint32_t));
  const auto plan =
      Plan<PackCodes>::select({.outer_size = w.outputs, .axis_size = w.inputs, .bits = w.bits});
  if (!plan) return plan.status();
  PackCodes::Args args{};
  args.codes = view(codes_.data() + tensor.first_weight, w.plain_shape());
  args.packed = as_view(to.codes, DType::u32, w.packed_shape());
  BITTERN_TRY(plan->run(args));
  return to;
}

Status LearnedGrids::store(const Slice& slice) {
  for (std::size_t i = slice.first_tensor; i < slice.first_tensor + slice.tensors; ++i) {
    const Tensor& tensor = tensors_[i];
    const WeightDesc& w = tensor.part.weights;
    auto from = stored(tensor, w.scale_element);
    if (!from) return from.status();
    std::byte* const memory = model_->weights.memory.data() + tensor.part.offset;
    if (tensor.weights > 0) {
      WeightDesc desc = w;
      desc.layout = WeightLayout::stored;
      const auto plan = Plan<PackPanels>::select(desc);
      if (!plan) return plan.status();
      const Axes panels = desc.panel_shape();
      PackPanels::Args args{};
      args.packed = as_view(from->codes, DType::u32, desc.packed_shape());
      args.scales = as_view(from->scales, desc.scale_element, desc.grid_shape());
      args.biases = as_view(from->biases, desc.scale_element, desc.grid_shape());
      args.panels = {memory, DType::u8, {}, panels, panels.dense_strides()};
      BITTERN_TRY(plan->run(args));
      continue;
    }
    // A panel has, for each group, 16 scales, 16 biases and the codes (bittern/matmul_desc.h).
    constexpr std::int64_t kRows = WeightDesc::kPanelRows;
    const auto size = static_cast<std::int64_t>(size_of(w.scale_element));
    const std::int64_t unit = kRows * (2 * size + w.group_size * w.bits / 8);
    cpu::parallel(w.panels(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin * kRows; row < std::min(end * kRows, w.outputs); ++row)
        for (std::int64_t g = 0; g < w.groups(); ++g) {
          std::byte* const header =
              memory + row / kRows * w.groups() * unit + g * unit + row % kRows * size;
          const std::int64_t place = (row * w.groups() + g) * size;
          std::memcpy(header, from->scales.data() + place, at(size));
          std::memcpy(header + kRows * size, from->biases.data() + place, at(size));
        }
    });
  }
  return {};
}

Status LearnedGrids::store() {
  for (const Slice& slice : slices_) BITTERN_TRY(store(slice));
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
    const auto from = stored(tensor, tensor.stored);
    if (!from) return from.status();
    bool packed = false;           // zero points, which stay
    std::vector<Stored*> targets;  // of the recipe's sources
    for (const std::string& name : recipe.sources) {
      const CheckpointTensor* const found = source.find(name);
      if (found == nullptr) return internal(name + ": no such tensor");
      packed = found->storage.zeros == Storage::Zeros::packed;
      const auto [entry, is_new] = written_.try_emplace(name);
      Stored& to = entry->second;
      if (is_new) {
        to.scales.assign(found->scales.begin(), found->scales.end());
        to.biases.assign(found->biases.begin(), found->biases.end());
        if (tensor.weights > 0) to.codes.assign(found->data.begin(), found->data.end());
      }
      targets.push_back(&to);
    }
    // Where each row and group of the part is in its source.
    std::vector<std::pair<std::uint32_t, std::int64_t>> places;
    for (const RowRun& run : recipe.rows)
      for (std::int64_t i = 0; i < run.count; ++i)
        places.emplace_back(run.source, run.first + i * run.step);
    const std::int64_t groups_of_block =
        recipe.columns.empty() ? w.groups() : recipe.column_block / w.group_size;
    const auto size = static_cast<std::int64_t>(size_of(tensor.stored));
    const std::int64_t code_bytes = w.group_size * w.bits / 8;  // whole words
    for (std::int64_t row = 0; row < w.outputs; ++row) {
      const std::int64_t of_part = tensor.part.first + row;
      const auto source_row =
          places.empty() ? std::pair(std::uint32_t{0}, of_part) : places[at(of_part)];
      const std::int64_t to = source_row.second;  // clang 14 captures no structured binding
      Stored& target = *targets[source_row.first];
      for (std::int64_t g = 0; g < w.groups(); ++g) {
        const std::int64_t block = g / groups_of_block;
        const std::int64_t place =
            (recipe.columns.empty() ? block : recipe.columns[at(block)]) * groups_of_block +
            g % groups_of_block;
        const auto move = [&](const std::vector<std::byte>& a, std::vector<std::byte>& b,
                              std::int64_t bytes) {
          if (!a.empty())
            std::memcpy(b.data() + (to * w.groups() + place) * bytes,
                        a.data() + (row * w.groups() + g) * bytes, at(bytes));
        };
        move(from->scales, target.scales, size);
        if (!packed) move(from->biases, target.biases, size);
        move(from->codes, target.codes, code_bytes);
      }
    }
  }
  for (const auto& [name, to] : written_) source.replace_grid(name, to.codes, to.scales, to.biases);
  return {};
}

GradientSink::Grids SliceGradients::grids(const Matrix::Piece& piece) {
  const auto found = grids_.by_offset_.find(piece.offset);
  if (found == grids_.by_offset_.end()) return {};
  const std::size_t index = found->second;
  if (index < slice_.first_tensor || index >= slice_.first_tensor + slice_.tensors) return {};
  const LearnedGrids::Tensor& tensor = grids_.tensors_[index];
  const WeightDesc& w = piece.weights;
  const Axes shape = {{"outputs", w.outputs}, {"inputs/group_size", w.groups()}};
  float* const first = numbers.data() + tensor.first - slice_.first;
  Grids grids{view(first, shape), view(first + slice_.count, shape)};
  if (tensor.weights > 0)
    grids.weights =
        view(numbers.data() + 2 * slice_.count + tensor.first_weight - slice_.first_weight,
             w.plain_shape());
  return grids;
}

}  // namespace bittern
