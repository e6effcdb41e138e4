#include "backend/composed_activation.h"

#include <algorithm>

#include "backend/composed.h"

namespace cadre::backend {
namespace {

/// The activation, and the copy of its result.
struct ActivationAndCopy {
  ActivationPlan activation;
  QuantizePlan copy;

  static DType result(const ActivationProblem& p) { return p.backward ? p.z : p.h; }
  static int64_t result_bytes(const ActivationProblem& p) {
    return p.plain ? 0 : aligned(bytes_for(result(p), p.rows * copy_shape(p).cols));
  }
  static ActivationProblem activation_of(ActivationProblem p) {
    if (!p.plain && !p.backward) p.tail = Tail::kKeep;  // which nobody reads
    p.along_k.reset();
    p.along_k_scales_major = Major::kRow;
    p.amax_eps = 0;
    p.plain = false;
    return p;
  }
  static QuantizeProblem copy_of(const ActivationProblem& p) {
    QuantizeProblem q{.rows = p.rows, .cols = copy_shape(p).cols, .experts = p.experts};
    q.source = result(p);
    q.along_k = p.along_k;
    q.along_k_scales_major = p.along_k_scales_major;
    q.amax_eps = p.amax_eps;
    return q;
  }
  static ActivationAndCopy of(const ActivationProblem& p, const Device& device) {
    return {plan(activation_of(p), device), plan(copy_of(p), device)};
  }
  int64_t workspace_bytes(const ActivationProblem& p) const {
    return result_bytes(p) + std::max(activation.workspace_bytes, copy.workspace_bytes);
  }
  void run(const ActivationProblem& p, const ActivationArgs& args, Workspace workspace,
           Stream stream) const {
    const Workspace rest = behind(workspace, result_bytes(p));
    ActivationArgs act = args;
    TensorView& written = p.backward ? act.dz : act.h;
    if (!p.plain) written = view(workspace.data, result(p), {p.rows, copy_shape(p).cols});
    act.along_k = {};
    QuantizeArgs codes{.source = written, .offsets = args.offsets};
    codes.along_k = args.along_k;
    cadre::run(activation, act, rest, stream);
    cadre::run(copy, codes, rest, stream);
  }
};

}  // namespace

std::string refuses_composed_activation(const ActivationProblem& p, const Device& device) {
  if (!p.along_k) return "is for activations whose result is quantised";
  return refusal_of([&] { ActivationAndCopy::of(p, device); });
}

int64_t composed_activation_workspace_bytes(const ActivationProblem& p, const Device& device) {
  return ActivationAndCopy::of(p, device).workspace_bytes(p);
}

Inner composed_activation_plans(const ActivationProblem& p, const Device& device) {
  // tidy: allocation because it is made with the plan, before any run
  const auto two = std::make_shared<ActivationAndCopy>(ActivationAndCopy::of(p, device));
  return {two, two->activation.fraction_bits};
}

void composed_activation(const ActivationPlan& of, const ActivationArgs& args, Workspace workspace,
                         Stream stream) {
  static_cast<const ActivationAndCopy*>(of.inner.get())->run(of.problem, args, workspace, stream);
}

}  // namespace cadre::backend
