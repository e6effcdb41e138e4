// The routes of the expert layer: x is copied into expert order, or fc1 reads or quantises it as it
// is; sums are made out of rows in expert order.
#include "layers/linear_copies.h"
#include "layers/moe.h"
#include "layers/planner.h"

namespace cadre::layers {
namespace {

using enum moe::Tensor;

/// Columns of fc1 up to which a product that gathers is taken to be faster than a copy and the
/// plain product: gathering costs a part of the product's time, which is the longer the more there
/// are, and the copy's time is the same. On an H200 faster with 512, even with 1024; dw likewise
/// with 512, slower with 1536.
constexpr int64_t kMostGatheredColumns = 768;

/// Rows of an expert, in the mean, from which on it is: it gathers 128 for a tile, however few
/// there are. Timed with 1536 alone.
constexpr int64_t kLeastGatheredRows = 512;

int64_t columns_of_fc1(const MoeProblem& p) { return z_columns(p.activation, p.features); }

/// A list of fp32 or int32 words.
QuantizedShape words(int64_t count) { return plain_rows(DType::kF32, count, 1); }

class Planner {
 public:
  Planner(const MoeProblem& problem, const Device& device, bool gathers)
      : p_(problem), gathers_(gathers), row_(plan_) {
    plan_.problem = problem;
    plan_.device = device;
  }

  MoePlan take() {
    plan_.mlp = gathers_ ? plan_gathering() : plan_within(mlp(), plan_.device);
    if (has_shared(p_)) plan_.shared = plan(shared(), plan_.device);
    plan_.exact = plan_.mlp.exact && plan_.shared.exact;
    name_tensors();
    add_forward();
    if (learns(plan_.mlp)) add_backward();
    if (p_.wgrad1 || (p_.wgrad2 && p_.options.deferred)) add_wgrad();
    row_.share_memory(p_.options.deferred ? WgradRuns::kLater : WgradRuns::kWithin);
    return std::move(plan_);
  }

 private:
  int64_t rows() const { return rows_of(p_); }
  bool has_drow_scale() const { return p_.bias2 && p_.dbias; }
  /// Whether backward of the experts reads a tensor of ours as it was in forward.
  bool keeps(std::string_view tensor) const { return layers::keeps(plan_.mlp, tensor); }
  bool permutes_again() const { return !p_.keep_rows && keeps("x"); }
  /// Whether backward of the experts reads tokens, which it quantises or multiplies as rows.
  bool reads_tokens_again() const { return gathers_ && keeps("tokens"); }

