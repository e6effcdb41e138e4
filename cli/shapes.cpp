#include "cli/shapes.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "cadre/error.h"
#include "cli/problem.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

std::vector<std::string> parse_shapes(std::istream& in) {
  std::vector<std::string> problems;
  for (std::string line; std::getline(in, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    problems.push_back(line.substr(0, line.find_last_not_of(" \t\r") + 1));
  }
  return problems;
}

}  // namespace

std::vector<std::string> read_shapes(const std::string& path) {
  std::ifstream file(path);
  if (!file || file.peek() == std::ifstream::traits_type::eof())
    throw UsageError(
        text("shape file '", path,
             "' cannot be read or is empty; give a text file with one problem a line"));
  const auto problems = parse_shapes(file);
  if (problems.empty())
    throw UsageError(text("shape file '", path, "' has no problem; write one a line"));
  return problems;
}

std::vector<std::string> built_in_shapes() {
  std::istringstream in(check_shapes());
  return parse_shapes(in);
}

std::vector<std::string> problems_of(const std::vector<std::string>& words) {
  const auto is_problem = [](const std::string& word) { return word.find(' ') != word.npos; };
  if (std::all_of(words.begin(), words.end(), is_problem)) return words;
  return {joined(words)};
}

}  // namespace cadre::cli
