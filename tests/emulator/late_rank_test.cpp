// A rank whose wait for another one ends by its limit brings nothing: its window may still be read.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/parallel/exchange.h"

namespace cadre {
namespace {

using parallel::ExchangeJob;
using parallel::Failure;

constexpr int64_t kTokens = 4096, kHidden = 16, kBytes = kTokens * kHidden * int64_t{4};
constexpr char kOld = 7, kNew = 9;

/// The windows of two ranks, the first of which begins its second exchange. The other has not said
/// that it has read the first.
struct Late {
  static constexpr int64_t kStart = 4096, kEach = kStart + kBytes;
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

TEST(LateRank, LeavesItInAnExchangeOfFewTokensWhoseSumsAreNone) {
  Late late;
  late.job.brought[0].rows = 8;  // too few for a kernel of their own
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
  late.expect_nothing_brought();
  EXPECT_TRUE(std::all_of(sums.begin(), sums.end(), [](float x) { return x != x; }));
}

}  // namespace
}  // namespace cadre
