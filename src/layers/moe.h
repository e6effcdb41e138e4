#pragma once
#include "cadre/moe.h"
#include "layers/grouped_mlp.h"

// What the files of the expert layer share.
namespace cadre::layers {

/// The tensors of an expert layer, as its steps number them: the caller's, then those in between,
/// of which kProb may be the caller's too.
namespace moe {
enum Tensor : int {
  kLogits,
  kExpertBias,
  kX,
  kOut,
  kScores,
  kExperts,
  kOffsets,
  kDout,
  kDscores,
  kDx,
  kDlogits,
  kLastOffset,
  kSharedGate,
  kDsharedGate,
  kChoice,
  kChoiceProb,
  kDchoiceProb,
  kProb,
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
  kSharedOffsets,
};
}  // namespace moe

inline int64_t rows_of(const MoeProblem& p) { return p.tokens * p.top_k; }
inline bool has_shared(const MoeProblem& p) { return p.shared_features > 0; }

/// Whether backward of an MLP, if there is one, reads its caller's tensor as it was in forward.
bool keeps(const GroupedMlpPlan&, std::string_view tensor);

/// The routes, by their planners. Gathered, fc1 reads or quantises x in token order.
std::string refuses_gathered(const MoeProblem&, const Device&);
std::string why_permuted_is_faster(const MoeProblem&, const Device&);
MoePlan plan_gathered(const MoeProblem&, const Device&);
/// Errors    Unsupported where that would copy them: the other route does, for backward too.
MoePlan plan_gathered_by_kernel(const MoeProblem&, const Device&);
MoePlan plan_permuted(const MoeProblem&, const Device&);

}  // namespace cadre::layers
