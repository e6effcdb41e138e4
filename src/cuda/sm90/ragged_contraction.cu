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

/// Loads a stage of rows of the batch, the first of which is `left` rows before the end of the
/// expert's; half of the columns of b for both blocks.
template <Tile kTile>
__device__ void load_stage(Shared<kTile>& shared, int stage, const RaggedContractionMaps& maps,
                           const Record& tile, int left) {
  Barrier& full = shared.full[stage];
  const int slabs = (tile.end - tile.begin) / 64, row = kRaggedOrigin - left, end = tile.rows_end;
  arrive_expect_tx(full, uint32_t(kTile.a_bytes() + slabs * kTile.slab_bytes()));
  tma_load(shared.a[stage], maps.a, Box4{tile.row, row, end, kRaggedOrigin}, full);
  tma_load(shared.a[stage] + kTile.slab_bytes(), maps.a,
           Box4{tile.row + 64, row, end, kRaggedOrigin}, full);
  for (int slab = int(cluster_ctarank()); slab < slabs; slab += kCluster)
    tma_load(shared.b[stage] + slab * kTile.slab_bytes(), maps.b,
             Box4{tile.begin + 64 * slab, row, end, kRaggedOrigin}, full, kAllBlocks);
}

template <Tile kTile>
__device__ void schedule_tiles(Shared<kTile>& shared, const RaggedContractionArgs& args) {
  Scheduler<kTile> scheduler(shared, args.taken);
  const int64_t width = schedule::TileHeight{kTile.cols, 64}.of(args.cols);
  const schedule::TileGrid grid{(args.out_rows + kCluster * kRows - 1) / (kCluster * kRows),
                                (args.cols + width - 1) / width};
  for (int64_t number = scheduler.take(); number < grid.count() * args.experts;
       number = scheduler.take()) {
    const int expert = int(number / grid.count());
    const schedule::TilePlace place = banded(number % grid.count(), grid, args.band);
    const schedule::ExpertRows rows = schedule::rows_of(args.offsets, expert, args.rows);
    if (rows.count() == 0 && args.accumulates(expert)) continue;
    const int64_t begin = place.across * width, left = (args.cols - begin + 63) / 64 * 64;
    const BlockRows mine = block_rows(int(place.down), args.out_rows);
    scheduler.tell({expert, mine.first, mine.limit, int(begin),
                    int(begin + (left < width ? left : width)),
                    rows.count() == 0 ? 1 : int(rows.count()), int(rows.count()), int(rows.last)});
  }
  scheduler.tell({-1, 0, 0, 0, 0, 0});
}

/// An expert without rows gets one stage, which lies behind its end: zeros.
template <Tile kTile>
__device__ void produce(Shared<kTile>& shared, const RaggedContractionMaps& maps) {
  Cursor<kTile.stages> at;
  Cursor<kRecords> ring;
  for (Record tile = hear(shared, ring); tile.expert >= 0; tile = hear(shared, ring)) {
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, at.next()) {
      wait(shared.empty[at.at], at.parity ^ 1);
      if (!elect()) continue;
      want_next(shared, depth, tile);
      load_stage(shared, at.at, maps, tile, tile.rows - depth);
    }
  }
}

template <Tile kTile>
__device__ void fill(const float* sums, uint32_t to) {
  if constexpr (kTile.to_floats)
    put_floats(sums, to);
  else
    put_part<kTile.element>(sums, to);
}

/// The map of an expert's dw, and the expert's coordinate in it.
struct Gradient {
  const CUtensorMap* map;
  int expert;
};
__device__ Gradient gradient_of(const RaggedContractionMaps& maps, int expert) {
  if (maps.experts == nullptr) return {&maps.dw, expert};
  tensormap_acquire(maps.experts[expert]);
  return {maps.experts + expert, 0};
}

