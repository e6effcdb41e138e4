// Planning the expert MLP: its two linears, its activation, and where the tensors between them lie.
#include "cadre/error.h"
#include "cadre/grouped_mlp.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/grouped_mlp.h"
#include "layers/planner.h"
#include "layers/problem_fields.h"

namespace cadre {

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const GroupedMlpProblem usual;
  io.always("R", p.rows);
  io.always("H", p.hidden);
  io.always("F", p.features);
  io.always("E", p.experts);
  io.always("act", p.activation);
  io.unless("layout", p.layout, usual.layout);
  io.unless("limit", p.constants.limit, usual.constants.limit);
  io.unless("alpha", p.constants.alpha, usual.constants.alpha);
  io.unless("offset", p.constants.offset, usual.constants.offset);
  io.always("recipe", p.recipe);
  layers::parameter_fields(io, p);
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
  layers::option_fields(io, p);
}

std::string to_string(const GroupedMlpProblem& p) { return ops::write_problem("grouped_mlp", p); }

GroupedMlpProblem parse_grouped_mlp_problem(std::string_view words) {
  return ops::read_problem<GroupedMlpProblem>("grouped_mlp", words);
}

namespace {

using enum layers::mlp::Tensor;

void check(const GroupedMlpProblem& p) {
  const ops::Checks checks("grouped_mlp", p);
  layers::check_layer_problem(checks, p);
  checks.at_least("H", p.hidden, 1);
  checks.at_least("F", p.features, 1);
  checks.holds(p.bias2 || !p.bias2_scale,
               "bias2_scale is yes, must be no; the problem says bias2=no");
  checks.holds(p.keep_h || !p.wgrad2 || !p.recipe.wgrad.rhs.stochastic,
               "keep_h is no, must be yes; h is rounded stochastically for wgrad, and computing it "
               "again would give other codes");
}

class Planner {
 public:
  Planner(const GroupedMlpProblem& problem, const Device& device)
      : p_(problem),
        z_columns_(info(problem.activation).gated ? 2 * problem.features : problem.features),
        row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
    plan_.name = "unfused";
  }

  GroupedMlpPlan take() {
    plan_.fc1 = plan(fc1(), plan_.device);
    plan_.fc2 = plan(fc2(), plan_.device);
    plan_.exact = plan_.fc1.exact && plan_.fc2.exact;
    name_tensors();
    add_forward();
    add_backward();
    row_.share_memory(p_.deferred ? layers::WgradRuns::kLater : layers::WgradRuns::kWithin);
    return std::move(plan_);
  }

 private:
  bool fc1_learns() const { return p_.dgrad || p_.wgrad1 || (p_.bias1 && p_.dbias); }
  bool needs_dh() const { return fc1_learns() || (p_.prob && p_.dprob); }
  bool needs_h_again() const { return p_.wgrad2 && !p_.keep_h; }

  /// What both linears have in common. Their weight gradients run when this layer says so.
  GroupedLinearProblem linear() const {
    GroupedLinearProblem l{.rows = p_.rows, .experts = p_.experts, .recipe = p_.recipe};
    l.dtype = p_.dtype;
    l.parameters = p_.parameters;
    l.dbias = p_.dbias;
    l.accumulate = p_.accumulate;
    l.accumulate_bias = p_.accumulate_bias;
    l.deferred = true;
    l.cache_weights = p_.cache_weights;
    l.tail = p_.tail;
    l.amax_eps = p_.amax_eps;
    l.unit_budget = p_.unit_budget;
    l.align = p_.align;
    return l;
  }
  GroupedLinearProblem fc1() const {
    GroupedLinearProblem l = linear();
    l.n = z_columns_;
    l.k = p_.hidden;
    l.bias = p_.bias1;
    l.dgrad = p_.dgrad;
    l.wgrad = p_.wgrad1;
    l.save_input = p_.save_input;
    l.dy_role = TensorRole::kDz;
    return l;
  }
  GroupedLinearProblem fc2() const {
    GroupedLinearProblem l = linear();
    l.n = p_.hidden;
    l.k = p_.features;
    l.bias = p_.bias2;
    l.bias_scale = p_.bias2_scale;
    l.dgrad = needs_dh();
    l.wgrad = p_.wgrad2;
    l.save_input = needs_h_again();
    l.x_role = TensorRole::kH;
    return l;
  }

  ActivationPlan activation(bool backward) const {
    ActivationProblem a{.backward = backward, .kind = p_.activation, .constants = p_.constants};
    a.layout = p_.layout;
    a.rows = p_.rows;
    a.features = p_.features;
    a.experts = p_.experts;
    a.z = a.h = p_.dtype;
    a.prob = p_.prob;
    a.tail = p_.tail;
    return plan(a, plan_.device);
  }

