#include "cli/table.h"

#include <algorithm>
#include <ostream>

namespace cadre::cli {

void Table::print(std::ostream& out) const {
  std::vector<size_t> width(rows_[0].size());
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(width[i] - row[i].size() + 2, ' ');
    }
    out << line << "\n";
  }
  out << "\n";
}

}  // namespace cadre::cli
