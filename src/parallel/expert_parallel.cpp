// Problem, plan and window of expert parallelism.
#include "cadre/expert_parallel.h"

#include <algorithm>
#include <type_traits>

#include "cadre/error.h"
#include "ops/checks.h"
#include "ops/moved_codes.h"
#include "ops/problem_text.h"
#include "parallel/checks.h"
#include "parallel/collective.h"
#include "parallel/dispatch.h"
#include "parallel/window.h"

namespace cadre {

namespace ops {
template <>
struct Words<Overflow> {
  static constexpr std::array<std::string_view, 2> kList = {"error", "drop"};
};
template <>
struct Words<RowSum> {
  static constexpr std::array<std::string_view, 2> kList = {"choice", "rank"};
};
template <>
struct Words<Crossing> {
  static constexpr std::array<std::string_view, 4> kList = {"auto", "token", "host", "choice"};
};
}  // namespace ops

/// R where a text leaves it out: all blocks, or what two ranks can need at most. Of nonsense it is
/// 0.
static int64_t usual_rows(const ExpertParallelProblem& p) {
  constexpr int64_t kMost = 1 << 30;
  const bool is_sane = p.tokens >= 0 && p.tokens < kMost && p.top_k > 0 && p.ranks > 0;
  if (!is_sane || p.block < 0 || p.block > kMost) return 0;
  return p.block > 0 ? p.ranks * p.block : std::min(p.ranks, 2) * p.tokens * p.top_k;
}

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const ExpertParallelProblem usual;
  io.always("T", p.tokens);
  io.always("top_k", p.top_k);
  io.always("H", p.hidden);
  io.always("E", p.experts);
  io.always("ranks", p.ranks);
  io.unless("block", p.block, usual.block);
  if constexpr (!std::is_const_v<Problem>) p.rows = usual_rows(p);
  io.always("R", p.rows);
  io.always("dtype", p.dtype);
  io.unless("x", p.x, usual.x);
  io.unless("scales_major", p.scales_major, usual.scales_major);
  io.unless("prob", p.prob, usual.prob);
  io.unless("overflow", p.overflow, usual.overflow);
  io.unless("tail", p.tail, usual.tail);
  io.unless("push", p.push, usual.push);
  io.unless("sum", p.sum, usual.sum);
  io.unless("cross", p.cross, usual.cross);
  io.unless("host_ranks", p.host_ranks, usual.host_ranks);
  io.unless("layer", p.layer, usual.layer);
}

std::string to_string(const ExpertParallelProblem& p) {
  return ops::write_problem("expert_parallel", p);
}
ExpertParallelProblem parse_expert_parallel_problem(std::string_view words) {
  return ops::read_problem<ExpertParallelProblem>("expert_parallel", words);
}

