// The expert layer as text, what must hold of it, and its routes.
#include <algorithm>

#include "cadre/error.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/moe.h"
#include "layers/paying_recipe.h"
#include "layers/problem_fields.h"
#include "layers/route.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const MoeProblem usual;
  io.always("T", p.tokens);
  io.always("top_k", p.top_k);
  layers::expert_fields(io, p);
  io.unless("routed", p.routed, usual.routed);
  io.unless("index", p.index, usual.index);
  io.unless("score", p.score, usual.score);
  io.unless("logits", p.logits, usual.logits);
  io.unless("normalize", p.normalize, usual.normalize);
  io.unless("scale", p.scale, usual.scale);
  io.unless("expert_bias", p.expert_bias, usual.expert_bias);
  io.unless("groups", p.groups, usual.groups);
  io.unless("group_top_k", p.group_top_k, usual.group_top_k);
  io.unless("shared_F", p.shared_features, usual.shared_features);
  io.unless("shared_gate", p.shared_gate, usual.shared_gate);
  io.unless("bias1", p.bias1, usual.bias1);
  io.unless("bias2", p.bias2, usual.bias2);
  io.unless("dgrad", p.dgrad, usual.dgrad);
  io.unless("dlogits", p.dlogits, usual.dlogits);
  io.unless("wgrad1", p.wgrad1, usual.wgrad1);
  io.unless("wgrad2", p.wgrad2, usual.wgrad2);
  io.unless("dbias", p.dbias, usual.dbias);
  io.unless("keep_h", p.keep_h, usual.keep_h);
  io.unless("keep_rows", p.keep_rows, usual.keep_rows);
  layers::option_fields(io, p);
}

std::string to_string(const MoeProblem& p) { return ops::write_problem("moe", p); }

MoeProblem parse_moe_problem(std::string_view words) {
  return ops::read_problem<MoeProblem>("moe", words);
}

bool layers::keeps(const GroupedMlpPlan& plan, std::string_view tensor) {
  return !plan.name.empty() && has_part(kept(plan), tensor);
}

namespace {

using enum layers::moe::Tensor;

void check(const MoeProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("moe", p);
  checks.at_least("T", p.tokens, 0);
  checks.fits_int32("T", p.tokens);
  checks.at_least("top_k", p.top_k, 1);
  checks.fits_int32("T * top_k", layers::rows_of(p));
  checks.at_least("H", p.hidden, 1);
  checks.at_least("F", p.features, 1);
  checks.countable("E * H * F", {p.experts, p.hidden, p.features});
  checks.at_least("shared_F", p.shared_features, 0);
  checks.holds(layers::has_shared(p) || !p.shared_gate,
               "shared_gate is yes, must be no; shared_F is 0, so no expert is shared");
  layers::check_types_and_options(checks, p);
  checks.holds(!p.options.quantized_x,
               "quantized_x is yes, must be no; x comes in token order and is permuted as it is");
  const bool bias_learns = p.dbias && (p.bias1 || p.bias2);
  layers::check_quantized_w(checks, p.dgrad || p.dlogits || p.wgrad1 || p.wgrad2 || bias_learns);
  layers::check_keep_h(checks);
  checks.holds(
      p.dbias || !p.bias2 || !p.dlogits,
      "dbias is no, must be yes; the gradient of the probabilities that weigh bias2 is made "
      "with that of bias2, so say dlogits=no or dbias=yes");
}

/// What is of the routing that a caller has done.
/// Errors    InvalidArgument.
void check_routed(const MoeProblem& p) {
  const ops::Checks checks("moe", p);
  const MoeProblem usual;
  if (!p.routed)
    return checks.holds(p.index == usual.index, "index is ", name(p.index),
                        ", must be i32; routed is no, so that no experts are given");
  checks.holds(p.index == DType::kI32 || p.index == DType::kI64, "index is ", name(p.index),
               ", must be i32 or i64");
  const bool chooses = p.score != usual.score || p.logits != usual.logits || p.normalize ||
                       p.scale != usual.scale || p.expert_bias || p.groups != usual.groups ||
                       p.group_top_k != usual.group_top_k;
  checks.holds(!chooses,
               "score, logits, normalize, scale, expert_bias, groups or group_top_k is given, must "
               "not be; routed is yes, so that nothing is chosen here");
  checks.holds(!layers::has_shared(p), "shared_F is ", p.shared_features,
               ", must be 0; routed is yes, and a shared expert is the caller's then");
}

/// A route is a function that plans it, and a row here.
constexpr layers::Route<MoeProblem, MoePlan> kRoutes[] = {
    {.name = "gathered",
     .refuses = layers::refuses_gathered,
     .plan = layers::plan_gathered_by_kernel,
     .why_slow = layers::why_permuted_is_faster},
    {"permuted", layers::takes_all, layers::plan_permuted},
};

}  // namespace

MoePlan plan(const MoeProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  check_routed(problem);
  return layers::plan_paying(problem, device, only, [&](const MoeProblem& paying) {
    return layers::choose<MoePlan, MoeProblem>(kRoutes, paying, device, only);
  });
}

bool keeps_tokens(const MoeProblem& p) { return !p.recipe.wgrad.rhs.stochastic; }

std::vector<KeptPart> kept(const MoePlan& plan) {
  layers::require_made(plan);
  const MoeProblem& p = plan.problem;
  std::vector<KeptPart> parts;
  const auto callers = [&](bool is_read, std::string_view name, int64_t bytes) {
    if (is_read) parts.push_back({name, Place::kCaller, bytes});
  };
  const auto saved = [&](std::string_view name, int id) {
    const LayerTensor& tensor = plan.tensors[size_t(id)];
    if (tensor.place == Place::kSaved) parts.push_back({name, Place::kSaved, tensor.layout.bytes});
  };
  callers(p.dlogits && !p.routed, "logits", p.tokens * bytes_for(p.logits, p.experts));
  callers(p.dlogits && !p.routed, "experts", bytes_for(DType::kI32, layers::rows_of(p)));
  callers(learns(plan), "offsets", bytes_for(DType::kI32, int64_t(p.experts) + 1));
  const bool shares_x = layers::keeps(plan.shared, "x");
  const bool reads_x =
      layers::keeps(plan.mlp, "tokens") || find_step<PermutePlan>(plan, "permute again");
  callers(shares_x || reads_x, "x", p.tokens * bytes_for(p.dtype, p.hidden));
  callers(layers::keeps(plan.shared, "prob"), "shared_gate", bytes_for(DType::kF32, p.tokens));
  saved("row_of", kRowOf);
  saved("slot_of", kSlotOf);
  saved("rows", kRows);
  saved("prob of rows", kRowProb);
  for (const KeptPart& part : kept(plan.mlp))
    if (part.place != Place::kCaller) parts.push_back(part);  // what the experts call the caller's
  if (plan.shared.memory.saved_bytes > 0)
    parts.push_back({"shared expert", Place::kSaved, plan.shared.memory.saved_bytes});
  return parts;
}

std::string explain(const MoePlan& plan) {
  return layers::explain_head(plan.problem, plan) + layers::explain_steps(plan) +
         text("\nexperts: ", explain(plan.mlp)) +
         (layers::has_shared(plan.problem) ? text("\nshared expert: ", explain(plan.shared)) : "") +
         "\ntogether\n" +
         layers::explain_memory(plan.memory, kept(plan), {"token", plan.problem.tokens});
}

}  // namespace cadre
