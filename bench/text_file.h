#pragma once
#include <fstream>
#include <string>

namespace cadre::bench {

/// A text file, open; a stream that is not good() where it cannot be opened.
/// Errors    InvalidArgument for what is no regular file, such as a pipe or a device, which may
///           never end, for more than 64 MB, and for a zero byte. `what` is what the file is for.
std::ifstream open_text_file(const std::string& what, const std::string& path);

/// A file to write behind what it holds; not open where that cannot be, as with a pipe that nobody
/// reads.
std::ofstream open_to_write(const std::string& path);

}  // namespace cadre::bench