namespace {

constexpr int kLeastSm = 80;

void check_crossing(const ExpertParallelProblem& p,
                    const ops::Checks<ExpertParallelProblem>& checks) {
  const bool by_host = p.cross == Crossing::kHost;
  checks.holds(p.block == 0 || !(by_host || p.cross == Crossing::kToken), "cross is ",
               by_host ? "host" : "token",
               ", must be auto or choice; with block a row crosses for each choice");
  if (!by_host)
    return checks.holds(p.host_ranks == 0, "host_ranks is ", p.host_ranks,
                        ", must be 0; tokens cross by host where cross is host");
  checks.holds(p.host_ranks >= 1 && p.host_ranks <= p.ranks, "host_ranks is ", p.host_ranks,
               ", must be 1 to ranks, ", p.ranks, "; so many neighbours share a host");
  checks.countable("ranks * T * H", {p.ranks * p.tokens, p.hidden});
}

void check(const ExpertParallelProblem& p, int most_ranks) {
  ops::require_words(p);
  const ops::Checks checks("expert_parallel", p);
  checks.at_least("T", p.tokens, 0);
  checks.at_least("top_k", p.top_k, 1);
  checks.at_least("H", p.hidden, 1);
  checks.experts(p.experts);
  checks.at_least("block", p.block, 0);
  checks.at_least("R", p.rows, 0);
  checks.holds(p.ranks >= 1 && p.ranks <= most_ranks, "ranks is ", p.ranks, ", must be 1 to ",
               most_ranks);
  checks.fits_int32("T", p.tokens);
  checks.fits_int32("T * top_k", p.tokens * p.top_k);
  checks.fits_int32("ranks * T * top_k", p.ranks * p.tokens * p.top_k);
  checks.fits_int32("R", p.rows);
  checks.fits_int32("ranks * R", p.ranks * p.rows);
  checks.fits_int32("block", p.block);
  checks.fits_int32("ranks * block", p.ranks * p.block);
  checks.experts(int64_t(p.ranks) * p.experts);
  checks.plain_float("dtype", p.dtype);
  ops::check_moved_format(checks, "x", p.x, p.scales_major, p.hidden);
  checks.countable("T * H", {p.tokens, p.hidden});
  checks.countable("R * H", {p.rows, p.hidden});
  checks.countable("ranks * block * H", {p.ranks * p.block, p.hidden});
  if (p.push) checks.countable("T * top_k * H", {p.tokens * p.top_k, p.hidden});
  check_crossing(p, checks);
  if (p.sum == RowSum::kChoice) return;
  checks.holds(!p.push, "push is yes, must be no; with sum=rank no rows travel");
  checks.fits_int32("ranks * ranks * T", int64_t(p.ranks) * p.ranks * p.tokens);
  checks.countable("ranks * T * H", {p.ranks * p.tokens, p.hidden});
}

/// Sums of a rank's own rows, for the tokens of all.
PermutePlan sum_here(const ExpertParallelProblem& p, const Device& device) {
  PermuteProblem m{.pass = PermutePass::kCombine, .tokens = p.ranks * p.tokens, .top_k = p.top_k};
  m.rows = p.rows;
  m.hidden = p.hidden;
  m.experts = p.experts;
  m.dtype = p.dtype;
  return plan(m, device);
}

/// Sums of those sums.
PermutePlan sum_of_ranks(const ExpertParallelProblem& p, const Device& device) {
  PermuteProblem m{.pass = PermutePass::kCombine, .tokens = p.tokens, .top_k = p.ranks};
  m.rows = p.ranks * p.tokens;
  m.hidden = p.hidden;
  m.experts = 0;
  m.dtype = p.dtype;
  m.ranks = p.ranks;
  return plan(m, device);
}

/// Gradients of probabilities where they were brought by row: each is the sum of one.
PermutePlan dprob(const ExpertParallelProblem& p, const Device& device) {
  PermuteProblem m{.pass = PermutePass::kCombine, .tokens = p.tokens * p.top_k, .top_k = 1};
  m.rows = p.ranks * p.rows;
  m.hidden = 1;
  m.experts = 0;
  m.dtype = DType::kF32;
  return plan(m, device);
}

PermutePlan permute(const ExpertParallelProblem& p, PermutePass pass, const Device& device) {
  PermuteProblem m{.pass = pass, .tokens = p.tokens, .top_k = p.top_k, .rows = p.rows};
  m.hidden = p.hidden;
  m.experts = p.experts;
  m.dtype = p.dtype;
  m.ranks = p.ranks;
  m.prob = p.prob && (pass == PermutePass::kPermute || pass == PermutePass::kPermuteBackward);
  m.tail = p.tail;
  if (pass == PermutePass::kPermute) m.format = p.x, m.scales_major = p.scales_major;
  if (p.push && (pass == PermutePass::kCombine || pass == PermutePass::kPermuteBackward)) {
    m.rows = p.tokens * p.top_k;  // places
    m.ranks = 1;
    m.experts = 0;
  }
  return plan(m, device);
}

/// The problem in 24 bits, the same in every build (FNV-1a).
uint32_t tag_of(const ExpertParallelProblem& p) {
  uint32_t hash = 2166136261u;
  for (const char c : to_string(p)) hash = (hash ^ uint8_t(c)) * 16777619u;
  return (hash ^ hash >> 24) & 0xffffff;
}

OffsetsPlan offsets(const ExpertParallelProblem& p, const Device& device) {
  return plan({.source = OffsetsSource::kRouting,
               .rows = p.ranks * p.tokens * p.top_k,
               .experts = p.ranks * p.experts,
               .tokens = p.ranks * p.tokens,
               .top_k = p.top_k},
              device);
}

}  // namespace

