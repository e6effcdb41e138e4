#pragma once
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cli/verb.h"

namespace cadre::cli {

/// One line of a shape file.
struct Shape {
  std::string problem;
  std::string layer;  ///< the words behind `#`: what the problem is in a model; may be empty
  std::string place;  ///< "file:line"; empty for words of the command line
};

/// Calls `work()`; what it throws because of the problem names the file and line too.
template <class Work>
auto at_place(const Shape& shape, Work&& work) {
  try {
    return work();
  } catch (const std::length_error&) {  // an array that is too large: as a lack of memory
    throw std::bad_alloc();
  } catch (const std::logic_error& error) {
    if (shape.place.empty()) throw;
    throw UsageError(shape.place + ": " + error.what());
  } catch (const Unsupported& error) {
    if (shape.place.empty()) throw;
    throw Unsupported(shape.place + ": " + error.what());
  } catch (const std::runtime_error& error) {
    if (shape.place.empty()) throw;
    throw UsageError(shape.place + ": " + error.what());
  }
}

/// The problems of a shape file: one a line, `#` starts a comment.
/// Errors    UsageError if the file cannot be read or has no problem.
std::vector<Shape> read_shapes(const std::string& path);

/// The problems that `cadre check` checks when it is given none: bench/shapes/check.txt as it was
/// when this binary was built.
std::vector<Shape> built_in_shapes();

/// The text of bench/shapes/check.txt.
const char* check_shapes();

/// What must be done before a device is opened: ranks of threads may share a GPU.
void prepare_for_ranks(const std::vector<Shape>& shapes);

/// Words of the command line as problems: each word with a space in it is one, else all words
/// together are one.
std::vector<Shape> shapes_of(const std::vector<std::string>& words);

}  // namespace cadre::cli
