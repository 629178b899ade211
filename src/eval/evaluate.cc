#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "bittern/eval.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "cpu/parallel.h"
#include "eval/pieces.h"
#include "eval/reader.h"
#include "eval/row_sums.h"
#include "eval/statistics.h"
#include "eval/targets_file.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- the residual stream, layer by layer ----

// What each layer of the teacher gives for a piece.
class StreamKeeper : public Watcher {
 public:
  void start(const ModelInfo& info, std::int64_t rows) {
    hidden_ = info.hidden;
    rows_ = rows;
    filled_.assign(at(info.layers), 0);
    kept_.resize(at(info.layers * rows * info.hidden));
  }
  void layer(std::int64_t index, const ConstView& stream) override {
    const float* const from = stream.as<float>();
    for (std::int64_t r = 0; r < stream.shape[0]; ++r) {
      const float* const row = from + r * stream.stride[0];
      std::copy(row, row + hidden_, kept_.begin() + offset(index, filled_[at(index)]++));
    }
  }
  const float* row(std::int64_t layer, std::int64_t r) const {
    return kept_.data() + offset(layer, r);
  }

 private:
  std::int64_t offset(std::int64_t layer, std::int64_t row) const {
    return (layer * rows_ + row) * hidden_;
  }
  std::int64_t hidden_ = 0, rows_ = 0;
  std::vector<std::int64_t> filled_;  // rows of each layer
  std::vector<float> kept_;
};

// How far a student's stream is from it at each position scored.
class StreamJudge : public Watcher {
 public:
  StreamJudge(const StreamKeeper& teacher, const Piece& piece, std::int64_t layers,
              std::vector<double>& to)
      : teacher_(teacher), piece_(piece), to_(to), seen_(at(layers)) {
    to_.assign(at(layers * piece.scored()), 0.0);
  }
  void layer(std::int64_t index, const ConstView& stream) override {
    for (std::int64_t r = 0; r < stream.shape[0]; ++r) {
      const std::int64_t position = seen_[at(index)]++;
      if (position < piece_.from || position + 1 >= piece_.length) continue;
      const float* const x = stream.as<float>() + r * stream.stride[0];
      const float* const t = teacher_.row(index, position);
      double off = 0, all = 0;
      for (std::int64_t i = 0; i < stream.shape[1]; ++i) {
        const double d = double{x[i]} - double{t[i]};
        off += d * d;
        all += double{t[i]} * double{t[i]};
      }
      if (off != 0) to_[at(index * piece_.scored() + position - piece_.from)] = off / all;
    }
  }

 private:
  const StreamKeeper& teacher_;
  const Piece& piece_;
  std::vector<double>& to_;
  std::vector<std::int64_t> seen_;
};

// ---- predictions ----

std::array<std::int32_t, 5> five_largest(const float* row, std::int64_t count) {
  std::array<std::int32_t, 5> five;
  five.fill(-1);
  find_largest(row, count, std::span(five).first(at(std::min<std::int64_t>(count, 5))));
  return five;
}

// What one position adds.
struct Compared {
  double kl = 0, dp = 0;
  Agreement same;
};

Compared compare_row(const float* p, const float* q, std::int64_t vocab, std::int32_t target) {
  return {.kl = kl_of_row(p, q, vocab),
          .dp = std::exp(double{q[target]}) - std::exp(double{p[target]}),
          .same = agreement(five_largest(p, vocab), five_largest(q, vocab))};
}

// `q` is changed and changed back.
Compared compare_targets(const TargetsFile& file, std::int64_t position, float* q,
                         std::int64_t vocab, std::int32_t target) {
  const auto ids = file.ids(position);
  const auto log_p = file.log_p(position);
  std::array<std::int32_t, 5> five;
  five.fill(-1);
  std::copy(ids.begin(), ids.begin() + std::min<std::ptrdiff_t>(std::ssize(ids), 5), five.begin());
  Compared out{.dp = std::exp(double{q[target]}) - std::exp(double{file.right(position)}),
               .same = agreement(five, five_largest(q, vocab))};
  std::vector<float> taken(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    taken[i] = q[ids[i]];
    out.kl += std::exp(double{log_p[i]}) * (double{log_p[i]} - double{taken[i]});
  }
  if (const double p_tail = file.tail(position); p_tail > 0) {
    for (const std::int32_t id : ids) q[id] = -INFINITY;
    const double mass = mass_of_row(q, vocab);
    // All of them may be too small for f32.
    const double log_tail = mass > 0 ? std::log(mass) : double{*std::max_element(q, q + vocab)};
    for (std::size_t i = ids.size(); i-- > 0;) q[ids[i]] = taken[i];
    if (std::isfinite(log_tail)) out.kl += p_tail * (std::log(p_tail) - log_tail);
  }
  return out;
}

