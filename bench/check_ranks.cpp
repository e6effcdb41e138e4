#include "bench/check_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/element.h"
#include "bench/rank_case.h"
#include "bench/ranks.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

Window window_of_one(const ExpertParallelPlan& plan) {
  return Window::create(plan, 0, [](const std::string& own) { return std::vector{own}; });
}

bool overflows(const ExpertParallelProblem& p, const RankRouting& routing) {
  return p.overflow == Overflow::kError && routing.overflows();
}

/// What all ranks see: the result of one rank that has everything, and a hash of each rank's.
struct Shared {
  explicit Shared(const ExpertParallelPlan& plan, const RankInputs& inputs)
      : one(cadre::plan(as_one_rank(plan.problem), this_cpu())),
        whole(one, inputs, 0, memory),
        digests(memory.array<Digest>(plan.problem.ranks)),
        mailboxes(mailboxes_of(plan)) {
    std::fill_n(digests, plan.problem.ranks, Digest{});
  }
  ExpertParallelPlan one;
  Buffers memory{Buffers::ForProcesses{}};
  RankCase whole;
  Digest* digests;
  std::unique_ptr<Mailboxes> mailboxes;
};

/// One rank in its process.
class RankCheck {
 public:
  RankCheck(const ExpertParallelPlan& plan, const RankInputs& inputs, Shared& shared, Rank& rank)
      : p_(plan.problem),
        shared_(shared),
        rank_(rank),
        accelerator_(open_accelerator(plan.device)),
        mine_(plan, inputs, rank.number() * plan.problem.tokens, buffers_, accelerator_.get()) {}

  /// The first fault of all routings; empty if there is none.
  std::string run(const std::vector<RankRouting>& routings) {
    const std::unique_ptr<RankRoute> route =
        open_route(mine_.plan(), rank_, shared_.mailboxes.get(), mine_.collective_map());
    std::string fault;
    for (const RankRouting& routing : routings) {
      const std::string found = run_one(*route, routing);
      if (fault.empty() && !found.empty())
        fault = text(found, " of rank ", rank_.number(), ", ", routing.name);
    }
    if (fault.empty() && !(buffers_.canaries_live() && mine_.canaries_live()))
      fault = "memory beside a buffer was written";
    return fault;
  }

 private:
  std::string run_one(RankRoute& route, const RankRouting& routing) {
    const bool is_error = overflows(p_, routing);
    if (rank_.number() == 0 && !is_error) {
      rank_.enter("computing all on one rank");
      WindowRoute alone(shared_.one, window_of_one(shared_.one));
      shared_.whole.choose(routing.kept.data(), shared_.one.problem.tokens);
      shared_.whole.step(alone, [](std::string_view) {});
      if (p_.sum == RowSum::kRank) shared_.whole.sum_as_ranks_do(p_);
    }
    mine_.choose(routing.experts.data(), routing.tokens[size_t(rank_.number())]);
    mine_.step(route, [&](std::string_view phase) { rank_.enter(phase); });
    rank_.enter("the comparison");
    rank_.meet();
    std::string fault = is_error ? numbers_after_overflow(route) : difference();
    if (!std::equal(routing.routed.begin(), routing.routed.end(), mine_.routed()))
      fault = "the count of routed rows";
    rank_.meet();
    return fault;
  }

  /// Rows [first, first + used) of the whole are this rank's, of one token those of its number.
  std::string difference() {
    const int first_expert = rank_.number() * p_.experts;
    const int32_t* all = shared_.whole.offsets() + first_expert;
    for (int e = 0; e <= p_.experts; ++e)
      if (mine_.offsets()[e] != all[e] - all[0]) return text("offset ", e);
    const auto whole = shared_.whole.results(), part = mine_.results();
    Digest& digest = shared_.digests[rank_.number()];
    for (size_t i = 0; i < part.size(); ++i) {
      const TensorView& v = part[i].view;
      const int64_t bytes = bytes_for(v.dtype, v[1]), count = count_of(part[i]);
      const int64_t first = part[i].is_of_tokens ? rank_.number() * p_.tokens : all[0];
      const char* want = static_cast<const char*>(whole[i].view.data) + first * bytes;
      const char* got = static_cast<const char*>(v.data);
      digest.add(got, count * bytes);
      for (int64_t j = 0; j < count; ++j)
        if (std::memcmp(got + j * bytes, want + j * bytes, size_t(bytes)) != 0)
          return text("other bits than on one rank in ", part[i].name, "[", j, "]");
    }
    return {};
  }

  /// Of a step that overflows all is NaN, and the route says so once.
  std::string numbers_after_overflow(RankRoute& route) {
    if (!mine_.has_overflowed()) return "no overflow";
    for (const RankCase::Result& r : mine_.results()) {
      if (!is_plain_float(r.view.dtype)) continue;  // tests look at codes
      for (int64_t i = 0; i < count_of(r) * r.view[1]; ++i)
        if (!std::isnan(load(r.view, i))) return text("a number in spite of overflow in ", r.name);
    }
    try {
      route.check();
    } catch (const DeviceError&) {
      return {};
    }
    return "no error after overflow";
  }

  int64_t count_of(const RankCase::Result& r) const {
    return r.is_of_tokens ? mine_.tokens() : mine_.used();
  }

  const ExpertParallelProblem& p_;
  Shared& shared_;
  Rank& rank_;
  std::unique_ptr<Accelerator> accelerator_;
  Buffers buffers_;
  RankCase mine_;
};

}  // namespace

RanksReport check_ranks(std::string_view words, const Draw& draw, const Device& device,
                        std::string_view only) {
  const ExpertParallelPlan chosen = plan_of_ranks(words, device, only);
  const ExpertParallelProblem& p = chosen.problem;
  Buffers buffers;
  const RankInputs inputs(p, draw.seed, buffers);
  Shared shared(chosen, inputs);
  const std::vector<RankRouting> routings = rank_routings(p, draw);
  RanksReport report;
  report.check.problem = to_string(p);
  report.check.plan = chosen.name;
  for (const std::string& fault : run_ranks_on(device, p.ranks, [&](Rank& rank) {
         const ExpertParallelPlan mine =
             plan(p, device_of_rank(device, rank.number(), p.ranks), chosen.name);
         return RankCheck(mine, inputs, shared, rank).run(routings);
       }))
    if (report.check.fault.empty()) report.check.fault = fault;
  for (int q = 0; q < p.ranks; ++q) report.check.digest.add(shared.digests[q]);
  report.routings = int(routings.size());
  report.overflows = int(std::count_if(routings.begin(), routings.end(),
                                       [&](const RankRouting& r) { return overflows(p, r); }));
  return report;
}

const char* compared_with(std::string_view problem) {
  return parse_expert_parallel_problem(problem).sum == RowSum::kRank ? "sums by rank" : "one rank";
}

}  // namespace cadre::bench
