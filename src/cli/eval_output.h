// What `bittern eval` found, as text and as JSON.
#pragma once
#include "cli/cli.h"
#include "report/eval_report.h"

namespace bittern::cli {

// `ran`: with this model; otherwise its score alone is known. Sizes are those of `bittern inspect`.
Result<report::JudgedModel> judged_model(std::string path, std::string name, bool ran,
                                         const ModelScore& score, std::int64_t tokens);

void print_evaluation(const report::Evaluation& evaluation);
Json models_json(const report::Evaluation& evaluation);
Json teacher_json(const report::JudgedModel& teacher);

}  // namespace bittern::cli
