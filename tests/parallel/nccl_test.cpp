// The engine of NCCL beside a library that does nothing but write down how it is called, and may
// fail. So its calls are seen where there is no GPU.
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cadre/nccl.h"
#include "tests/judge/errors.h"

using namespace cadre;

/// What stands in for NCCL: its calls in order, and which of them fails.
struct ncclComm {
  int ranks = 2;
  std::string fails{}, more{};
  std::vector<std::string> calls{};
};

namespace {

ncclComm* current = nullptr;
constexpr uintptr_t kStream = 64;

ncclResult_t called(const std::string& call) {
  current->calls.push_back(call);
  return call == current->fails ? ncclSystemError : ncclSuccess;
}

/// A message's data are its name.
ncclResult_t moved(const char* call, const void* data, size_t bytes, int peer) {
  return called(text(call, " ", static_cast<const char*>(data), " ", bytes, " ", peer));
}

}  // namespace

ncclResult_t ncclCommCount(ncclComm_t communicator, int* ranks) {
  *ranks = communicator->ranks;
  return called("count");
}
ncclResult_t ncclGroupStart() { return called("start"); }
ncclResult_t ncclGroupEnd() { return called("end"); }
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t,
                      cudaStream_t stream) {
  EXPECT_EQ(type, ncclInt8);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(stream), kStream);
  return moved("send", data, count, peer);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t,
                      cudaStream_t stream) {
  EXPECT_EQ(type, ncclInt8);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(stream), kStream);
  return moved("receive", data, count, peer);
}
const char* ncclGetErrorString(ncclResult_t) { return "unhandled system error"; }
const char* ncclGetLastError(ncclComm_t communicator) { return communicator->more.c_str(); }

namespace {

using Calls = std::vector<std::string>;

/// Two tensors for two ranks, of which the second has nothing for the first, and nothing back.
struct Nccl : testing::Test {
  Nccl() { current = &communicator; }

  ncclComm communicator{};
  char a[2] = "a", b[2] = "b", c[2] = "c", d[2] = "d", e[2] = "e", f[2] = "f";
  std::vector<RankMessage> messages = {
      {a, 10, b, 10}, {c, 20, d, 30}, {nullptr, 0, nullptr, 0}, {e, 4, f, 0}};

  std::string run() {
    try {
      nccl_all_to_all (&communicator)(messages, {reinterpret_cast<void*>(kStream)});
    } catch (const DeviceError& error) {
      return error.what();
    }
    return {};
  }
};

TEST_F(Nccl, SendsAndReceivesInOneGroup) {
  EXPECT_EQ(run(), "");
  EXPECT_EQ(communicator.calls, (Calls{"count", "start", "send a 10 0", "receive b 10 0",
                                       "send c 20 1", "receive d 30 1", "send e 4 1", "end"}));
}

TEST_F(Nccl, SaysWhichCallFailed) {
  communicator.more = "no route to host";
  for (const auto& [call, words] : {std::pair("count", "ncclCommCount"),
                                    {"start", "ncclGroupStart"},
                                    {"send c 20 1", "ncclSend with rank 1"},
                                    {"receive b 10 0", "ncclRecv with rank 0"},
                                    {"end", "ncclGroupEnd"}}) {
    communicator.fails = call;
    communicator.calls.clear();
    EXPECT_EQ(run(), text("nccl: ", words, " failed: unhandled system error; no route to host"));
    const Calls& calls = communicator.calls;
    const bool has_begun = calls.size() > 2;
    EXPECT_EQ(std::count(calls.begin(), calls.end(), "end"), has_begun ? 1 : 0);
  }
  communicator.more = "";
  EXPECT_EQ(run(), "nccl: ncclGroupEnd failed: unhandled system error");
}

TEST_F(Nccl, WantsAsManyRanksAsTheProblemHas) {
  communicator.ranks = 3;
  EXPECT_EQ(
      test::invalid([&] { run(); }),
      "nccl: the messages are 4, must be a multiple of 3; the communicator has as many ranks");
}

}  // namespace
