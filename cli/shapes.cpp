#include "cli/shapes.h"

#include <algorithm>
#include <sstream>

#include "bench/ranks.h"
#include "bench/text_file.h"
#include "cadre/error.h"
#include "cli/problem.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

std::string trimmed(const std::string& words) {
  const size_t first = words.find_first_not_of(" \t\r"), last = words.find_last_not_of(" \t\r");
  return first == words.npos ? "" : words.substr(first, last + 1 - first);
}

std::vector<Shape> parse_shapes(std::istream& in, const std::string& path) {
  std::vector<Shape> shapes;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const size_t hash = std::min(line.find('#'), line.size());
    const std::string problem = trimmed(line.substr(0, hash));
    if (problem.empty()) continue;
    shapes.push_back(
        {problem, trimmed(line.substr(std::min(hash + 1, line.size()))), text(path, ":", number)});
  }
  return shapes;
}

}  // namespace

std::vector<Shape> read_shapes(const std::string& path) {
  std::ifstream file = bench::open_text_file("shape file", path);
  if (!file || file.peek() == std::ifstream::traits_type::eof())
    throw UsageError(
        text("shape file '", path,
             "' cannot be read or is empty; give a text file with one problem a line"));
  std::vector<Shape> shapes = parse_shapes(file, path);
  if (shapes.empty())
    throw UsageError(text("shape file '", path, "' has no problem; write one a line"));
  return shapes;
}

std::vector<Shape> built_in_shapes() {
  std::istringstream in(check_shapes());
  return parse_shapes(in, "check.txt");
}

std::vector<Shape> shapes_of(const std::vector<std::string>& words) {
  const auto is_problem = [](const std::string& word) { return word.find(' ') != word.npos; };
  if (!std::all_of(words.begin(), words.end(), is_problem)) return {{joined(words), "", ""}};
  std::vector<Shape> shapes;
  shapes.reserve(words.size());
  for (const std::string& word : words) shapes.push_back({word, "", ""});
  return shapes;
}

void prepare_for_ranks(const std::vector<Shape>& shapes) {
  if (std::any_of(shapes.begin(), shapes.end(), [](const Shape& shape) {
        return shape.problem.starts_with(kExpertParallel.name);
      }))
    bench::let_ranks_share_a_gpu();
}

}  // namespace cadre::cli
