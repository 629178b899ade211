#include "report/eval_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <set>

#include "report/chart.h"
#include "report/page.h"

namespace bittern::report {
namespace {

constexpr const char* kKind = "eval";

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string size_text(std::uint64_t bytes) {
  const auto x = static_cast<double>(bytes);
  if (bytes < 1000) return std::to_string(bytes) + " B";
  if (x < 1e6) return fixed(x / 1e3, 1) + " kB";
  if (x < 1e9) return fixed(x / 1e6, 1) + " MB";
  return fixed(x / 1e9, 2) + " GB";
}

std::string with_error(double value, double error, int digits) {
  return fixed(value, digits) + " \xc2\xb1 " + fixed(error, digits);  // a plus-minus sign
}

// Lines of every pair of bits would hide each other: of a sweep those with equal bits are drawn.
std::vector<const JudgedModel*> drawn(const Evaluation& e) {
  std::vector<const JudgedModel*> models;
  for (const JudgedModel& m : e.models)
    if (!e.sweep || m.k_bits == m.v_bits) models.push_back(&m);
  return models;
}

std::vector<std::string> names_of(const std::vector<const JudgedModel*>& models) {
  std::vector<std::string> names;
  for (const JudgedModel* m : models) names.push_back(m->name);
  return names;
}

constexpr const char* kEqualBits = " Caches with equal bits for keys and values are drawn.";

// Numbers of more than a decade want a log axis.
Axis quality_axis(std::string label, const std::vector<double>& values) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  bool positive = true;
  for (const double v : values) {
    if (!std::isfinite(v)) continue;
    positive = positive && v > 0;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  const bool log = positive && high > 12 * low;
  return {.label = std::move(label) + (log ? ", log scale" : ""), .log = log, .from_zero = !log};
}

void add_summary(const Evaluation& e, Page& page) {
  page.section("Summary",
               e.judged
                   ? "Perplexity: lower is better. KL: mean Kullback-Leibler divergence of the "
                     "model's predictions from the teacher's, in nats per token; 0 means the "
                     "same predictions."
                   : "Perplexity: lower is better.");
  std::vector<std::string> head{e.sweep ? "cache" : "model"};
  if (!e.sweep) head.insert(head.end(), {"size", "bits/weight"});
  head.push_back("perplexity");
  if (e.judged) head.insert(head.end(), {"mean KL", "same top 1"});
  head.push_back("tokens/s");
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const JudgedModel& m, bool judged, const std::string& name) {
    std::vector<std::string> row{name};
    if (!e.sweep) {
      row.push_back(m.bytes != 0 ? size_text(m.bytes) : "-");
      row.push_back(m.bits > 0 ? fixed(m.bits, 2) : "-");
    }
    row.push_back(with_error(m.score.perplexity, m.score.error, 4));
    const Divergence& d = m.score.divergence;
    if (e.judged) {
      row.push_back(judged ? with_error(d.kl.mean, d.kl.error, 6) : "-");
      row.push_back(judged ? fixed(100 * d.top1, 2) + " %" : "-");
    }
    row.push_back(m.tokens_per_second > 0 ? fixed(m.tokens_per_second, 1) : "-");
    rows.push_back(std::move(row));
  };
  for (const JudgedModel& m : e.models) add(m, e.judged, m.name);
  if (e.teacher) add(*e.teacher, false, e.teacher->name + " (teacher)");
  page.table(head, rows);
}

void add_size_plot(const Evaluation& e, Page& page) {
  if (e.models.size() < 2 || e.sweep) return;
  std::set<std::uint64_t> sizes;
  for (const JudgedModel& m : e.models) sizes.insert(m.bytes);
  if (sizes.size() < 2) return;
  Scatter chart{.x = {.label = "size of the weights in MB"}};
  std::vector<double> values;
  for (const JudgedModel& m : e.models) {
    const ModelScore& s = m.score;
    const double y = e.judged ? s.divergence.kl.mean : s.perplexity;
    values.push_back(y);
    chart.points.push_back({m.name, static_cast<double>(m.bytes) / 1e6, y,
                            e.judged ? s.divergence.kl.error : s.error});
  }
  chart.y = quality_axis(e.judged ? "mean KL in nats" : "perplexity", values);
  if (!chart.y.log) chart.y.from_zero = e.judged;
  page.section("Size against quality",
               "Down and to the left is better. Bars show one standard error.");
  page.plot(scatter_chart(chart));
}

void add_sweep_plot(const Evaluation& e, Page& page) {
  if (!e.sweep) return;
  HeatMap map{.rows_label = "key bits", .columns_label = "value bits"};
  std::set<int> k_bits, v_bits;
  for (const JudgedModel& m : e.models) {
    k_bits.insert(m.k_bits);
    v_bits.insert(m.v_bits);
  }
  for (const int k : k_bits) map.rows.push_back(std::to_string(k));
  for (const int v : v_bits) map.columns.push_back(std::to_string(v));
  for (const int k : k_bits)
    for (const int v : v_bits) {
      double value = std::numeric_limits<double>::quiet_NaN();
      for (const JudgedModel& m : e.models)
        if (m.k_bits == k && m.v_bits == v) value = m.score.divergence.kl.mean;
      map.values.push_back(value);
    }
  page.section("Bits of the cache",
               "Mean KL in nats of the model with a compressed cache, from the same model with an "
               "f16 cache.");
  page.plot(heat_map(map));
}

void add_kl(const Evaluation& e, Page& page) {
  if (!e.judged) return;
  page.section("Distribution of KL over positions",
               std::string("Each position that is scored has its own KL. The mean hides rare "
                           "positions that are far off; the highest percentiles show them.") +
                   (e.sweep ? kEqualBits : ""));
  const std::vector<const JudgedModel*> models = drawn(e);
  // Only the bins that somebody uses.
  std::size_t first = kEvalBins, last = 0;
  for (const JudgedModel* m : models)
    for (std::size_t i = 0; i < m->score.divergence.histogram.size(); ++i)
      if (m->score.divergence.histogram[i] != 0) {
        first = std::min(first, i);
        last = std::max(last, i);
      }
  if (first <= last) {
    Histogram chart{.x = {.label = "KL in nats, log scale", .log = true},
                    .y = {.label = "share of positions in %", .from_zero = true}};
    for (std::size_t i = first; i <= last; ++i) chart.edges.push_back(bin_edges(i).first);
    chart.edges.push_back(bin_edges(last).second);
    for (const JudgedModel* m : models) {
      const auto& bins = m->score.divergence.histogram;
      double all = 0;
      for (const std::uint64_t count : bins) all += static_cast<double>(count);
      Histogram::Bars bars{.name = m->name};
      for (std::size_t i = first; i <= last; ++i)
        bars.heights.push_back(100 * static_cast<double>(bins[i]) / std::max(all, 1.0));
      chart.series.push_back(std::move(bars));
    }
    page.plot(histogram_chart(chart), legend(names_of(models)));
    if (first == 0) page.paragraph("The leftmost bin holds everything below 1e-8.");
  }
  std::vector<std::vector<std::string>> rows;
  for (const JudgedModel& m : e.models) {
    const Divergence& d = m.score.divergence;
    rows.push_back({m.name, number(d.kl.median), number(d.kl.p90), number(d.kl.p99),
                    number(d.kl.p999), number(d.kl.max), fixed(100 * d.rms_dp, 3) + " %",
                    fixed(100 * d.top1, 2) + " %", fixed(100 * d.top5, 2) + " %"});
  }
  page.table({e.sweep ? "cache" : "model", "median", "90 %", "99 %", "99.9 %", "max", "RMS of dp",
              "same top 1", "same top 5"},
             rows);
}

void add_positions(const Evaluation& e, Page& page) {
  if (!e.judged) return;
  LineChart chart{
      .x = {.label = "position in the context, in tokens", .high = static_cast<double>(e.context)},
      .y = {.label = "mean KL in nats", .from_zero = true}};
  std::vector<double> values;
  const double width = static_cast<double>(e.context) / kEvalParts;
  const std::vector<const JudgedModel*> models = drawn(e);
  for (const JudgedModel* m : models) {
    Series s{.name = m->name};
    const auto& means = m->score.divergence.by_position;
    for (std::size_t i = 0; i < means.size(); ++i) {
      s.x.push_back((static_cast<double>(i) + 0.5) * width);
      s.y.push_back(means[i]);
      values.push_back(means[i]);
    }
    chart.series.push_back(std::move(s));
  }
  chart.y = quality_axis("mean KL in nats", values);
  page.section("KL by position",
               std::string("Mean KL in equal parts of the context. A line that rises says that "
                           "errors add up over the length of a text.") +
                   (e.sweep ? kEqualBits : ""));
  page.plot(line_chart(chart), legend(names_of(models)));
}

void add_layers(const Evaluation& e, Page& page) {
  if (e.models.empty() || e.models.front().score.layers.empty()) return;
  LineChart chart{.x = {.label = "layer", .whole = true}};
  std::vector<double> values;
  std::vector<std::string> head{"layer"};
  std::vector<std::vector<std::string>> rows(e.models.front().score.layers.size());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].push_back(std::to_string(i));
  for (const JudgedModel& m : e.models) {
    head.push_back(m.name);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].push_back(number(m.score.layers[i]));
  }
  const std::vector<const JudgedModel*> models = drawn(e);
  for (const JudgedModel* m : models) {
    Series s{.name = m->name};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      s.x.push_back(static_cast<double>(i));
      s.y.push_back(m->score.layers[i]);
      values.push_back(m->score.layers[i]);
    }
    chart.series.push_back(std::move(s));
  }
  chart.y = quality_axis("relative error", values);
  page.section("Error along the depth",
               std::string("Squared distance of the residual stream after each layer from the "
                           "teacher's, relative to the teacher's squared length; the mean over "
                           "all positions scored. A steep step names the layer that adds the "
                           "error.") +
                   (e.sweep ? kEqualBits : ""));
  page.plot(line_chart(chart), legend(names_of(models)));
  page.table(head, rows, "Numbers of all layers");
}

}  // namespace

