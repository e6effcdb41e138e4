#pragma once
#include "cuda/device/barrier.h"
#include "cuda/device/copy.h"
#include "cuda/device/magnitude.h"
#include "cuda/device/word.h"
#include "cuda/portable/quantize_parts.cuh"

// What kernels share that quantise bf16 in blocks of 16 by warps: a warp takes 16 rows of one
// expert and 256 columns at a time, and finds them by itself. They lie in shared memory, where each
// lane has a chunk of all rows, which along K the lane beside it reads, too; so loops over them are
// short, and nothing waits for a block. For wide chunks and whole words alone; quantize.cuh has a
// kernel for all else.
namespace cadre::cuda::portable {

constexpr int kSixteen = 16;
constexpr PartShape kColumnsPart{1, false, kSixteen};
constexpr int kSixteensBlocks = 12;  // of an SM, at most

/// Whether a format has blocks of 16 with scales of e4m3, and one scale an expert.
template <class Row>
constexpr bool kHasSixteens = Row::kInfo.block == kSixteen&& Row::kInfo.has_expert_scale;

/// One way, and what its experts have in common.
struct SixteensCopy : CopyLines {
  const uint32_t* amax = nullptr;  ///< [E]
  float* expert_scale = nullptr;   ///< [E]
  const int32_t* block_offsets = nullptr;
  bool transformed = false, decoded = false;
  bool wide_codes = false;   ///< those of a block are one aligned word of 64 bits
  bool wide_scales = false;  ///< those of eight columns are

  SixteensCopy() = default;
  SixteensCopy(const QuantizeCopy& copy, int64_t cols)
      : CopyLines(copy),
        amax(copy.amax),
        expert_scale(copy.to.expert_scale),
        block_offsets(copy.to.block_offsets),
        transformed(copy.to.transformed),
        decoded(copy.to.decoded) {
    const auto is_wide = [](const uint8_t* to, int64_t steps) {
      return (reinterpret_cast<uintptr_t>(to) | uint64_t(steps)) % 8 == 0;
    };
    wide_codes = cols % kSixteen == 0 && is_wide(codes, pitch | expert);
    wide_scales = scales_across == 1 && is_wide(scales, scales_down | scales_expert);
  }
};

/// Whether numbers are wanted of a copy, by a kernel that makes some.
template <class Codes>
__device__ bool is_decoded(const SixteensCopy& copy) {
  return Codes::kDecoded && copy.decoded;
}

/// The parameters of the kernels.
struct SixteensJob {
  ExpertsRows of;
  ExpertMatrices source;
  SixteensCopy along_k, along_rows;
  schedule::RowTokens tokens{};
  const uint64_t* rng = nullptr;  ///< [2] seed and offset
  TensorRole role = TensorRole::kX;

  __device__ void each_copy(auto&& work) const {
    if (along_k.codes != nullptr) work(along_k);
    if (along_rows.codes != nullptr) work(along_rows);
  }
  /// Of square copies the one or the first is along K.
  static SixteensJob from(const QuantizeJob& all) {
    SixteensJob job{all.of, all.source, {}, {}, all.tokens, all.rng, all.copies[0].random.role};
    for (int i = 0; i < all.count; ++i)
      (all.copies[i].to.across && i == 0 ? job.along_k : job.along_rows) =
          SixteensCopy(all.copies[i], all.of.cols);
    return job;
  }
};

/// The scale of an expert, what an amax is multiplied by, and which products of a block's amax are
/// too large: those of seven or more. All where the scale is so far from one that multipliers want
/// more than a reciprocal.
struct ExpertFactors {
  float scale, of_amax, too_large;

  template <class Codes>
  __device__ static ExpertFactors from(uint32_t amax) {
    using Row = typename Codes::Row;
    using Element = typename Codes::Element;
    const auto found = Row::template expert_scale<Element>(__uint_as_float(amax), {});
    const bool is_near = found.scale >= formats::pow2(-90) && found.scale <= formats::pow2(90);
    return {found.scale, Row::template number_of_scale<Element>(1.0f, found),
            is_near ? 7.0f : 0.0f};
  }
};

/// A part, and the factors of its expert in each copy that there is.
struct ColumnsPart : Part {
  ExpertFactors along_k, along_rows;
};

/// Where a lane's chunks lie in a part, and how many rows of them are there.
struct ColumnsPlace {
  const ColumnsPart& part;
  int row, col, rows;  ///< row: of the batch, or the expert

