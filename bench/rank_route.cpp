#include "bench/rank_route.h"

#include "bench/nccl_engine.h"

namespace cadre::bench {

void WindowRoute::dispatch(const DispatchArgs& args, Workspace workspace, Stream stream) {
  cadre::dispatch(plan_, window_, args, workspace, stream);
}
void WindowRoute::collect(const CollectArgs& args, Workspace, Stream stream) {
  cadre::collect(plan_, window_, args, stream);
}
void WindowRoute::collect_backward(const CollectBackwardArgs& args, Workspace, Stream stream) {
  cadre::collect_backward(plan_, window_, args, stream);
}
void WindowRoute::dispatch_backward(const DispatchBackwardArgs& args, Workspace workspace,
                                    Stream stream) {
  cadre::dispatch_backward(plan_, window_, args, workspace, stream);
}

void CollectiveRoute::dispatch(const DispatchArgs& args, Workspace workspace, Stream stream) {
  cadre::dispatch(collective_,
                  {.x = args.x,
                   .experts = args.experts,
                   .prob = args.prob,
                   .rows = args.rows,
                   .row_prob = args.row_prob,
                   .routed = args.routed,
                   .map = map_},
                  workspace, stream);
}
void CollectiveRoute::collect(const CollectArgs& args, Workspace workspace, Stream stream) {
  cadre::collect(collective_, {.y = args.y, .out = args.out, .map = map_}, workspace, stream);
}
void CollectiveRoute::collect_backward(const CollectBackwardArgs& args, Workspace workspace,
                                       Stream stream) {
  cadre::collect_backward(collective_, {.dout = args.dout, .dy = args.dy, .map = map_}, workspace,
                          stream);
}
void CollectiveRoute::dispatch_backward(const DispatchBackwardArgs& args, Workspace workspace,
                                        Stream stream) {
  cadre::dispatch_backward(collective_,
                           {.drows = args.drows,
                            .drow_prob = args.drow_prob,
                            .dx = args.dx,
                            .dprob = args.dprob,
                            .map = map_},
                           workspace, stream);
}

std::unique_ptr<RankRoute> CollectiveRoute::for_graph() const {
  return std::make_unique<CollectiveRoute>(collective_.plan(), collective_.rank(), engine_, map_);
}

ExpertParallelPlan plan_of_ranks(std::string_view problem, const Device& device,
                                 std::string_view only) {
  const ExpertParallelPlan chosen = plan(parse_expert_parallel_problem(problem), device, only);
  if (chosen.name == kCollective && device.kind == DeviceKind::kCuda) require_nccl(chosen);
  return chosen;
}

std::unique_ptr<Mailboxes> mailboxes_of(const ExpertParallelPlan& plan) {
  if (plan.name != kCollective || plan.device.kind != DeviceKind::kCpu) return nullptr;
  // What is sent stands in the workspace, or comes into it in as many bytes.
  return std::make_unique<Mailboxes>(plan.problem.ranks, plan.workspace_bytes);
}

std::unique_ptr<RankRoute> open_route(const ExpertParallelPlan& plan, Rank& rank,
                                      Mailboxes* mailboxes, const CollectiveMap& map) {
  if (plan.name != kCollective) {
    rank.enter("making the window");
    return std::make_unique<WindowRoute>(plan,
                                         Window::create(plan, rank.number(), rank.all_gather()));
  }
  rank.enter("making the engine");
  return std::make_unique<CollectiveRoute>(
      plan, rank.number(),
      mailboxes != nullptr ? mailboxes->of(rank) : nccl_engine(rank, plan.problem.ranks), map);
}

}  // namespace cadre::bench
