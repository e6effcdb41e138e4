#pragma once
#include <array>
#include <optional>
#include <string_view>

#include "grouped_mlp.h"

namespace cadre::door {

/// Which gradients backward computes. Forward keeps what these need.
using MoeWants = std::array<bool, 5>;
constexpr size_t kDlogits = kDprob;  ///< in the order of MlpWant

/// What all directions of an expert layer are called with.
struct MoeCall {
  const at::Tensor& x;        ///< [T, H], contiguous
  const at::Tensor& logits;   ///< [T, E], contiguous
  const at::Tensor& experts;  ///< [T, top_k], written by forward
  const at::Tensor& offsets;  ///< [E + 1], written by forward
  at::TensorList weight1, bias1, weight2, bias2;
  const std::optional<at::Tensor>& shared1;      ///< [2F, H]: both weights of a shared expert
  const std::optional<at::Tensor>& shared2;      ///< [H, F]
  const std::optional<at::Tensor>& shared_gate;  ///< fp32 [T]
  const std::optional<at::Tensor>& rng;          ///< [2] int64: seed and offset
  MoeWants wants;
  std::string_view routing;
  std::string_view activation;
  std::string_view recipe;
  bool keep_h = false;
  bool keep_rows = false;
};

/// What both directions of an expert layer are called with whose tokens have chosen.
struct RoutedCall {
  const at::Tensor& x;        ///< [T, H], contiguous
  int64_t top_k;              ///< choices of a token
  const at::Tensor& offsets;  ///< [E + 1], written by forward
  at::TensorList weight1, bias1, weight2, bias2;
  const std::optional<at::Tensor>& rng;  ///< [2] int64: seed and offset
  MoeWants wants;
  std::string_view activation;
  std::string_view recipe;
  bool keep_h = false;
  bool keep_rows = false;
};

/// What tokens have chosen, as the library reads it.
struct Choice {
  at::Tensor experts, prob;  ///< [T, top_k], contiguous
  DType index;               ///< of the experts

  int64_t top_k() const { return experts.size(1); }
};
/// Errors    ValueError and TypeError for what does not fit tokens x.
Choice read_choice(const at::Tensor& experts, const at::Tensor& prob, const at::Tensor& x);

/// The layer of these experts for tokens that have chosen: all but T and top_k.
MoeProblem routed_problem(const GroupedMlpProblem&);

/// The choice that words such as "sigmoid normalize=yes scale=2.5" state: no sizes.
/// Errors    ValueError with the words it takes.
const RoutingProblem& routing_of(std::string_view words);

/// The problem that a call states. Errors    ValueError for tensors that do not fit together.
MoeProblem problem_of(const MoeCall&);
MoeProblem problem_of(const RoutedCall&);

/// Whether backward has anything to compute.
bool learns(const MoeProblem&);

/// Rows as a plan of that alignment reads them: products may gather them.
at::Tensor rows_for(const at::Tensor&, const char* what, int align);

}  // namespace cadre::door
