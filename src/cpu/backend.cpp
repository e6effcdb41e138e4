// The CPU's implementation lists, best first; the only place that has them. The walk takes the
// first entry that does not refuse; the reference takes every problem that is one operation, and
// `composed` those that are several.
#include "backend/composed_activation.h"
#include "backend/composed_gemm.h"
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
#include "cpu/scattered_gemm.h"

namespace cadre::cpu {

using backend::Entry;
using backend::no_workspace;
using backend::plain_activation;
using backend::plain_gemm;
using backend::takes_all;

namespace {

template <class Problem>
struct List;

template <>
struct List<ActivationProblem> {
  static constexpr Entry<ActivationProblem> kEntries[] = {
      {"cpu", plain_activation<takes_all>, no_workspace, activation},
      {.name = "composed",
       .refuses = backend::refuses_composed_activation,
       .workspace_bytes = backend::composed_activation_workspace_bytes,
       .run = backend::composed_activation,
       .inner = backend::composed_activation_plans},
      {"cpu_reference", plain_activation<takes_all>, no_workspace, reference::activation},
  };
};

template <>
struct List<BiasGradProblem> {
  static constexpr Entry<BiasGradProblem> kEntries[] = {
      {"cpu", takes_all, no_workspace, bias_grad},
      {"cpu_reference", takes_all, no_workspace, reference::bias_grad},
  };
};

template <>
struct List<DequantizeProblem> {
  static constexpr Entry<DequantizeProblem> kEntries[] = {
      {"cpu", takes_all, no_workspace, dequantize},
      {"cpu_reference", takes_all, no_workspace, reference::dequantize},
  };
};

template <>
struct List<GroupedGemmProblem> {
  static constexpr Entry<GroupedGemmProblem> kEntries[] = {
      {"cpu_avx512_bf16", plain_gemm<refuses_grouped_gemm_tiles_bf16>,
       grouped_gemm_tiles_bf16_workspace_bytes, grouped_gemm_tiles_bf16},
      {"cpu_onednn_bf16", plain_gemm<refuses_grouped_gemm_bf16>, grouped_gemm_bf16_workspace_bytes,
       grouped_gemm_bf16},
      {"cpu_avx512", plain_gemm<refuses_grouped_gemm_tiles>, grouped_gemm_tiles_workspace_bytes,
       grouped_gemm_tiles},
      {"cpu_onednn", plain_gemm<refuses_grouped_gemm_f32>, grouped_gemm_f32_workspace_bytes,
       grouped_gemm_f32},
      {"cpu_portable", plain_gemm<refuses_grouped_gemm_portable>,
       grouped_gemm_portable_workspace_bytes, grouped_gemm_portable},
      {.name = "composed",
       .refuses = backend::refuses_composed_gemm,
       .workspace_bytes = backend::composed_gemm_workspace_bytes,
       .run = backend::composed_gemm,
       .inner = backend::composed_gemm_plans,
       .check_inner = backend::check_composed_gemm},
      {.name = "cpu_scattered",
       .refuses = refuses_scattered_gemm,
       .workspace_bytes = scattered_gemm_workspace_bytes,
       .run = scattered_gemm,
       .inner = scattered_gemm_plans},
      {"cpu_reference", plain_gemm<takes_all>, no_workspace, reference::grouped_gemm},
  };
};

template <>
struct List<OffsetsProblem> {
  static constexpr Entry<OffsetsProblem> kEntries[] = {
      {"cpu", takes_all, offsets_workspace_bytes, offsets},
      {"cpu_reference", takes_all, no_workspace, reference::offsets},
  };
};

template <>
struct List<PermuteProblem> {
  static constexpr Entry<PermuteProblem> kEntries[] = {
      {"cpu", takes_all, no_workspace, permute},
      {"cpu_reference", takes_all, no_workspace, reference::permute},
  };
};

template <>
struct List<QuantizeProblem> {
  static constexpr Entry<QuantizeProblem> kEntries[] = {
      {"cpu", refuses_quantize, quantize_workspace_bytes, quantize},
      {"cpu_reference", takes_all, no_workspace, reference::quantize},
  };
};

template <>
struct List<RoutingProblem> {
  static constexpr Entry<RoutingProblem> kEntries[] = {
      {"cpu", takes_all, routing_workspace_bytes, routing},
      {"cpu_reference", takes_all, reference::routing_workspace_bytes, reference::routing},
  };
};

}  // namespace

const backend::Lists& lists() {
  static constexpr backend::Lists kLists = backend::collect<List>();
  return kLists;
}

}  // namespace cadre::cpu
