#include "cuda/portable/ragged_rows.h"

#include "cuda/portable/output.cuh"
#include "schedule/tiles.h"

// y[r, c] = alpha_e * sum_d x[r, d] * w_e[c, d] (+ beta_e * c[r, c]) (+ bias_e[c] * bias_scale[r])
// for the rows r of every expert: fprop and dgrad.
//
// x [R, D], w [E, C, D] and y [R, C] in any order and alignment. Persistent blocks: block i
// computes tiles i, i + blocks, ...; rows beyond a tile's last are neither read nor written.
namespace cadre::cuda::portable {
namespace {

/// y = alpha * accumulators + beta * c + bias * bias_scale, in a chunk of one expert.
struct RowsEpilogue {
  const RaggedRowsArgs& args;
  int expert;
  int64_t end;  ///< of the tile's lines
  Matrix c;     ///< its lines end there too
  float alpha, beta;

  __device__ RowsEpilogue(const RaggedRowsArgs& all, const Tile& tile)
      : args(all),
        expert(tile.expert),
        end(OutputTile{all.y, tile}.inside().last),
        c(matrix_of(all.c, 0, end)),
        alpha(all.alpha == nullptr ? 1.0f : all.alpha[expert]),
        beta(all.beta == nullptr ? 0.0f : all.beta[expert]) {}

  __device__ void operator()(float (&values)[kChunk], const ChunkPlace& place,
                             const Place& at) const {
    for (float& value : values) value *= alpha;
    if (beta != 0) {
      float before[kChunk];
      load_floats(c, at, before);
      for (int i = 0; i < kChunk; ++i) values[i] += beta * before[i];
    }
    if (args.bias.is_there()) add_bias(values, place);
  }

 private:
  __device__ void add_bias(float (&values)[kChunk], const ChunkPlace& place) const {
    const Matrix bias = matrix_of(args.bias, expert, args.cols);
    const int64_t left = end - (place.down ? place.row : place.col);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= left) continue;
      const float scale = args.bias_scale == nullptr ? 1.0f : args.bias_scale[place.row_of(i)];
      values[i] += scale * element(bias, place.col_of(i));
    }
  }
};

/// Writes the tile with that number to shared memory. One thread calls it.
template <class Kind>
__device__ void find_tile(TileShared& shared, const RaggedRowsArgs& args, int64_t number) {
  if (!shared.tiles.seek(number)) {
    shared.tile.expert = -1;
    return;
  }
  const schedule::TilePlace place = shared.tiles.place(kBand);
  const schedule::ExpertRows found = shared.tiles.rows(place);
  const Range rows{found.first, found.last}, cols = side_of(place.across * kSide, args.cols);
  const Range deep{0, args.depth};
  const int expert = shared.tiles.expert();
  shared.tile = {expert,
                 {rows, cols},
                 args.depth,
                 {args.x.of(0), args.x, {rows, deep}, Kind::kA},
                 {args.w.of(expert), args.w, {cols, deep}, Kind::kB}};
}

/// In the kernel's parameters where none are given.
__device__ inline const int32_t* offsets_of(const RaggedRowsArgs& args) {
  return args.offsets != nullptr ? args.offsets : args.all_rows;
}

/// Zeros in the tail of y, by a grid-stride loop.
__device__ void zero_tail(const RaggedRowsArgs& args) {
  const bool down = args.y.columns;
  const int64_t used = schedule::rows_used(offsets_of(args), args.experts, args.rows);
  const int64_t first_line = down ? 0 : used, first = down ? used : 0;
  const Matrix y = matrix_of(args.y, 0, down ? args.rows : args.cols);
  const int64_t lines = (down ? args.cols : args.rows) - first_line;
  const int64_t chunks = (y.columns - first + kChunk - 1) / kChunk;
  for (int64_t i = int64_t(blockIdx.x) * kTileThreads + threadIdx.x; i < lines * chunks;
       i += int64_t(gridDim.x) * kTileThreads)
    store_floats({}, y, {first_line + i / chunks, first + i % chunks * kChunk});
}

template <class Kind>
__global__ void __launch_bounds__(kTileThreads, Products<Kind>::kBlocks)
    ragged_rows_kernel(const __grid_constant__ RaggedRowsArgs args) {
  auto& shared = *reinterpret_cast<TileShared*>(dynamic_shared());
  if (threadIdx.x == 0)
    shared.tiles = {{offsets_of(args), args.experts, args.rows},
                    {kSide, kSide / 2},
                    (args.cols + kSide - 1) / kSide};
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    if (threadIdx.x == 0) find_tile<Kind>(shared, args, number);
    __syncthreads();
    if (shared.tile.expert < 0) break;
    Products<Kind> products;
    multiply_tile<Kind>(shared, products);
    stage_accumulators<Kind>(shared, products, args.y.columns);
    store_tile(shared, {args.y, shared.tile}, RowsEpilogue(args, shared.tile));
  }
  if (args.zero_tail) zero_tail(args);
}

template <Multiplicand kAs>
void launch_as(const RaggedRowsArgs& args, int blocks, cudaStream_t stream) {
  const bool along = args.w.deep == element_bytes(args.w.dtype);
  launch(along ? &ragged_rows_kernel<TileKind<kAs, true, true>>
               : &ragged_rows_kernel<TileKind<kAs, true, false>>,
         tile_grid(blocks, stream), args);
}

}  // namespace

void ragged_rows(Multiplicand as, const RaggedRowsArgs& args, int blocks, cudaStream_t stream) {
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
