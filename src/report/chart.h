// Plots as SVG elements for a page (report/page.h), whose style sheet gives them their colours.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bittern::report {

inline constexpr std::size_t kColours = 8;  // of series; then dashes tell them apart

std::string escaped(std::string_view text);        // for HTML; what is not UTF-8 is replaced
std::string number(double value, int digits = 4);  // with so many digits; "-" if not finite
std::string tick(double value);                    // short: "0.001", "1e-6", "250"
std::string shortened(std::string_view text, std::size_t most);  // by an ellipsis in the middle

struct Axis {
  std::string label{};
  bool log = false;
  bool from_zero = false;
  bool whole = false;        // ticks at whole numbers only
  double low = 0, high = 0;  // shows exactly this, if high is above low; not of a log axis
};

struct Series {
  std::string name{};
  std::vector<double> x{}, y{};  // NaN in y is a gap
};

// Lines with a point at each number. A log axis leaves out what is not positive.
struct LineChart {
  Axis x{}, y{};
  std::vector<Series> series{};
};
std::string line_chart(const LineChart& chart);

// Bars over [edges[i], edges[i + 1]); with several series their outlines.
struct Histogram {
  Axis x{}, y{};
  std::vector<double> edges{};  // on a log axis their logarithms
  struct Bars {
    std::string name{};
    std::vector<double> heights{};
  };
  std::vector<Bars> series{};
};
std::string histogram_chart(const Histogram& chart);

// Points with a name and an error bar each.
struct Scatter {
  Axis x{}, y{};
  struct Point {
    std::string name{};
    double x = 0, y = 0, error = 0;
  };
  std::vector<Point> points{};
};
std::string scatter_chart(const Scatter& chart);

// Numbers in cells, darker where larger, by their logarithm.
struct HeatMap {
  std::string rows_label{}, columns_label{};
  std::vector<std::string> rows{}, columns{};
  std::vector<double> values{};  // row by row
};
std::string heat_map(const HeatMap& map);

// Colour, or colour and dash, of each name. Nothing for a single one.
std::string legend(const std::vector<std::string>& names);

}  // namespace bittern::report
