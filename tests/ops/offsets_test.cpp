#include "cadre/offsets.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/judge/counts.h"
#include "tests/judge/errors.h"
#include "tests/judge/threads.h"
#include "tests/ops/offsets_case.h"

using namespace cadre;

using test::random_routing;
using Outputs = test::OffsetsOut;

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

/// The fast one, after it was seen to equal the reference in every byte.
template <class Index>
Outputs both(const OffsetsProblem& p, const std::vector<Index>& source) {
  const Outputs want = test::offsets_on_cpu(p, source, "cpu_reference");
  const Outputs got = test::offsets_on_cpu(p, source, "cpu");
  EXPECT_TRUE(got == want) << to_string(p);
  EXPECT_TRUE(p.source != OffsetsSource::kRouting || got.has_row_prob_of(got.prob)) << to_string(p);
  return got;
}

OffsetsProblem counts_problem(const test::Counts& counts, OffsetsSource source, DType index) {
  return {.source = source, .rows = counts.rows, .experts = counts.experts(), .index = index};
}

TEST(Offsets, OfTwoThousandCountVectorsAreTheirSums) {
  test::for_random_counts(2400, 1, [](const test::Counts& counts) {
    const auto p = counts_problem(counts, OffsetsSource::kCounts, DType::kI64);
    const Outputs got = both(p, counts.of);
    EXPECT_EQ(got.offset_list(), counts.offsets()) << to_string(p);
    EXPECT_EQ(*got.status.data<int32_t>(), kOffsetsGood);

    const std::vector<int32_t> narrow(counts.of.begin(), counts.of.end());
    const auto p32 = counts_problem(counts, OffsetsSource::kCounts, DType::kI32);
    EXPECT_EQ(both(p32, narrow).offset_list(), counts.offsets()) << to_string(p);

    const std::vector<int32_t> sums = counts.offsets();
    const std::vector<int32_t> ends(sums.begin() + 1, sums.end());
    const auto by_ends = counts_problem(counts, OffsetsSource::kEnds, DType::kI32);
    EXPECT_EQ(both(by_ends, ends).offset_list(), sums) << to_string(by_ends);
  });
}

struct Broken {
  OffsetsSource source;
  std::vector<int64_t> numbers;
  std::vector<int32_t> want;
  int32_t status;
};

TEST(Offsets, OfBrokenCountsAreClampedAndTheStatusSaysSo) {
  constexpr auto kCounts = OffsetsSource::kCounts, kEnds = OffsetsSource::kEnds;
  constexpr int32_t kBoth = kOffsetsDecreasing | kOffsetsBeyondRows;
  const Broken cases[] = {
      {kCounts, {3, 4, 3}, {0, 3, 7, 10}, kOffsetsGood},  // R = 10
      {kCounts, {3, -4, 3}, {0, 3, 3, 6}, kOffsetsDecreasing},
      {kCounts, {3, 8, 3}, {0, 3, 10, 10}, kOffsetsBeyondRows},
      {kCounts, {kMost, kMost, 1}, {0, 10, 10, 10}, kOffsetsBeyondRows},
      {kCounts, {-kMost - 1, 11, 0}, {0, 0, 10, 10}, kBoth},
      {kEnds, {3, 7, 10}, {0, 3, 7, 10}, kOffsetsGood},
      {kEnds, {5, 3, 7}, {0, 5, 5, 7}, kOffsetsDecreasing},
      {kEnds, {-1, 3, 3}, {0, 0, 3, 3}, kOffsetsDecreasing},
      {kEnds, {3, 11, 12}, {0, 3, 10, 10}, kOffsetsBeyondRows},
      {kEnds, {kMost, 2, -kMost - 1}, {0, 10, 10, 10}, kBoth},
  };
  for (const Broken& broken : cases) {
    const OffsetsProblem p{.source = broken.source, .rows = 10, .experts = 3, .index = DType::kI64};
    const Outputs got = both(p, broken.numbers);
    EXPECT_EQ(got.offset_list(), broken.want);
    EXPECT_EQ(*got.status.data<int32_t>(), broken.status);
  }
}

