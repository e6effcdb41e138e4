#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/grouped_mlp.h"
#include "cadre/routing.h"

#pragma GCC visibility push(default)
namespace cadre {

/// A layer of experts, from the router's logits, or from what the caller has chosen by them, to the
/// sum over the experts of each token:
/// `moe T=8192 top_k=8 H=2048 F=768 E=128 act=swiglu recipe=bf16 normalize=yes`,
/// `moe T=8192 top_k=8 H=2048 F=768 E=128 act=swiglu recipe=bf16 routed=yes index=i64`.
struct MoeProblem {
  int64_t tokens = 0;    ///< T
  int top_k = 1;         ///< experts of each token; there are R = T * top_k rows
  int64_t hidden = 0;    ///< H: columns of x and out
  int64_t features = 0;  ///< F: columns of h
  int experts = 1;       ///< E
  ActivationKind activation = ActivationKind::kSwiGlu;
  ActivationConstants constants{};        ///< clamped swiglu only
  GluLayout layout = GluLayout::kConcat;  ///< gated only
  Recipe recipe{};                        ///< of both linears
  DType dtype = DType::kBf16;             ///< of x, out, what lies between, and their gradients
  ParameterLayout parameters{};           ///< of both linears
  bool routed = false;        ///< the experts of tokens and their prob are given, not logits
  DType index = DType::kI32;  ///< routed only: of the experts that are given, i32 or i64
  RoutingScore score = RoutingScore::kSoftmax;
  DType logits = DType::kF32;   ///< also of dlogits: f32, bf16 or f16
  bool normalize = false;       ///< divide the chosen probabilities by their sum (+ 1e-20)
  float scale = 1.0f;           ///< factor of the probabilities, after normalisation
  bool expert_bias = false;     ///< a bias per expert, added to the scores for the choice only
  int groups = 1;               ///< experts come in equal groups; 1: no group limit
  int group_top_k = 1;          ///< groups whose experts may be chosen
  int64_t shared_features = 0;  ///< F of the expert that all tokens visit; 0: there is none
  bool shared_gate = false;     ///< a factor per token weighs the shared expert's result
  bool bias1 = false;           ///< added to the result of fc1
  bool bias2 = false;           ///< weighted by the probability, as the rest of the expert's result
  bool dgrad = true;            ///< dx is wanted
  bool dlogits = true;          ///< dlogits and, if there is one, dshared_gate; or dchoice_prob
  bool wgrad1 = true;           ///< dw1 is wanted, of the shared expert too
  bool wgrad2 = true;           ///< dw2 is wanted, of the shared expert too
  bool dbias = true;            ///< dbias1 and dbias2 are wanted, where there is a bias
  bool keep_h = false;          ///< save h in forward; else compute it again in backward
  bool keep_rows = true;        ///< save x in expert order; else make it again in backward
  LayerOptions options{};

