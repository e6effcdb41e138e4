// The steps of the expert MLP: fc1, activation and fc2 one after another, or the activation within
// the product of fc1.
#include <optional>
#include <utility>

#include "cadre/error.h"
#include "layers/grouped_mlp.h"
#include "layers/linear_copies.h"
#include "layers/planner.h"
#include "ops/activation_checks.h"

namespace cadre::layers {
namespace {

using enum mlp::Tensor;

bool needs_h_again(const GroupedMlpProblem& p) { return p.wgrad2 && !p.keep_h; }

/// How h is made of x, and dz of dh.
enum class Way : uint8_t { kFused, kCodes, kUnfused };

class Planner {
 public:
  Planner(const GroupedMlpProblem& problem, const Device& device, Way way,
          WgradRuns runs = WgradRuns::kWithin)
      : p_(problem),
        way_(way),
        runs_(problem.options.deferred ? WgradRuns::kLater : runs),
        z_columns_(z_columns(problem.activation, problem.features)),
        row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  /// Why no product of fc1 computes the activation; a product and an activation one after the other
  /// are the other route.
  std::string refuses_product() const {
    if (plan_.device.sm == 0) return "is for GPUs; on the CPU the operations run one by one";
    const OperandFormats& fprop = p_.recipe.fprop;
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
    if (way_ == Way::kCodes) take_codes();
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
    const bool later = p_.options.deferred;
    return plan_held(linear, plan_.device, later ? HeldWgrad::kLater : HeldWgrad::kWithin);
  }
  void to_places(GroupedLinearProblem& l) const {
    l.tokens = p_.tokens;
    l.top_k = p_.top_k;
    l.ranks = p_.ranks;
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
    l.given_x_along_k = p_.given_x_along_k;
    l.dy_role = TensorRole::kDz;
    l.given_dy_along_k = dz_codes_.has_value();
    l.gather = p_.gather;
    l.gather_dw = p_.gather_dw;
    l.scatter_dx = p_.scatter && p_.dgrad;
    if (p_.gather) l.tokens = p_.tokens, l.top_k = p_.top_k;
    if (l.scatter_dx) to_places(l);
    if (!fused()) return l;
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
    l.gather_dy = p_.gather_dy;
    l.scatter = p_.scatter;
    if (p_.gather_dy) l.tokens = p_.tokens, l.top_k = p_.top_k;
    if (l.scatter) to_places(l);
    l.x_role = TensorRole::kH;
    l.given_x_along_k = h_codes_.has_value();
    return l;
  }

  /// What a linear quantises of h or dz, if it is a copy along K alone, which an activation can
  /// write, and does in one pass; on the CPU there is no other way.
  std::optional<QuantizeProblem> codes_of(const GroupedLinearPlan& linear, const char* step,
                                          bool backward) const {
    const auto* copy = find_step<QuantizePlan>(linear, step);
    if (copy == nullptr) return {};
    const QuantizeProblem& q = copy->problem;
    const bool along_k = q.along_k && !q.along_rows && !q.along_k_decoded;
    if (!along_k || !ops::has_row_scales(*q.along_k)) return {};
    const bool one_by_one = activation(backward, &q).name == "composed";
    if (one_by_one && plan_.device.kind != DeviceKind::kCpu) return {};
    return q;
  }
  /// The linears again, without the steps that the activation takes from them.
  void take_codes() {
    h_codes_ = codes_of(plan_.fc2, "quantize x", false);
    if (needs_dh()) dz_codes_ = codes_of(plan_.fc1, "quantize dy", true);
    if (!h_codes_ && !dz_codes_)
      throw Unsupported(
          "no product reads h or dz in codes along K alone that an activation writes");
    if (dz_codes_) plan_.fc1 = planned(fc1());
    if (h_codes_) plan_.fc2 = planned(fc2());
  }
  /// Whether something reads h, or dz, as it is.
  bool reads_plain_h() const {
    if (!h_codes_) return true;
    const LayerTensor* x = &plan_.fc2.tensors[linear::kX];
    return p_.wgrad2 && !needs_h_again() && &wgrad_input(plan_.fc2) == x;
  }
  bool reads_plain_dz() const {
    if (!dz_codes_ || find_step<BiasGradPlan>(plan_.fc1, "dbias")) return true;
    const LayerTensor* dy = &plan_.fc1.tensors[linear::kDy];
    return p_.wgrad1 && &wgrad_gradient(plan_.fc1) == dy;
  }

