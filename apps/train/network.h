#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "apps/train/batch.h"
#include "apps/train/expert_block.h"

namespace cadre::train {

/// The byte-level language model on T rows at a time: window embedding, residual blocks of experts,
/// norm, head. It owns plans, buffers and the batch that its calls read; the weights are the
/// caller's. Everything but the host's side of the batch is in the memory of the engine.
class Network {
 public:
  /// Errors    Unsupported where an operation has no implementation on the engine's device.
  Network(const NetworkShape&, Engine&);

  /// To be filled, and sent before each of the following.
  Batch& batch() { return batch_; }

  /// The 256 scores [T, 256] of the next byte of each row.
  const float* logits(std::span<const Weight>);

  /// Adds the cross entropy of the first `rows` targets in nats to `*loss`.
  void add_loss(std::span<const Weight>, int64_t rows, double* loss);

  /// After `add_loss` of all rows: writes the gradient of that sum, and of the balance losses.
  void backward(std::span<const Weight>);

  /// The weights have changed; see ExpertBlock.
  void forget_weights();

  /// Adds the rows that each expert got in the last call to load [blocks, E].
  void count_rows(int64_t* load) const;

  const NetworkShape& shape() const { return plans_.shape; }
  Engine& engine() const { return engine_; }

 private:
  void make_scratch();
  WindowArgs window_args() const;
  NormArgs norm_args(const Weight& gain) const;

  Engine& engine_;
  NetworkPlans plans_;
  Batch batch_;
  Dense head_;
  std::vector<ExpertBlock> blocks_;
  BlockScratch scratch_;
  Buffer<float> x_, rstd_, u_, logits_;
  Cast u_cast_, head_cast_, logits_cast_;
};

}  // namespace cadre::train