TEST(Offsets, OfRoutingSortStably) {
  std::mt19937 random(2);
  for (int experts : {1, 2, 3, 8, 64, 384})
    for (int64_t tokens : {int64_t(0), int64_t(1), int64_t(37), int64_t(200)})
      for (int64_t missing : {int64_t(-5), int64_t(0), int64_t(40)}) {  // R above, at, below
        const int64_t rows = std::max<int64_t>(0, 3 * tokens - missing);
        const OffsetsProblem p{.source = OffsetsSource::kRouting,
                               .rows = rows,
                               .experts = experts,
                               .tokens = tokens,
                               .top_k = 3,
                               .index = DType::kI32};
        both(p, random_routing<int32_t>(random, p));
        OffsetsProblem wide = p;
        wide.index = DType::kI64;
        both(wide, random_routing<int64_t>(random, wide));
      }
}

TEST(Offsets, OfRoutingByHand) {
  const OffsetsProblem p{.source = OffsetsSource::kRouting,
                         .rows = 4,
                         .experts = 3,
                         .tokens = 3,
                         .top_k = 2,
                         .index = DType::kI64};
  const Outputs got = both(p, std::vector<int64_t>{2, 0, 0, -1, 2, 2});
  EXPECT_EQ(got.offset_list(), (std::vector<int32_t>{0, 2, 2, 4}));
  const int32_t row_of[] = {2, 0, 1, -1, 3, -1};  // the last one would be row 4
  const int32_t slot_of[] = {1, 2, 0, 4};
  EXPECT_TRUE(std::equal(row_of, row_of + 6, got.row_of.data<int32_t>()));
  EXPECT_TRUE(std::equal(slot_of, slot_of + 4, got.slot_of.data<int32_t>()));
  for (int row = 0; row < 4; ++row)
    EXPECT_EQ(got.row_prob.data<uint32_t>()[row], got.prob.data<uint32_t>()[slot_of[row]]);
  EXPECT_EQ(*got.status.data<int32_t>(), kOffsetsBeyondRows);
}

TEST(Offsets, OfManyTokensDoNotDependOnTheThreads) {
  std::mt19937 random(3);
  const OffsetsProblem p{.source = OffsetsSource::kRouting,
                         .rows = 59'000,
                         .experts = 61,
                         .tokens = 30'011,
                         .top_k = 2,
                         .index = DType::kI32};
  const auto experts = random_routing<int32_t>(random, p);
  const Outputs want = test::offsets_on_cpu(p, experts, "cpu_reference");
  for (int threads : {1, 2, 3}) {
    const test::Threads set(threads);
    EXPECT_TRUE(test::offsets_on_cpu(p, experts, "cpu") == want) << threads;
  }
}

TEST(Offsets, LeaveTheTailOfTheMapAndTakeNullMaps) {
  const OffsetsProblem p{.source = OffsetsSource::kRouting,
                         .rows = 5,
                         .experts = 2,
                         .tokens = 2,
                         .top_k = 1,
                         .index = DType::kI32};
  const std::vector<int32_t> experts = {1, 0};
  for (const char* name : {"cpu", "cpu_reference"}) {
    const Outputs got = test::offsets_on_cpu(p, experts, name);
    EXPECT_EQ(got.slot_of.data<int32_t>()[1], 0);
    for (const test::Tensor* of_rows : {&got.slot_of, &got.row_prob})
      for (int r = 2; r < 5; ++r) EXPECT_EQ(of_rows->data<int32_t>()[r], -1) << "poison";

    std::vector<int32_t> offsets(3);
    const OffsetsPlan made = plan(p, this_cpu(), name);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    run(made, {.source = experts.data(), .offsets = offsets.data()}, workspace.get(), {});
    EXPECT_EQ(offsets, (std::vector<int32_t>{0, 1, 2}));
  }
}