  /// Its rows and its second bias are weighted by the probabilities.
  GroupedMlpProblem mlp() const {
    GroupedMlpProblem m{.rows = rows(), .hidden = p_.hidden, .features = p_.features};
    m.experts = p_.experts;
    m.activation = p_.activation;
    m.constants = p_.constants;
    m.layout = p_.layout;
    m.recipe = p_.recipe;
    m.dtype = p_.dtype;
    m.parameters = p_.parameters;
    m.prob = true;
    m.bias1 = p_.bias1;
    m.bias2 = m.bias2_scale = p_.bias2;
    m.dgrad = p_.dgrad;
    m.wgrad1 = p_.wgrad1;
    m.wgrad2 = p_.wgrad2;
    m.dbias = p_.dbias;
    m.dprob = p_.dlogits;
    m.keep_h = p_.keep_h;
    m.options = p_.options;
    m.options.save_input = m.options.save_input || quantises_again();
    return m;
  }
  bool quantises_again() const {
    const bool copies = !linear::as_is(p_.recipe.wgrad.rhs, p_.dtype);
    return !p_.keep_rows && p_.wgrad1 && copies && keeps_tokens(p_);
  }
  GroupedMlpProblem gathering_mlp() const {
    GroupedMlpProblem m = mlp();
    m.gather = true;
    m.tokens = p_.tokens;
    m.top_k = p_.top_k;
    return m;
  }
  /// dw of fc1 gathers too, and backward of fc2 dout, if kernels do that. Not dw in a run of its
  /// own, before which backward must know where the rows come from, whatever the type of dw will
  /// be. In recipes that quantise x no product of fc1 gathers, so this route may have few rows.
  GroupedMlpPlan plan_gathering() const {
    GroupedMlpProblem m = gathering_mlp();
    const auto as_is = [&](const Format& format) { return linear::as_is(format, m.dtype); };
    const bool gathers = !p_.options.deferred && columns_of_fc1(p_) <= kMostGatheredColumns;
    const bool has_many_rows =
        is_plain(m.recipe.fprop.lhs) || m.rows / m.experts >= kLeastGatheredRows;
    m.gather_dw = gathers && m.wgrad1 && as_is(m.recipe.wgrad.rhs);
    m.gather_dy = gathers && has_many_rows && (needs_dh(m) || m.wgrad2) && !(m.bias2 && m.dbias) &&
                  as_is(m.recipe.dgrad.lhs) && as_is(m.recipe.wgrad.lhs);
    GroupedMlpPlan made = plan_within(m, plan_.device);
    const bool dw = m.gather_dw && has_kernel(made.fc1, "dw");
    const bool dy = m.gather_dy && has_kernel(made.fc2, "dx") && has_kernel(made.fc2, "dw");
    if (dw == m.gather_dw && dy == m.gather_dy) return made;
    m.gather_dw = dw;
    m.gather_dy = dy;
    return plan_within(m, plan_.device);
  }
  /// Whether the step is one kernel, if there is one.
  static bool has_kernel(const GroupedLinearPlan& plan, std::string_view step) {
    const auto* product = find_step<GroupedGemmPlan>(plan, step);
    return product == nullptr || product->name != "composed";
  }
  bool gathers_dw() const { return plan_.mlp.problem.gather_dw; }
  bool gathers_dy() const { return plan_.mlp.problem.gather_dy; }
  /// All tokens are the rows of one expert, weighted by its gate.
  GroupedMlpProblem shared() const {
    GroupedMlpProblem m = mlp();
    m.rows = p_.tokens;
    m.features = p_.shared_features;
    m.experts = 1;
    m.prob = p_.shared_gate;
    m.bias1 = m.bias2 = m.bias2_scale = false;
    return m;
  }
  /// The rows of all experts are no fewer than tokens, so that their end is an end of these too.
  OffsetsPlan shared_offsets() const {
    return plan(OffsetsProblem{.source = OffsetsSource::kEnds, .rows = p_.tokens}, plan_.device);
  }
  OffsetsPlan offsets_of_choice() const {
    OffsetsProblem o{.source = OffsetsSource::kRouting, .rows = rows(), .experts = p_.experts};
    o.tokens = p_.tokens;
    o.top_k = p_.top_k;
    o.index = p_.index;
    return plan(o, plan_.device);
  }
  RoutingPlan routing(bool backward) const {
    RoutingProblem r{.backward = backward, .score = p_.score, .tokens = p_.tokens};
    r.experts = p_.experts;
    r.top_k = p_.top_k;
    r.logits = p_.logits;
    r.normalize = p_.normalize;
    r.scale = p_.scale;
    r.expert_bias = p_.expert_bias && !backward;
    r.groups = p_.groups;
    r.group_top_k = p_.group_top_k;
    r.map = r.row_prob = !backward;
    return plan(r, plan_.device);
  }
  PermuteProblem permute(PermutePass pass, bool prob) const {
    PermuteProblem m{.pass = pass, .tokens = p_.tokens, .top_k = p_.top_k, .rows = rows()};
    m.hidden = p_.hidden;
    m.experts = p_.experts;
    m.dtype = p_.dtype;
    m.prob = prob;
    m.addend = has_shared(p_) && (pass == PermutePass::kCombine ||
                                  (pass == PermutePass::kPermuteBackward && p_.dgrad));
    return m;
  }

  /// In the order of moe::Tensor. The experts' share comes first in every memory.
  void name_tensors() {
    row_.part(plan_.mlp.memory);
    if (has_shared(p_)) row_.part(plan_.shared.memory);
    for (const char* own : {"logits", "expert_bias", "x", "out", "scores", "experts", "offsets",
                            "dout", "dscores", "dx", "dlogits", "offsets[E]", "shared_gate",
                            "dshared_gate", "choice", "choice_prob", "dchoice_prob"})
      row_.own(own);
    const QuantizedShape wide = plain_rows(p_.dtype, rows(), p_.hidden);
    row_.made("prob", words(rows()));
    row_.made("row_of", words(rows()));
    row_.made("slot_of", words(rows()));
    row_.made("rows", wide);
    row_.made("prob of rows", words(rows()));
    row_.made_over(kRows, "y of rows", wide);
    row_.made("dy of rows", wide);
    row_.made("rows again", wide);
    row_.made_over(kDy, "dx of rows", wide);
    row_.made("dprob of rows", words(rows()));
    row_.made("dscale of rows", words(rows()));
    row_.made("sums of dprob", words(p_.tokens));
    row_.made("dprob", words(rows()));
    row_.made("shared offsets", words(2));
  }

