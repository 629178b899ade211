// What `bittern eval` found, as text and as JSON.
#pragma once
#include "cli/cli.h"
#include "report/eval_report.h"

namespace bittern::cli {

void print_evaluation(const report::Evaluation& evaluation);
Json models_json(const report::Evaluation& evaluation);
Json teacher_json(const report::JudgedModel& teacher);

}  // namespace bittern::cli
