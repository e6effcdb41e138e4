#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/grouped_mlp.h"
#include "cadre/permute.h"
#include "cadre/routing.h"
#include "cli/train/buffer.h"
#include "cli/train/cast.h"
#include "cli/train/dense.h"
#include "cli/train/parameter.h"

namespace cadre::train {

/// Whether gradients will be asked for.
enum class Mode : uint8_t { kTrain, kPredict };

/// What a network is made for.
struct NetworkShape {
  Settings settings;
  Recipe recipe;
  int64_t rows = 0;  ///< T of every call
  Mode mode = Mode::kTrain;
};

/// Type of everything between the products: f32 for the recipe f32, else bf16.
DType row_type(const Recipe&);

/// Memory that the blocks and the head of one network use in turn. Row-shaped arrays hold R =
/// T * top_k rows.
struct Scratch {
  Buffer<std::byte> workspace;
  Cast tokens;                   ///< [T, H]: a block's output, or its gradient
  Cast rows;                     ///< [R, H]: the experts' output, or its gradient
  Cast dx_rows;                  ///< [R, H]
  Buffer<float> du;              ///< [T, H]: gradient of the normed tokens
  Buffer<float> router_du;       ///< [T, H]: what the router adds to it
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
  ExpertBlock(const NetworkShape&, const Device&);

  int64_t workspace_bytes() const;

  /// x [T, H], replaced. `parameters` are those of this block.
  void forward(std::span<const Parameter> parameters, std::span<float> x, Scratch&);

  /// dx [T, H], replaced; writes the gradients of the parameters. `rng` seeds stochastic rounding.
  void backward(std::span<Parameter> parameters, std::span<float> dx, Scratch&,
                const uint64_t* rng);

  /// Quantised weights are made anew by the next forward; only Mode::kPredict keeps them.
  void forget_weights() { refresh_weights_ = true; }

  /// Rows that each expert got in the last forward.
  std::vector<int64_t> counts() const;

 private:
  GroupedMlpArgs mlp_args(std::span<const Parameter>, Scratch&) const;
  PermuteArgs permute_args(const Cast& tokens, const Cast& rows) const;
  void route(std::span<const Parameter>, Scratch&);
  void route_backward(std::span<Parameter>, Scratch&);
  Offsets offsets() const { return {offsets_.data(), static_cast<int>(settings_.experts)}; }

  Settings settings_;
  int64_t tokens_, rows_;
  Dense router_;
  RoutingPlan routing_, routing_backward_;
  OffsetsPlan offsets_plan_;
  PermutePlan permute_, permute_backward_, combine_, combine_backward_;
  GroupedMlpPlan mlp_;
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