  void add_forward() {
    if (p_.routed)
      row_.step(Phase::kForward, "route", offsets_of_choice(), {kChoice, kChoiceProb},
                {kOffsets, kRowOf, kSlotOf, kRowProb});
    else
      row_.step(Phase::kForward, "route", routing(false),
                {kLogits, p_.expert_bias ? kExpertBias : kNone},
                {kExperts, kProb, kScores, kOffsets, kRowOf, kSlotOf, kRowProb});
    if (has_shared(p_)) add_shared_forward();
    if (!gathers_)
      row_.step(Phase::kForward, "permute",
                plan(permute(PermutePass::kPermute, false), plan_.device),
                {kX, kOffsets, kRowOf, kSlotOf}, {kRows});
    row_.step(Phase::kForward, "experts", PartPhase{0, Phase::kForward},
              {gathers_ ? kX : kRows, kOffsets, kRowProb, gathers_ ? kSlotOf : kNone}, {kY});
    row_.step(Phase::kForward, "combine", plan(permute(PermutePass::kCombine, false), plan_.device),
              {kY, kOffsets, kRowOf}, {kOut});
  }

  /// It writes where the sums go, which are added to it.
  void add_shared_forward() {
    row_.step(Phase::kForward, "shared offsets", shared_offsets(), {kLastOffset}, {kSharedOffsets});
    row_.step(Phase::kForward, "shared expert", PartPhase{1, Phase::kForward},
              {kX, kSharedOffsets, shared_gate()}, {kOut});
  }

  int shared_gate() const { return p_.shared_gate ? kSharedGate : kNone; }

  void add_shared_backward() {
    const bool reads_gate = layers::keeps(plan_.shared, "prob");
    row_.step(Phase::kBackward, "shared expert backward", PartPhase{1, Phase::kBackward},
              {kDout, kSharedOffsets, reads_gate ? kSharedGate : kNone,
               layers::keeps(plan_.shared, "x") ? kX : kNone},
              {p_.dgrad ? kDx : kNone, p_.shared_gate && p_.dlogits ? kDsharedGate : kNone});
  }

  int rows_in_backward() const {
    return !keeps("x") ? kNone : permutes_again() ? kRowsAgain : kRows;
  }

  void add_backward() {
    if (learns(plan_.shared)) add_shared_backward();
    if (!gathers_dy())
      row_.step(Phase::kBackward, "combine backward",
                plan(permute(PermutePass::kCombineBackward, false), plan_.device),
                {kDout, kOffsets, kRowOf, kSlotOf}, {kDy});
    const bool rows_late = !p_.options.deferred && wgrad_reads_x(plan_.mlp);
    if (permutes_again() && !rows_late) add_permute_again();
    const bool reads_prob = keeps("prob") || keeps("bias2_scale");
    const bool reads_tokens = reads_tokens_again() && p_.options.deferred;
    // row_of is read so that it is kept: of one forward, another plan's backward may copy dout.
    row_.step(Phase::kBackward, "experts backward", PartPhase{0, Phase::kBackward},
              {gathers_dy() ? kDout : kDy, kOffsets, reads_prob ? kRowProb : kNone,
               reads_tokens ? kX
               : rows_late  ? kNone
                            : rows_in_backward(),
               gathers_dy() || reads_tokens ? kSlotOf : kNone, gathers_dy() ? kRowOf : kNone},
              {p_.dgrad ? kDrows : kNone, p_.dlogits ? kDrowProb : kNone,
               has_drow_scale() ? kDrowScale : kNone});
    if (p_.dgrad || p_.dlogits) add_permute_backward();
    if (permutes_again() && rows_late) add_permute_again();
    if (p_.dlogits && !p_.routed)
      row_.step(Phase::kBackward, "route backward", routing(true),
                {kLogits, kExperts, kDprob, kDscores}, {kDlogits});
  }

  void add_permute_again() {
    row_.step(Phase::kBackward, "permute again",
              plan(permute(PermutePass::kPermute, false), plan_.device),
              {kX, kOffsets, kRowOf, kSlotOf}, {kRowsAgain});
  }

