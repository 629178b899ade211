#include "convert/row_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "bittern/affine_desc.h"
#include "convert/progress.h"
#include "formats/decode.h"
#include "formats/stored_rows.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string of_tensor(const std::string& name) { return "tensor " + name + ": "; }

double mapped(ValueMap map, double x) {
  switch (map) {
    case ValueMap::same: return x;
    case ValueMap::plus_one: return x + 1;
    case ValueMap::minus_one: return x - 1;
    case ValueMap::negative_exp: return -std::exp(x);
    case ValueMap::log_negative: return std::log(-x);
  }
  return x;
}

// Number i of `out`, rounded once; one beyond f32's range is clamped and remembered.
void put(RowNumbers& out, std::size_t i, double x) {
  const auto rounded = static_cast<float>(x);
  out.own[i] = rounded;
  if (!std::isinf(rounded) || std::isinf(x)) return;
  out.own[i] = std::copysign(std::numeric_limits<float>::max(), rounded);
  if (out.beyond.count++ > 0) return;
  out.beyond.at = static_cast<std::int64_t>(i);
  out.beyond.value = x;
}

// Each row's equal blocks in another order.
template <class T>
void move_blocks(std::vector<T>& rows, std::int64_t count, const std::vector<std::int64_t>& order) {
  if (order.empty() || count == 0) return;
  const std::size_t row = rows.size() / at(count), block = row / order.size();
  std::vector<T> moved(row);
  for (std::size_t r = 0; r < at(count); ++r) {
    T* const begin = rows.data() + r * row;
    for (std::size_t b = 0; b < order.size(); ++b)
      std::copy_n(begin + at(order[b]) * block, block, moved.data() + b * block);
    std::copy(moved.begin(), moved.end(), begin);
  }
}

// What cannot be cut: columns that share a block, a scale or a word of codes.
std::int64_t unit_columns(const Storage& storage) {
  if (storage.kind == Storage::Kind::blocks) return info(storage.type).block;
  if (storage.kind == Storage::Kind::affine) return std::lcm(storage.group, 32);
  return 1;
}

// Whether f32 holds its numbers, so that they can stand beside those of another storage.
bool mixes(const Storage& storage) {
  return storage.quantized() || storage.dtype == SafeDType::f32 ||
         storage.dtype == SafeDType::f16 || storage.dtype == SafeDType::bf16;
}

}  // namespace

Result<RowBytes> row_bytes(const Storage& storage, std::int64_t columns) {
  const auto all = storage.bytes(Shape{1, columns});
  if (!all) return all.status();
  if (storage.kind != Storage::Kind::affine) return RowBytes{.data = *all};
  const auto params =
      static_cast<std::uint64_t>(columns / storage.group * bits_of(storage.dtype) / 8);
  RowBytes bytes{.data = 4 * static_cast<std::uint64_t>(packed_words(columns, storage.bits)),
                 .scales = params,
                 .biases = params};
  if (storage.zeros == Storage::Zeros::packed) {
    bytes.together = 32;
    bytes.biases = static_cast<std::uint64_t>(columns / storage.group * 4 * storage.bits);
  }
  return bytes;
}

// ---- RowReader ----

Result<RowReader> RowReader::open(const Checkpoint& source, const Recipe& recipe) {
  const auto refuse = [&](const std::string& tensor, const std::string& what) {
    return invalid(source.path() + ": " + of_tensor(tensor) + what + " to make " + recipe.name);
  };
  RowReader reader;
  reader.name_ = recipe.name;
  reader.columns_ = recipe.width > 0 ? recipe.width : columns_of(recipe.shape);
  reader.rows_ = reader.columns_ == 0 ? 0 : recipe.shape.numel() / reader.columns_;
  reader.column_block_ = recipe.column_block;
  reader.order_ = recipe.columns;
  reader.map_ = recipe.map;
  for (const std::string& name : recipe.sources) {
    const CheckpointTensor* found = source.find(name);
    if (found == nullptr) return refuse(name, "missing");
    CheckpointTensor& tensor = reader.sources_.emplace_back(*found);
    // A conv weight [C, 1, K] and its [C, K] or [C, K, 1] are the same numbers.
    if (tensor.columns() != reader.columns_ && !tensor.storage.quantized() && reader.columns_ > 0 &&
        tensor.shape.numel() % reader.columns_ == 0)
      tensor.shape = {tensor.shape.numel() / reader.columns_, reader.columns_};
    if (tensor.columns() != reader.columns_) {
      return refuse(name, "rows of " + std::to_string(tensor.columns()) + ", expected " +
                              std::to_string(reader.columns_));
    }
    if (tensor.storage == reader.sources_[0].storage) continue;
    if (!mixes(tensor.storage) || !mixes(reader.sources_[0].storage)) {
      return refuse(name, tensor.storage.str() + ", expected " + reader.sources_[0].storage.str() +
                              " like " + recipe.sources[0]);
    }
    reader.mixed_ = true;
  }
  if (recipe.sources.empty()) {
    if (static_cast<std::int64_t>(recipe.values.size()) != recipe.shape.numel())
      return Status{Code::internal, of_tensor(recipe.name) + "made from nothing"};
    reader.sources_.push_back({.name = recipe.name,
                               .shape = recipe.shape,
                               .storage = Storage::plain(SafeDType::f32),
                               .data = std::as_bytes(std::span(recipe.values)),
                               .scales = {},
                               .biases = {},
                               .group_index = {}});
  }
  reader.storage_ = reader.mixed_ ? Storage::plain(SafeDType::f32) : reader.sources_[0].storage;
  if (reader.mixed_) {
    const auto first = std::find_if(reader.sources_.begin(), reader.sources_.end(),
                                    [](const auto& tensor) { return tensor.storage.quantized(); });
    if (first != reader.sources_.end()) reader.storage_ = first->storage;
  }
  std::vector<RowRun> runs = recipe.rows;
  if (runs.empty()) runs.push_back({.source = 0, .first = 0, .count = reader.sources_[0].rows()});
  std::int64_t row = 0;
  for (const RowRun& run : runs) {
    const std::int64_t there = reader.sources_[run.source].rows();
    const std::int64_t last = run.first + (run.count - 1) * run.step;
    if (run.count < 0 || run.first < 0 || (run.count > 0 && (last < 0 || last >= there)) ||
        run.first > there) {
      return refuse(reader.sources_[run.source].name,
                    std::to_string(there) + " rows, expected at least " +
                        std::to_string(std::max(run.first, last) + 1));
    }
    if (run.count == 0) continue;
    reader.runs_.push_back({{run}, row});
    row += run.count;
  }
  if (row != reader.rows_) {
    return refuse(reader.sources_[0].name,
                  std::to_string(row) + " rows, expected " + std::to_string(reader.rows_));
  }
  return reader;
}

