#pragma once
#include "cadre/routing.h"
#include "cuda/device/chunk.h"
#include "cuda/portable/launch.h"

namespace cadre::cuda::portable {

constexpr unsigned kAll = ~0u;     // lanes of a warp
constexpr float kTiny = 1e-20f;    // keeps a sum of probabilities above 0
constexpr float kNothing = -0.0f;  // changes no sum

/// The parameters of the kernels of routing.
struct RoutingJob {
  RoutingProblem p;
  Matrix logits, dlogits;
  const float *bias, *dprob, *dscores;
  int32_t* experts;
  float *prob, *scores;

  /// Whether anything is made of all scores: a softmax over the chosen asks for their logits alone.
  __device__ bool wants_scores() const {
    return p.score != RoutingScore::kTopKSoftmax || scores != nullptr || dscores != nullptr;
  }
};

}  // namespace cadre::cuda::portable
