#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cli/train/expert_block.h"

namespace cadre::train {

/// The byte-level language model on T rows at a time: window embedding, residual blocks of experts,
/// norm, head. It owns buffers and plans; the parameters are the caller's.
class Network {
 public:
  explicit Network(const NetworkShape&);

  /// The 256 scores of the next byte of each row. windows [T, W], nearest byte first.
  std::span<const float> logits(std::span<const Parameter>, std::span<const uint8_t> windows);

  /// The sum over rows of the cross entropy of `targets` [T] in nats.
  double loss(std::span<const Parameter>, std::span<const uint8_t> windows,
              std::span<const uint8_t> targets);

  /// After `loss`: writes the gradient of that sum, and of the balance losses, into the parameters.
  /// `step` numbers the stochastic roundings.
  void backward(std::span<Parameter>, std::span<const uint8_t> windows, int64_t step);

  /// The parameters have changed; see ExpertBlock.
  void forget_weights();

  const std::vector<ExpertBlock>& blocks() const { return blocks_; }
  const NetworkShape& shape() const { return shape_; }

 private:
  void make_scratch();

  NetworkShape shape_;
  Dense head_;
  std::vector<ExpertBlock> blocks_;
  Scratch scratch_;
  Buffer<float> x_, rstd_, u_, logits_;
  Cast u_cast_, head_cast_, logits_cast_;
};

}  // namespace cadre::train
