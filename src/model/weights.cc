#include "model/weights.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>

#include "bittern/ops/pack_panels.h"
#include "bittern/plan.h"
#include "core/scratch.h"
#include "core/thread_count.h"
#include "cpu/parallel.h"
#include "formats/decode.h"

namespace bittern {
namespace {

// How the product reads a storage; nothing: it cannot.
std::optional<WeightDesc> weights_of(const Storage& storage) {
  WeightDesc d;
  switch (storage.kind) {
    case Storage::Kind::plain:
      d.type = storage.dtype == SafeDType::f16    ? WeightType::f16
               : storage.dtype == SafeDType::bf16 ? WeightType::bf16
                                                  : WeightType::f32;  // others are converted
      return d;
    case Storage::Kind::blocks:
      if (const auto type = block_type(storage.type)) {
        d.type = weight_type(*type);
        return d;
      }
      return {};
    case Storage::Kind::affine:
      if (!is_float(storage.dtype)) return {};
      d.type = WeightType::affine;
      d.bits = storage.bits;
      d.group_size = storage.group;
      d.scale_element = *to_dtype(storage.dtype);
      return d;
  }
  return {};
}

class Loader {
 public:
  Loader(const Checkpoint& source, const std::vector<Recipe>& recipes) : source_(source) {
    for (const Recipe& recipe : recipes) by_name_.emplace(recipe.name, &recipe);
  }

  bool has(const std::string& name) const { return by_name_.contains(name); }

  // Numbers of one or several small tensors, one behind the other; none where there are none.
  Status numbers(std::initializer_list<std::string> names, Vector& out) {
    for (const std::string& name : names) {
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) continue;
      const auto reader = RowReader::open(source_, *found->second);
      if (!reader) return reader.status();
      RowNumbers rows;
      BITTERN_TRY(in_tensor(name, reader->numbers(0, reader->rows(), rows)));
      const std::size_t count = static_cast<std::size_t>(reader->rows() * reader->columns());
      const std::size_t before = out.size();
      out.resize(before + count);
      for (std::size_t i = 0; i < count; ++i) {
        out[before + i] = rows.dtype == DType::f32 ? static_cast<const float*>(rows.data)[i]
                          : rows.dtype == DType::f16
                              ? to_f32(static_cast<const f16*>(rows.data)[i])
                              : to_f32(static_cast<const bf16*>(rows.data)[i]);
      }
      parameters_ += count;
    }
    return {};
  }

  struct Rows {
    std::string name;
    std::int64_t first = 0, count = -1;  // -1: all rows
  };

  // Adds tensors with the same columns, or rows of one, to a matrix. Memory is given out; fill()
  // fills it.
  Status matrix(std::initializer_list<std::string> names, Matrix& out) {
    for (const std::string& name : names)
      if (has(name)) BITTERN_TRY(add({name}, out));
    return {};
  }
  Status matrix(const Rows& part, Matrix& out) { return add(part, out); }

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t parameters() const { return parameters_; }

  // Whether there is memory for all, as far as the system tells.
  Status fits() const {
    const std::optional<std::uint64_t> available = available_memory();
    if (!available || bytes_ <= *available) return {};
    return {Code::out_of_memory, source_.path() + ": weights of " + std::to_string(bytes_ >> 20) +
                                     " MiB, but only " + std::to_string(*available >> 20) +
                                     " MiB of memory are available"};
  }

  std::vector<WeightPart> parts() const {
    std::vector<WeightPart> parts;
    for (const Job& job : jobs_) parts.push_back({job.name, job.first, job.weights, job.offset});
    return parts;
  }

  Status fill(LargePages& memory, int threads) {
    auto pages = LargePages::make(bytes_);
    if (!pages) return pages.status();
    memory = std::move(*pages);
    struct Task {
      const Job* job;
      std::int64_t first, count;
    };
    std::vector<Task> tasks;
    for (const Job& job : jobs_) {
      const std::int64_t rows = std::max<std::int64_t>(
          kPanel,
          kTaskBytes / std::max<std::int64_t>(job.weights.row_bytes(), 1) / kPanel * kPanel);
      for (std::int64_t first = 0; first < job.weights.outputs; first += rows)
        tasks.push_back({&job, first, std::min(rows, job.weights.outputs - first)});
    }
    const ThreadCount team(threads);
    BITTERN_TRY(cpu::parallel_queue(
        static_cast<std::int64_t>(tasks.size()), num_threads(), [&](std::int64_t i, std::int64_t) {
          const Task& task = tasks[static_cast<std::size_t>(i)];
          return in_tensor(task.job->name, pack(*task.job, task.first, task.count, memory.data()));
        }));
    return source_.unchanged();
  }

 private:
  static constexpr std::int64_t kPanel = WeightDesc::kPanelRows;
  static constexpr std::int64_t kTaskBytes = std::int64_t{1} << 20;

  struct Job {
    std::string name;
    const RowReader* reader;
    std::int64_t first;  // row of the reader
    WeightDesc weights;  // of these rows alone
    std::size_t offset;
  };

