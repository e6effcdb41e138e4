// Copies of a case: every pointer moves, and what ran on the copy comes back.
#include "bench/mirror.h"

#include <gtest/gtest.h>

#include "bench/case.h"
#include "bench/compare.h"
#include "bench/visit.h"
#include "tests/bench/host_accelerator.h"
#include "tests/bench/problems.h"

namespace cadre {
namespace {

const bench::Draw kDraw{.seed = 5, .offsets = "uniform", .live = 0.9};

TEST(Mirror, WhatRunsOnTheCopyEqualsWhatRunsOnTheCase) {
  for (const char* words : test::kProblems)
    bench::visit_problem(words, [&](const auto& problem) {
      const auto chosen = plan(problem, this_cpu());
      auto want = bench::make_case(problem, kDraw), got = bench::make_case(problem, kDraw);
      run(chosen, want.args, want.buffers->workspace(chosen.workspace_bytes), {});
      const Workspace scratch = got.buffers->workspace(chosen.workspace_bytes);
      test::HostAccelerator accelerator;
      {
        const bench::Mirror mirror(*got.buffers, accelerator);
        const auto poison = bench::snapshot(got.outputs[0]);
        run(chosen, mirror.moved(got.args), mirror.moved(scratch), {});
        EXPECT_EQ(bench::snapshot(got.outputs[0]), poison) << "the case itself was written";
        mirror.fetch();
      }
      EXPECT_TRUE(accelerator.taken.empty());
      for (size_t i = 0; i < got.outputs.size(); ++i)
        EXPECT_EQ(bench::snapshot(got.outputs[i]), bench::snapshot(want.outputs[i])) << words;
      EXPECT_TRUE(got.buffers->canaries_live()) << words;
      return 0;
    });
}

TEST(Mirror, MovesPlacesInBuffersAndNoOthers) {
  bench::Buffers buffers;
  auto* data = buffers.array<int>(4);
  test::HostAccelerator accelerator;
  const bench::Mirror mirror(buffers, accelerator);
  auto* moved = static_cast<char*>(mirror.place_of(data));
  EXPECT_NE(static_cast<void*>(moved), static_cast<void*>(data));
  EXPECT_EQ(static_cast<char*>(mirror.place_of(data + 3)) - moved, 12);
  int outside = 0;
  EXPECT_EQ(mirror.place_of(&outside), &outside);
  EXPECT_EQ(mirror.place_of(nullptr), nullptr);
}

TEST(Mirror, ADeadCanaryOfTheCopyIsFetched) {
  for (const int64_t place : {-1, 16}) {
    bench::Buffers buffers;
    auto* data = buffers.array<char>(16);
    test::HostAccelerator accelerator;
    const bench::Mirror mirror(buffers, accelerator);
    mirror.fetch_canaries();
    EXPECT_TRUE(buffers.canaries_live());
    static_cast<char*>(mirror.place_of(data))[place] = 0;
    EXPECT_TRUE(buffers.canaries_live());
    mirror.fetch_canaries();
    EXPECT_FALSE(buffers.canaries_live());
  }
}

TEST(Mirror, FetchesOneBufferAlone) {
  bench::Buffers buffers;
  auto *one = buffers.array<char>(16), *two = buffers.array<char>(16);
  test::HostAccelerator accelerator;
  const bench::Mirror mirror(buffers, accelerator);
  static_cast<char*>(mirror.place_of(one))[3] = 7;
  static_cast<char*>(mirror.place_of(two))[3] = 7;
  mirror.fetch(two + 1);
  EXPECT_EQ(one[3], '\xff');
  EXPECT_EQ(two[3], 7);
}

TEST(Device, RunsAreForDevicesOfThisMachine) {
  EXPECT_EQ(bench::running_device("cpu"), this_cpu());
  const auto error_of = [](const char* word) -> std::string {
    try {
      bench::running_device(word);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(
      error_of("sm_90"),
      "device: name is 'sm_90', must be cpu, cuda or cuda:<index>; only 'cadre explain' plans "
      "for devices that are not here");
  if (!cuda_devices().empty()) return;
  EXPECT_EQ(error_of("cuda"), "device: 'cuda' is not here; " + bench::why_no_accelerator() +
                                  ", or give --device cpu");
}

}  // namespace
}  // namespace cadre
