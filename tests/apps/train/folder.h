#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace cadre::test {

/// An empty folder of the running test, removed with it.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::path(testing::TempDir()) /
              (std::string("cadre_") +
               testing::UnitTest::GetInstance()->current_test_info()->test_suite_name() + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  /// Writes a file, with the folders above it; returns its path.
  std::string write(const std::string& name, std::string_view content) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << content;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

/// `bytes` bytes of lines of English words.
inline std::string prose(size_t bytes) {
  std::string words;
  for (uint32_t i = 1; words.size() < bytes; i = i * 48271u % 2147483647u) {
    constexpr std::string_view kWords[] = {"the ", "rows ", "of an ", "expert ", "are ", "few\n"};
    words += kWords[i % 6];
  }
  return words.substr(0, bytes);
}

}  // namespace cadre::test
