#include "bench/measure.h"

#include <algorithm>
#include <cmath>

#include "bench/peer.h"
#include "bench/visit.h"

namespace cadre::bench {
namespace {

constexpr double kRotated = 64 << 20;  // bytes that the copies of a case exceed
constexpr int64_t kMostCopies = 8;
constexpr double kLiveInCheck = 0.9;

// A case with the contestants that run on its data: ours first.
template <class AnyCase>
struct Arena {
  AnyCase data;
  std::vector<Peer> contestants;
};

template <class Problem>
auto make_arenas(const Plan<Problem>& chosen, const Draw& draw) {
  using AnyCase = decltype(make_case(chosen.problem, draw));
  std::vector<Arena<AnyCase>> arenas;
  int64_t copies = 1;
  for (int64_t i = 0; i < copies; ++i) {
    arenas.push_back({make_case(chosen.problem, draw), {}});
    AnyCase& c = arenas.back().data;
    copies = std::clamp(int64_t(std::ceil(kRotated / double(c.buffers->bytes()))), int64_t(1),
                        kMostCopies);
    const Workspace scratch = c.buffers->workspace(chosen.workspace_bytes);
    arenas.back().contestants.push_back(
        {"cadre", std::string(chosen.name),
         [chosen, scratch, args = c.args] { run(chosen, args, scratch, Stream{}); }});
    for (Peer& peer : peers(c)) arenas.back().contestants.push_back(std::move(peer));
  }
  return arenas;
}

// samples[contestant][launch]
template <class Arenas>
std::vector<std::vector<double>> time_launches(const Arenas& arenas, int repeat) {
  for (const auto& arena : arenas)
    for (const Peer& contestant : arena.contestants) contestant.run();
  std::vector<std::vector<double>> samples(arenas[0].contestants.size());
  for (size_t i = 0; i < size_t(repeat); ++i) {
    const auto& contestants = arenas[i % arenas.size()].contestants;
    for (size_t j = 0; j < contestants.size(); ++j)
      samples[j].push_back(time_us(contestants[j].run));
  }
  return samples;
}

std::vector<Timing> summarise(const std::vector<Peer>& contestants,
                              const std::vector<std::vector<double>>& samples) {
  std::vector<Timing> timings;
  for (size_t j = 0; j < samples.size(); ++j) {
    std::vector<double> speeds;
    for (size_t i = 0; i < samples[j].size(); ++i) speeds.push_back(samples[j][i] / samples[0][i]);
    timings.push_back({contestants[j].name, contestants[j].what, quantiles(samples[j]),
                       quantiles(speeds).median});
  }
  return timings;
}

template <class Problem>
Measurement measure_problem(const Problem& problem, const MeasureOptions& options) {
  const auto chosen = plan(problem, this_cpu(), options.only);
  Measurement m{
      .check = {}, .problem = to_string(problem), .plan = std::string(chosen.name), .timings = {}};
  Problem small = problem;
  m.checked_rows = shrink(small);
  Draw draw = options.draw;
  draw.live = kLiveInCheck;
  draw.counts_are_weights = true;
  m.check = check(to_string(small), draw, chosen.name);
  if (!m.check.good()) return m;
  const auto arenas = make_arenas(chosen, options.draw);
  const Work done = work(arenas[0].data);
  m.flops = done.flops;
  m.bytes = done.bytes;
  m.timings = summarise(arenas[0].contestants, time_launches(arenas, options.repeat));
  for (const auto& arena : arenas)
    if (!arena.data.buffers->canaries_live())
      m.check.fault = "memory beside a buffer was written while timing";
  return m;
}

template <class Problem>
int experts_of(const Problem& problem) {
  if constexpr (std::is_same_v<Problem, DequantizeProblem>)
    return problem.source.experts;
  else
    return problem.experts;
}

}  // namespace

void require_measurable(std::string_view problem, const MeasureOptions& options) {
  visit_problem(problem, [&](const auto& p) {
    plan(p, this_cpu(), options.only);
    parse_distribution(options.draw.offsets, experts_of(p), options.draw.seed);
  });
}

Measurement measure(std::string_view problem, const MeasureOptions& options) {
  return visit_problem(problem, [&](const auto& p) { return measure_problem(p, options); });
}

}  // namespace cadre::bench
