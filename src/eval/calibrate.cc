#include "bittern/calibrate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "convert/importance.h"
#include "convert/naming.h"
#include "convert/option_names.h"
#include "convert/progress.h"
#include "core/guarded.h"
#include "core/thread_count.h"
#include "cpu/parallel.h"
#include "eval/pieces.h"
#include "eval/product_inputs.h"
#include "model/forward.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Which rows enter a product.
struct Place {
  std::int64_t layer = 0;  // -1: those of the head
  ProductPlace place = ProductPlace::mixer_in;
  std::int64_t expert = -1;
  bool shared = false;
  auto operator<=>(const Place&) const = default;
};

struct Squares {
  std::vector<double> sums;
  std::uint64_t rows = 0;
};

class Collector : public Watcher {
 public:
  void product(const ProductInput& input) override {
    // The shared expert reads what the router reads.
    if (input.shared && input.place == ProductPlace::mlp_in) return;
    add({input.layer, input.place, input.expert, input.shared}, input.x);
  }

  void add(const Place& place, const ConstView& x) {
    const std::int64_t rows = x.shape[0], columns = x.shape[1], stride = x.stride[0];
    Squares& to = squares_[place];
    to.sums.resize(at(columns));
    to.rows += static_cast<std::uint64_t>(rows);
    const float* const from = x.as<float>();
    constexpr std::int64_t kColumns = 64;  // a thread's least
    cpu::parallel(
        columns, kColumns,
        [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t j = begin; j < end; ++j) {
              const double value = from[r * stride + j];
              to.sums[at(j)] += value * value;  // the product is exact
            }
        },
        kColumns);
  }

  const Squares* find(const Place& place) const {
    const auto found = squares_.find(place);
    return found == squares_.end() ? nullptr : &found->second;
  }

 private:
  std::map<Place, Squares> squares_;
};

// What a GGUF file of the model calls its matrices: the model's own file, or the one that would be
// written of a folder.
class Namer {
 public:
  Namer(const ModelData& model, const Collector& collected) : m_(model), collected_(collected) {}

  Status add_all(std::vector<MatrixInputs>& to) const {
    for (std::int64_t layer = -1; layer < m_.config.layers; ++layer)
      for (const Part& part : tensors_of(m_.config, World::gguf, {}, layer, true))
        if (part.shape.rank > 1 && there(part)) BITTERN_TRY(add(part, layer, to));
    return {};
  }

 private:
  bool there(const Part& part) const {
    const auto& names = m_.gguf_names;
    return names.empty() ? part.written
                         : std::find(names.begin(), names.end(), part.name) != names.end();
  }

  Status add(const Part& part, std::int64_t layer, std::vector<MatrixInputs>& to) const {
    const Q quantity = part.rows.front().quantity;
    MatrixInputs inputs{.name = part.name, .columns = part.width, .squares = {}, .rows = {}};
    if (layer < 0) {
      if (quantity != Q::head) return {};
      BITTERN_TRY(append(part, {.layer = -1}, inputs));
    } else {
      const auto input = input_of(quantity);
      if (!input) return {};
      const std::int64_t matrices = input->experts ? m_.config.experts : 1;
      for (std::int64_t i = 0; i < matrices; ++i)
        BITTERN_TRY(
            append(part, {layer, input->place, input->experts ? i : -1, input->shared}, inputs));
    }
    to.push_back(std::move(inputs));
    return {};
  }

  Status append(const Part& part, const Place& place, MatrixInputs& to) const {
    const Squares* const found = collected_.find(place);
    const std::size_t first = to.squares.size(), width = at(part.width);
    to.squares.resize(first + width);
    to.rows.push_back(found == nullptr ? 0 : found->rows);
    if (found == nullptr) return {};  // an expert that was never chosen
    if (found->sums.size() != width) return internal(part.name + ": inputs of another width");
    const auto block = part.columns.empty() ? width : at(part.column_block);
    for (std::size_t j = 0; j < width; ++j) {
      const std::size_t from =
          part.columns.empty() ? j : at(part.columns[j / block]) * block + j % block;
      const double sum = found->sums[from];
      if (!std::isfinite(sum))
        return invalid(part.name + ": its inputs hold infinities or NaN, expected finite numbers");
      to.squares[first + j] = sum;
    }
    return {};
  }

  const ModelData& m_;
  const Collector& collected_;
};

Result<Calibration> run(const Model& model, std::span<const std::int32_t> tokens,
                        const CalibrateOptions& o) {
  if (o.context < 1)
    return invalid("context: " + std::to_string(o.context) + ", expected 1 or more");
  if (o.pieces < 0) return invalid("pieces: " + std::to_string(o.pieces) + ", expected 0 or more");
  const auto all = static_cast<std::int64_t>(tokens.size());
  if (all < o.context)
    return invalid("tokens: " + std::to_string(all) + ", expected at least " +
                   std::to_string(o.context) + ", a context of them");
  const ModelData& data = ModelAccess::data(model);
  Calibration result{.context = o.context, .pieces = all / o.context};
  if (o.pieces != 0) result.pieces = std::min(result.pieces, o.pieces);
  result.tokens = result.pieces * o.context;

  auto session = Session::make(model, {.context = o.context, .kv = "f32"});
  if (!session) return session.status();
  const ThreadCount threads(data.options.threads);
  const std::int64_t hidden = model.info().hidden;
  std::vector<float> last(at(o.context * hidden));
  const MutView out = view(last.data(), {o.context, hidden});
  Collector collector;
  for (std::int64_t piece = 0; piece < result.pieces; ++piece) {
    const auto in =
        piece_tokens({.begin = piece * o.context, .length = o.context}, tokens, {.first = o.first});
    BITTERN_TRY(session->truncate(0));
    const SessionTokens step{&*session, in};
    BITTERN_TRY(model.hidden(std::span(&step, 1), out, &collector));
    if (!data.config.tied) collector.add({.layer = -1}, out);
    if (o.progress)
      BITTERN_TRY(ask([&] { return o.progress({(piece + 1) * o.context, result.tokens}); }));
  }
  BITTERN_TRY(Namer(data, collector).add_all(result.matrices));
  return result;
}

}  // namespace

Result<Calibration> calibrate(const Model& model, std::span<const std::int32_t> tokens,
                              const CalibrateOptions& options) noexcept {
  return guarded("calibrate", [&] { return run(model, tokens, options); });
}

Status write_imatrix(const Calibration& calibration, const std::string& path,
                     const ImatrixOptions& options) noexcept {
  return guarded("write_imatrix", [&]() -> Status {
    ImportanceContents contents;
    for (const MatrixInputs& inputs : calibration.matrices)
      contents.entries.push_back({inputs.name, inputs.columns, inputs.squares, inputs.rows});
    if (!options.dataset.empty()) contents.datasets.push_back(options.dataset);
    contents.chunks = static_cast<std::uint32_t>(calibration.pieces);
    contents.chunk_size = static_cast<std::uint32_t>(calibration.context);
    return with_option_names(write_importance(path, contents, options.force), {});
  });
}

}  // namespace bittern
