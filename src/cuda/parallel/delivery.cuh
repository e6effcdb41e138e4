#pragma once
#include <cstdint>

#include "cadre/host_device.h"
#include "cuda/portable/permute_job.cuh"

// Few tokens of all ranks to rows of this one, shared among the warps of a grid.
namespace cadre::cuda {

using portable::kLanes;

/// Warps of a grid that share work. Neighbours are in different blocks, and of the first block,
/// which has more to do, last.
struct GridWarp {
  unsigned number, count;

  __device__ GridWarp()
      : number(threadIdx.x / kLanes * gridDim.x + gridDim.x - 1 - blockIdx.x),
        count(blockDim.x / kLanes * gridDim.x) {}
};

/// Calls work(item) for some of all items, by all threads of a grid.
template <class Work>
__device__ void for_threads(int64_t items, Work&& work) {
  const GridWarp warp;
  for (unsigned item = warp.number * kLanes + threadIdx.x % kLanes; item < unsigned(items);
       item += warp.count * kLanes)
    work(item);
}

/// Rows of this rank from tokens of all.
struct RowsJob {
  const char* tokens;
  int64_t rank_step, row_bytes;  ///< bytes from one rank's tokens to the next one's; of a token
  char* rows;
  int64_t pitch, bound;  ///< bytes from row to row; R
  int ranks, tokens_each, top_k;
  bool zero_tail;
  const int32_t *row_here, *offset_of_tail;  ///< but for dispatch, which finds them
  float* row_prob;
  portable::ScalesJob scales{};  ///< of codes only: a segment is a part

  CADRE_HD int64_t token_count() const { return int64_t(ranks) * tokens_each; }
  __device__ const char* token(unsigned number) const {
    const unsigned each = unsigned(tokens_each);
    return tokens + number / each * rank_step + number % each * row_bytes;
  }
  uint64_t address_bits() const {
    return reinterpret_cast<uintptr_t>(tokens) | uintptr_t(rank_step) | uintptr_t(row_bytes) |
           reinterpret_cast<uintptr_t>(rows) | uintptr_t(pitch);
  }
};

constexpr int kWordsOfLane = 8, kPart = kWordsOfLane * kLanes;  // in flight

/// Parts of a token, or of a row of the tail.
template <class Word>
CADRE_HD unsigned parts_of(const RowsJob& job) {
  return unsigned((job.row_bytes / int64_t(sizeof(Word)) + kPart - 1) / kPart);
}

/// Some experts, or rows.
struct Range {
  int32_t first, end;

  __device__ bool has_any_of(const int32_t* list, int count) const {
    bool any = false;
    for (int i = 0; i < count; ++i) any |= list[i] >= first && list[i] < end;
    return any;
  }
};

/// What moves beside a part of a token: of numbers nothing, of codes their scales.
struct NoScales {
  __device__ void take(const RowsJob&, unsigned, unsigned, bool) {}
  __device__ void give(const RowsJob&, int64_t) const {}
};
class PartOfScales {
 public:
  /// The token's of that number; zeros where it is not wanted.
  __device__ void take(const RowsJob& job, unsigned number, unsigned part, bool is_wanted) {
    const portable::ScalesJob& s = job.scales;
    first_ = int(part) * s.words_of_segment + int(threadIdx.x) % kLanes;
    end_ = min((int(part) + 1) * s.words_of_segment, s.words);
    const char* token = s.from;
    if (is_wanted)
      token += number * s.token_pitch + number / unsigned(job.tokens_each) * s.rank_gap;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      words_[i] = is_wanted && at(i) < end_ ? s.load(token, at(i)) : 0;
  }
  __device__ void give(const RowsJob& job, int64_t row) const {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (at(i) < end_) job.scales.store(row, at(i), words_[i]);
  }

 private:
  static constexpr int kOfLane = 2;  // a part of 4096 codes may have a word for every 64

  __device__ int at(int i) const { return first_ + i * kLanes; }

  int first_ = 0, end_ = 0;
  uint32_t words_[kOfLane];
};

/// What a warp takes of a token, to all of its rows. Between take() and give() it is on its way.
template <class Word, class Scales = NoScales>
class Delivery {
 public:
  __device__ explicit Delivery(const RowsJob& job)
      : job_(job), words_(job.row_bytes / int64_t(sizeof(Word))), parts_(parts_of<Word>(job)) {}

  /// All of this warp. `first` was taken already.
  __device__ void run(unsigned first, const int32_t* row_here, int64_t used) {
    const unsigned tokens = unsigned(job_.token_count());
    const int64_t tail = job_.zero_tail ? job_.bound - used : 0;
    const unsigned items = unsigned(tokens + tail) * parts_, step = GridWarp().count;
    for (unsigned item = first; item < items; item += step) {
      if (item != first || item >= tokens * parts_) take(item, row_here, {0, INT32_MAX});
      const auto beyond = int32_t(used + item / parts_ - tokens);
      if (item >= tokens * parts_)
        give(&beyond, 1, job_.bound);
      else if (is_wanted_)
        give(row_here + int64_t(item / parts_) * job_.top_k, job_.top_k, used);
    }
  }
  /// A part of a token, if one of its choices is wanted.
  __device__ void take(unsigned item, const int32_t* choices, const Range& wanted) {
    const unsigned number = item / parts_;
    first_ = item % parts_ * kPart + threadIdx.x % kLanes;
    const bool is_token = number < unsigned(job_.token_count());
    is_wanted_ = is_token && wanted.has_any_of(choices + int64_t(number) * job_.top_k, job_.top_k);
    const auto* token = reinterpret_cast<const Word*>(is_wanted_ ? job_.token(number) : nullptr);
#pragma unroll
    for (int i = 0; i < kWordsOfLane; ++i)
      part_[i] = is_wanted_ && first_ + i * kLanes < words_ ? token[first_ + i * kLanes] : Word{};
    scales_.take(job_, number, item % parts_, is_wanted_);
  }

 private:
  __device__ void give(const int32_t* rows, int count, int64_t used) const {
    for (int j = 0; j < count; ++j) {
      const int32_t row = rows[j];
      if (row < 0 || row >= used) continue;
      auto* to = reinterpret_cast<Word*>(job_.rows + row * job_.pitch);
#pragma unroll
      for (int i = 0; i < kWordsOfLane; ++i)
        if (first_ + i * kLanes < words_) to[first_ + i * kLanes] = part_[i];
      scales_.give(job_, row);
    }
  }

  const RowsJob& job_;
  int64_t words_, first_ = 0;
  unsigned parts_;
  bool is_wanted_ = false;
  Word part_[kWordsOfLane];
  Scales scales_;
};

}  // namespace cadre::cuda