  bool operator==(const MoeProblem&) const = default;
};

/// Every tensor of the layer's forward and backward.
struct MoeArgs {
  TensorView logits{};                 ///< [T, E]
  const float* expert_bias = nullptr;  ///< [E]
  const void* choice = nullptr;        ///< [T, top_k], routed: expert numbers, read by forward
  const float* choice_prob = nullptr;  ///< [T, top_k], routed: read by forward
  TensorView x{};                      ///< [T, H]
  LinearParameters fc1{};              ///< w [E, 2F, H] gated, [E, F, H] else
  LinearParameters fc2{};              ///< w [E, H, F]
  LinearParameters shared_fc1{};       ///< of the shared expert, as fc1 with E = 1; no bias
  LinearParameters shared_fc2{};       ///< as fc2 with E = 1
  const float* shared_gate = nullptr;  ///< [T], read by forward and backward
  TensorView out{};                    ///< [T, H], written by forward
  float* scores = nullptr;             ///< [T, E], optional: all scores, written by forward
  int32_t* experts = nullptr;          ///< [T, top_k], written by forward, read by backward
  float* prob = nullptr;               ///< [T, top_k], optional: written by forward
  int32_t* offsets = nullptr;          ///< [E + 1], written by forward, read by both others
  TensorView dout{};                   ///< [T, H]
  const float* dscores = nullptr;      ///< [T, E], optional: gradient of `scores`
  TensorView dx{};                     ///< [T, H], written by backward
  TensorView dlogits{};                ///< [T, E], written by backward
  float* dchoice_prob = nullptr;       ///< [T, top_k], routed: written by backward
  float* dshared_gate = nullptr;       ///< [T], written by backward
  const uint64_t* rng = nullptr;       ///< [2] seed and offset in device memory; option sr only
  Memory saved{};                      ///< forward writes; backward and wgrad read
  Memory pending{};                    ///< deferred: backward writes; wgrad reads
  Memory weight_cache{};               ///< cache_weights: forward writes when it refreshes
  bool refresh_weights = true;         ///< cache_weights: quantise anew, or reuse
  WgradQueue* queue = nullptr;  ///< deferred: backward pushes the wgrad of each fc2 and fc1 here
};

/// How the layer will run. `name` is the route: "permuted" copies x into expert order, with the
/// steps "route", "shared offsets", "shared expert", "permute", "experts", "combine"; backward
/// "shared expert backward", "combine backward", "experts backward", "permute backward", "permute
/// again" (before "experts backward" where that reads the rows), "route backward", "shared expert
/// dw", "experts dw". Those that it needs are there. "gathered", where fc1 reads or quantises x in
/// token order, has no "permute", nor "permute again" where dw of fc1 reads or quantises x too.
struct MoePlan : LayerPlan {
  MoeProblem problem{};
  GroupedMlpPlan mlp;
  GroupedMlpPlan shared;  ///< without a name if there is no shared expert
};

/// out[t] = sum over the experts e of token t of prob[t, e] * MLP_e(x[t])
///          (+ shared_gate[t] * shared MLP(x[t])), and its gradients.
///
/// `plan` takes the first route that does not refuse, or the one called `only`.
/// `forward` computes out; `backward` computes dx, dlogits, dshared_gate, dbias1, dbias2 and,
/// unless deferred, dw1 and dw2; `wgrad` computes the deferred ones, and reads x and dout again if
/// there is a shared expert.
///
/// Shapes    logits, dlogits, scores, dscores [T, E]   x, out, dx, dout [T, H]   w1 [E, 2F, H]
///           w2 [E, H, F]   experts, prob, choice, choice_prob, dchoice_prob [T, top_k]
///           offsets [E + 1].
/// Types     as Routing and GroupedMlp. The router's own product is the caller's.
/// Routed    choice and choice_prob stand for the routing, and dchoice_prob is the gradient of the
///           second: logits, expert_bias, scores, experts, prob, dscores and dlogits are null, and
///           there is no shared expert. A choice outside [0, E) is dropped, as by Offsets: it adds
///           nothing, and its dchoice_prob is 0.
/// Rows      every token has top_k rows, so that there is no tail, but for what is dropped. The
///           counts stay on the device.
/// Errors    InvalidArgument before anything is launched.
/// Exact     equals routing, or offsets of a routing, permute, GroupedMlp with the probabilities of
///           its rows, and combine, one after another, bit for bit; a token does not depend on the
///           others. The shared expert equals GroupedMlp of one expert with all tokens, whose y and
///           dx are the addends of combine and of permute backward.
MoePlan plan(const MoeProblem&, const Device&, std::string_view only = {});
void forward(const MoePlan&, const MoeArgs&, Workspace, Stream);
void backward(const MoePlan&, const MoeArgs&, Workspace, Stream);
void wgrad(const MoePlan&, const MoeArgs&, Workspace, Stream);

/// What is kept from forward to the end of backward.
std::vector<KeptPart> kept(const MoePlan&);

/// With keep_rows=no and wgrad1: whether x is kept, which a recipe that quantises it for wgrad
/// quantises again in backward. Else codes of its rows are, which are random, and would be others
/// then.
bool keeps_tokens(const MoeProblem&);

/// The steps with their implementations and refusals, and the memory; many lines, for people.
std::string explain(const MoePlan&);

std::string to_string(const MoeProblem&);
MoeProblem parse_moe_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