  /// Without dx, what is summed over the choices of a token is dprob itself, and nobody reads it.
  void add_permute_backward() {
    PermuteProblem back = permute(PermutePass::kPermuteBackward, p_.dlogits);
    if (!p_.dgrad) back.hidden = 1, back.dtype = DType::kF32;
    row_.step(Phase::kBackward, "permute backward", plan(back, plan_.device),
              {p_.dgrad ? kDrows : kDrowProb, kOffsets, kRowOf, p_.dlogits ? kDrowProb : kNone,
               p_.dlogits && has_drow_scale() ? kDrowScale : kNone},
              {p_.dgrad ? kDx : kProbSums, !p_.dlogits ? kNone
                                           : p_.routed ? kDchoiceProb
                                                       : kDprob});
  }

  bool wgrad_reads_x(const GroupedMlpPlan& of) const {
    return p_.wgrad1 && wgrad_input(of.fc1).place == Place::kCaller;
  }
  bool wgrad_reads_dy(const GroupedMlpPlan& of) const {
    return p_.options.deferred && p_.wgrad2 && wgrad_gradient(of.fc2).place == Place::kCaller;
  }

  void add_wgrad() {
    if (has_shared(p_) && p_.options.deferred)
      row_.step(Phase::kWgrad, "shared expert dw", PartPhase{1, Phase::kWgrad},
                {wgrad_reads_dy(plan_.shared) ? kDout : kNone, kSharedOffsets,
                 wgrad_reads_x(plan_.shared) ? kX : kNone},
                {});
    const bool reads_tokens = reads_tokens_again() && !p_.options.deferred;
    row_.step(Phase::kWgrad, "experts dw", PartPhase{0, Phase::kWgrad},
              {wgrad_reads_dy(plan_.mlp) ? kDy : kNone, kOffsets,
               reads_tokens               ? kX
               : wgrad_reads_x(plan_.mlp) ? rows_in_backward()
                                          : kNone,
               reads_tokens ? kSlotOf : kNone},
              {});
  }

  const MoeProblem& p_;
  const bool gathers_;
  MoePlan plan_;
  Row row_;
};

}  // namespace

/// Whether fprop of fc1 reads codes: what quantises x gathers, and no product does.
static bool quantises_x(const MoeProblem& p) { return !is_plain(p.recipe.fprop.lhs); }

std::string refuses_gathered(const MoeProblem& p, const Device& device) {
  const auto as_is = [&](const Format& format) { return linear::as_is(format, p.dtype); };
  const bool quantises = quantises_x(p), wgrad_as_is = as_is(p.recipe.wgrad.rhs);
  if (!quantises && device.sm == 0) return "is for GPUs; on the CPU no product gathers rows";
  if (p.tokens == 0) return "is for one token or more";
  if (!quantises && (!as_is(p.recipe.fprop.lhs) || (p.wgrad1 && !wgrad_as_is)))
    return "is for recipes that read x as it is, or quantise it for fprop";
  if (p.keep_rows && p.wgrad1 && (wgrad_as_is || p.options.save_input))
    return "keep_rows is yes, and dw of fc1 is of the rows, which forward does not write";
  return {};
}

std::string why_permuted_is_faster(const MoeProblem& p, const Device&) {
  if (quantises_x(p)) return {};
  const int64_t columns = columns_of_fc1(p), rows = rows_of(p) / p.experts;
  if (columns > kMostGatheredColumns)
    return text("a product of ", columns,
                " columns is slower than a copy and the plain product; the most is ",
                kMostGatheredColumns, ", or name the route");
  if (rows < kLeastGatheredRows)
    return text("experts have ", rows, " rows in the mean, and a product gathers 128 for a tile; ",
                "the least is ", kLeastGatheredRows, ", or name the route");
  return {};
}

MoePlan plan_gathered(const MoeProblem& problem, const Device& device) {
  return Planner(problem, device, true).take();
}

MoePlan plan_gathered_by_kernel(const MoeProblem& problem, const Device& device) {
  MoePlan made = plan_gathered(problem, device);
  const GroupedGemmPlan* product = find_step<GroupedGemmPlan>(made.mlp.fc1, "multiply");
  if (product->problem.gather == Gather::kNo || product->name != "composed") return made;
  std::string why = "fc1 would copy the rows";
  for (const Refusal& refusal : product->refusals)
    if (refusal.name == "sm90_gathered_rows")
      why.append("; ").append(refusal.name).append(" ").append(refusal.why);
  throw Unsupported(why);
}

MoePlan plan_permuted(const MoeProblem& problem, const Device& device) {
  return Planner(problem, device, false).take();
}

}  // namespace cadre::layers
