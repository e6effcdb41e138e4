// A rank whose wait for another one ends by its limit brings nothing: its window may still be read.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/parallel/exchange.h"
#include "schedule/exchange.h"

namespace cadre {
namespace {

using parallel::ExchangeJob;
using parallel::Failure;

constexpr int64_t kTokens = 4096, kHidden = 16, kBytes = kTokens * kHidden * int64_t{4};
constexpr char kOld = 7, kNew = 9;

/// The windows of two ranks, the first of which begins its second exchange. The other has not said
/// that it has read the first.
struct Late {
  static constexpr int64_t kStart = int64_t(sizeof(parallel::Control) + 255) / 256 * 256,
                           kEach = kStart + kBytes;
  std::vector<char> memory = std::vector<char>(2 * kEach, kOld);
  std::vector<char> source = std::vector<char>(kBytes, kNew);
  cuda::HostNotes notes;
  cuda::WindowTable window{memory.data(), kEach, 0, 2, 2'000'000, &notes};
  const cuda::Lane lane{nullptr, 8};
  const int32_t verdict = 0;
  ExchangeJob job{.name = {parallel::ExchangeKind::kCollect, 5}, .verdict = &verdict};

  Late() {
    for (int p = 0; p < 2; ++p) window.control(p) = {};
    window.home().epoch = window.home().read[0] = 1;
    job.brought[0] = {.from = source.data(),
                      .to = memory.data() + kStart,
                      .row_bytes = kBytes / kTokens,
                      .step = kBytes / kTokens,
                      .rows = kTokens};
  }
  void expect_nothing_brought() const {
    EXPECT_EQ(std::count(memory.begin() + kStart, memory.begin() + kEach, kOld), kBytes);
    const Failure failure = Failure::of(notes.failure);
    EXPECT_EQ(failure.why, Failure::Why::kLate);
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.epoch, 2u);
    EXPECT_EQ(window.home().epoch, 1u);
  }
};

TEST(LateRank, LeavesItsWindowToWhoReadsIt) {
  Late late;
  cuda::begin_exchange(late.window, late.job, late.lane);
  late.expect_nothing_brought();
}

TEST(LateRank, LeavesItInAKernelThatOnlyBrings) {
  Late late;
  cuda::bring_large(late.window, late.job, late.lane);
  late.expect_nothing_brought();
}

/// A collect of eight tokens, whose sums must be none.
void sum_few(Late& late) {
  const PermutePlan plan = cadre::plan(
      parse_permute_problem("permute combine T=8 top_k=1 R=4096 H=16 E=2 dtype=f32 ranks=2"),
      parse_device("sm_90"));
  const std::vector<int32_t> row_of(8, 3);
  std::vector<float> sums(8 * kHidden, 1.0f);
  late.job.outcomes[0] = {
      .data = sums.data(), .row_bytes = kHidden * 4, .step = kHidden * 4, .rows = 8};
  PermuteArgs args{.tokens = view(sums.data(), DType::kF32, {8, kHidden})};
  args.rows = view(late.memory.data() + Late::kStart, DType::kF32, {2, kTokens, kHidden});
  args.rows.stride[0] = Late::kEach / 4;
  args.map.row_of = const_cast<int32_t*>(row_of.data());
  cuda::exchange_few(late.window, late.job, {plan, args}, late.lane);
  EXPECT_TRUE(std::all_of(sums.begin(), sums.end(), [](float x) { return x != x; }));
}

TEST(LateRank, LeavesItInAnExchangeOfFewTokensWhoseSumsAreNone) {
  Late late;
  late.job.brought[0].rows = 8;  // too few for a kernel of their own
  sum_few(late);
  late.expect_nothing_brought();
}

TEST(Lane, LeavesRoomForAllRanksOfItsGpu) {
  for (const auto& [ranks, most] : {std::pair(1, 4), {2, 4}, {3, 2}, {8, 1}, {64, 1}})
    EXPECT_EQ((cuda::Lane{nullptr, 8, ranks}.most_waiting()), most) << ranks;
}

/// The same, where nobody is waited for, but a rank has told this one that another one failed: it
/// brings nothing, and nobody may take what lies there for what it should have brought.
struct FailedElsewhere : Late {
  FailedElsewhere() {
    window.home().read[1] = 1;
    window.home().failure =
        Failure{Failure::Why::kLate, parallel::ExchangeKind::kCollect, 1, 2}.word();
  }
  void expect_nobody_told() const {
    expect_nothing_brought();
    EXPECT_EQ(window.control(1).ready[0], 0u);
  }
};

TEST(FailedElsewhere, IsNotReadyInAnExchange) {
  FailedElsewhere failed;
  cuda::begin_exchange(failed.window, failed.job, failed.lane);
  failed.expect_nobody_told();
}

TEST(FailedElsewhere, IsNotReadyInAnExchangeOfFewTokens) {
  FailedElsewhere failed;
  sum_few(failed);
  failed.expect_nobody_told();
}

/// A dispatch of four tokens, in place, by the first rank. The other one has said that it has read
/// and that it is ready, and what it chose has come.
struct FewTokens : Late {
  static constexpr int kEachChoices = 8, kAll = 2 * kEachChoices, kExperts = 2, kTopK = 2;
  static constexpr int64_t kWidth = 4096;  // more parts than a block has warps
  static_assert(kEachChoices / kTopK * kWidth * 4 <= kBytes);
  static constexpr float kProb = 0.75f;
  const std::vector<int32_t> experts = {0, 1, 2, 3, 0, 1, 2, 3};
  const std::vector<float> prob = std::vector<float>(kEachChoices, kProb);
  std::vector<float> rows = std::vector<float>(kAll * kWidth), row_prob = rows;
  std::vector<int32_t> row_of = experts, slot_of = std::vector<int32_t>(kAll), row_here = slot_of,
                       offsets = {0, 0, 0};
  int32_t has_overflowed = 0;

