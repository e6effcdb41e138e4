#include "cli/train/expert_block.h"

#include <algorithm>

#include "cli/train/balance.h"
#include "cli/train/rms_norm.h"

namespace cadre::train {
namespace {

RoutingProblem routing_problem(const NetworkShape& shape, bool backward) {
  RoutingProblem p;
  p.backward = backward;
  p.tokens = shape.rows;
  p.experts = static_cast<int>(shape.settings.experts);
  p.top_k = static_cast<int>(shape.settings.top_k);
  p.normalize = true;
  return p;
}

OffsetsProblem offsets_problem(const NetworkShape& shape) {
  OffsetsProblem p;
  p.source = OffsetsSource::kRouting;
  p.rows = shape.rows * shape.settings.top_k;
  p.experts = static_cast<int>(shape.settings.experts);
  p.tokens = shape.rows;
  p.top_k = static_cast<int>(shape.settings.top_k);
  return p;
}

PermuteProblem permute_problem(const NetworkShape& shape, PermutePass pass, bool prob) {
  PermuteProblem p;
  p.pass = pass;
  p.tokens = shape.rows;
  p.top_k = static_cast<int>(shape.settings.top_k);
  p.rows = shape.rows * shape.settings.top_k;
  p.hidden = shape.settings.hidden;
  p.experts = static_cast<int>(shape.settings.experts);
  p.dtype = row_type(shape.recipe);
  p.prob = prob;
  return p;
}

GroupedMlpProblem mlp_problem(const NetworkShape& shape) {
  const bool train = shape.mode == Mode::kTrain;
  GroupedMlpProblem p;
  p.rows = shape.rows * shape.settings.top_k;
  p.hidden = shape.settings.hidden;
  p.features = shape.settings.features;
  p.experts = static_cast<int>(shape.settings.experts);
  p.recipe = shape.recipe;
  p.dtype = row_type(shape.recipe);
  p.parameters.weight = p.parameters.dw = DType::kF32;
  p.prob = true;
  p.dgrad = p.wgrad1 = p.wgrad2 = p.dprob = train;
  p.cache_weights = !train;
  return p;
}

TensorView weight_view(const Parameter& p, const std::vector<float>& data) {
  return view(data.data(), DType::kF32, {p.shape[0], p.shape[1], p.shape[2]});
}

LinearParameters linear_parameters(const Parameter& p) {
  LinearParameters linear;
  linear.w = weight_view(p, p.value);
  linear.dw = weight_view(p, p.grad);
  return linear;
}

}  // namespace

DType row_type(const Recipe& recipe) {
  return recipe == parse_recipe("f32") ? DType::kF32 : DType::kBf16;
}

ExpertBlock::ExpertBlock(const NetworkShape& shape, const Device& device)
    : settings_(shape.settings),
      tokens_(shape.rows),
      rows_(shape.rows * shape.settings.top_k),
      router_(
          {tokens_, settings_.experts, settings_.hidden, DType::kF32, shape.mode == Mode::kTrain},
          device),
      routing_(plan(routing_problem(shape, false), device)),
      routing_backward_(plan(routing_problem(shape, true), device)),
      offsets_plan_(plan(offsets_problem(shape), device)),
      permute_(plan(permute_problem(shape, PermutePass::kPermute, true), device)),
      permute_backward_(plan(permute_problem(shape, PermutePass::kPermuteBackward, true), device)),
      combine_(plan(permute_problem(shape, PermutePass::kCombine, false), device)),
      combine_backward_(plan(permute_problem(shape, PermutePass::kCombineBackward, false), device)),
      mlp_(plan(mlp_problem(shape), device)),
      x_(tokens_ * settings_.hidden),
      rstd_(tokens_),
      u_(tokens_ * settings_.hidden),
      u_cast_(row_type(shape.recipe), tokens_ * settings_.hidden),
      logits_(tokens_ * settings_.experts),
      scores_(tokens_ * settings_.experts),
      experts_(rows_),
      prob_(rows_),
      row_prob_(rows_),
      offsets_(settings_.experts + 1),
      row_of_(rows_),
      slot_of_(rows_),
      x_rows_(row_type(shape.recipe), rows_ * settings_.hidden),
      saved_(mlp_.memory.saved_bytes),
      weight_cache_(mlp_.memory.weight_cache_bytes) {}

int64_t ExpertBlock::workspace_bytes() const {
  return std::max({router_.workspace_bytes(), routing_.workspace_bytes,
                   routing_backward_.workspace_bytes, offsets_plan_.workspace_bytes,
                   permute_.workspace_bytes, permute_backward_.workspace_bytes,
                   combine_.workspace_bytes, combine_backward_.workspace_bytes,
                   mlp_.memory.forward_workspace_bytes, mlp_.memory.backward_workspace_bytes});
}

std::vector<int64_t> ExpertBlock::counts() const {
  std::vector<int64_t> counts;
  for (int64_t e = 0; e < settings_.experts; ++e) {
    counts.push_back(offsets_.data()[e + 1] - offsets_.data()[e]);
  }
  return counts;
}

PermuteArgs ExpertBlock::permute_args(const Cast& tokens, const Cast& rows) const {
  PermuteArgs args;
  args.tokens = view(tokens.data(), tokens.dtype(), {tokens_, settings_.hidden});
  args.rows = view(rows.data(), rows.dtype(), {rows_, settings_.hidden});
  args.map = {row_of_.data(), slot_of_.data()};
  args.offsets = offsets();
  return args;
}

GroupedMlpArgs ExpertBlock::mlp_args(std::span<const Parameter> parameters, Scratch& s) const {
  GroupedMlpArgs args;
  args.offsets = offsets();
  args.fc1 = linear_parameters(parameters[kW1]);
  args.fc2 = linear_parameters(parameters[kW2]);
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
void ExpertBlock::route(std::span<const Parameter> parameters, Scratch& s) {
  const Workspace workspace = s.workspace.workspace();
  router_.forward(u_.data(), parameters[kRouter].value.data(), logits_.data(), workspace);
  RoutingArgs routing;
  routing.logits = view(logits_.data(), DType::kF32, {tokens_, settings_.experts});
  routing.experts = experts_.data();
  routing.prob = prob_.data();
  routing.scores = scores_.data();
  run(routing_, routing, workspace, {});
  OffsetsArgs place;
  place.source = experts_.data();
  place.offsets = offsets_.data();
  place.map = {row_of_.data(), slot_of_.data()};
  run(offsets_plan_, place, workspace, {});
}

void ExpertBlock::forward(std::span<const Parameter> parameters, std::span<float> x, Scratch& s) {
  const Workspace workspace = s.workspace.workspace();
  std::copy(x.begin(), x.end(), x_.data());
  RmsNorm<float>{x_.span(), parameters[kNormGain].value, rstd_.span()}.forward(u_.span());
  u_cast_.store(u_.span());
  route(parameters, s);

  PermuteArgs permute = permute_args(u_cast_, x_rows_);
  permute.prob = prob_.data();
  permute.row_prob = row_prob_.data();
  run(permute_, permute, workspace, {});
  cadre::forward(mlp_, mlp_args(parameters, s), workspace, {});
  run(combine_, permute_args(s.tokens, s.rows), workspace, {});
  s.tokens.add_to(x);
  refresh_weights_ = mlp_.problem.cache_weights ? false : refresh_weights_;
}

/// The gradient that reaches the normed tokens through the router and the balance, in s.router_du.
void ExpertBlock::route_backward(std::span<Parameter> parameters, Scratch& s) {
  const Workspace workspace = s.workspace.workspace();
  const std::vector<int64_t> rows = counts();
  balance_loss<float>(static_cast<float>(settings_.balance), rows, scores_.span(),
                      s.score_gradient.span());
  RoutingArgs routing;
  routing.logits = view(logits_.data(), DType::kF32, {tokens_, settings_.experts});
  routing.experts = experts_.data();
  routing.dprob = s.token_gradient.data();
  routing.dscores = s.score_gradient.data();
  routing.dlogits = view(s.logit_gradient.data(), DType::kF32, {tokens_, settings_.experts});
  run(routing_backward_, routing, workspace, {});
  Parameter& router = parameters[kRouter];
  const float* dlogits = s.logit_gradient.data();
  router_.weight_gradient(dlogits, u_.data(), router.grad.data(), workspace);
  router_.input_gradient(dlogits, router.value.data(), s.router_du.data(), workspace);
}

void ExpertBlock::backward(std::span<Parameter> parameters, std::span<float> dx, Scratch& s,
                           const uint64_t* rng) {
  const Workspace workspace = s.workspace.workspace();
  s.tokens.store(dx);
  run(combine_backward_, permute_args(s.tokens, s.rows), workspace, {});
  GroupedMlpArgs mlp = mlp_args(parameters, s);
  mlp.rng = rng;
  cadre::backward(mlp_, mlp, workspace, {});
  PermuteArgs permute = permute_args(s.tokens, s.dx_rows);
  permute.drow_prob = s.row_gradient.data();
  permute.dprob = s.token_gradient.data();
  run(permute_backward_, permute, workspace, {});

  route_backward(parameters, s);
  std::copy(s.router_du.span().begin(), s.router_du.span().end(), s.du.data());
  s.tokens.add_to(s.du.span());
  Parameter& gain = parameters[kNormGain];
  RmsNorm<float>{x_.span(), gain.value, rstd_.span()}.backward(s.du.span(), dx, gain.grad);
}

}  // namespace cadre::train
