#pragma once
#include "cuda/device/copy.h"
#include "cuda/device/launch.h"
#include "cuda/sm90/multiply.cuh"
#include "cuda/sm90/shared.cuh"

// A grouped GEMM kernel of Hopper, put together from the parts that a struct `Kernel` names:
//
//   kTile      the shape of a tile and of its stages                              tile.h
//   Params     what the host passes: tensor maps, pointers, sizes
//   Schedule   Schedule(params).tile(number): which tile comes when; kByWarp: a warp asks;
//              kDealsFirst, if there: see gemm::Scheduler
//   Load       kWarps; kArrivals a stage; Load(params, tile).load(stage, full, depth)
//              Where rows are gathered, begin() and gather() by whole warps; Memory is their room
//              in shared memory.
//   Multiply   kRegisters; Multiply(params): multiply(stages, tile, ...), accumulators(col); if it
//              reads ahead, look_ahead(next tile, ...); if it has a Memory, which is its room in
//              shared memory, begin(memory) and Multiply(params, memory)          multiply.cuh
//   Store      kShape; Store(params, tile): parts(), write() by the consumers; open(), load() and
//              store() by the store warps; finish(params) behind the last tile    output.cuh
//              What leaves beside the next tile's products has Held instead, see
//              consume_and_hold_tiles(), and the Bias that goes into it; Memory is their room in
//              shared memory. What leaves row by row has find_rows() and scatter() instead of
//              store(), by whole warps.
//
// It is persistent: a block an SM, two blocks a cluster, which work on neighbouring tiles with one
// operand in common, mostly the second; each loads half of that for both. The life of a tile is
// this page: scheduled, loaded stage by stage, multiplied, written part by part, stored.
//
//   role        warps      work
//   consumers   4 each     products of 64 rows of a tile, then its output
//   load        kWarps     starts the loads of a stage, and gathers rows
//   store       a ring     one thread: loads of old output, stores of new; or one for both rings;
//                          all where rows are scattered
//   schedule    1          takes tiles and publishes their records
//
//   barrier             arrivals    who arrives                    who waits    guards
//   stage_full[s]       kArrivals   load warps, and the bytes      consumers    stage s is loaded
//   stage_empty[s]      all         consumers' warps, of both      load warps   s may be rewritten
//   output_empty[c][b]  1           store warp, and the bytes      consumer c   b may be written
//   output_full[.][b]   4           warps of a consumer            store warp   b holds a part
//   tiles: see gemm/scheduler.h
namespace cadre::cuda::sm90 {

/// The schedule warp. One lane takes numbers and publishes tiles; it finds them alone, or all do.
template <class Kernel>
__device__ inline void schedule_tiles(Shared<Kernel>& shared, const auto& params) {
  constexpr bool kByWarp = Kernel::Schedule::kByWarp;
  constexpr bool kDealsFirst = requires { Kernel::Schedule::kDealsFirst; };
  const bool leads = threadIdx.x % kWarp == 0;
  if (!kByWarp && !leads) return;
  gemm::Scheduler scheduler(shared.tiles, params.taken);
  typename Kernel::Schedule schedule(params);
  for (;;) {
    int64_t number = leads ? scheduler.template next_number<kDealsFirst>() : 0;
    if constexpr (kByWarp) number = __shfl_sync(~0u, number, 0);
    const TileRecord tile = schedule.tile(number);
    if (leads && (tile.is_last() || tile.depth > 0)) scheduler.publish(tile);
    if (tile.is_last()) break;
  }
  // Not before: what starts next would take the SMs that a budget leaves to others, and wait there.
  launch_dependents();
}

/// Asks for the next tile when so much of this one is still to be loaded.
template <Tile kTile>
__device__ inline void want_next(Barrier& wanted, const TileRecord& tile, int depth) {
  const int left = tile.depth - depth;
  if (left <= kTile.ahead && (depth == 0 || left + kTile.depth > kTile.ahead)) arrive(wanted);
}

/// A load warp.
template <class Kernel>
__device__ inline void load_tiles(Shared<Kernel>& shared, const auto& params) {
  constexpr Tile kTile = Kernel::kTile;
  StageRing<kTile> ring = shared.stage_ring();
  gemm::TileReader tiles(shared.tiles);
  for (TileRecord tile = tiles.next_in_warp(); !tile.is_last(); tile = tiles.next_in_warp()) {
    const typename Kernel::Load load(params, tile);
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, ring.at.next()) {
      ring.wait_empty();
      if (!elect()) continue;
      want_next<kTile>(shared.tiles.tile_wanted, tile, depth);
      load.load(ring.stage(), ring.full[ring.at.at], depth);
    }
  }
}