/// The parts of a tile. Floats are added to here if they have been loaded, else by the copy
/// engine, which is slower, but costs nothing where many rows hide it.
template <Tile kTile>
__device__ Parts parts_of(const RaggedContractionArgs& args, const Record& tile) {
  static_assert(!kTile.to_floats || kTile.buffers * kTile.part_cols == kTile.cols);
  const int end = tile.end < args.cols ? tile.end : args.cols;
  const int count = (end - tile.begin + kTile.part_cols - 1) / kTile.part_cols;
  const bool loads =
      kTile.to_floats && tile.depth <= kMostLoadedRows && args.accumulates(tile.expert);
  return {count, loads ? count : 0};
}

/// Finishes a part of sums that begins at that row and column of dw, and writes it to its buffer.
template <Tile kTile>
__device__ void finish(const RaggedContractionArgs& args, const Record& tile, const TilePart& part,
                       bool is_loaded, uint32_t to) {
  if (!is_loaded && !args.has_epilogue(kTile.to_floats)) return fill<kTile>(part.sums, to);
  float finished[kTile.part_cols / 2];
  finish_contraction<kTile>(args, tile, part, finished);
  if constexpr (kTile.to_floats)
    if (is_loaded) add_floats(finished, to, finished);
  fill<kTile>(finished, to);
}

template <Tile kTile>
__device__ void carry(Shared<kTile>& shared, const RaggedContractionMaps& maps,
                      const RaggedContractionArgs& args, int ring) {
  Cursor<kRecords> records;
  OutRing<kTile> out(shared, ring);
  for (Record tile = hear_alone(shared, records); tile.expert >= 0;
       tile = hear_alone(shared, records)) {
    const Gradient dw = gradient_of(maps, tile.expert);
    const Parts parts = parts_of<kTile>(args, tile);
    const bool adds = kTile.to_floats && args.accumulates(tile.expert);
    for (int consumer = ring; consumer < kConsumers && is_for(tile, consumer);
         consumer += kTile.rings()) {
      const auto place = [&](int part) {
        return Box3{tile.begin + kTile.part_cols * part, tile.row + 64 * consumer, dw.expert};
      };
      carry_tile<kTile>(
          out, shared.free[consumer], parts,
          [&](int part, uint8_t* to, Barrier& old) { tma_load(to, *dw.map, place(part), old); },
          [&](int part, const uint8_t* from) {
            if (adds && part >= parts.loaded)
              tma_reduce_add(*dw.map, place(part), from);
            else
              tma_store(*dw.map, place(part), from);
          });
    }
  }
  tma_wait();
}

template <Tile kTile>
__device__ void consume(Shared<kTile>& shared, const RaggedContractionArgs& args, int consumer) {
  const auto parts = [&](const Record& tile) { return parts_of<kTile>(args, tile); };
  consume_tiles<kTile, Widths{64, 64, kTile.cols}>(
      shared, consumer, [&](const Record& tile) { return parts(tile).count; },
      [&](const Record& tile, const TilePart& part, int number, uint32_t to) {
        finish<kTile>(args, tile, part, number < parts(tile).loaded, to);
      });
}

template <class Config>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    ragged_contraction_kernel(const __grid_constant__ RaggedContractionMaps maps,
                              const __grid_constant__ RaggedContractionArgs args) {
  run_roles<Config::kTile>([&](auto& shared) { schedule_tiles(shared, args); },
                           [&](auto& shared) { produce(shared, maps); },
                           [&](auto& shared, int ring) { carry(shared, maps, args, ring); },
                           [&](auto& shared, int consumer) { consume(shared, args, consumer); });
}

using Job = Launch<RaggedContractionMaps, RaggedContractionArgs>;

// nvcc cannot name kernels that take a Tile, so they take a type that has one.
template <Element kElement, bool kFloats>
struct Config {
  static constexpr Tile kTile{.cols = kFloats ? kColsOfFloats : kMostCols,
                              .part_cols = kFloats ? 32 : 64,
                              .depth = contraction_depth(kFloats),
                              .stages = kFloats ? kStagesOfFloats : kStagesOfGradients,
                              .ahead = kAheadOfGradients,
                              .turns = !kFloats,
                              .buffers = kFloats ? kBuffersOfFloats : kBuffers,
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