  __device__ explicit ColumnsPlace(const ColumnsPart& of, int lane = thread_x())
      : part(of), row(of.first + of.row), col(of.col + lane * kChunk) {
    rows = col - of.col < of.cols ? of.rows : 0;
  }
};

/// The chunks of all lanes of a block, each lane's in a column, and the parts of its warps. rows:
/// those of the source that the next part has; -1: none, it is zero.
struct StagedChunks {
  uint4 chunks[kGridWarps][kSixteen][kLanes];
  ColumnsPart parts[kGridWarps][2];
  alignas(16) int rows[kGridWarps][kSixteen];
};

/// The number of this thread in its block.
__device__ inline int column_thread() {
  return int(threadIdx.x + kLanes * (threadIdx.y + blockDim.y * threadIdx.z));
}

/// Those of this lane.
class StagedColumn {
 public:
  __device__ StagedColumn()
      : first_(&of_block().chunks[column_thread() / kLanes][0][column_thread() % kLanes]) {}
  /// Of the warp, one that it has and the next, since they leave no registers for it.
  __device__ static ColumnsPart& part(int i) {
    return of_block().parts[column_thread() / kLanes][i];
  }
  /// Begins to read a part whose rows are known. Rows that are not there are zero; a chunk that is
  /// not there is the last one, in whose block it may be.
  __device__ void load(const SixteensJob& job, const ColumnsPlace& at) const {
    const Matrix& from = job.source.first;
    const int col = min(at.col, int(job.of.cols) - kChunk);
    const char* first =
        as_one_number(from.data + bytes_to(at.part.expert, job.source.pitch) + bytes_to(col, 2));
    const auto pitch = uint32_t(from.pitch);
    const uint32_t to = shared_address(first_);
    int4 found[kSixteen / 4];
    int any_none = 0;
#pragma unroll
    for (int i = 0; i < kSixteen / 4; ++i) {
      found[i] = reinterpret_cast<const int4*>(rows())[i];
      any_none |= found[i].x | found[i].y | found[i].z | found[i].w;
    }
    if (any_none >= 0) {
#pragma unroll
      for (int i = 0; i < kSixteen; ++i) {
        const int4& four = found[i / 4];
        const int row = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
        cp_async_line(to + uint32_t(i) * kStep, first + short_way_to(row, pitch));
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kSixteen; ++i) {
        const int row = rows()[i];
        cp_async_line(to + uint32_t(i) * kStep, first + short_way_to(max(row, 0), pitch),
                      row < 0 ? 0 : 16);
      }
    }
    cp_async_commit();
  }
  /// Finds the rows of a part. By whole warps, of which each lane has the row of two.
  __device__ static int find_rows(const SixteensJob& job, const Part& part) {
    const int lane = thread_x(), mine = lane / 2;
    int row = part.first + part.row + mine;
    if (mine >= part.rows)
      row = -1;
    else if (job.tokens.gather())
      row = job.tokens.token_of(row);
    if (lane % 2 == 0) rows()[mine] = row;
    __syncwarp();
    return row;
  }
  /// The same, and lets the memory begin to read them: each lane half a row.
  __device__ static void prefetch(const SixteensJob& job, const Part& part) {
    const Matrix& from = job.source.first;
    const int lane = thread_x(), row = find_rows(job, part);
    if (row < 0) return;
    const char* first =
        from.data + bytes_to(part.expert, job.source.pitch) + bytes_to(row, from.pitch);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = part.col + (lane % 2 * 2 + i) * 64;
      prefetch_line(first + bytes_to(min(col, int(job.of.cols) - kChunk), 2));
    }
  }
  /// Finds the factors of a part's expert: those of both copies at once, by lanes of their own.
  template <class Codes>
  __device__ static void find_factors(const SixteensJob& job, ColumnsPart& part) {
    const bool of_rows = thread_x() % 2 != 0;
    const uint32_t* amax = of_rows ? job.along_rows.amax : job.along_k.amax;
    const auto found = ExpertFactors::from<Codes>(amax == nullptr ? 0 : amax[part.expert]);
    if (thread_x() < 2) (of_rows ? part.along_rows : part.along_k) = found;
  }
  /// Keeps a word in the place of a pair of columns that has been read, for read().
  __device__ void keep(int i, int pair, uint32_t word) const {
    reinterpret_cast<uint32_t*>(first_ + i * kLanes)[pair] = word;
  }
  __device__ void read(int i, uint32_t (&pairs)[kChunk / 2]) const {
    const uint4 row = first_[i * kLanes];
    pairs[0] = row.x, pairs[1] = row.y, pairs[2] = row.z, pairs[3] = row.w;
  }
  /// The block of a row that this lane and the one beside it share.
  __device__ void read_block(int i, uint32_t (&pairs)[kSixteen / 2]) const {
    const uint4* block = first_ + i * kLanes - thread_x() % 2;
    const uint4 first = block[0], last = block[1];
    pairs[0] = first.x, pairs[1] = first.y, pairs[2] = first.z, pairs[3] = first.w;
    pairs[4] = last.x, pairs[5] = last.y, pairs[6] = last.z, pairs[7] = last.w;
  }
  /// Column 2 * pair and the next one, of all rows.
  __device__ void read_pair(int pair, uint32_t (&rows)[kSixteen]) const {
    const uint32_t* first = reinterpret_cast<const uint32_t*>(first_) + pair;
#pragma unroll
    for (uint32_t i = 0; i < kSixteen; ++i) rows[i] = first[i * kStep / 4];
  }

