#include "bench/cost.h"

#include <omp.h>

#include <cmath>

#include "bench/layer_case.h"
#include "bench/rank_route.h"
#include "bench/visit.h"
#include "cadre/expert_parallel.h"
#include "cadre/layers.h"

namespace cadre::bench {
namespace {

/// What is done with a problem: how often its tensors are drawn, its plain loops run, and what is
/// timed or checked runs.
struct Runs {
  double draws = 0, reference = 0, fast = 0;
};
constexpr double kRoutings = 6;      // that are checked of ranks
constexpr double kHostCalls = 2200;  // of forward and backward, with those that warm up

// Of one core, so that estimates are right within a small factor.
constexpr double kSecondsOfADraw = 1e-8, kSecondsOfAReferenceProduct = 4e-9;
constexpr double kSecondsOfAProduct = 1e-10, kSecondsOfAnElement = 1e-9;

/// Rows that fall to experts, and their counts.
double routed(double rows, double experts) { return 2 * rows + experts; }

Cost cost(const ActivationProblem& p) {
  const auto rows = double(p.rows);
  return {0, 4 * rows * double(p.features), routed(rows, p.experts)};
}

Cost cost(const BiasGradProblem& p) {
  const auto rows = double(p.rows), n = double(p.n);
  return {0, (rows + p.experts) * n, routed(rows, p.experts)};
}

Cost cost_of_copies(RowsKind kind, double rows, double cols, double experts) {
  return {0, 3 * rows * cols * (kind == RowsKind::kWeights ? experts : 1), routed(rows, experts)};
}
/// Tokens that are gathered, of so many columns, and their slots.
template <class Problem>
Cost with_tokens(Cost cost, const Problem& p, double columns) {
  cost.elements += double(p.tokens) * columns;
  cost.routed += double(p.tokens) * p.experts;
  return cost;
}

Cost cost(const QuantizeProblem& p) {
  const auto cols = double(p.cols);
  return with_tokens(cost_of_copies(p.kind, double(p.rows), cols, p.experts), p, cols);
}
Cost cost(const DequantizeProblem& p) {
  const QuantizedShape& s = p.source;
  return cost_of_copies(s.kind, double(s.rows), double(s.cols), s.experts);
}

Cost cost(const GroupedGemmProblem& p) {
  const auto rows = double(p.rows), n = double(p.n), k = double(p.k);
  const bool x = p.pass == Pass::kFprop || p.gather == Gather::kRhs;
  return with_tokens({rows * n * k, rows * (n + k) + p.experts * n * k, routed(rows, p.experts)}, p,
                     x ? k : n);
}

Cost cost(const OffsetsProblem& p) {
  return {0, 0, routed(double(p.rows), p.experts) + 2 * double(p.tokens) * p.top_k};
}

Cost cost(const PermuteProblem& p) {
  const auto rows = double(p.rows), hidden = double(p.hidden);
  return {0, (double(p.tokens) + rows) * hidden, routed(rows, p.experts)};
}

// Each choice looks at all experts, and at all choices before it.
Cost cost(const RoutingProblem& p) {
  const double scores = double(p.tokens) * p.experts;
  return {scores * p.top_k * p.top_k, 4 * scores, 0};
}

// A step is three products.
Cost cost(const GroupedLinearProblem& p) {
  const auto rows = double(p.rows), n = double(p.n), k = double(p.k);
  return with_tokens(
      {3 * rows * n * k, 3 * rows * (n + k) + 2 * p.experts * n * k, routed(rows, p.experts)}, p,
      p.gather * k + p.gather_dy * n);
}

Cost cost(const GroupedMlpProblem& p) {
  const auto rows = double(p.rows), h = double(p.hidden), f = double(p.features);
  return with_tokens(
      {9 * rows * h * f, 6 * rows * (h + f) + 6 * p.experts * h * f, routed(rows, p.experts)}, p,
      (p.gather + p.gather_dy) * h);
}

// The router's choices, rows to and fro, the experts, and the one that all tokens visit.
Cost cost(const MoeProblem& p) {
  const int64_t rows = p.tokens * p.top_k;
  const Cost routing =
      cost(RoutingProblem{.tokens = p.tokens, .experts = p.experts, .top_k = p.top_k});
  const Cost experts = cost(GroupedMlpProblem{
      .rows = rows, .hidden = p.hidden, .features = p.features, .experts = p.experts});
  const Cost shared =
      cost(GroupedMlpProblem{.rows = p.tokens, .hidden = p.hidden, .features = p.shared_features});
  const double moved = 4 * double(rows + p.tokens) * double(p.hidden);
  return {2 * routing.products + experts.products + shared.products,
          2 * routing.elements + experts.elements + shared.elements + moved, experts.routed};
}

Cost cost(const SequentialProblem& p) {
  Cost all;
  for (const RowOp& op : p.ops) {
    const Cost one = std::visit([](const auto& each) { return cost(each); }, op);
    all.products += one.products;
    all.elements += one.elements;
    all.routed += one.routed;
  }
  return all;
}

// A step is four exchanges, and the experts between them.
Cost cost(const ExpertParallelProblem& p) {
  const double tokens = double(p.ranks) * double(p.tokens), rows = tokens * p.top_k;
  return {0, 4 * (tokens + 2 * rows) * double(p.hidden), routed(rows, p.ranks * p.experts)};
}

double seconds(const Cost& cost, const Runs& runs) {
  const double drawn = runs.draws * cost.elements * kSecondsOfADraw;
  const double reference = runs.reference * cost.products * kSecondsOfAReferenceProduct;
  const double fast =
      runs.fast * (cost.products * kSecondsOfAProduct + cost.elements * kSecondsOfAnElement);
  const double by_one_core = runs.draws * cost.routed * kSecondsOfADraw;
  return (drawn + reference + fast) / omp_get_max_threads() + by_one_core;
}

bool is_of_ranks(std::string_view problem) { return operation_of(problem) == "expert_parallel"; }

/// What moves blocks, and between more ranks than have windows, is by collective.
Cost cost_of_ranks(std::string_view problem, std::string_view only) {
  const ExpertParallelProblem p = parse_expert_parallel_problem(problem);
  plan(p, this_cpu(), only == kCollective ? only : std::string_view());
  return cost(p);
}

bool is_layer(std::string_view problem) {
  const auto layers = layer_list();
  return std::any_of(layers.begin(), layers.end(),
                     [&](const LayerInfo& layer) { return layer.name == operation_of(problem); });
}

}  // namespace

Cost cost_of(std::string_view problem, std::string_view only) {
  const auto cost_of_it = [](const auto& p) {
    plan(p, this_cpu());  // which says what is wrong with it
    return cost(p);
  };
  if (is_of_ranks(problem)) return cost_of_ranks(problem, only);
  return is_layer(problem) ? visit_layer(problem, cost_of_it) : visit_problem(problem, cost_of_it);
}

double seconds_to_check(std::string_view problem, std::string_view only) {
  if (is_of_ranks(problem))
    return seconds(cost_of(problem, only), {2 * kRoutings, 0, 2 * kRoutings});
  const bool layer = is_layer(problem);  // which has no reference
  return seconds(cost_of(problem), {layer ? 2.0 : 6.0, layer ? 0.0 : 2.0, 4});
}

// A device runs fast, after the host has drawn for it.
double seconds_to_measure(std::string_view problem, const MeasureOptions& options) {
  const bool host = options.device.kind == DeviceKind::kCpu;
  return seconds(cost_of(problem, options.only),
                 {2, 0, host ? 2.0 * (options.contest.repeat + 1) : 0});
}

double seconds_to_time_host(std::string_view problem, const Device& device) {
  return seconds(cost_of(problem), {1, 0, device.kind == DeviceKind::kCpu ? kHostCalls : 0});
}

void require_within(std::string_view verb, std::string_view problem, double seconds, int limit) {
  require(limit == 0 || seconds <= limit, verb, ": the problem would take about ",
          int64_t(std::min(std::round(seconds), 1e15)), " s here, must be at most ", limit,
          "; make it smaller, or raise --limit (0: none) [", problem, "]");
}

}  // namespace cadre::bench
