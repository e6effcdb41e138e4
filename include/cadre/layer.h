#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cadre/activation.h"
#include "cadre/bias_grad.h"
#include "cadre/dequantize.h"
#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/quantize.h"
#include "cadre/routing.h"
#include "cadre/tensor.h"

// What the layers share: parameters, the caller's memory, and plans: steps over named tensors.
#pragma GCC visibility push(default)
namespace cadre {

/// Types and layout of the parameters of a linear layer and of their gradients. Packed is one
/// [E, N, K] tensor, discrete is E separate ones; any mix is legal.
struct ParameterLayout {
  DType weight = DType::kBf16;       ///< f32, bf16 or f16
  DType bias = DType::kBf16;         ///< f32, bf16 or f16
  DType dw = DType::kBf16;           ///< f32, bf16 or f16
  DType dbias = DType::kBf16;        ///< f32, bf16 or f16
  Major weight_major = Major::kRow;  ///< of w and dw; column: stored [K, N], plain recipes only
  bool discrete_weight = false;
  bool discrete_bias = false;  ///< bias and dbias
  bool discrete_dw = false;

  bool operator==(const ParameterLayout&) const = default;
};

/// The parameters of a linear layer and their gradients. A discrete tensor has its E pointers in
/// device memory, each to a contiguous expert; its view then is empty, or has null data and the
/// shape and strides that the problem says.
struct LinearParameters {
  TensorView w{};                              ///< [E, N, K]
  const void* const* discrete_w = nullptr;     ///< [E] pointers, each [N, K]
  TensorView bias{};                           ///< [E, N]
  const void* const* discrete_bias = nullptr;  ///< [E] pointers, each [N]
  TensorView dw{};                             ///< [E, N, K], written, contiguous experts
  void* const* discrete_dw = nullptr;          ///< [E] pointers, each [N, K]
  TensorView dbias{};                          ///< [E, N], written
  void* const* discrete_dbias = nullptr;       ///< [E] pointers, each [N]
  const int32_t* accumulate = nullptr;         ///< dw: one word (kDevice) or [E] (kPerExpert)
  const int32_t* accumulate_bias = nullptr;    ///< dbias: one word (kDevice) or [E] (kPerExpert)
  QuantizedView quantized_w{};  ///< quantized_w: in place of w, as fprop reads it; row-major
  int64_t version = 0;          ///< the caller's count of changes; a deferred wgrad checks it
};

/// Options that every layer has.
struct LayerOptions {
  Accumulate accumulate = Accumulate::kNo;       ///< of weight gradients
  Accumulate accumulate_bias = Accumulate::kNo;  ///< of bias gradients
  bool deferred = false;     ///< weight gradients are left to `wgrad`; backward keeps what it needs
  bool quantized_x = false;  ///< x comes as codes and scales, in the recipe's formats
  bool quantized_w = false;  ///< w comes so, for forward alone: nothing may be learnt through it
  bool save_input = false;   ///< keep x itself for wgrad and quantise it again in backward
  bool cache_weights = false;    ///< quantised weights live on in the caller's cache
  Tail tail = Tail::kKeep;       ///< of what has rows: y, dx, dprob
  float amax_eps = 0;            ///< lower bound of an amax, for scales in fp32; of others unread
  bool overwrite_saved = false;  ///< backward of experts writes dz over z in `saved`, and runs once
  int unit_budget = 0;           ///< SMs or threads to use at most; 0: all
  int align = 16;  ///< bytes that addresses and strides of x, y, dy, dx, w and dw are multiples of

