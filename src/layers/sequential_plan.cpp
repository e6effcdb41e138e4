// Planning a row of operations: which neighbours are fused, and where the tensors between the steps
// lie.
#include "cadre/error.h"
#include "cadre/sequential.h"
#include "layers/checks.h"
#include "layers/explain.h"
#include "layers/memory.h"
#include "ops/problem_text.h"

namespace cadre {

std::string to_string(const SequentialProblem& p) {
  std::string words = p.fuse ? "sequential" : "sequential fuse=no";
  for (const RowOp& op : p.ops)
    words += " | " + std::visit([](const auto& problem) { return to_string(problem); }, op);
  return words;
}

static RowOp parse_op(std::string_view words) {
  const size_t start = std::min(words.find_first_not_of(" \t"), words.size());
  const std::string_view kind = words.substr(start, words.find_first_of(" \t", start) - start);
  if (kind == "grouped_linear") return parse_grouped_linear_problem(words);
  if (kind == "activation") return parse_activation_problem(words);
  throw InvalidArgument(
      text("sequential: op is '", kind, "', must be grouped_linear or activation"));
}

SequentialProblem parse_sequential_problem(std::string_view words) {
  SequentialProblem p;
  const size_t first = std::min(words.find('|'), words.size());
  ops::ProblemReader head("sequential", words.substr(0, first));
  head.unless("fuse", p.fuse, true);
  head.finish();
  for (size_t at = first; at < words.size();) {
    const size_t end = std::min(words.find('|', at + 1), words.size());
    p.ops.push_back(parse_op(words.substr(at + 1, end - at - 1)));
    at = end;
  }
  return p;
}

namespace {

using layers::Layout;
using RowChecks = ops::Checks<SequentialProblem>;

/// What flows into or out of an op.
struct Port {
  DType dtype;
  int64_t columns;
};
Port input_of(const GroupedLinearProblem& p) { return {p.dtype, p.k}; }
Port output_of(const GroupedLinearProblem& p) { return {p.dtype, p.n}; }
Port input_of(const ActivationProblem& p) {
  return {p.z, info(p.kind).gated ? 2 * p.features : p.features};
}
Port output_of(const ActivationProblem& p) { return {p.h, p.features}; }
Port input_of(const RowOp& op) {
  return std::visit([](const auto& p) { return input_of(p); }, op);
}
Port output_of(const RowOp& op) {
  return std::visit([](const auto& p) { return output_of(p); }, op);
}

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

bool learns(const RowOp& op) {
  const auto* linear = std::get_if<GroupedLinearProblem>(&op);
  return linear && (linear->wgrad || (linear->bias && linear->dbias && !linear->return_bias));
}

/// True if backward needs the input gradient of everything behind this op.
bool stops_backward(const RowOp& op) {
  const auto* linear = std::get_if<GroupedLinearProblem>(&op);
  return linear && !linear->dgrad;
}

void check_neighbours(const RowChecks& checks, const SequentialProblem& p, size_t i) {
  const auto rows = [](const RowOp& op) {
    return std::visit([](const auto& q) { return q.rows; }, op);
  };
  const auto experts = [](const RowOp& op) {
    return std::visit([](const auto& q) { return q.experts; }, op);
  };
  const RowOp &before = p.ops[i - 1], &op = p.ops[i];
  checks.holds(rows(op) == rows(before), "R of op ", i, " is ", rows(op), ", must be ",
               rows(before), "; all ops see the same rows");
  checks.holds(experts(op) == experts(before), "E of op ", i, " is ", experts(op), ", must be ",
               experts(before), "; all ops see the same experts");
  const Port out = output_of(before), in = input_of(op);
  checks.holds(out.columns == in.columns, "input of op ", i, " has ", in.columns,
               " columns, must be ", out.columns, "; op ", i - 1, " writes as many");
  checks.holds(out.dtype == in.dtype, "input of op ", i, " is ", name(in.dtype), ", must be ",
               name(out.dtype), "; op ", i - 1, " writes that");
}

void check(const SequentialProblem& p) {
  const RowChecks checks("sequential", p);
  checks.holds(!p.ops.empty(), "the row has 0 ops, must be 1 or more");
  bool before_learns = false;
  for (size_t i = 0; i < p.ops.size(); ++i) {
    if (i > 0) check_neighbours(checks, p, i);
    checks.holds(!before_learns || !stops_backward(p.ops[i]), "dgrad of op ", i,
                 " is no, must be yes; an op before it learns");
    before_learns = before_learns || learns(p.ops[i]);
  }
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
      {one.accumulate == two.accumulate && one.accumulate_bias == two.accumulate_bias,
       "the linears accumulate differently"},
      {one.deferred == two.deferred, "only one linear is deferred"},
      {one.cache_weights == two.cache_weights, "only one linear caches its weights"},
      {one.tail == two.tail && one.tail == act.tail, "the tails differ"},
      {one.amax_eps == two.amax_eps, "amax_eps differs"},
      {one.unit_budget == two.unit_budget, "the unit budgets differ"},
      {one.align == two.align, "the alignments differ"},
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
  p.prob = p.dprob = act.prob;
  p.bias1 = one.bias;
  p.bias2 = two.bias;
  p.bias2_scale = two.bias_scale;
  p.dgrad = one.dgrad;
  p.wgrad1 = one.wgrad;
  p.wgrad2 = two.wgrad;
  p.dbias = one.bias ? one.dbias : two.dbias;
  p.accumulate = one.accumulate;
  p.accumulate_bias = one.accumulate_bias;
  p.deferred = one.deferred;
  p.keep_h = two.recipe.wgrad.rhs.stochastic;
  p.save_input = one.save_input;
  p.cache_weights = one.cache_weights;
  p.tail = one.tail;
  p.amax_eps = one.amax_eps;
  p.unit_budget = one.unit_budget;
  p.align = one.align;
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
  return plan.problem.wgrad && (plan.wgrad_x.place == Place::kCaller || plan.problem.save_input);
}
bool reads_input(const GroupedMlpPlan& plan) { return reads_input(plan.fc1); }
bool reads_input(const ActivationStep&) { return true; }

/// Whether a deferred wgrad reads the gradient of the step's output as it was.
bool defers_gradient(const GroupedLinearPlan& plan) {
  return plan.problem.deferred && plan.problem.wgrad && plan.wgrad_dy.place == Place::kCaller;
}
bool defers_gradient(const GroupedMlpPlan& plan) {
  return plan.problem.deferred && defers_gradient(plan.fc2);
}
bool defers_gradient(const ActivationStep&) { return false; }

class Planner {
 public:
  Planner(const SequentialProblem& problem, const Device& device) : p_(problem) {
    plan_.problem = problem;
    plan_.device = device;
  }

