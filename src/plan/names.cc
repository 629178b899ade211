#include "plan/names.h"

#include <algorithm>
#include <cctype>
#include <vector>

namespace bittern {
namespace {

char lower(char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); }

// Letters to put in, take out, replace or swap with the next one.
std::size_t slips(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const auto same = [&](std::size_t x, std::size_t y) { return lower(a[x]) == lower(b[y]); };
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + !same(i - 1, j - 1)});
      if (i > 1 && j > 1 && same(i - 1, j - 2) && same(i - 2, j - 1))
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string either(std::span<const std::string_view> names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text.append(i == 0 ? "" : i + 1 < names.size() ? ", " : " or ").append(names[i]);
  return text;
}

std::string_view nearest(std::string_view given, std::span<const std::string_view> known) {
  std::string_view best;
  std::size_t least = given.size() / 3 + 2;  // no more than this is a slip
  for (const std::string_view name : known) {
    if (given.size() > 64) break;
    const bool part = given.size() > 2 && name.find(given) != std::string_view::npos;
    const std::size_t distance = part ? 1 : slips(given, name);
    if (distance >= std::max(given.size(), name.size())) continue;
    // A name that begins with it comes before one that only holds it.
    const bool better = name.starts_with(given) && !best.starts_with(given) && !best.empty();
    if (distance > least || (distance == least && !better)) continue;
    least = distance;
    best = name;
  }
  return best;
}

std::string unknown_name(std::string_view kind, std::string_view given,
                         std::span<const std::string_view> known) {
  std::string text =
      std::string("no ").append(kind).append(" ").append(given.empty() ? "\"\"" : given);
  if (const std::string_view meant = nearest(given, known); !meant.empty())
    text.append(" (did you mean ").append(meant).append("?)");
  text.append(", expected one of");
  for (const std::string_view name : known) text.append(" ").append(name);
  return text;
}

}  // namespace bittern
