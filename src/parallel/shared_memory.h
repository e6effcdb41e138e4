#pragma once
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// Memory of several processes of one host, mapped side by side in each. It has no name: its owner
// hands a file descriptor to the processes of the group, over sockets that admit no other user.
namespace cadre::parallel {

/// Alignment of a window and a workspace, and of what lies in them, bytes.
constexpr int64_t kAlignment = 256;

/// A file descriptor, closed at the end.
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int get() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

/// The memory of P processes: `bytes_each` of every one, in the order of their ranks.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Maps a file a rank.
  SharedMemory(std::span<const File> files, int64_t bytes_each);
  /// Maps what is mapped at an address a rank once more: shared mappings, from any page of them.
  SharedMemory(const std::vector<void*>& addresses, int64_t bytes_each);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  char* data() const { return data_; }
  int64_t bytes_each() const { return bytes_each_; }

 private:
  /// Addresses for so many, at which nothing is.
  SharedMemory(size_t ranks, int64_t bytes_each);
  char* of(size_t rank) const { return data_ + int64_t(rank) * bytes_each_; }

  char* data_ = nullptr;
  int64_t bytes_each_ = 0, bytes_ = 0;
};

/// Zeroed memory as a file without a name.
File make_memory(int64_t bytes);

/// Bytes of such a file.
int64_t length_of(const File&);

/// So many bytes in whole pages.
int64_t whole_pages(int64_t bytes);

/// What tells this host from others, and from containers with which it shares no sockets.
std::string host_name();

/// Hands every rank's file to every other rank of this host.
class FileSharing {
 public:
  /// Listens, from now on.
  explicit FileSharing(int rank);

  /// What the other ranks must know of this one.
  const std::string& address() const { return address_; }

  /// Sends `own` to the ranks at these addresses and receives theirs, in the order of the ranks;
  /// this rank's own is empty. Throws DeviceError if one has not come by then.
  std::vector<File> share(const File& own, const std::vector<std::string>& addresses,
                          std::chrono::steady_clock::time_point until) const;

 private:
  void send(const File& own, const std::string& address) const;

  int rank_;
  std::string address_;
  File listener_;
};

}  // namespace cadre::parallel
