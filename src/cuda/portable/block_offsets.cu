#include "cuda/device/launch.h"
#include "cuda/device/scan.h"
#include "cuda/portable/quantize_job.h"
#include "schedule/expert_rows.h"

// Offsets of transformed blocks that lie without gaps: a sum over experts, by one block.
namespace cadre::cuda::portable {
namespace {

constexpr int kExpertsAtOnce = 256;

/// As schedule::ExpertWalk each expert begins where the one before ended or later.
__global__ void __launch_bounds__(kExpertsAtOnce)
    block_offsets_kernel(const ExpertsRows of, int32_t* to) {
  __shared__ int64_t partial[32], ends[kExpertsAtOnce + 1];
  const int i = int(threadIdx.x);
  const int64_t used = schedule::rows_used(of.offsets, of.experts, of.rows);
  int64_t begin = schedule::clamp_row(of.offsets[0], 0, used), before = 0;
  if (i == 0) to[0] = 0;
  for (int expert = i; expert - i < of.experts; expert += kExpertsAtOnce) {
    const bool is_there = expert < of.experts;
    const int64_t end =
        is_there ? schedule::clamp_row(of.offsets[expert + 1], 0, used) : int64_t(0);
    ends[i + 1] = max(begin, block_scan(end, partial, Largest()).upto);
    if (i == 0) ends[0] = begin;
    __syncthreads();
    const int64_t rows = code_rows(true, {0, ends[i + 1] - ends[i]}, 0).count;
    const Scanned blocks = block_scan(is_there ? rows : int64_t(0), partial, Sum());
    if (is_there) to[expert + 1] = int32_t(before + blocks.upto);
    begin = ends[kExpertsAtOnce];
    before += blocks.all;
    __syncthreads();
  }
}

}  // namespace

void launch_block_offsets(const ExpertsRows& of, int32_t* block_offsets, const QuantizeStream& on) {
  launch(block_offsets_kernel, {1, kExpertsAtOnce, 0, on.stream}, of, block_offsets);
}

}  // namespace cadre::cuda::portable
