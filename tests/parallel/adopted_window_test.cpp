// Windows in memory that the caller has made and mapped. Ranks are processes, or threads.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <numeric>

#include "cadre/error.h"
#include "parallel/exchange.h"
#include "parallel/rank_device.h"
#include "parallel/shared_memory.h"
#include "tests/judge/errors.h"
#include "tests/judge/workspace.h"
#include "tests/parallel/group.h"
#include "tests/parallel/processes.h"

using namespace cadre;
using test::Ended;

namespace {

/// Memory of a rank, mapped somewhere by somebody, full of what is no flag.
class RankBytes {
 public:
  explicit RankBytes(int64_t bytes) : device_(parallel::rank_device(test::rank_device())) {
    std::vector<parallel::File> files;
    files.push_back(device_->make_memory(bytes));
    data_ = device_->map(files, bytes, 0);
    std::memset(data_, 0x5a, size_t(bytes));
  }
  char* data() const { return data_; }

 private:
  std::unique_ptr<parallel::RankDevice> device_;
  char* data_;
};

constexpr std::string_view kWords =
    "expert_parallel T=4 top_k=2 H=3 E=2 ranks=2 R=16 dtype=f32 prob=no";

struct Group {
  ExpertParallelPlan plan = cadre::plan(parse_expert_parallel_problem(kWords), test::rank_device());
  int64_t bytes = parallel::rank_device(plan.device)->whole_bytes(plan.window.bytes);
  std::vector<RankBytes> memory = make(2);

