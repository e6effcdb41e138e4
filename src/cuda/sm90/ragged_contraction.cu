#include "cuda/sm90/ragged_contraction.h"

#include "cuda/device/tensor_map.h"
#include "cuda/sm90/consume.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "schedule/tiles.h"

// dw_e[m, c] (+)= alpha_e * sum_r a[r, m] * b[r, c] over the rows r of every expert: wgrad.
//
// a [R, M] and b [R, C] row-major, their rows across the contraction; dw [E, M, C] row-major. The
// last rows of an expert's last stage are zeros that the copy engine makes. An expert without rows
// gets the product of one row of zeros, or is left alone when accumulating.
namespace cadre::cuda::sm90 {
namespace {

/// Columns of a tile of floats: 128, all of whose chunks have a buffer, or 192.
constexpr int kColsOfFloats = 192;
/// Rows of an expert up to which floats are loaded and added to, not added by the copy engine; 0:
/// the copy engine adds all of them.
constexpr int kMostLoadedRows = 1536;

/// Loads the next 64 rows of the batch, from rows.first on; half of the columns of b for both
/// blocks.
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
    if (rows.count() == 0 && args.accumulates(expert)) continue;
    const int64_t begin = place.across * width, left = (args.cols - begin + 63) / 64 * 64;
    const int first = (int(place.down) * kCluster + rank) * kRows;
    const Record tile{expert,
                      first,
                      first + kRows < args.out_rows ? first + kRows : args.out_rows,
                      int(begin),
                      int(begin + (left < width ? left : width)),
                      rows.count() == 0 ? 1 : int(rows.count())};
    tell(shared, ring, tile);
    for (int depth = 0; depth < tile.depth; depth += kDepth, rows.first += kDepth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      load_stage(shared, at.at, maps, tile, rows);
    }
  }
  tell(shared, ring, {-1, 0, 0, 0, 0, 0});
}

template <Tile kTile>
__device__ void fill(const float* sums, uint32_t to) {
  if constexpr (kTile.to_floats)
    put_floats(sums, to);
  else
    put_chunk<kTile.element>(sums, to);
}

/// The map of an expert's dw, and the expert's coordinate in it.
struct Gradient {
  const CUtensorMap* map;
  int expert;
};
__device__ Gradient gradient_of(const RaggedContractionMaps& maps, int expert) {
  if (maps.experts == nullptr) return {&maps.dw, expert};
  acquire(maps.experts[expert]);
  return {maps.experts + expert, 0};
}

/// The chunks of a tile. Floats are added to here if they have been loaded, else by the copy
/// engine, which is slower, but costs nothing where many rows hide it. It takes the chunks that
/// have no buffer while the tile is multiplied.
template <Tile kTile>
__device__ Chunks chunks_of(const RaggedContractionArgs& args, const Record& tile) {
  const int end = tile.end < args.cols ? tile.end : args.cols;
  const int count = (end - tile.begin + kTile.chunk_cols - 1) / kTile.chunk_cols;
  if (!kTile.to_floats || tile.depth > kMostLoadedRows || !args.accumulates(tile.expert))
    return {count, 0};
  return {count, count < kTile.buffers ? count : kTile.buffers};
}

/// Finishes a chunk of sums that begins at that row and column of dw, and writes it to its buffer.
template <Tile kTile>
__device__ void finish(const RaggedContractionArgs& args, const Record& tile, const TilePart& part,
                       bool is_loaded, uint32_t to) {
  if (!is_loaded && !args.has_epilogue(kTile.to_floats)) return fill<kTile>(part.sums, to);
  float finished[kTile.chunk_cols / 2];
  finish_contraction<kTile>(args, tile, part, finished);
  if constexpr (kTile.to_floats)
    if (is_loaded) add_floats(finished, to, finished);
  fill<kTile>(finished, to);
}

template <Tile kTile>
__device__ void carry(Shared<kTile>& shared, const RaggedContractionMaps& maps,
                      const RaggedContractionArgs& args, int consumer) {
  Cursor<kRecords> ring;
  OutRing<kTile> out(shared, consumer);
  for (Record tile = hear_alone(shared, ring); tile.expert >= 0; tile = hear_alone(shared, ring)) {
    if (!is_for(tile, consumer)) continue;
    const Gradient dw = gradient_of(maps, tile.expert);
    const Chunks chunks = chunks_of<kTile>(args, tile);
    const bool adds = kTile.to_floats && args.accumulates(tile.expert);
    const auto place = [&](int chunk) {
      return Box3{tile.begin + kTile.chunk_cols * chunk, tile.row + 64 * consumer, dw.expert};
    };
    carry_tile<kTile>(
        out, chunks,
        [&](int chunk, uint8_t* to, Barrier& barrier) { load(to, *dw.map, place(chunk), barrier); },
        [&](int chunk, const uint8_t* from) {
          if (adds && chunk >= chunks.loaded)
            add(*dw.map, place(chunk), from);
          else
            store(*dw.map, place(chunk), from);
        });
  }
  wait_for_stores();
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedContractionArgs& args, int consumer) {
  constexpr int kCols = kTile.chunk_cols;
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  OutRing<kTile> out(shared, consumer);
  float sums[kTile.cols / 2] = {};
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    if (!is_for(tile, consumer)) {
      skip(shared, at, tile);
      continue;
    }
    const Chunks chunks = chunks_of<kTile>(args, tile);
    multiply<kTile, 64>(shared, at, tile, consumer, sums);
    fill_tile<kTile>(out, chunks.count, [&](int chunk, uint32_t to) {
      const TilePart part{sums + kCols / 2 * chunk, tile.row + 64 * consumer,
                          tile.begin + kCols * chunk};
      finish<kTile>(args, tile, part, chunk < chunks.loaded, to);
    });
  }
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_contraction_kernel(const __grid_constant__ RaggedContractionMaps maps,
                              const __grid_constant__ RaggedContractionArgs args) {
  run_roles<Config::kTile>([&](auto& shared) { produce(shared, maps, args); },
                           [&](auto& shared, int consumer) { carry(shared, maps, args, consumer); },
                           [&](auto& shared, int consumer) { consume(shared, args, consumer); });
}

using Job = Launch<RaggedContractionMaps, RaggedContractionArgs>;

// nvcc cannot name kernels that take a Tile, so they take a type that has one.
template <Element kElement, bool kFloats>
struct Config {
  static constexpr Tile kTile{.cols = kFloats ? kColsOfFloats : 256,
                              .chunk_cols = kFloats ? 32 : 64,
                              .stages = kFloats && kColsOfFloats <= 128 ? 5 : 4,
                              .buffers = kFloats ? 4 : 2,
                              .a_along = false,
                              .b_along = false,
                              .ragged_depth = true,
                              .element = kElement,
                              .to_floats = kFloats};
};

template <class Config>
void launch(const Job& l) {
  launch_tiles<Config::kTile>(&ragged_contraction_kernel<Config>, l);
}

template <Element kElement>
void launch_type(bool floats, const Job& l) {
  floats ? launch<Config<kElement, true>>(l) : launch<Config<kElement, false>>(l);
}

}  // namespace

void ragged_contraction(const RaggedContractionKind& kind, const RaggedContractionMaps& maps,
                        const RaggedContractionArgs& args, int blocks, cudaStream_t stream) {
  const Job l{maps, args, blocks, stream};
  kind.f16 ? launch_type<Element::kF16>(kind.floats, l)
           : launch_type<Element::kBf16>(kind.floats, l);
}

}  // namespace cadre::cuda::sm90
