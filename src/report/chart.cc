#include "report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "text/utf8.h"

namespace bittern::report {
namespace {

// In units of the view box, which are CSS pixels at full width.
constexpr double kWidth = 960, kHeight = 340;
constexpr double kLeft = 64, kRight = 20, kTop = 34, kBottom = 50;
constexpr double kLetter = 6.7;  // the mean width of one in 12 px, rather more than less

std::string px(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string series_class(std::size_t i) {
  std::string text = "s" + std::to_string(i % kColours);
  if (const std::size_t dash = i / kColours % 3; dash != 0) text += " d" + std::to_string(dash);
  return text;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const char* kind = "tick") {
  return "<text class=\"" + std::string(kind) + "\" x=\"" + px(x) + "\" y=\"" + px(y) +
         "\" text-anchor=\"" + anchor + "\">" + text + "</text>\n";
}

std::string line(double x0, double y0, double x1, double y1, const char* kind) {
  return "<line class=\"" + std::string(kind) + "\" x1=\"" + px(x0) + "\" y1=\"" + px(y0) +
         "\" x2=\"" + px(x1) + "\" y2=\"" + px(y1) + "\"/>\n";
}

// 1, 2 or 5 times a power of ten: the largest at most `x`, or the smallest at least `x`.
double round_number(double x, bool up) {
  const double power = std::pow(10.0, std::floor(std::log10(x)));
  const double m = x / power;
  constexpr double kClose = 1e-9;
  const double steps[] = {1, 2, 5, 10};
  double best = up ? 10 : 1;
  for (const double s : steps) {
    if (up && s >= m - kClose) {
      best = s;
      break;
    }
    if (!up && s <= m + kClose) best = s;
  }
  return best * power;
}

// From numbers to places on the paper.
class Scale {
 public:
  Scale(const Axis& axis, double low, double high, double from, double to)
      : log_(axis.log), from_(from), to_(to) {
    if (!(low <= high)) low = log_ ? 0.1 : 0, high = 1;  // nothing to show
    if (log_) {
      low = round_number(low, false);
      high = round_number(high, true);
      if (low == high) high = round_number(high * 1.5, true);
      low_ = std::log10(low);
      high_ = std::log10(high);
      const bool many = high_ - low_ > 2.5;
      const double every = std::max(1.0, std::ceil((high_ - low_) / 8));
      for (double decade = std::floor(low_); decade <= high_; decade += 1)
        for (const double m : {1.0, 2.0, 5.0}) {
          if (m != 1 && many) continue;
          if (m == 1 && std::fmod(std::abs(decade), every) != 0) continue;
          const double value = m * std::pow(10.0, decade);
          if (std::log10(value) >= low_ - 1e-9 && std::log10(value) <= high_ + 1e-9)
            ticks_.push_back(value);
        }
    } else {
      const bool exact = axis.high > axis.low;
      if (exact) low = axis.low, high = axis.high;
      if (axis.from_zero) low = std::min(low, 0.0);
      if (low == high) high = low + (low == 0 ? 1 : std::abs(low) * 0.1);
      double step = round_number((high - low) / 5, true);
      if (axis.whole) step = std::max(1.0, std::round(step));
      if (!axis.whole && !exact) {
        if (!axis.from_zero) low = std::floor(low / step) * step;
        high = std::ceil(high / step - 1e-9) * step;
      }
      low_ = low;
      high_ = high;
      for (double i = std::ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1)
        ticks_.push_back(i * step);
    }
  }
  double operator()(double value) const {
    const double v = log_ ? std::log10(value) : value;
    return from_ + (v - low_) / (high_ - low_) * (to_ - from_);
  }
  bool shows(double value) const { return std::isfinite(value) && (!log_ || value > 0); }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  bool log_;
  double from_, to_, low_ = 0, high_ = 1;
  std::vector<double> ticks_;
};

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

std::string svg(double height, const std::string& name, const std::string& inside) {
  return "<svg viewBox=\"0 0 " + px(kWidth) + " " + px(height) + "\" role=\"img\" aria-label=\"" +
         escaped(name) + "\">\n" + inside + "</svg>\n";
}

// Grid, ticks and labels.
std::string frame(const Axis& x, const Axis& y, const Scale& sx, const Scale& sy,
                  const std::vector<std::pair<double, std::string>>& x_ticks) {
  std::string out;
  for (const double t : sy.ticks()) {
    out += line(kLeft, sy(t), kWidth - kRight, sy(t), "grid");
    out += text_at(kLeft - 8, sy(t) + 4, "end", tick(t));
  }
  double last = -1e9;
  for (const auto& [value, label] : x_ticks) {
    const double at = sx(value), half = kLetter * static_cast<double>(label.size()) / 2;
    out += line(at, kHeight - kBottom, at, kHeight - kBottom + 5, "axis");
    if (at - half < last + 6) continue;  // it would touch the one before
    out += text_at(at, kHeight - kBottom + 19, "middle", escaped(label));
    last = at + half;
  }
  out += line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "axis");
  out += text_at((kLeft + kWidth - kRight) / 2, kHeight - 10, "middle", escaped(x.label), "label");
  out += text_at(8, 16, "start", escaped(y.label), "label");
  return out;
}

std::vector<std::pair<double, std::string>> plain_ticks(const Scale& scale) {
  std::vector<std::pair<double, std::string>> ticks;
  for (const double t : scale.ticks()) ticks.emplace_back(t, tick(t));
  return ticks;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text::repaired(text)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 32 || c == 127 ? '?' : c;
    }
  }
  return out;
}

