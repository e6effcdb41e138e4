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
// nothing. A persistent grid of clusters; cluster i takes tiles i, i + clusters, ...; its two
// blocks take neighbouring columns of y and share the rows of x.
namespace cadre::cuda::sm90 {
namespace {

/// The map of an expert's weight, and the expert's coordinate in it.
struct Weight {
  const CUtensorMap* map;
  int expert;
};
__device__ Weight weight_of(const RaggedRowsMaps& maps, int expert) {
  if (maps.experts == nullptr) return {&maps.w, expert};
  return {maps.experts + expert, 0};
}

template <Tile kTile>
__device__ void load_stage(Shared<kTile>& shared, int stage, const RaggedRowsMaps& maps,
                           const Record& tile, int depth) {
  Barrier& full = shared.full[stage];
  const int boxes = (tile.end - tile.begin + kBoxRows - 1) / kBoxRows;
  const Weight w = weight_of(maps, tile.expert);
  arrive_expecting(full, uint32_t(kTile.a_bytes() + boxes * kBoxRows * 128));
  if constexpr (kTile.a_along) {
    load(shared.a[stage], *w.map, Box3{depth, tile.row, w.expert}, full);
  } else {
    load(shared.a[stage], *w.map, Box3{tile.row, depth, w.expert}, full);
    load(shared.a[stage] + kSlab, *w.map, Box3{tile.row + 64, depth, w.expert}, full);
  }
  for (int box = int(block_in_cluster()); box < boxes; box += kCluster) {
    const int row = kRaggedOrigin - tile.end + tile.begin + box * kBoxRows;
    load(shared.b[stage] + box * kBoxRows * 128, maps.x, Box4{depth, row, tile.end, kRaggedOrigin},
         full, kBothBlocks);
  }
}

/// The columns of y that a block takes of a pair of tiles: half of them, and of the last pair a
/// half of what is left, if that is one tile.
struct Columns {
  int first, limit;
};
__device__ Columns columns_of(int pair, int cols) {
  const int begin = pair * kCluster * kRows, height = cols - begin <= kRows ? 64 : kRows;
  const int first = begin + int(block_in_cluster()) * height;
  return {first, first + height < cols ? first + height : cols};
}

template <Tile kTile>
__device__ void produce(Shared<kTile>& shared, const RaggedRowsMaps& maps,
                        const RaggedRowsArgs& args) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  schedule::RaggedTiles tiles({args.offsets, args.experts, args.rows},
                              {kProductCols, 16, kTile.cols},
                              (args.cols + kCluster * kRows - 1) / (kCluster * kRows));
  const int clusters = int(gridDim.x) / kCluster;
  for (int64_t number = blockIdx.x / kCluster; tiles.seek(number); number += clusters) {
    const schedule::TilePlace place = tiles.place(args.band);
    const schedule::ExpertRows rows = tiles.rows(place);
    const Columns columns = columns_of(int(place.across), args.cols);
    const Record tile{tiles.expert(),  columns.first,  columns.limit,
                      int(rows.first), int(rows.last), args.depth};
    tell(shared, ring, tile);
    if (maps.experts != nullptr) acquire(maps.experts[tile.expert]);
    for (int depth = 0; depth < args.depth; depth += kDepth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      load_stage(shared, at.at, maps, tile, depth);
    }
  }
  tell(shared, ring, {-1, 0, 0, 0, 0, 0});
}

template <Tile kTile>
__device__ void fill(const float* sums, uint32_t to) {
  if constexpr (kTile.to_floats)
    put_floats_transposed<kTile.chunk_cols>(sums, to);
  else
    put_chunk_transposed<kTile.element, kTile.chunk_cols>(sums, to);
}

/// Stores a chunk: 64 columns of y from `col` on.
template <Tile kTile>
__device__ void put(const RaggedRowsMaps& maps, const Record& tile, int col, int chunk,
                    const uint8_t* from) {
  const int row = kRaggedOrigin - tile.end + tile.begin + kTile.chunk_cols * chunk;
  store(maps.y, Box4{col, row, tile.end, kRaggedOrigin}, from);
  if constexpr (kTile.to_floats)
    store(maps.y, Box4{col + 32, row, tile.end, kRaggedOrigin}, from + kTile.chunk_bytes() / 2);
}

template <Tile kTile>
__device__ int chunks_of(const Record& tile) {
  return (tile.end - tile.begin + kTile.chunk_cols - 1) / kTile.chunk_cols;
}

template <Tile kTile>
__device__ void carry(Shared<kTile>& shared, const RaggedRowsMaps& maps, int consumer) {
  Cursor<kRecords> ring;
  OutRing<kTile> out(shared, consumer);
  for (Record tile = hear_alone(shared, ring); tile.expert >= 0; tile = hear_alone(shared, ring)) {
    if (!is_for(tile, consumer)) continue;
    const int col = tile.row + 64 * consumer;
    carry_tile<kTile>(
        out, {chunks_of<kTile>(tile), 0}, [](int, const uint8_t*, Barrier&) {},
        [&](int chunk, const uint8_t* from) { put<kTile>(maps, tile, col, chunk, from); });
  }
  wait_for_stores();
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedRowsArgs& args, int consumer) {
  constexpr int kHeight = kTile.chunk_cols;  // rows of y
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  OutRing<kTile> out(shared, consumer);
  float sums[kTile.cols / 2] = {};
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    const int col = tile.row + 64 * consumer;
    if (!is_for(tile, consumer)) {
      skip(shared, at, tile);
      continue;
    }
    multiply<kTile, 16>(shared, at, tile, consumer, sums);
    fill_tile<kTile>(out, chunks_of<kTile>(tile), [&](int chunk, uint32_t to) {
      const float* some = sums + kHeight / 2 * chunk;
      if (!args.has_epilogue()) return fill<kTile>(some, to);
      float finished[kHeight / 2];
      finish_rows(args, tile, {some, tile.begin + kHeight * chunk, col}, finished);
      fill<kTile>(finished, to);
    });
  }
  if (args.tail != nullptr) zero_tail<kTile>(args);
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_rows_kernel(const __grid_constant__ RaggedRowsMaps maps,
                       const __grid_constant__ RaggedRowsArgs args) {
  run_roles<Config::kTile>([&](auto& shared) { produce(shared, maps, args); },
                           [&](auto& shared, int consumer) { carry(shared, maps, consumer); },
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
  static constexpr Tile kTile{.cols = kMostWidth,
                              .chunk_cols = kFloats ? kRowsOfFloats : kRowsOfChunk,
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
