#pragma once
#include "cuda/device/scan.h"
#include "cuda/parallel/rank_map.cuh"

// The stable sort of few choices by one block, in shared memory. What chose an expert is a bit a
// choice, so that a choice's rank among its equals is a count of bits: no warp goes through choices
// one after another, and who needs the rows of some finds these alone.
namespace cadre::cuda {

/// Of P * T * top_k choices and P * E experts.
class ChoiceBits {
 public:
  /// Shared memory that it takes.
  static int bytes(const parallel::MapJob& job) {
    const int64_t choices = job.ranks * job.choices;
    const int64_t words = pieces<int64_t>(choices, kBits) + pieces<int64_t>(choices, kRun) + 1;
    return int(int64_t(sizeof(uint32_t)) * job.ranks * job.experts * words);
  }
  __device__ ChoiceBits(const parallel::MapJob& job, uint8_t* memory)
      : choices_(int(job.ranks * job.choices)),
        experts_(job.ranks * job.experts),
        bits_(reinterpret_cast<uint32_t*>(memory)),
        before_(bits_ + pieces(choices_, kBits) * experts_),
        first_(before_ + runs() * experts_) {}

  /// What it begins with, for who has time for it before. A barrier of the block comes behind it.
  __device__ void clear() const {
    for (auto* at = bits_ + threadIdx.x; at < first_; at += blockDim.x) *at = 0;
  }
  /// By all threads: tells `map` where experts end. row_of() is there behind a barrier.
  template <class Map>
  __device__ void sort(const int32_t* chosen, const Map& map) const {
    for (int slot = int(threadIdx.x); slot < choices_; slot += int(blockDim.x)) {
      const int e = chosen[slot];
      if (unsigned(e) >= unsigned(experts_)) continue;
      atomicOr(&bits_[slot / kBits * experts_ + e], 1u << slot % kBits);
      atomicAdd(&before_[slot / kRun * experts_ + e], 1u);
    }
    __syncthreads();
    find_ends(map);
  }
  /// Of a choice of that expert: its row among those of all ranks, -1: it is no expert.
  __device__ int row_of(int slot, int e) const {
    if (unsigned(e) >= unsigned(experts_)) return -1;
    const int run = slot / kRun, in_run = slot % kRun / kBits;
    const uint32_t* word = bits_ + run * (kRun / kBits) * experts_ + e;
    uint32_t row = first_[e] + before_[run * experts_ + e];
#pragma unroll
    for (int i = 0; i < kRun / kBits; ++i)
      if (i <= in_run)
        row += __popc(word[i * experts_] & (i < in_run ? ~0u : (1u << slot % kBits) - 1));
    return int(row);
  }

 private:
  static constexpr int kBits = 32, kRun = 128;  // choices of a word, and of those counted together

  template <class Count>
  CADRE_HD static Count pieces(Count choices, int each) {
    return (choices + each - 1) / each;
  }
  __device__ int runs() const { return pieces(choices_, kRun); }

  /// Counts become those of the runs before.
  template <class Map>
  __device__ void find_ends(const Map& map) const {
    __shared__ int of_warps[portable::kLanes];
    const auto add = [](int a, int b) { return a + b; };
    const int lane = int(threadIdx.x) % portable::kLanes,
              warp = int(threadIdx.x) / portable::kLanes;
    int carry = 0;
    for (int first = 0; first < experts_; first += int(blockDim.x)) {
      const int e = first + int(threadIdx.x);
      int count = 0;
#pragma unroll 4
      for (int run = 0; e < experts_ && run < runs(); ++run) {
        uint32_t& at = before_[run * experts_ + e];
        const int here = int(at);
        at = uint32_t(count);
        count += here;
      }
      const int upto = warp_scan(count, add);
      if (first != 0) __syncthreads();  // the last sums have been read
      if (lane == portable::kLanes - 1) of_warps[warp] = upto;
      __syncthreads();
      const int warps = int(blockDim.x) / portable::kLanes;
      const int sums = warp_scan(lane < warps ? of_warps[lane] : 0, add);
      const int end = carry + upto + (warp > 0 ? __shfl_sync(~0u, sums, warp - 1) : 0);
      carry += __shfl_sync(~0u, sums, portable::kLanes - 1);
      if (e >= experts_) continue;
      first_[e] = uint32_t(end - count);
      map.end_expert(e, end);
    }
  }

  int choices_, experts_;
  uint32_t *bits_, *before_;  ///< [words, P * E] of choices; [runs, P * E], how many before a run
  uint32_t* first_;           ///< [P * E]: the row of an expert's first choice
};

}  // namespace cadre::cuda
