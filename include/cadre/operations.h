#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/activation.h"
#include "cadre/bias_grad.h"
#include "cadre/dequantize.h"
#include "cadre/device.h"
#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/plan.h"
#include "cadre/quantize.h"
#include "cadre/routing.h"
#include "cadre/type_list.h"

#pragma GCC visibility push(default)
namespace cadre {

/// One operation as a type, for whoever handles all of them.
template <class AnyProblem, AnyProblem (*kParse)(std::string_view)>
struct Operation {
  using Problem = AnyProblem;
  static constexpr const OperationText& kText = Problem::kOperation;
  static Problem parse(std::string_view words) { return kParse(words); }
};

/// Every operation, in the order of a batch's way. The backends' lists, `cadre info`, check, bench
/// and the tests loop over this list: a new operation is its header and one row here.
using Operations = TypeList<Operation<OffsetsProblem, parse_offsets_problem>,
                            Operation<RoutingProblem, parse_routing_problem>,
                            Operation<PermuteProblem, parse_permute_problem>,
                            Operation<QuantizeProblem, parse_quantize_problem>,
                            Operation<DequantizeProblem, parse_dequantize_problem>,
                            Operation<GroupedGemmProblem, parse_grouped_gemm_problem>,
                            Operation<ActivationProblem, parse_activation_problem>,
                            Operation<BiasGradProblem, parse_bias_grad_problem>>;

/// What planning a problem came to, without the problem's type.
struct Explanation {
  std::string problem;            ///< as it prints back
  std::string plan;               ///< the implementation's name; empty if none takes the problem
  int64_t workspace_bytes = 0;    ///< what `run` needs
  bool exact = true;              ///< same bits on every run, whatever else is in the batch
  std::vector<Refusal> refusals;  ///< those that come before `plan`; all of them if none takes it
};

/// One operation without its types, printed by `cadre info`.
struct OperationInfo {
  std::string_view name;  ///< as those of OperationText
  std::string_view summary;
  std::string_view example;
  /// The implementations on a device's backend, in the order in which planning asks them.
  std::vector<std::string_view> (*implementations)(const Device&);
  /// Parses the problem and plans it.
  Explanation (*explain)(std::string_view problem, const Device&);
};

/// All operations, in the order of Operations.
std::span<const OperationInfo> operation_list();

}  // namespace cadre
#pragma GCC visibility pop
