#include "report/distill_report.h"

#include <cmath>

#include "report/chart.h"
#include "report/page.h"

namespace bittern::report {
namespace {

constexpr const char* kKind = "distill";

void add_curves(const DistillReport& report, Page& page) {
  if (report.points.size() < 2) return;
  LineChart chart{.x = {.label = "step", .from_zero = true},
                  .y = {.label = "mean KL in nats", .from_zero = true}};
  Series train{.name = "learned from"}, held_out{.name = "held out"};
  for (const DistillPoint& point : report.points) {
    const auto step = static_cast<double>(point.step);
    train.x.push_back(step);
    train.y.push_back(point.train_kl);
    held_out.x.push_back(step);
    held_out.y.push_back(point.validation_kl);
  }
  chart.series = {held_out, train};
  page.section("Learning",
               "KL of the student's predictions from the teacher's. On the text that is learned "
               "from: the mean since the point before. The best step on the text that was held "
               "out is what was written: step " +
                   std::to_string(report.best_step) + ".");
  page.plot(line_chart(chart), legend({held_out.name, train.name}));
  std::vector<std::vector<std::string>> rows;
  for (const DistillPoint& point : report.points)
    rows.push_back(
        {std::to_string(point.step), number(point.train_kl), number(point.validation_kl)});
  page.table({"step", "KL, learned from", "KL, held out"}, rows, "Numbers of all points");
}

void add_rates(const DistillReport& report, Page& page) {
  if (report.trials.empty()) return;
  page.section("Rate",
               "Short runs from the same start; the best on the text that was held out "
               "was taken.");
  std::vector<std::vector<std::string>> rows;
  for (const DistillTrial& trial : report.trials)
    rows.push_back({number(trial.rate) + (trial.rate == report.rate ? " (taken)" : ""),
                    number(trial.validation_kl)});
  page.table({"rate", "KL, held out"}, rows);
}

void add_samples(const DistillReport& report, Page& page) {
  if (report.samples.empty()) return;
  page.section("How they go on",
               "After the first words of texts that were held out, each with its likeliest token.");
  for (const DistillSample& sample : report.samples) {
    page.paragraph("<b>" + escaped(sample.prompt) + "</b> ...");
    for (const auto& [name, text] :
         {std::pair("teacher", &sample.teacher), std::pair("calibrated", &sample.start),
          std::pair("distilled", &sample.result)})
      page.paragraph("<i>" + std::string(name) + ":</i> " + escaped(*text));
  }
}

}  // namespace

std::string distill_page(const DistillReport& report, const Evaluation& evaluation) {
  Page page(kKind, short_names({report.output.output}).front(), "Distilled by bittern distill");
  page.section("");
  page.facts(evaluation.facts);
  add_curves(report, page);
  add_rates(report, page);
  add_evaluation(evaluation, page);
  add_samples(report, page);
  return std::move(page).finish();
}

bool is_distill_page(std::string_view text) { return Page::is_page(text, kKind); }

}  // namespace bittern::report
