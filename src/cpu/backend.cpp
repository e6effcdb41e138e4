// The CPU's implementation lists, best first; the only place that has them. The walk takes the
// first entry that does not refuse, and the last one, the reference, takes everything.
#include "backend/lists.h"
#include "cpu/activation.h"
#include "cpu/bias_grad.h"
#include "cpu/dequantize.h"
#include "cpu/grouped_gemm.h"
#include "cpu/offsets.h"
#include "cpu/permute.h"
#include "cpu/quantize.h"
#include "cpu/reference/activation.h"
#include "cpu/reference/bias_grad.h"
#include "cpu/reference/dequantize.h"
#include "cpu/reference/grouped_gemm.h"
#include "cpu/reference/offsets.h"
#include "cpu/reference/permute.h"
#include "cpu/reference/quantize.h"
#include "cpu/reference/routing.h"
#include "cpu/routing.h"

namespace cadre::cpu {

using backend::Entries;
using backend::Entry;
using backend::no_workspace;
using backend::takes_all;

Entries<ActivationProblem, ActivationArgs> entries(backend::ActivationOp) {
  static constexpr Entry<ActivationProblem, ActivationArgs> kList[] = {
      {"cpu", takes_all, no_workspace, activation},
      {"cpu_reference", takes_all, no_workspace, reference::activation},
  };
  return kList;
}

Entries<BiasGradProblem, BiasGradArgs> entries(backend::BiasGradOp) {
  static constexpr Entry<BiasGradProblem, BiasGradArgs> kList[] = {
      {"cpu", takes_all, no_workspace, bias_grad},
      {"cpu_reference", takes_all, no_workspace, reference::bias_grad},
  };
  return kList;
}

Entries<DequantizeProblem, DequantizeArgs> entries(backend::DequantizeOp) {
  static constexpr Entry<DequantizeProblem, DequantizeArgs> kList[] = {
      {"cpu", takes_all, no_workspace, dequantize},
      {"cpu_reference", takes_all, no_workspace, reference::dequantize},
  };
  return kList;
}

Entries<GroupedGemmProblem, GroupedGemmArgs> entries(backend::GroupedGemmOp) {
  static constexpr Entry<GroupedGemmProblem, GroupedGemmArgs> kList[] = {
      {"cpu_avx512_bf16", refuses_grouped_gemm_tiles_bf16, grouped_gemm_tiles_bf16_workspace_bytes,
       grouped_gemm_tiles_bf16},
      {"cpu_onednn_bf16", refuses_grouped_gemm_bf16, grouped_gemm_bf16_workspace_bytes,
       grouped_gemm_bf16},
      {"cpu_avx512", refuses_grouped_gemm_tiles, grouped_gemm_tiles_workspace_bytes,
       grouped_gemm_tiles},
      {"cpu_onednn", takes_all, grouped_gemm_f32_workspace_bytes, grouped_gemm_f32},
      {"cpu_reference", takes_all, no_workspace, reference::grouped_gemm},
  };
  return kList;
}

Entries<OffsetsProblem, OffsetsArgs> entries(backend::OffsetsOp) {
  static constexpr Entry<OffsetsProblem, OffsetsArgs> kList[] = {
      {"cpu", takes_all, offsets_workspace_bytes, offsets},
      {"cpu_reference", takes_all, no_workspace, reference::offsets},
  };
  return kList;
}

Entries<PermuteProblem, PermuteArgs> entries(backend::PermuteOp) {
  static constexpr Entry<PermuteProblem, PermuteArgs> kList[] = {
      {"cpu", takes_all, no_workspace, permute},
      {"cpu_reference", takes_all, no_workspace, reference::permute},
  };
  return kList;
}

Entries<QuantizeProblem, QuantizeArgs> entries(backend::QuantizeOp) {
  static constexpr Entry<QuantizeProblem, QuantizeArgs> kList[] = {
      {"cpu", takes_all, quantize_workspace_bytes, quantize},
      {"cpu_reference", takes_all, no_workspace, reference::quantize},
  };
  return kList;
}

Entries<RoutingProblem, RoutingArgs> entries(backend::RoutingOp) {
  static constexpr Entry<RoutingProblem, RoutingArgs> kList[] = {
      {"cpu", takes_all, routing_workspace_bytes, routing},
      {"cpu_reference", takes_all, reference::routing_workspace_bytes, reference::routing},
  };
  return kList;
}

}  // namespace cadre::cpu