// one(row) -> Compared for each of the student's rows, kept in order.
template <class One>
Status compare_rows(Reader& student, std::int64_t rows, const One& one) {
  std::array<Compared, static_cast<std::size_t>(kEvalRows)> all;
  cpu::parallel(rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) all[at(r)] = one(r);
  });
  PieceScores& g = student.scores;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Compared& c = all[at(r)];
    if (!std::isfinite(c.kl) || !std::isfinite(c.dp))
      return invalid(student.name() +
                     ": KL from the teacher is not finite; do its weights hold a " +
                     "NaN or an infinity?");
    g.kl.push_back(c.kl);
    g.dp.push_back(c.dp);
    g.same1 += c.same.top1;
    g.same5 += c.same.top5;
  }
  return {};
}

// ---- the pass over the text ----

Status check_tokens(std::span<const std::int32_t> tokens, std::int64_t vocab) {
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      return invalid("tokens: " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                     ", expected 0 to " + std::to_string(vocab - 1));
  return {};
}

Result<std::vector<Reader>> make_readers(std::span<const EvalModel> models,
                                         const EvalOptions& options, const EvalModel& teacher) {
  std::vector<Reader> readers;
  for (std::size_t i = 0; i < models.size(); ++i) {
    auto reader = Reader::make("models[" + std::to_string(i) + "]", models[i], options);
    if (!reader) return reader.status();
    readers.push_back(std::move(*reader));
  }
  if (teacher.model != nullptr) {
    auto reader = Reader::make("teacher", teacher, options);
    if (!reader) return reader.status();
    readers.push_back(std::move(*reader));
  }
  const Reader& first = readers.front();
  for (const Reader& reader : readers)
    if (reader.info().vocab != first.info().vocab)
      return invalid(reader.name() + ": a vocabulary of " + std::to_string(reader.info().vocab) +
                     " tokens, expected " + std::to_string(first.info().vocab) + " as " +
                     first.name() + " has");
  if (!options.layers) return readers;
  if (teacher.model == nullptr) return invalid("layers: no teacher, expected one that runs");
  const ModelInfo& own = readers.back().info();
  for (const Reader& reader : readers)
    if (reader.info().layers != own.layers || reader.info().hidden != own.hidden)
      return invalid("layers: " + reader.name() + " has " + std::to_string(reader.info().layers) +
                     " layers of " + std::to_string(reader.info().hidden) + ", the teacher " +
                     std::to_string(own.layers) + " of " + std::to_string(own.hidden) +
                     ", expected the same");
  return readers;
}

class Evaluation {
 public:
  Evaluation(std::span<const std::int32_t> tokens, const EvalOptions& options,
             std::vector<Piece> pieces, std::vector<Reader> readers, bool teacher,
             const TargetsFile* targets)
      : tokens_(tokens),
        options_(options),
        pieces_(std::move(pieces)),
        readers_(std::move(readers)),
        students_(readers_.size() - (teacher ? 1 : 0)),
        targets_(targets),
        all_(readers_.size()) {}