/// A load warp that gathers its share of the rows with all lanes. It arrives at a stage when its
/// copies have come, which it asks once those of the next stage are under way. The warps take turns
/// with what TMA loads.
template <class Kernel>
__device__ inline void gather_tiles(Shared<Kernel>& shared, const auto& params) {
  constexpr Tile kTile = Kernel::kTile;
  using Load = typename Kernel::Load;
  // A stage is passed on once the next is free, and a consumer frees one once the next is full.
  static_assert(kTile.stages > 2);
  static_assert(kTile.stages % Load::kWarps == 0);  // turns go on in the next round
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp % Load::kWarps;
  StageRing<kTile> ring = shared.stage_ring();
  int under_way = 0;
  const auto pass_on = [&] {
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) arrive(ring.full[under_way]);
  };
  gemm::TileReader tiles(shared.tiles);
  for (TileRecord tile = tiles.next_in_warp(); !tile.is_last(); tile = tiles.next_in_warp()) {
    Load load(params, tile);
    load.begin(shared.of_load);
    for (int depth = 0; depth < tile.depth; depth += kTile.depth, ring.at.next()) {
      ring.wait_empty();
      __syncwarp();
      if (unsigned(ring.at.at) % Load::kWarps == unsigned(warp) && elect()) {
        want_next<kTile>(shared.tiles.tile_wanted, tile, depth);
        load.load(ring.stage(), ring.full[ring.at.at], depth);
      }
      load.gather(ring.stage(), shared.of_load, depth);
      cp_async_commit();
      if (depth != 0) {
        cp_async_wait<1>();
        pass_on();
      }
      under_way = ring.at.at;
    }
    cp_async_wait<0>();
    pass_on();
  }
}

template <class Multiply>
__device__ __forceinline__ Multiply multiply_of(const auto& params, const auto& memory) {
  if constexpr (kHasMemory<Multiply>)
    return Multiply(params, memory);
  else
    return Multiply(params);
}

/// A consumer: products of every tile, then the parts of its output.
template <class Kernel>
__device__ __forceinline__ void consume_tiles(Shared<Kernel>& shared, const auto& params,
                                              int consumer) {
  constexpr OutputShape kShape = Kernel::Store::kShape;
  auto products = multiply_of<typename Kernel::Multiply>(params, shared.of_multiply);
  StageRing<Kernel::kTile> ring = shared.stage_ring();
  OutputRing<kShape> out = shared.output_ring(consumer % kShape.rings());
  gemm::TileReader tiles(shared.tiles);
  TileRecord next;
  const auto read_next = [&] {
    next = tiles.next_in_consumer();
    if constexpr (requires { products.look_ahead(next, consumer); })
      products.look_ahead(next, consumer);
  };
  read_next();
  while (!next.is_last()) {
    const TileRecord tile = next;
    const bool is_mine = has_rows(tile, consumer);
    if (is_mine) {
      products.multiply(ring, tile, consumer, read_next, [] {});
    } else {
      skip(ring, tile);
      read_next();
    }
    const typename Kernel::Store store(params, tile);
    const int parts = store.parts().count;
    const auto pass = [&](int first, int end) {
      for (int other = first; kShape.one_ring && other < end && has_rows(tile, other); ++other)
        out.pass(parts);
    };
    pass(0, consumer);
    if (is_mine)
      write_parts<kShape, Kernel::kTile.cols>(
          out, shared.output_empty[consumer], parts, [&](int part, uint32_t to) {
            const int col = kShape.part_cols * part;
            store.write({products.accumulators(col), part, tile.row + kConsumerRows * consumer,
                         tile.begin + col},
                        to);
          });
    pass(consumer + 1, Kernel::kTile.consumers);
  }
  Kernel::Store::finish(params);
}