bool RowReader::movable() const {
  if (mixed_ || map_ != ValueMap::same || has_zero_points(sources_[0])) return false;
  return order_.empty() || column_block_ % unit_columns(storage()) == 0;
}

Storage RowReader::multiplied() const {
  if (mixed_ || !has_zero_points(sources_[0])) return storage_;
  const bool packed = storage_.zeros == Storage::Zeros::packed;
  const bool symmetric = packed && std::all_of(sources_.begin(), sources_.end(),
                                               [](const auto& t) { return t.biases.empty(); });
  return Storage::affine(storage_.bits, storage_.group,
                         symmetric ? storage_.dtype : SafeDType::f32);
}

std::vector<RowReader::Pick> RowReader::picks(std::int64_t first, std::int64_t count) const {
  std::vector<Pick> picks;
  picks.reserve(at(count));
  auto run = std::upper_bound(runs_.begin(), runs_.end(), first,
                              [](std::int64_t row, const Run& r) { return row < r.at; });
  for (--run; count > 0; ++run) {
    const std::int64_t skipped = first - run->at, n = std::min(count, run->count - skipped);
    for (std::int64_t i = 0; i < n; ++i)
      picks.push_back({run->source, run->first + (skipped + i) * run->step});
    first += n;
    count -= n;
  }
  return picks;
}

// f(tensor, first, count, from, to): rows [first, first + count) of a source hold picks [from, to).
// Rows that are close together form one range, so that a permuted head is decoded at once.
template <class F>
Status RowReader::each_range(const std::vector<Pick>& picks, F&& f) const {
  for (std::size_t from = 0; from < picks.size();) {
    std::int64_t low = picks[from].row, high = low;
    std::size_t to = from + 1;
    for (; to < picks.size() && picks[to].source == picks[from].source; ++to) {
      const std::int64_t l = std::min(low, picks[to].row), h = std::max(high, picks[to].row);
      if (h - l > 2 * static_cast<std::int64_t>(to - from) + 1024) break;
      low = l;
      high = h;
    }
    BITTERN_TRY(f(sources_[picks[from].source], low, high - low + 1, from, to));
    from = to;
  }
  return {};
}

