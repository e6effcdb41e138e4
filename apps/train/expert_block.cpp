#include "apps/train/expert_block.h"

namespace cadre::train {
namespace {

LinearParameters linear_parameters(const Weight& weight, int64_t experts, int64_t n, int64_t k) {
  LinearParameters linear;
  linear.w = view(weight.value, DType::kF32, {experts, n, k});
  if (weight.grad != nullptr) linear.dw = view(weight.grad, DType::kF32, {experts, n, k});
  return linear;
}

}  // namespace

ExpertBlock::ExpertBlock(const NetworkShape& shape, const BlockPlans& plans, Engine& engine)
    : engine_(engine),
      settings_(shape.settings),
      tokens_(shape.rows),
      plans_(plans),
      router_(plans.router, engine),
      x_(engine, tokens_ * settings_.hidden),
      rstd_(engine, tokens_),
      u_(engine, tokens_ * settings_.hidden),
      u_cast_(engine, row_type(shape.recipe), tokens_ * settings_.hidden),
      logits_(engine, tokens_ * settings_.experts),
      experts_(engine, tokens_ * settings_.top_k),
      offsets_(engine, settings_.experts + 1),
      saved_(engine, plans.experts.memory.saved_bytes),
      weight_cache_(engine, plans.experts.memory.weight_cache_bytes) {}

NormArgs ExpertBlock::norm_args(const Weight& gain) const {
  return {x_.data(), gain.value, rstd_.data(), tokens_, settings_.hidden};
}

MoeArgs ExpertBlock::expert_args(std::span<const Weight> weights, BlockScratch& s) const {
  const auto tokens = [&](const Cast& of) {
    return view(of.data(), of.dtype(), {tokens_, settings_.hidden});
  };
  MoeArgs args;
  args.logits = view(logits_.data(), DType::kF32, {tokens_, settings_.experts});
  args.x = tokens(u_cast_);
  args.fc1 =
      linear_parameters(weights[kW1], settings_.experts, 2 * settings_.features, settings_.hidden);
  args.fc2 =
      linear_parameters(weights[kW2], settings_.experts, settings_.hidden, settings_.features);
  args.out = args.dout = tokens(s.tokens);
  args.dx = tokens(s.dtokens);
  args.experts = experts_.data();
  args.offsets = offsets_.data();
  args.saved = saved_.memory();
  args.weight_cache = weight_cache_.memory();
  args.refresh_weights = refresh_weights_;
  return args;
}

void ExpertBlock::forward(std::span<const Weight> weights, float* x, BlockScratch& s) {
  const Workspace workspace = s.workspace.workspace();
  engine_.copy(x_.data(), x, x_.bytes());
  engine_.norm(norm_args(weights[kNormGain]), u_.data());
  u_cast_.store(u_.data());
  router_.forward(u_.data(), weights[kRouter].value, logits_.data(), workspace);
  cadre::forward(plans_.experts, expert_args(weights, s), workspace, engine_.stream());
  s.tokens.add_to(x);
  refresh_weights_ = plans_.experts.problem.options.cache_weights ? false : refresh_weights_;
}

/// The gradient that reaches the normed tokens through the router, in s.du.
void ExpertBlock::router_backward(const Weight& router, BlockScratch& s) {
  const Workspace workspace = s.workspace.workspace();
  const float* dlogits = s.logit_gradient.data();
  router_.weight_gradient(dlogits, u_.data(), router.grad, workspace);
  router_.input_gradient(dlogits, router.value, s.du.data(), workspace);
}

void ExpertBlock::backward(std::span<const Weight> weights, float* dx, BlockScratch& s,
                           const uint64_t* rng) {
  s.tokens.store(dx);
  engine_.balance(load_args(), static_cast<float>(settings_.balance), s.score_gradient.data(),
                  tokens_);
  MoeArgs experts = expert_args(weights, s);
  experts.dscores = s.score_gradient.data();
  experts.dlogits = view(s.logit_gradient.data(), DType::kF32, {tokens_, settings_.experts});
  experts.rng = rng;
  cadre::backward(plans_.experts, experts, s.workspace.workspace(), engine_.stream());
  router_backward(weights[kRouter], s);
  s.dtokens.add_to(s.du.data());
  const Weight& gain = weights[kNormGain];
  engine_.norm_backward(norm_args(gain), s.du.data(), dx, gain.grad);
}

}  // namespace cadre::train
