// What `bittern eval` found, as a page.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/eval.h"
#include "report/page.h"

namespace bittern::report {

struct JudgedModel {
  std::string path{};  // as given
  std::string name{};  // what tells it from the others
  std::uint64_t bytes = 0;
  double bits = 0;               // per weight; 0: not known
  double tokens_per_second = 0;  // 0: it did not run
  int k_bits = 0, v_bits = 0;    // of a sweep over caches
  ModelScore score{};
};

struct Evaluation {
  std::vector<std::pair<std::string, std::string>> facts{};  // how it was measured
  std::int64_t context = 0;
  bool judged = false;  // there are divergences
  bool sweep = false;   // the models are one model with several caches
  std::vector<JudgedModel> models{};
  std::optional<JudgedModel> teacher{};
};

// The last part of each path, if that tells them apart; else the paths.
std::vector<std::string> short_names(const std::vector<std::string>& paths);
// The ends of the i-th bin of Divergence::histogram, as decimal logarithms.
std::pair<double, double> bin_edges(std::size_t i);

std::string eval_page(const Evaluation& evaluation);
// Its sections, for another page.
void add_evaluation(const Evaluation& evaluation, Page& page);
bool is_eval_page(std::string_view text);

}  // namespace bittern::report
