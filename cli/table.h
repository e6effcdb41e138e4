#pragma once
#include <iosfwd>
#include <string>
#include <vector>

namespace cadre::cli {

/// Text in columns, each as wide as its widest cell, for a terminal.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { add(std::move(head)); }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// Prints the rows and an empty line.
  void print(std::ostream&) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace cadre::cli
