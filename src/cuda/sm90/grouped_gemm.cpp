#include "cuda/sm90/grouped_gemm.h"

#include <algorithm>

#include "cadre/error.h"
#include "cuda/check.h"
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/expert_maps.h"
#include "cuda/sm90/ragged_contraction.h"
#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int kAlignment = 16;                   // bytes, of what TMA reads and writes
constexpr int64_t kWidthUnit = 8;                // elements of 16 bits: the same 16 bytes
constexpr int64_t kCountBytes = 128;             // of the workspace, behind the maps
constexpr int64_t kMostRows = int64_t(1) << 30;  // see ragged_map()

bool is_16_bit(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16; }
DType dtype_of(const Format& format) { return info(format.kind).element; }

/// What both families ask for.
std::string refuses(const GroupedGemmProblem& p, const Device& device) {
  const DType type = dtype_of(p.lhs);
  if (device.sm != 90) return text("is for sm_90, not sm_", device.sm);
  if (!is_plain(p.lhs) || p.lhs != p.rhs || !is_16_bit(type))
    return "takes bf16 or f16 operands, both of the same type";
  if (p.out != type && p.out != DType::kF32) return "writes f32 or the type of its operands";
  if (p.n % kWidthUnit != 0 || p.k % kWidthUnit != 0)
    return text("takes N and K that are multiples of ", kWidthUnit, ", as TMA does");
  if (p.align < kAlignment)
    return text("takes addresses and strides of ", kAlignment, " bytes, as TMA does; align is ",
                p.align);
  if (p.rows > kMostRows) return text("takes R up to ", kMostRows);
  if (p.lhs_major != Major::kRow || p.out_major != Major::kRow)
    return "takes a row-major batch and output";
  if (p.unit_budget == 1) return "works in pairs of SMs; the budget is one";
  return {};
}

/// A block an SM, in clusters.
int clusters_of(const GroupedGemmProblem& p, const Device& device) {
  const int units = p.unit_budget == 0 ? device.units : std::min(device.units, p.unit_budget);
  return std::max(1, units / kCluster);
}
int blocks_of(const GroupedGemmPlan& plan) {
  return clusters_of(plan.problem, plan.device) * kCluster;
}

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/// Whether clusters take tiles as they go: if there can be many stages for each. How many there are
/// only the device knows.
bool counts_tiles(const GroupedGemmProblem& p, const Device& device) {
  const bool fprop = p.pass == Pass::kFprop, wgrad = p.pass == Pass::kWgrad;
  const int64_t stages =
      wgrad ? parts_of(p.n, kClusterRows) * parts_of(p.k, kMostCols) * (p.rows / kDepth + p.experts)
            : parts_of(fprop ? p.n : p.k, kClusterRows) * (p.rows / kMostCols + p.experts) *
                  parts_of(fprop ? p.k : p.n, kDepth);
  return stages > kCountedStages * clusters_of(p, device);
}

/// Views that TMA takes: a plan does not know them, so it was made for what the problem promises.
void check_view(std::string_view what, const TensorView& v, const GroupedGemmProblem& p) {
  const auto is_multiple = [&](int64_t step) { return bytes_for(v.dtype, step) % kAlignment == 0; };
  bool good = reinterpret_cast<uintptr_t>(v.data) % kAlignment == 0;
  for (int d = 0; d < v.rank; ++d) good = good && (v.stride[d] == 1 || is_multiple(v.stride[d]));
  require(
      good, "grouped_gemm: ", what, " is ", v, " at ", v.data,
      ", must begin and step by multiples of 16 bytes, as the problem promises; copy it, or plan "
      "with align=",
      bytes_for(v.dtype, 1), " [", p, "]");
}

/// A batch without rows may be nowhere. Its boxes are all zeros, but TMA faults unless the address
/// is one of the device; that of the offsets will do.
TensorView somewhere(const TensorView& v, const GroupedGemmArgs& args) {
  TensorView moved = v;
  const auto* offsets = reinterpret_cast<const char*>(args.offsets.data);
  const char* aligned = offsets - reinterpret_cast<uintptr_t>(offsets) % 16;
  if (v.shape[0] == 0) moved.data = const_cast<char*>(aligned);
  return moved;
}

/// One expert of a packed tensor, without its address.
TensorView one_expert(const TensorView& v) {
  return view(nullptr, v.dtype, {v.shape[1], v.shape[2]}, {v.stride[1], v.stride[2]});
}

Plain plain(const TensorView& v, const void* const* discrete) {
  return {v.data, discrete, v.dtype, v.stride[0]};
}

struct ExpertViews {
  const TensorView& view;
  const void* const* pointers;  ///< of discrete experts
  int box_rows;
};

/// The map of packed experts, or where those of discrete experts lie; the count of tiles.
struct Prepared {
  CUtensorMap map;
  const CUtensorMap* maps;
  unsigned long long* taken;
};

