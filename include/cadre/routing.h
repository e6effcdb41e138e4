#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/offsets.h"
#include "cadre/plan.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"

#pragma GCC visibility push(default)
namespace cadre {

enum class RoutingScore : uint8_t {
  kSoftmax,      ///< softmax over all experts, then top-k
  kTopKSoftmax,  ///< top-k of the logits, then softmax over the chosen
  kSigmoid,      ///< sigmoid of each logit, then top-k
};

/// `routing forward softmax T=4096 E=64 top_k=8 logits=bf16 normalize=yes`.
struct RoutingProblem {
  using Args = struct RoutingArgs;
  static constexpr OperationText kOperation = {
      "routing", "the top_k experts of each token, their probabilities, and the gradient",
      "routing forward softmax T=4096 E=64 top_k=8"};

  bool backward = false;
  RoutingScore score = RoutingScore::kSoftmax;
  int64_t tokens = 0;          ///< T
  int experts = 1;             ///< E
  int top_k = 1;               ///< experts of a token
  DType logits = DType::kF32;  ///< also of dlogits: f32, bf16 or f16
  bool normalize = false;      ///< divide the chosen probabilities by their sum (+ 1e-20)
  float scale = 1.0f;          ///< factor of the probabilities, after normalisation
  bool expert_bias = false;    ///< a bias per expert, added to the scores for the choice only
  int groups = 1;              ///< experts come in equal groups; 1: no group limit
  int group_top_k = 1;         ///< groups whose experts may be chosen
  bool map = false;            ///< forward: offsets and the row map of the choices too
  bool row_prob = false;       ///< with map: the probabilities of its rows too

  bool operator==(const RoutingProblem&) const = default;
};

struct RoutingArgs {
  TensorView logits{};                 ///< [T, E]
  const float* expert_bias = nullptr;  ///< [E]
  int32_t* experts = nullptr;          ///< [T, top_k]: written by forward, read by backward
  float* prob = nullptr;               ///< [T, top_k], written by forward
  float* scores = nullptr;             ///< [T, E]: all scores, written by forward if given
  int32_t* offsets = nullptr;          ///< [E + 1], with map, written
  RowMap map{};                        ///< with map, written, R = T * top_k; each may be null
  float* row_prob = nullptr;           ///< [R], with row_prob, written
  const float* dprob = nullptr;        ///< [T, top_k], backward
  const float* dscores = nullptr;      ///< [T, E], backward, optional: gradient of `scores`
  TensorView dlogits{};                ///< [T, E], written by backward
};

using RoutingPlan = Plan<RoutingProblem>;

/// Chooses top_k experts of each token and their probabilities; backward gives the logits'
/// gradient. With l a token's logits and c its chosen experts:
///
///   scores             softmax(l) over all experts (both softmax kinds), or sigmoid(l)
///   rank               scores[e] + expert_bias[e]; topk_softmax: l[e] + expert_bias[e]
///   q[j]               scores[c[j]]; topk_softmax: softmax of l[c] over the chosen
///   prob[j]            scale * q[j] / (normalize: sum_i q[i] + 1e-20, else 1)
///   map                offsets and the row map are those of `offsets routing R=T*top_k`
///   row_prob           row_prob[row] = prob[slot_of[row]]
///   backward           dlogits = d(sum_j dprob[j] prob[j] + sum_e dscores[e] scores[e]) / dl
///
/// Shapes    logits, scores, dscores, dlogits [T, E]   expert_bias [E]   experts, prob, dprob
///           [T, top_k]   offsets [E + 1]   row_of [T, top_k]   slot_of, row_prob
///           [T * top_k].
/// Types     arithmetic in fp32; logits and dlogits f32, bf16 or f16, rounded once.
/// Rows      Choices come in descending rank; of equal ranks the greater logit, then the lower
///           expert number. With groups > 1 only the experts of group_top_k groups may be chosen:
///           those whose top (top_k / group_top_k) ranks, at least one, have the greatest sum. A
///           NaN logit counts as minus infinity. The choice and the bias have no gradient.
///           Backward skips expert numbers outside [0, E).
/// Errors    InvalidArgument for sizes, groups that do not divide E or are too few for top_k,
///           shapes, types, strides, missing or surplus arguments.
/// Exact     fixed order; a token does not depend on the others.
RoutingPlan plan(const RoutingProblem&, const Device&, std::string_view only = {});
void run(const RoutingPlan&, const RoutingArgs&, Workspace, Stream);

std::string to_string(const RoutingProblem&);
RoutingProblem parse_routing_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