  Status in_tensor(const std::string& name, const Status& status) const {
    return status.ok() ? Status() : with_tensor(source_, name, status);
  }

  Result<const RowReader*> reader_of(const std::string& name) {
    auto [at, is_new] = readers_.try_emplace(name);
    if (is_new) {
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) return internal("no part " + name);
      auto reader = RowReader::open(source_, *found->second);
      if (!reader) return reader.status();
      at->second.emplace(std::move(*reader));
    }
    return &*at->second;
  }

  Status add(const Rows& part, Matrix& out) {
    const auto opened = reader_of(part.name);
    if (!opened) return opened.status();
    const RowReader& reader = **opened;
    if (reader.mixed())
      return in_tensor(
          part.name,
          unsupported("made of tensors that are stored in different ways, expected one"));
    const Storage storage = reader.multiplied();
    auto weights = weights_of(storage);
    if (!weights)
      return in_tensor(part.name,
                       unsupported("stored as " + storage.str() + ", which products do not read"));
    // Numbers that are moved as they are keep their dtype; others are f32.
    if (weights->plain() && !(is_float(storage.dtype) && reader.movable()))
      weights->type = WeightType::f32;
    weights->inputs = reader.columns();
    weights->outputs = part.count < 0 ? reader.rows() : part.count;
    weights->layout = WeightLayout::panels;
    if (const Status status = check_weight_desc("matrix", *weights); !status.ok())
      return in_tensor(part.name, status);
    if (!weights->plain() && !reader.movable() && !grid_of(storage))
      return in_tensor(part.name, unsupported("stored as " + storage.str() +
                                              ", whose blocks cannot be put in the model's order"));
    out.inputs = weights->inputs;
    parameters_ += static_cast<std::uint64_t>(weights->outputs * weights->inputs);

    const std::size_t size =
        static_cast<std::size_t>(weights->panels() * kPanel * weights->row_bytes());
    Matrix::Piece* last = out.pieces.empty() ? nullptr : &out.pieces.back();
    if (last != nullptr && joins(last->weights, *weights)) {
      last->weights.outputs += weights->outputs;
    } else {
      out.pieces.push_back({.weights = *weights, .offset = bytes_, .first = out.outputs});
    }
    jobs_.push_back({part.name, &reader, part.first, *weights, bytes_});
    bytes_ += (size + 63) / 64 * 64;
    out.outputs += weights->outputs;
    return {};
  }

  // Whether the panels of one matrix continue those of the other.
  static bool joins(WeightDesc a, const WeightDesc& b) {
    const bool whole = a.outputs % kPanel == 0 && (kPanel * a.row_bytes()) % 64 == 0;
    a.outputs = b.outputs;
    return whole && a == b;
  }

  static Status pack(const Job& job, std::int64_t first, std::int64_t count, std::byte* memory) {
    WeightDesc d = job.weights;
    d.outputs = count;
    d.layout = WeightLayout::stored;
    PackPanels::Args args{};
    EncodedRows rows;
    RowNumbers numbers;
    const std::int64_t row = job.first + first;
    const auto view_of = [](const void* data, DType dtype, const Shape& shape) {
      return ConstView{data, dtype, {}, shape, shape.dense_strides()};
    };
    const bool moved =
        job.reader->movable() && !(d.plain() && !is_float(job.reader->storage().dtype));
    if (moved) {
      BITTERN_TRY(job.reader->stored(row, count, rows));
    } else if (d.plain()) {
      BITTERN_TRY(job.reader->numbers(row, count, numbers));
      if (numbers.dtype != DType::f32) return internal("numbers that are not f32");
    } else {
      GridRows grid;
      BITTERN_TRY(job.reader->grid(row, count, grid));
      BITTERN_TRY(encode_grid(grid, d.inputs, job.reader->multiplied(), rows));
    }
    if (d.plain()) {
      args.w = view_of(moved ? rows.data.data() : numbers.data, d.plain_element(), d.plain_shape());
    } else if (d.affine()) {
      args.packed = view_of(rows.data.data(), DType::u32, d.packed_shape());
      args.scales = view_of(rows.scales.data(), d.scale_element, d.grid_shape());
      args.biases = view_of(rows.biases.data(), d.scale_element, d.grid_shape());
    } else {
      args.blocks = view_of(rows.data.data(), DType::u8, d.block_shape());
    }
    const Axes shape = d.panel_shape();
    args.panels = {memory + job.offset + static_cast<std::size_t>(first * d.row_bytes()),
                   DType::u8,
                   {},
                   shape,
                   shape.dense_strides()};
    const auto plan = Plan<PackPanels>::select(d);
    if (!plan) return plan.status();
    AlignedScratch scratch(plan->workspace_bytes());
    return plan->run(args, {}, scratch.workspace());
  }

  const Checkpoint& source_;
  std::map<std::string, const Recipe*, std::less<>> by_name_;
  std::map<std::string, std::optional<RowReader>, std::less<>> readers_;
  std::vector<Job> jobs_;
  std::size_t bytes_ = 0;
  std::uint64_t parameters_ = 0;
};

