#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/layer.h"
#include "cadre/recipe.h"

#pragma GCC visibility push(default)
namespace cadre {

class WgradQueue;

/// A linear layer per expert, forward and backward:
/// `grouped_linear R=8192 N=2048 K=4096 E=64 recipe=nvfp4 bias=yes dw=f32 accumulate=yes`.
struct GroupedLinearProblem {
  int64_t rows = 0;              ///< R: bound on routed rows
  int64_t n = 0;                 ///< N: columns of y
  int64_t k = 0;                 ///< K: columns of x
  int experts = 1;               ///< E
  Recipe recipe{};               ///< the formats of every product
  DType dtype = DType::kBf16;    ///< of x, y, dy and dx: f32, bf16 or f16
  ParameterLayout parameters{};  ///< types and layout of w, bias and their gradients
  bool bias = false;             ///< a bias per expert
  bool bias_scale = false;       ///< the bias is scaled by a factor per row
  bool return_bias = false;  ///< the caller adds the bias itself: neither added nor differentiated
  bool dgrad = true;         ///< dx is wanted; no: the input is frozen
  bool wgrad = true;         ///< dw is wanted; no: the weights are frozen
  bool dbias = true;         ///< with a bias: dbias (and dbias_scale) are wanted
  /// What y goes through before it leaves forward as h; backward is of z = y, whose gradient is dy.
  std::optional<GemmActivation> activation{};
  /// The codes along K of x, or of dy, come as `x_along_k` or `dy_along_k`, in the order that the
  /// plan's tensor of that name has; x and dy themselves for what else reads them.
  bool given_x_along_k = false, given_dy_along_k = false;
  bool gather = false;     ///< x is read in token order: `tokens` of the args
  bool gather_dw = false;  ///< and wgrad, which reads it as it is; nobody reads x
  bool gather_dy = false;  ///< backward and wgrad read dy in token order, as it is
  bool scatter = false, scatter_dx = false;  ///< rows of y, or of dx, go to places
  int64_t tokens = 0;                        ///< T; 0 where nothing is gathered or scattered
  int top_k = 1;                             ///< slots, or places, of a token
  int ranks = 1;                             ///< P, of places: see GroupedGemm
  TensorRole x_role = TensorRole::kX;        ///< for stochastic rounding
  TensorRole dy_role = TensorRole::kDy;      ///< for stochastic rounding
  LayerOptions options{};

  bool operator==(const GroupedLinearProblem&) const = default;
};

/// Every tensor of a layer's forward and backward. A run reads only what it needs; the rest may be
/// null.
struct GroupedLinearArgs {
  Offsets offsets{};
  LinearParameters parameters{};
  TensorView x{};                     ///< [R, K]; with gather read in backward only, if at all
  TensorView tokens{};                ///< [T, K] with gather: read in place of x
  const int32_t* slot_of = nullptr;   ///< [R] with gather or gather_dy: as of GroupedGemm
  const int32_t* place_of = nullptr;  ///< [R] with scatter or scatter_dx: likewise
  QuantizedView x_along_k{};          ///< quantized_x: for fprop, where it does not read x itself;
                                      ///< given_x_along_k
  QuantizedView x_along_rows{};       ///< quantized_x: for wgrad, likewise; equal copies: along K
  TensorView y{};                     ///< [R, N], written by forward; with an activation h; with
                                      ///< scatter as GroupedGemm's out
  TensorView z{};                     ///< [R, N], written by forward where the activation keeps it
  const float* prob = nullptr;        ///< [R], of the activation
  TensorView dy{};                    ///< [R, N]; with gather_dy [T, N]
  QuantizedView dy_along_k{};         ///< given_dy_along_k: for dgrad
  TensorView dx{};                    ///< [R, K], written by backward; scatter_dx: likewise
  const float* bias_scale = nullptr;  ///< [R]
  float* dbias_scale = nullptr;       ///< [R], written by backward
  const uint64_t* rng = nullptr;      ///< [2] seed and offset in device memory; option sr only
  Memory saved{};                     ///< forward writes; backward and wgrad read
  Memory pending{};                   ///< deferred: backward writes; wgrad reads
  Memory weight_cache{};              ///< cache_weights: forward writes when it refreshes
  bool refresh_weights = true;        ///< cache_weights: quantise anew (first microbatch), or reuse
  WgradQueue* queue = nullptr;        ///< deferred: backward pushes its wgrad here, if given
};

/// How a layer will run. Routes: "direct", where no tensor is copied; "quantized", where operands
/// are copied into their formats; "sm90_packed_rows", where fprop multiplies a plain batch and
/// weights that come quantised; "sm90_fp8_rows", where fprop or dgrad multiplies codes that lie in
/// an order of their own; "decoded", where products that no implementation takes codes for read the
/// numbers that the codes stand for. Steps: "quantize w", "quantize x", "decode x", "decode w",
/// "y scales", "multiply"; backward "quantize dy", "quantize w again", "dx scales", "dx", "dbias",
/// "quantize x again", "decode dy along rows", "decode x along rows", "dw scales", "dw". Those that
/// it needs.
struct GroupedLinearPlan : LayerPlan {
  GroupedLinearProblem problem{};
};

/// y[r] = x[r] w_e^T + bias_e * bias_scale[r], and its gradients dx, dw, dbias, dbias_scale.
///
/// `plan` takes the first route that does not refuse, or the one called `only`.
/// `forward` computes y and saves what backward needs; `backward` computes dx, dbias, dbias_scale
/// and, unless deferred, dw; `wgrad` computes the deferred dw.
///
/// Shapes    x, dx [R, K]   y, dy [R, N]   w, dw [E, N, K]   bias, dbias [E, N].
/// Types     operands are quantised into the recipe's formats, each along its contraction;
///           where a format is the tensor's own type the tensor is read as it is.
/// Rows      the tail is not read. Where x or dy is read as it is by wgrad, the caller keeps it.
///           With gather row r of x is row slot_of[r] / top_k of `tokens`, whether fprop reads it,
///           or forward, or with save_input backward, quantises it; x itself is read by a wgrad
///           that reads it as it is, unless that gathers too. With gather_dy so are rows of dy.
/// Stream    no allocation, no synchronisation; all launches on the given stream.
/// Errors    InvalidArgument for shapes, types, strides, missing arguments and memory; nothing was
///           launched then.
/// Exact     x that comes quantised equals x quantised here (but for y of fp8_block in the route
///           sm90_fp8_rows), w likewise, deferred equals immediate, cached equals fresh,
///           save_input equals saved, packed equals discrete, bit for bit.
GroupedLinearPlan plan(const GroupedLinearProblem&, const Device&, std::string_view only = {});
void forward(const GroupedLinearPlan&, const GroupedLinearArgs&, Workspace, Stream);
void backward(const GroupedLinearPlan&, const GroupedLinearArgs&, Workspace, Stream);
void wgrad(const GroupedLinearPlan&, const GroupedLinearArgs&, Workspace, Stream);

/// What is kept from forward to the end of backward: the saved copies, and the tensors that wgrad
/// reads as they are.
std::vector<KeptPart> kept(const GroupedLinearPlan&);

/// The steps with their implementations and refusals, and the memory; many lines, for people.
std::string explain(const GroupedLinearPlan&);

std::string to_string(const GroupedLinearProblem&);
GroupedLinearProblem parse_grouped_linear_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
