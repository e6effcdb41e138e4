#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/activation.h"
#include "cadre/grouped_linear.h"

#pragma GCC visibility push(default)
namespace cadre {

/// The expert MLP: `grouped_mlp R=8192 H=2048 F=1408 E=64 act=swiglu recipe=mxfp8 prob=yes`.
struct GroupedMlpProblem {
  int64_t rows = 0;      ///< R: bound on routed rows
  int64_t hidden = 0;    ///< H: columns of x and y
  int64_t features = 0;  ///< F: columns of h
  int experts = 1;       ///< E
  ActivationKind activation = ActivationKind::kSwiGlu;
  ActivationConstants constants{};        ///< clamped swiglu only
  GluLayout layout = GluLayout::kConcat;  ///< gated only
  Recipe recipe{};                        ///< of both linears
  DType dtype = DType::kBf16;             ///< of x, z, h, y and their gradients
  ParameterLayout parameters{};           ///< of both linears
  bool prob = false;                      ///< h is scaled by a probability per row
  bool bias1 = false;                     ///< added to the result of fc1
  bool bias2 = false;                     ///< added to that of fc2
  bool bias2_scale = false;  ///< bias2 is scaled by a factor per row (say, the same probability)
  bool dgrad = true;         ///< dx is wanted
  bool wgrad1 = true;        ///< dw1 is wanted
  bool wgrad2 = true;        ///< dw2 is wanted
  bool dbias = true;         ///< dbias1 and dbias2 are wanted, where there is a bias
  bool dprob = true;         ///< with prob: dprob is wanted
  bool keep_h = false;       ///< save h in forward; else compute it again in backward
  bool given_x_along_k = false;  ///< codes of x along K come with x, as of GroupedLinear
  bool gather = false;           ///< x is read in token order: `tokens` of the args
  bool gather_dw = false;        ///< and fc1's wgrad, which reads it as it is; nobody reads x
  bool gather_dy = false;        ///< backward reads dy in token order, as it is
  bool scatter = false;          ///< rows of y, and of dx, go to places
  int64_t tokens = 0;            ///< T; 0 where nothing is gathered or scattered
  int top_k = 1;                 ///< slots, or places, of a token
  int ranks = 1;                 ///< P, of places: see GroupedGemm
  LayerOptions options{};

  bool operator==(const GroupedMlpProblem&) const = default;
};

/// Every tensor of the layer's forward and backward.
struct GroupedMlpArgs {
  Offsets offsets{};
  LinearParameters fc1{};              ///< w [E, 2F, H] gated, [E, F, H] else
  LinearParameters fc2{};              ///< w [E, H, F]
  TensorView x{};                      ///< [R, H]; with gather read in backward only, if at all
  TensorView tokens{};                 ///< [T, H] with gather: read in place of x
  const int32_t* slot_of = nullptr;    ///< [R] with gather or gather_dy: as of GroupedGemm
  const int32_t* place_of = nullptr;   ///< [R] with scatter: likewise
  QuantizedView x_along_k{};           ///< quantized_x or given_x_along_k: for fprop of fc1, as of
                                       ///< GroupedLinear
  QuantizedView x_along_rows{};        ///< quantized_x: for wgrad of fc1
  const float* prob = nullptr;         ///< [R]
  const float* bias2_scale = nullptr;  ///< [R]
  TensorView y{};                      ///< [R, H], written by forward; with scatter as
                                       ///< GroupedGemm's out
  TensorView dy{};                     ///< [R, H]; with gather_dy [T, H]
  TensorView dx{};                     ///< the same, written by backward
  float* dprob = nullptr;              ///< [R], written by backward if given
  float* dbias2_scale = nullptr;       ///< [R], written by backward
  TensorView z{};                 ///< fc1's output, of forward and of backward alike; empty: it
                                  ///< lies in `saved`, if it is made
  TensorView dh{};                ///< fc2's input gradient; empty: it lies in the workspace
  const uint64_t* rng = nullptr;  ///< [2] seed and offset in device memory; option sr only
  Memory saved{};                 ///< forward writes; backward and wgrad read
  Memory pending{};               ///< deferred: backward writes; wgrad reads
  Memory weight_cache{};          ///< cache_weights: forward writes when it refreshes
  bool refresh_weights = true;    ///< cache_weights: quantise anew, or reuse
  WgradQueue* queue = nullptr;    ///< deferred: backward pushes fc2's and fc1's wgrad here
};

/// How the layer will run. `name` is the route: "unfused" is fc1, activation and fc2 one by one,
/// with the steps "fc1", "activation", "fc2"; "fused", where a product computes the activation, has
/// "fc1 and activation", "fc2", and no z unless backward reads it; "codes" has the steps of
/// "unfused", of which the activation writes the codes along K that a linear reads of h, or of dz.
/// Backward: "fc2 backward", "activation backward", "h again", "fc2 input again", "fc2 dw", "fc1
/// backward", "fc1 input again", "fc1 dw"; deferred, "fc2 dw" comes before "fc1 dw". Those that it
/// needs are there.
struct GroupedMlpPlan : LayerPlan {
  GroupedMlpProblem problem{};
  GroupedLinearPlan fc1, fc2;
};

/// y = (act(x w1^T + bias1) * prob) w2^T + bias2 * bias2_scale, and its gradients.
///
/// `plan` takes the first route that does not refuse, or the one called `only`.
/// `forward` computes y; `backward` computes dx, dprob, dbias1, dbias2, dbias2_scale and, unless
/// deferred, dw1 and dw2; `wgrad` computes the deferred ones.
///
/// Shapes    x, y, dx, dy [R, H]   w1 [E, 2F, H]   w2 [E, H, F]   prob, dprob [R].
/// Types     as GroupedLinear; probabilities are fp32 throughout.
/// Rows      the tail is not read.
/// Errors    InvalidArgument before anything is launched.
/// Exact     equals GroupedLinear, activation and GroupedLinear in a row bit for bit; h computed
///           again equals h kept.
GroupedMlpPlan plan(const GroupedMlpProblem&, const Device&, std::string_view only = {});
void forward(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace, Stream);
void backward(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace, Stream);
void wgrad(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace, Stream);

/// What is kept from forward to the end of backward.
std::vector<KeptPart> kept(const GroupedMlpPlan&);

/// The steps with their implementations and refusals, and the memory; many lines, for people.
std::string explain(const GroupedMlpPlan&);

std::string to_string(const GroupedMlpProblem&);
GroupedMlpProblem parse_grouped_mlp_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
