#include "report/chart.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "report/eval_report.h"
#include "report/page.h"

namespace bittern::report {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++n;
  return n;
}

TEST(Chart, NumbersAreShort) {
  EXPECT_EQ(tick(0), "0");
  EXPECT_EQ(tick(1e-6), "1e-6");
  EXPECT_EQ(tick(1e-10), "1e-10");
  EXPECT_EQ(tick(0.001), "0.001");
  EXPECT_EQ(tick(2.5e7), "2.5e7");
  EXPECT_EQ(tick(0.30000000000000004), "0.3");
  EXPECT_EQ(number(NAN), "-");
  EXPECT_EQ(number(0.123456), "0.1235");
  EXPECT_EQ(escaped("<a href=\"x\">&\x01"), "&lt;a href=&quot;x&quot;&gt;&amp;?");
  EXPECT_EQ(escaped("a\xff"), "a\xef\xbf\xbd");
  EXPECT_EQ(shortened("abcdefghijklmnop", 11), "abcd...mnop");
  EXPECT_EQ(shortened("abc", 11), "abc");
}

TEST(Chart, DrawsWhateverItIsGiven) {
  const std::vector<double> hard = {0, -1, 1, 1e-30, 1e30, 5, NAN, INFINITY};
  for (const bool log : {false, true})
    for (const double a : hard)
      for (const double b : hard) {
        const Axis y{.label = "y", .log = log};
        const std::string line =
            line_chart({.x = {}, .y = y, .series = {{"s", {1, 2, 3}, {a, b, NAN}}}});
        const std::string scatter =
            scatter_chart({.x = {}, .y = y, .points = {{"one", 1, a, 0.1}, {"two", 1, b, 0.1}}});
        for (const std::string& svg : {line, scatter}) {
          EXPECT_EQ(svg.find("nan"), std::string::npos);
          EXPECT_EQ(svg.find("inf"), std::string::npos);
          EXPECT_EQ(count(svg, "<svg"), count(svg, "</svg>"));
          EXPECT_LT(svg.size(), 100000u);
        }
      }
  const std::string none = line_chart({});
  EXPECT_EQ(none.find("nan"), std::string::npos);
  EXPECT_EQ(legend({"one"}), "");
  EXPECT_EQ(count(legend({"one", "two"}), "<li>"), 2u);
}

TEST(Chart, NamesOfPointsDoNotMeet) {
  Scatter chart;
  for (int i = 0; i < 6; ++i) chart.points.push_back({"model-" + std::to_string(i), 100, 0.5, 0});
  const std::string svg = scatter_chart(chart);
  std::vector<std::pair<std::string, std::string>> places;
  for (std::size_t at = 0; (at = svg.find("class=\"name\"", at)) != svg.npos; ++at) {
    const std::size_t x = svg.find("x=\"", at), y = svg.find("y=\"", at);
    places.emplace_back(svg.substr(x, svg.find('"', x + 3) - x),
                        svg.substr(y, svg.find('"', y + 3) - y));
  }
  ASSERT_EQ(places.size(), 6u);
  std::sort(places.begin(), places.end());
  EXPECT_EQ(std::adjacent_find(places.begin(), places.end()), places.end());
}

TEST(Report, NamesTellModelsApart) {
  EXPECT_EQ(short_names({"a/b/m1", "c/m2/"}), (std::vector<std::string>{"m1", "m2"}));
  EXPECT_EQ(short_names({"a/m", "b/m"}), (std::vector<std::string>{"a/m", "b/m"}));
  EXPECT_EQ(short_names({"."}), std::vector<std::string>{"."});
  EXPECT_EQ(bin_edges(1).first, -8);
  EXPECT_EQ(bin_edges(kEvalBins - 1).first, 2);
}

TEST(Report, APageIsKnownByItsFirstLines) {
  Evaluation e{.context = 16};
  e.models.push_back({.path = "m", .name = "m"});
  const std::string page = eval_page(e);
  EXPECT_TRUE(is_eval_page(page));
  EXPECT_FALSE(is_eval_page("<!doctype html>\n<p>mine"));
  EXPECT_FALSE(Page::is_page(page, "bench"));
  EXPECT_TRUE(page.ends_with("</html>\n"));
}

}  // namespace
}  // namespace bittern::report