  SequentialPlan take() {
    ops_ = p_.ops;
    for (size_t i = 0; i < ops_.size(); i += fits(i) ? 3 : 1) give_roles(i);
    for (size_t i = 0; i < ops_.size();) i += size_t(add_step(i));
    find_stop();
    for (size_t i = 0; i < plan_.steps.size(); ++i) place(i);
    count_memory();
    return std::move(plan_);
  }

 private:
  /// Plans the step that begins with op i, and says for how many ops it stands.
  int add_step(size_t i) {
    RowStep step = fuses(i) ? RowStep{.plan = plan(fused_at(i), plan_.device), .ops = 3}
                            : RowStep{.plan = single(i)};
    step.first_op = int(i);
    step.first_parameters = plan_.linears;
    step.first_extra = plan_.extra_inputs;
    for (int op = 0; op < step.ops; ++op) {
      plan_.linears += linear_at(p_.ops, i + size_t(op)) != nullptr;
      plan_.extra_inputs += extra_inputs(p_.ops[i + size_t(op)]);
    }
    std::visit(
        [&](const auto& own) {
          plan_.name += text(plan_.name.empty() ? "" : " + ", name_of(own));
          plan_.exact = plan_.exact && exact(own);
        },
        step.plan);
    plan_.steps.push_back(std::move(step));
    return plan_.steps.back().ops;
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

  std::variant<GroupedLinearPlan, ActivationStep, GroupedMlpPlan> single(size_t i) const {
    if (const auto* linear = linear_at(ops_, i)) return plan(*linear, plan_.device);
    ActivationProblem act = *activation_at(ops_, i);
    act.backward = false;
    ActivationStep step{.forward = plan(act, plan_.device), .backward = {}};
    act.backward = true;
    step.backward = plan(act, plan_.device);
    return step;
  }

  void find_stop() {
    for (size_t i = 0; i < plan_.steps.size(); ++i)
      if (stops_backward(p_.ops[size_t(plan_.steps[i].first_op)])) plan_.backward_stop = int(i);
  }

  template <class Question>
  bool ask(size_t step, Question question) const {
    return std::visit(question, plan_.steps[step].plan);
  }

  OperandPlan tensor(Layout& memory, Place where, Port port) const {
    const int64_t rows = std::visit([](const auto& q) { return q.rows; }, p_.ops.front());
    return memory.take(where, layers::plain_rows(port.dtype, rows, port.columns));
  }

  void place(size_t i) {
    RowStep& step = plan_.steps[i];
    const LayerMemory m =
        std::visit([](const auto& own) -> LayerMemory { return memory_of(own); }, step.plan);
    step.saved_offset = saved_.take(m.saved_bytes);
    step.pending_offset = pending_.take(m.pending_bytes);
    step.weight_cache_offset = cache_.take(m.weight_cache_bytes);
    if (i + 1 < plan_.steps.size()) {
      const bool kept = int(i) + 1 >= plan_.backward_stop &&
                        ask(i + 1, [](const auto& next) { return reads_input(next); });
      step.output = tensor(kept ? saved_ : forward_, kept ? Place::kSaved : Place::kWorkspace,
                           output_of(p_.ops[size_t(step.first_op + step.ops - 1)]));
    }
    if (int(i) > plan_.backward_stop) {
      const bool deferred = ask(i - 1, [](const auto& before) { return defers_gradient(before); });
      step.grad_input =
          tensor(deferred ? pending_ : backward_, deferred ? Place::kPending : Place::kWorkspace,
                 input_of(p_.ops[size_t(step.first_op)]));
    }
  }

  void count_memory() {
    LayerMemory& m = plan_.memory;
    for (const RowStep& step : plan_.steps) {
      const LayerMemory own =
          std::visit([](const auto& s) -> LayerMemory { return memory_of(s); }, step.plan);
      m.forward_workspace_bytes = std::max(m.forward_workspace_bytes, own.forward_workspace_bytes);
      m.backward_workspace_bytes =
          std::max(m.backward_workspace_bytes, own.backward_workspace_bytes);
      m.wgrad_workspace_bytes = std::max(m.wgrad_workspace_bytes, own.wgrad_workspace_bytes);
    }
    plan_.forward_copies_bytes = forward_.bytes();
    plan_.backward_copies_bytes = backward_.bytes();
    m.forward_workspace_bytes += forward_.bytes();
    m.backward_workspace_bytes += backward_.bytes();
    m.saved_bytes = saved_.bytes();
    m.pending_bytes = pending_.bytes();
    m.weight_cache_bytes = cache_.bytes();
  }

  const SequentialProblem& p_;
  std::vector<RowOp> ops_;  ///< of the problem, with their roles
  SequentialPlan plan_;
  Layout forward_, backward_, saved_, pending_, cache_;
};

std::vector<KeptPart> kept(const ActivationStep& step) {
  const ActivationProblem& p = step.forward.problem;
  if (!p.prob) return {};
  return {{"prob", Place::kCaller, p.rows * int64_t(sizeof(float))}};
}

std::string explain(const ActivationStep& step) {
  return layers::explain_step("forward", step.forward) +
         layers::explain_step("backward", step.backward);
}

}  // namespace

SequentialPlan plan(const SequentialProblem& problem, const Device& device) {
  check(problem);
  return Planner(problem, device).take();
}

std::vector<KeptPart> kept(const SequentialPlan& plan) {
  std::vector<KeptPart> parts;
  for (size_t i = size_t(plan.backward_stop); i < plan.steps.size(); ++i) {
    const RowStep& step = plan.steps[i];
    for (const KeptPart& part : std::visit([](const auto& own) { return kept(own); }, step.plan))
      if (i == 0 || part.name != "x") parts.push_back(part);
    if (step.output.place == Place::kSaved)
      parts.push_back({"output of a step", Place::kSaved, quantized_bytes(step.output.shape)});
  }
  return parts;
}

std::string explain(const SequentialPlan& plan) {
  std::string lines =
      text(to_string(plan.problem), "\nroute ", plan.name, plan.exact ? "" : ", not exact", "\n");
  for (const Refusal& refusal : plan.refusals)
    lines += text("  not ", refusal.name, ": ", refusal.why, "\n");
  for (const RowStep& step : plan.steps) {
    lines += text("\nop ", step.first_op);
    if (step.ops > 1) lines += text(" to ", step.first_op + step.ops - 1);
    lines += ": " + std::visit([](const auto& own) { return explain(own); }, step.plan);
  }
  const int64_t rows = std::visit([](const auto& q) { return q.rows; }, plan.problem.ops.front());
  return lines + "\ntogether\n" + layers::explain_memory(plan.memory, kept(plan), rows);
}

}  // namespace cadre
