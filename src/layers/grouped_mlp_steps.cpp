// The steps of the expert MLP: fc1, activation and fc2 one after another, or the activation within
// the product of fc1.
#include <utility>

#include "layers/grouped_mlp.h"
#include "layers/linear_copies.h"
#include "layers/planner.h"

namespace cadre::layers {
namespace {

using enum mlp::Tensor;

bool needs_h_again(const GroupedMlpProblem& p) { return p.wgrad2 && !p.keep_h; }

class Planner {
 public:
  Planner(const GroupedMlpProblem& problem, const Device& device, bool fused,
          WgradRuns runs = WgradRuns::kWithin)
      : p_(problem),
        fused_(fused),
        runs_(problem.options.deferred ? WgradRuns::kLater : runs),
        z_columns_(info(problem.activation).gated ? 2 * problem.features : problem.features),
        row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  /// Why no product of fc1 computes the activation; a product and an activation one after the other
  /// are the other route.
  std::string refuses_product() const {
    if (plan_.device.sm == 0) return "is for GPUs; on the CPU the operations run one by one";
    const auto& [fprop, dgrad, wgrad] = p_.recipe;
    if (!is_plain(fprop.lhs) || !is_plain(fprop.rhs)) return "is for recipes whose fprop is plain";
    const GroupedLinearProblem linear = fc1();
    GroupedGemmProblem product = linear::product(linear, Pass::kFprop, {});
    product.bias = linear.bias;
    product.activation = linear.activation;
    const GroupedGemmPlan found = find(product, plan_.device);
    if (!found.name.empty() && found.name != "composed") return {};
    std::string why = "no product of fc1 computes the activation:";
    const char* between = " ";
    for (const Refusal& refusal : found.refusals)
      why.append(std::exchange(between, "; ")).append(refusal.name).append(" ").append(refusal.why);
    return why;
  }

  GroupedMlpPlan take() {
    plan_.fc1 = planned(fc1());
    plan_.fc2 = planned(fc2());
    plan_.exact = plan_.fc1.exact && plan_.fc2.exact;
    name_tensors();
    add_forward();
    add_backward();
    row_.share_memory(runs_);
    return std::move(plan_);
  }

 private:
  bool needs_dh() const { return layers::needs_dh(p_); }
  bool reads_z() const { return layers::reads_z(p_); }
  bool needs_h_again() const { return layers::needs_h_again(p_); }

  /// What both linears have in common. Their weight gradients run when this layer says so.
  GroupedLinearProblem linear() const {
    GroupedLinearProblem l{.rows = p_.rows, .experts = p_.experts, .recipe = p_.recipe};
    l.dtype = p_.dtype;
    l.parameters = p_.parameters;
    l.dbias = p_.dbias;
    l.options = p_.options;
    l.options.deferred = true;
    l.options.quantized_x = l.options.save_input = false;
    return l;
  }
  GroupedLinearPlan planned(const GroupedLinearProblem& linear) const {
    return p_.options.deferred ? plan(linear, plan_.device) : plan_within(linear, plan_.device);
  }
  GroupedLinearProblem fc1() const {
    GroupedLinearProblem l = linear();
    l.n = z_columns_;
    l.k = p_.hidden;
    l.bias = p_.bias1;
    l.dgrad = p_.dgrad;
    l.wgrad = p_.wgrad1;
    l.options.quantized_x = p_.options.quantized_x;
    l.options.save_input = p_.options.save_input;
    l.dy_role = TensorRole::kDz;
    l.gather = p_.gather;
    l.tokens = p_.tokens;
    l.top_k = p_.top_k;
    if (!fused_) return l;
    GemmActivation& a = l.activation.emplace();
    a.kind = p_.activation;
    a.constants = p_.constants;
    a.layout = p_.layout;
    a.prob = p_.prob;
    a.keep_z = reads_z();
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
    l.options.save_input = needs_h_again();
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
    a.tail = p_.options.tail;
    return plan(a, plan_.device);
  }

