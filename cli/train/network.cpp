#include "cli/train/network.h"

#include <algorithm>

#include "cadre/device.h"
#include "cli/train/cross_entropy.h"
#include "cli/train/embedding.h"
#include "cli/train/rms_norm.h"

namespace cadre::train {

Network::Network(const NetworkShape& shape)
    : shape_(shape),
      head_({shape.rows, kSymbols, shape.settings.hidden, row_type(shape.recipe),
             shape.mode == Mode::kTrain},
            this_cpu()),
      x_(shape.rows * shape.settings.hidden),
      rstd_(shape.rows),
      u_(x_.size()),
      logits_(shape.rows * kSymbols),
      u_cast_(row_type(shape.recipe), x_.size()),
      head_cast_(row_type(shape.recipe), kSymbols * shape.settings.hidden),
      logits_cast_(row_type(shape.recipe), logits_.size()) {
  blocks_.reserve(static_cast<size_t>(shape.settings.blocks));
  for (int64_t b = 0; b < shape.settings.blocks; ++b) blocks_.emplace_back(shape, this_cpu());
  make_scratch();
}

void Network::make_scratch() {
  const Settings& s = shape_.settings;
  const int64_t tokens = shape_.rows, rows = tokens * s.top_k;
  int64_t bytes = head_.workspace_bytes();
  for (const ExpertBlock& block : blocks_) bytes = std::max(bytes, block.workspace_bytes());
  scratch_.workspace = Buffer<std::byte>(bytes);
  scratch_.tokens = Cast(row_type(shape_.recipe), tokens * s.hidden);
  scratch_.rows = Cast(row_type(shape_.recipe), rows * s.hidden);
  scratch_.dx_rows = Cast(row_type(shape_.recipe), rows * s.hidden);
  scratch_.du = Buffer<float>(tokens * s.hidden);
  scratch_.router_du = Buffer<float>(tokens * s.hidden);
  scratch_.row_gradient = Buffer<float>(rows);
  scratch_.token_gradient = Buffer<float>(rows);
  scratch_.score_gradient = Buffer<float>(tokens * s.experts);
  scratch_.logit_gradient = Buffer<float>(tokens * s.experts);
}

void Network::forget_weights() {
  for (ExpertBlock& block : blocks_) block.forget_weights();
}

std::span<const float> Network::logits(std::span<const Parameter> parameters,
                                       std::span<const uint8_t> windows) {
  const Settings& s = shape_.settings;
  const WindowEmbedding<float> embedding{s.window, s.hidden};
  embedding.forward(parameters[kEmbedding].value, windows, x_.span());
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const size_t first = block_parameter(static_cast<int64_t>(b), kNormGain);
    blocks_[b].forward(parameters.subspan(first, kBlockParameters), x_.span(), scratch_);
  }
  const Parameter &gain = parameters[final_gain(s)], &head = parameters[head_weight(s)];
  RmsNorm<float>{x_.span(), gain.value, rstd_.span()}.forward(u_.span());
  u_cast_.store(u_.span());
  head_cast_.store(head.value);
  head_.forward(u_cast_.data(), head_cast_.data(), logits_.data(), scratch_.workspace.workspace());
  return logits_.span();
}

double Network::loss(std::span<const Parameter> parameters, std::span<const uint8_t> windows,
                     std::span<const uint8_t> targets) {
  logits(parameters, windows);
  return cross_entropy(logits_.span(), targets);
}

void Network::backward(std::span<Parameter> parameters, std::span<const uint8_t> windows,
                       int64_t step) {
  const Settings& s = shape_.settings;
  const Workspace workspace = scratch_.workspace.workspace();
  Parameter &gain = parameters[final_gain(s)], &head = parameters[head_weight(s)];
  logits_cast_.store(logits_.span());
  head_.weight_gradient(logits_cast_.data(), u_cast_.data(), head.grad.data(), workspace);
  head_.input_gradient(logits_cast_.data(), head_cast_.data(), scratch_.du.data(), workspace);

  const Buffer<float>& dx = u_;  // the head was its last reader
  std::fill_n(dx.data(), dx.size(), 0.0f);
  RmsNorm<float>{x_.span(), gain.value, rstd_.span()}.backward(scratch_.du.span(), dx.span(),
                                                               gain.grad);
  for (int64_t b = s.blocks - 1; b >= 0; --b) {
    const uint64_t rng[2] = {static_cast<uint64_t>(s.seed),
                             static_cast<uint64_t>(step * s.blocks + b)};
    blocks_[b].backward(parameters.subspan(block_parameter(b, kNormGain), kBlockParameters),
                        dx.span(), scratch_, rng);
  }
  const WindowEmbedding<float> embedding{s.window, s.hidden};
  embedding.backward(dx.span(), windows, parameters[kEmbedding].grad);
}

}  // namespace cadre::train
