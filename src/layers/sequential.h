#pragma once
#include "cadre/sequential.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"
#include "layers/grouped_mlp.h"

// What planning and running a row of operations share.
namespace cadre::layers::row {

/// What flows into or out of an op.
struct Port {
  DType dtype;
  int64_t columns;
};
Port input_of(const RowOp&);
Port output_of(const RowOp&);

/// True if backward needs the input gradient of everything behind this op.
bool stops_backward(const RowOp&);

void check(const SequentialProblem&);

/// The tensors of a row, as its steps number them: its ends, the extra inputs and their gradients,
/// and an output and an input gradient of every part.
class Tensors {
 public:
  explicit Tensors(const SequentialPlan& plan)
      : last_(int(plan.row.size()) - 1), extras_(plan.extra_inputs) {}

  int output(int i) const { return i == last_ ? kY : between(i); }
  int input(int i) const { return i == 0 ? kX : output(i - 1); }
  int grad_input(int i) const { return i == 0 ? kDx : between(i) + 1; }
  int grad_output(int i) const { return i == last_ ? kDy : grad_input(i + 1); }
  int extra(int i) const { return kEnds + i; }
  int extra_gradient(int i) const { return kEnds + extras_ + i; }

  // And back again.
  int number_of_extra(int id) const { return (id - kEnds) % extras_; }
  int part_of(int id) const { return id == kY ? last_ : id == kDx ? 0 : (id - between(0)) / 2; }
  bool is_grad_input(int id) const { return id == kDx || (id >= kEnds && (id - between(0)) % 2); }

  enum End : int { kX, kY, kDy, kDx, kEnds };

 private:
  int between(int i) const { return kEnds + 2 * extras_ + 2 * i; }

  int last_, extras_;
};

inline bool defers(const GroupedLinearPlan& plan) { return plan.deferred && plan.problem.wgrad; }
inline bool defers(const GroupedMlpPlan& plan) {
  return plan.deferred && (plan.problem.wgrad1 || plan.problem.wgrad2);
}
inline bool defers(const ActivationStep&) { return false; }

}  // namespace cadre::layers::row
