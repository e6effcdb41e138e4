// The implementation lists of the CUDA backend, best first; the only place that has them. Planning
// for an operation whose list is empty is refused.
#include "backend/composed_activation.h"
#include "backend/composed_gemm.h"
#include "backend/lists.h"
#include "cuda/portable/activation.h"
#include "cuda/portable/activation_codes.h"
#include "cuda/portable/bias_grad.h"
#include "cuda/portable/cast.h"
#include "cuda/portable/grouped_gemm.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/offsets.h"
#include "cuda/portable/permute.h"
#include "cuda/portable/quantize.h"
#include "cuda/portable/routing.h"
#include "cuda/sm90/grouped_gemm.h"

namespace cadre::cuda {

using backend::Entry;
using backend::no_workspace;
using backend::plain_activation;
using backend::plain_gemm;

namespace {

template <class Problem>
struct List;

template <>
struct List<ActivationProblem> {
  static constexpr Entry<ActivationProblem> kEntries[] = {
      {"cuda_activation", plain_activation<portable::needs_sm80>, no_workspace,
       portable::activation},
      {.name = "cuda_activation_codes",
       .refuses = portable::refuses_activation_codes,
       .workspace_bytes = no_workspace,
       .run = portable::activation_codes},
      {.name = "composed",
       .refuses = backend::refuses_composed_activation,
       .workspace_bytes = backend::composed_activation_workspace_bytes,
       .run = backend::composed_activation,
       .inner = backend::composed_activation_plans},
  };
};

template <>
struct List<BiasGradProblem> {
  static constexpr Entry<BiasGradProblem> kEntries[] = {
      {"cuda_bias_grad", portable::needs_sm80, no_workspace, portable::bias_grad},
  };
};

template <>
struct List<DequantizeProblem> {
  static constexpr Entry<DequantizeProblem> kEntries[] = {
      {"cuda_cast", portable::refuses_cast, no_workspace, portable::cast},
      {"cuda_dequantize", portable::refuses_dequantize, no_workspace, portable::dequantize},
  };
};

template <>
struct List<GroupedGemmProblem> {
  static constexpr Entry<GroupedGemmProblem> kEntries[] = {
      {"sm90_ragged_rows", plain_gemm<sm90::refuses_ragged_rows>,
       sm90::grouped_gemm_workspace_bytes, sm90::run_ragged_rows, true, sm90::check_ragged_rows},
      {"sm90_ragged_contraction", plain_gemm<sm90::refuses_ragged_contraction>,
       sm90::grouped_gemm_workspace_bytes, sm90::run_ragged_contraction, true,
       sm90::check_ragged_contraction},
      {"sm90_gated_rows", sm90::refuses_gated_rows, sm90::grouped_gemm_workspace_bytes,
       sm90::run_gated_rows, true, sm90::check_gated_rows},
      {"sm90_gathered_rows", sm90::refuses_gathered_rows, sm90::grouped_gemm_workspace_bytes,
       sm90::run_gathered_rows, true, sm90::check_gathered_rows},
      {"sm90_gathered_contraction", sm90::refuses_gathered_contraction,
       sm90::grouped_gemm_workspace_bytes, sm90::run_gathered_contraction, true,
       sm90::check_gathered_contraction},
      {"sm90_scattered_rows", sm90::refuses_scattered_rows, sm90::grouped_gemm_workspace_bytes,
       sm90::run_scattered_rows, true, sm90::check_scattered_rows},
      {.name = "sm90_fp8_rows",
       .refuses = plain_gemm<sm90::refuses_fp8_rows>,
       .workspace_bytes = sm90::grouped_gemm_workspace_bytes,
       .run = sm90::run_fp8_rows,
       .check = sm90::check_fp8_rows,
       .fraction_bits = 13},
      {.name = "sm90_packed_rows",
       .refuses = plain_gemm<sm90::refuses_packed_rows>,
       .workspace_bytes = sm90::packed_rows_workspace_bytes,
       .run = sm90::run_packed_rows,
       .check = sm90::check_packed_rows,
       .by_name = true},
      {"sm90_dense_rows", plain_gemm<sm90::refuses_dense_rows>, no_workspace, sm90::run_dense_rows,
       true, sm90::check_dense_rows},
      {"cuda_ragged_rows", plain_gemm<portable::refuses_ragged_rows>, no_workspace,
       portable::run_ragged_rows},
      {"cuda_ragged_contraction", plain_gemm<portable::refuses_ragged_contraction>, no_workspace,
       portable::run_ragged_contraction},
      {.name = "composed",
       .refuses = backend::refuses_composed_gemm,
       .workspace_bytes = backend::composed_gemm_workspace_bytes,
       .run = backend::composed_gemm,
       .inner = backend::composed_gemm_plans,
       .check_inner = backend::check_composed_gemm},
  };
};

template <>
struct List<OffsetsProblem> {
  static constexpr Entry<OffsetsProblem> kEntries[] = {
      {"cuda_offsets", portable::refuses_offsets, portable::offsets_workspace_bytes,
       portable::offsets},
  };
};

template <>
struct List<PermuteProblem> {
  static constexpr Entry<PermuteProblem> kEntries[] = {
      {"cuda_permute", portable::needs_sm80, no_workspace, portable::permute},
  };
};

template <>
struct List<QuantizeProblem> {
  static constexpr Entry<QuantizeProblem> kEntries[] = {
      {"cuda_cast", portable::refuses_cast, no_workspace, portable::cast},
      {"cuda_quantize", portable::refuses_quantize, portable::quantize_workspace_bytes,
       portable::quantize},
  };
};

template <>
struct List<RoutingProblem> {
  static constexpr Entry<RoutingProblem> kEntries[] = {
      {"cuda_routing", portable::refuses_routing, portable::routing_workspace_bytes,
       portable::routing},
  };
};

}  // namespace

const backend::Lists& lists() {
  static constexpr backend::Lists kLists = backend::collect<List>();
  return kLists;
}

}  // namespace cadre::cuda