TEST(Offsets, GiveProbabilitiesOfRowsWithoutAMap) {
  const OffsetsProblem p{
      .source = OffsetsSource::kRouting, .rows = 3, .experts = 2, .tokens = 3, .top_k = 1};
  const std::vector<int32_t> experts = {1, -1, 0};
  const std::vector<float> prob = {0.25f, 0.5f, 0.75f};
  for (const char* name : {"cpu", "cpu_reference"}) {
    std::vector<int32_t> offsets(3);
    std::vector<float> row_prob(3, 9);
    const OffsetsPlan made = plan(p, this_cpu(), name);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    run(made,
        {.source = experts.data(),
         .offsets = offsets.data(),
         .prob = prob.data(),
         .row_prob = row_prob.data()},
        workspace.get(), {});
    EXPECT_EQ(row_prob, (std::vector<float>{0.75f, 0.25f, 9}));
  }
}

TEST(OffsetsProblem, PrintsAndParsesBack) {
  const OffsetsProblem routing{.source = OffsetsSource::kRouting,
                               .rows = 8192,
                               .experts = 64,
                               .tokens = 4096,
                               .top_k = 2,
                               .index = DType::kI64};
  EXPECT_EQ(to_string(routing), "offsets routing R=8192 E=64 T=4096 top_k=2 index=i64");
  EXPECT_EQ(parse_offsets_problem(to_string(routing)), routing);
  const OffsetsProblem ends{.source = OffsetsSource::kEnds, .rows = 5, .experts = 3};
  EXPECT_EQ(to_string(ends), "offsets ends R=5 E=3 index=i32");
  EXPECT_EQ(parse_offsets_problem("offsets ends E=3 R=5"), ends);
}

std::string plan_error(std::string_view words) {
  return test::invalid([&] { plan(parse_offsets_problem(words), this_cpu()); });
}

TEST(OffsetsErrors, OfProblems) {
  EXPECT_EQ(plan_error("offsets counts R=8 E=0"),
            "offsets: E is 0, must be 1 or more [offsets counts R=8 E=0 index=i32]");
  EXPECT_EQ(plan_error("offsets counts R=2147483648 E=1"),
            "offsets: R is 2147483648, must be below 2^31; rows are numbered in int32 "
            "[offsets counts R=2147483648 E=1 index=i32]");
  EXPECT_EQ(plan_error("offsets counts R=8 E=1 index=f32"),
            "offsets: index is f32, must be i32 or i64 [offsets counts R=8 E=1 index=f32]");
  EXPECT_EQ(plan_error("offsets counts R=8 E=1 T=3"),
            "offsets: T and top_k are 3 and 0, must be 0; only routing has tokens "
            "[offsets counts R=8 E=1 T=3 index=i32]");
  EXPECT_EQ(plan_error("offsets routing R=8 E=1 T=3"),
            "offsets: top_k is 0, must be 1 or more; routing gives every token that many experts "
            "[offsets routing R=8 E=1 T=3 index=i32]");
  EXPECT_EQ(plan_error("offsets routing R=8 E=1 T=2147483648 top_k=1"),
            "offsets: T is 2147483648, must be below 2^31; rows are numbered in int32 "
            "[offsets routing R=8 E=1 T=2147483648 top_k=1 index=i32]");
  EXPECT_EQ(plan_error("offsets routing R=8 E=1 T=1073741824 top_k=2"),
            "offsets: T * top_k is 2147483648, must be below 2^31; rows are numbered in int32 "
            "[offsets routing R=8 E=1 T=1073741824 top_k=2 index=i32]");
  EXPECT_EQ(test::invalid([] { plan(OffsetsProblem{.rows = -1}, this_cpu()); }),
            "offsets: R is -1, must be 0 or more [offsets counts R=-1 E=1 index=i32]");
  EXPECT_EQ(test::invalid([] {
              plan({.source = OffsetsSource::kRouting, .tokens = -1, .top_k = 1}, this_cpu());
            }),
            "offsets: T is -1, must be 0 or more [offsets routing R=0 E=1 T=-1 top_k=1 index=i32]");
}

