// One HTML page that needs no other file: sections of text, tables and plots.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bittern::report {

class Page {
 public:
  // `kind` names the command that writes it, for is_page.
  Page(std::string_view kind, std::string_view title, std::string_view subtitle);

  void facts(const std::vector<std::pair<std::string, std::string>>& facts);
  void section(std::string_view title, std::string_view text = {});
  void paragraph(std::string_view text);  // HTML
  void plot(std::string_view svg, std::string_view legend = {});
  // The first column is text, the others are numbers. `folded`: shown when it is opened.
  void table(const std::vector<std::string>& head,
             const std::vector<std::vector<std::string>>& rows, std::string_view folded = {});
  std::string finish() &&;

  // Whether a text is such a page, so that a new one may replace it.
  static bool is_page(std::string_view text, std::string_view kind);

 private:
  std::string html_;
  bool open_ = false;  // a section
};

}  // namespace bittern::report
