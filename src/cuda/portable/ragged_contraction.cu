#include "cuda/portable/ragged_contraction.h"

#include "cuda/portable/output.cuh"
#include "schedule/tiles.h"

// dw_e[n, k] (+)= alpha_e * sum_r dy[r, n] * x[r, k] over the rows r of every expert: wgrad.
//
// dy [R, N], x [R, K] and dw [E, N, K] in any order and alignment. Persistent blocks: block i
// computes tiles i, i + blocks, ... of all experts. An expert without rows gets zeros, or is left
// alone when accumulating.
namespace cadre::cuda::portable {
namespace {

/// dw = alpha_e * accumulators (+ dw) of one expert.
struct ContractionEpilogue {
  Matrix dw;  ///< its lines end with the tile
  float alpha = 1;
  bool adds;

  __device__ ContractionEpilogue(const RaggedContractionArgs& args, const Tile& tile)
      : dw(OutputTile{args.dw, tile}.matrix()), adds(args.accumulates(tile.expert)) {
    // An empty sum is 0 even if alpha is NaN or infinite.
    if (args.alpha != nullptr && tile.deep != 0) alpha = args.alpha[tile.expert];
  }
  __device__ void operator()(float (&values)[kChunk], const ChunkPlace&, const Place& at) const {
    for (float& value : values) value *= alpha;
    if (!adds) return;
    float before[kChunk];
    load_floats(dw, at, before);
    for (int i = 0; i < kChunk; ++i) values[i] += before[i];
  }
};

/// Writes the tile with that number to shared memory. One thread calls it.
template <class Kind>
__device__ void find_tile(TileShared& shared, const RaggedContractionArgs& args,
                          const schedule::TileGrid& grid, int64_t number) {
  const int expert = int(number / grid.count());
  const schedule::TilePlace place = banded(number % grid.count(), grid, kBand);
  const Range n = side_of(place.down * kSide, args.n), k = side_of(place.across * kSide, args.k);
  const int64_t used = schedule::rows_used(args.offsets, args.experts, args.rows);
  const schedule::ExpertRows rows = schedule::rows_of(args.offsets, expert, used);
  const Range deep{rows.first, rows.last};
  shared.tile = {expert,
                 {n, k},
                 deep.count(),
                 {args.dy.of(0), args.dy, {n, deep}, Kind::kA},
                 {args.x.of(0), args.x, {k, deep}, Kind::kB}};
}

template <class Kind>
__global__ void __launch_bounds__(kTileThreads, Products<Kind>::kBlocks)
    ragged_contraction_kernel(const RaggedContractionArgs args) {
  auto& shared = *reinterpret_cast<TileShared*>(dynamic_shared());
  const schedule::TileGrid grid{(args.n + kSide - 1) / kSide, (args.k + kSide - 1) / kSide};
  for (int64_t number = blockIdx.x; number < grid.count() * args.experts; number += gridDim.x) {
    if (threadIdx.x == 0) find_tile<Kind>(shared, args, grid, number);
    __syncthreads();
    if (shared.tile.deep != 0 || !args.accumulates(shared.tile.expert)) {
      Products<Kind> products;
      multiply_tile<Kind>(shared, products);
      stage_accumulators<Kind>(shared, products, args.dw.columns);
      store_tile(shared, {args.dw, shared.tile}, ContractionEpilogue(args, shared.tile));
    }
    __syncthreads();
  }
}

template <Multiplicand kAs>
void launch_as(const RaggedContractionArgs& args, int blocks, cudaStream_t stream) {
  launch(&ragged_contraction_kernel<TileKind<kAs, false, false>>, tile_grid(blocks, stream), args);
}

}  // namespace

void ragged_contraction(Multiplicand as, const RaggedContractionArgs& args, int blocks,
                        cudaStream_t stream) {
  switch (as) {
    case Multiplicand::kBf16:
      return launch_as<Multiplicand::kBf16>(args, blocks, stream);
    case Multiplicand::kF16:
      return launch_as<Multiplicand::kF16>(args, blocks, stream);
    case Multiplicand::kF32:
      return launch_as<Multiplicand::kF32>(args, blocks, stream);
  }
}

}  // namespace cadre::cuda::portable
