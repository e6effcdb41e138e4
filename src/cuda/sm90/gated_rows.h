#pragma once
#include "cadre/activation_kind.h"
#include "cuda/sm90/ragged_rows.h"

namespace cadre::cuda::sm90 {

constexpr int kGatedPartCols = 16;      ///< rows of h and z in one box
constexpr int kGatedPartFeatures = 32;  ///< and columns

/// What the kernel of fprop with a gated activation is launched with: y is h, and the rows of w
/// come in turns of eight, see glu_map().
struct GatedRowsParams : RaggedRowsParams {
  CUtensorMap z[2]{};  ///< columns of gate and of up
  int z_step = 1;      ///< columns of these from one feature to the next
  int keeps_z = 0;     ///< z is stored; 32 bits, which load in one step
  int in_blocks = 0;   ///< w is interleaved by 32
  int in_pairs = 0;    ///< w is interleaved by 1
  ActivationKind kind = ActivationKind::kSwiGlu;
  GluLayout layout = GluLayout::kConcat;
  ActivationConstants constants{};
  const float* prob = nullptr;  ///< [R]
  TailRows z_tail{};
};

/// One instance, launched; instances/ has them, a file each.
template <DType kType>
void launch_gated_rows(const GatedRowsParams&, int blocks, cudaStream_t);

/// The instance for operands and outputs of that type; null if none was built.
using LaunchGatedRows = void (*)(const GatedRowsParams&, int blocks, cudaStream_t);
LaunchGatedRows find_gated_rows(DType);

}  // namespace cadre::cuda::sm90
