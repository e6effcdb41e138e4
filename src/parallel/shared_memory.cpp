#include "parallel/shared_memory.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include "cadre/error.h"

namespace cadre::parallel {
namespace {

void demand(bool good, std::string_view what) {
  if (!good) throw DeviceError(text("window: ", what, ": ", std::strerror(errno)));
}

std::string random_name() {
  std::random_device random;
  std::string name = "cadre-";
  for (int i = 0; i < 32; ++i) name += "0123456789abcdef"[random() % 16];
  return name;
}

constexpr std::string_view kCannotReach = "cannot reach a rank's socket";
constexpr std::string_view kCannotMap = "cannot map the windows of all ranks";

/// Of a socket without a file: the first byte of its name is zero.
struct Address {
  sockaddr_un of{};
  socklen_t bytes = 0;

  explicit Address(const std::string& name) {
    of.sun_family = AF_UNIX;
    const size_t length = std::min(name.size(), sizeof(of.sun_path) - 1);
    std::memcpy(of.sun_path + 1, name.data(), length);
    bytes = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&of); }
};

/// A rank with a descriptor beside it.
struct Message {
  int32_t rank = -1;
  iovec data{&rank, sizeof rank};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  Message() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
};

/// The rank that connected and its file; -1 for what is no message of ours.
std::pair<int, File> receive(const File& connection) {
  Message message;
  if (recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC) != sizeof message.rank)
    return {-1, File()};
  const cmsghdr* sent = CMSG_FIRSTHDR(&message.header);
  errno = EMFILE;
  demand((message.header.msg_flags & MSG_CTRUNC) == 0, "cannot take a rank's file");
  if (sent == nullptr || sent->cmsg_level != SOL_SOCKET || sent->cmsg_type != SCM_RIGHTS ||
      sent->cmsg_len != CMSG_LEN(sizeof(int)))
    return {-1, File()};
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(sent), sizeof descriptor);
  return {message.rank, File(descriptor)};
}

bool is_of_this_user(const File& connection) {
  ucred who{};
  socklen_t bytes = sizeof who;
  return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &who, &bytes) == 0 &&
         who.uid == geteuid();
}

/// Waits until then.
bool can_read(const File& from, std::chrono::steady_clock::time_point until) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd waiting{from.get(), POLLIN, 0};
    const int ready = poll(&waiting, 1, int(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

/// The mapping of this process in which that address lies, a line of the kernel's table.
struct Mapping {
  uintptr_t begin = 0, end = 0;
  std::string access{};  ///< "rw-s": to read, to write, not to execute, shared

  static Mapping at(uintptr_t address) {
    std::ifstream table("/proc/self/maps");
    for (std::string line; std::getline(table, line);) {
      Mapping found;
      char dash = 0;
      std::istringstream(line) >> std::hex >> found.begin >> dash >> found.end >> found.access;
      if (found.begin <= address && address < found.end) return found;
    }
    return {};
  }
};

/// Whether so many bytes can be mapped once more.
void check_shared(const void* data, int64_t bytes, size_t rank) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const Mapping found = Mapping::at(address);
  const std::string of = text("the memory of rank ", rank);
  require(found.access.starts_with("rw-s"), of, " is ",
          found.end == 0 ? "not mapped" : "'" + found.access + "'",
          ", must be a shared mapping, 'rw-s'");
  require(address % uintptr_t(whole_pages(1)) == 0, of,
          " begins within a page, must begin with one");
  require(int64_t(found.end - address) >= bytes, of, " has ", found.end - address,
          " bytes, must have ", bytes);
}

}  // namespace

File::File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}
File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