  FewTokens() {
    job.name.kind = parallel::ExchangeKind::kDispatch;
    parallel::Control& home = window.home();
    home.read[1] = 1;
    home.ready[1] = schedule::ReadyTag{2, job.name.tag()}.word();
    for (int i = 0; i < kEachChoices; ++i) {
      home.experts[kEachChoices + i] = word(2, uint32_t(experts[size_t(i)]));
      home.prob[kEachChoices + i] = word(2, std::bit_cast<uint32_t>(kProb));
    }
    char* x = memory.data() + kStart;
    job.brought[0].from = x;
    job.brought[1] = {.from = experts.data(), .to = x, .to_all = true};
    job.brought[2] = {.from = prob.data(), .to = x, .to_all = true};
    job.outcomes[0] = {
        .data = rows.data(), .row_bytes = kWidth * 4, .step = kWidth * 4, .rows = kAll};
    job.verdict = &has_overflowed;
  }
  static uint64_t word(uint32_t epoch, uint32_t value) {
    return schedule::ReadyTag{epoch, value}.word();
  }
  void run() { run_on(lane); }
  void run_on(const cuda::Lane& some) {
    const PermutePlan plan =
        cadre::plan(parse_permute_problem(
                        "permute permute T=4 top_k=2 R=16 H=4096 E=2 dtype=f32 prob=yes ranks=2"),
                    parse_device("sm_90"));
    PermuteArgs args{.tokens = view(memory.data() + kStart, DType::kF32, {2, 4, kWidth})};
    args.tokens.stride[0] = kEach / 4;
    args.rows = view(rows.data(), DType::kF32, {kAll, kWidth});
    args.row_prob = row_prob.data();
    args.offsets = {offsets.data(), kExperts};
    const parallel::MapJob map{
        .ranks = 2,
        .experts = kExperts,
        .bound = kAll,
        .choices = kEachChoices,
        .own = kEachChoices,
        .map = {row_of.data(), slot_of.data(), row_here.data(), offsets.data(), &has_overflowed}};
    cuda::exchange_few(window, job, {plan, args, &map}, some);
  }
  void expect_late() const {
    const Failure failure = Failure::of(notes.failure);
    EXPECT_EQ(failure.why, Failure::Why::kLate);
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.epoch, 2u);
    EXPECT_TRUE(std::all_of(rows.begin(), rows.end(), [](float x) { return x != x; }));
  }
};

