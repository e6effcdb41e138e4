// Planning a row of operations: which neighbours are fused, and which steps they take.
#include "cadre/error.h"
#include "layers/explain.h"
#include "layers/planner.h"
#include "layers/sequential.h"

namespace cadre {
namespace {

using layers::row::input_of;
using layers::row::output_of;
using layers::row::Port;
using layers::row::stops_backward;

const GroupedLinearProblem* linear_at(const std::vector<RowOp>& ops, size_t i) {
  return i < ops.size() ? std::get_if<GroupedLinearProblem>(&ops[i]) : nullptr;
}
const ActivationProblem* activation_at(const std::vector<RowOp>& ops, size_t i) {
  return i < ops.size() ? std::get_if<ActivationProblem>(&ops[i]) : nullptr;
}

int extra_inputs(const RowOp& op) {
  const auto* linear = std::get_if<GroupedLinearProblem>(&op);
  return linear ? linear->bias_scale : std::get<ActivationProblem>(op).prob;
}

/// One condition of the fused plan, and what is wrong where it does not hold.
struct Condition {
  bool holds;
  std::string_view why;
};

/// Why three ops cannot be one grouped_mlp; empty if they can.
std::string_view refuses(const GroupedLinearProblem& one, const ActivationProblem& act,
                         const GroupedLinearProblem& two) {
  const Condition conditions[] = {
      {two.n == one.k, "the second linear's outputs are not as many as the first one's inputs"},
      {one.recipe == two.recipe, "the recipes differ"},
      {one.dtype == two.dtype && act.z == act.h, "the dtypes differ"},
      {one.parameters == two.parameters, "the parameters' types or layouts differ"},
      {one.options.accumulate == two.options.accumulate &&
           one.options.accumulate_bias == two.options.accumulate_bias,
       "the linears accumulate differently"},
      {one.options.deferred == two.options.deferred, "only one linear is deferred"},
      {one.options.cache_weights == two.options.cache_weights,
       "only one linear caches its weights"},
      {one.options.overwrite_saved == two.options.overwrite_saved,
       "only one linear may overwrite what it saved"},
      {one.options.tail == two.options.tail && one.options.tail == act.tail, "the tails differ"},
      {one.options.amax_eps == two.options.amax_eps, "amax_eps differs"},
      {one.options.unit_budget == two.options.unit_budget, "the unit budgets differ"},
      {one.options.align == two.options.align, "the alignments differ"},
      {!one.bias || !two.bias || one.dbias == two.dbias, "only one bias is frozen"},
      {!one.bias_scale, "the first linear scales its bias"},
      {!one.return_bias && !two.return_bias, "a linear returns its bias"},
      {two.dgrad, "the second linear has dgrad=no"},
      {one.x_role == TensorRole::kX && two.dy_role == TensorRole::kDy,
       "the linears have roles of their own"},
  };
  for (const Condition& condition : conditions)
    if (!condition.holds) return condition.why;
  return {};
}

GroupedMlpProblem fused(const GroupedLinearProblem& one, const ActivationProblem& act,
                        const GroupedLinearProblem& two) {
  GroupedMlpProblem p{.rows = one.rows, .hidden = one.k, .features = two.k};
  p.experts = one.experts;
  p.activation = act.kind;
  p.constants = act.constants;
  p.layout = act.layout;
  p.recipe = one.recipe;
  p.dtype = one.dtype;
  p.parameters = one.parameters;
  p.options = one.options;
  p.prob = p.dprob = act.prob;
  p.bias1 = one.bias;
  p.bias2 = two.bias;
  p.bias2_scale = two.bias_scale;
  p.dgrad = one.dgrad;
  p.wgrad1 = one.wgrad;
  p.wgrad2 = two.wgrad;
  p.dbias = one.bias ? one.dbias : two.dbias;
  p.keep_h = two.recipe.wgrad.rhs.stochastic;
  return p;
}

// What the planner asks of a step.
const LayerMemory& memory_of(const GroupedLinearPlan& plan) { return plan.memory; }
const LayerMemory& memory_of(const GroupedMlpPlan& plan) { return plan.memory; }
LayerMemory memory_of(const ActivationStep& step) {
  return {.forward_workspace_bytes = step.forward.workspace_bytes,
          .backward_workspace_bytes = step.backward.workspace_bytes};
}

std::string_view name_of(const GroupedLinearPlan&) { return "grouped_linear"; }
std::string_view name_of(const ActivationStep&) { return "activation"; }
std::string_view name_of(const GroupedMlpPlan&) { return "grouped_mlp"; }

bool exact(const GroupedLinearPlan& plan) { return plan.exact; }
bool exact(const GroupedMlpPlan& plan) { return plan.exact; }
bool exact(const ActivationStep& step) { return step.forward.exact && step.backward.exact; }

/// Whether backward or wgrad reads the step's input as it was.
bool reads_input(const GroupedLinearPlan& plan) {
  return plan.problem.wgrad &&
         (layers::wgrad_input(plan).place == Place::kCaller || plan.problem.options.save_input);
}
bool reads_input(const GroupedMlpPlan& plan) { return reads_input(plan.fc1); }
bool reads_input(const ActivationStep&) { return true; }

/// Whether a deferred wgrad reads the gradient of the step's output as it was.
bool defers_gradient(const GroupedLinearPlan& plan) {
  return plan.problem.options.deferred && plan.problem.wgrad &&
         layers::wgrad_gradient(plan).place == Place::kCaller;
}
bool defers_gradient(const GroupedMlpPlan& plan) {
  return plan.problem.options.deferred && defers_gradient(plan.fc2);
}
bool defers_gradient(const ActivationStep&) { return false; }

class Planner {
 public:
  Planner(const SequentialProblem& problem, const Device& device) : p_(problem), row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  SequentialPlan take() {
    ops_ = p_.ops;
    for (size_t i = 0; i < ops_.size(); i += fits(i) ? 3 : 1) give_roles(i);
    for (size_t i = 0; i < ops_.size();) i += size_t(add_part(i));
    for (size_t i = 0; i < plan_.row.size(); ++i)
      if (stops_backward(p_.ops[size_t(plan_.row[i].first_op)])) plan_.backward_stop = int(i);
    name_tensors();
    for (int i = 0; i <= last(); ++i) add_forward(i);
    for (int i = last(); i >= plan_.backward_stop; --i) add_backward(i);
    for (int i = last(); i >= plan_.backward_stop; --i) add_wgrad(i);
    row_.share_memory(layers::WgradRuns::kLater);
    return std::move(plan_);
  }

