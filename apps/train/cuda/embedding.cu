#include "apps/train/cuda/kernels.h"
#include "apps/train/cuda/warp.h"

// The window embedding; see apps/train/embedding.h. A thread has one column of a row of x, or of an
// entry of dtable, and adds in the order of distances, or of rows: the bits are the CPU's.
namespace cadre::train::cuda {
namespace {

constexpr int64_t kBytes = 256;
constexpr int kNoByte = 256;
constexpr int kEntryThreads = 64;  // of a block that sums one entry

/// Blocks along x are columns, along y rows.
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const WindowArgs a, const float* table, float* x) {
  const int64_t column = thread_index();
  if (column >= a.hidden) return;
  for (int64_t t = blockIdx.y; t < a.rows; t += gridDim.y) {
    float sum = 0;
    for (int64_t d = 0; d < a.window; ++d)
      sum += table[(d * kBytes + a.windows[t * a.window + d]) * a.hidden + column];
    x[t * a.hidden + column] = sum;
  }
}

/// Blocks along x are columns, along y bytes, along z distances. All lanes of a warp look for the
/// byte, 32 rows at a time.
__global__ void __launch_bounds__(kEntryThreads)
    embed_backward_kernel(const WindowArgs a, const float* dx, float* dtable) {
  const int64_t column = int64_t(blockIdx.x) * kEntryThreads + threadIdx.x, d = blockIdx.z;
  const int byte = int(blockIdx.y);
  float sum = 0;
  for (int64_t first = 0; first < a.rows; first += kLanes) {
    const int64_t mine = first + lane();
    const int got = mine < a.rows ? a.windows[mine * a.window + d] : kNoByte;
    unsigned found = __ballot_sync(~0u, got == byte);
    for (int64_t t = first; found != 0; found >>= 1, ++t)
      if ((found & 1) != 0 && column < a.hidden) sum += dx[t * a.hidden + column];
  }
  if (column < a.hidden) dtable[(d * kBytes + byte) * a.hidden + column] = sum;
}

}  // namespace

void embed(const WindowArgs& args, const float* table, float* x, cudaStream_t stream) {
  cadre::cuda::Grid grid = grid_of(args.hidden, stream);
  grid.blocks.y = unsigned(args.rows < kMostBlocks ? args.rows : kMostBlocks - 1);
  cadre::cuda::launch(embed_kernel, grid, args, table, x);
}

void embed_backward(const WindowArgs& args, const float* dx, float* dtable, cudaStream_t stream) {
  const auto columns = unsigned((args.hidden + kEntryThreads - 1) / kEntryThreads);
  const cadre::cuda::Grid grid{dim3(columns, unsigned(kBytes), unsigned(args.window)),
                               dim3(kEntryThreads), 0, stream};
  cadre::cuda::launch(embed_backward_kernel, grid, args, dx, dtable);
}

}  // namespace cadre::train::cuda
