// The list of layers: the only place that knows them all.
#include <array>

#include "cadre/error.h"
#include "cadre/grouped_linear.h"
#include "cadre/grouped_mlp.h"
#include "cadre/layers.h"
#include "cadre/moe.h"
#include "cadre/sequential.h"

namespace cadre {
namespace {

int64_t rows_of(const GroupedLinearProblem& p) { return p.rows; }
int64_t rows_of(const GroupedMlpProblem& p) { return p.rows; }
int64_t rows_of(const MoeProblem& p) { return p.tokens * p.top_k; }
int64_t rows_of(const SequentialProblem& p) {
  return std::visit([](const auto& op) { return op.rows; }, p.ops.front());
}

template <class Problem, Problem (*parse)(std::string_view)>
LayerExplanation explain_one(std::string_view words, const Device& device) {
  const Problem problem = parse(words);
  LayerExplanation result{.problem = to_string(problem)};
  try {
    const auto chosen = plan(problem, device);
    result.plan = chosen.name;
    result.exact = chosen.exact;
    result.memory = chosen.memory;
    result.kept_bytes_per_row = bytes_per_token(kept(chosen), rows_of(problem));
    result.steps = explain(chosen);
  } catch (const Unsupported& refusal) {
    result.refusals = refusal.what();
  }
  return result;
}

constexpr std::array kLayers = {
    LayerInfo{"grouped_linear", "a linear layer per expert, forward and backward",
              "grouped_linear R=8192 N=2048 K=4096 E=64 recipe=mxfp8",
              explain_one<GroupedLinearProblem, parse_grouped_linear_problem>},
    LayerInfo{"grouped_mlp", "two grouped linears with an activation times a probability between",
              "grouped_mlp R=8192 H=2048 F=1408 E=64 act=swiglu recipe=nvfp4 prob=yes",
              explain_one<GroupedMlpProblem, parse_grouped_mlp_problem>},
    LayerInfo{"moe", "experts from the router's logits to the sum over each token's choices",
              "moe T=4096 top_k=2 H=2048 F=1408 E=64 act=swiglu recipe=mxfp8",
              explain_one<MoeProblem, parse_moe_problem>},
    LayerInfo{"sequential", "operations in a row, fused where a plan knows the pattern",
              "sequential | grouped_linear R=512 N=256 K=128 E=8 | activation forward silu R=512 "
              "F=256 E=8 | grouped_linear R=512 N=128 K=256 E=8",
              explain_one<SequentialProblem, parse_sequential_problem>},
};

}  // namespace

std::span<const LayerInfo> layer_list() { return kLayers; }

}  // namespace cadre
