// A rank whose rows travel by the caller's engine: what it plans, and the memory that it has.
#include "parallel/collective.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "parallel/checks.h"

namespace cadre {
namespace parallel {
namespace {

constexpr auto kWord = int64_t(sizeof(int32_t));

int64_t all_experts(const ExpertParallelProblem& p) { return int64_t(p.ranks) * p.experts; }
int64_t all_counts(const ExpertParallelProblem& p) { return p.ranks * (all_experts(p) + 1); }

/// What tokens save that cross once, about: of top_k choices (top_k - 1) / (P + top_k - 1) are of a
/// rank that the token goes to anyway; less four bytes for each choice. In whole numbers, so that
/// ranks agree.
int64_t bytes_saved_by_token(const ExpertParallelProblem& p) {
  const int64_t row = bytes_for(p.dtype, std::min<int64_t>(p.hidden, 1 << 28));
  const int64_t of_choice = row * (p.top_k - 1) / (int64_t(p.ranks) + p.top_k - 1);
  return p.tokens * p.top_k * (of_choice - kWord);
}

PermuteProblem moved_rows(const ExpertParallelProblem& p, PermutePass pass) {
  PermuteProblem m{.pass = pass, .tokens = p.tokens, .top_k = p.top_k};
  m.rows = leaving_rows(p);
  m.hidden = p.hidden;
  m.dtype = p.dtype;
  return m;
}

/// Probabilities of rows that are no block's are sorted with the choices.
PermutePlan leave_plan(const ExpertParallelProblem& p, const Device& device, bool prob) {
  PermuteProblem m = moved_rows(p, PermutePass::kPermute);
  m.experts = p.block > 0 ? 1 : int(all_experts(p));
  m.prob = prob && p.block > 0;
  return plan(m, device);
}

/// Rows in the order of experts from those that came.
PermutePlan place_plan(const ExpertParallelProblem& p, const Device& device, bool prob) {
  PermuteProblem m = moved_rows(p, PermutePass::kPermute);
  m.tokens = coming_rows(p);
  m.rows = p.rows;
  m.top_k = 1;
  m.experts = p.experts;
  m.prob = prob;
  m.tail = p.tail;
  return plan(m, device);
}

/// The other way. Each place of a block is the sum of one row, or of none.
PermutePlan go_back_plan(const ExpertParallelProblem& p, const Device& device, bool prob) {
  const bool in_blocks = p.block > 0;
  PermuteProblem m =
      moved_rows(p, in_blocks ? PermutePass::kPermuteBackward : PermutePass::kPermute);
  m.tokens = coming_rows(p);
  m.rows = p.rows;
  m.top_k = 1;
  m.experts = in_blocks ? 0 : p.experts;
  m.prob = prob;
  return plan(m, device);
}

/// What is dropped does not come back, and has zeros among the rows that do.
PermutePlan sum_plan(const ExpertParallelProblem& p, const Device& device, bool prob) {
  PermuteProblem m = moved_rows(p, prob ? PermutePass::kPermuteBackward : PermutePass::kCombine);
  m.experts = 0;
  m.prob = prob;
  return plan(m, device);
}

/// Of the tokens of one rank, those for each rank of a host. All of them have T places.
PermutePlan pass_plan(const ExpertParallelProblem& p, const Device& device) {
  PermuteProblem m = moved_rows(p, PermutePass::kPermute);
  m.top_k = 1;
  return plan(m, device);
}

}  // namespace

bool crosses_by_token(const ExpertParallelProblem& p) {
  constexpr int64_t kWorthIt = 8 << 20;  // bytes that NCCL moves between two H200s in the time of
                                         // three kernels and a sort
  if (p.block > 0 || p.cross == Crossing::kChoice) return false;
  return p.cross != Crossing::kAuto || bytes_saved_by_token(p) >= kWorthIt;
}

int64_t counts_of_map(const ExpertParallelProblem& p) {
  if (p.block > 0) return 0;
  const int64_t ranks = p.ranks, of_hosts = 3 * ranks + 1 + 2 * ranks * relays_of(p).rounds();
  return 6 * ranks + 3 + (crosses_by_host(p) ? of_hosts : 0);
}

int64_t passing_of_map(const ExpertParallelProblem& p) {
  return crosses_by_host(p) ? relays_of(p).rounds() * (2 + p.tokens * p.top_k) : 0;
}

OffsetsPlan choices_plan(const ExpertParallelProblem& p, const Device& device) {
  return plan({.source = OffsetsSource::kRouting,
               .rows = p.tokens * p.top_k,
               .experts = int(all_experts(p)),
               .tokens = p.tokens,
               .top_k = p.top_k},
              device);
}

OffsetsPlan arrivals_plan(const ExpertParallelProblem& p, const Device& device) {
  return plan({.source = OffsetsSource::kRouting,
               .rows = p.rows,
               .experts = p.experts,
               .tokens = coming_rows(p),
               .top_k = 1},
              device);
}

CollectiveMemory::CollectiveMemory(const ExpertParallelProblem& p, const OffsetsPlan& offsets)
    : scratch_bytes(offsets.workspace_bytes) {
  const int64_t out = leaving_rows(p), in = coming_rows(p);
  leaving = take(bytes_for(p.dtype, out * p.hidden));
  leaving_prob = take(p.prob ? out * int64_t(sizeof(float)) : 0);
  coming = take(bytes_for(p.dtype, in * p.hidden));
  coming_prob = take(p.prob ? in * int64_t(sizeof(float)) : 0);
  if (p.block > 0) {
    take_blocks(p);
    scratch_bytes = std::max(scratch_bytes, arrivals_plan(p, offsets.device).workspace_bytes);
  } else {
    take_counts(p);
    if (crosses_by_token(p)) take_tokens(p);
    if (crosses_by_host(p)) take_hosts(p);
  }
  scratch = take(scratch_bytes);
}

int64_t CollectiveMemory::take(int64_t size) { return std::exchange(bytes, bytes + aligned(size)); }

void CollectiveMemory::take_counts(const ExpertParallelProblem& p) {
  counts = take(all_counts(p) * kWord);
  said = take(words_said(p) * kWord);
  heard = take(p.ranks * words_said(p) * kWord);
}

void CollectiveMemory::take_tokens(const ExpertParallelProblem& p) {
  const int64_t choices = p.tokens * p.top_k * kWord;
  row_offsets = take((all_experts(p) + 1) * kWord);
  firsts = take(choices);
  token_of = take(choices);
  leaving_back = take(choices);
  coming_back = take(p.rows * kWord);
}

void CollectiveMemory::take_hosts(const ExpertParallelProblem& p) {
  const int64_t choices = p.tokens * p.top_k * kWord;
  arriving = take(bytes_for(p.dtype, relays_of(p).rounds() * p.tokens * p.hidden));
  token_offsets = take((all_experts(p) + 1) * kWord);
  host_firsts = take(choices);
  host_token_of = take(choices);
  host_number = take(choices);
}

void CollectiveMemory::take_blocks(const ExpertParallelProblem& p) {
  sorted = take(p.tokens * p.top_k * kWord);
  said = take(words_said(p) * kWord);
  heard = take(p.ranks * words_said(p) * kWord);
  leaving_experts = take(leaving_rows(p) * kWord);
  coming_experts = take(coming_rows(p) * kWord);
}

/// Ends of what is passed on, on the host.
static int64_t passed_words(const ExpertParallelProblem& p) {
  return crosses_by_host(p) ? 2 * relays_of(p).rounds() : 0;
}

HostLists::HostLists(const ExpertParallelProblem& p, char* memory) {
  if (p.block > 0) {
    note = new (memory) schedule::BlockNote();
    return;
  }
  auto* next = reinterpret_cast<int32_t*>(memory);
  const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
  heard = take(p.ranks * words_said(p));
  said = take(words_said(p));
  counts = take(all_counts(p));
  came_at = take(p.rows);
  row_at = take(p.rows);
  offsets = take(int64_t(p.experts) + 1);
  passing = take(passed_words(p));
}

int64_t HostLists::bytes(const ExpertParallelProblem& p) {
  if (p.block > 0) return sizeof(schedule::BlockNote);
  const int64_t of_words = (int64_t(p.ranks) + 1) * words_said(p);
  return (of_words + all_counts(p) + 2 * p.rows + p.experts + 1 + passed_words(p)) * kWord;
}

CollectiveSteps::CollectiveSteps(const ExpertParallelProblem& p, const Device& device)
    : leave(leave_plan(p, device, false)),
      leave_with_prob(leave_plan(p, device, p.prob)),
      place(place_plan(p, device, false)),
      go_back(go_back_plan(p, device, false)),
      place_with_prob(place_plan(p, device, p.prob)),
      go_back_with_prob(go_back_plan(p, device, p.prob)),
      sum(sum_plan(p, device, false)),
      sum_with_dprob(sum_plan(p, device, p.prob)) {
  if (p.block > 0) arrive = arrivals_plan(p, device);
  if (crosses_by_host(p)) pass = pass_plan(p, device);
}

DeviceError problem_error(const ExpertParallelProblem& p, int rank, int other) {
  return DeviceError(text("dispatch: the problem of rank ", other,
                          " is not that of rank 0, must be the same; that of rank ", rank, " is [",
                          to_string(p), "]"));
}
DeviceError number_error(const ExpertParallelProblem& p, int rank, int says) {
  return DeviceError(text("dispatch: rank ", rank, " of the engine says that it is rank ", says,
                          ", must be ", rank, " [", to_string(p), "]"));
}

static DeviceError block_error(const ExpertParallelProblem& p, const schedule::BlockNote& note) {
  return DeviceError(
      text("expert_parallel: rows of rank ", note.rank, " are ", note.routed,
           ", must be at most R, ", p.rows, ", and those from one rank to another ", note.most,
           ", at most block, ", p.block, "; that step is NaN on every rank; R = ", note.routed,
           " and block = ", note.most, " would have held them [", to_string(p), "]"));
}

}  // namespace parallel

Collective::State::State(const ExpertParallelPlan& of, int own_rank, AllToAll engine)
    : plan(of),
      rank(own_rank),
      all_to_all(std::move(engine)),
      memory(of.problem, of.offsets),
      steps(of.problem, of.device),
      link(parallel::host_link(of.device, parallel::HostLists::bytes(of.problem))),
      host(of.problem, link->memory()),
      next(size_t(of.problem.ranks)),
      relays(parallel::relays_of(of.problem)) {
  messages.reserve(4 * size_t(of.problem.ranks));
  for (int q = 0; q < of.problem.ranks && of.by_host; ++q)
    round_of.push_back(relays.round_of(q, relays.host_of(own_rank)));
  if (host.said == nullptr) return;
  std::fill_n(host.said, parallel::words_said(of.problem), 0);
  host.said[0] = int32_t(of.tag), host.said[1] = own_rank;
}

void Collective::State::check_overflow() {
  const int at = std::exchange(fullest, -1);
  if (at >= 0) throw parallel::overflow_error(plan.problem, at, routed);
}

void Collective::State::check_note() {
  using schedule::BlockNote;
  const std::atomic_ref what(host.note->what);
  if (what.load(std::memory_order_acquire) == BlockNote::kNothing) return;
  const BlockNote note = *host.note;
  what.store(BlockNote::kNothing, std::memory_order_release);
  if (note.what == BlockNote::kOtherProblem)
    throw parallel::problem_error(plan.problem, rank, note.rank);
  if (note.what == BlockNote::kOtherRank)
    throw parallel::number_error(plan.problem, note.rank, note.routed);
  throw parallel::block_error(plan.problem, note);
}

/// The plan, if a Collective can be made of it.
static const ExpertParallelPlan& checked(const ExpertParallelPlan& plan, int rank,
                                         const AllToAll& engine) {
  const ops::Checks checks("collective", plan.problem);
  checks.holds(!plan.name.empty(), "the plan is empty; make it with plan()");
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

Collective::State& Collective::state() const {
  require(state_ != nullptr, "collective: it was moved from; use the one to which it was moved");
  return *state_;
}
int Collective::rank() const { return state().rank; }
const ExpertParallelPlan& Collective::plan() const { return state().plan; }
void Collective::check() {
  State& own = state();
  if (own.plan.problem.block == 0) return own.check_overflow();
  own.was_recorded ? own.link->await_device() : own.link->await();
  own.check_note();
}

}  // namespace cadre
