// A rank whose rows travel by the caller's engine: what it plans, and the memory that it has.
#include "parallel/collective.h"

#include <utility>

#include "parallel/checks.h"

namespace cadre {
namespace parallel {
namespace {

constexpr auto kWord = int64_t(sizeof(int32_t));

int64_t all_experts(const ExpertParallelProblem& p) { return int64_t(p.ranks) * p.experts; }
int64_t all_counts(const ExpertParallelProblem& p) { return p.ranks * (all_experts(p) + 1); }

PermuteProblem moved_rows(const ExpertParallelProblem& p, PermutePass pass) {
  PermuteProblem m{.pass = pass, .tokens = p.tokens, .top_k = p.top_k};
  m.rows = p.tokens * p.top_k;
  m.hidden = p.hidden;
  m.dtype = p.dtype;
  return m;
}

PermutePlan leave_plan(const ExpertParallelProblem& p, const Device& device) {
  PermuteProblem m = moved_rows(p, PermutePass::kPermute);
  m.experts = int(all_experts(p));
  return plan(m, device);
}

/// Between two orders of the same rows.
PermutePlan reorder_plan(const ExpertParallelProblem& p, const Device& device, bool prob,
                         Tail tail) {
  PermuteProblem m = moved_rows(p, PermutePass::kPermute);
  m.tokens = m.rows = p.rows;
  m.top_k = 1;
  m.experts = p.experts;
  m.prob = prob;
  m.tail = tail;
  return plan(m, device);
}

/// What is dropped does not come back, and has zeros among the rows that do.
PermutePlan sum_plan(const ExpertParallelProblem& p, const Device& device, bool prob) {
  PermuteProblem m = moved_rows(p, prob ? PermutePass::kPermuteBackward : PermutePass::kCombine);
  m.experts = 0;
  m.prob = prob;
  return plan(m, device);
}

}  // namespace

OffsetsPlan choices_plan(const ExpertParallelProblem& p, const Device& device) {
  return plan({.source = OffsetsSource::kRouting,
               .rows = p.tokens * p.top_k,
               .experts = int(all_experts(p)),
               .tokens = p.tokens,
               .top_k = p.top_k},
              device);
}

CollectiveMemory::CollectiveMemory(const ExpertParallelProblem& p, const OffsetsPlan& offsets) {
  const auto take = [this](int64_t size) { return std::exchange(bytes, bytes + aligned(size)); };
  const int64_t choices = p.tokens * p.top_k;
  leaving = take(bytes_for(p.dtype, choices * p.hidden));
  leaving_prob = take(p.prob ? choices * int64_t(sizeof(float)) : 0);
  coming = take(bytes_for(p.dtype, p.rows * p.hidden));
  coming_prob = take(p.prob ? p.rows * int64_t(sizeof(float)) : 0);
  counts = take(all_counts(p) * kWord);
  names = take(p.ranks * int64_t(sizeof(RankName)));
  own_name = take(sizeof(RankName));
  scratch_bytes = offsets.workspace_bytes;
  scratch = take(scratch_bytes);
}

HostLists::HostLists(const ExpertParallelProblem& p, char* memory) {
  names = reinterpret_cast<RankName*>(memory);
  own_name = names + p.ranks;
  auto* next = reinterpret_cast<int32_t*>(own_name + 1);
  const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
  counts = take(all_counts(p));
  came_at = take(p.rows);
  row_at = take(p.rows);
  offsets = take(int64_t(p.experts) + 1);
}

int64_t HostLists::bytes(const ExpertParallelProblem& p) {
  const int64_t of_names = (int64_t(p.ranks) + 1) * int64_t(sizeof(RankName));
  return of_names + (all_counts(p) + 2 * p.rows + p.experts + 1) * kWord;
}

CollectiveSteps::CollectiveSteps(const ExpertParallelProblem& p, const Device& device)
    : leave(leave_plan(p, device)),
      place(reorder_plan(p, device, false, p.tail)),
      go_back(reorder_plan(p, device, false, Tail::kKeep)),
      place_with_prob(reorder_plan(p, device, p.prob, p.tail)),
      go_back_with_prob(reorder_plan(p, device, p.prob, Tail::kKeep)),
      sum(sum_plan(p, device, false)),
      sum_with_dprob(sum_plan(p, device, p.prob)) {}

}  // namespace parallel

Collective::State::State(const ExpertParallelPlan& of, int own_rank, AllToAll engine)
    : plan(of),
      rank(own_rank),
      all_to_all(std::move(engine)),
      steps(of.problem, of.device),
      link(parallel::host_link(of.device, parallel::HostLists::bytes(of.problem))),
      host(of.problem, link->memory()),
      next(size_t(of.problem.ranks)) {
  messages.reserve(2 * size_t(of.problem.ranks));
  *host.own_name = {int32_t(of.tag), own_rank};
}

void Collective::State::check_overflow() {
  const int at = std::exchange(fullest, -1);
  if (at >= 0) throw parallel::overflow_error(plan.problem, at, routed);
}

/// The plan, if a Collective can be made of it.
static const ExpertParallelPlan& checked(const ExpertParallelPlan& plan, int rank,
                                         const AllToAll& engine) {
  const ops::Checks checks("collective", plan.problem);
  checks.holds(plan.name == parallel::kCollective, "the plan is by ", plan.name,
               ", must be by collective; ask for it by name");
  checks.holds(rank >= 0 && rank < plan.problem.ranks, "rank is ", rank, ", must be 0 to ",
               plan.problem.ranks - 1);
  checks.holds(engine != nullptr, "the engine is empty, must be a function; rows travel by it");
  return plan;
}

Collective::Collective(const ExpertParallelPlan& plan, int rank, AllToAll engine)
    : state_(std::make_unique<State>(checked(plan, rank, engine), rank, std::move(engine))) {}
Collective::Collective(Collective&&) noexcept = default;
Collective& Collective::operator=(Collective&&) noexcept = default;
Collective::~Collective() = default;

int Collective::rank() const { return state_->rank; }
const ExpertParallelPlan& Collective::plan() const { return state_->plan; }
void Collective::check() { state_->check_overflow(); }

}  // namespace cadre