namespace {

std::string refuses_any(const Device& device) {
  const bool is_old = device.kind == DeviceKind::kCuda && device.sm < kLeastSm;
  return is_old ? text("takes sm_", kLeastSm, " or newer") : "";
}

/// What is of the route collective alone.
std::string refuses_as_window(const ExpertParallelProblem& p, const Device& device) {
  if (p.block > 0) return "sends no blocks";
  if (p.cross == Crossing::kChoice || p.cross == Crossing::kHost) return "reads a token once";
  return refuses_any(device);
}

std::string refuses_window(const ExpertParallelProblem& p, const Device& device) {
  if (p.sum == RowSum::kRank) return "sums no rows at home";
  return refuses_as_window(p, device);
}

std::string refuses_window_sum_rank(const ExpertParallelProblem& p, const Device& device) {
  if (p.sum != RowSum::kRank) return "is for sum=rank";
  return refuses_as_window(p, device);
}

/// A block sorts all choices by itself, with its counters in shared memory.
std::string refuses_few_tokens(const ExpertParallelProblem& p, const Device& device) {
  const int64_t choices = p.ranks * p.tokens * p.top_k, experts = int64_t(p.ranks) * p.experts;
  if (device.kind != DeviceKind::kCuda) return "is for GPUs";
  if (p.push) return "fetches its rows";
  if (p.sum == RowSum::kRank) return "sums no rows at home";
  if (const std::string refusal = refuses_as_window(p, device); !refusal.empty()) return refusal;
  if (choices > parallel::kFewChoices)
    return text("takes at most ", parallel::kFewChoices, " choices of all ranks, there are ",
                choices);
  if (experts > parallel::kFewExperts)
    return text("takes at most ", parallel::kFewExperts, " experts of all ranks, there are ",
                experts);
  return {};
}

std::string refuses_collective(const ExpertParallelProblem& p, const Device& device) {
  if (p.push) return "has no window to push into";
  if (p.x) return "moves no codes";
  if (p.sum == RowSum::kRank) return "sums no rows at home";
  return refuses_any(device);
}

struct Route {
  std::string_view name;
  std::string (*refuses)(const ExpertParallelProblem&, const Device&);
  bool by_name = false;  ///< only: it wants an engine of the caller's
};
constexpr std::array<Route, 4> kRoutes = {{{parallel::kFewTokens, refuses_few_tokens},
                                           {parallel::kWindow, refuses_window},
                                           {parallel::kWindowSumRank, refuses_window_sum_rank},
                                           {parallel::kCollective, refuses_collective, true}}};

std::string_view route_of(const ExpertParallelProblem& p, const Device& device,
                          std::string_view only) {
  std::string refusals;
  for (const Route& route : kRoutes) {
    if (only.empty() ? route.by_name : only != route.name) continue;
    const std::string refusal = route.refuses(p, device);
    if (refusal.empty()) return route.name;
    refusals += text("\n  ", route.name, ": ", refusal);
  }
  require(!refusals.empty(), "expert_parallel: there is no route '", only, "', only ",
          parallel::kFewTokens, ", ", parallel::kWindow, ", ", parallel::kWindowSumRank, " and ",
          parallel::kCollective, " [", p, "]");
  throw Unsupported(text("expert_parallel: no route takes it on ", to_string(device), refusals,
                         " [", to_string(p), "]"));
}

}  // namespace

ExpertParallelPlan plan(const ExpertParallelProblem& problem, const Device& device,
                        std::string_view only) {
  check(problem,
        only == parallel::kCollective ? parallel::kMostCollectiveRanks : parallel::kMostRanks);
  ExpertParallelPlan plan{.problem = problem, .device = device};
  plan.name = route_of(problem, device, only);
  plan.tag = tag_of(problem);
  if (plan.name == parallel::kCollective) {
    plan.by_token = parallel::crosses_by_token(problem);
    plan.by_host = parallel::crosses_by_host(problem);
    plan.counts = parallel::counts_of_map(problem);
    plan.passing = parallel::passing_of_map(problem);
    plan.offsets = parallel::choices_plan(problem, device);
    plan.workspace_bytes = parallel::CollectiveMemory(problem, plan.offsets).bytes;
    return plan;
  }
  plan.exact = problem.sum == RowSum::kChoice || problem.ranks == 1;
  plan.window = parallel::layout_of(problem);
  plan.offsets = offsets(problem, device);
  plan.dispatch = permute(problem, PermutePass::kPermute, device);
  plan.collect = permute(problem, PermutePass::kCombine, device);
  plan.collect_backward = permute(problem, PermutePass::kCombineBackward, device);
  plan.dispatch_backward = permute(problem, PermutePass::kPermuteBackward, device);
  plan.workspace_bytes = parallel::DispatchMemory(problem, plan.offsets).bytes;
  if (problem.sum == RowSum::kChoice) return plan;
  plan.sum_here = sum_here(problem, device);
  plan.collect = plan.dispatch_backward = sum_of_ranks(problem, device);
  plan.dprob = dprob(problem, device);
  return plan;
}

/// Of a token.
static int64_t scale_bytes(const ExpertParallelProblem& p) {
  return p.x ? bytes_for(info(p.x->kind).scale, ops::scales_of_row(*p.x, p.hidden)) : 0;
}

