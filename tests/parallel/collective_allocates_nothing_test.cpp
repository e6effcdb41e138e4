// Exchanges by an engine allocate nothing, as no run does.
#include <gtest/gtest.h>

#include <array>
#include <barrier>

#include "tests/count_allocations.h"
#include "tests/parallel/collective_case.h"

using namespace cadre;

namespace {

void exchange(Collective& own, test::CollectiveCase& r, Workspace workspace) {
  dispatch(own, r.collective_dispatch_args(), workspace, {});
  collect(own, {.y = r.rows.view(), .out = r.out.view(), .map = r.collective_map()}, workspace, {});
  collect_backward(own, {.dout = r.out.view(), .dy = r.dy.view(), .map = r.collective_map()},
                   workspace, {});
  dispatch_backward(own, r.collective_dispatch_backward_args(), workspace, {});
}

/// All four exchanges of one rank, by itself.
void expect_no_allocation(const ExpertParallelProblem& p) {
  Collective own(plan(p, this_cpu(), "collective"), 0,
                 [](std::span<const RankMessage> messages, Stream) {
                   for (const RankMessage& m : messages)
                     std::memcpy(m.receive, m.send, size_t(m.send_bytes));
                 });
  test::CollectiveCase r(test::RankCase(p, 9));
  for (size_t i = 0; i < r.experts.size(); ++i) r.experts[i] = int32_t(i % 4) - 1;
  const test::OwnedWorkspace workspace(own.plan().workspace_bytes);
  const int before = allocations;
  exchange(own, r, workspace.get());
  EXPECT_EQ(allocations - before, 0);
  EXPECT_EQ(r.used(), 13);
}

TEST(Collective, AllocatesNothing) {
  ExpertParallelProblem p{.tokens = 9, .top_k = 2, .hidden = 4, .experts = 3, .rows = 18};
  expect_no_allocation(p);
  p.cross = Crossing::kToken;
  expect_no_allocation(p);
  p.cross = Crossing::kAuto;
  p.block = 14;
  expect_no_allocation(p);
}

TEST(Collective, OfSeveralHostsAllocatesNothing) {
  ExpertParallelProblem p{.tokens = 9, .top_k = 2, .hidden = 4, .experts = 3, .ranks = 3};
  p.rows = 54;
  p.cross = Crossing::kHost, p.host_ranks = 2;
  test::CollectiveGroup group(p);
  std::barrier met(p.ranks);
  std::array<int, 3> made{};
  for (const std::string& error : test::on_ranks(p.ranks, [&](int q) {
         test::CollectiveCase r(test::RankCase(p, 9));
         for (size_t i = 0; i < r.experts.size(); ++i) r.experts[i] = int32_t(i % 10) - 1;
         const test::OwnedWorkspace workspace(group.plan.workspace_bytes);
         met.arrive_and_wait();
         const int before = allocations;
         met.arrive_and_wait();
         exchange(group.ranks[size_t(q)], r, workspace.get());
         met.arrive_and_wait();
         made[size_t(q)] = allocations - before;
         met.arrive_and_wait();
       }))
    EXPECT_EQ(error, "");
  EXPECT_EQ(made, (std::array<int, 3>{}));
}

}  // namespace
