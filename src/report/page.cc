#include "report/page.h"

#include "report/chart.h"

namespace bittern::report {
namespace {

constexpr std::string_view kStyle = R"css(
:root { color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --text: #1d2127; --muted: #5d6673; --rule: #e2e5ea;
  --grid: #eceef2; --axis: #98a1ae; --head: #f7f8fa;
  --c0: #2563c9; --c1: #d2571a; --c2: #23823f; --c3: #8e3fb0; --c4: #c22f45; --c5: #0c7a8c;
  --c6: #84660c; --c7: #5b6675; }
@media (prefers-color-scheme: dark) { :root {
  --page: #13161b; --card: #1b1f26; --text: #e6e9ee; --muted: #9aa4b2; --rule: #2e343e;
  --grid: #272c35; --axis: #6d7786; --head: #21262e;
  --c0: #6ea4ff; --c1: #ff9a5c; --c2: #5dcf7d; --c3: #cf8bee; --c4: #ff7f8f; --c5: #4cc6d8;
  --c6: #dcb54a; --c7: #a7b2c1; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
.subtitle { color: var(--muted); margin: 4px 0 20px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 20px 22px; margin: 18px 0; }
section p { margin: 2px 0 12px; color: var(--muted); max-width: 80ch; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 12px 24px;
  margin: 0; }
dt { color: var(--muted); font-size: 12px; text-transform: uppercase; letter-spacing: .04em; }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 14px; }
th, td { padding: 7px 9px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
th { background: var(--head); color: var(--muted); font-weight: 600; font-size: 12px; }
th:first-child, td:first-child { text-align: left; white-space: normal;
  overflow-wrap: anywhere; min-width: 9em; }
tr:last-child td { border-bottom: 0; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--muted); }
details .scroll { margin-top: 8px; }
figure { margin: 0; } figure > svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 4px 0 6px; padding: 0;
  list-style: none; font-size: 13px; }
.legend li { overflow-wrap: anywhere; }
.legend svg { width: 26px; height: 12px; margin-right: 6px; vertical-align: -1px; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--muted); font-variant-numeric: tabular-nums; }
svg .label { font-weight: 600; } svg .name, svg .value { fill: var(--text); }
svg .value { font-size: 13px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .leader { stroke: var(--axis); stroke-width: .7; }
svg .error { stroke-width: 1.5; } svg .bar { stroke: none; } svg .point { stroke: none; }
svg .area { stroke: none; fill-opacity: .07; } svg .cell { fill: var(--c1); }
.d1 { stroke-dasharray: 7 4; } .d2 { stroke-dasharray: 2 3; }
footer { color: var(--muted); font-size: 13px; }
@media print { body { background: none; } section { break-inside: avoid; } }
)css";

// Lines have a stroke of the series' colour, what is filled has it as its filling.
std::string series_style() {
  std::string out;
  for (std::size_t i = 0; i < kColours; ++i) {
    const std::string n = std::to_string(i);
    out += ".line.s" + n + ", .error.s" + n + " { stroke: var(--c" + n + "); } .point.s" + n +
           ", .bar.s" + n + ", .area.s" + n + " { fill: var(--c" + n + "); }\n";
  }
  return out;
}

std::string mark(std::string_view kind) {
  return "<!doctype html>\n<!-- written by bittern " + std::string(kind) + " -->\n";
}

}  // namespace

Page::Page(std::string_view kind, std::string_view title, std::string_view subtitle)
    : html_(mark(kind)) {
  html_ += "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html_ += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>";
  html_ += escaped(title) + "</title>\n<style>" + std::string(kStyle) + series_style();
  html_ += "</style>\n</head>\n<body>\n<main>\n<h1>" + escaped(title) + "</h1>\n";
  html_ += "<p class=\"subtitle\">" + escaped(subtitle) + "</p>\n";
}

void Page::facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  html_ += "<dl>\n";
  for (const auto& [name, value] : facts)
    html_ += "<div><dt>" + escaped(name) + "</dt><dd>" + escaped(value) + "</dd></div>\n";
  html_ += "</dl>\n";
}

void Page::section(std::string_view title, std::string_view text) {
  if (open_) html_ += "</section>\n";
  html_ += "<section>\n";
  if (!title.empty()) html_ += "<h2>" + escaped(title) + "</h2>\n";
  open_ = true;
  if (!text.empty()) paragraph(text);
}

void Page::paragraph(std::string_view text) { html_ += "<p>" + std::string(text) + "</p>\n"; }

void Page::plot(std::string_view svg, std::string_view legend) {
  html_ += "<figure>\n" + std::string(legend) + std::string(svg) + "</figure>\n";
}

void Page::table(const std::vector<std::string>& head,
                 const std::vector<std::vector<std::string>>& rows, std::string_view folded) {
  if (!folded.empty()) html_ += "<details><summary>" + escaped(folded) + "</summary>\n";
  html_ += "<div class=\"scroll\"><table>\n<thead><tr>";
  for (const std::string& cell : head) html_ += "<th>" + escaped(cell) + "</th>";
  html_ += "</tr></thead>\n<tbody>\n";
  for (const auto& row : rows) {
    html_ += "<tr>";
    for (const std::string& cell : row) html_ += "<td>" + escaped(cell) + "</td>";
    html_ += "</tr>\n";
  }
  html_ += "</tbody></table></div>\n";
  if (!folded.empty()) html_ += "</details>\n";
}

std::string Page::finish() && {
  if (open_) html_ += "</section>\n";
  html_ += "</main>\n</body>\n</html>\n";
  return std::move(html_);
}

bool Page::is_page(std::string_view text, std::string_view kind) {
  return text.starts_with(mark(kind));
}

}  // namespace bittern::report