TEST(Routing, IsTakenWhereAllOfItHasTheEpoch) {
  FewTokens few;
  const auto token = [&](int number) {  // of both ranks
    const int64_t here = number % 4 * FewTokens::kWidth * 4;
    return &few.memory[size_t(number / 4 * Late::kEach + Late::kStart + here)];
  };
  for (int i = 0; i < 8; ++i)
    for (int64_t h = 0; h < FewTokens::kWidth; ++h) {
      const auto value = float(i * FewTokens::kWidth + h);
      std::memcpy(token(i) + h * 4, &value, sizeof value);
    }
  few.run_on({nullptr, 2});  // one block
  EXPECT_EQ(few.notes.failure, 0u);
  EXPECT_EQ(few.window.home().epoch, 2u);
  EXPECT_EQ(few.offsets, (std::vector<int32_t>{0, 4, 8}));
  EXPECT_EQ(few.slot_of[3], 12);
  for (int row = 0; row < 8; ++row)
    EXPECT_EQ(
        std::memcmp(&few.rows[size_t(row * FewTokens::kWidth)],
                    token(few.slot_of[size_t(row)] / FewTokens::kTopK), FewTokens::kWidth * 4),
        0)
        << row;
  EXPECT_EQ(few.row_prob[7], FewTokens::kProb);
  for (int p = 0; p < 2; ++p) {
    const parallel::Control& at = few.window.control(p);
    EXPECT_EQ(at.experts[7], FewTokens::word(2, 3));
    EXPECT_EQ(at.prob[7], FewTokens::word(2, std::bit_cast<uint32_t>(FewTokens::kProb)));
  }
}

TEST(Routing, IsAwaitedWhereAChoiceIsOfTheExchangeBefore) {
  FewTokens few;
  few.window.home().experts[FewTokens::kAll - 1] = FewTokens::word(1, 3);
  few.run();
  few.expect_late();
}

TEST(Routing, IsAwaitedWhereAProbabilityIsOfTheExchangeBefore) {
  FewTokens few;
  few.window.home().prob[FewTokens::kEachChoices] = FewTokens::word(1, 0);
  few.run();
  few.expect_late();
}

// The rank that fails is ready by then: nothing stops who reads, and that may have read anything.
// The kernel asks for failures at its beginning too, which is over long before; if it is not, the
// outcome is the same.
TEST(FailedRank, MakesWhatWasReadNaN) {
  FewTokens few;
  few.window.limit = 0;
  std::atomic_ref ready(few.window.home().ready[1]);
  const uint64_t tag = ready.exchange(0);
  const Failure failure{.why = Failure::Why::kLate, .rank = 1, .epoch = 2};
  std::thread other([&] {
    std::atomic_ref of_first(few.window.control(1).ready[0]);
    while (of_first.load() != tag) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref(few.window.home().failure).store(failure.word());
    ready.store(tag);
  });
  few.run_on({nullptr, 2});  // one block, since those behind it would ask at their beginning
  other.join();
  few.expect_late();
  EXPECT_EQ(few.window.home().epoch, 1u);
}

TEST(LateRank, KeepsItsRoutingForWhoReadsIt) {
  FewTokens few;
  few.window.home().read[1] = 0;
  few.run();
  few.expect_late();
  for (int p = 0; p < 2; ++p) EXPECT_EQ(few.window.control(p).experts[0], 0u);
}

}  // namespace
}  // namespace cadre
