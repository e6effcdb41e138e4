#include "cuda/sm90/ragged_contraction.h"

#include "cuda/sm90/consume.cuh"
#include "schedule/tiles.h"

// dw_e[m, c] (+)= alpha_e * sum_r a[r, m] * b[r, c] over the rows r of every expert: wgrad.
//
// a [R, M] and b [R, C] row-major, their rows across the contraction; dw [E, M, C] row-major. The
// last rows of an expert's last stage are zeros that the copy engine makes. An expert without rows
// gets the product of one row of zeros, or is left alone when accumulating.
namespace cadre::cuda::sm90 {
namespace {

constexpr int kRaggedOrigin = 1 << 30;  // see ragged_map()

/// Loads 64 rows of the batch, of which `depth` are done; half of the columns of b for both blocks.
template <Tile kTile>
__device__ void load_stage(Shared<kTile>& shared, int stage, const RaggedContractionMaps& maps,
                           const Record& tile, const schedule::ExpertRows& rows) {
  Barrier& full = shared.full[stage];
  const int slabs = (tile.end - tile.begin) / 64;
  const int row = int(kRaggedOrigin - rows.count()), last = int(rows.last);
  arrive_expecting(full, uint32_t(kTile.a_bytes() + slabs * kSlab));
  load(shared.a[stage], maps.a, Box4{tile.row, row, last, kRaggedOrigin}, full);
  load(shared.a[stage] + kSlab, maps.a, Box4{tile.row + 64, row, last, kRaggedOrigin}, full);
  for (int slab = int(block_in_cluster()); slab < slabs; slab += kCluster)
    load(shared.b[stage] + slab * kSlab, maps.b,
         Box4{tile.begin + 64 * slab, row, last, kRaggedOrigin}, full, kBothBlocks);
}

template <Tile kTile>
__device__ void produce(Shared<kTile>& shared, const RaggedContractionMaps& maps,
                        const RaggedContractionArgs& args) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  const int64_t width = schedule::TileHeight{kTile.cols, 64}.of(args.cols);
  const schedule::TileGrid grid{(args.out_rows + kCluster * kRows - 1) / (kCluster * kRows),
                                (args.cols + width - 1) / width};
  const int rank = int(block_in_cluster()), clusters = int(gridDim.x) / kCluster;
  for (int64_t number = blockIdx.x / kCluster; number < grid.count() * args.experts;
       number += clusters) {
    const int expert = int(number / grid.count());
    const schedule::TilePlace place = banded(number % grid.count(), grid, args.band);
    schedule::ExpertRows rows = schedule::rows_of(args.offsets, expert, args.rows);
    if (rows.count() == 0 && args.accumulate) continue;
    const int64_t begin = place.across * width, left = (args.cols - begin + 63) / 64 * 64;
    const Record tile{expert, (int(place.down) * kCluster + rank) * kRows, int(begin),
                      int(begin + (left < width ? left : width)),
                      rows.count() == 0 ? 1 : int(rows.count())};
    tell(shared, ring, tile);
    for (int depth = 0; depth < tile.depth; depth += kDepth, rows.first += kDepth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      load_stage(shared, at.at, maps, tile, rows);
    }
  }
  tell(shared, ring, {-1, 0, 0, 0, 0});
}

template <Tile kTile>
__device__ void store_sums(Shared<kTile>& shared, const RaggedContractionMaps& maps,
                           const RaggedContractionArgs& args, const Record& tile,
                           Cursor<kTile.buffers>& buffer, int consumer, const float* sums) {
  constexpr int kCols = kTile.out == Out::kF32 ? 32 : 64;  // of a chunk
  const float alpha = args.alpha == nullptr ? 1.0f : args.alpha[tile.expert];
  const int end = tile.end < args.cols ? tile.end : args.cols;
  store_tile<kTile, kTile.cols / kCols>(
      shared.out[consumer], buffer, (end - tile.begin + kCols - 1) / kCols,
      [&](int chunk, uint32_t to) {
        if constexpr (kTile.out == Out::kF32)
          put_floats(sums + kCols / 2 * chunk, alpha, to);
        else
          put_chunk<kTile.out>(sums + kCols / 2 * chunk, alpha, to);
      },
      [&](int chunk, const void* from) {
        const Box3 to{tile.begin + chunk * kCols, tile.row + 64 * consumer, tile.expert};
        args.accumulate ? add(maps.out, to, from) : store(maps.out, to, from);
      });
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedContractionMaps& maps,
                        const RaggedContractionArgs& args, int consumer) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  Cursor<kTile.buffers> buffer;
  float sums[kTile.cols / 2] = {};
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    if (tile.row + 64 * consumer >= args.out_rows) {
      skip(shared, at, tile);
      continue;
    }
    multiply<kTile, 64>(shared, at, tile, consumer, sums);
    store_sums(shared, maps, args, tile, buffer, consumer, sums);
  }
  if (threadIdx.x % kWarpgroup == 0) wait_for_stores();
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_contraction_kernel(const __grid_constant__ RaggedContractionMaps maps,
                              const RaggedContractionArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<Config::kTile>*>(memory);
  prepare(shared);
  const int role = uniform(int(threadIdx.x) / kWarpgroup);
  if (role == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0) produce(shared, maps, args);
  } else {
    take_registers<kConsumerRegisters>();
    consume(shared, maps, args, role);
  }
  __syncwarp();
  sync_cluster();  // the other block may still load into this one
}

template <class Config>
void launch(const RaggedContractionMaps& maps, const RaggedContractionArgs& args, int blocks,
            cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(Shared<Config::kTile>));
  check(cudaFuncSetAttribute(ragged_contraction_kernel<Config>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "set the shared memory of ragged_contraction");
  ragged_contraction_kernel<Config><<<blocks, kThreads, kBytes, stream>>>(maps, args);
  check(cudaGetLastError(), "launch ragged_contraction");
}

struct ToBf16 {
  static constexpr Tile kTile{ .a_along = false, .b_along = false, .ragged_depth = true};
};
struct ToFloat {
  static constexpr Tile kTile{
      .cols = 128, .buffers = 4, .a_along = false, .b_along = false, .ragged_depth = true, .out = Out::kF32};
};

}  // namespace

void ragged_contraction_bf16(const RaggedContractionMaps& maps, const RaggedContractionArgs& args,
                             int blocks, cudaStream_t stream) {
  launch<ToBf16>(maps, args, blocks, stream);
}
void ragged_contraction_f32(const RaggedContractionMaps& maps, const RaggedContractionArgs& args,
                            int blocks, cudaStream_t stream) {
  launch<ToFloat>(maps, args, blocks, stream);
}

}  // namespace cadre::cuda::sm90
