// Checks and benchmarks of ranks that are emulated GPUs, by the engine of NCCL. Functions of its
// names move messages between the threads; as NCCL's they are work of a stream, which a graph may
// have.
#include <gtest/gtest.h>
#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "bench/check_ranks.h"
#include "bench/measure_ranks.h"
#include "cadre/error.h"
#include "runtime.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

struct Message {
  void* data;
  size_t bytes;
  int peer;
};

/// What a rank has said between ncclGroupStart and ncclGroupEnd.
struct Messages {
  std::vector<Message> sent, received;
};

/// Ranks that have one id, and what each has sent to which and that one has not received. A rank
/// waits for those that it has messages with.
struct Group {
  explicit Group(int count) : ranks(count), sent(size_t(count * count)) {}

  std::deque<const Message*>& of(int from, int to) { return sent[size_t(from * ranks + to)]; }

  std::mutex mutex;
  std::condition_variable changed;
  int ranks;
  std::vector<std::deque<const Message*>> sent;
};

std::mutex groups_mutex;
std::map<std::string, std::shared_ptr<Group>> groups;
std::atomic<int> ids = 0, communicators = 0;
std::string fails;  // the call that does
thread_local Messages open_group;
thread_local ncclComm* open_communicator = nullptr;
thread_local cudaStream_t open_stream = nullptr;

ncclResult_t result_of(std::string_view call) {
  return call == fails ? ncclInvalidUsage : ncclSuccess;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank;

  /// Messages to and from a rank are in the same order on both.
  void exchange(const Messages& own) const {
    std::unique_lock lock(group->mutex);
    for (const Message& m : own.sent) group->of(rank, m.peer).push_back(&m);
    group->changed.notify_all();
    for (const Message& m : own.received) {
      std::deque<const Message*>& sent = group->of(m.peer, rank);
      group->changed.wait(lock, [&] { return !sent.empty(); });
      EXPECT_EQ(sent.front()->bytes, m.bytes);
      std::memcpy(m.data, sent.front()->data, m.bytes);
      sent.pop_front();
      group->changed.notify_all();
    }
    for (const Message& m : own.sent)
      group->changed.wait(lock, [&] { return group->of(rank, m.peer).empty(); });
  }
};

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id->internal, 0, sizeof id->internal);  // bytes that are no text
  id->internal[sizeof id->internal - 1] = char(++ids);
  return result_of("ncclGetUniqueId");
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank) {
  if (result_of("ncclCommInitRank") != ncclSuccess) return ncclInvalidUsage;
  const std::lock_guard lock(groups_mutex);
  std::shared_ptr<Group>& group = groups[std::string(id.internal, sizeof id.internal)];
  if (group == nullptr) group = std::make_shared<Group>(ranks);
  *communicator = new ncclComm{group, rank};
  ++communicators;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  --communicators;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int* ranks) {
  *ranks = communicator->group->ranks;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() { return open_group = {}, ncclSuccess; }
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t on,
                      cudaStream_t stream) {
  open_communicator = on, open_stream = stream;
  open_group.sent.push_back({const_cast<void*>(data), count, peer});
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t on,
                      cudaStream_t stream) {
  open_communicator = on, open_stream = stream;
  open_group.received.push_back({data, count, peer});
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  const bool is_empty = open_group.sent.empty() && open_group.received.empty();
  if (is_empty) return ncclSuccess;
  emulator::enqueue(open_stream, cudaGraphNodeTypeHost,
                    [own = open_group, on = open_communicator] { on->exchange(own); });
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "invalid usage"; }
const char* ncclGetLastError(ncclComm_t) { return "Duplicate GPU detected"; }

namespace {

class NcclRanks : public testing::TestWithParam<const char*> {};

TEST_P(NcclRanks, HaveTheBitsOfOneRankOnTheCpu) {
  const bench::RanksReport report =
      bench::check_ranks(GetParam(), {}, cuda_devices().front(), "collective");
  EXPECT_EQ(report.check.fault, "");
  EXPECT_EQ(report.check.plan, "collective");
  EXPECT_EQ(report.routings, 6);
  const bool is_narrow = std::string_view(GetParam()).find("overflow=error") != std::string::npos;
  EXPECT_EQ(report.overflows > 0, is_narrow);
  EXPECT_EQ(communicators, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Problems, NcclRanks,
    testing::Values("expert_parallel T=24 top_k=2 H=40 E=3 ranks=2",
                    "expert_parallel T=9 top_k=3 H=37 E=2 ranks=3 R=81 dtype=f32 tail=zero",
                    "expert_parallel T=16 top_k=2 H=8 E=2 ranks=2 R=24 overflow=drop prob=no",
                    "expert_parallel T=16 top_k=2 H=8 E=2 ranks=2 R=40 overflow=error",
                    "expert_parallel T=9 top_k=4 H=37 E=2 ranks=3 R=108 tail=zero cross=token",
                    "expert_parallel T=16 top_k=3 H=8 E=2 ranks=2 R=40 overflow=drop cross=token",
                    "expert_parallel T=9 top_k=4 H=37 E=2 ranks=3 R=108 cross=host host_ranks=2",
                    "expert_parallel T=9 top_k=4 H=8 E=2 ranks=4 R=30 overflow=drop cross=host "
                    "host_ranks=2",
                    "expert_parallel T=24 top_k=2 H=40 E=3 ranks=2 block=48",
                    "expert_parallel T=9 top_k=3 H=37 E=2 ranks=3 block=20 R=40 overflow=drop",
                    "expert_parallel T=16 top_k=2 H=8 E=2 ranks=2 block=24 overflow=error"));

std::string names(const bench::Measurement& m) {
  std::string all;
  for (const bench::Timing& t : m.timings) {
    EXPECT_GT(t.us.median, 0);
    all += t.name + " ";
  }
  return all;
}

// A graph may have blocks; and windows, which alone have what a DMA engine could copy.
TEST(MeasureNcclRanks, TimesAGraphOfWhatMayBeRecorded) {
  bench::MeasureOptions options;
  options.device = cuda_devices().front();
  options.contest.repeat = 1;
  options.contest.load_s = 0;
  for (const auto& [words, only, want] : {std::tuple("", "collective", "cadre copy "),
                                          {" block=4", "collective", "cadre copy cadre_graph "},
                                          {"", "window", "cadre copy dma_engine cadre_graph "}}) {
    options.only = only;
    const auto all =
        bench::measure_ranks(text("expert_parallel T=2 top_k=2 H=8 E=1 ranks=2", words), options);
    ASSERT_EQ(all.size(), 2u);
    for (const bench::Measurement& m : all) {
      EXPECT_TRUE(m.check.good()) << m.check.fault;
      EXPECT_EQ(m.plan, only);
      EXPECT_EQ(names(m), want);
    }
  }
  EXPECT_EQ(communicators, 0);
}

TEST(CheckNcclRanks, SayWhatNcclSays) {
  for (const std::string_view call : {"ncclGetUniqueId", "ncclCommInitRank"}) {
    fails = call;
    std::string error;
    try {
      bench::check_ranks("expert_parallel T=2 H=8 ranks=2", {}, cuda_devices().front(),
                         "collective");
    } catch (const DeviceError& thrown) {
      error = thrown.what();
    }
    EXPECT_TRUE(error.ends_with(text("failed in making the engine: nccl: ", call,
                                     " failed: invalid usage; Duplicate GPU detected")))
        << error;
  }
  fails = "";
}

}  // namespace
