#include "cuda/portable/quantize.cuh"

// The largest magnitude of each whole line of an expert, as bits: rows, or columns. Blocks raise
// them by atomics, since a maximum comes out the same in any order.
namespace cadre::cuda::portable {
namespace {

constexpr int kAmaxBlocks = 3;              // of an SM at once
constexpr int64_t kMostClearBlocks = 4096;  // of a grid-stride loop

struct LineAmaxShared {
  TileQueue queue;
  uint32_t amax[TileBlocks<kTileSide>::kMost];
  alignas(128) SourcePlanes source;
};

__global__ void clear_lines_kernel(uint32_t* amax, int64_t count) {
  for (int64_t i = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kQuantizeThreads)
    amax[i] = 0;
}

/// The part of its lines that a tile has.
template <DType kSource>
__device__ void raise_lines(const QuantizeCopy& copy, LineAmaxShared& shared,
                            const ExpertTile& tile) {
  const TileBlocks<kTileSide> blocks(copy.to);
  const int i = int(threadIdx.x);
  if (i < blocks.kMost) shared.amax[i] = 0;
  __syncthreads();
  if (blocks.down)
    amaxes_across_rows<kSource>(shared.amax, shared.source, blocks);
  else
    amaxes_within_rows<kSource>(shared.amax, shared.source, blocks);
  __syncthreads();
  if (i >= (blocks.down ? tile.cols : tile.rows)) return;
  const uint32_t largest = shared.amax[blocks.down ? blocks.place(0, i) : blocks.place(i, 0)];
  if (largest != 0) atomicMax(copy.lines_of(tile) + i, largest);
}

template <DType kSource>
__global__ void __launch_bounds__(kQuantizeThreads, kAmaxBlocks)
    line_amax_kernel(const __grid_constant__ QuantizeJob job,
                     const __grid_constant__ QuantizeCopy copy) {
  auto& shared = *reinterpret_cast<LineAmaxShared*>(dynamic_shared());
  walk_tiles<kSource>(job, shared,
                      [&](const ExpertTile& tile) { raise_lines<kSource>(copy, shared, tile); });
}

}  // namespace

void launch_line_amax(const QuantizeJob& job, const QuantizeCopy& copy, const QuantizeStream& on) {
  const bool all = copy.to.ragged && !copy.to.down;
  const int64_t count = all ? job.of.rows : copy.expert_lines * job.of.experts;
  const int64_t blocks = (count + kQuantizeThreads - 1) / kQuantizeThreads;
  if (count == 0) return;
  launch(clear_lines_kernel,
         {unsigned(std::min(blocks, kMostClearBlocks)), kQuantizeThreads, 0, on.stream},
         copy.line_amax, count);
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    launch(line_amax_kernel<kSource>,
           on.grid(job.of, kAmaxBlocks, kSharedBytes<LineAmaxShared, kSource>), job, copy);
  });
}

}  // namespace cadre::cuda::portable
