#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/activation_kind.h"
#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"
#include "cadre/quantize.h"

#pragma GCC visibility push(default)
namespace cadre {

/// `activation forward swiglu R=8192 F=2048 E=64 z=bf16 h=bf16 prob=yes`,
/// `activation forward swiglu R=8192 F=2048 E=64 z=bf16 h=bf16 along_k=fp8_block`.
struct ActivationProblem {
  using Args = struct ActivationArgs;
  static constexpr OperationText kOperation = {
      "activation", "gated and plain activations times a row probability, and the gradients",
      "activation forward swiglu R=8192 F=2048 E=64"};

  bool backward = false;
  ActivationKind kind = ActivationKind::kSwiGlu;
  ActivationConstants constants{};        ///< clamped swiglu only
  GluLayout layout = GluLayout::kConcat;  ///< gated only
  int64_t rows = 0;                       ///< R
  int64_t features = 0;                   ///< F: columns of h
  int experts = 1;                        ///< E, of the offsets
  DType z = DType::kBf16;                 ///< also of dz
  DType h = DType::kBf16;                 ///< also of dh
  bool prob = false;                      ///< h is scaled by a probability per row
  Tail tail = Tail::kKeep;                ///< of h, or of dz; dprob's tail follows it

  /// What is written, h of forward and dz of backward, is quantised along K in the same pass, in a
  /// format whose scales belong to blocks of a row.
  std::optional<Format> along_k{};
  Major along_k_scales_major = Major::kRow;  ///< as in QuantizedShape
  float amax_eps = 0;                        ///< lower bound of an amax, fp32 scales only
  bool plain = false;                        ///< h, or dz, is written as it is too

  bool operator==(const ActivationProblem&) const = default;
};

/// The layout of the copy along K, of h or of dz; it must be wanted.
QuantizedShape copy_shape(const ActivationProblem&);

struct ActivationArgs {
  TensorView z{};               ///< [R, 2F] gated, [R, F] else
  const float* prob = nullptr;  ///< [R]
  Offsets offsets{};            ///< offsets[E] is the number of rows
  TensorView h{};               ///< [R, F]: written by forward; by backward if given (recompute)
  TensorView dh{};              ///< [R, F], backward
  TensorView dz{};              ///< shape of z, backward, written
  float* dprob = nullptr;       ///< [R], backward with prob, written if given
  QuantizedView along_k{};      ///< written: codes and scales; h, or dz, then with plain=yes alone
};

using ActivationPlan = Plan<ActivationProblem>;

/// h = act(z) * prob, and its gradients dz = dh * prob * act'(z), dprob[r] = sum_f dh[r, f]
/// act(z)[r, f].
///
/// Types     arithmetic in fp32, one rounding at the store; prob and dprob are fp32.
/// Rows      the tail is not read; codes and scales of the tail are not written.
/// Errors    InvalidArgument for shapes, strides, missing and surplus arguments.
/// Exact     dprob sums its row in a fixed order. Codes and scales are those of quantise, run on
///           h or dz as it would have been stored.
ActivationPlan plan(const ActivationProblem&, const Device&, std::string_view only = {});
void run(const ActivationPlan&, const ActivationArgs&, Workspace, Stream);

std::string to_string(const ActivationProblem&);
ActivationProblem parse_activation_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