  /// In the order of mlp::Tensor. The linears' shares come first in every memory.
  void name_tensors() {
    for (const GroupedLinearPlan* part : {&plan_.fc1, &plan_.fc2}) row_.part(part->memory);
    for (const char* own : {"x", "y", "dy", "dx", "prob", "dprob", "tokens", "slot_of"})
      row_.own(own);
    const QuantizedShape wide = plain_rows(p_.dtype, p_.rows, z_columns_);
    const QuantizedShape narrow = plain_rows(p_.dtype, p_.rows, p_.features);
    row_.made("z", wide);
    row_.made("h", narrow);
    row_.made_over(kDh, "h again", narrow);
    row_.made("dh", narrow);
    p_.options.overwrite_saved ? row_.made_over(kZ, "dz", wide) : row_.made("dz", wide);
    if (fits_in_gradient(narrow)) plan_.tensors[kDh].place = Place::kGradient;
  }

  /// Whether a tensor of backward may lie in dw of fc1, which the last step writes from scratch.
  bool fits_in_gradient(const QuantizedShape& shape) const {
    const ParameterLayout& own = p_.parameters;
    const bool written_last = p_.wgrad1 && runs_ != WgradRuns::kLater &&
                              p_.options.accumulate == Accumulate::kNo && !own.discrete_dw;
    const bool as_aligned = bytes_for(own.dw, 1) >= bytes_for(p_.dtype, 1);
    return written_last && as_aligned &&
           quantized_bytes(shape) <= p_.experts * z_columns_ * bytes_for(own.dw, p_.hidden);
  }

  int prob() const { return p_.prob ? kProb : kNone; }
  /// What wgrad of fc2 reads: h, if it was kept.
  int h_in_backward() const { return needs_h_again() ? kHAgain : kH; }

  void add_forward() {
    const PartPhase fc1{0, Phase::kForward};
    const int x = p_.gather ? kTokens : kX, slot_of = p_.gather ? kSlotOf : kNone;
    if (fused_) {
      row_.step(Phase::kForward, "fc1 and activation", fc1, {x, prob(), slot_of},
                {kH, reads_z() ? kZ : kNone});
    } else {
      row_.step(Phase::kForward, "fc1", fc1, {x, slot_of}, {kZ});
      row_.step(Phase::kForward, "activation", activation(false), {kZ, prob()}, {kH});
    }
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
    const bool later = runs_ == WgradRuns::kLater;
    if (p_.wgrad2 && !later) add_wgrad(Phase::kBackward, 1, "fc2 dw", h_in_backward(), kDy);
    if (learns(plan_.fc1))
      row_.step(Phase::kBackward, "fc1 backward", PartPhase{0, Phase::kBackward}, {kDz},
                {p_.dgrad ? kDx : kNone});
    add_input_again(0, "fc1 input again", kX);
    if (p_.wgrad2 && later) add_wgrad(Phase::kWgrad, 1, "fc2 dw", h_in_backward(), kDy);
    if (p_.wgrad1) add_wgrad(Phase::kWgrad, 0, "fc1 dw", kX, kDz);
  }

  const GroupedLinearPlan& linear_at(int part) const { return part == 0 ? plan_.fc1 : plan_.fc2; }

  void add_input_again(int part, const char* name, int input) {
    if (find_step<QuantizePlan>(linear_at(part), "quantize x again"))
      row_.step(Phase::kBackward, name, PartPhase{part, Phase::kInputAgain}, {input}, {});
  }
  void add_wgrad(Phase phase, int part, const char* name, int input, int gradient) {
    const GroupedLinearPlan& own = linear_at(part);
    const bool x = wgrad_input(own).place == Place::kCaller;
    const bool dy = wgrad_gradient(own).place == Place::kCaller;
    row_.step(phase, name, PartPhase{part, Phase::kWgrad},
              {dy ? gradient : kNone, x ? input : kNone}, {});
  }

  const GroupedMlpProblem& p_;
  const bool fused_;
  const WgradRuns runs_;
  const int64_t z_columns_;
  GroupedMlpPlan plan_;
  Row row_;
};

}  // namespace

bool needs_dh(const GroupedMlpProblem& p) {
  const bool fc1_learns = p.dgrad || p.wgrad1 || (p.bias1 && p.dbias);
  return fc1_learns || (p.prob && p.dprob);
}

bool reads_z(const GroupedMlpProblem& p) { return needs_dh(p) || needs_h_again(p); }

std::string refuses_fused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, true).refuses_product();
}

GroupedMlpPlan plan_fused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, true).take();
}

GroupedMlpPlan plan_unfused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, false).take();
}

GroupedMlpPlan plan_fused_within(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, true, WgradRuns::kByHolder).take();
}

GroupedMlpPlan plan_unfused_within(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, false, WgradRuns::kByHolder).take();
}

}  // namespace cadre::layers
