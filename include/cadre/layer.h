#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "cadre/grouped_gemm.h"
#include "cadre/quantize.h"
#include "cadre/tensor.h"

// What the layers share: parameters, the caller's memory, and where copies of operands lie.
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
/// device memory; its view then has null data and the shape [E, ...] that the experts share, or is
/// empty for contiguous experts.
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
  int64_t version = 0;  ///< the caller's count of changes; a deferred wgrad checks it
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

/// Where a tensor that a product reads lies.
enum class Place : uint8_t { kCaller, kWorkspace, kSaved, kPending, kWeightCache };

/// One operand of one product: the caller's own tensor, or a copy in the product's format.
struct OperandPlan {
  Place place = Place::kCaller;
  int64_t offset = 0;      ///< bytes from the start of the place
  QuantizedShape shape{};  ///< of the copy
};

/// One tensor that stays in memory from forward to the end of backward.
struct KeptPart {
  std::string_view name;  ///< "x along rows"
  Place place;            ///< kCaller: the layer reads the caller's tensor, who must keep it
  int64_t bytes;          ///< at R rows
};

/// The bytes that a layer keeps for one token, each with top_k routed rows.
double bytes_per_token(std::span<const KeptPart>, int64_t rows, int top_k = 1);

}  // namespace cadre
