// What the teacher says of the pieces of text that steps read, in a file (eval/targets_file.h): a
// run makes it, and others that read the same pieces need not run the teacher for them.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "bittern/distill.h"
#include "bittern/eval.h"
#include "bittern/model.h"
#include "bittern/status.h"
#include "distill/training_text.h"
#include "eval/targets_file.h"

namespace bittern {

class TeacherCache {
 public:
  // teacher: the fingerprint of its files. most_steps: that a run makes, those that try a rate
  // included.
  TeacherCache(const DistillOptions& options, std::uint64_t teacher, const TrainingText& text,
               std::int64_t most_steps);

  // Whether options.teacher_cache is of these pieces, or nothing yet, or may be replaced.
  Status check();
  bool is_new() const { return new_; }
  Status make(const Model& teacher, EvalOptions how) const;
  Result<TargetsFile> open() const;
  // The first row of each piece.
  const std::map<std::int64_t, std::int64_t>& places() const { return places_; }

 private:
  const std::string& path() const { return options_.teacher_cache; }
  bool fastest() const { return options_.preference == Preference::fastest; }
  std::string key(bool fastest) const;
  Status check(const TargetsFile& targets) const;

  const DistillOptions& options_;
  std::uint64_t teacher_;
  CalibrationText pieces_;
  std::map<std::int64_t, std::int64_t> places_;
  bool new_ = false;
};

}  // namespace bittern