 private:
  static constexpr uint32_t kStep = kLanes * sizeof(uint4);  ///< bytes from row to row

  __device__ static int* rows() { return of_block().rows[column_thread() / kLanes]; }
  __device__ static StagedChunks& of_block() {
    return *reinterpret_cast<StagedChunks*>(dynamic_shared());
  }

  uint4* first_;
};

/// The largest magnitudes of pairs in two lines, as halves with any sign.
template <int kCount>
__device__ uint32_t largest_of_two(const uint32_t (&first)[kCount],
                                   const uint32_t (&second)[kCount]) {
  uint32_t a = first[0], b = second[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    a = larger<DType::kBf16>(a, first[i]);
    b = larger<DType::kBf16>(b, second[i]);
  }
  return larger<DType::kBf16>(pick_bytes(a, b, 0x5410), pick_bytes(a, b, 0x7632));
}

/// The scales of all experts, by a grid-stride loop.
template <class Codes>
__device__ void store_expert_scales(const SixteensJob& job) {
  const int block = int(blockIdx.y * gridDim.x + blockIdx.x);
  const int number = block * kGridWarps * kLanes + column_thread();
  const int step = int(gridDim.x * gridDim.y) * kGridWarps * kLanes;
  job.each_copy([&](const SixteensCopy& copy) {
#pragma unroll 1
    for (int e = number; e < job.of.experts; e += step)
      copy.expert_scale[e] = ExpertFactors::from<Codes>(copy.amax[e]).scale;
  });
}

/// Calls work(part, chunks) for all parts of this warp. The next one is looked for while the first
/// is read, and read into the L2 while codes are made.
template <class Codes, class Parts>
__device__ void walk_columns(const SixteensJob& job, auto&& work) {
  const StagedColumn staged;
  Parts parts(job.of);
  bool is_first = true;
#pragma unroll 1
  for (int i = 0;; i = 1 - i, __syncwarp()) {
    ColumnsPart& next = staged.part(i);
    const bool is_there = parts.next(next);  // which all lanes write
    __syncwarp();
    if (is_there) {
      staged.prefetch(job, next);
      staged.find_factors<Codes>(job, next);
    }
    if (!is_first) {
      cp_async_wait<0>();
      __syncwarp();
      work(staged.part(1 - i), staged);
    }
    if (!is_there || next.cols <= 0) return;
    staged.load(job, ColumnsPlace(next));
    is_first = false;
  }
}

/// Whether kernels of such parts take all copies.
template <class Element>
bool takes_columns(const QuantizeJob& job, auto&& takes) {
  return has_wide_rows(job) && job.of.rows > 0 && job.of.cols > 0 &&
         std::all_of(job.copies, job.copies + job.count, [&](const QuantizeCopy& copy) {
           return takes(copy) && is_whole<Element>(copy) && copy.to.codes.pitch <= UINT32_MAX &&
                  copy.to.scales.pitch <= UINT32_MAX;
         });
}

template <class Parts>
void launch_columns(void (*kernel)(SixteensJob), const QuantizeJob& all, const QuantizeStream& on) {
  const SixteensJob job = SixteensJob::from(all);
  Grid grid = Parts::grid(job.of, std::max(on.units, 1) * kSixteensBlocks).on(on.stream);
  grid.shared_bytes = int(sizeof(StagedChunks));
  launch(kernel, grid, job);
}

}  // namespace cadre::cuda::portable