  std::vector<RankBytes> make(int ranks) const {
    std::vector<RankBytes> made;
    for (int p = 0; p < ranks; ++p) made.emplace_back(bytes);
    return made;
  }
  std::vector<void*> addresses() const {
    std::vector<void*> all;
    for (const RankBytes& one : memory) all.push_back(one.data());
    return all;
  }
};

void demand(bool good, std::string_view what) {
  if (!good) throw std::runtime_error(std::string(what));
}

/// Tokens of all ranks go to both of them and come back doubled.
void run_exchanges(const ExpertParallelPlan& plan, Window& window, float value) {
  std::vector<float> x(12), rows(48), out(12);
  std::iota(x.begin(), x.end(), value);
  const std::vector<int32_t> experts = {0, 3, 1, 2, 3, 0, 2, 1};
  std::vector<int32_t> row_of(8), slot_of(16), row_here(16), offsets(3), verdict(1);
  const ExchangeMap map{row_of.data(), slot_of.data(), row_here.data(), offsets.data(),
                        verdict.data()};
  const test::OwnedWorkspace workspace(plan.workspace_bytes);
  const TensorView tokens = view(x.data(), DType::kF32, {4, 3}),
                   there = view(rows.data(), DType::kF32, {16, 3}),
                   back = view(out.data(), DType::kF32, {4, 3});
  dispatch(plan, window, {.x = tokens, .experts = experts.data(), .rows = there, .map = map},
           workspace.get(), {});
  collect(plan, window, {.y = there, .out = back, .map = map}, {});
  window.check();
  for (size_t i = 0; i < x.size(); ++i) demand(out[i] == 2 * x[i], "rows of another rank");
}

TEST(AdoptedWindow, ServesProcesses) {
  Group group;
  for (const Ended& end : test::in_processes(2, [&](int rank, const std::string&folder) {
         Window window =
             Window::adopt(group.plan, group.addresses(), rank, all_gather_in(folder, rank, 2));
         group.memory.clear();
         demand(window.bytes() == group.plan.window.bytes, "bytes");
         for (int round = 0; round < 50; ++round)
           run_exchanges(group.plan, window, float(100 * rank + round));
       }))
    EXPECT_EQ(end.error + std::to_string(end.signal), "0");
}

TEST(AdoptedWindow, LiesWhereTheCallerWrites) {
  const Group group;
  test::ThreadGroup threads(2);
  EXPECT_EQ(test::on_ranks(2,
                           [&](int rank) {
                             const Window window = Window::adopt(group.plan, group.addresses(),
                                                                 rank, threads.all_gather(rank));
                             char* own = group.memory[size_t(rank)].data();
                             const int64_t at = group.plan.window.tokens;
                             std::memset(own + at, 0x40 + rank, 48);
                             demand(std::memcmp(own + at, window.tokens(group.plan).data, 48) == 0,
                                    "another memory");
                           }),
            std::vector<std::string>(2));
}

/// What both ranks throw, whose addresses are what `of` makes of the right ones.
template <class Of>
std::string error_of(const Group& group, Of&& of) {
  test::ThreadGroup threads(2);
  const std::vector<std::string> errors = test::on_ranks(2, [&](int rank) {
    Window::adopt(group.plan, of(rank, group.addresses()), rank, threads.all_gather(rank));
  });
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
}

using Addresses = std::vector<void*>;

std::string not_of(int rank) {
  return text("the memory at the address of rank ", rank, " is not that which rank ", rank,
              " has there, or does not begin there");
}

TEST(AdoptedWindowErrors, AreThoseOfEveryRank) {
  const Group group;
  const auto error = [&](auto&& of) { return error_of(group, of); };
  EXPECT_EQ(error([](int, const Addresses& all) { return Addresses{all[0]}; }),
            "window: rank 0 failed: there are 1 addresses, must be 2; one a rank");
  EXPECT_EQ(error([](int rank, const Addresses& all) {
              return rank == 1 ? Addresses{all[1], static_cast<char*>(all[1]) + 64} : all;
            }),
            text("window: rank 1 failed: the memory of ranks 0 and 1 is 64 bytes apart, must be at "
                 "least ",
                 group.plan.window.bytes, ", the bytes of a window"));
  // Both have marked the same memory, one after the other.
  const std::string swapped = error([](int rank, const Addresses& all) {
    return rank == 1 ? Addresses{all[1], all[0]} : all;
  });
  EXPECT_TRUE(swapped == text("window: rank 0 failed: ", not_of(0)) ||
              swapped == text("window: rank 0 failed: ", not_of(1)))
      << swapped;
}

TEST(AdoptedWindowErrors, OfMemoryOfAnotherGroup) {
  const Group group;
  const std::vector<RankBytes> others = group.make(1);
  EXPECT_EQ(error_of(group,
                     [&](int rank, const Addresses& all) {
                       return rank == 0 ? Addresses{all[0], others[0].data()} : all;
                     }),
            text("window: rank 0 failed: ", not_of(1)));
}

TEST(AdoptedWindowErrors, WhereOneRankMakesItsOwn) {
  const Group group;
  test::ThreadGroup threads(2);
  for (const std::string& error : test::on_ranks(2, [&](int rank) {
         if (rank == 0) return void(Window::create(group.plan, 0, threads.all_gather(0)));
         Window::adopt(group.plan, group.addresses(), 1, threads.all_gather(1));
       }))
    EXPECT_EQ(error,
              "window: the memory of rank 1 is adopted, must be its own as that of rank 0; all "
              "ranks call create, or adopt");
}

/// What rank 1 says of the address that it has of rank 0's memory, or of none such.
std::string error_at(const Group& group, void* address) {
  return error_of(group, [&](int rank, const Addresses& all) {
    return rank == 1 ? Addresses{address, all[1]} : all;
  });
}

#ifdef CADRE_EMULATED
TEST(AdoptedWindowErrors, OfMemoryThatCannotBeMappedAgain) {
  Group group;
  std::vector<char> heap(size_t(group.bytes));
  EXPECT_EQ(error_at(group, heap.data()),
            "window: rank 1 failed: window: cannot take the memory of rank 0, which must be CUDA's "
            "virtual memory: the driver says 1");
  group.plan.window.bytes = 150'000;
  group.bytes = 192 << 10;
  group.memory = group.make(2);
  const RankBytes small(128 << 10);
  EXPECT_EQ(error_at(group, small.data()),
            "window: rank 1 failed: window: cannot map 196608 bytes of the memory of rank 0: the "
            "driver says 1");
}

/// Addresses so far behind the beginning of each rank's memory.
Addresses behind(const Addresses& all, const std::vector<int64_t>& offsets) {
  Addresses moved;
  for (size_t p = 0; p < all.size(); ++p) moved.push_back(static_cast<char*>(all[p]) + offsets[p]);
  return moved;
}

/// With a page more than a window has.
Group wide_group() {
  Group group;
  group.bytes += 64 << 10;
  group.memory = group.make(2);
  return group;
}

TEST(AdoptedWindow, BeginsWithinAllocations) {
  const Group group = wide_group();
  test::ThreadGroup threads(2);
  EXPECT_EQ(test::on_ranks(
                2,
                [&](int rank) {
                  Window window = Window::adopt(group.plan, behind(group.addresses(), {2048, 2048}),
                                                rank, threads.all_gather(rank));
                  run_exchanges(group.plan, window, float(rank));
                  for (int64_t i = 0; i < 2048; ++i)
                    demand(group.memory[size_t(rank)].data()[i] == 0x5a, "a byte before it");
                }),
            std::vector<std::string>(2));
}

TEST(AdoptedWindowErrors, OfPlacesWithinAllocations) {
  const Group group = wide_group();
  const auto error = [&](const std::vector<int64_t>& offsets) {
    return error_of(group, [&](int, const Addresses& all) { return behind(all, offsets); });
  };
  EXPECT_EQ(error({64, 64}),
            "window: rank 0 failed: the memory of rank 0 begins 64 bytes within its allocation, "
            "must begin a multiple of 256");
  EXPECT_EQ(error({256, 512}),
            "window: rank 0 failed: the memory of rank 1 begins 512 bytes within its allocation, "
            "must begin 256 as that of rank 0 does");
  EXPECT_EQ(error({128 << 10, 128 << 10}),
            text("window: rank 0 failed: window: cannot map ", group.bytes + (64 << 10),
                 " bytes of the memory of rank 0: the driver says 1"));
}
#else
TEST(AdoptedWindowErrors, OfMemoryThatCannotBeMappedAgain) {
  const Group group;
  const std::string rank_1 = "window: rank 1 failed: the memory of rank 0 ";
  const auto mapped = [&](int access, int kind, int64_t bytes) {
    // Alone, with room on both sides.
    auto* room = static_cast<char*>(
        mmap(nullptr, size_t(4 * bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    void* data = mmap(room + (2 * bytes & -4096), size_t(bytes), access,
                      kind | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    const std::string error = error_at(group, data);
    munmap(room, size_t(4 * bytes));
    return error;
  };
  constexpr int kBoth = PROT_READ | PROT_WRITE;
  EXPECT_EQ(mapped(kBoth, MAP_PRIVATE, group.bytes),
            rank_1 + "is 'rw-p', must be a shared mapping, 'rw-s'");
  EXPECT_EQ(mapped(PROT_READ, MAP_SHARED, group.bytes),
            rank_1 + "is 'r--s', must be a shared mapping, 'rw-s'");
  EXPECT_EQ(mapped(kBoth, MAP_SHARED, group.bytes - 4096),
            rank_1 + text("has ", group.bytes - 4096, " bytes, must have ", group.bytes));
  EXPECT_EQ(error_at(group, nullptr), rank_1 + "is not mapped, must be a shared mapping, 'rw-s'");
  EXPECT_EQ(error_at(group, group.memory[0].data() + 64),
            rank_1 + "begins within a page, must begin with one");
}
#endif

}  // namespace