  /// In the order of mlp::Tensor. The linears' shares come first in every memory.
  void name_tensors() {
    for (const GroupedLinearPlan* part : {&plan_.fc1, &plan_.fc2}) row_.part(part->memory);
    for (const char* own : {"x", "y", "dy", "dx", "prob", "dprob"}) row_.own(own);
    const QuantizedShape wide = layers::plain_rows(p_.dtype, p_.rows, z_columns_);
    const QuantizedShape narrow = layers::plain_rows(p_.dtype, p_.rows, p_.features);
    row_.made("z", wide);
    row_.made("h", narrow);
    row_.made("h again", narrow);
    row_.made("dh", narrow);
    row_.made("dz", wide);
  }

  int prob() const { return p_.prob ? kProb : kNone; }
  /// What wgrad of fc2 reads: h, if it was kept.
  int h_in_backward() const { return needs_h_again() ? kHAgain : kH; }

  void add_forward() {
    row_.step(Phase::kForward, "fc1", PartPhase{0, Phase::kForward}, {kX}, {kZ});
    row_.step(Phase::kForward, "activation", activation(false), {kZ, prob()}, {kH});
    row_.step(Phase::kForward, "fc2", PartPhase{1, Phase::kForward}, {kH}, {kY});
  }

  void add_backward() {
    const int h_again = needs_h_again() ? kHAgain : kNone;
    if (learns(plan_.fc2))
      row_.step(Phase::kBackward, "fc2 backward", PartPhase{1, Phase::kBackward}, {kDy},
                {needs_dh() ? kDh : kNone});
    if (needs_dh())
      row_.step(Phase::kBackward, "activation backward", activation(true), {kZ, prob(), kDh},
                {h_again, kDz, p_.prob && p_.dprob ? kDprob : kNone});
    else if (needs_h_again())
      row_.step(Phase::kBackward, "h again", activation(false), {kZ, prob()}, {h_again});
    add_input_again(1, "fc2 input again", kHAgain);
    if (learns(plan_.fc1))
      row_.step(Phase::kBackward, "fc1 backward", PartPhase{0, Phase::kBackward}, {kDz},
                {p_.dgrad ? kDx : kNone});
    add_input_again(0, "fc1 input again", kX);
    if (p_.wgrad2) add_wgrad(1, "fc2 dw", h_in_backward(), kDy);
    if (p_.wgrad1) add_wgrad(0, "fc1 dw", kX, kDz);
  }

  const GroupedLinearPlan& linear_at(int part) const { return part == 0 ? plan_.fc1 : plan_.fc2; }

  void add_input_again(int part, const char* name, int input) {
    if (find_step<QuantizePlan>(linear_at(part), "quantize x again"))
      row_.step(Phase::kBackward, name, PartPhase{part, Phase::kInputAgain}, {input}, {});
  }
  void add_wgrad(int part, const char* name, int input, int gradient) {
    const GroupedLinearPlan& own = linear_at(part);
    const bool x = layers::wgrad_input(own).place == Place::kCaller;
    const bool dy = layers::wgrad_gradient(own).place == Place::kCaller;
    row_.step(Phase::kWgrad, name, PartPhase{part, Phase::kWgrad},
              {dy ? gradient : kNone, x ? input : kNone}, {});
  }

  const GroupedMlpProblem& p_;
  int64_t z_columns_;
  GroupedMlpPlan plan_;
  layers::Row row_;
};

}  // namespace

GroupedMlpPlan plan(const GroupedMlpProblem& problem, const Device& device) {
  check(problem);
  return Planner(problem, device).take();
}

std::vector<KeptPart> kept(const GroupedMlpPlan& plan) {
  const GroupedMlpProblem& p = plan.problem;
  std::vector<KeptPart> parts = kept(plan.fc1);
  const auto saved = [&](std::string_view name, const LayerTensor& tensor) {
    if (tensor.place == Place::kSaved)
      parts.push_back({name, Place::kSaved, quantized_bytes(tensor.shape)});
  };
  const int64_t row_words = p.rows * int64_t(sizeof(float));
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
  return layers::explain_head(plan.problem, plan) + layers::explain_steps(plan) +
         text("\nfc1: ", explain(plan.fc1), "\nfc2: ", explain(plan.fc2), "\ntogether\n") +
         layers::explain_memory(plan.memory, kept(plan), plan.problem.rows);
}

}  // namespace cadre
