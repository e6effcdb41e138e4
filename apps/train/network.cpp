#include "apps/train/network.h"

#include "apps/train/cross_entropy.h"

namespace cadre::train {
namespace {

std::span<const Weight> of_block(std::span<const Weight> weights, int64_t block) {
  return weights.subspan(block_parameter(block, kNormGain), kBlockParameters);
}

}  // namespace

Network::Network(const NetworkShape& shape, Engine& engine)
    : engine_(engine),
      plans_(plan_network(shape, engine.device())),
      batch_(engine, shape.settings, shape.rows),
      head_(plans_.head, engine),
      x_(engine, shape.rows * shape.settings.hidden),
      rstd_(engine, shape.rows),
      u_(engine, x_.size()),
      logits_(engine, shape.rows * kSymbols),
      u_cast_(engine, row_type(shape.recipe), x_.size()),
      head_cast_(engine, row_type(shape.recipe), kSymbols * shape.settings.hidden),
      logits_cast_(engine, row_type(shape.recipe), logits_.size()) {
  blocks_.reserve(static_cast<size_t>(shape.settings.blocks));
  for (int64_t b = 0; b < shape.settings.blocks; ++b) {
    blocks_.emplace_back(shape, plans_.block, engine);
  }
  make_scratch();
}

void Network::make_scratch() {
  const Settings& s = shape().settings;
  const DType type = row_type(shape().recipe);
  const int64_t tokens = shape().rows;
  scratch_.workspace = Buffer<std::byte>(engine_, plans_.workspace_bytes());
  scratch_.tokens = Cast(engine_, type, tokens * s.hidden);
  scratch_.dtokens = Cast(engine_, type, tokens * s.hidden);
  scratch_.du = Buffer<float>(engine_, tokens * s.hidden);
  scratch_.score_gradient = Buffer<float>(engine_, tokens * s.experts);
  scratch_.logit_gradient = Buffer<float>(engine_, tokens * s.experts);
}

WindowArgs Network::window_args() const {
  const Settings& s = shape().settings;
  return {batch_.sent_windows(), shape().rows, s.window, s.hidden};
}

NormArgs Network::norm_args(const Weight& gain) const {
  return {x_.data(), gain.value, rstd_.data(), shape().rows, shape().settings.hidden};
}

void Network::forget_weights() {
  for (ExpertBlock& block : blocks_) block.forget_weights();
}

void Network::count_rows(int64_t* load) const {
  for (size_t b = 0; b < blocks_.size(); ++b) {
    blocks_[b].count_rows(load + static_cast<int64_t>(b) * shape().settings.experts);
  }
}

const float* Network::logits(std::span<const Weight> weights) {
  const Settings& s = shape().settings;
  engine_.embed(window_args(), weights[kEmbedding].value, x_.data());
  for (int64_t b = 0; b < s.blocks; ++b) {
    blocks_[b].forward(of_block(weights, b), x_.data(), scratch_);
  }
  engine_.norm(norm_args(weights[final_gain(s)]), u_.data());
  u_cast_.store(u_.data());
  head_cast_.store(weights[head_weight(s)].value);
  head_.forward(u_cast_.data(), head_cast_.data(), logits_.data(), scratch_.workspace.workspace());
  return logits_.data();
}

void Network::add_loss(std::span<const Weight> weights, int64_t rows, double* loss) {
  logits(weights);
  engine_.cross_entropy(logits_.data(), batch_.sent_targets(), rows, loss);
}

void Network::backward(std::span<const Weight> weights) {
  const Settings& s = shape().settings;
  const Workspace workspace = scratch_.workspace.workspace();
  const Weight &gain = weights[final_gain(s)], &head = weights[head_weight(s)];
  logits_cast_.store(logits_.data());
  head_.weight_gradient(logits_cast_.data(), u_cast_.data(), head.grad, workspace);
  head_.input_gradient(logits_cast_.data(), head_cast_.data(), scratch_.du.data(), workspace);

  const Buffer<float>& dx = u_;  // the head was its last reader
  engine_.clear(dx.data(), dx.bytes());
  engine_.norm_backward(norm_args(gain), scratch_.du.data(), dx.data(), gain.grad);
  for (int64_t b = s.blocks - 1; b >= 0; --b) {
    blocks_[b].backward(of_block(weights, b), dx.data(), scratch_, batch_.sent_rng() + 2 * b);
  }
  engine_.embed_backward(window_args(), dx.data(), weights[kEmbedding].grad);
}

}  // namespace cadre::train