Status RowReader::numbers(std::int64_t first, std::int64_t count, RowNumbers& out) const {
  out.first = first;
  out.beyond = {};
  if (storage() == Storage::plain(SafeDType::f64)) {
    EncodedRows rows;
    BITTERN_TRY(stored(first, count, rows));
    out.own.resize(at(count * columns_));
    for (std::size_t i = 0; i < out.own.size(); ++i) {
      double x;
      std::memcpy(&x, rows.data.data() + i * sizeof x, sizeof x);
      put(out, i, mapped(map_, x));
    }
    out.dtype = DType::f32;
    out.data = out.own.data();
    return {};
  }
  const std::vector<Pick> wanted = picks(first, count);
  const CheckpointTensor& source = sources_[wanted.empty() ? 0 : wanted[0].source];
  const auto dtype = to_dtype(source.storage.dtype);
  const bool in_order = std::adjacent_find(wanted.begin(), wanted.end(), [](Pick a, Pick b) {
                          return a.source != b.source || b.row != a.row + 1;
                        }) == wanted.end();
  const bool float_dtype =
      dtype && (*dtype == DType::f32 || *dtype == DType::f16 || *dtype == DType::bf16);
  if (source.storage.kind == Storage::Kind::plain && float_dtype && in_order && order_.empty() &&
      map_ == ValueMap::same) {
    const std::size_t row = at(columns_) * size_of(*dtype);
    const std::byte* data = source.data.data() + (wanted.empty() ? 0 : at(wanted[0].row) * row);
    if (reinterpret_cast<std::uintptr_t>(data) % size_of(*dtype) == 0) {
      out.dtype = *dtype;
      out.data = data;
      return {};
    }
  }
  out.own.resize(at(count * columns_));
  std::vector<float> range;
  const auto decode = [&](const CheckpointTensor& tensor, std::int64_t low, std::int64_t rows,
                          std::size_t from, std::size_t to) {
    if (in_order)
      return decode_rows(tensor, low, rows,
                         std::span(out.own).subspan(from * at(columns_), at(rows * columns_)));
    range.resize(at(rows * columns_));
    BITTERN_TRY(decode_rows(tensor, low, rows, range));
    for (std::size_t i = from; i < to; ++i)
      std::copy_n(range.data() + (wanted[i].row - low) * columns_, columns_,
                  out.own.data() + at(columns_) * i);
    return Status{};
  };
  BITTERN_TRY(each_range(wanted, decode));
  move_blocks(out.own, count, order_);
  if (map_ != ValueMap::same)
    for (std::size_t i = 0; i < out.own.size(); ++i) put(out, i, mapped(map_, double{out.own[i]}));
  out.dtype = DType::f32;
  out.data = out.own.data();
  return {};
}

Status RowReader::grid(std::int64_t first, std::int64_t count, GridRows& out) const {
  if (mixed_) return unsupported(of_tensor(name_) + "made of parts of different types");
  const std::vector<Pick> wanted = picks(first, count);
  GridRows range;
  const auto decode = [&](const CheckpointTensor& tensor, std::int64_t low, std::int64_t rows,
                          std::size_t from, std::size_t to) -> Status {
    BITTERN_TRY(decode_grid(tensor, low, rows, range));
    const std::int64_t groups = columns_ / range.group;
    out.bits = range.bits;
    out.group = range.group;
    out.codes.resize(at(count * columns_));
    out.scales.resize(at(count * groups));
    out.biases.resize(at(count * groups));
    for (std::size_t i = from; i < to; ++i) {
      const std::int64_t row = wanted[i].row - low, to_row = static_cast<std::int64_t>(i);
      std::copy_n(range.codes.data() + row * columns_, columns_,
                  out.codes.data() + to_row * columns_);
      std::copy_n(range.scales.data() + row * groups, groups, out.scales.data() + to_row * groups);
      std::copy_n(range.biases.data() + row * groups, groups, out.biases.data() + to_row * groups);
    }
    return {};
  };
  BITTERN_TRY(each_range(wanted, decode));
  if (!order_.empty() && (out.group == 0 || column_block_ % out.group != 0)) {
    return unsupported(of_tensor(name_) + "columns move in blocks of " +
                       std::to_string(column_block_) + ", expected a multiple of its groups of " +
                       std::to_string(out.group));
  }
  move_blocks(out.codes, count, order_);
  move_blocks(out.scales, count, order_);
  move_blocks(out.biases, count, order_);
  return {};
}

Status RowReader::stored(std::int64_t first, std::int64_t count, EncodedRows& out) const {
  const auto row = row_bytes(storage(), columns_);
  if (!row) return row.status();
  out.data.resize(at(count) * row->data);
  out.scales.resize(at(count) * row->scales);
  out.biases.resize(at(count) * row->biases);
  std::size_t i = 0;
  for (const Pick& pick : picks(first, count)) {
    const CheckpointTensor& source = sources_[pick.source];
    const auto copy = [&](std::span<const std::byte> from, std::vector<std::byte>& to,
                          std::uint64_t bytes) {
      if (bytes > 0) std::memcpy(to.data() + i * bytes, from.data() + at(pick.row) * bytes, bytes);
    };
    copy(source.data, out.data, row->data);
    copy(source.scales, out.scales, row->scales);
    copy(source.biases, out.biases, row->biases);
    ++i;
  }
  move_blocks(out.data, count, order_);
  move_blocks(out.scales, count, order_);
  move_blocks(out.biases, count, order_);
  return {};
}

std::int64_t rows_at_once(std::int64_t columns) {
  return std::max<std::int64_t>(1, (std::int64_t{1} << 19) / std::max<std::int64_t>(columns, 1));
}

Status with_tensor(const Checkpoint& source, const std::string& name, const Status& status) {
  if (status.code() == Code::cancelled) return status;
  const std::string_view message = status.message();
  const std::string tensor = message.starts_with("tensor ") ? "" : of_tensor(name);
  return {status.code(), source.path() + ": " + tensor + std::string(message)};
}

}  // namespace bittern
