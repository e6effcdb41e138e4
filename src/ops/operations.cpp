// The list of operations: the only place that knows them all.
#include "cadre/operations.h"

#include <array>

#include "backend/walk.h"

namespace cadre {
namespace {

template <class Problem, class Args>
std::vector<std::string_view> implementations(const Device& device) {
  std::vector<std::string_view> names;
  for (const auto& entry : backend::entries_on<Problem, Args>(device)) names.push_back(entry.name);
  return names;
}

template <class Problem, class Args, Problem (*parse)(std::string_view)>
Explanation explain_one(std::string_view words, const Device& device) {
  const Problem problem = parse(words);
  Explanation result{.problem = to_string(problem), .plan = {}, .refusals = {}};
  try {
    Plan<Problem> chosen = plan(problem, device);
    result.plan = chosen.name;
    result.workspace_bytes = chosen.workspace_bytes;
    result.exact = chosen.exact;
    result.refusals = std::move(chosen.refusals);
  } catch (const Unsupported&) {
    for (const auto& entry : backend::entries_on<Problem, Args>(device))
      result.refusals.push_back({entry.name, entry.refuses(problem, device)});
  }
  return result;
}

template <class Problem, class Args, Problem (*parse)(std::string_view)>
constexpr OperationInfo row(std::string_view name, std::string_view summary,
                            std::string_view example) {
  return {name, summary, example, implementations<Problem, Args>,
          explain_one<Problem, Args, parse>};
}

constexpr std::array kOperations = {
    row<OffsetsProblem, OffsetsArgs, parse_offsets_problem>(
        "offsets", "row ranges of the experts from counts, ends or routing",
        "offsets routing R=8192 E=64 T=4096 top_k=2"),
    row<RoutingProblem, RoutingArgs, parse_routing_problem>(
        "routing", "the top_k experts of each token, their probabilities, and the gradient",
        "routing forward softmax T=4096 E=64 top_k=8"),
    row<PermuteProblem, PermuteArgs, parse_permute_problem>(
        "permute", "rows between token order and expert order, both ways, and the gradients",
        "permute combine T=4096 top_k=2 R=8192 H=2048 E=64 prob=yes"),
    row<QuantizeProblem, QuantizeArgs, parse_quantize_problem>(
        "quantize", "codes and scales along K, along rows, or both at once",
        "quantize rows R=8192 C=4096 E=64 along_k=mxfp8 along_rows=mxfp8"),
    row<DequantizeProblem, DequantizeArgs, parse_dequantize_problem>(
        "dequantize", "values from codes and scales",
        "dequantize rows R=8192 C=4096 E=64 format=mxfp8"),
    row<GroupedGemmProblem, GroupedGemmArgs, parse_grouped_gemm_problem>(
        "grouped_gemm", "each expert's rows times that expert's weight: fprop, dgrad, wgrad",
        "grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=mxfp8"),
    row<ActivationProblem, ActivationArgs, parse_activation_problem>(
        "activation", "gated and plain activations times a row probability, and the gradients",
        "activation forward swiglu R=8192 F=2048 E=64"),
    row<BiasGradProblem, BiasGradArgs, parse_bias_grad_problem>(
        "bias_grad", "gradients of a bias per expert and of its scale per row",
        "bias_grad R=8192 N=2048 E=64"),
};

}  // namespace

std::span<const OperationInfo> operation_list() { return kOperations; }

}  // namespace cadre
