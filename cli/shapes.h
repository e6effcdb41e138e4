#pragma once
#include <string>
#include <vector>

namespace cadre::cli {

/// One line of a shape file.
struct Shape {
  std::string problem;
  std::string layer;  ///< the words behind `#`: what the problem is in a model; may be empty
};

/// The problems of a shape file: one a line, `#` starts a comment.
/// Errors    UsageError if the file cannot be read or has no problem.
std::vector<Shape> read_shapes(const std::string& path);

/// The problems that `cadre check` checks when it is given none: bench/shapes/check.txt as it was
/// when this binary was built.
std::vector<Shape> built_in_shapes();

/// The text of bench/shapes/check.txt.
const char* check_shapes();

/// Words of the command line as problems: each word with a space in it is one, else all words
/// together are one.
std::vector<Shape> shapes_of(const std::vector<std::string>& words);

}  // namespace cadre::cli
