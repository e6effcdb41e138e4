#include "cuda/sm90/prepare.h"

#include <algorithm>

#include "cadre/error.h"
#include "cuda/sm90/clear_count.h"
#include "cuda/sm90/expert_maps.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/grouped_gemm.h"
#include "cuda/sm90/short_product.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int64_t kCountBytes = 128;  // of the workspace, behind the maps

int clusters_of(const GroupedGemmProblem& p, const Device& device) {
  const int units = p.unit_budget == 0 ? device.units : std::min(device.units, p.unit_budget);
  return std::max(1, units / kCluster);
}

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/// Stages of all tiles, at most: how many there are only the device knows.
int64_t most_stages(const GroupedGemmProblem& p) {
  const bool fprop = p.pass == Pass::kFprop;
  const int64_t cols = fprop ? p.n : p.k, depth = fprop ? p.k : p.n;
  if (p.pass == Pass::kWgrad)
    return parts_of(p.n, kClusterRows) * parts_of(p.k, kMostCols) * (p.rows / kDepth + p.experts);
  const int64_t experts = std::min<int64_t>(p.experts, p.rows);  // that have rows
  if (!is_plain(p.lhs))
    return parts_of(cols, cols_of_codes(p.out)) * (p.rows / kClusterRows + experts) *
           parts_of(depth, kDepthOfCodes);
  const bool narrow =
      has_narrow_tiles(p.rows, p.experts, cols) && p.gather == Gather::kNo && !p.scatter;
  const int64_t width = narrow ? kColsOfFewRows : kMostCols;
  return parts_of(cols, kClusterRows) * (p.rows / width + experts) * parts_of(depth, kDepth);
}

/// Whether clusters take tiles as they go: if there can be many stages for each.
bool counts_tiles(const GroupedGemmProblem& p, const Device& device) {
  return most_stages(p) > kCountedStages * clusters_of(p, device);
}

int64_t bytes_of_maps(const GroupedGemmProblem& p) {
  const bool blocks = p.activation && p.activation->layout == GluLayout::kInterleave32;
  const int64_t maps = p.discrete_rhs || p.discrete_out || blocks ? p.experts : 0;
  return maps * int64_t(sizeof(CUtensorMap));
}

/// Whether the places of rows of tokens lie in the workspace. What writes them zeroes the count.
bool has_places(const GroupedGemmProblem& p) {
  return p.pass == Pass::kWgrad && p.gather != Gather::kNo;
}

void check_steps(bool good, std::string_view what, const TensorView& v,
                 const GroupedGemmProblem& p) {
  require(
      good && reinterpret_cast<uintptr_t>(v.data) % kAlignment == 0, "grouped_gemm: ", what, " is ",
      v, " at ", v.data,
      ", must begin and step by multiples of 16 bytes, as the problem promises; copy it, or plan "
      "with align=",
      bytes_for(v.dtype, 1), " [", p, "]");
}

bool is_step(const TensorView& v, int64_t step) {
  return bytes_for(v.dtype, step) % kAlignment == 0;
}

/// One expert of a packed tensor, without its address.
TensorView one_expert(const TensorView& v) {
  return view(nullptr, v.dtype, {v.shape[1], v.shape[2]}, {v.stride[1], v.stride[2]});
}

}  // namespace

std::string refuses_device(const Device& device) {
  return device.sm == 90 ? std::string() : text("is for sm_90, not sm_", device.sm);
}

std::string refuses_layout(const GroupedGemmProblem& p) {
  if (p.dense) return "takes rows of experts, which offsets tell apart";
  if (p.align < kAlignment)
    return text("takes addresses and strides of ", kAlignment, " bytes, as TMA does; align is ",
                p.align);
  if (std::max({p.rows, p.n, p.k}) > kMostRows) return text("takes R, N and K up to ", kMostRows);
  if (p.lhs_major != Major::kRow || p.out_major != Major::kRow)
    return "takes a row-major batch and output";
  if (p.unit_budget == 1) return "works in pairs of SMs; the budget is one";
  return {};
}

int blocks_of(const GroupedGemmPlan& plan) {
  return clusters_of(plan.problem, plan.device) * kCluster;
}