 private:
  int last() const { return int(plan_.row.size()) - 1; }
  const RowPart& at(int i) const { return plan_.row[size_t(i)]; }

  /// Plans the part that begins with op i, and says for how many ops it stands.
  int add_part(size_t i) {
    RowPart part = fuses(i) ? RowPart{.plan = mlp_at(i), .ops = 3} : RowPart{.plan = single(i)};
    part.first_op = int(i);
    part.first_parameters = plan_.linears;
    part.first_extra = plan_.extra_inputs;
    for (int op = 0; op < part.ops; ++op) {
      plan_.linears += linear_at(p_.ops, i + size_t(op)) != nullptr;
      plan_.extra_inputs += extra_inputs(p_.ops[i + size_t(op)]);
    }
    std::visit(
        [&](const auto& own) {
          plan_.name += text(plan_.name.empty() ? "" : " + ", name_of(own));
          plan_.exact = plan_.exact && exact(own);
        },
        part.plan);
    plan_.row.push_back(std::move(part));
    return plan_.row.back().ops;
  }

  bool is_mlp(size_t i) const {
    return linear_at(p_.ops, i) && activation_at(p_.ops, i + 1) && linear_at(p_.ops, i + 2);
  }
  std::string_view why_not(size_t i) const {
    return refuses(*linear_at(p_.ops, i), *activation_at(p_.ops, i + 1), *linear_at(p_.ops, i + 2));
  }
  /// Whether three ops could be one grouped_mlp, fused or not.
  bool fits(size_t i) const { return is_mlp(i) && why_not(i).empty(); }

  /// Three such ops round stochastically as a grouped_mlp does.
  void give_roles(size_t i) {
    if (!fits(i)) return;
    std::get<GroupedLinearProblem>(ops_[i]).dy_role = TensorRole::kDz;
    std::get<GroupedLinearProblem>(ops_[i + 2]).x_role = TensorRole::kH;
  }

  bool fuses(size_t i) {
    if (!is_mlp(i)) return false;
    const std::string_view why =
        p_.fuse ? why_not(i) : std::string_view("the problem says fuse=no");
    if (!why.empty())
      plan_.refusals.push_back({"grouped_mlp", text("ops ", i, " to ", i + 2, ": ", why)});
    return why.empty();
  }
  GroupedMlpProblem fused_at(size_t i) const {
    return fused(*linear_at(p_.ops, i), *activation_at(p_.ops, i + 1), *linear_at(p_.ops, i + 2));
  }

  /// With a z even where backward reads none: the caller may want the first linear's output.
  GroupedMlpPlan mlp_at(size_t i) const {
    const GroupedMlpProblem mlp = fused_at(i);
    return plan(mlp, plan_.device, layers::reads_z(mlp) ? "" : "unfused");
  }

  std::variant<GroupedLinearPlan, ActivationStep, GroupedMlpPlan> single(size_t i) const {
    if (const auto* linear = linear_at(ops_, i)) return plan(*linear, plan_.device);
    ActivationProblem act = *activation_at(ops_, i);
    act.backward = false;
    ActivationStep step{.forward = plan(act, plan_.device), .backward = {}};
    act.backward = true;
    step.backward = plan(act, plan_.device);
    return step;
  }

