#include "cuda/sm90/ragged_rows.h"

#include "cuda/device/tensor_map.h"
#include "cuda/sm90/consume.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "schedule/tiles.h"

// y[r, c] = alpha_e * sum_d x[r, d] * w_e[c, d] (+ beta_e * c[r, c]) (+ bias_e[c] * bias_scale[r])
// for the rows r of every expert: fprop and dgrad.
//
// x [R, D] and y [R, C] row-major; w [E, C, D], its rows along the contraction or across it. The
// weight is the first operand of the product and the batch the second, so that a tile is as wide as
// an expert's rows ask for, in steps of sixteen: what would be padding is not multiplied. Rows
// beyond a tile's last are neither read nor written: the copy engine reads zeros there and writes
// nothing. A persistent grid of clusters, each of which takes the next tile when it has done one;
// its two blocks work on neighbouring columns of y and share the rows of x.
namespace cadre::cuda::sm90 {
namespace {

/// Where the operands of a tile come from: the map of an expert's weight, and the expert's
/// coordinate in it; the map whose boxes of x, one a block of the cluster, are the lowest that hold
/// the tile's rows, and how high those are.
struct Sources {
  const CUtensorMap* w;
  int expert;
  const CUtensorMap* x;
  int box_rows;
};
__device__ Sources sources_of(const RaggedRowsMaps& maps, const Record& tile) {
  constexpr int kUnit = kCluster * kBoxRows;
  const int units = (tile.end - tile.begin + kUnit - 1) / kUnit;
  const bool packed = maps.experts == nullptr;
  return {packed ? &maps.w : maps.experts + tile.expert, packed ? tile.expert : 0,
          maps.x + units - 1, units * kBoxRows};
}

template <Tile kTile>
__device__ void load_stage(Shared<kTile>& shared, int stage, const Sources& from,
                           const Record& tile, int depth) {
  Barrier& full = shared.full[stage];
  arrive_expect_tx(full, uint32_t(kTile.a_bytes() + kCluster * from.box_rows * 128));
  if constexpr (kTile.a_along) {
    tma_load(shared.a[stage], *from.w, Box3{depth, tile.row, from.expert}, full);
  } else {
    tma_load(shared.a[stage], *from.w, Box3{tile.row, depth, from.expert}, full);
    tma_load(shared.a[stage] + kTile.slab_bytes(), *from.w, Box3{tile.row + 64, depth, from.expert},
             full);
  }
  const int mine = int(cluster_ctarank()) * from.box_rows;
  tma_load(shared.b[stage] + mine * 128, *from.x,
           Box4{depth, kRaggedOrigin - tile.end + tile.begin + mine, tile.end, kRaggedOrigin}, full,
           kAllBlocks);
}

template <Tile kTile>
__device__ void schedule_tiles(Shared<kTile>& shared, const RaggedRowsArgs& args) {
  Scheduler<kTile> scheduler(shared, args.taken);
  schedule::RaggedTiles tiles({args.offsets, args.experts, args.rows}, {kTile.cols, 16},
                              (args.cols + kCluster * kRows - 1) / (kCluster * kRows));
  while (tiles.seek(scheduler.take())) {
    const schedule::TilePlace place = tiles.place(args.band);
    const schedule::ExpertRows rows = tiles.rows(place);
    const BlockRows mine = block_rows(int(place.across), args.cols);
    scheduler.tell(
        {tiles.expert(), mine.first, mine.limit, int(rows.first), int(rows.last), args.depth});
  }
  scheduler.tell({-1, 0, 0, 0, 0, 0});
}

template <Tile kTile>
__device__ void produce(Shared<kTile>& shared, const RaggedRowsMaps& maps) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    const Sources from = sources_of(maps, tile);
    if (maps.experts != nullptr) tensormap_acquire(*from.w);
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      if (!elect()) continue;
      want_next(shared, depth, tile);
      load_stage(shared, at.at, from, tile, depth);
    }
  }
}

template <Tile kTile>
__device__ void fill(const float* sums, uint32_t to) {
  if constexpr (kTile.to_floats)
    put_floats_transposed<kTile.part_cols>(sums, to);
  else
    put_part_transposed<kTile.element, kTile.part_cols>(sums, to);
}

