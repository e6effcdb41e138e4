#pragma once
#include <cstdint>
#include <span>

#include "apps/train/buffer.h"
#include "apps/train/cast.h"
#include "apps/train/dense.h"
#include "apps/train/plans.h"
#include "apps/train/weights.h"

namespace cadre::train {

/// Memory that the blocks and the head of one network use in turn.
struct BlockScratch {
  Buffer<std::byte> workspace;
  Cast tokens;                   ///< [T, H]: a block's output, or its gradient
  Cast dtokens;                  ///< [T, H]: gradient of the normed tokens through the experts
  Buffer<float> du;              ///< [T, H]: all of it
  Buffer<float> score_gradient;  ///< [T, E]
  Buffer<float> logit_gradient;  ///< [T, E]
};

/// One residual block on T tokens: x += experts(norm(x)), weighted with the router's
/// probabilities. Norm and router are fp32, what moves between experts has row_type, the experts
/// follow the recipe.
class ExpertBlock {
 public:
  ExpertBlock(const NetworkShape&, const BlockPlans&, Engine&);

  /// x [T, H], replaced. `weights` are those of this block.
  void forward(std::span<const Weight> weights, float* x, BlockScratch&);

  /// dx [T, H], replaced; writes the gradients of the weights. `rng` seeds stochastic rounding: two
  /// words in the engine's memory.
  void backward(std::span<const Weight> weights, float* dx, BlockScratch&, const uint64_t* rng);

  /// Quantised weights are made anew by the next forward; only Mode::kPredict keeps them.
  void forget_weights() { refresh_weights_ = true; }

  /// Adds the rows that each expert got in the last forward to load [E].
  void count_rows(int64_t* load) const { engine_.count_rows(load_args(), load); }

 private:
  MoeArgs expert_args(std::span<const Weight>, BlockScratch&) const;
  void router_backward(const Weight& router, BlockScratch&);
  NormArgs norm_args(const Weight& gain) const;
  LoadArgs load_args() const { return {offsets_.data(), settings_.experts}; }

  Engine& engine_;
  Settings settings_;
  int64_t tokens_;
  BlockPlans plans_;
  Dense router_;
  bool refresh_weights_ = true;

  Buffer<float> x_, rstd_, u_;  ///< the norm's input [T, H], 1 / rms [T], output [T, H]
  Cast u_cast_;                 ///< the same as the experts want it
  Buffer<float> logits_;        ///< [T, E]
  Buffer<int32_t> experts_;     ///< [T, top_k]
  Buffer<int32_t> offsets_;     ///< [E + 1]
  Buffer<std::byte> saved_, weight_cache_;
};

}  // namespace cadre::train