  Result<EvalResult> run() {
    EvalResult result;
    result.pieces = static_cast<std::int64_t>(pieces_.size());
    for (const Piece& piece : pieces_) {
      result.tokens += piece.length;
      result.scored += piece.scored();
    }
    total_ = result.tokens * static_cast<std::int64_t>(readers_.size());
    Gathered known;  // of targets
    if (targets_ != nullptr)
      for (std::int64_t i = 0; i < result.scored; ++i)
        known.nll.push_back(-double{targets_->right(i)});
    for (std::size_t i = 0; i < students_; ++i) {
      all_[i].lower_bound = targets_ != nullptr && targets_->key().top < readers_[i].info().vocab;
      if (options_.layers) all_[i].layers.assign(at(readers_[i].info().layers), 0.0);
    }
    BITTERN_TRY(read_all());
    if (targets_ != nullptr) BITTERN_TRY(targets_->unchanged());
    for (std::size_t i = 0; i < students_; ++i)
      result.models.push_back(summary(all_[i], options_, pieces_));
    if (teacher() != nullptr) result.teacher = summary(all_.back(), options_, pieces_);
    if (targets_ != nullptr) result.teacher = summary(known, options_, pieces_);
    return result;
  }

 private:
  Reader* teacher() { return students_ < readers_.size() ? &readers_.back() : nullptr; }

  // Pieces are dealt out to the processes. What was made of them is added in their order, in every
  // process.
  Status read_all() {
    const std::int64_t rank = rank_of(options_.ranks), count = count_of(options_.ranks);
    std::vector<std::int64_t> scored;  // before each piece
    std::int64_t before = 0;
    for (const Piece& piece : pieces_) {
      scored.push_back(before);
      before += piece.scored();
    }
    const auto make = [&](std::int64_t i, Packer& out) -> Status {
      for (Reader& reader : readers_) reader.scores = {};
      BITTERN_TRY(take(pieces_[at(i)], scored[at(i)]));
      for (const Reader& reader : readers_) {
        const PieceScores& own = reader.scores;
        for (const auto* numbers : {&own.nll, &own.kl, &own.dp, &own.layers}) out.add(*numbers);
        for (const std::int64_t same : {own.same1, own.same5}) out.add(same);
        out.add(own.seconds);
      }
      return {};
    };
    std::vector<double> slowest(readers_.size());  // of the pieces that are read at once
    const auto add = [&](std::int64_t i, Unpacker in) -> Status {
      for (std::size_t r = 0; r < readers_.size(); ++r) {
        PieceScores one;
        for (auto* numbers : {&one.nll, &one.kl, &one.dp, &one.layers}) in.take(*numbers);
        for (std::int64_t* same : {&one.same1, &one.same5}) in.take(*same);
        in.take(one.seconds);
        all_[r].add(one);
        if (r == 0)
          for (const double nll : one.nll) sum_ += nll;
        slowest[r] = std::max(slowest[r], one.seconds);
        if (i % count == count - 1 || at(i) + 1 == pieces_.size())
          all_[r].seconds += std::exchange(slowest[r], 0.0);
      }
      scored_ += pieces_[at(i)].scored();
      if (i % count != rank) done_ += pieces_[at(i)].length * std::ssize(readers_);
      return {};
    };
    return deal(options_.ranks, std::ssize(pieces_), DealTo::all, make, add);
  }

  Status read(const Piece& piece) {
    const std::vector<std::int32_t> in = piece_tokens(piece, tokens_, options_);
    if (options_.layers) stream_.start(teacher()->info(), piece.length);
    for (std::size_t i = readers_.size(); i-- > 0;) {  // the teacher first
      if (!options_.layers) {
        BITTERN_TRY(readers_[i].read(in));
      } else if (i == students_) {
        BITTERN_TRY(readers_[i].read(in, &stream_));
      } else {
        StreamJudge judge(stream_, piece, readers_[i].info().layers, readers_[i].scores.layers);
        BITTERN_TRY(readers_[i].read(in, &judge));
      }
      done_ += piece.length;
      BITTERN_TRY(tell());
    }
    return {};
  }

