#pragma once
#include <string>
#include <vector>

namespace cadre::cli {

/// The problems of a shape file: one a line, `#` starts a comment.
/// Errors    UsageError if the file cannot be read or has no problem.
std::vector<std::string> read_shapes(const std::string& path);

/// The problems that `cadre check` checks when it is given none: bench/shapes/check.txt as it was
/// when this binary was built.
std::vector<std::string> built_in_shapes();

/// The text of bench/shapes/check.txt.
const char* check_shapes();

/// Words of the command line as problems: each word with a space in it is one, else all words
/// together are one.
std::vector<std::string> problems_of(const std::vector<std::string>& words);

}  // namespace cadre::cli