/// A consumer that holds the output of a tile, packed, and writes it turn by turn while the next
/// tile is multiplied. All is inlined: a function's border would make products wait.
template <class Kernel>
__device__ __forceinline__ void consume_and_hold_tiles(Shared<Kernel>& shared, const auto& params,
                                                       int consumer) {
  constexpr OutputShape kShape = Kernel::Store::kShape;
  static_assert(!kShape.one_ring);
  using Held = typename Kernel::Store::Held;
  constexpr int kAllTurns = Held::kAllTurns;
  typename Kernel::Multiply products(params);
  Held held(params, shared.of_store);
  StageRing<Kernel::kTile> ring = shared.stage_ring();
  OutputRing<kShape> out = shared.output_ring(consumer);
  const auto write_turns = [&](int most) __attribute__((always_inline)) {
    for (; !held.is_empty() && most > 0; --most)
      held.write_turn(out, shared.output_empty[consumer]);
  };
  gemm::TileReader tiles(shared.tiles);
  TileRecord next = tiles.next_in_consumer();
  while (!next.is_last()) {
    const TileRecord tile = next;
    typename Kernel::Store::Bias bias;
    const auto read_ahead = [&]() __attribute__((always_inline)) {
      next = tiles.next_in_consumer();
      bias.read_of(params, shared.of_store, tile, consumer);
    };
    if (!has_rows(tile, consumer)) {
      write_turns(kAllTurns);  // the store warp reads no further record before
      skip(ring, tile);
      read_ahead();
      continue;
    }
    int owed = 0;  // turns, times the tile's depth: as many beside one stage as beside another
    const auto write_some = [&]() __attribute__((always_inline)) {
      for (owed += kAllTurns * Kernel::kTile.depth; owed >= tile.depth; owed -= tile.depth)
        write_turns(1);
    };
    products.multiply(ring, tile, consumer, read_ahead, write_some);
    write_turns(kAllTurns);
    held.take(products.accumulators(0), tile, bias);
  }
  write_turns(kAllTurns);
  Kernel::Store::finish(params);
}

/// A store warp's one thread.
template <class Kernel>
__device__ inline void store_tiles(Shared<Kernel>& shared, const auto& params, int ring) {
  constexpr OutputShape kShape = Kernel::Store::kShape;
  // Many consumers write few parts each, and have their buffers at once; of two, each has them all.
  constexpr int kTogether = Kernel::kTile.consumers == kConsumers ? 1 : Kernel::kTile.consumers;
  OutputRing<kShape> out = shared.output_ring(ring);
  gemm::TileReader tiles(shared.tiles);
  for (TileRecord tile = tiles.next(); !tile.is_last(); tile = tiles.next()) {
    typename Kernel::Store store(params, tile);
    store.open();
    const Parts parts = store.parts();
    for (int first = ring; first < Kernel::kTile.consumers && has_rows(tile, first);
         first += kTogether * kShape.rings()) {
      int count = 0;
      for (int i = 0; i < kTogether && has_rows(tile, first + i); ++i) count += parts.count;
      const auto consumer_of = [&](int number) {
        return kTogether == 1 ? first : first + number / parts.count;
      };
      const auto part_of = [&](int number) {
        return kTogether == 1 ? number : number % parts.count;
      };
      const auto row_of = [&](int number) {
        return tile.row + kConsumerRows * consumer_of(number);
      };
      store_parts<kShape>(
          out, count,
          [&](int number, int buffer) {
            Barrier& empty = shared.output_empty[consumer_of(number)][buffer];
            if (part_of(number) >= parts.loaded) return arrive(empty);
            arrive_expect_tx(empty, kShape.part_bytes());
            store.load(row_of(number), part_of(number), out.buffers[buffer], empty);
          },
          [&](int number, const uint8_t* from) {
            store.store(row_of(number), part_of(number), from);
          });
    }
  }
  tma_wait();
}

/// One thread that serves the rings of both consumers. Nothing is loaded.
template <class Kernel>
__device__ inline void store_tiles_of_both(Shared<Kernel>& shared, const auto& params) {
  using Ring = StoredRing<Kernel::Store::kShape>;
  Ring rings[kConsumers] = {{shared.output_ring(0), shared.output_empty[0]},
                            {shared.output_ring(1), shared.output_empty[1]}};
  gemm::TileReader tiles(shared.tiles);
  for (TileRecord tile = tiles.next(); !tile.is_last(); tile = tiles.next()) {
    const typename Kernel::Store store(params, tile);
    const int parts = store.parts().count;
    tma_wait_read<0>();
    for (int consumer = 0; consumer < kConsumers; ++consumer)
      rings[consumer].begin(has_rows(tile, consumer) ? parts : 0);
    store_parts_of_both(rings, [&](int consumer, int part, const uint8_t* from) {
      store.store(tile.row + kConsumerRows * consumer, part, from);
    });
  }
  tma_wait();
}

