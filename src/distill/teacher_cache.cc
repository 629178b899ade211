#include "distill/teacher_cache.h"

#include <algorithm>
#include <vector>

#include "convert/replace.h"

namespace bittern {
namespace {

Status about_cache(const Status& status) {
  return {status.code(), "@{teacher_cache}: " + std::string(status.message())};
}

EvalOptions reading(const DistillOptions& options) {
  return {.dialect = PerplexityDialect::segments, .context = options.context};
}

}  // namespace

TeacherCache::TeacherCache(const DistillOptions& options, std::uint64_t teacher,
                           const TrainingText& text, std::int64_t most_steps)
    : options_(options), teacher_(teacher), pieces_{.context = options.context, .tokens = {}} {
  std::vector<std::int64_t> pieces = text.order(0, options.seed);
  const auto all = static_cast<std::int64_t>(pieces.size());
  if (most_steps < all / options.batch + 1)
    pieces.resize(static_cast<std::size_t>(std::min(all, most_steps * options.batch)));
  std::sort(pieces.begin(), pieces.end());
  for (const std::int64_t piece : pieces) {
    places_[piece] = pieces_.pieces() * (options.context - 1);
    pieces_.add(text.train.piece(piece));
  }
}

Status TeacherCache::check() {
  const auto there = thing_at(path());
  if (!there) return about_cache(there.status());
  new_ = *there == Thing::nothing;
  if (new_) return {};
  if (*there == Thing::special)
    return invalid("@{teacher_cache}: " + path() + ": " + name(*there) + ", expected a file");
  const auto targets = TargetsFile::open(path());
  const Status found = targets ? check(*targets) : about_cache(targets.status());
  if (found.ok() || !options_.force) return found;
  new_ = true;
  const Status ours = TargetsFile::check_ours(path());
  return ours.ok() ? ours : about_cache(ours);
}

// Who says what the file holds.
std::string TeacherCache::key(bool fastest) const {
  return std::to_string(teacher_) + (fastest ? " fastest" : "");
}

Status TeacherCache::check(const TargetsFile& targets) const {
  const TargetsKey& found = targets.key();
  const auto other = [&](const std::string& text) {
    return invalid("@{teacher_cache}: " + targets.path() + ": made " + text +
                   "; expected another name for the new one, or @{force}");
  };
  if (found.teacher == key(!fastest()))
    return other(fastest() ? "without @{fastest}" : "with @{fastest}");
  if (found.teacher != key(fastest())) return other("by another teacher");
  if (found.top != std::min(options_.teacher_top, found.vocab))
    return other("with @{teacher_top} " + std::to_string(found.top));
  TargetsKey wanted = TargetsKey::of(pieces_.tokens, reading(options_), pieces_.pieces());
  wanted.positions = pieces_.pieces() * (options_.context - 1);
  if (targets.check(wanted).ok()) return {};
  return other(
      "of other pieces of text (they depend on the text, and on @{context}, @{validation}, "
      "@{seed}, @{steps} and @{batch})");
}

Status TeacherCache::make(const Model& teacher, EvalOptions how) const {
  const EvalOptions plain = reading(options_);
  how.dialect = plain.dialect;
  how.context = plain.context;
  const Status written =
      write_targets(path(), {&teacher, {.kv = "f32"}}, pieces_.tokens, how,
                    {.top = options_.teacher_top, .teacher = key(fastest()), .replace = true});
  return written.ok() ? written : about_cache(written);
}

Result<TargetsFile> TeacherCache::open() const {
  auto targets = TargetsFile::open(path());
  if (!targets) return about_cache(targets.status());
  BITTERN_TRY(check(*targets));
  return targets;
}

}  // namespace bittern
