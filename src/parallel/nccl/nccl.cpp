// Messages between ranks by a communicator of NCCL.
#include "cadre/nccl.h"

#include <nccl.h>

#include "cadre/error.h"

namespace cadre {
namespace {

/// What NCCL says of a code, and of the last error, where it knows more.
std::string words_of(ncclResult_t code, ncclComm_t communicator) {
  const char* more = ncclGetLastError(communicator);
  const bool is_more = more != nullptr && *more != '\0';
  return text(ncclGetErrorString(code), is_more ? "; " : "", is_more ? more : "");
}

/// The calls of one exchange. A group that has begun is ended whatever fails within, since NCCL
/// would add all that follows to it.
class Group {
 public:
  explicit Group(ncclComm_t communicator) : communicator_(communicator) {
    check(ncclGroupStart(), "ncclGroupStart");
    is_open_ = true;
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (is_open_) ncclGroupEnd();
  }

  void send(const RankMessage& m, int peer, cudaStream_t stream) {
    check(ncclSend(m.send, size_t(m.send_bytes), ncclInt8, peer, communicator_, stream), "ncclSend",
          peer);
  }
  void receive(const RankMessage& m, int peer, cudaStream_t stream) {
    check(ncclRecv(m.receive, size_t(m.receive_bytes), ncclInt8, peer, communicator_, stream),
          "ncclRecv", peer);
  }
  void end() {
    is_open_ = false;
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  void check(ncclResult_t code, std::string_view call, int peer = -1) const {
    if (code != ncclSuccess)
      throw DeviceError(text("nccl: ", call, peer < 0 ? "" : text(" with rank ", peer),
                             " failed: ", words_of(code, communicator_)));
  }

  ncclComm_t communicator_;
  bool is_open_ = false;
};

}  // namespace

AllToAll nccl_all_to_all(ncclComm* communicator) {
  int ranks = 0;
  if (const ncclResult_t code = ncclCommCount(communicator, &ranks); code != ncclSuccess)
    throw DeviceError(text("nccl: ncclCommCount failed: ", words_of(code, communicator)));
  return [communicator, ranks](std::span<const RankMessage> messages, Stream stream) {
    require(messages.size() % size_t(ranks) == 0, "nccl: the messages are ", messages.size(),
            ", must be a multiple of ", ranks, "; the communicator has as many ranks");
    auto* on = static_cast<cudaStream_t>(stream.handle);
    Group group(communicator);
    for (size_t i = 0; i < messages.size(); ++i) {
      const RankMessage& m = messages[i];
      const int peer = int(i % size_t(ranks));
      if (m.send_bytes > 0) group.send(m, peer, on);
      if (m.receive_bytes > 0) group.receive(m, peer, on);
    }
    group.end();
  };
}

}  // namespace cadre
