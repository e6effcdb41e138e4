#include "cuda/sm90/ragged_rows.h"

#include "cuda/sm90/consume.cuh"
#include "schedule/tiles.h"

// y[r, c] = alpha_e * sum_d x[r, d] * w_e[c, d] for the rows r of every expert: fprop and dgrad.
//
// x [R, D] and y [R, C] row-major; w [E, C, D], its rows along the contraction or across it. The
// weight is the first operand of the product and the batch the second, so that a tile is as wide as
// an expert's rows ask for, in steps of sixteen: what would be padding is not multiplied. Rows
// beyond a tile's last are neither read nor written: the copy engine reads zeros there and writes
// nothing. A persistent grid of clusters; cluster i takes tiles i, i + clusters, ...; its two
// blocks take neighbouring columns of y and share the rows of x.
namespace cadre::cuda::sm90 {
namespace {

constexpr int kRaggedOrigin = 1 << 30;  // see ragged_map()

template <Tile kTile>
__device__ void load_stage(Shared<kTile>& shared, int stage, const RaggedRowsMaps& maps,
                           const Record& tile, int depth) {
  Barrier& full = shared.full[stage];
  const int boxes = (tile.end - tile.begin + kBoxRows - 1) / kBoxRows;
  arrive_expecting(full, uint32_t(kTile.a_bytes() + boxes * kBoxRows * 128));
  if constexpr (kTile.a_along) {
    load(shared.a[stage], maps.w, Box3{depth, tile.row, tile.expert}, full);
  } else {
    load(shared.a[stage], maps.w, Box3{tile.row, depth, tile.expert}, full);
    load(shared.a[stage] + kSlab, maps.w, Box3{tile.row + 64, depth, tile.expert}, full);
  }
  for (int box = int(block_in_cluster()); box < boxes; box += kCluster) {
    const int row = kRaggedOrigin - tile.end + tile.begin + box * kBoxRows;
    load(shared.b[stage] + box * kBoxRows * 128, maps.x,
         Box4{depth, row, tile.end, kRaggedOrigin}, full, kBothBlocks);
  }
}

template <Tile kTile>
__device__ void produce(Shared<kTile>& shared, const RaggedRowsMaps& maps,
                        const RaggedRowsArgs& args) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  schedule::RaggedTiles tiles({args.offsets, args.experts, args.rows}, {kTile.cols, 16},
                              (args.cols + kCluster * kRows - 1) / (kCluster * kRows));
  const int rank = int(block_in_cluster()), clusters = int(gridDim.x) / kCluster;
  for (int64_t number = blockIdx.x / kCluster; tiles.seek(number); number += clusters) {
    const schedule::TilePlace place = tiles.place(args.band);
    const schedule::ExpertRows rows = tiles.rows(place);
    const Record tile{tiles.expert(), (int(place.across) * kCluster + rank) * kRows,
                      int(rows.first), int(rows.last), args.depth};
    tell(shared, ring, tile);
    for (int depth = 0; depth < args.depth; depth += kDepth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      load_stage(shared, at.at, maps, tile, depth);
    }
  }
  tell(shared, ring, {-1, 0, 0, 0, 0});
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedRowsMaps& maps,
                        const RaggedRowsArgs& args, int consumer) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  Cursor<kTile.buffers> buffer;
  float sums[kTile.cols / 2] = {};
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    const int col = tile.row + 64 * consumer;
    if (col >= args.cols) {
      skip(shared, at, tile);
      continue;
    }
    multiply<kTile, 16>(shared, at, tile, consumer, sums);
    const float alpha = args.alpha == nullptr ? 1.0f : args.alpha[tile.expert];
    store_tile<kTile, kTile.cols / 64>(
        shared.out[consumer], buffer, (tile.end - tile.begin + 63) / 64,
        [&](int chunk, uint32_t to) {
          put_chunk_transposed<kTile.out>(sums + 32 * chunk, alpha, to);
        },
        [&](int chunk, const void* from) {
          const int row = kRaggedOrigin - tile.end + tile.begin + 64 * chunk;
          store(maps.y, Box4{col, row, tile.end, kRaggedOrigin}, from);
        });
  }
  if (threadIdx.x % kWarpgroup == 0) wait_for_stores();
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_rows_kernel(const __grid_constant__ RaggedRowsMaps maps, const RaggedRowsArgs args) {
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
void launch(const RaggedRowsMaps& maps, const RaggedRowsArgs& args, int blocks, cudaStream_t stream) {
  constexpr int kBytes = int(sizeof(Shared<Config::kTile>));
  check(cudaFuncSetAttribute(ragged_rows_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes),
        "set the shared memory of ragged_rows");
  ragged_rows_kernel<Config><<<blocks, kThreads, kBytes, stream>>>(maps, args);
  check(cudaGetLastError(), "launch ragged_rows");
}

struct Along {
  static constexpr Tile kTile{};
};
struct Across {
  static constexpr Tile kTile{.a_along = false};
};

}  // namespace

void ragged_rows_along(const RaggedRowsMaps& maps, const RaggedRowsArgs& args, int blocks,
                       cudaStream_t stream) {
  launch<Along>(maps, args, blocks, stream);
}
void ragged_rows_across(const RaggedRowsMaps& maps, const RaggedRowsArgs& args, int blocks,
                        cudaStream_t stream) {
  launch<Across>(maps, args, blocks, stream);
}

}  // namespace cadre::cuda::sm90
