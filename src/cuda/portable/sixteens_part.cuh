#pragma once
#include "cuda/device/barrier.h"
#include "cuda/device/copy.h"
#include "cuda/device/e2m1.h"
#include "cuda/device/word.h"
#include "cuda/portable/quantize_parts.cuh"

// What kernels share that quantise bf16 in blocks of 16 by warps: a warp takes 16 rows of one
// expert and 256 columns at a time, and finds them by itself. They lie in shared memory, where each
// lane has a chunk of all rows, which no other lane reads; so loops over them are short, and
// nothing waits for a block. For wide chunks and whole words alone; quantize.cuh has a kernel for
// all else.
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

  SixteensCopy() = default;
  explicit SixteensCopy(const QuantizeCopy& copy)
      : CopyLines(copy),
        amax(copy.amax),
        expert_scale(copy.to.expert_scale),
        block_offsets(copy.to.block_offsets),
        transformed(copy.to.transformed),
        decoded(copy.to.decoded) {}
};

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
          SixteensCopy(all.copies[i]);
    return job;
  }
};

/// Where the lane's chunks lie in a part, and how many rows of them are there.
struct ColumnsPlace {
  const Part& part;
  int row, col, rows;  ///< row: of the batch, or the expert

  __device__ explicit ColumnsPlace(const Part& of)
      : part(of), row(of.first + of.row), col(of.col + thread_x() * kChunk) {
    rows = col - of.col < of.cols ? of.rows : 0;
  }
};