std::string number(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string tick(double value) {
  std::string text = number(std::abs(value) < 1e-12 ? 0 : value, 6);
  if (const std::size_t e = text.find('e'); e != text.npos) {  // 1e-06 is 1e-6
    std::size_t digits = e + 1;
    if (text[digits] == '+') text.erase(digits, 1);
    if (text[digits] == '-') ++digits;
    while (text[digits] == '0' && digits + 1 < text.size()) text.erase(digits, 1);
  }
  return text;
}

std::string shortened(std::string_view text, std::size_t most) {
  if (text.size() <= most || most < 8) return std::string(text);
  const std::size_t tail = (most - 3) / 2, head = most - 3 - tail;
  return std::string(text.substr(0, head)) + "..." + std::string(text.substr(text.size() - tail));
}

std::string legend(const std::vector<std::string>& names) {
  if (names.size() < 2) return {};
  std::string out = "<ul class=\"legend\">\n";
  for (std::size_t i = 0; i < names.size(); ++i)
    out += "<li><svg viewBox=\"0 0 26 12\"><line class=\"line " + series_class(i) +
           "\" x1=\"1\" y1=\"6\" x2=\"25\" y2=\"6\"/></svg>" + escaped(names[i]) + "</li>\n";
  return out + "</ul>\n";
}

std::string line_chart(const LineChart& chart) {
  Range rx, ry;
  for (const Series& s : chart.series)
    for (std::size_t i = 0; i < s.x.size(); ++i) {
      if (!std::isfinite(s.y[i]) || (chart.y.log && s.y[i] <= 0)) continue;
      rx.add(s.x[i]);
      ry.add(s.y[i]);
    }
  const Scale sx(chart.x, rx.low, rx.high, kLeft + 8, kWidth - kRight - 8);
  const Scale sy(chart.y, ry.low, ry.high, kHeight - kBottom, kTop);
  std::string out = frame(chart.x, chart.y, sx, sy, plain_ticks(sx));
  for (std::size_t k = 0; k < chart.series.size(); ++k) {
    const Series& s = chart.series[k];
    std::string path, points;
    bool pen = false;
    for (std::size_t i = 0; i < s.x.size(); ++i) {
      if (!sy.shows(s.y[i])) {
        pen = false;
        continue;
      }
      const double x = sx(s.x[i]), y = sy(s.y[i]);
      path += (pen ? "L" : "M") + px(x) + " " + px(y);
      pen = true;
      points += "<circle class=\"point " + series_class(k) + "\" cx=\"" + px(x) + "\" cy=\"" +
                px(y) + "\" r=\"3\"><title>" + (s.name.empty() ? "" : escaped(s.name) + ": ") +
                escaped(chart.x.label) + " " + tick(s.x[i]) + ", " + number(s.y[i]) +
                "</title></circle>\n";
    }
    out += "<path class=\"line " + series_class(k) + "\" d=\"" + path + "\"/>\n" + points;
  }
  return svg(kHeight, chart.y.label, out);
}

std::string histogram_chart(const Histogram& chart) {
  double most = 0;
  for (const auto& s : chart.series)
    for (const double h : s.heights) most = std::max(most, h);
  const Axis x{.label = chart.x.label, .whole = true};
  const Scale sx(x, chart.edges.front(), chart.edges.back(), kLeft, kWidth - kRight);
  const Scale sy(chart.y, 0, most, kHeight - kBottom, kTop);
  std::vector<std::pair<double, std::string>> ticks;
  for (const double t : sx.ticks())
    ticks.emplace_back(t, tick(chart.x.log ? std::pow(10.0, t) : t));
  std::string out = frame(chart.x, chart.y, sx, sy, ticks);
  for (std::size_t k = 0; k < chart.series.size(); ++k) {
    const auto& heights = chart.series[k].heights;
    if (chart.series.size() == 1) {
      for (std::size_t i = 0; i < heights.size(); ++i) {
        const double left = sx(chart.edges[i]) + 1, right = sx(chart.edges[i + 1]) - 1;
        const double top = sy(heights[i]);
        if (heights[i] <= 0) continue;
        out += "<rect class=\"bar s0\" x=\"" + px(left) + "\" y=\"" + px(top) + "\" width=\"" +
               px(right - left) + "\" height=\"" + px(kHeight - kBottom - top) + "\"><title>" +
               number(heights[i], 3) + "</title></rect>\n";
      }
      continue;
    }
    std::string path = "M" + px(sx(chart.edges[0])) + " " + px(sy(0));
    for (std::size_t i = 0; i < heights.size(); ++i)
      path += "L" + px(sx(chart.edges[i])) + " " + px(sy(heights[i])) + "L" +
              px(sx(chart.edges[i + 1])) + " " + px(sy(heights[i]));
    path += "L" + px(sx(chart.edges.back())) + " " + px(sy(0));
    out += "<path class=\"area " + series_class(k) + "\" d=\"" + path +
           "Z\"/>\n<path class=\"line " + series_class(k) + "\" d=\"" + path + "\"><title>" +
           escaped(chart.series[k].name) + "</title></path>\n";
  }
  return svg(kHeight, chart.y.label, out);
}

namespace {

struct Box {
  double left, top, right, bottom;
  bool meets(const Box& o) const {
    return left < o.right && o.left < right && top < o.bottom && o.top < bottom;
  }
  bool inside() const {
    return left >= kLeft && right <= kWidth - 4 && top >= kTop - 14 && bottom <= kHeight - kBottom;
  }
};

}  // namespace

std::string scatter_chart(const Scatter& chart) {
  Range rx, ry;
  for (const auto& p : chart.points) {
    rx.add(p.x);
    if (!std::isfinite(p.y) || (chart.y.log && p.y <= 0)) continue;
    for (const double y : {p.y, p.y - p.error, p.y + p.error})
      if (!chart.y.log || y > 0) ry.add(y);
  }
  // Room for names beside the outermost points.
  const double span = rx.high > rx.low ? rx.high - rx.low : std::max(rx.high, 1.0);
  const Scale sx(chart.x, std::max(0.0, rx.low - 0.12 * span), rx.high + 0.12 * span, kLeft,
                 kWidth - kRight);
  const Scale sy(chart.y, ry.low, ry.high, kHeight - kBottom, kTop);
  std::string out = frame(chart.x, chart.y, sx, sy, plain_ticks(sx));
  std::vector<Box> taken;
  for (const auto& p : chart.points)
    if (sy.shows(p.y)) taken.push_back({sx(p.x) - 6, sy(p.y) - 6, sx(p.x) + 6, sy(p.y) + 6});
  for (std::size_t k = 0; k < chart.points.size(); ++k) {
    const auto& p = chart.points[k];
    if (!sy.shows(p.y)) continue;
    const double x = sx(p.x), y = sy(p.y);
    if (p.error > 0 && (!chart.y.log || p.y - p.error > 0))
      out += line(x, sy(p.y - p.error), x, sy(p.y + p.error), ("error " + series_class(k)).c_str());
    out += "<circle class=\"point " + series_class(k) + "\" cx=\"" + px(x) + "\" cy=\"" + px(y) +
           "\" r=\"5\"><title>" + escaped(p.name) + ": " + tick(p.x) + ", " + number(p.y) +
           "</title></circle>\n";
    // The first place for the name that nothing else has: right, left, then further up and down.
    const std::string name = shortened(p.name, 34);
    const double width = kLetter * static_cast<double>(name.size());
    for (int step = 0; step < 24; ++step) {
      const int side = step % 2, turn = step / 2;
      const double shift = 15.0 * ((turn + 1) / 2) * (turn % 2 == 0 ? 1 : -1);
      const double left = side == 0 ? x + 10 : x - 10 - width;
      const Box box{left, y + shift - 8, left + width, y + shift + 6};
      if (!box.inside() ||
          std::any_of(taken.begin(), taken.end(), [&](const Box& b) { return b.meets(box); }))
        continue;
      out += text_at(left, y + shift + 4, "start", escaped(name), "name");
      if (turn > 1) out += line(x, y, side == 0 ? left - 2 : left + width + 2, y + shift, "leader");
      taken.push_back(box);
      break;
    }
  }
  return svg(kHeight, chart.y.label, out);
}

std::string heat_map(const HeatMap& map) {
  constexpr double kCellWidth = 180, kCellHeight = 44, kX = 130, kY = 56;
  Range range;
  for (const double v : map.values)
    if (v > 0 && std::isfinite(v)) range.add(std::log10(v));
  std::string out;
  out += text_at(kX + kCellWidth * static_cast<double>(map.columns.size()) / 2, 18, "middle",
                 escaped(map.columns_label), "label");
  out += text_at(
      8, kY + kCellHeight / 2 + 4 + kCellHeight * (static_cast<double>(map.rows.size()) - 1) / 2,
      "start", escaped(map.rows_label), "label");
  for (std::size_t c = 0; c < map.columns.size(); ++c)
    out += text_at(kX + kCellWidth * (static_cast<double>(c) + 0.5), kY - 10, "middle",
                   escaped(map.columns[c]));
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const double y = kY + kCellHeight * static_cast<double>(r);
    out += text_at(kX - 12, y + kCellHeight / 2 + 4, "end", escaped(map.rows[r]));
    for (std::size_t c = 0; c < map.columns.size(); ++c) {
      const double v = map.values[r * map.columns.size() + c];
      const double x = kX + kCellWidth * static_cast<double>(c);
      double shade = 0;
      if (v > 0 && range.high > range.low)
        shade = (std::log10(v) - range.low) / (range.high - range.low);
      out += "<rect class=\"cell\" x=\"" + px(x + 1) + "\" y=\"" + px(y + 1) + "\" width=\"" +
             px(kCellWidth - 2) + "\" height=\"" + px(kCellHeight - 2) +
             "\" rx=\"4\" fill-opacity=\"" + number(0.06 + 0.5 * shade, 3) + "\"/>\n";
      out += text_at(x + kCellWidth / 2, y + kCellHeight / 2 + 4, "middle", number(v, 3), "value");
    }
  }
  return svg(kY + kCellHeight * static_cast<double>(map.rows.size()) + 10, map.rows_label, out);
}

}  // namespace bittern::report
