// The unfused route of the expert MLP: fc1, activation and fc2 one after another.
#include "layers/grouped_mlp.h"
#include "layers/planner.h"

namespace cadre::layers {
namespace {

using enum mlp::Tensor;

class Planner {
 public:
  Planner(const GroupedMlpProblem& problem, const Device& device)
      : p_(problem),
        z_columns_(info(problem.activation).gated ? 2 * problem.features : problem.features),
        row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  GroupedMlpPlan take() {
    plan_.fc1 = plan(fc1(), plan_.device);
    plan_.fc2 = plan(fc2(), plan_.device);
    plan_.exact = plan_.fc1.exact && plan_.fc2.exact;
    name_tensors();
    add_forward();
    add_backward();
    row_.share_memory(p_.options.deferred ? WgradRuns::kLater : WgradRuns::kWithin);
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
    l.options = p_.options;
    l.options.deferred = true;
    l.options.quantized_x = l.options.save_input = false;
    return l;
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
    for (const char* own : {"x", "y", "dy", "dx", "prob", "dprob"}) row_.own(own);
    const QuantizedShape wide = plain_rows(p_.dtype, p_.rows, z_columns_);
    const QuantizedShape narrow = plain_rows(p_.dtype, p_.rows, p_.features);
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
    const bool x = wgrad_input(own).place == Place::kCaller;
    const bool dy = wgrad_gradient(own).place == Place::kCaller;
    row_.step(Phase::kWgrad, name, PartPhase{part, Phase::kWgrad},
              {dy ? gradient : kNone, x ? input : kNone}, {});
  }

  const GroupedMlpProblem& p_;
  int64_t z_columns_;
  GroupedMlpPlan plan_;
  Row row_;
};

}  // namespace

GroupedMlpPlan plan_unfused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device).take();
}

}  // namespace cadre::layers
