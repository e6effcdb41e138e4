#include "cuda/sm90/dense_rows.h"

#include "cadre/error.h"
#include "cuda/sm90/grouped_gemm.h"
#include "cuda/sm90/prepare.h"

namespace cadre::cuda::sm90 {

constexpr int64_t kMostColumns = int64_t(65535) * kDenseRows;  // CUDA's limit of gridDim.y

// A few of whose tiles fill clusters, a wave, and two.
static_assert(dense_tiles(64, 6, 132).width == 64 && dense_tiles(64, 6, 132).split == 8);
static_assert(dense_tiles(2048, 9, 132).width == 160 && dense_tiles(2048, 9, 132).split == 1);
static_assert(dense_tiles(32768, 1, 132).width == 128);

std::string refuses_dense_rows(const GroupedGemmProblem& p, const Device& device) {
  const DType type = info(p.lhs.kind).element;
  if (!p.dense) return "takes dense problems";
  if (std::string why = refuses_device(device); !why.empty()) return why;
  if (!is_plain(p.lhs) || p.lhs != p.rhs || (type != DType::kBf16 && type != DType::kF16) ||
      p.out != DType::kF32)
    return "takes bf16 or f16 operands, both of the same type, to f32";
  if (p.alpha || p.beta || p.bias) return "takes no alpha, beta or bias";
  if (p.lhs_major != Major::kRow || p.rhs_major != Major::kRow || p.out_major != Major::kRow ||
      p.discrete_rhs)
    return "takes row-major tensors, no pointers";
  if (p.k % kWidthUnit != 0 || p.align < kAlignment)
    return text("takes K that are multiples of ", kWidthUnit, ", and addresses and strides of ",
                kAlignment, " bytes, as TMA does");
  if (p.rows > kMostRows || p.k > kMostRows || p.n > kMostColumns)
    return text("takes R and K up to ", kMostRows, ", N up to ", kMostColumns);
  return p.unit_budget != 0 ? "has a block for each tile, and takes no budget" : "";
}

void check_dense_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_view("x", args.lhs.codes, p);
  check_view("w", args.rhs.codes, p);
}

void run_dense_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace,
                    Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  if (p.rows == 0) return;
  const int w_rows = dense_box_rows(p.n);
  const DenseTiles tiles =
      dense_tiles(p.rows, (p.n + kDenseRows - 1) / kDenseRows, plan.device.units);
  launch_dense_rows({.x = expert_map(args.lhs.codes, tiles.width),
                     .w = expert_map(args.rhs.codes, w_rows),
                     .y = static_cast<float*>(args.out.data),
                     .y_step = args.out.stride[0],
                     .rows = int(p.rows),
                     .cols = int(p.n),
                     .depth = int(p.k),
                     .w_rows = w_rows,
                     .width = tiles.width,
                     .split = tiles.split},
                    args.lhs.codes.dtype, static_cast<cudaStream_t>(on.handle));
}

}  // namespace cadre::cuda::sm90
