#include "bench/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "cadre/error.h"

namespace cadre::bench {
namespace fs = std::filesystem;

constexpr uint64_t kMostBytes = 64 << 20;

std::ifstream open_text_file(const std::string& what, const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return std::ifstream(path);
  require(fs::is_regular_file(path, error), what, ": '", path,
          "' is no regular file; write a file and name that");
  const uint64_t bytes = fs::file_size(path, error);
  require(bytes <= kMostBytes, what, ": '", path, "' has ", bytes, " bytes, must be at most ",
          kMostBytes);
  std::ifstream file(path, std::ios::binary);
  if (!file.good()) return file;
  const std::istreambuf_iterator<char> first(file), end;
  int64_t at = 0;
  const bool has_zero = std::any_of(first, end, [&](char c) { return ++at, c == 0; });
  require(!has_zero, what, ": byte ", at - 1, " of '", path,
          "' is zero, must be text; write a file of text and name that");
  file.clear();
  file.seekg(0);
  return file;
}

std::ofstream open_to_write(const std::string& path) {
  const int opened = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  std::ofstream file;
  if (opened < 0) return file;
  file.open(path, std::ios::app);
  ::close(opened);
  return file;
}

}  // namespace cadre::bench