static std::string explain_rows(const ExpertParallelProblem& p) {
  return text("rows       ", p.rows, " a rank; ", p.ranks * p.tokens * p.top_k,
              " are always enough, beyond them ",
              p.overflow == Overflow::kDrop ? "choices are dropped\n" : "a step is NaN\n");
}

static std::string explain_crossing(const ExpertParallelPlan& plan) {
  const schedule::HostRelays hosts = parallel::relays_of(plan.problem);
  if (plan.by_host)
    return text("tokens     cross once to each of ", hosts.hosts(), " hosts of ", hosts.each,
                " ranks, and there, in ", hosts.rounds(),
                " more exchanges, once to each rank; with 8 bytes a choice; results for each "
                "choice\n");
  if (plan.by_token)
    return "tokens     cross once to each rank, and 4 bytes a choice; results for each choice\n";
  const bool is_asked = plan.problem.cross == Crossing::kChoice;
  return text("tokens     cross for each choice",
              is_asked ? "" : "; once to each rank would save too few bytes", "\n");
}

static std::string explain_collective(const ExpertParallelPlan& plan) {
  const ExpertParallelProblem& p = plan.problem;
  const std::string blocks = text("blocks     ", p.block, " rows from a rank to each; ",
                                  p.tokens * p.top_k, " are always enough\n");
  return text("route      collective: rows travel by the caller's engine, between any hosts\n",
              p.block > 0
                  ? "host       reads nothing, as messages have one size; a graph may have them\n"
                  : "host       reads how many rows ranks exchange, once a dispatch; refuses "
                    "capture\n",
              "workspace  ", plan.workspace_bytes, " bytes, of each exchange\n",
              p.block > 0 ? blocks : explain_crossing(plan), explain_rows(p));
}

std::string explain(const ExpertParallelPlan& plan) {
  const ExpertParallelProblem& p = plan.problem;
  if (plan.name == parallel::kCollective) return explain_collective(plan);
  const WindowLayout& w = plan.window;
  const bool is_few = plan.name == parallel::kFewTokens;
  std::string lines = text("route      ", plan.name, ": every rank maps the memory of all",
                           is_few ? ", and an exchange is one kernel" : "", "\n");
  lines += text("window     ", w.bytes, " bytes a rank: ", w.experts, " of flags, ",
                w.tokens - w.experts, " of routing, ", w.drow_prob - w.tokens, " of tokens, ",
                w.rows - w.drow_prob, " of gradients of probabilities, ", w.bytes - w.rows,
                " of rows\n");
  if (p.x)
    lines += text("x          codes of ", to_string(*p.x), ", made by the owner: ", p.hidden,
                  " bytes a token, and ", scale_bytes(p),
                  " of scales, cross once to each rank that needs it\n"
                  "wgrad      has what these codes say of x, or x by a dispatch of numbers\n");
  if (p.push)
    lines += "results    come row by row, from who makes them, to the places of choices\n";
  if (!plan.exact)
    lines += text("results    each rank sums its rows of a token, and at most ", p.ranks - 1,
                  " sums a token cross; out and dx have not the bits of one rank\n");
  lines += text("workspace  ", plan.workspace_bytes, " bytes, of dispatch and its backward\n");
  return lines + explain_rows(p);
}

namespace parallel {

WindowLayout layout_of(const ExpertParallelProblem& p) {
  WindowLayout w;
  const auto take = [&w](int64_t bytes) {
    return std::exchange(w.bytes, w.bytes + aligned(bytes));
  };
  take(sizeof(Control));
  const int64_t choices = p.ranks * p.tokens * p.top_k;
  w.experts = take(choices * int64_t(sizeof(int32_t)));
  w.prob = take(p.prob ? choices * int64_t(sizeof(float)) : 0);
  const int64_t numbers = bytes_for(p.dtype, p.tokens * p.hidden);
  const int64_t codes = p.x ? aligned(p.tokens * p.hidden) : 0;
  w.tokens = take(std::max(numbers, codes + p.tokens * scale_bytes(p)));
  w.scales = w.tokens + codes;
  const int64_t places = p.tokens * p.top_k;
  w.drow_prob = take(p.prob ? (p.push ? places : p.ranks * p.rows) * int64_t(sizeof(float)) : 0);
  const int64_t at_home = p.sum == RowSum::kRank ? p.ranks * p.tokens : p.rows;
  w.rows = take(bytes_for(p.dtype, (p.push ? places : at_home) * p.hidden));
  return w;
}

}  // namespace parallel
}  // namespace cadre
