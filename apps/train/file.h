#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

namespace cadre::train {

/// The whole file.
/// Errors    InvalidArgument with the reason of the operating system, or for more than `most`
///           bytes.
std::vector<uint8_t> read_file(const std::filesystem::path&, int64_t most);

/// Replaces a file, or leaves the old one as it was: writes `<path>.partial` beside it, flushes it
/// to the disk, renames it over `path`. On failure the partial file is removed.
/// Errors    InvalidArgument with the reason of the operating system; a full disk is one.
void replace_file(const std::filesystem::path&, std::span<const std::span<const uint8_t>> parts);
void replace_file(const std::filesystem::path&, std::string_view content);

/// Keeps other runs out of a folder while it lives. It is the folder itself that is locked: no file
/// is left behind, whatever ends the run.
class FolderLock {
 public:
  /// Errors    InvalidArgument where another run holds it.
  explicit FolderLock(const std::filesystem::path&);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
};

/// Makes the folder and checks that a file of `bytes` could be written there.
/// Errors    InvalidArgument for a folder that cannot be made or written, or is too full.
void prepare_folder(const std::filesystem::path&, int64_t bytes);

}  // namespace cadre::train
