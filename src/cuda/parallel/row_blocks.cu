#include "cuda/parallel/row_blocks.h"

#include <algorithm>

#include "cuda/device/flag.h"
#include "cuda/device/launch.h"
#include "cuda/device/scan.h"

namespace cadre::cuda {
namespace {

using schedule::BlockNote;
using schedule::RowBlocks;

constexpr int kThreads = 256, kMostBlocks = 1024;

__global__ void places_kernel(const __grid_constant__ RowBlocks blocks) {
  begin_dependent();
  const int64_t all = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < blocks.steps(); i += all)
    blocks.make_places(i);
}

/// Of one block, whose threads take ranks. Of equal ones the first is found: as the largest of what
/// lies behind each.
__global__ void judge_kernel(const __grid_constant__ RowBlocks blocks) {
  __shared__ int64_t partial[32];
  begin_dependent();
  int64_t fullest = 0, most = 0, other = 0;
  for (int q = int(threadIdx.x); q < blocks.ranks; q += int(blockDim.x)) {
    const RowBlocks::Rows here = blocks.rows_for(q);
    const int64_t behind = blocks.ranks - q;
    fullest = max(fullest, here.all << 32 | behind);
    most = max(most, here.most);
    if (blocks.difference(q) != BlockNote::kNothing) other = max(other, behind);
    if (blocks.routed != nullptr) blocks.routed[q] = int32_t(here.all);
  }
  fullest = block_scan(fullest, partial, Largest{}).all;
  most = block_scan(most, partial, Largest{}).all;
  other = block_scan(other, partial, Largest{}).all;
  if (threadIdx.x != 0) return;
  const BlockNote note =
      blocks.judge(blocks.ranks - int(other), blocks.ranks - int(fullest & 0xffffffff), most);
  *blocks.verdict = note.what != BlockNote::kNothing;
  BlockNote& to = *blocks.note;
  if (*blocks.verdict == 0 || load_acquire_system(&to.what) != BlockNote::kNothing) return;
  to.rank = note.rank, to.routed = note.routed, to.most = note.most;
  store_release_system(&to.what, note.what);
}

/// Sets all bits of a matrix, of 16-bit words.
__global__ void spoil_kernel(uint16_t* data, int64_t rows, int64_t words, int64_t step,
                             const int32_t* verdict) {
  begin_dependent();
  if (*verdict == 0) return;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) data[row * step + i] = 0xffff;
}

Grid grid_of(int64_t blocks, cudaStream_t stream) {
  return {.blocks = unsigned(std::clamp<int64_t>(blocks, 1, kMostBlocks)),
          .threads = kThreads,
          .stream = stream,
          .dependent = true};
}

}  // namespace

void make_places(const RowBlocks& blocks, cudaStream_t stream) {
  launch(places_kernel, grid_of((blocks.steps() + kThreads - 1) / kThreads, stream), blocks);
}

void judge_blocks(const RowBlocks& blocks, cudaStream_t stream) {
  launch(judge_kernel, grid_of(1, stream), blocks);
}

void spoil_rows(const TensorView& rows, const int32_t* verdict, cudaStream_t stream) {
  const auto words = [&](int64_t count) { return bytes_for(rows.dtype, count) / 2; };
  launch(spoil_kernel, grid_of(rows[0], stream), static_cast<uint16_t*>(rows.data), rows[0],
         words(rows[1]), words(rows.stride[0]), verdict);
}

}  // namespace cadre::cuda