  /// With `codes` it quantises what it computes.
  ActivationPlan activation(bool backward, const QuantizeProblem* codes = nullptr) const {
    ActivationProblem a{.backward = backward, .kind = p_.activation, .constants = p_.constants};
    a.layout = p_.layout;
    a.rows = p_.rows;
    a.features = p_.features;
    a.experts = p_.experts;
    a.z = a.h = p_.dtype;
    a.prob = p_.prob;
    a.tail = p_.options.tail;
    if (codes == nullptr) return plan(a, plan_.device);
    a.along_k = codes->along_k;
    a.along_k_scales_major = codes->along_k_scales_major;
    a.amax_eps = codes->amax_eps;
    a.plain = backward ? reads_plain_dz() : reads_plain_h();
    return plan(a, plan_.device);
  }

  /// In the order of mlp::Tensor. The linears' shares come first in every memory.
  void name_tensors() {
    for (const GroupedLinearPlan* part : {&plan_.fc1, &plan_.fc2}) row_.part(part->memory);
    for (const char* own : {"x", "y", "dy", "dx", "prob", "dprob", "tokens", "slot_of", "place_of"})
      row_.own(own);
    const QuantizedShape wide = plain_rows(p_.dtype, p_.rows, z_columns_);
    const QuantizedShape narrow = plain_rows(p_.dtype, p_.rows, p_.features);
    row_.made("z", wide);
    row_.made("h", narrow);
    row_.made_over(kDh, "h again", narrow);
    row_.made("dh", narrow);
    p_.options.overwrite_saved ? row_.made_over(kZ, "dz", wide) : row_.made("dz", wide);
    row_.made("h along K", plan_.fc2.tensors[linear::kXAlongK].shape);
    row_.made("dz along K", plan_.fc1.tensors[linear::kDyAlongK].shape);
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

  static const QuantizeProblem* of(const std::optional<QuantizeProblem>& codes) {
    return codes ? &*codes : nullptr;
  }
  bool fused() const { return way_ == Way::kFused; }
  int prob() const { return p_.prob ? kProb : kNone; }
  /// What wgrad of fc2 reads: h, if it was kept.
  int h_in_backward() const { return needs_h_again() ? kHAgain : kH; }

  void add_forward() {
    const PartPhase fc1{0, Phase::kForward};
    const int x = p_.gather ? kTokens : kX, slot_of = p_.gather ? kSlotOf : kNone;
    const int h = reads_plain_h() ? kH : kNone, h_codes = h_codes_ ? kHAlongK : kNone;
    if (fused()) {
      row_.step(Phase::kForward, "fc1 and activation", fc1, {x, prob(), slot_of},
                {kH, reads_z() ? kZ : kNone});
    } else {
      row_.step(Phase::kForward, "fc1", fc1, {x, slot_of}, {kZ});
      row_.step(Phase::kForward, "activation", activation(false, of(h_codes_)), {kZ, prob()},
                {h, kNone, kNone, h_codes});
    }
    row_.step(Phase::kForward, "fc2", PartPhase{1, Phase::kForward},
              {h_codes_ ? kNone : h, h_codes, p_.scatter ? kPlaceOf : kNone}, {kY});
  }

  void add_backward() {
    const int h_again = needs_h_again() ? kHAgain : kNone;
    const int dz = reads_plain_dz() ? kDz : kNone, dz_codes = dz_codes_ ? kDzAlongK : kNone;
    if (learns(plan_.fc2))
      row_.step(Phase::kBackward, "fc2 backward", PartPhase{1, Phase::kBackward},
                {kDy, p_.gather_dy ? kSlotOf : kNone}, {needs_dh() ? kDh : kNone});
    if (needs_dh())
      row_.step(Phase::kBackward, "activation backward", activation(true, of(dz_codes_)),
                {kZ, prob(), kDh}, {h_again, dz, p_.prob && p_.dprob ? kDprob : kNone, dz_codes});
    else if (needs_h_again())
      row_.step(Phase::kBackward, "h again", activation(false), {kZ, prob()}, {h_again});
    add_input_again(1, "fc2 input again", kHAgain);
    const bool later = runs_ == WgradRuns::kLater;
    if (p_.wgrad2 && !later) add_wgrad(Phase::kBackward, 1, "fc2 dw", h_in_backward(), kDy);
    if (learns(plan_.fc1))
      row_.step(Phase::kBackward, "fc1 backward", PartPhase{0, Phase::kBackward},
                {dz, dz_codes, p_.scatter && p_.dgrad ? kPlaceOf : kNone},
                {p_.dgrad ? kDx : kNone});
    const bool tokens = gathers_in_backward();
    add_input_again(0, "fc1 input again", tokens ? kTokens : kX, tokens ? kSlotOf : kNone);
    if (p_.wgrad2 && later) add_wgrad(Phase::kWgrad, 1, "fc2 dw", h_in_backward(), kDy);
    if (p_.wgrad1) add_wgrad(Phase::kWgrad, 0, "fc1 dw", tokens ? kTokens : kX, kDz);
  }

  const GroupedLinearPlan& linear_at(int part) const { return part == 0 ? plan_.fc1 : plan_.fc2; }

  /// Whether backward or wgrad of fc1 reads tokens.
  bool gathers_in_backward() const {
    const auto* again = find_step<QuantizePlan>(plan_.fc1, "quantize x again");
    return p_.gather_dw || (again != nullptr && again->problem.gather);
  }
  /// Where wgrad runs later, which reads copies alone; else it makes them itself.
  void add_input_again(int part, const char* name, int input, int slot_of = kNone) {
    if (runs_ == WgradRuns::kLater && find_step<QuantizePlan>(linear_at(part), "quantize x again"))
      row_.step(Phase::kBackward, name, PartPhase{part, Phase::kInputAgain}, {input, slot_of}, {});
  }
  void add_wgrad(Phase phase, int part, const char* name, int input, int gradient) {
    const GroupedLinearPlan& own = linear_at(part);
    const bool x = wgrad_input(own).place == Place::kCaller;
    const bool dy = wgrad_gradient(own).place == Place::kCaller;
    const bool gathers = part == 0 ? x && gathers_in_backward() : p_.gather_dy;
    row_.step(phase, name, PartPhase{part, Phase::kWgrad},
              {dy ? gradient : kNone, x ? input : kNone, gathers ? kSlotOf : kNone}, {});
  }

  const GroupedMlpProblem& p_;
  const Way way_;
  const WgradRuns runs_;
  const int64_t z_columns_;
  std::optional<QuantizeProblem> h_codes_, dz_codes_;  ///< what an activation quantises
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
  return Planner(problem, device, Way::kFused).refuses_product();
}

GroupedMlpPlan plan_fused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kFused).take();
}

GroupedMlpPlan plan_codes(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kCodes).take();
}

GroupedMlpPlan plan_unfused(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kUnfused).take();
}

GroupedMlpPlan plan_fused_within(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kFused, WgradRuns::kByHolder).take();
}

GroupedMlpPlan plan_codes_within(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kCodes, WgradRuns::kByHolder).take();
}

GroupedMlpPlan plan_unfused_within(const GroupedMlpProblem& problem, const Device& device) {
  return Planner(problem, device, Way::kUnfused, WgradRuns::kByHolder).take();
}

}  // namespace cadre::layers