  // `scored`: positions of all pieces before this one.
  Status take(const Piece& piece, std::int64_t scored) {
    BITTERN_TRY(read(piece));
    for (std::int64_t first = piece.from; first + 1 < piece.length; first += kEvalRows) {
      const std::int64_t rows = std::min(kEvalRows, piece.length - 1 - first);
      const std::span targets = tokens_.subspan(at(piece.begin + first + 1), at(rows));
      for (Reader& reader : readers_) BITTERN_TRY(reader.predict(first, targets));
      for (std::size_t i = 0; i < students_; ++i) {
        Reader& student = readers_[i];
        const std::int64_t vocab = student.info().vocab;
        if (const Reader* const t = teacher(); t != nullptr)
          BITTERN_TRY(compare_rows(student, rows, [&](std::int64_t r) {
            return compare_row(t->log_p(r), student.log_p(r), vocab, targets[at(r)]);
          }));
        if (targets_ != nullptr)
          BITTERN_TRY(compare_rows(student, rows, [&](std::int64_t r) {
            return compare_targets(*targets_, scored + r, student.log_p(r), vocab, targets[at(r)]);
          }));
      }
      scored += rows;
    }
    return {};
  }

  Status tell() const {
    const double so_far = scored_ == 0 ? 0 : std::exp(sum_ / static_cast<double>(scored_));
    if (options_.progress && !options_.progress({done_, total_, so_far}))
      return {Code::cancelled, "cancelled by the caller"};
    return {};
  }

  std::span<const std::int32_t> tokens_;
  const EvalOptions& options_;
  std::vector<Piece> pieces_;
  std::vector<Reader> readers_;  // students, and the teacher
  std::size_t students_;
  const TargetsFile* targets_;
  std::vector<Gathered> all_;  // of each reader
  StreamKeeper stream_;
  std::int64_t done_ = 0, total_ = 0, scored_ = 0;
  double sum_ = 0;
};

Result<EvalResult> run(std::span<const EvalModel> models, std::span<const std::int32_t> tokens,
                       const EvalOptions& options, const EvalModel& teacher,
                       const TargetsFile* targets) {
  if (models.empty()) return invalid("models: none, expected at least one");
  auto pieces = cut_pieces(static_cast<std::int64_t>(tokens.size()), options);
  if (!pieces) return pieces.status();
  auto readers = make_readers(models, options, teacher);
  if (!readers) return readers.status();
  const std::int64_t vocab = readers->front().info().vocab;
  if (targets != nullptr && targets->key().vocab != vocab)
    return invalid(targets->path() + ": made with a vocabulary of " +
                   std::to_string(targets->key().vocab) + " tokens, expected " +
                   std::to_string(vocab) + " as models[0] has");
  BITTERN_TRY(check_tokens(tokens, vocab));
  return Evaluation(tokens, options, std::move(*pieces), std::move(*readers),
                    teacher.model != nullptr, targets)
      .run();
}

// What targets of these would be made of.
Result<TargetsKey> wanted_key(std::span<const std::int32_t> tokens, const EvalOptions& options) {
  const auto pieces = cut_pieces(static_cast<std::int64_t>(tokens.size()), options);
  if (!pieces) return pieces.status();
  TargetsKey key = TargetsKey::of(tokens, options, static_cast<std::int64_t>(pieces->size()));
  for (const Piece& piece : *pieces) key.positions += piece.scored();
  return key;
}

