#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cadre/activation.h"
#include "cadre/grouped_linear.h"
#include "cadre/grouped_mlp.h"

#pragma GCC visibility push(default)
namespace cadre {

/// An operation of a row. `backward` of an activation problem is ignored.
using RowOp = std::variant<GroupedLinearProblem, ActivationProblem>;

/// Operations in a row, each reading what the one before it wrote:
/// `sequential | grouped_linear R=.. N=.. | activation forward swiglu .. | grouped_linear ..`.
struct SequentialProblem {
  std::vector<RowOp> ops;
  bool fuse = true;  ///< linear, activation, linear in a row are planned as one grouped_mlp

  bool operator==(const SequentialProblem&) const = default;
};

/// An argument for one operation of a row.
///
/// Keys of a grouped_linear: "output", where its y goes, of forward and backward alike, since these
/// read it there; "grad_input", where its dx goes.
struct OpArgument {
  int op = 0;  ///< index in the row; negative counts from the end
  std::string_view key;
  TensorView value{};
};

/// Every tensor of a row's forward and backward.
struct SequentialArgs {
  Offsets offsets{};
  std::span<const LinearParameters> parameters{};  ///< one for each grouped_linear, in order
  std::span<const float* const> extra_inputs{};    ///< [R] each, in op order: bias_scale, prob
  std::span<float* const> extra_gradients{};  ///< [R] each, in the same order; a prob's may be null
  std::span<const OpArgument> op_arguments{};
  TensorView x{};   ///< [R, columns of the first op's input]
  TensorView y{};   ///< [R, columns of the last op's output], written; empty if given as "output"
  TensorView dy{};  ///< as y
  TensorView dx{};  ///< as x, written; empty if given as "grad_input" of the first op
  const uint64_t* rng = nullptr;  ///< [2] seed and offset in device memory; option sr only
  Memory saved{};                 ///< forward writes; backward and wgrad read
  Memory pending{};               ///< deferred: backward writes; wgrad reads
  Memory weight_cache{};          ///< cache_weights: forward writes when it refreshes
  bool refresh_weights = true;    ///< cache_weights: quantise anew (first microbatch), or reuse
  WgradQueue* queue = nullptr;    ///< deferred: backward pushes its wgrads here, if given
};

/// An activation of a row with its backward.
struct ActivationStep {
  ActivationPlan forward, backward;
};

/// What runs one op of a row or, fused, several.
struct RowPart {
  std::variant<GroupedLinearPlan, ActivationStep, GroupedMlpPlan> plan;
  int first_op = 0;
  int ops = 1;
  int first_parameters = 0;  ///< its first LinearParameters
  int first_extra = 0;       ///< its first extra input
};

/// How a row will run. `name` is its parts in order: "grouped_linear + grouped_mlp"; `refusals` say
/// why a linear, activation, linear was not fused.
struct SequentialPlan : LayerPlan {
  SequentialProblem problem;
  std::vector<RowPart> row;
  int linears = 0;        ///< how many LinearParameters the ops take
  int extra_inputs = 0;   ///< how many the ops consume
  int backward_stop = 0;  ///< parts before this one learn nothing
};

/// Runs the operations one after another, backward in reverse.
///
/// Errors    InvalidArgument before anything is launched: widths of neighbours that disagree, an
///           op argument with an unknown key, a key that its op does not take, or a target that
///           is not an op of the row.
/// Exact     a fused plan equals the row of its ops bit for bit.
SequentialPlan plan(const SequentialProblem&, const Device&);
void forward(const SequentialPlan&, const SequentialArgs&, Workspace, Stream);
void backward(const SequentialPlan&, const SequentialArgs&, Workspace, Stream);
void wgrad(const SequentialPlan&, const SequentialArgs&, Workspace, Stream);

/// What is kept from forward to the end of backward.
std::vector<KeptPart> kept(const SequentialPlan&);

std::string explain(const SequentialPlan&);

std::string to_string(const SequentialProblem&);
SequentialProblem parse_sequential_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
