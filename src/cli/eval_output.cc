#include "cli/eval_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bittern/convert.h"

namespace bittern::cli {
namespace {

using report::Evaluation;
using report::JudgedModel;
using Rows = std::vector<std::vector<std::string>>;

// The first column to the left, numbers to the right.
void print_table(const Rows& rows) {
  std::vector<std::size_t> width(rows.front().size());
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  for (const auto& row : rows) {
    std::string line = fmt::format("{:{}}", row[0], width[0]);
    for (std::size_t i = 1; i < row.size(); ++i) line += fmt::format("  {:>{}}", row[i], width[i]);
    fmt::print("{}\n", line);
  }
}

std::string percent(double share) { return fmt::format("{:.2f} %", 100 * share); }
std::string with_error(double value, double error, int digits) {
  return fmt::format("{:.{}f} +- {:.{}f}", value, digits, error, digits);
}
std::string small(double value) { return std::isnan(value) ? "-" : fmt::format("{:.3g}", value); }

void print_scores(const Evaluation& e) {
  Rows rows{{e.sweep ? "cache" : "model"}};
  auto& head = rows.front();
  if (!e.sweep) head.insert(head.end(), {"size", "bits"});
  head.push_back("perplexity");
  if (e.judged) head.insert(head.end(), {"mean KL", "same top 1"});
  head.push_back("tokens/s");
  const auto add = [&](const JudgedModel& m, const std::string& name, bool judged) {
    std::vector<std::string> row{printable(name)};
    if (!e.sweep) {
      row.push_back(m.bytes != 0 ? size_text(m.bytes) : "-");
      row.push_back(m.bits > 0 ? fmt::format("{:.2f}", m.bits) : "-");
    }
    row.push_back(with_error(m.score.perplexity, m.score.error, 4));
    if (e.judged) {
      const Divergence& d = m.score.divergence;
      row.push_back(judged ? with_error(d.kl.mean, d.kl.error, 6) : "-");
      row.push_back(judged ? percent(d.top1) : "-");
    }
    row.push_back(m.tokens_per_second > 0 ? fmt::format("{:.1f}", m.tokens_per_second) : "-");
    rows.push_back(std::move(row));
  };
  for (const JudgedModel& m : e.models) add(m, m.name, e.judged);
  if (e.teacher) add(*e.teacher, e.teacher->name + " (teacher)", false);
  print_table(rows);
}

void print_divergence(const Evaluation& e) {
  Rows rows{{"KL in nats", "median", "90 %", "99 %", "99.9 %", "max", "RMS of dp", "same top 5"}};
  for (const JudgedModel& m : e.models) {
    const Divergence& d = m.score.divergence;
    rows.push_back({printable(m.name), small(d.kl.median), small(d.kl.p90), small(d.kl.p99),
                    small(d.kl.p999), small(d.kl.max), fmt::format("{:.3f} %", 100 * d.rms_dp),
                    percent(d.top5)});
  }
  fmt::print("\n");
  print_table(rows);
}

std::vector<std::string> columns(const std::string& first, const Evaluation& e) {
  std::vector<std::string> head{first};
  for (const JudgedModel& m : e.models) head.push_back(printable(m.name));
  return head;
}

void print_positions(const Evaluation& e) {
  Rows rows{columns("KL at positions", e)};
  for (std::size_t part = 0; part < kEvalParts; ++part) {
    const auto edge = [&](std::size_t i) {
      const auto parts = static_cast<std::int64_t>(kEvalParts);
      return (static_cast<std::int64_t>(i) * e.context + parts - 1) / parts;
    };
    std::vector<std::string> row{fmt::format("{} to {}", edge(part), edge(part + 1) - 1)};
    bool any = false;
    for (const JudgedModel& m : e.models) {
      const double mean = m.score.divergence.by_position[part];
      any = any || !std::isnan(mean);
      row.push_back(small(mean));
    }
    if (any) rows.push_back(std::move(row));
  }
  fmt::print("\n");
  print_table(rows);
}

void print_layers(const Evaluation& e) {
  Rows rows{columns("error after layer", e)};
  for (std::size_t i = 0; i < e.models.front().score.layers.size(); ++i) {
    std::vector<std::string> row{std::to_string(i)};
    for (const JudgedModel& m : e.models) row.push_back(small(m.score.layers[i]));
    rows.push_back(std::move(row));
  }
  fmt::print("\n");
  print_table(rows);
}

Json or_null(double value) { return std::isfinite(value) ? Json(value) : Json(); }

Json model_json(const JudgedModel& m, bool judged) {
  const ModelScore& s = m.score;
  Json json{{"model", m.path},
            {"bytes", m.bytes != 0 ? Json(m.bytes) : Json()},
            {"bits_per_weight", m.bits > 0 ? Json(m.bits) : Json()},
            {"perplexity", or_null(s.perplexity)},
            {"error", or_null(s.error)},
            {"nll", or_null(s.nll)},
            {"tokens_per_second", m.tokens_per_second > 0 ? Json(m.tokens_per_second) : Json()}};
  if (m.k_bits != 0) {
    json["kv"] = m.name;
    json["k_bits"] = m.k_bits;
    json["v_bits"] = m.v_bits;
  }
  if (!judged) return json;
  const Divergence& d = s.divergence;
  json["kl"] = {{"mean", or_null(d.kl.mean)},
                {"error", or_null(d.kl.error)},
                {"median", d.kl.median},
                {"p90", d.kl.p90},
                {"p99", d.kl.p99},
                {"p999", d.kl.p999},
                {"max", d.kl.max}};
  json["kl_is_lower_bound"] = d.lower_bound;
  json["rms_dp"] = d.rms_dp;
  json["same_top1"] = d.top1;
  json["same_top5"] = d.top5;
  json["kl_by_position"] = Json::array();
  for (const double x : d.by_position) json["kl_by_position"].push_back(or_null(x));
  json["kl_histogram"] = d.histogram;
  if (!s.layers.empty()) {
    json["layers"] = Json::array();
    for (const double x : s.layers) json["layers"].push_back(or_null(x));
  }
  return json;
}

}  // namespace

Result<report::JudgedModel> judged_model(std::string path, std::string name, bool ran,
                                         const ModelScore& score, std::int64_t tokens) {
  report::JudgedModel m{.path = std::move(path), .name = std::move(name), .score = score};
  if (ran) {
    const auto described = inspect_model(m.path);
    if (!described) return described.status();
    m.bytes = described->bytes();
    m.bits = described->bits_per_weight().value_or(0);
  }
  if (score.seconds > 0) m.tokens_per_second = static_cast<double>(tokens) / score.seconds;
  return m;
}

void print_evaluation(const Evaluation& e) {
  print_scores(e);
  if (!e.judged) return;
  print_divergence(e);
  if (!e.sweep) print_positions(e);
  if (!e.models.front().score.layers.empty()) print_layers(e);
  if (e.models.front().score.divergence.lower_bound)
    fmt::print(
        "\nKL is a lower bound: exact over the teacher's likeliest tokens, all others as one\n");
}

Json models_json(const Evaluation& e) {
  Json json = Json::array();
  for (const JudgedModel& m : e.models) json.push_back(model_json(m, e.judged));
  return json;
}

Json teacher_json(const JudgedModel& teacher) { return model_json(teacher, false); }

}  // namespace bittern::cli
