#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "cadre/grouped_gemm.h"
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/token_places.h"

// What every family of products on Hopper makes of a plan and its arguments: refusals that all
// share, the workspace, tensor maps, and the launch parameters of ragged rows.
namespace cadre::cuda::sm90 {

constexpr int kAlignment = 16;                   ///< bytes, of what TMA reads and writes
constexpr int64_t kWidthUnit = 8;                ///< elements of 16 bits: the same 16 bytes
constexpr int64_t kMostRows = int64_t(1) << 30;  ///< see ragged_map(); and columns

std::string refuses_device(const Device&);

/// What TMA and the schedulers ask of every problem.
std::string refuses_layout(const GroupedGemmProblem&);

/// Views that TMA takes: a plan does not know them, so it was made for what the problem promises.
void check_view(std::string_view what, const TensorView&, const GroupedGemmProblem&);

/// Scales along rows: of one row too, each block begins a copy.
void check_scales(std::string_view what, const TensorView&, const GroupedGemmProblem&);

/// A block an SM, in clusters.
int blocks_of(const GroupedGemmPlan&);

Plain plain(const TensorView&, const void* const* discrete);

/// A batch without rows may be nowhere. Its boxes are all zeros, but TMA faults unless the address
/// is one of the device; that of the offsets will do.
TensorView somewhere(const TensorView&, const GroupedGemmArgs&);

/// The tensor that has a matrix for each expert, and its boxes.
struct ExpertViews {
  const TensorView& view;
  const void* const* pointers;  ///< of discrete experts
  int box_rows;
  std::optional<GluLayout> glu{};  ///< rows of gate and up, in this layout
  int box_columns = 0;             ///< as of expert_map()
  bool clears = true;              ///< the count of tiles; else what else writes there zeroes it

  /// A map of them all, unless they are discrete, or their rows lie in blocks, which take the
  /// dimension of experts.
  bool one_map() const { return pointers == nullptr && glu != GluLayout::kInterleave32; }
  CUtensorMap map(const TensorView& v) const {
    return glu ? glu_map(v, *glu) : expert_map(v, box_rows, box_columns);
  }
};

/// The map of packed experts, or where those of discrete experts lie; the count of tiles.
struct Prepared {
  CUtensorMap map;
  const CUtensorMap* maps;
  unsigned long long* taken;
};

/// Writes what a kernel finds in the workspace: E maps of discrete experts, and, if clusters count,
/// the count, zero if the views clear it.
Prepared prepare(const ExpertViews&, const GroupedGemmPlan&, Workspace, cudaStream_t);

/// What lies behind the maps in the workspace.
char* behind_maps(const GroupedGemmPlan&, Workspace);

/// Where in the workspace wgrad has the places of rows of tokens, which are not written yet.
TokenPlaces places_of(const GroupedGemmPlan&, Workspace);

/// Rows of nobody that become zero.
TailRows tail_rows(const TensorView&, Tail);

/// What the kernels of ragged rows have in common; the output's map is left to the caller.
RaggedRowsParams rows_params(const GroupedGemmPlan&, const GroupedGemmArgs&, const Prepared&);

/// Maps of the output, and of an addend, that leaves, and comes, in boxes of so many rows.
void set_output(RaggedRowsParams&, const GroupedGemmArgs&, int box_rows);

}  // namespace cadre::cuda::sm90