/// Finishes a part, and writes it to its buffer.
template <Tile kTile>
__device__ void finish(const RaggedRowsArgs& args, const Record& tile, const TilePart& part,
                       uint32_t to) {
  if (!args.has_epilogue()) return fill<kTile>(part.sums, to);
  float finished[kTile.part_cols / 2];
  finish_rows(args, tile, part, finished);
  fill<kTile>(finished, to);
}

/// Stores a part: 64 columns of y from `col` on.
template <Tile kTile>
__device__ void put(const RaggedRowsMaps& maps, const Record& tile, int col, int part,
                    const uint8_t* from) {
  const int row = kRaggedOrigin - tile.end + tile.begin + kTile.part_cols * part;
  tma_store(maps.y, Box4{col, row, tile.end, kRaggedOrigin}, from);
  if constexpr (kTile.to_floats)
    tma_store(maps.y, Box4{col + 32, row, tile.end, kRaggedOrigin}, from + kTile.part_bytes() / 2);
}

template <Tile kTile>
__device__ int parts_of(const Record& tile) {
  return (tile.end - tile.begin + kTile.part_cols - 1) / kTile.part_cols;
}

template <Tile kTile>
__device__ void carry(Shared<kTile>& shared, const RaggedRowsMaps& maps, int ring) {
  Cursor<kRecords> records;
  OutRing<kTile> out(shared, ring);
  for (Record tile = hear_alone(shared, records); tile.expert >= 0;
       tile = hear_alone(shared, records)) {
    for (int consumer = ring; consumer < kConsumers && is_for(tile, consumer);
         consumer += kTile.rings()) {
      const int col = tile.row + 64 * consumer;
      carry_tile<kTile>(
          out, shared.free[consumer], {parts_of<kTile>(tile), 0},
          [](int, const uint8_t*, Barrier&) {},
          [&](int part, const uint8_t* from) { put<kTile>(maps, tile, col, part, from); });
    }
  }
  tma_wait();
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedRowsArgs& args, int consumer) {
  consume_tiles<kTile, Widths{16, 16, kTile.cols}>(
      shared, consumer, parts_of<kTile>,
      [&](const Record& tile, const TilePart& part, int, uint32_t to) {
        finish<kTile>(args, tile, part, to);
      });
  if (args.tail != nullptr) zero_tail<kTile>(args);
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_rows_kernel(const __grid_constant__ RaggedRowsMaps maps,
                       const __grid_constant__ RaggedRowsArgs args) {
  run_roles<Config::kTile>([&](auto& shared) { schedule_tiles(shared, args); },
                           [&](auto& shared) { produce(shared, maps); },
                           [&](auto& shared, int ring) { carry(shared, maps, ring); },
                           [&](auto& shared, int consumer) { consume(shared, args, consumer); });
}

using Job = Launch<RaggedRowsMaps, RaggedRowsArgs>;

template <class Config>
void launch(const Job& l) {
  launch_tiles<Config::kTile>(&ragged_rows_kernel<Config>, l);
}

// nvcc cannot name kernels that take a Tile, so they take a type that has one.
template <bool kAlong, Element kElement, bool kFloats>
struct Config {
  static constexpr Tile kTile{.part_cols = kFloats ? kRowsOfFloats : kRowsOfPart,
                              .turns = !kFloats,
                              .buffers = kFloats ? 2 : kBuffers,
                              .a_along = kAlong,
                              .element = kElement,
                              .to_floats = kFloats};
};

template <bool kAlong, Element kElement>
void launch_type(bool floats, const Job& l) {
  floats ? launch<Config<kAlong, kElement, true>>(l) : launch<Config<kAlong, kElement, false>>(l);
}

template <bool kAlong>
void launch_along(const RaggedRowsKind& kind, const Job& l) {
  kind.f16 ? launch_type<kAlong, Element::kF16>(kind.floats, l)
           : launch_type<kAlong, Element::kBf16>(kind.floats, l);
}

}  // namespace

void ragged_rows(const RaggedRowsKind& kind, const RaggedRowsMaps& maps, const RaggedRowsArgs& args,
                 int blocks, cudaStream_t stream) {
  const Job l{maps, args, blocks, stream};
  kind.along ? launch_along<true>(kind, l) : launch_along<false>(kind, l);
}

}  // namespace cadre::cuda::sm90