/// A store warp of a consumer whose rows go here and there.
template <class Kernel>
__device__ inline void scatter_tiles(Shared<Kernel>& shared, const auto& params, int consumer) {
  using Store = typename Kernel::Store;
  constexpr OutputShape kShape = Store::kShape;
  static_assert(kShape.store_warps() == kConsumers);
  const bool leads = threadIdx.x % kWarp == 0;
  OutputRing<kShape> out = shared.output_ring(consumer);
  auto& empty = shared.output_empty[consumer];
  gemm::TileReader tiles(shared.tiles);
  for (TileRecord tile = tiles.next_in_warp(); !tile.is_last(); tile = tiles.next_in_warp()) {
    if (!has_rows(tile, consumer)) continue;
    Store store(params, tile);
    const int parts = store.parts().count, column = tile.row + kConsumerRows * consumer;
    Cursor<kShape.buffers> at = out.at;
    for (int i = 0; leads && i < kShape.buffers && i < parts; ++i, at.next()) arrive(empty[at.at]);
    for (int part = 0; part < parts; ++part, out.at.next()) {
      store.find_rows(part);
      wait_asleep(out.full[out.at.at], out.at.parity);
      store.scatter(column, out.buffers[out.at.at]);
      __syncwarp();
      if (leads && part + kShape.buffers < parts) arrive(empty[out.at.at]);
    }
  }
}

template <class Kernel>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kRoles<Kernel>.threads(), 1)
    gemm_kernel(const __grid_constant__ typename Kernel::Params params) {
  constexpr gemm::Roles kRole = kRoles<Kernel>;
  static_assert(kRole.fits());
  auto& shared = *reinterpret_cast<Shared<Kernel>*>(dynamic_shared());
  if constexpr (kHasMemory<typename Kernel::Multiply>) Kernel::Multiply::begin(shared.of_multiply);
  init_barriers(shared);
  wait_for_predecessors();
  const int warpgroup = gemm::uniform(int(threadIdx.x) / kWarpgroup);
  if (warpgroup >= kRole.consumers) {
    setmaxnreg_dec<kRole.producer_registers>();
    const int warp = int(threadIdx.x) / kWarp - kRole.consumers * kWarpgroup / kWarp;
    const int ring = warp - kRole.first_store_warp();
    if (warp < kRole.load_warps) {
      if constexpr (kGathers<typename Kernel::Load>)
        gather_tiles(shared, params);
      else
        load_tiles(shared, params);
    }
    if (warp == kRole.schedule_warp()) schedule_tiles(shared, params);
    const bool stores = ring >= 0 && ring < kRole.store_warps;
    if (stores && int(threadIdx.x) % kWarp < kRole.store_lanes) {
      if constexpr (kScatters<typename Kernel::Store>)
        scatter_tiles(shared, params, ring);
      else if constexpr (Kernel::Store::kShape.one_warp)
        store_tiles_of_both(shared, params);
      else
        store_tiles(shared, params, ring);
    }
  } else {
    setmaxnreg_inc<kRole.consumer_registers>();
    if constexpr (requires { typename Kernel::Store::Held; })
      consume_and_hold_tiles(shared, params, warpgroup);
    else
      consume_tiles(shared, params, warpgroup);
  }
  __syncwarp();
  cluster_sync();  // the other block may still load into this one
}

template <class Kernel>
void launch_kernel(const typename Kernel::Params& params, int blocks, cudaStream_t stream) {
  constexpr int kSharedBytes = int(sizeof(Shared<Kernel>));
  static_assert(kSharedBytes + kSharedBytesOfBlock <= kMostSharedBytes);
  cuda::launch(&gemm_kernel<Kernel>,
               {.blocks = unsigned(blocks),
                .threads = kRoles<Kernel>.threads(),
                .shared_bytes = kSharedBytes,
                .stream = stream,
                .cluster = kCluster,
                .dependent = true},
               params);
}

}  // namespace cadre::cuda::sm90
