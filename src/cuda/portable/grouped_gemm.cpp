#include "cuda/portable/grouped_gemm.h"

#include <algorithm>

#include "cuda/portable/launch.h"
#include "cuda/portable/ragged_contraction.h"
#include "cuda/portable/ragged_rows.h"

namespace cadre::cuda::portable {
namespace {

constexpr int kBlocksPerSm = 2;  // resident at once

std::string refuses(const GroupedGemmProblem& p, const Device& device) {
  if (!is_plain(p.lhs) || !is_plain(p.rhs)) return "takes f32, bf16 or f16 operands";
  return needs_sm80(p, device);
}

/// A budget counts SMs, and a block runs on one.
int blocks_of(const GroupedGemmPlan& plan) {
  const int units = plan.device.units, budget = plan.problem.unit_budget;
  return std::max(1, budget == 0 ? kBlocksPerSm * units : std::min(units, budget));
}

Multiplicand multiplicand_of(const GroupedGemmProblem& p) {
  if (p.lhs != p.rhs || p.lhs.kind == FormatKind::kF32) return Multiplicand::kF32;
  return p.lhs.kind == FormatKind::kBf16 ? Multiplicand::kBf16 : Multiplicand::kF16;
}

/// `across` and `deep`: the dimensions of the view that run so.
Operand operand_of(const cadre::Operand& operand, int across, int deep) {
  const TensorView& v = operand.codes;
  const auto bytes = [&](int dim) { return bytes_for(v.dtype, v.stride[size_t(dim)]); };
  return {v.data, operand.discrete, v.dtype, bytes(0), bytes(across), bytes(deep)};
}

/// [R, C], or [E, N, K] with its pointers if it is discrete.
OutputMatrix output_of(const TensorView& v, Major major, void* const* discrete = nullptr) {
  const int line = major == Major::kRow ? v.rank - 2 : v.rank - 1;
  const auto bytes = [&](int dim) { return bytes_for(v.dtype, v.stride[size_t(dim)]); };
  const int64_t expert = v.rank == 3 ? bytes(0) : 0;
  return {v.data, discrete, v.dtype, expert, bytes(line), major == Major::kColumn};
}

OutputMatrix bias_of(const GroupedGemmArgs& args) {
  const TensorView& v = args.bias;
  return {v.data, const_cast<void* const*>(args.discrete_bias), v.dtype,
          bytes_for(v.dtype, v.stride[0])};
}

}  // namespace

std::string refuses_ragged_rows(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  return refuses(p, device);
}

std::string refuses_ragged_contraction(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass != Pass::kWgrad) return "takes wgrad";
  return refuses(p, device);
}

void run_ragged_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace,
                     Stream stream) {
  const GroupedGemmProblem& p = plan.problem;
  if (p.rows == 0) return;
  const bool fprop = p.pass == Pass::kFprop;
  const RaggedRowsArgs kernel_args{
      .x = operand_of(args.lhs, 0, 1),
      .w = fprop ? operand_of(args.rhs, 1, 2) : operand_of(args.rhs, 2, 1),
      .y = output_of(args.out, p.out_major),
      .c = p.beta ? output_of(args.c, p.out_major) : OutputMatrix{},
      .offsets = args.offsets.data,
      .rows = p.rows,
      .cols = fprop ? p.n : p.k,
      .depth = fprop ? p.k : p.n,
      .experts = p.experts,
      .zero_tail = p.tail == Tail::kZero,
      .alpha = args.alpha,
      .beta = args.beta,
      .bias = p.bias ? bias_of(args) : OutputMatrix{},
      .bias_scale = args.bias_scale,
      .all_rows = {0, int32_t(p.rows)}};
  ragged_rows(multiplicand_of(p), kernel_args, blocks_of(plan), stream_of(stream));
}

void run_ragged_contraction(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace,
                            Stream stream) {
  const GroupedGemmProblem& p = plan.problem;
  const RaggedContractionArgs kernel_args{.dy = operand_of(args.lhs, 1, 0),
                                          .x = operand_of(args.rhs, 1, 0),
                                          .dw = output_of(args.out, p.out_major, args.discrete_out),
                                          .offsets = args.offsets.data,
                                          .rows = p.rows,
                                          .n = p.n,
                                          .k = p.k,
                                          .experts = p.experts,
                                          .alpha = args.alpha,
                                          .accumulate = p.accumulate,
                                          .flags = args.accumulate};
  ragged_contraction(multiplicand_of(p), kernel_args, blocks_of(plan), stream_of(stream));
}

}  // namespace cadre::cuda::portable
