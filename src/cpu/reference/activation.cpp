#include "cpu/reference/activation.h"

#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cpu/load_store.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu::reference {
namespace {

using activations::GluColumns;

GluColumns columns(const ActivationProblem& p, int64_t f) {
  return info(p.kind).gated ? activations::glu_columns(p.layout, f, p.features) : GluColumns{f, f};
}

template <class Activation>
void forward_row(const ActivationProblem& p, const ActivationArgs& args, int64_t r) {
  const double prob = p.prob ? args.prob[r] : 1.0;
  for (int64_t f = 0; f < p.features; ++f) {
    const GluColumns at = columns(p, f);
    const double gate = read(args.z, r, at.gate), up = read(args.z, r, at.up);
    write(args.h, {r, f}, Activation::forward(gate, up, p.constants) * prob);
  }
}

template <class Activation>
void backward_row(const ActivationProblem& p, const ActivationArgs& args, int64_t r) {
  const double prob = p.prob ? args.prob[r] : 1.0;
  double dprob = 0;
  for (int64_t f = 0; f < p.features; ++f) {
    const GluColumns at = columns(p, f);
    const double gate = read(args.z, r, at.gate), up = read(args.z, r, at.up);
    const double dh = read(args.dh, r, f);
    const auto gradient = Activation::backward(gate, up, dh * prob, p.constants);
    write(args.dz, {r, at.gate}, gradient.dgate);
    if (info(p.kind).gated) write(args.dz, {r, at.up}, gradient.dup);
    if (args.h) write(args.h, {r, f}, gradient.value * prob);
    dprob += dh * gradient.value;
  }
  if (args.dprob != nullptr) args.dprob[r] = float(dprob);
}

void zero_row(const TensorView& matrix, int64_t r) {
  for (int64_t column = 0; matrix && column < matrix[1]; ++column) write(matrix, {r, column}, 0);
}

}  // namespace

void activation(const ActivationPlan& plan, const ActivationArgs& args, Workspace, Stream) {
  const ActivationProblem& p = plan.problem;
  const int64_t used = schedule::rows_used(args.offsets.data, p.experts, p.rows);
  activations::All::visit(p.kind, [&]<class Activation>(Activation) {
    for (int64_t r = 0; r < used; ++r)
      p.backward ? backward_row<Activation>(p, args, r) : forward_row<Activation>(p, args, r);
  });
  for (int64_t r = used; r < p.rows && p.tail == Tail::kZero; ++r) {
    zero_row(args.h, r);
    zero_row(args.dz, r);
    if (args.dprob != nullptr) args.dprob[r] = 0;
  }
}

}  // namespace cadre::cpu::reference