  bool operator==(const LayerOptions&) const = default;
};

/// Memory of the caller that outlives a run: 256-byte aligned, on the device of the plan, and at
/// least as long as the plan says.
struct Memory {
  void* data = nullptr;
  int64_t bytes = 0;
};

/// What a layer asks of its caller.
struct LayerMemory {
  int64_t forward_workspace_bytes = 0;   ///< content means nothing before and after
  int64_t backward_workspace_bytes = 0;  ///< content means nothing before and after
  int64_t wgrad_workspace_bytes = 0;     ///< content means nothing before and after
  int64_t saved_bytes = 0;               ///< from forward to backward; deferred: to wgrad
  int64_t pending_bytes = 0;             ///< deferred only: from backward to wgrad
  int64_t weight_cache_bytes = 0;        ///< from one forward that refreshes to the next
};

/// Where a tensor of a layer lies.
enum class Place : uint8_t {
  kCaller,
  kWorkspace,
  kSaved,
  kPending,
  kWeightCache,
  kGradient,  ///< in the memory of dw of fc1, until the last step writes that
};

/// When a step runs. A layer's backward is kBackward, kInputAgain and, unless deferred, kWgrad.
enum class Phase : uint8_t {
  kForward,     ///< y
  kBackward,    ///< dx and the gradients of biases and probabilities
  kInputAgain,  ///< copies that wgrad reads of an input that was saved as it is
  kWgrad,
};

/// A tensor that the steps of a layer read or write: the caller's own, or one that the layer makes.
struct LayerTensor {
  std::string name;              ///< "x along rows"
  bool made = false;             ///< the layer makes it; else it is the caller's
  bool lasting = false;          ///< it lives on in the weight cache
  QuantizedShape shape{};        ///< of what the layer makes
  QuantizedLayout layout{};      ///< of that shape in memory
  Place place = Place::kCaller;  ///< follows from who writes and who reads; kCaller: nobody writes
  int64_t offset = 0;            ///< bytes from the start of the place
  int over = -1;                 ///< it may lie where that tensor lay before; -1: apart
  int written = -1;              ///< the first step that writes it; -1: none
  int read = -1;                 ///< the last step that reads it; -1: none
};

/// A tensor as a number: its place in the plan's list. kNone: the step has no such operand.
inline constexpr int kNone = -1;

/// A phase of a layer within a layer.
struct PartPhase {
  int part = 0;  ///< index in the plan's parts
  Phase phase = Phase::kForward;
};

/// alpha_e of a product of decoded operands: the expert scale of one times that of the other.
struct ScaleProduct {
  int experts = 1;  ///< E
};

/// An operation that a layer launches, or a part of the layer that has steps of its own.
///
/// Tensors, in the order of their operation's arguments:
///                      reads                          writes
///   quantize           source, slot_of                copy along K, copy along rows
///   dequantize         codes                          numbers
///   grouped_gemm       lhs, rhs, bias, bias_scale,    out, z
///                      whose expert scales are alpha,
///                      prob, slot_of or place_of
///   scale product      two with expert scales         alpha
///   bias_grad          dy, bias, bias_scale           dbias, dbias_scale
///   activation         z, prob, dh                    h, dz, dprob, copy along K
///   offsets            counts, ends, or choices and   offsets; of choices row_of, slot_of,
///                      their prob                     row_prob too
///   routing            logits, expert bias            experts, prob, scores; with map
///                                                     offsets, row_of, slot_of, row_prob
///   routing backward   logits, experts, dprob,        dlogits
///                      dscores
///   permute, combine   tokens or rows, offsets,       rows or tokens, dprob
///     and back         row_of, then slot_of or
///                      drow_prob and drow_scale; an
///                      addend is what it writes
///   part               whatever it reads              whatever it writes
struct LayerStep {
  Phase phase = Phase::kForward;
  bool writes_cache = false;  ///< of the weights: it runs where they are refreshed
  std::array<int, 7> reads{kNone, kNone, kNone, kNone, kNone, kNone, kNone};
  std::array<int, 7> writes{kNone, kNone, kNone, kNone, kNone, kNone, kNone};
  std::variant<QuantizePlan, DequantizePlan, ScaleProduct, GroupedGemmPlan, BiasGradPlan,
               ActivationPlan, OffsetsPlan, RoutingPlan, PermutePlan, PartPhase>
      plan;
  std::string name;  ///< "quantize x"; no two steps of a layer are called alike
};

/// The share of a layer within a layer in each memory that outlives a run.
struct LayerPart {
  LayerMemory memory{};  ///< what it needs
  int before = 0;        ///< its share lies before this tensor and what follows
  int64_t saved_offset = 0;
  int64_t pending_offset = 0;
  int64_t weight_cache_offset = 0;
};

/// A row of steps over named tensors, and how the memory is shared out: what the plans of all
/// layers have.
struct LayerPlan {
  Device device{};
  std::string name;                 ///< the route
  bool exact = true;                ///< every step is
  bool deferred = false;            ///< dw is left to `wgrad`
  LayerMemory memory{};             ///< what the caller provides
  std::vector<Refusal> refusals{};  ///< routes that come before `name` and refused
  std::vector<LayerTensor> tensors{};
  std::vector<LayerStep> steps{};  ///< in the order in which they run
  std::vector<LayerPart> parts{};
  std::array<int64_t, 4> copies_bytes{};  ///< of a phase's workspace, before its steps' scratch
};

/// A step by its name, to look at its plan; null if the layer has none. Not for a run.
template <class StepPlan>
[[gnu::visibility("hidden")]] const StepPlan* find_step(const LayerPlan& plan,
                                                        std::string_view name) {
  for (const LayerStep& step : plan.steps)
    if (step.name == name) return std::get_if<StepPlan>(&step.plan);
  return nullptr;
}

/// A tensor by its name; null if no step of the layer reads or writes it.
const LayerTensor* find_tensor(const LayerPlan&, std::string_view name);

/// Whether backward or wgrad has anything to compute.
bool learns(const LayerPlan&);

/// One tensor that stays in memory from forward to the end of backward.
struct KeptPart {
  std::string_view name;  ///< "x along rows"
  Place place;            ///< kCaller: the layer reads the caller's tensor, who must keep it
  int64_t bytes;          ///< at R rows
};

/// The bytes that a layer keeps for one token, each with top_k routed rows.
double bytes_per_token(std::span<const KeptPart>, int64_t rows, int top_k = 1);

}  // namespace cadre
#pragma GCC visibility pop
