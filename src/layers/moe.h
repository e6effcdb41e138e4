#pragma once
#include "cadre/moe.h"
#include "layers/grouped_mlp.h"

// What the files of the expert layer share.
namespace cadre::layers {

/// The tensors of an expert layer, as its steps number them: the caller's, then those in between,
/// of which some may be the caller's too.
namespace moe {
enum Tensor : int {
  kLogits,
  kExpertBias,
  kX,
  kOut,
  kScores,
  kDout,
  kDscores,
  kDx,
  kDlogits,
  kExperts,
  kProb,
  kOffsets,
  kRowOf,
  kSlotOf,
  kRows,
  kRowProb,
  kY,
  kDy,
  kRowsAgain,
  kDrows,
  kDrowProb,
  kDrowScale,
  kProbSums,
  kDprob,
};
}  // namespace moe

inline int64_t rows_of(const MoeProblem& p) { return p.tokens * p.top_k; }

/// The routes, by their planners.
MoePlan plan_permuted(const MoeProblem&, const Device&);

}  // namespace cadre::layers