/// Writes what a kernel finds in the workspace: E maps of discrete experts, then the count, zero,
/// if clusters count.
Prepared prepare(const ExpertViews& v, const GroupedGemmPlan& plan, Workspace workspace,
                 cudaStream_t stream) {
  auto* end = static_cast<char*>(workspace.data) + plan.workspace_bytes;
  auto* taken = counts_tiles(plan.problem, plan.device)
                    ? reinterpret_cast<unsigned long long*>(end - kCountBytes)
                    : nullptr;
  if (v.pointers == nullptr) {
    if (taken != nullptr)
      check(cudaMemsetAsync(taken, 0, sizeof(*taken), stream), "zero the count of tiles");
    return {expert_map(v.view, v.box_rows), nullptr, taken};
  }
  TensorView one = one_expert(v.view);
  one.data = workspace.data;  // any address that is aligned; each expert puts its own in
  const CUtensorMap map = expert_map(one, v.box_rows);
  auto* maps = static_cast<CUtensorMap*>(workspace.data);
  write_expert_maps(map, v.pointers, plan.problem.experts, {maps, taken}, stream);
  return {map, maps, taken};
}

}  // namespace

std::string refuses_ragged_rows(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  return refuses(p, device);
}

std::string refuses_ragged_contraction(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass != Pass::kWgrad) return "takes wgrad";
  if (p.rhs_major != Major::kRow) return "takes a row-major x";
  return refuses(p, device);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  const int64_t maps = p.discrete_rhs || p.discrete_out ? p.experts : 0;
  return maps * int64_t(sizeof(CUtensorMap)) + (counts_tiles(p, device) ? kCountBytes : 0);
}

void check_ragged_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  const bool fprop = p.pass == Pass::kFprop;
  check_view(fprop ? "x" : "dy", args.lhs.codes, p);
  check_view("w", args.rhs.codes, p);
  check_view(fprop ? "y" : "dx", args.out, p);
}

void check_ragged_contraction(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_view("dy", args.lhs.codes, p);
  check_view("x", args.rhs.codes, p);
  check_view("dw", args.out, p);
}

void run_ragged_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                     Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const bool fprop = p.pass == Pass::kFprop;
  const TensorView &x = args.lhs.codes, &w = args.rhs.codes, &y = args.out;
  if (p.rows == 0) return;
  const bool k_major = fprop == (p.rhs_major == Major::kRow);
  const Prepared experts = prepare({w, args.rhs.discrete, k_major ? kWeightRows : kWeightDepth},
                                   plan, workspace, stream);
  RaggedRowsParams params{.x = {},
                          .w = experts.map,
                          .y = ragged_map(y, rows_of_part(p.out)),
                          .experts = experts.maps,
                          .offsets = args.offsets.data,
                          .taken = experts.taken,
                          .rows = p.rows,
                          .expert_count = p.experts,
                          .cols = int(fprop ? p.n : p.k),
                          .depth = int(fprop ? p.k : p.n),
                          .alpha = args.alpha,
                          .beta = args.beta,
                          .c = {args.c.data, nullptr, args.c.dtype, args.c.stride[0]},
                          .bias = plain(args.bias, args.discrete_bias),
                          .bias_scale = args.bias_scale,
                          .tail = p.tail == Tail::kZero ? y.data : nullptr,
                          .tail_step = bytes_for(y.dtype, y.stride[0])};
  for (int i = 0; i < kBoxes; ++i) params.x[i] = ragged_map(x, kBoxRows * (i + 1));
  find_ragged_rows({k_major, w.dtype, p.out})(params, blocks_of(plan), stream);
}

void run_ragged_contraction(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                            Workspace workspace, Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const TensorView dy = somewhere(args.lhs.codes, args), x = somewhere(args.rhs.codes, args);
  const TensorView& dw = args.out;
  const auto* pointers = const_cast<const void* const*>(args.discrete_out);
  const Prepared experts = prepare({dw, pointers, kGradientRows}, plan, workspace, stream);
  const int depth = contraction_depth(p.out);
  const bool adds = p.out != DType::kF32 && p.accumulate != Accumulate::kNo;  // floats by TMA
  const RaggedContractionParams params{.a = ragged_map(dy, depth),
                                       .b = ragged_map(x, depth),
                                       .dw = experts.map,
                                       .experts = experts.maps,
                                       .offsets = args.offsets.data,
                                       .taken = experts.taken,
                                       .rows = p.rows,
                                       .expert_count = p.experts,
                                       .out_rows = int(p.n),
                                       .cols = int(p.k),
                                       .alpha = args.alpha,
                                       .old = plain(dw, pointers),
                                       .old_row_step = dw.stride[1],
                                       .has_epilogue = args.alpha != nullptr || adds,
                                       .accumulate = p.accumulate,
                                       .flags = args.accumulate};
  find_ragged_contraction({x.dtype, p.out})(params, blocks_of(plan), stream);
}

}  // namespace cadre::cuda::sm90
