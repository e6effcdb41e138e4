#pragma once
#include "cuda/parallel/exchange.cuh"
#include "schedule/rank_rows.h"

// The map of a dispatch: the choices of all ranks, sorted, and what this rank makes of them.
namespace cadre::cuda {

/// Of a dispatch, the sorted choices of all ranks as its map; see portable::OffsetsAndMap.
struct RankMap {
  static constexpr bool kBySection = false;
  const parallel::MapJob& job;
  int32_t* firsts;     ///< shared, [P + 1]: the first row of each rank among all
  int32_t* ends;       ///< shared, [E]: where the rows of each expert here end, among all
  int32_t* rows_here;  ///< shared, [P, T, top_k], as row_here; null: not wanted
  bool writes;         ///< places, to the map in global memory

  __device__ schedule::RankRows rows() const { return {firsts, 1, job.bound}; }
  /// Rows of this rank.
  __device__ int64_t used() const { return min(rows().routed(job.rank), job.bound); }

  __device__ void end_expert(int e, int64_t end) const {
    if (e == 0) firsts[0] = 0;
    if ((e + 1) % job.experts == 0) firsts[(e + 1) / job.experts] = int32_t(end);
    const int mine = e - job.rank * job.experts;
    if (mine >= 0 && mine < job.experts) ends[mine] = int32_t(end);
  }
  __device__ void place(int64_t slot, int e, int64_t row, float) const {
    place_here(slot, row);
    const int64_t mine = own_choice(slot);
    if (!writes || mine < 0) return;
    const int32_t there = rows().row_at_rank_of(row, e / job.experts);
    job.map.row_of[mine] = there;
    job.note_sum(mine, e / job.experts, there);
  }
  /// Which row here one of all is, or -1.
  __device__ int32_t here(int64_t row) const { return rows().row_of_rank(row, job.rank); }
  /// Which row here a choice has, or -1.
  __device__ int32_t place_here(int64_t slot, int64_t row) const {
    const int32_t here = this->here(row);
    if (rows_here != nullptr) rows_here[slot] = here;
    if (!writes) return here;
    job.map.row_here[slot] = here;
    if (here >= 0) job.map.slot_of[here] = int32_t(slot);
    return here;
  }
  /// Which of this rank's choices it is; negative: none.
  __device__ int64_t own_choice(int64_t slot) const {
    const int64_t mine = slot - job.rank * job.choices;
    return mine < job.own ? mine : -1;
  }
  __device__ bool overflows() const {
    bool any = false;
    for (int q = 0; job.overflow_is_error && q < job.ranks; ++q)
      any |= rows().routed(q) > job.bound;
    return any;
  }
  /// Behind all places, by the first block: each part by other warps, if there are so many.
  __device__ void finish(const WindowTable& window) const {
    const int thread = int(threadIdx.x), back = int(blockDim.x) - 1 - thread;
    for (int e = thread; e < job.experts; e += int(blockDim.x))
      job.map.offsets[e + 1] = int32_t(min(int64_t(ends[e] - firsts[job.rank]), job.bound));
    for (int q = back; q < job.ranks && job.routed != nullptr; q += int(blockDim.x))
      job.routed[q] = int32_t(rows().routed(q));
    if (thread != int(blockDim.x) / 2) return;
    job.map.offsets[0] = 0;
    *job.map.verdict = overflows();
    const int worst = rows().fullest(job.ranks);
    if (overflows())
      store_release_system(&window.notes->overflow,
                           overflow_word({job.problem, worst, int32_t(rows().routed(worst))}));
  }
};

/// The same where results are pushed. Its blocks have choices of one rank each: a section of the
/// sort.
struct MapWithPlaces : RankMap {
  static constexpr bool kBySection = true;
  int rank;         ///< of the choices
  int32_t* shifts;  ///< shared, [P * E]: from a row of all to its place at that rank

  __device__ void begin_section(int e, int64_t row, int64_t place) const {
    shifts[e] = int32_t(place - row);
  }
  __device__ void place(int64_t slot, int e, int64_t row, float) const {
    const int32_t here = place_here(slot, row), place = e < 0 ? -1 : int32_t(row) + shifts[e];
    if (here >= 0) job.map.place_of[here] = int32_t(rank * job.choices) + place;
    if (const int64_t mine = own_choice(slot); mine >= 0)
      job.map.row_of[mine] = rows().row_at_rank_of(row, e / job.experts) < 0 ? -1 : place;
  }
};

/// How a block sorts, in so much shared memory: that of the sort, then RankMap's.
struct MapShape {
  int warps, sort_bytes, bytes;

  MapShape(const parallel::MapJob& job, int warps_of_block, bool keeps_rows)
      : MapShape(job, warps_of_block,
                 portable::row_map_bytes(warps_of_block, job.ranks * job.experts), keeps_rows) {}
  MapShape(const parallel::MapJob& job, int warps_of_block, int bytes_of_sort, bool keeps_rows)
      : warps(warps_of_block),
        sort_bytes(bytes_of_sort),
        bytes(sort_bytes + int(sizeof(int32_t)) * (job.ranks + 1 + job.experts)) {
    if (keeps_rows) bytes += int(sizeof(int32_t) * job.ranks * job.choices);
    if (job.map.place_of != nullptr) bytes += int(sizeof(int32_t)) * job.ranks * job.experts;
  }
};

/// Sorts the choices of all ranks by these blocks. `firsts` lie behind the sort's own memory; rows
/// may take the place of choices.
template <class Map>
__device__ void sort_choices_of_ranks(const Map& map, const int32_t* chosen,
                                      const BlockShare& share) {
  const parallel::MapJob& job = map.job;
  const int64_t slots = job.ranks * job.choices;
  const int sections = Map::kBySection ? job.ranks : 1;
  const int warps = int(blockDim.x) / portable::kLanes * share.count / sections;
  const portable::OffsetsJob sort{.source = chosen,
                                  .offsets = nullptr,
                                  .row_of = nullptr,
                                  .slot_of = nullptr,
                                  .status = nullptr,
                                  .prob = nullptr,
                                  .row_prob = nullptr,
                                  .counts = static_cast<int32_t*>(job.scratch.data),
                                  .rows = slots,
                                  .slots = slots,
                                  .run = portable::run_length(slots / sections, warps),
                                  .experts = job.ranks * job.experts,
                                  .sections = sections};
  portable::sort_choices<int32_t>(sort, share, dynamic_shared(), map);
}

}  // namespace cadre::cuda
