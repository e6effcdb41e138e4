#include "backend/composed_gemm.h"

#include <algorithm>

#include "cadre/activation.h"
#include "cadre/error.h"

namespace cadre::backend {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
bool keeps_z(const GroupedGemmProblem& p) { return p.activation->keep_z; }

/// The product, without a tail that nobody reads.
GroupedGemmProblem product(const GroupedGemmProblem& p) {
  GroupedGemmProblem plain = p;
  plain.activation.reset();
  if (!keeps_z(p)) plain.tail = Tail::kKeep;
  return plain;
}

ActivationProblem activation(const GroupedGemmProblem& p) {
  const GemmActivation& a = *p.activation;
  ActivationProblem act{.kind = a.kind, .constants = a.constants, .layout = a.layout};
  act.rows = p.rows;
  act.features = out_columns(p);
  act.experts = p.experts;
  act.z = act.h = p.out;
  act.prob = a.prob;
  act.tail = p.tail;
  return act;
}

struct Plans {
  GroupedGemmPlan product;
  ActivationPlan activation;
};

int64_t z_bytes(const GroupedGemmProblem& p) {
  return !keeps_z(p) ? aligned(bytes_for(p.out, p.rows * p.n)) : 0;
}
}  // namespace

std::string refuses_composed_gemm(const GroupedGemmProblem& p, const Device& device) {
  if (!p.activation) return "is for products with an activation";
  try {
    plan(product(p), device);
    plan(activation(p), device);
  } catch (const Unsupported& error) {
    return error.what();
  }
  return {};
}

int64_t composed_gemm_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return z_bytes(p) + std::max(plan(product(p), device).workspace_bytes,
                               plan(activation(p), device).workspace_bytes);
}

std::shared_ptr<const void> composed_gemm_plans(const GroupedGemmProblem& p, const Device& device) {
  // tidy: allocation because it is made with the plan, before any run
  return std::make_shared<Plans>(Plans{plan(product(p), device), plan(activation(p), device)});
}

void composed_gemm(const GroupedGemmPlan& of, const GroupedGemmArgs& args, Workspace workspace,
                   Stream stream) {
  const GroupedGemmProblem& p = of.problem;
  const Workspace rest{static_cast<char*>(workspace.data) + z_bytes(p),
                       workspace.bytes - z_bytes(p)};
  GroupedGemmArgs gemm = args;
  gemm.prob = nullptr;
  gemm.z = {};
  gemm.out = keeps_z(p) ? args.z : view(workspace.data, p.out, {p.rows, p.n});
  const auto& plans = *static_cast<const Plans*>(of.inner.get());
  run(plans.product, gemm, rest, stream);
  const ActivationArgs act{
      .z = gemm.out, .prob = args.prob, .offsets = args.offsets, .h = args.out};
  run(plans.activation, act, rest, stream);
}

}  // namespace cadre::backend
