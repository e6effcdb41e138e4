// The expert MLP as text, what must hold of it, and its routes.
#include "cadre/error.h"
#include "cadre/grouped_mlp.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/grouped_mlp.h"
#include "layers/paying_recipe.h"
#include "layers/problem_fields.h"
#include "layers/route.h"
#include "ops/activation_checks.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const GroupedMlpProblem usual;
  io.always("R", p.rows);
  layers::expert_fields(io, p);
  io.unless("prob", p.prob, usual.prob);
  io.unless("bias1", p.bias1, usual.bias1);
  io.unless("bias2", p.bias2, usual.bias2);
  io.unless("bias2_scale", p.bias2_scale, usual.bias2_scale);
  io.unless("dgrad", p.dgrad, usual.dgrad);
  io.unless("wgrad1", p.wgrad1, usual.wgrad1);
  io.unless("wgrad2", p.wgrad2, usual.wgrad2);
  io.unless("dbias", p.dbias, usual.dbias);
  io.unless("dprob", p.dprob, usual.dprob);
  io.unless("keep_h", p.keep_h, usual.keep_h);
  io.unless("given_x_along_k", p.given_x_along_k, usual.given_x_along_k);
  layers::gather_fields(io, p);
  layers::option_fields(io, p);
}

std::string to_string(const GroupedMlpProblem& p) { return ops::write_problem("grouped_mlp", p); }

GroupedMlpProblem parse_grouped_mlp_problem(std::string_view words) {
  return ops::read_problem<GroupedMlpProblem>("grouped_mlp", words);
}

namespace {

using enum layers::mlp::Tensor;

void check(const GroupedMlpProblem& p) {
  ops::require_words(p);
  const ops::Checks checks("grouped_mlp", p);
  layers::check_layer_problem(checks, p);
  checks.at_least("H", p.hidden, 1);
  checks.at_least("F", p.features, 1);
  ops::check_activation(checks, {p.activation, p.constants, p.layout, p.features});
  checks.countable("R * H", {p.rows, p.hidden});
  checks.countable("R * F", {p.rows, p.features});
  checks.countable("E * H * F", {p.experts, p.hidden, p.features});
  layers::check_gather(checks, p.bias2 && p.dbias);
  layers::check_given_x(checks);
  layers::check_quantized_w(checks, p.dgrad || p.wgrad2 || layers::needs_dh(p));
  checks.holds(p.bias2 || !p.bias2_scale,
               "bias2_scale is yes, must be no; the problem says bias2=no");
  layers::check_keep_h(checks);
}

/// On the CPU the operations run one by one anyway.
bool is_for_codes(const GroupedMlpProblem& p, const Device& device) {
  const bool codes = !is_plain(p.recipe.fprop.lhs) || !is_plain(p.recipe.dgrad.lhs);
  return codes && device.kind == DeviceKind::kCuda;
}

/// A route is a function that plans it, and a row here and in the next table.
constexpr layers::Route<GroupedMlpProblem, GroupedMlpPlan> kRoutes[] = {
    {"fused", layers::refuses_fused, layers::plan_fused},
    {"codes", layers::takes_all, layers::plan_codes, is_for_codes},
    {"unfused", layers::takes_all, layers::plan_unfused},
};
constexpr layers::Route<GroupedMlpProblem, GroupedMlpPlan> kRoutesWithin[] = {
    {"fused", layers::refuses_fused, layers::plan_fused_within},
    {"codes", layers::takes_all, layers::plan_codes_within, is_for_codes},
    {"unfused", layers::takes_all, layers::plan_unfused_within},
};

}  // namespace

GroupedMlpPlan layers::plan_within(const GroupedMlpProblem& problem, const Device& device) {
  check(problem);
  return choose<GroupedMlpPlan, GroupedMlpProblem>(kRoutesWithin, problem, device, {});
}

GroupedMlpPlan plan(const GroupedMlpProblem& problem, const Device& device, std::string_view only) {
  check(problem);
  return layers::plan_paying(problem, device, only, [&](const GroupedMlpProblem& paying) {
    return layers::choose<GroupedMlpPlan, GroupedMlpProblem>(kRoutes, paying, device, only);
  });
}

std::vector<KeptPart> kept(const GroupedMlpPlan& plan) {
  layers::require_made(plan);
  const GroupedMlpProblem& p = plan.problem;
  std::vector<KeptPart> parts = kept(plan.fc1);
  const auto saved = [&](std::string_view name, const LayerTensor& tensor) {
    if (tensor.place == Place::kSaved) parts.push_back({name, Place::kSaved, tensor.layout.bytes});
  };
  const int64_t row_words = p.rows * int64_t(sizeof(float));
  if (p.gather_dy && learns(plan.fc2) && !layers::has_part(parts, "slot_of"))
    parts.push_back({"slot_of", Place::kCaller, row_words});
  if (p.scatter && p.dgrad) parts.push_back({"place_of", Place::kCaller, row_words});
  saved("z", plan.tensors[kZ]);
  if (p.prob && plan.tensors[kZ].place == Place::kSaved)
    parts.push_back({"prob", Place::kCaller, row_words});
  saved("h", plan.tensors[kH]);
  if (p.wgrad2) saved("h along rows", layers::wgrad_input(plan.fc2));
  if (p.bias2_scale && find_step<BiasGradPlan>(plan.fc2, "dbias"))
    parts.push_back({"bias2_scale", Place::kCaller, row_words});
  return parts;
}

std::string explain(const GroupedMlpPlan& plan) {
  layers::require_made(plan);
  const bool in_gradient = plan.tensors[kDh].place == Place::kGradient;
  return layers::explain_head(plan.problem, plan) + layers::explain_steps(plan) +
         (in_gradient ? "  dh and h again lie in dw of fc1, which is written last\n" : "") +
         text("\nfc1: ", explain(plan.fc1), "\nfc2: ", explain(plan.fc2), "\ntogether\n") +
         layers::explain_memory(plan.memory, kept(plan), plan.problem.rows);
}

}  // namespace cadre