Status write(const std::string& path, const EvalModel& teacher,
             std::span<const std::int32_t> tokens, const EvalOptions& options,
             const TargetOptions& target_options) {
  if (target_options.top < 5)
    return invalid("top: " + std::to_string(target_options.top) + ", expected 5 or more");
  auto key = wanted_key(tokens, options);
  if (!key) return key.status();
  const auto pieces = cut_pieces(static_cast<std::int64_t>(tokens.size()), options);
  auto reader = Reader::make("teacher", teacher, options);
  if (!reader) return reader.status();
  key->vocab = reader->info().vocab;
  key->top = std::min(target_options.top, key->vocab);
  key->teacher = target_options.teacher;
  BITTERN_TRY(check_tokens(tokens, key->vocab));
  std::optional<TargetsWriter> writer;  // of process 0
  if (rank_of(options.ranks) == 0) {
    auto made = TargetsWriter::make(path, *key, target_options.replace);
    if (!made) return made.status();
    writer.emplace(std::move(*made));
  }

  std::int64_t done = 0, total = 0, scored = 0;
  double sum = 0;
  for (const Piece& piece : *pieces) total += piece.length;
  const auto make = [&](std::int64_t i, Packer& out) -> Status {
    const Piece& piece = (*pieces)[at(i)];
    reader->scores = {};
    std::vector<std::int32_t> ids(at(piece.scored() * key->top));
    std::vector<float> log_p(ids.size()), tail(at(piece.scored())), right(tail.size());
    BITTERN_TRY(reader->read(piece_tokens(piece, tokens, options)));
    for (std::int64_t first = piece.from; first + 1 < piece.length; first += kEvalRows) {
      const std::int64_t rows = std::min(kEvalRows, piece.length - 1 - first);
      const std::span targets = tokens.subspan(at(piece.begin + first + 1), at(rows));
      BITTERN_TRY(reader->predict(first, targets));
      cpu::parallel(rows, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          float* const p = reader->log_p(r);
          const std::int64_t row = first - piece.from + r;
          right[at(row)] = p[targets[at(r)]];
          const std::span own = std::span(ids).subspan(at(row * key->top), at(key->top));
          find_largest(p, key->vocab, own);
          for (std::size_t j = 0; j < own.size(); ++j) {
            log_p[at(row * key->top) + j] = p[own[j]];
            p[own[j]] = -INFINITY;
          }
          tail[at(row)] = static_cast<float>(mass_of_row(p, key->vocab));
        }
      });
    }
    out.add(ids);
    for (const auto* numbers : {&log_p, &tail, &right}) out.add(*numbers);
    return {};
  };
  const auto take = [&](std::int64_t i, Unpacker in) -> Status {
    std::vector<std::int32_t> ids;
    std::vector<float> log_p, tail, right;
    in.take(ids);
    for (auto* numbers : {&log_p, &tail, &right}) in.take(*numbers);
    BITTERN_TRY(writer->add(ids, log_p, tail, right));
    for (const float x : right) sum -= x;
    scored += std::ssize(right);
    done += (*pieces)[at(i)].length;
    if (options.progress &&
        !options.progress({done, total, std::exp(sum / static_cast<double>(scored))}))
      return {Code::cancelled, "cancelled by the caller"};
    return {};
  };
  BITTERN_TRY(deal(options.ranks, std::ssize(*pieces), DealTo::first, make, take));
  return writer ? writer->finish() : Status();
}

}  // namespace

Result<EvalResult> evaluate(std::span<const EvalModel> models, std::span<const std::int32_t> tokens,
                            const EvalOptions& options, const EvalModel& teacher) noexcept {
  return agreed(options.ranks, guarded("evaluate", [&] {
                  return run(models, tokens, options, teacher, nullptr);
                }));
}

Result<EvalResult> evaluate(std::span<const EvalModel> models, std::span<const std::int32_t> tokens,
                            const EvalOptions& options, const TeacherTargets& teacher) noexcept {
  return agreed(options.ranks, guarded("evaluate", [&]() -> Result<EvalResult> {
                  if (options.layers)
                    return invalid("layers: targets of a file, expected a teacher that runs");
                  BITTERN_TRY(teacher.check(tokens, options));
                  return run(models, tokens, options, {}, teacher.file_.get());
                }));
}

Status write_targets(const std::string& path, const EvalModel& teacher,
                     std::span<const std::int32_t> tokens, const EvalOptions& options,
                     const TargetOptions& target_options) noexcept {
  return agree(options.ranks, guarded("write_targets", [&] {
                 return write(path, teacher, tokens, options, target_options);
               }));
}

Result<TeacherTargets> TeacherTargets::open(const std::string& path) noexcept {
  return guarded("targets", [&]() -> Result<TeacherTargets> {
    auto file = TargetsFile::open(path);
    if (!file) return file.status();
    return TeacherTargets(std::make_shared<const TargetsFile>(std::move(*file)));
  });
}

const std::string& TeacherTargets::teacher() const noexcept { return file_->key().teacher; }
std::int64_t TeacherTargets::top() const noexcept { return file_->key().top; }
std::int64_t TeacherTargets::vocab() const noexcept { return file_->key().vocab; }

Status TeacherTargets::check(std::span<const std::int32_t> tokens,
                             const EvalOptions& options) const noexcept {
  return guarded("targets", [&]() -> Status {
    const auto wanted = wanted_key(tokens, options);
    if (!wanted) return wanted.status();
    return file_->check(*wanted);
  });
}

}  // namespace bittern
