#pragma once
#include <bit>

namespace cadre::cuda::gemm {

/// A tile, as the scheduler describes it to the other roles of a block.
struct TileRecord {
  int expert = -1;  ///< -1: there are no more tiles
  /// Its rows of A begin here, and this block's end there at the latest: at once, if it has none.
  int row = 0, row_limit = 0;
  int begin = 0, end = 0;  ///< its columns: rows of the batch, or columns of B
  int depth = 0;           ///< of the contraction; 0: nothing to do
  int rows = 0;            ///< of a ragged contraction: how many
  int rows_end = 0;        ///< where rows of the batch end, of a ragged contraction or of this tile
  int same_rows = 0;       ///< the blocks of a cluster have the rows in common, not the columns

  __device__ bool is_last() const { return expert < 0; }
  __device__ int cols() const { return end - begin; }
};

/// The same value, which the compiler then knows to be the same in all lanes of a warp.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

/// The same of a whole record, so that no field can be left out.
__device__ inline TileRecord uniform(const TileRecord& tile) {
  struct Words {
    int word[sizeof(TileRecord) / sizeof(int)];
  };
  auto words = std::bit_cast<Words>(tile);
#pragma unroll
  for (int& word : words.word) word = uniform(word);
  return std::bit_cast<TileRecord>(words);
}

}  // namespace cadre::cuda::gemm
