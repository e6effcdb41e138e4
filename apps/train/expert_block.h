#pragma once
#include <cstdint>
#include <span>

#include "apps/train/buffer.h"
#include "apps/train/cast.h"
#include "apps/train/dense.h"
#include "apps/train/plans.h"
#include "apps/train/weights.h"

namespace cadre::train {

/// Memory that the blocks and the head of one network use in turn. Row-shaped arrays hold R =
/// T * top_k rows.
struct BlockScratch {
  Buffer<std::byte> workspace;
  Cast tokens;                   ///< [T, H]: a block's output, or its gradient
  Cast rows;                     ///< [R, H]: the experts' output, or its gradient
  Cast dx_rows;                  ///< [R, H]
  Buffer<float> du;              ///< [T, H]: gradient of the normed tokens
  Buffer<float> row_gradient;    ///< [R]: of the probabilities
  Buffer<float> token_gradient;  ///< [T, top_k]: of the probabilities
  Buffer<float> score_gradient;  ///< [T, E]
  Buffer<float> logit_gradient;  ///< [T, E]
};

/// One residual block on T tokens: x += combine(experts(permute(norm(x)))), each row weighted with
/// the router's probability. Norm and router are fp32, rows have row_type, the experts
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
  GroupedMlpArgs mlp_args(std::span<const Weight>, BlockScratch&) const;
  PermuteArgs permute_args(const Cast& tokens, const Cast& rows) const;
  void route(std::span<const Weight>, BlockScratch&);
  void route_backward(std::span<const Weight>, BlockScratch&);
  NormArgs norm_args(const Weight& gain) const;
  LoadArgs load_args() const { return {offsets_.data(), settings_.experts}; }
  Offsets offsets() const { return {offsets_.data(), static_cast<int>(settings_.experts)}; }

  Engine& engine_;
  Settings settings_;
  int64_t tokens_, rows_;
  BlockPlans plans_;
  Dense router_;
  bool refresh_weights_ = true;

  Buffer<float> x_, rstd_, u_;        ///< the norm's input [T, H], 1 / rms [T], output [T, H]
  Cast u_cast_;                       ///< the same as the experts want it
  Buffer<float> logits_, scores_;     ///< [T, E]
  Buffer<int32_t> experts_;           ///< [T, top_k]
  Buffer<float> prob_, row_prob_;     ///< [T, top_k], [R]
  Buffer<int32_t> offsets_;           ///< [E + 1]
  Buffer<int32_t> row_of_, slot_of_;  ///< [T, top_k], [R]
  Cast x_rows_;                       ///< [R, H]: the experts' input
  Buffer<std::byte> saved_, weight_cache_;
};

}  // namespace cadre::train
