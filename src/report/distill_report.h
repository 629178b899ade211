// What `bittern distill` made, as a page.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/distill.h"
#include "report/eval_report.h"

namespace bittern::report {

// `evaluation`: of DistillReport::judged.
std::string distill_page(const DistillReport& report, const Evaluation& evaluation);
bool is_distill_page(std::string_view text);

}  // namespace bittern::report
