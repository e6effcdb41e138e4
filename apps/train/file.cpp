#include "apps/train/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "cadre/error.h"

namespace cadre::train {
namespace {

/// Closes what it holds; where the result matters, the caller closes it first.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const { return number_; }
  int close() {
    const int result = ::close(number_);
    number_ = -1;
    return result;
  }

 private:
  int number_;
};

std::string reason() { return std::strerror(errno); }

/// Writes all of it; false with errno set where the system takes no more.
bool write_all(int descriptor, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return true;
}

/// Writes and flushes `path`; false with errno set where that fails.
bool write_flushed(const std::filesystem::path& path,
                   std::span<const std::span<const uint8_t>> parts) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) return false;
  for (const auto& part : parts) {
    if (!write_all(file.get(), part)) return false;
  }
  return ::fsync(file.get()) == 0 && file.close() == 0;
}

/// Makes the rename itself durable; a file system that cannot flush folders is no error.
void flush_folder(const std::filesystem::path& folder) {
  const Descriptor opened(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.get() >= 0) ::fsync(opened.get());
}

}  // namespace

std::vector<uint8_t> read_file(const std::filesystem::path& path, int64_t most) {
  // A pipe that nobody writes to must not be waited for.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  require(file.get() >= 0, "train: file ", path.string(), " cannot be opened: ", reason(),
          "; check the path and its permissions");
  struct stat about {};
  require(::fstat(file.get(), &about) == 0 && S_ISREG(about.st_mode), "train: ", path.string(),
          " is no regular file; name a file or a folder");
  require(about.st_size <= most, "train: file ", path.string(), " has ", about.st_size,
          " bytes, must be at most ", most, "; name a smaller file");
  std::vector<uint8_t> bytes(static_cast<size_t>(about.st_size) + 1);
  size_t size = 0;
  for (;;) {
    const ssize_t got = ::read(file.get(), bytes.data() + size, bytes.size() - size);
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, "train: file ", path.string(), " cannot be read: ", reason(),
            "; check the file and its disk");
    if (got == 0) break;
    size += static_cast<size_t>(got);
    if (size == bytes.size()) bytes.resize(size + (int64_t{1} << 16));
  }
  bytes.resize(size);
  return bytes;
}

void replace_file(const std::filesystem::path& path,
                  std::span<const std::span<const uint8_t>> parts) {
  const std::filesystem::path partial = path.string() + ".partial";
  if (!write_flushed(partial, parts) || ::rename(partial.c_str(), path.c_str()) != 0) {
    const std::string why = reason();
    ::unlink(partial.c_str());
    std::error_code ignored;
    const bool old = std::filesystem::exists(path, ignored);
    throw InvalidArgument(text("train: file ", path.string(), " cannot be written: ", why,
                               "; free space there or choose another folder with --out",
                               old ? " (the old file is untouched)" : ""));
  }
  flush_folder(path.parent_path());
}

void replace_file(const std::filesystem::path& path, std::string_view content) {
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(content.data()),
                                       content.size());
  replace_file(path, std::span(&bytes, 1));
}

FolderLock::FolderLock(const std::filesystem::path& folder)
    : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  // A file system without locks is no error.
  if (descriptor_ < 0 || ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
    return;
  ::close(descriptor_);
  throw InvalidArgument(text("train: folder ", folder.string(),
                             " is in use by another run; wait for its end, or choose another "
                             "folder with --out"));
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void prepare_folder(const std::filesystem::path& folder, int64_t bytes) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require(!error && std::filesystem::is_directory(folder), "train: folder ", folder.string(),
          " cannot be made: ", error ? error.message() : "a file has that name",
          "; choose another folder with --out");
  const bool writable = ::access(folder.c_str(), W_OK | X_OK) == 0;
  require(writable, "train: folder ", folder.string(), " cannot be written: ", reason(),
          "; choose another folder with --out");
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0) return;
  const double room = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  require(room >= static_cast<double>(bytes), "train: disk of ", folder.string(), " has ",
          static_cast<int64_t>(room / 1e6), " MB free, must be at least ", bytes / 1000000 + 1,
          " MB for a checkpoint; free space there or choose another folder with --out");
}

}  // namespace cadre::train
