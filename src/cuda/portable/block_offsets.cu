#include "cuda/device/launch.h"
#include "cuda/portable/quantize_job.h"
#include "schedule/expert_rows.h"

// Offsets of transformed blocks that lie without gaps, by one thread: it is a sum over experts.
namespace cadre::cuda::portable {
namespace {

__global__ void block_offsets_kernel(const ExpertsRows of, int32_t* to) {
  int64_t end = 0;
  schedule::ExpertWalk walk(of.offsets, of.experts, of.rows);
  for (*to = 0; walk.next(); *++to = int32_t(end))
    end += code_rows(true, {0, walk.rows().count()}, 0).count;
}

}  // namespace

void launch_block_offsets(const ExpertsRows& of, int32_t* block_offsets, const QuantizeStream& on) {
  launch(block_offsets_kernel, {1, 1, 0, on.stream}, of, block_offsets);
}

}  // namespace cadre::cuda::portable