  /// In the order of row::Tensors.
  void name_tensors() {
    for (const char* own : {"x", "y", "dy", "dx"}) row_.own(own);
    for (int i = 0; i < plan_.extra_inputs; ++i) row_.own(text("extra input ", i));
    for (int i = 0; i < plan_.extra_inputs; ++i) row_.own(text("gradient of extra input ", i));
    const int64_t rows = std::visit([](const auto& q) { return q.rows; }, p_.ops.front());
    const auto plain = [&](Port port) {
      return layers::plain_rows(port.dtype, rows, port.columns);
    };
    for (int i = 0; i <= last(); ++i) {
      const RowPart& part = at(i);
      const size_t first = size_t(part.first_op), end = first + size_t(part.ops) - 1;
      row_.part(
          std::visit([](const auto& own) -> LayerMemory { return memory_of(own); }, part.plan));
      row_.made(text("output of op ", end), plain(output_of(p_.ops[end])));
      row_.made(text("input gradient of op ", first), plain(input_of(p_.ops[first])));
    }
  }

  template <class Question>
  bool ask(int i, Question question) const {
    return std::visit(question, at(i).plan);
  }
  bool reads_its_input(int i) const {
    return ask(i, [](const auto& own) { return reads_input(own); });
  }
  /// "op 3", or what runs of it.
  std::string op(int i, std::string_view what) const { return text("op ", at(i).first_op, what); }
  layers::row::Tensors tensors() const { return layers::row::Tensors(plan_); }

  void add_forward(int i) {
    const int in = tensors().input(i), out = tensors().output(i);
    const auto* act = std::get_if<ActivationStep>(&at(i).plan);
    if (act == nullptr)
      return row_.step(Phase::kForward, op(i, ""), PartPhase{i, Phase::kForward}, {in}, {out});
    const int prob = act->forward.problem.prob ? tensors().extra(at(i).first_extra) : kNone;
    row_.step(Phase::kForward, op(i, ""), act->forward, {in, prob}, {out});
  }

  void add_backward(int i) {
    const bool ends = i == plan_.backward_stop && i > 0;
    const int in = tensors().input(i), dout = tensors().grad_output(i);
    const int din = ends ? kNone : tensors().grad_input(i);
    const auto* act = std::get_if<ActivationStep>(&at(i).plan);
    if (act == nullptr)
      return row_.step(Phase::kBackward, op(i, " backward"), PartPhase{i, Phase::kBackward},
                       {dout, reads_its_input(i) ? in : kNone}, {din});
    const bool has_prob = act->backward.problem.prob;
    const int prob = has_prob ? tensors().extra(at(i).first_extra) : kNone;
    const int dprob = has_prob ? tensors().extra_gradient(at(i).first_extra) : kNone;
    row_.step(Phase::kBackward, op(i, " backward"), act->backward, {in, prob, dout},
              {kNone, din, dprob});
  }

  void add_wgrad(int i) {
    if (!ask(i, [](const auto& own) { return layers::row::defers(own); })) return;
    const bool reads_dout = ask(i, [](const auto& own) { return defers_gradient(own); });
    row_.step(Phase::kWgrad, op(i, " dw"), PartPhase{i, Phase::kWgrad},
              {reads_dout ? tensors().grad_output(i) : kNone,
               reads_its_input(i) ? tensors().input(i) : kNone},
              {});
  }

  const SequentialProblem& p_;
  std::vector<RowOp> ops_;  ///< of the problem, with their roles
  SequentialPlan plan_;
  layers::Row row_;
};

std::vector<KeptPart> kept(const ActivationStep& step) {
  const ActivationProblem& p = step.forward.problem;
  if (!p.prob) return {};
  return {{"prob", Place::kCaller, p.rows * int64_t(sizeof(float))}};
}

}  // namespace

SequentialPlan plan(const SequentialProblem& problem, const Device& device) {
  layers::row::check(problem);
  return Planner(problem, device).take();
}

std::vector<KeptPart> kept(const SequentialPlan& plan) {
  layers::require_made(plan);
  std::vector<KeptPart> parts;
  for (int i = plan.backward_stop; i < int(plan.row.size()); ++i) {
    for (const KeptPart& part :
         std::visit([](const auto& own) { return kept(own); }, plan.row[size_t(i)].plan))
      if (i == 0 || part.name != "x") parts.push_back(part);
    const LayerTensor& output = plan.tensors[size_t(layers::row::Tensors(plan).output(i))];
    if (output.place == Place::kSaved)
      parts.push_back({"output of a step", Place::kSaved, output.layout.bytes});
  }
  return parts;
}

std::string explain(const SequentialPlan& plan) {
  std::string lines = layers::explain_head(plan.problem, plan) + layers::explain_steps(plan);
  for (const RowPart& part : plan.row) {
    if (std::holds_alternative<ActivationStep>(part.plan)) continue;  // a step of the row's own
    lines += text("\nop ", part.first_op);
    if (part.ops > 1) lines += text(" to ", part.first_op + part.ops - 1);
    if (const auto* linear = std::get_if<GroupedLinearPlan>(&part.plan))
      lines += ": " + explain(*linear);
    if (const auto* mlp = std::get_if<GroupedMlpPlan>(&part.plan)) lines += ": " + explain(*mlp);
  }
  const int64_t rows = std::visit([](const auto& q) { return q.rows; }, plan.problem.ops.front());
  return lines + "\ntogether\n" + layers::explain_memory(plan.memory, kept(plan), rows);
}

}  // namespace cadre