struct OffsetsArgsErrors : testing::Test {
  int64_t source[4] = {};
  int32_t offsets[4] = {}, map[4] = {};
  float probs[4] = {};
  OffsetsProblem p{.rows = 8, .experts = 3, .index = DType::kI64};
  OffsetsArgs args{.source = source, .offsets = offsets};

  std::string error() {
    return test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); });
  }
  const std::string problem = " [offsets counts R=8 E=3 index=i64]";

  const OffsetsProblem of_routing{.source = OffsetsSource::kRouting,
                                  .rows = 4,
                                  .experts = 3,
                                  .tokens = 2,
                                  .top_k = 2,
                                  .index = DType::kI64};
  const std::string routing = " [offsets routing R=4 E=3 T=2 top_k=2 index=i64]";
};

TEST_F(OffsetsArgsErrors, NoneWhereNothingIsWrong) { EXPECT_EQ(error(), "nothing was thrown"); }
TEST_F(OffsetsArgsErrors, MissingSource) {
  args.source = nullptr;
  EXPECT_EQ(error(), "offsets: source is null, must point to 3 elements" + problem);
}
TEST_F(OffsetsArgsErrors, MissingOffsets) {
  args.offsets = nullptr;
  EXPECT_EQ(error(), "offsets: offsets is null, must point to 4 elements" + problem);
}
TEST_F(OffsetsArgsErrors, SurplusMap) {
  args.map.row_of = map;
  EXPECT_EQ(error(),
            "offsets: map.row_of is given, must be null; only routing makes a row map" + problem);
  args.map = {.slot_of = map};
  EXPECT_EQ(error(),
            "offsets: map.slot_of is given, must be null; only routing makes a row map" + problem);
}
TEST_F(OffsetsArgsErrors, SurplusProbabilities) {
  args.prob = probs;
  EXPECT_EQ(error(),
            "offsets: prob is given, must be null; only routing makes a row map" + problem);
  args.prob = nullptr;
  args.row_prob = probs;
  EXPECT_EQ(error(),
            "offsets: row_prob is given, must be null; only routing makes a row map" + problem);
}
TEST_F(OffsetsArgsErrors, ProbabilitiesThatNobodyWants) {
  p = of_routing;
  args.prob = probs;
  EXPECT_EQ(error(), "offsets: prob is given, must be null; row_prob is not wanted" + routing);
}
TEST_F(OffsetsArgsErrors, MissingOrMisalignedProbabilities) {
  p = of_routing;
  args.row_prob = probs;
  EXPECT_EQ(error(),
            "offsets: prob is null, must point to 4 elements; row_prob is made of it" + routing);
  args.prob = reinterpret_cast<float*>(reinterpret_cast<char*>(probs) + 1);
  EXPECT_EQ(error(),
            text("offsets: prob is at ", args.prob, ", must be aligned to 4 bytes", routing));
  args.row_prob = reinterpret_cast<float*>(reinterpret_cast<char*>(probs) + 2);
  EXPECT_EQ(error(), text("offsets: row_prob is at ", args.row_prob, ", must be aligned to 4 bytes",
                          routing));
}
TEST_F(OffsetsArgsErrors, Misaligned) {
  args.source = reinterpret_cast<char*>(source) + 4;
  EXPECT_EQ(error(),
            text("offsets: source is at ", args.source, ", must be aligned to 8 bytes", problem));
  args.source = source;
  args.status = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(map) + 1);
  EXPECT_EQ(error(),
            text("offsets: status is at ", args.status, ", must be aligned to 4 bytes", problem));
}

}  // namespace
