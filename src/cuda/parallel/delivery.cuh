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

  /// All of this warp. `first` was taken already; row_of() is a slot's row, or -1.
  template <class RowOf>
  __device__ void run(unsigned first, RowOf&& row_of, int64_t used) {
    const unsigned tokens = unsigned(job_.token_count());
    const int64_t tail = job_.zero_tail ? job_.bound - used : 0;
    const unsigned items = unsigned(tokens + tail) * parts_, step = GridWarp().count;
    for (unsigned item = first; item < items; item += step) {
      if (item != first) {
        aim(item);
        load(is_token_ && has_row(row_of));
      }
      if (!is_token_)
        give(int32_t(used + number_ - tokens));
      else if (is_wanted_)
        give_to_rows(row_of, used);
    }
  }
  /// At a part of a token, or of a row of the tail.
  __device__ void aim(unsigned item) {
    number_ = item / parts_, of_token_ = item % parts_;
    first_ = of_token_ * kPart + threadIdx.x % kLanes;
    is_token_ = number_ < unsigned(job_.token_count());
    token_ = reinterpret_cast<const Word*>(is_token_ ? job_.token(number_) : nullptr);
  }
  /// What it is aimed at, if one of the token's choices is wanted.
  __device__ void take(const int32_t* choices, const Range& wanted) {
    load(is_token_ && wanted.has_any_of(choices + int64_t(number_) * job_.top_k, job_.top_k));
  }

 private:
  __device__ void load(bool is_wanted) {
    is_wanted_ = is_wanted;
#pragma unroll
    for (int i = 0; i < kWordsOfLane; ++i)
      part_[i] = is_wanted_ && first_ + i * kLanes < words_ ? token_[first_ + i * kLanes] : Word{};
    scales_.take(job_, number_, of_token_, is_wanted_);
  }

  /// The row of the lane's choice, of those of the token from `first` on.
  template <class RowOf>
  __device__ int32_t row_of_lane(RowOf&& row_of, int first) const {
    const int choice = first + int(threadIdx.x) % kLanes;
    return choice < job_.top_k ? row_of(int(number_) * job_.top_k + choice) : -1;
  }
  template <class RowOf>
  __device__ bool has_row(RowOf&& row_of) const {
    bool any = false;
    for (int first = 0; first < job_.top_k; first += kLanes) any |= row_of_lane(row_of, first) >= 0;
    return __any_sync(~0u, any);
  }
  template <class RowOf>
  __device__ void give_to_rows(RowOf&& row_of, int64_t used) const {
    for (int first = 0; first < job_.top_k; first += kLanes) {
      const int32_t mine = row_of_lane(row_of, first);
      for (int j = 0; j < min(kLanes, job_.top_k - first); ++j)
        if (const int32_t row = __shfl_sync(~0u, mine, j); row >= 0 && row < used) give(row);
    }
  }
  __device__ void give(int32_t row) const {
    auto* to = reinterpret_cast<Word*>(job_.rows + row * job_.pitch);
#pragma unroll
    for (int i = 0; i < kWordsOfLane; ++i)
      if (first_ + i * kLanes < words_) to[first_ + i * kLanes] = part_[i];
    scales_.give(job_, row);
  }

  const RowsJob& job_;
  int64_t words_, first_ = 0;
  unsigned parts_, number_ = 0, of_token_ = 0;
  const Word* token_ = nullptr;
  bool is_token_ = false, is_wanted_ = false;
  Word part_[kWordsOfLane];
  Scales scales_;
};

}  // namespace cadre::cuda