std::vector<std::string> short_names(const std::vector<std::string>& paths) {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const std::string& path : paths) {
    std::string name = path;
    while (name.size() > 1 && name.back() == '/') name.pop_back();
    name.erase(0, name.rfind('/') + 1);
    if (name.empty() || name == "." || name == ".." || !seen.insert(name).second) return paths;
    names.push_back(std::move(name));
  }
  return names;
}

std::pair<double, double> bin_edges(std::size_t i) {
  const double low = -8.5 + 0.5 * static_cast<double>(i);
  return {low, low + 0.5};
}

std::string eval_page(const Evaluation& e) {
  std::string title;
  if (e.sweep) {
    title = "Compressed caches of " + short_names({e.models.front().path}).front();
  } else if (e.models.size() == 1) {
    title = e.models.front().name;
  } else {
    title = std::to_string(e.models.size()) + " models";
  }
  if (e.judged && !e.sweep && e.teacher) title += " against " + e.teacher->name;
  Page page(kKind, title, "Evaluation by bittern eval");
  page.section("");
  page.facts(e.facts);
  if (e.judged && e.models.front().score.divergence.lower_bound)
    page.paragraph(
        "KL is computed from a file of the teacher's targets: exactly over its likeliest tokens, "
        "and with all others as one. It is a lower bound of the true KL.");
  add_evaluation(e, page);
  return std::move(page).finish();
}

void add_evaluation(const Evaluation& e, Page& page) {
  add_summary(e, page);
  add_size_plot(e, page);
  add_sweep_plot(e, page);
  add_kl(e, page);
  add_positions(e, page);
  add_layers(e, page);
}

bool is_eval_page(std::string_view text) { return Page::is_page(text, kKind); }

}  // namespace bittern::report