/// The chunks of all lanes of a block, each lane's in a column, and the parts of its warps. rows:
/// those of the source that the next part has; -1: none, it is zero.
struct StagedChunks {
  uint4 chunks[kGridWarps][kSixteen][kLanes];
  Part parts[kGridWarps][2];
  int rows[kGridWarps][kSixteen];
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
  __device__ static Part& part(int i) { return of_block().parts[column_thread() / kLanes][i]; }
  /// Begins to read a part whose rows are known. Rows that are not there are zero; a chunk that is
  /// not there is the last one, in whose block it may be.
  __device__ void load(const SixteensJob& job, const ColumnsPlace& at) const {
    const Matrix& from = job.source.first;
    const int col = min(at.col, int(job.of.cols) - kChunk);
    const char* first =
        as_one_number(from.data + bytes_to(at.part.expert, job.source.pitch) + bytes_to(col, 2));
    const auto pitch = uint32_t(from.pitch);
    const uint32_t to = shared_address(first_);
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) {
      const int row = rows()[i];
      cp_async_line(to + uint32_t(i) * kStep, first + short_way_to(max(row, 0), pitch),
                    row < 0 ? 0 : 16);
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
  /// Keeps a word in the place of the first row of a pair that has been read, for read(0).
  __device__ void keep(int pair, uint32_t word) const {
    reinterpret_cast<uint32_t*>(first_)[pair] = word;
  }
  __device__ void read(int i, uint32_t (&pairs)[kChunk / 2]) const {
    const uint4 row = first_[i * kLanes];
    pairs[0] = row.x, pairs[1] = row.y, pairs[2] = row.z, pairs[3] = row.w;
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

/// The larger magnitudes of eight numbers each in two rows, as halves with any sign.
__device__ inline uint32_t largest_of_two(const uint32_t (&first)[4], const uint32_t (&second)[4]) {
  const auto of_row = [&](const uint32_t(&row)[4]) {
    return larger<DType::kBf16>(larger<DType::kBf16>(row[0], row[1]),
                                larger<DType::kBf16>(row[2], row[3]));
  };
  const uint32_t a = of_row(first), b = of_row(second);
  return larger<DType::kBf16>(pick_bytes(a, b, 0x5410), pick_bytes(a, b, 0x7632));
}

/// The scale of an expert, and what an amax is multiplied by.
template <class Codes>
struct ExpertFactors {
  using Row = typename Codes::Row;

  float scale = 1.0f, of_amax = 1.0f;

  ExpertFactors() = default;
  __device__ explicit ExpertFactors(uint32_t amax) {
    using Element = typename Codes::Element;
    const auto found = Row::template expert_scale<Element>(__uint_as_float(amax), {});
    scale = found.scale, of_amax = Row::template number_of_scale<Element>(1.0f, found);
  }
};

/// The scales of two blocks of a format whose scales are e4m3, and what their numbers are
/// multiplied by.
template <class Codes>
struct TwoScales {
  using Scale = typename Codes::Row::Scale;

  uint32_t codes;
  float multipliers[2];
  bool beyond;  ///< there is a NaN, or a product of seven or more

  /// From amaxes.
  __device__ TwoScales(const float (&amax)[2], const ExpertFactors<Codes>& expert) {
    codes = encode_pair<Scale>(formats::mul(amax[0], expert.of_amax),
                               formats::mul(amax[1], expert.of_amax));
    const float2 numbers = decode_pair<Scale>(codes);
    // As Row::multiplier, whose division powers of two spare.
    const float by = expert.scale < formats::pow2(-90)  ? formats::pow2(80)
                     : expert.scale > formats::pow2(90) ? formats::pow2(-80)
                                                        : 1.0f;
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float product = formats::mul(k == 0 ? numbers.x : numbers.y, expert.scale);
      multipliers[k] = fminf(formats::mul(formats::reciprocal(formats::mul(product, by)), by),
                             formats::kLargestFloat);
      largest = max(largest, __float_as_uint(formats::mul(amax[k], multipliers[k])));
    }
    beyond = largest >= __float_as_uint(7.0f);
  }
  __device__ uint8_t code(int k) const { return uint8_t(codes >> (8 * k)); }
  /// What they say, as a pair of bf16.
  __device__ static uint32_t numbers(uint32_t of_two) {
    const float2 both = decode_pair<Scale>(of_two);
    return pair_of_numbers(both.x, both.y);
  }
  /// The limit of numbers that are in the low half; all ones in the high one if they are NaN, as
  /// all of such a block is. Their codes are those of six times one.
  __device__ uint32_t limit(int k) {
    if (code(k) == Scale::kNanCode) {
      multipliers[k] = 1.0f;
      return ~0u << 16;
    }
    return limit_of(multipliers[k]);
  }
};

/// A pair of numbers with the limits of their blocks.
__device__ inline uint32_t limited_pair(uint32_t pair, uint32_t first, uint32_t second) {
  constexpr uint32_t kSix = 0x40c0'40c0u;
  const uint32_t nan = pick_bytes(first, second, 0x7632);
  const uint32_t limited = limited_halves(pair, pick_bytes(first, second, 0x5410));
  return (limited & ~nan) | (kSix & nan);
}

/// What the codes of a row are multiplied by in a decoded copy: the scales of columns, in pairs.
using PairScales = uint32_t[kChunk / 2];

/// Rows of codes that a lane stores, or of the numbers that they say, from that row on.
struct RowsOfCodes {
  const SixteensCopy& copy;
  uint8_t* to;
  int rows;

  __device__ RowsOfCodes(const SixteensCopy& of, const ColumnsPlace& at, int row, int count)
      : copy(of),
        to(as_one_number(of.codes + bytes_to(at.part.expert, of.expert) + bytes_to(row, of.pitch) +
                         bytes_to(at.col, of.decoded ? 16 : 4) / 8)),
        rows(count) {}
  __device__ void store(int i, uint32_t codes) const { store_word_below(i, rows, row(i), codes); }
  __device__ void store_numbers(int i, uint32_t codes, const PairScales& scales) const {
    store_words_below(i, rows, row(i), e2m1_numbers(codes, scales));
  }
  /// Of a row that has one scale for all its columns here; scales() makes a pair of it.
  __device__ void store_row(int i, uint32_t codes, auto&& scales) const {
    if (!copy.decoded) return store(i, codes);
    const uint32_t two = scales();
    store_numbers(i, codes, {two, two, two, two});
  }

 private:
  __device__ uint8_t* row(int i) const { return to + short_way_to(i, uint32_t(copy.pitch)); }
};

/// The scales of all experts, by a grid-stride loop.
template <class Codes>
__device__ void store_expert_scales(const SixteensJob& job) {
  const int block = int(blockIdx.y * gridDim.x + blockIdx.x);
  const int number = block * kGridWarps * kLanes + column_thread();
  const int step = int(gridDim.x * gridDim.y) * kGridWarps * kLanes;
  job.each_copy([&](const SixteensCopy& copy) {
#pragma unroll 1
    for (int e = number; e < job.of.experts; e += step)
      copy.expert_scale[e] = ExpertFactors<Codes>(copy.amax[e]).scale;
  });
}

/// Calls work(place, chunks) for all parts of this warp. The next one is looked for while the first
/// is read, and read into the L2 while codes are made.
template <class Parts>
__device__ void walk_columns(const SixteensJob& job, auto&& work) {
  const StagedColumn staged;
  Parts parts(job.of);
  bool is_first = true;
#pragma unroll 1
  for (int i = 0;; i = 1 - i, __syncwarp()) {
    Part& next = staged.part(i);
    const bool is_there = parts.next(next);  // which all lanes write
    __syncwarp();
    if (is_there) staged.prefetch(job, next);
    if (!is_first) {
      cp_async_wait<0>();
      work(ColumnsPlace(staged.part(1 - i)), staged);
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
