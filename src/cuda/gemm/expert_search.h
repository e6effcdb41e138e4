#pragma once
#include "cuda/device/scan.h"
#include "cuda/gemm/roles.h"
#include "schedule/expert_rows.h"

namespace cadre::cuda::gemm {

/// As schedule::ExpertSearch, by a whole warp, which looks at 32 experts at once: where experts are
/// many and have few tiles, a walk would take longer than their products.
class WarpExpertSearch {
 public:
  __device__ WarpExpertSearch(const int32_t* offsets, int experts, int64_t rows)
      : offsets_(offsets),
        experts_(experts),
        bound_(int(schedule::rows_used(offsets, experts, rows))) {
    last_ = clamped(offsets_[0]);
    end_ = read_end(lane());
  }

  /// By all lanes, with the same number.
  template <class Tiles>
  __device__ bool seek(int64_t number, const Tiles& tiles) {
    while (number >= of_lane(upto_, kWarp - 1)) {
      if (window_ + kWarp >= experts_) return false;
      look(tiles);
    }
    const int skipped = __popc(__ballot_sync(~0u, upto_ <= number));
    expert_ = window_ + skipped;
    index_ = number - of_lane(before_, skipped);
    rows_ = {of_lane(first_, skipped), of_lane(last_, skipped)};
    return true;
  }
  __device__ int expert() const { return expert_; }
  __device__ schedule::ExpertRows rows() const { return rows_; }
  __device__ int64_t index() const { return index_; }

 private:
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  template <class Value>
  __device__ static Value of_lane(Value value, int lane) {
    return __shfl_sync(~0u, value, lane);
  }
  __device__ int clamped(int offset) const { return min(max(offset, 0), bound_); }
  /// Where the rows of an expert end; 0, which is never later than another end, if there is none.
  __device__ int read_end(int expert) const {
    return expert < experts_ ? clamped(offsets_[expert + 1]) : 0;
  }
  /// Moves on to the next 32 experts, each beginning where the one before ended or later.
  template <class Tiles>
  __device__ void look(const Tiles& tiles) {
    const int begin = of_lane(last_, kWarp - 1);
    const int64_t tiles_before = of_lane(upto_, kWarp - 1);
    window_ += kWarp;
    last_ = max(begin, warp_scan(end_, Largest()));
    first_ = __shfl_up_sync(~0u, last_, 1);
    if (lane() == 0) first_ = begin;
    end_ = read_end(window_ + kWarp + lane());
    const int64_t mine = tiles(int64_t(last_ - first_));
    upto_ = tiles_before + warp_scan(mine, Sum());
    before_ = upto_ - mine;
  }

  const int32_t* offsets_;
  int experts_, bound_;
  int window_ = -kWarp;            ///< the first of 32 experts, of which a lane has one:
  int first_ = 0, last_ = 0;       ///< its rows
  int64_t before_ = 0, upto_ = 0;  ///< tiles before it, and with its own
  int end_;                        ///< where the rows end of its expert of the next 32
  int expert_ = 0;
  schedule::ExpertRows rows_;
  int64_t index_ = 0;
};

}  // namespace cadre::cuda::gemm