Status load_layer(Loader& load, const Decoder& d, std::int64_t index, LayerWeights& w) {
  const LayerSpec& spec = d.layers[static_cast<std::size_t>(index)];
  const auto in_layer = [&](std::string_view name) {
    return "layers." + std::to_string(index) + "." + std::string(name);
  };
  // Gemma has a norm on either side of the MLP. Others have two norms in all: before attention and
  // MLP, or (olmo2) after them.
  const bool four = load.has(in_layer("before_ffn_norm"));
  BITTERN_TRY(load.numbers({in_layer("input_norm")}, w.before));
  const bool after = four || w.before.empty();
  BITTERN_TRY(load.numbers({in_layer("attention_norm")}, after ? w.after : w.before_mlp));
  BITTERN_TRY(load.numbers({in_layer("before_ffn_norm")}, w.before_mlp));
  BITTERN_TRY(load.numbers({in_layer("after_ffn_norm")}, w.after_mlp));

  if (spec.delta) {
    BITTERN_TRY(load.matrix({in_layer("delta_q"), in_layer("delta_k"), in_layer("delta_v"),
                             in_layer("delta_z"), in_layer("delta_b"), in_layer("delta_a")},
                            w.delta_in));
    BITTERN_TRY(load.numbers({in_layer("conv_q"), in_layer("conv_k"), in_layer("conv_v")}, w.conv));
    BITTERN_TRY(load.numbers({in_layer("a_log")}, w.a_log));
    BITTERN_TRY(load.numbers({in_layer("dt_bias")}, w.dt_bias));
    BITTERN_TRY(load.numbers({in_layer("delta_norm")}, w.delta_norm));
    BITTERN_TRY(load.matrix({in_layer("delta_out")}, w.out));
  } else {
    BITTERN_TRY(load.matrix({in_layer("q"), in_layer("k"), in_layer("v")}, w.qkv));
    BITTERN_TRY(
        load.numbers({in_layer("q_bias"), in_layer("k_bias"), in_layer("v_bias")}, w.qkv.bias));
    BITTERN_TRY(load.numbers({in_layer("q_norm")}, w.q_norm));
    BITTERN_TRY(load.numbers({in_layer("k_norm")}, w.k_norm));
    BITTERN_TRY(load.matrix({in_layer("o")}, w.out));
    BITTERN_TRY(load.numbers({in_layer("o_bias")}, w.out.bias));
  }

  if (!spec.experts) {
    BITTERN_TRY(load.matrix({in_layer("gate"), in_layer("up")}, w.mlp.in));
    BITTERN_TRY(load.numbers({in_layer("gate_bias"), in_layer("up_bias")}, w.mlp.in.bias));
    BITTERN_TRY(load.matrix({in_layer("down")}, w.mlp.down));
    return load.numbers({in_layer("down_bias")}, w.mlp.down.bias);
  }
  BITTERN_TRY(load.matrix({in_layer("router")}, w.router));
  BITTERN_TRY(load.matrix({in_layer("shared_router")}, w.shared_router));
  BITTERN_TRY(load.matrix({in_layer("shared_gate"), in_layer("shared_up")}, w.shared.in));
  BITTERN_TRY(load.matrix({in_layer("shared_down")}, w.shared.down));
  w.experts.resize(static_cast<std::size_t>(d.experts));
  for (std::int64_t e = 0; e < d.experts; ++e) {
    DenseMlp& expert = w.experts[static_cast<std::size_t>(e)];
    const std::int64_t inner = d.expert_inner, hidden = d.hidden;
    BITTERN_TRY(load.matrix(Loader::Rows{in_layer("gate_experts"), e * inner, inner}, expert.in));
    BITTERN_TRY(load.matrix(Loader::Rows{in_layer("up_experts"), e * inner, inner}, expert.in));
    BITTERN_TRY(
        load.matrix(Loader::Rows{in_layer("down_experts"), e * hidden, hidden}, expert.down));
  }
  return {};
}

}  // namespace

Result<Weights> load_weights(const Checkpoint& source, const std::vector<Recipe>& recipes,
                             const Decoder& d, int threads, bool fill) {
  Weights w;
  Loader load(source, recipes);
  w.layers.resize(d.layers.size());
  for (std::size_t i = 0; i < w.layers.size(); ++i)
    BITTERN_TRY(load_layer(load, d, static_cast<std::int64_t>(i), w.layers[i]));
  BITTERN_TRY(load.numbers({"final_norm"}, w.final_norm));
  BITTERN_TRY(load.matrix({"embedding"}, w.embedding));
  BITTERN_TRY(load.matrix({"head"}, w.head));
  BITTERN_TRY(load.fits());
  if (fill) BITTERN_TRY(load.fill(w.memory, threads));
  w.parts = load.parts();
  w.bytes = load.bytes();
  w.parameters = load.parameters();
  return w;
}

}  // namespace bittern
