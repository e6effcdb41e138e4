#pragma once
#include "cuda/device/small_float.h"
#include "cuda/gemm/expert_search.h"
#include "cuda/portable/quantize_job.h"
#include "cuda/portable/row_grid.h"

// What a warp takes at a time, or a block: a part of one expert, in which each lane has eight rows
// and eight columns. Warps go over all parts in a stretch of columns by a grid-stride loop.
namespace cadre::cuda::portable {

/// How the lanes of a warp lie: beside each other along rows of codes; or, where columns of codes
/// are turned, in two rows of patches, which write 128 columns. Of a block's part it says the size
/// alone, and PatchOf where its patches begin.
struct PartShape {
  int lanes_down;
  bool turned;
  int patch_rows = kChunk;  ///< of a lane
  int threads = kLanes;     ///< that a part has: those of a warp, or of a block

  CADRE_HD constexpr int rows() const { return lanes_down * patch_rows; }
  CADRE_HD constexpr int cols() const { return threads / lanes_down * kChunk; }
  /// Where the patch of this lane begins.
  __device__ int row() const { return int(threadIdx.x) % lanes_down * patch_rows; }
  __device__ int col() const { return int(threadIdx.x) / lanes_down * kChunk; }

  /// For so many parts down, of at most so many blocks. Turned, parts of a block lie below each
  /// other: it reads whole lines of 128 bytes, of which each of its warps has a piece.
  RowGrid grid(int64_t down, int64_t columns, int most) const {
    const int most_across = turned ? 1 : kGridWarps;
    RowGrid grid = threads > kLanes
                       ? RowGrid::of_blocks(down, (columns + cols() - 1) / cols(), threads)
                       : RowGrid::of(down, columns * kRound / cols(), 1, most_across);
    grid.blocks.y = std::clamp(unsigned(most) / grid.blocks.x, 1u, grid.blocks.y);
    return grid;
  }
};
constexpr PartShape kRowsPart{1, false}, kTurnedPart{2, true};

/// A tile of a warp's size, and where its expert begins in rows of codes and in those of out.
struct Part : ExpertTile {
  int64_t code_row = 0, out_row = 0;
};

/// The number of this warp's first part down, and from it to the next one.
__device__ inline int64_t first_part() { return int64_t(blockIdx.y) * blockDim.z + threadIdx.z; }
__device__ inline int64_t part_step() { return int64_t(gridDim.y) * blockDim.z; }

/// The columns of this warp, none or less where it has none.
__device__ inline void take_columns(PartShape shape, int64_t columns, Part& part) {
  const int64_t first = segment_index() * shape.cols();
  part.col = int(first);
  part.cols = int(min(columns - first, int64_t(shape.cols())));
}

/// Parts of routed rows as they are. By whole warps.
template <PartShape kShapeOfIt>
class BatchParts {
 public:
  static constexpr PartShape kShape = kShapeOfIt;

  static RowGrid grid(const ExpertsRows& of, int most) {
    const int64_t down = of.rows / kShape.rows() + std::min<int64_t>(of.rows, of.experts);
    return kShape.grid(down, of.cols, most);
  }
  __device__ explicit BatchParts(const ExpertsRows& of)
      : cols_(of.cols), search_(of.offsets, of.experts, of.rows), number_(int(first_part())) {}
  __device__ bool next(Part& part) {
    const auto parts_of = [](int64_t rows) {
      return uint32_t(rows + kShape.rows() - 1) / uint32_t(kShape.rows());
    };
    if (!search_.seek(number_, parts_of)) return false;
    number_ += int(part_step());
    const schedule::ExpertRows rows = search_.rows();
    part.expert = search_.expert();
    part.first = int(rows.first);
    const int row = int(search_.index()) * kShape.rows();
    part.row = row;
    part.rows = min(int(rows.count()) - row, kShape.rows());
    take_columns(kShape, cols_, part);
    return true;
  }

 private:
  int64_t cols_;
  gemm::WarpExpertSearch search_;
  int number_;  ///< a part has eight rows or more
};

/// Parts of routed rows; of rows of codes, which transformed ones have more of. By whole warps.
class RoutedParts {
 public:
  static constexpr PartShape kShape = kRowsPart;

  static RowGrid grid(const DequantizeJob& job, int most) {
    return kShape.grid(job.of.rows / kShape.rows() + job.of.experts, job.of.cols, most);
  }
  __device__ explicit RoutedParts(const DequantizeJob& job)
      : job_(job),
        search_(job.of.offsets, job.of.experts, min(job.of.rows, int64_t(INT32_MAX))),
        number_(first_part()) {}
  __device__ bool next(Part& part) {
    const auto parts_of = [&](int64_t rows) {
      return (code_rows_of(rows) + kShape.rows() - 1) / kShape.rows();
    };
    if (!search_.seek(number_, parts_of)) return false;
    number_ += part_step();
    const schedule::ExpertRows rows = search_.rows();
    part.expert = search_.expert();
    part.first = int(rows.first);
    part.code_row = code_rows(job_.from.transformed, {rows.first, 0}, part.expert).first;
    part.out_row = job_.block_offsets == nullptr ? part.code_row : job_.block_offsets[part.expert];
    part.row = int(search_.index()) * kShape.rows();
    part.rows = int(min(code_rows_of(rows.count()) - part.row, int64_t(kShape.rows())));
    take_columns(kShape, job_.of.cols, part);
    return true;
  }

 private:
  __device__ int64_t code_rows_of(int64_t rows) const {
    return code_rows(job_.from.transformed, {0, rows}, 0).count;
  }

  const DequantizeJob& job_;
  gemm::WarpExpertSearch search_;
  int64_t number_;
};

/// Parts of weights, whose experts all have as many.
template <PartShape kShapeOfIt>
class WeightParts {
 public:
  static constexpr PartShape kShape = kShapeOfIt;

  static RowGrid grid(const ExpertsRows& of, int most) {
    return kShape.grid(parts_of(of) * of.experts, of.cols, most);
  }
  static RowGrid grid(const DequantizeJob& job, int most) { return grid(job.of, most); }
  __device__ explicit WeightParts(const ExpertsRows& of) : of_(&of), number_(first_part()) {}
  __device__ explicit WeightParts(const DequantizeJob& job) : WeightParts(job.of) {}
  __device__ bool next(Part& part) {
    const int64_t each = parts_of(*of_);
    for (; number_ >= each; number_ -= each)
      if (++expert_ >= of_->experts) return false;
    part.expert = expert_;
    part.first = 0;
    const int row = int(number_) * kShape.rows();
    part.row = row;
    part.rows = int(min(of_->rows - row, int64_t(kShape.rows())));
    take_columns(kShape, of_->cols, part);
    number_ += part_step();
    return true;
  }

 private:
  CADRE_HD static int64_t parts_of(const ExpertsRows& of) {
    return (of.rows + kShape.rows() - 1) / kShape.rows();
  }

  const ExpertsRows* of_;
  int64_t number_;  ///< in the expert
  int expert_ = 0;
};

}  // namespace cadre::cuda::portable
