#include "cuda/portable/patch_scales.cuh"

// The largest magnitude of each whole line of an expert, as bits: rows, or columns. Blocks raise
// them by atomics, since a maximum comes out the same in any order.
namespace cadre::cuda::portable {
namespace {

constexpr int kAmaxBlocks = 4;              // of an SM at once
constexpr int64_t kMostClearBlocks = 4096;  // of a grid-stride loop

__global__ void clear_lines_kernel(uint32_t* amax, int64_t count) {
  for (int64_t i = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kQuantizeThreads)
    amax[i] = 0;
}

/// The part of its lines that a tile has, of a patch whose warp is one row of patches and two high.
template <DType kSource>
__device__ void raise_lines(const QuantizeCopy& copy, QuantizeShared& shared,
                            const ExpertTile& tile, const PatchPlace& place,
                            const SourcePatch& patch) {
  if (!copy.to.down) {
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      const LineMagnitudes<kSource> columns(patch.rows[i]);
      const uint32_t largest = largest_of_lanes<kAcross>(columns.of_all());
      if (threadIdx.x % kAcross == 0 && place.row + i < tile.rows && largest != 0)
        atomicMax(copy.lines_of(tile) + place.row + i, largest);
    }
    return;
  }
  auto columns = columns_of<kSource>(patch);
  reduce_lanes<kSource, kAcross, kLanes / kAcross>(columns);
  __syncthreads();  // of the tile before
  if (threadIdx.x % kLanes < kAcross)
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      shared.amax[threadIdx.x / kLanes][place.col % kTileSide + k] = columns.of_line(k);
  __syncthreads();
  const int inside = int(threadIdx.x), column = place.col / kTileSide * kTileSide + inside;
  if (inside >= kTileSide || column >= tile.cols) return;
  const uint32_t largest = largest_of_warps(shared, inside);
  if (largest != 0) atomicMax(copy.lines_of(tile) + column, largest);
}

template <DType kSource>
__global__ void __launch_bounds__(kQuantizeThreads, kSource == DType::kF32 ? 2 : kAmaxBlocks)
    line_amax_kernel(const __grid_constant__ QuantizeJob job,
                     const __grid_constant__ QuantizeCopy copy) {
  auto& shared = *reinterpret_cast<QuantizeShared*>(dynamic_shared());
  walk_tiles(job.of, shared.queue, [&](const ExpertTile& tile, int column) {
    const PatchPlace at(Patch<kAcross>::of_thread(column), tile.rows, tile.cols);
    const auto patch = load_patch<kSource>(job, tile, at);
    raise_lines<kSource>(copy, shared, tile, at, patch);
  });
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
    on.launch_strips(line_amax_kernel<kSource>, {kAmaxBlocks, sizeof(QuantizeShared)}, job, copy);
  });
}

}  // namespace cadre::cuda::portable
