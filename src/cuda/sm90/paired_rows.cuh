#pragma once
#include "cuda/gemm/expert_search.h"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/tile.h"
#include "schedule/tiles.h"

namespace cadre::cuda::sm90 {

/// Pairs of tiles expert by expert. Where one is above the other, the blocks of a cluster share the
/// rows of w; where they are side by side, those of the batch.
template <Tile kTile>
class PairedRowsSchedule {
 public:
  static constexpr bool kByWarp = true;

  __device__ explicit PairedRowsSchedule(const RaggedRowsParams& params)
      : params_(params),
        pairs_({params.offsets, params.expert_count, params.rows}, kTileRows,
               (params.cols + kTile.cols - 1) / kTile.cols) {}

  __device__ TileRecord tile(int64_t number) {
    if (!pairs_.seek(number)) return {};
    const schedule::TilePair pair = pairs_.pair(params_.band);
    const int mine = int(cluster_ctarank()), across = pair.side_by_side ? mine : 0;
    const schedule::ExpertRows rows = pairs_.rows(pair.first.down + mine - across);
    const int begin = int(pair.first.across + across) * kTile.cols;
    const int end = begin + kTile.cols < params_.cols ? begin + kTile.cols : params_.cols;
    return {.expert = pairs_.expert(),
            .row = int(rows.first),
            .row_limit = int(begin < params_.cols ? rows.last : rows.first),
            .begin = begin,
            .end = end,
            .depth = params_.depth,
            .rows_end = int(rows.last),
            .same_rows = pair.side_by_side};
  }

 private:
  const RaggedRowsParams& params_;
  schedule::PairedTilesBy<gemm::WarpExpertSearch> pairs_;
};

}  // namespace cadre::cuda::sm90
