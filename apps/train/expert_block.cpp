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
      rows_(shape.rows * shape.settings.top_k),
      plans_(plans),
      router_(plans.router, engine),
      x_(engine, tokens_ * settings_.hidden),
      rstd_(engine, tokens_),
      u_(engine, tokens_ * settings_.hidden),
      u_cast_(engine, row_type(shape.recipe), tokens_ * settings_.hidden),
      logits_(engine, tokens_ * settings_.experts),
      scores_(engine, tokens_ * settings_.experts),
      experts_(engine, rows_),
      prob_(engine, rows_),
      row_prob_(engine, rows_),
      offsets_(engine, settings_.experts + 1),
      row_of_(engine, rows_),
      slot_of_(engine, rows_),
      x_rows_(engine, row_type(shape.recipe), rows_ * settings_.hidden),
      saved_(engine, plans.experts.memory.saved_bytes),
      weight_cache_(engine, plans.experts.memory.weight_cache_bytes) {}

NormArgs ExpertBlock::norm_args(const Weight& gain) const {
  return {x_.data(), gain.value, rstd_.data(), tokens_, settings_.hidden};
}

PermuteArgs ExpertBlock::permute_args(const Cast& tokens, const Cast& rows) const {
  PermuteArgs args;
  args.tokens = view(tokens.data(), tokens.dtype(), {tokens_, settings_.hidden});
  args.rows = view(rows.data(), rows.dtype(), {rows_, settings_.hidden});
  args.map = {row_of_.data(), slot_of_.data()};
  args.offsets = offsets();
  return args;
}

GroupedMlpArgs ExpertBlock::mlp_args(std::span<const Weight> weights, BlockScratch& s) const {
  GroupedMlpArgs args;
  args.offsets = offsets();
  args.fc1 =
      linear_parameters(weights[kW1], settings_.experts, 2 * settings_.features, settings_.hidden);
  args.fc2 =
      linear_parameters(weights[kW2], settings_.experts, settings_.hidden, settings_.features);
  args.x = view(x_rows_.data(), x_rows_.dtype(), {rows_, settings_.hidden});
  args.prob = row_prob_.data();
  args.y = args.dy = view(s.rows.data(), s.rows.dtype(), {rows_, settings_.hidden});
  args.dx = view(s.dx_rows.data(), s.dx_rows.dtype(), {rows_, settings_.hidden});
  args.dprob = s.row_gradient.data();
  args.saved = saved_.memory();
  args.weight_cache = weight_cache_.memory();
  args.refresh_weights = refresh_weights_;
  return args;
}

/// Chooses the experts of every token and where its rows go.
void ExpertBlock::route(std::span<const Weight> weights, BlockScratch& s) {
  const Workspace workspace = s.workspace.workspace();
  router_.forward(u_.data(), weights[kRouter].value, logits_.data(), workspace);
  RoutingArgs routing;
  routing.logits = view(logits_.data(), DType::kF32, {tokens_, settings_.experts});
  routing.experts = experts_.data();
  routing.prob = prob_.data();
  routing.scores = scores_.data();
  run(plans_.routing, routing, workspace, engine_.stream());
  OffsetsArgs place;
  place.source = experts_.data();
  place.offsets = offsets_.data();
  place.map = {row_of_.data(), slot_of_.data()};
  run(plans_.offsets, place, workspace, engine_.stream());
}

void ExpertBlock::forward(std::span<const Weight> weights, float* x, BlockScratch& s) {
  const Workspace workspace = s.workspace.workspace();
  const Stream stream = engine_.stream();
  engine_.copy(x_.data(), x, x_.bytes());
  engine_.norm(norm_args(weights[kNormGain]), u_.data());
  u_cast_.store(u_.data());
  route(weights, s);

  PermuteArgs permute = permute_args(u_cast_, x_rows_);
  permute.prob = prob_.data();
  permute.row_prob = row_prob_.data();
  run(plans_.permute, permute, workspace, stream);
  cadre::forward(plans_.experts, mlp_args(weights, s), workspace, stream);
  run(plans_.combine, permute_args(s.tokens, s.rows), workspace, stream);
  s.tokens.add_to(x);
  refresh_weights_ = plans_.experts.problem.options.cache_weights ? false : refresh_weights_;
}

/// The gradient that reaches the normed tokens through the router and the balance, in s.du.
void ExpertBlock::route_backward(std::span<const Weight> weights, BlockScratch& s) {
  const Workspace workspace = s.workspace.workspace();
  engine_.balance(load_args(), static_cast<float>(settings_.balance), s.score_gradient.data(),
                  tokens_);
  RoutingArgs routing;
  routing.logits = view(logits_.data(), DType::kF32, {tokens_, settings_.experts});
  routing.experts = experts_.data();
  routing.dprob = s.token_gradient.data();
  routing.dscores = s.score_gradient.data();
  routing.dlogits = view(s.logit_gradient.data(), DType::kF32, {tokens_, settings_.experts});
  run(plans_.routing_backward, routing, workspace, engine_.stream());
  const Weight& router = weights[kRouter];
  const float* dlogits = s.logit_gradient.data();
  router_.weight_gradient(dlogits, u_.data(), router.grad, workspace);
  router_.input_gradient(dlogits, router.value, s.du.data(), workspace);
}

void ExpertBlock::backward(std::span<const Weight> weights, float* dx, BlockScratch& s,
                           const uint64_t* rng) {
  const Workspace workspace = s.workspace.workspace();
  const Stream stream = engine_.stream();
  s.tokens.store(dx);
  run(plans_.combine_backward, permute_args(s.tokens, s.rows), workspace, stream);
  GroupedMlpArgs mlp = mlp_args(weights, s);
  mlp.rng = rng;
  cadre::backward(plans_.experts, mlp, workspace, stream);
  PermuteArgs permute = permute_args(s.tokens, s.dx_rows);
  permute.drow_prob = s.row_gradient.data();
  permute.dprob = s.token_gradient.data();
  run(plans_.permute_backward, permute, workspace, stream);

  route_backward(weights, s);
  s.tokens.add_to(s.du.data());
  const Weight& gain = weights[kNormGain];
  engine_.norm_backward(norm_args(gain), s.du.data(), dx, gain.grad);
}

}  // namespace cadre::train
