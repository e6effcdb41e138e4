// Planning the expert MLP: its two linears, its activation, and where the tensors between them lie.
#include "cadre/error.h"
#include "cadre/grouped_mlp.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/memory.h"
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

using layers::Layout;

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
        z_columns_(info(problem.activation).gated ? 2 * problem.features : problem.features) {
    plan_.problem = problem;
    plan_.device = device;
    plan_.name = "unfused";
  }

  GroupedMlpPlan take() {
    plan_.fc1 = plan(fc1(), plan_.device);
    plan_.fc2 = plan(fc2(), plan_.device);
    choose_activations();
    place_linears();
    place_tensors();
    count_memory();
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

  void choose_activations() {
    ActivationProblem a{.kind = p_.activation, .constants = p_.constants, .layout = p_.layout};
    a.rows = p_.rows;
    a.features = p_.features;
    a.experts = p_.experts;
    a.z = a.h = p_.dtype;
    a.prob = p_.prob;
    a.tail = p_.tail;
    plan_.activation = plan(a, plan_.device);
    plan_.exact = plan_.fc1.exact && plan_.fc2.exact && plan_.activation.exact;
    if (!needs_dh() && needs_h_again()) plan_.recompute = plan_.activation;
    if (!needs_dh()) return;
    a.backward = true;
    plan_.activation_backward = plan(a, plan_.device);
    plan_.exact = plan_.exact && plan_.activation_backward->exact;
  }

  /// The linears' shares come first in every memory: fc1's, then fc2's.
  void place_linears() {
    for (const LayerMemory& m : {plan_.fc1.memory, plan_.fc2.memory}) {
      saved_.take(m.saved_bytes);
      pending_.take(m.pending_bytes);
      cache_.take(m.weight_cache_bytes);
    }
  }

  OperandPlan place(Place where, int64_t columns, Layout& workspace) {
    Layout& memory = where == Place::kSaved     ? saved_
                     : where == Place::kPending ? pending_
                                                : workspace;
    return memory.take(where, layers::plain_rows(p_.dtype, p_.rows, columns));
  }

  void place_tensors() {
    const bool wgrad2_reads_h = p_.wgrad2 && plan_.fc2.wgrad_x.place == Place::kCaller;
    const bool wgrad1_reads_dz = p_.wgrad1 && plan_.fc1.wgrad_dy.place == Place::kCaller;
    const bool needs_z = needs_dh() || needs_h_again();
    const auto until_wgrad = [&](bool read) {
      return read && p_.deferred ? Place::kPending : Place::kWorkspace;
    };
    plan_.z = place(needs_z ? Place::kSaved : Place::kWorkspace, z_columns_, forward_);
    plan_.h = place(p_.keep_h && wgrad2_reads_h ? Place::kSaved : Place::kWorkspace, p_.features,
                    forward_);
    plan_.h_again = plan_.h;
    if (needs_h_again()) plan_.h_again = place(until_wgrad(wgrad2_reads_h), p_.features, backward_);
    if (!needs_dh()) return;
    plan_.dh = place(Place::kWorkspace, p_.features, backward_);
    plan_.dz = place(until_wgrad(wgrad1_reads_dz), z_columns_, backward_);
  }

  void count_memory() {
    const LayerMemory &one = plan_.fc1.memory, &two = plan_.fc2.memory;
    const auto bytes = [](const std::optional<ActivationPlan>& a) {
      return a ? a->workspace_bytes : 0;
    };
    LayerMemory& m = plan_.memory;
    plan_.forward_copies_bytes = forward_.bytes();
    plan_.backward_copies_bytes = backward_.bytes();
    plan_.pending_bytes = pending_.bytes();
    m.saved_bytes = saved_.bytes();
    m.weight_cache_bytes = cache_.bytes();
    m.forward_workspace_bytes =
        forward_.bytes() + std::max({one.forward_workspace_bytes, two.forward_workspace_bytes,
                                     plan_.activation.workspace_bytes});
    const int64_t wgrad = std::max(one.wgrad_workspace_bytes, two.wgrad_workspace_bytes);
    m.backward_workspace_bytes =
        backward_.bytes() + std::max({one.backward_workspace_bytes, two.backward_workspace_bytes,
                                      bytes(plan_.activation_backward), bytes(plan_.recompute),
                                      p_.deferred ? int64_t(0) : wgrad});
    if (p_.deferred) {
      m.pending_bytes = pending_.bytes();
      m.wgrad_workspace_bytes = wgrad;
    } else {
      m.backward_workspace_bytes += pending_.bytes();
    }
  }

  const GroupedMlpProblem& p_;
  int64_t z_columns_;
  GroupedMlpPlan plan_;
  Layout forward_, backward_, saved_, pending_, cache_;
};

}  // namespace

GroupedMlpPlan plan(const GroupedMlpProblem& problem, const Device& device) {
  check(problem);
  return Planner(problem, device).take();
}

std::vector<KeptPart> kept(const GroupedMlpPlan& plan) {
  std::vector<KeptPart> parts = kept(plan.fc1);
  if (plan.z.place == Place::kSaved)
    parts.push_back({"z", Place::kSaved, quantized_bytes(plan.z.shape)});
  const int64_t row_words = plan.problem.rows * int64_t(sizeof(float));
  if (plan.problem.prob && (plan.activation_backward || plan.recompute))
    parts.push_back({"prob", Place::kCaller, row_words});
  if (plan.h.place == Place::kSaved)
    parts.push_back({"h", Place::kSaved, quantized_bytes(plan.h.shape)});
  if (plan.fc2.wgrad_x.place == Place::kSaved)
    parts.push_back({"h along rows", Place::kSaved, quantized_bytes(plan.fc2.wgrad_x.shape)});
  if (plan.fc2.bias_grad && plan.problem.bias2_scale)
    parts.push_back({"bias2_scale", Place::kCaller, row_words});
  return parts;
}

std::string explain(const GroupedMlpPlan& plan) {
  using layers::explain_step;
  return text(to_string(plan.problem), "\nroute ", plan.name, plan.exact ? "" : ", not exact",
              "\n\nfc1: ", explain(plan.fc1), "\n", explain_step("activation", plan.activation),
              explain_step("activation backward", plan.activation_backward),
              explain_step("h again", plan.recompute), "\nfc2: ", explain(plan.fc2), "\ntogether\n",
              layers::explain_memory(plan.memory, kept(plan), plan.problem.rows));
}

}  // namespace cadre
