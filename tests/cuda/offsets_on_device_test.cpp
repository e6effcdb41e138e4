// Offsets and row maps on the GPU are those of the CPU's reference, byte for byte.
#include "cadre/offsets.h"

#include <limits>

#include "tests/cuda/mirror.h"
#include "tests/judge/counts.h"
#include "tests/ops/offsets_case.h"

namespace cadre {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
using test::random_routing;
using OffsetsOnDevice = test::OnDevice;
using Outputs = test::OffsetsOut;

template <class Index>
Outputs on_gpu(const OffsetsProblem& p, const std::vector<Index>& source) {
  Outputs out(p);
  test::Mirror mirror;
  const OffsetsPlan made = plan(p, test::first_gpu());
  EXPECT_EQ(made.name, "cuda_offsets");
  const OffsetsArgs args = out.args(p, mirror.data(source),
                                    [&](const test::Tensor& t) { return mirror.data<int32_t>(t); });
  const Workspace workspace = mirror.workspace(made.workspace_bytes);
  mirror.replay(2, [&](Stream stream) { run(made, args, workspace, stream); });
  return out;
}

template <class Index>
void check(const OffsetsProblem& p, const std::vector<Index>& source,
           std::string_view only = "cpu_reference") {
  EXPECT_TRUE(on_gpu(p, source) == test::offsets_on_cpu(p, source, only)) << to_string(p);
}

TEST_F(OffsetsOnDevice, OfCountsAndEndsAreThoseOfTheReference) {
  // On the emulator each kind of counts with each number of experts.
  test::for_random_counts(test::sized(240, 56), 1, [](const test::Counts& counts) {
    OffsetsProblem p{.source = OffsetsSource::kCounts,
                     .rows = counts.rows,
                     .experts = counts.experts(),
                     .index = DType::kI64};
    check(p, counts.of);
    p.index = DType::kI32;
    check(p, std::vector<int32_t>(counts.of.begin(), counts.of.end()));
    const std::vector<int32_t> sums = counts.offsets();
    p.source = OffsetsSource::kEnds;
    check(p, std::vector<int32_t>(sums.begin() + 1, sums.end()));
    p.index = DType::kI64;
    check(p, std::vector<int64_t>(sums.begin() + 1, sums.end()));
  });
}

TEST_F(OffsetsOnDevice, OfBrokenCountsAndEndsAreClampedAndTheStatusSaysSo) {
  const std::vector<int64_t> cases[] = {
      {3, 4, 3},  {3, -4, 3}, {3, 8, 3},  {kMost, kMost, 1}, {-kMost - 1, 11, 0},
      {3, 7, 10}, {5, 3, 7},  {-1, 3, 3}, {3, 11, 12},       {kMost, 2, -kMost - 1},
      {0, 0, 0},  {10, 0, 0}, {0, 0, 11}};
  for (OffsetsSource source : {OffsetsSource::kCounts, OffsetsSource::kEnds})
    for (const std::vector<int64_t>& numbers : cases)
      check({.source = source, .rows = 10, .experts = 3, .index = DType::kI64}, numbers);
}

TEST_F(OffsetsOnDevice, OfThousandsOfExpertsCarryFromBlockToBlock) {
  std::mt19937 random(5);
  for (int experts : {1023, 1024, 1025, 5000}) {
    std::vector<int64_t> numbers;
    for (int e = 0; e < experts; ++e) numbers.push_back(int64_t(random() % 40) - 2);
    for (OffsetsSource source : {OffsetsSource::kCounts, OffsetsSource::kEnds})
      for (int64_t rows : {20, 20 * experts / 2, 40 * experts})
        check({.source = source, .rows = rows, .experts = experts, .index = DType::kI64}, numbers);
  }
}

TEST_F(OffsetsOnDevice, OfRoutingSortStably) {
  std::mt19937 random(2);
  for (int experts : {1, 2, 3, 8, 64, 384, 1024, 3000})
    for (int64_t tokens : {0, 1, 37, 350, test::sized(1500, 150)})
      for (int64_t missing : {-5, 0, 40}) {  // R above, at, below
        OffsetsProblem p{.source = OffsetsSource::kRouting,
                         .rows = std::max<int64_t>(0, 3 * tokens - missing),
                         .experts = experts,
                         .tokens = tokens,
                         .top_k = 3,
                         .index = DType::kI32};
        const std::string_view only = tokens * experts > 100'000 ? "cpu" : "cpu_reference";
        check(p, random_routing<int32_t>(random, p), only);
        p.index = DType::kI64;
        check(p, random_routing<int64_t>(random, p), only);
      }
}

TEST_F(OffsetsOnDevice, OfRoutingInSeveralBlocksSortsStably) {
  std::mt19937 random(4);
  const OffsetsProblem p{.source = OffsetsSource::kRouting,
                         .rows = 3'200,
                         .experts = 500,  // about as many as a block has threads
                         .tokens = 1'100,
                         .top_k = 3,
                         .index = DType::kI32};
  check(p, random_routing<int32_t>(random, p));
  check(p, std::vector<int32_t>(size_t(p.tokens * p.top_k), 499));
}

TEST_F(OffsetsOnDevice, OfManyTokensSortStably) {
  std::mt19937 random(3);
  // On the emulator, too, more choices for each block than it takes at once.
  const int64_t tokens = test::sized(30'011, 5'011);
  for (int experts : {1, 61, 256, 1024}) {
    const OffsetsProblem p{.source = OffsetsSource::kRouting,
                           .rows = 8 * tokens - 1'088,
                           .experts = experts,
                           .tokens = tokens,
                           .top_k = 8,
                           .index = DType::kI32};
    check(p, random_routing<int32_t>(random, p), "cpu");
    check(p, std::vector<int32_t>(size_t(p.tokens * p.top_k), experts / 2), "cpu");
  }
}

TEST_F(OffsetsOnDevice, TakeNullMapsAndNoStatus) {
  const OffsetsProblem p{
      .source = OffsetsSource::kRouting, .rows = 5, .experts = 2, .tokens = 2, .top_k = 1};
  const std::vector<int32_t> experts = {1, 0}, want = {0, 1, 2};
  std::vector<int32_t> got(3, -1);
  test::Mirror mirror;
  const OffsetsArgs args{.source = mirror.data(experts), .offsets = mirror.data(got)};
  mirror.replay(1, [&](Stream stream) { run(plan(p, test::first_gpu()), args, {}, stream); });
  EXPECT_EQ(got, want);
}

// Planning for a GPU works without one.
TEST(OffsetsOnDevicePlan, RefusesOldArchitecturesAndTooManyExperts) {
  const auto refusal = [](int experts, int sm) -> std::string {
    const OffsetsProblem p{
        .source = OffsetsSource::kRouting, .rows = 8, .experts = experts, .tokens = 4, .top_k = 2};
    try {
      plan(p, {.kind = DeviceKind::kCuda, .sm = sm, .units = 108});
    } catch (const Unsupported& error) {
      const std::string words = error.what();
      return words.substr(words.rfind('\n') + 3);
    }
    return "no error";
  };
  EXPECT_EQ(refusal(64, 75), "cuda_offsets: needs sm_80 or later, has sm_75");
  EXPECT_EQ(
      refusal(20'000, 90),
      "cuda_offsets: routing takes at most 12032 experts; their counters are in shared memory");
  EXPECT_EQ(refusal(12'032, 80), "no error");
}

}  // namespace
}  // namespace cadre