void check_view(std::string_view what, const TensorView& v, const GroupedGemmProblem& p) {
  bool good = true;
  for (int d = 0; d < v.rank; ++d)
    good = good && (v.shape[d] <= 1 || v.stride[d] == 1 || is_step(v, v.stride[d]));
  check_steps(good, what, v, p);
}

void check_scales(std::string_view what, const TensorView& v, const GroupedGemmProblem& p) {
  check_steps(v.shape[1] <= 1 || is_step(v, v.stride[1]), what, v, p);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  const int64_t words = has_places(p) ? kPlaceBlocks + p.rows : 0;
  const int64_t places = parts_of(4 * words, kCountBytes) * kCountBytes;
  return bytes_of_maps(p) + places + (counts_tiles(p, device) ? kCountBytes : 0);
}

char* behind_maps(const GroupedGemmPlan& plan, Workspace workspace) {
  return static_cast<char*>(workspace.data) + bytes_of_maps(plan.problem);
}

TokenPlaces places_of(const GroupedGemmPlan& plan, Workspace workspace) {
  auto* lacks = reinterpret_cast<uint32_t*>(behind_maps(plan, workspace));
  return {.places = lacks + kPlaceBlocks, .lacks = lacks};
}

Plain plain(const TensorView& v, const void* const* discrete) {
  return {v.data, discrete, v.dtype, v.stride[0]};
}

TensorView somewhere(const TensorView& v, const GroupedGemmArgs& args) {
  TensorView moved = v;
  const auto* offsets = reinterpret_cast<const char*>(args.offsets.data);
  const char* aligned = offsets - reinterpret_cast<uintptr_t>(offsets) % 16;
  if (v.shape[0] == 0) moved.data = const_cast<char*>(aligned);
  return moved;
}

Prepared prepare(const ExpertViews& v, const GroupedGemmPlan& plan, Workspace workspace,
                 cudaStream_t stream) {
  auto* end = static_cast<char*>(workspace.data) + plan.workspace_bytes;
  auto* taken = counts_tiles(plan.problem, plan.device)
                    ? reinterpret_cast<unsigned long long*>(end - kCountBytes)
                    : nullptr;
  auto* cleared = v.clears ? taken : nullptr;
  if (v.one_map()) {
    if (cleared != nullptr) clear_count(cleared, stream);
    return {v.map(v.view), nullptr, taken};
  }
  TensorView one = one_expert(v.view);
  one.data = workspace.data;  // any address that is aligned; each expert puts its own in
  const CUtensorMap map = v.map(one);
  auto* maps = static_cast<CUtensorMap*>(workspace.data);
  const ExpertAddresses from{v.pointers, static_cast<const char*>(v.view.data),
                             bytes_for(v.view.dtype, v.view.stride[0])};
  write_expert_maps(map, from, plan.problem.experts, {maps, cleared}, stream);
  return {map, maps, taken};
}

TailRows tail_rows(const TensorView& v, Tail tail) {
  if (tail == Tail::kKeep) return {};
  return {v.data, bytes_for(v.dtype, v.stride[0]), bytes_for(v.dtype, v.shape[1])};
}

void set_output(RaggedRowsParams& params, const GroupedGemmArgs& args, int box_rows) {
  params.y = ragged_map(args.out, box_rows);
  if (args.beta != nullptr) params.c = ragged_map(args.c, box_rows);
}

RaggedRowsParams rows_params(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                             const Prepared& experts) {
  const GroupedGemmProblem& p = plan.problem;
  const bool fprop = p.pass == Pass::kFprop;
  RaggedRowsParams params{.x = {},
                          .w = experts.map,
                          .y = {},
                          .c = {},
                          .experts = experts.maps,
                          .offsets = args.offsets.data,
                          .taken = experts.taken,
                          .rows = p.rows,
                          .expert_count = p.experts,
                          .cols = int(fprop ? p.n : p.k),
                          .depth = int(fprop ? p.k : p.n),
                          .alpha = args.alpha,
                          .beta = args.beta,
                          .bias = plain(args.bias, args.discrete_bias),
                          .bias_scale = args.bias_scale,
                          .tail = tail_rows(args.out, p.tail)};
  const TensorView& x = args.lhs.codes;
  for (int i = 0; i < kBoxes && p.gather == Gather::kNo; ++i)
    params.x[i] = ragged_map(x, kBoxRows * (i + 1));
  return params;
}

}  // namespace cadre::cuda::sm90