SharedMemory::SharedMemory(size_t ranks, int64_t bytes_each)
    : bytes_each_(bytes_each), bytes_(int64_t(ranks) * bytes_each) {
  constexpr int kNowhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* place = mmap(nullptr, size_t(bytes_), PROT_NONE, kNowhere, -1, 0);
  demand(place != MAP_FAILED, kCannotMap);
  data_ = static_cast<char*>(place);
}
SharedMemory::SharedMemory(std::span<const File> files, int64_t bytes_each)
    : SharedMemory(files.size(), bytes_each) {
  for (size_t i = 0; i < files.size(); ++i)
    demand(mmap(of(i), size_t(bytes_each), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                files[i].get(), 0) != MAP_FAILED,
           kCannotMap);
}
SharedMemory::SharedMemory(const std::vector<void*>& addresses, int64_t bytes_each)
    : SharedMemory(addresses.size(), bytes_each) {
  for (size_t i = 0; i < addresses.size(); ++i) {
    check_shared(addresses[i], bytes_each, i);
    // Of a shared mapping of which none of the old bytes move, the new place is one more.
    constexpr size_t kNoBytes = 0;
    demand(mremap(addresses[i], kNoBytes, size_t(bytes_each), MREMAP_MAYMOVE | MREMAP_FIXED,
                  of(i)) != MAP_FAILED,
           text("cannot map the memory of rank ", i, " again"));
  }
}
SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_each_, other.bytes_each_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_t(bytes_));
}

File make_memory(int64_t bytes) {
  File file(memfd_create("cadre-window", MFD_CLOEXEC));
  demand(file.get() >= 0 && ftruncate(file.get(), bytes) == 0,
         text("cannot make ", bytes, " bytes of shared memory"));
  return file;
}

int64_t length_of(const File& file) {
  struct stat facts {};
  return fstat(file.get(), &facts) == 0 ? facts.st_size : -1;
}

int64_t whole_pages(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

std::string host_name() {
  std::string boot, network(64, '\0');
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const ssize_t length = readlink("/proc/self/ns/net", network.data(), network.size());
  network.resize(size_t(std::max<ssize_t>(length, 0)));
  return boot + " " + network;
}

FileSharing::FileSharing(int rank)
    : rank_(rank),
      address_(random_name()),
      listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  const Address address(address_);
  demand(listener_.get() >= 0 && bind(listener_.get(), address.get(), address.bytes) == 0 &&
             listen(listener_.get(), SOMAXCONN) == 0,
         "cannot make a socket");
}

void FileSharing::send(const File& own, const std::string& name) const {
  const File to(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const Address address(name);
  demand(to.get() >= 0 && connect(to.get(), address.get(), address.bytes) == 0, kCannotReach);
  errno = EPERM;
  demand(is_of_this_user(to), kCannotReach);
  Message message;
  message.rank = rank_;
  cmsghdr* beside = CMSG_FIRSTHDR(&message.header);
  beside->cmsg_level = SOL_SOCKET;
  beside->cmsg_type = SCM_RIGHTS;
  beside->cmsg_len = CMSG_LEN(sizeof(int));
  const int descriptor = own.get();
  std::memcpy(CMSG_DATA(beside), &descriptor, sizeof descriptor);
  demand(sendmsg(to.get(), &message.header, MSG_NOSIGNAL) == sizeof message.rank, kCannotReach);
}

std::vector<File> FileSharing::share(const File& own, const std::vector<std::string>& addresses,
                                     std::chrono::steady_clock::time_point until) const {
  const int ranks = int(addresses.size());
  for (int p = 0; p < ranks; ++p)
    if (p != rank_) send(own, addresses[size_t(p)]);
  std::vector<File> files(addresses.size());
  for (int missing = ranks - 1; missing > 0;) {
    if (!can_read(listener_, until))
      throw DeviceError(text("window: ", missing, " of ", ranks, " ranks have not come in time"));
    const File connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    demand(connection.get() >= 0 || errno == EINTR || errno == ECONNABORTED,
           "cannot take a rank's file");
    if (!is_of_this_user(connection) || !can_read(connection, until)) continue;
    auto [rank, file] = receive(connection);
    if (rank < 0 || rank >= ranks || rank == rank_ || files[size_t(rank)].get() >= 0) continue;
    files[size_t(rank)] = std::move(file);
    --missing;
  }
  return files;
}

}  // namespace cadre::parallel
