#pragma once
#include <string>
#include <vector>

#include "cadre/collective.h"
#include "tests/parallel/rank_case.h"
#include "tests/parallel/rank_step.h"
#include "tests/parallel/thread_engine.h"

namespace cadre::test {

/// The tensors of a rank beside the map of a Collective.
struct CollectiveCase : RankCase {
  std::vector<int32_t> leaving, came_at, row_at, passing;
  std::vector<int64_t> counts;

  explicit CollectiveCase(const RankCase& r)
      : RankCase(r),
        leaving(size_t(p.ranks * p.experts) + 1, -7),
        came_at(size_t(p.rows), -7),
        row_at(size_t(p.block > 0 ? p.ranks * p.block : p.rows), -7) {
    const ExpertParallelPlan made = plan(p, rank_device(), "collective");
    counts.assign(size_t(made.counts), -7);
    passing.assign(size_t(made.passing), -7);
    slot_of.assign(size_t(p.block > 0 ? p.ranks * p.block : p.tokens * p.top_k), -7);
    if (p.block > 0) verdict.assign(3, -7);
  }

  CollectiveMap collective_map() {
    const bool in_blocks = p.block > 0;
    return {row_of.data(),
            slot_of.data(),
            leaving.data(),
            came_at.data(),
            row_at.data(),
            offsets.data(),
            in_blocks ? nullptr : counts.data(),
            in_blocks ? verdict.data() : nullptr,
            passing.empty() ? nullptr : passing.data()};
  }
  CollectiveDispatchArgs collective_dispatch_args() {
    return {.x = x.view(),
            .experts = experts.data(),
            .prob = p.prob ? prob.data<float>() : nullptr,
            .rows = rows.view(),
            .row_prob = p.prob ? row_prob.data<float>() : nullptr,
            .routed = routed.data(),
            .map = collective_map()};
  }
  CollectiveDispatchBackwardArgs collective_dispatch_backward_args() {
    return {.drows = drows.view(),
            .drow_prob = p.prob ? drow_prob.data<float>() : nullptr,
            .dx = dx.view(),
            .dprob = p.prob ? dprob.data<float>() : nullptr,
            .map = collective_map()};
  }
};

/// One rank, all four exchanges.
inline void step(Collective& collective, CollectiveCase& r) {
  const OwnedWorkspace workspace(collective.plan().workspace_bytes);
  const int first = collective.rank() * r.p.experts;
  dispatch(collective, r.collective_dispatch_args(), workspace.get(), {});
  if (r.p.block == 0) r.verdict[0] = int32_t(r.counts[6 * size_t(r.p.ranks) + 2]);
  make_y(r, first);
  collect(collective, {.y = r.y.view(), .out = r.out.view(), .map = r.collective_map()},
          OwnedWorkspace(collective.plan().workspace_bytes).get(), {});
  collect_backward(collective,
                   {.dout = r.dout.view(), .dy = r.dy.view(), .map = r.collective_map()},
                   workspace.get(), {});
  make_drows(r, first);
  dispatch_backward(collective, r.collective_dispatch_backward_args(),
                    OwnedWorkspace(collective.plan().workspace_bytes).get(), {});
}

/// Says what crosses: by host two ranks share one, and of an odd number the last has its own.
inline void cross_by(ExpertParallelProblem& p, Crossing crossing) {
  p.cross = crossing;
  p.host_ranks = crossing == Crossing::kHost ? std::min(p.ranks, 2) : 0;
}

/// A group of ranks that are threads.
struct CollectiveGroup {
  explicit CollectiveGroup(const ExpertParallelProblem& p)
      : plan(cadre::plan(p, rank_device(), "collective")), engine(p.ranks) {
    for (int q = 0; q < p.ranks; ++q) ranks.emplace_back(plan, q, engine.of(q));
  }

  ExpertParallelPlan plan;
  ThreadEngine engine;
  std::vector<Collective> ranks;
};

inline std::vector<CollectiveCase> collective_cases(const std::vector<RankCase>& ranks) {
  return {ranks.begin(), ranks.end()};
}

}  // namespace cadre::test
