#pragma once
#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// What the kernels of permute.cu have in common.
namespace cadre::cuda::portable {

constexpr int kRounds = 4;  // chunks that a thread has in flight

/// What is read: of one rank, with offsets that say where rows end, or without; or of several.
enum class Memory : uint8_t { kHere, kWhole, kRanks };

/// Scales that move beside rows of codes, in words of two or four bytes: each segment of codes with
/// its own, a word a thread.
struct ScalesJob {
  const char* from = nullptr;  ///< of tokens
  char* to = nullptr;
  int64_t token_pitch = 0, row_pitch = 0;  ///< bytes from row to row
  int64_t row_step = 0;                    ///< of rows: bytes from word to word
  int64_t rank_gap = 0;                    ///< as Job has it
  int words = 0, words_of_segment = 1;     ///< of a row
  int word_bytes = 4;

  __device__ uint32_t load(const char* token, int word) const {
    return word_bytes == 4 ? reinterpret_cast<const uint32_t*>(token)[word]
                           : reinterpret_cast<const uint16_t*>(token)[word];
  }
  __device__ void store(int64_t row, int word, uint32_t value) const {
    char* at = to + row * row_pitch + word * row_step;
    if (word_bytes == 4)
      *reinterpret_cast<uint32_t*>(at) = value;
    else
      *reinterpret_cast<uint16_t*>(at) = uint16_t(value);
  }
};

/// The parameters of the kernels.
struct Job {
  Matrix tokens, rows, y, addend;
  const int32_t *row_of, *slot_of, *offsets;
  const float *prob, *drow_prob, *drow_scale;
  float *row_prob, *dprob;
  int64_t bound, slots, token_count, hidden;  ///< bound: R
  int experts, top_k;
  bool zero_tail, weighted;
  int64_t rank_rows = 0;  ///< of what lies in the memories of several ranks: rows of each
  int64_t rank_gap = 0;   ///< and bytes between one's last and the next one's first
  ScalesJob scales{};     ///< of codes only

  /// Rows before the tail. Sums of rows of several ranks have none.
  template <class Config>
  __device__ int64_t used() const {
    if constexpr (Config::kMemory == Memory::kWhole) return bound;
    if (Config::kMemory == Memory::kRanks && offsets == nullptr) return bound;
    return schedule::rows_used(offsets, experts, bound);
  }
  /// Such a matrix, moved so that this row of all ranks lies where its number says.
  template <class Config>
  __device__ decltype(auto) with_row(const Matrix& m, int64_t row) const {
    if constexpr (Config::kMemory == Memory::kRanks) {
      Matrix moved = m;
      moved.data += uint32_t(row) / uint32_t(rank_rows) * rank_gap;
      return moved;
    } else {
      return (m);
    }
  }
  /// Of a row's probability, and of the same where it scales a bias.
  __device__ float row_gradient(int64_t row) const {
    return drow_scale == nullptr ? drow_prob[row] : drow_prob[row] + drow_scale[row];
  }
  __device__ bool is_slot(int64_t slot) const { return slot >= 0 && slot < slots; }
  /// Whether a slot and a row point at each other. With a map of offsets.h all do that are kept.
  __device__ bool is_pair(int64_t slot, int64_t row, int64_t used) const {
    return row >= 0 && row < used && slot_of[row] == slot;
  }
};

template <class Config>
__device__ void assume_dtypes(const Job& job) {
  Config::assume(job.tokens);
  Config::assume(job.rows);
  Config::assume(job.y);
  Config::assume(job.addend);
}

/// The stored element times p.
__device__ inline Chunk scaled(const Chunk& chunk, DType dtype, float p) {
  float x[kChunk];
  decode(chunk, dtype, x);
  for (float& value : x) value *= p;
  return encode(x, dtype);
}

/// What a row is made of: its slot's token and probability, or nothing.
struct Source {
  int64_t token = -1;
  float p = 0;

  __device__ Source(const Job& job, int64_t row, int64_t used) {
    const int slot = row < used ? job.slot_of[row] : -1;
    if (!job.is_slot(slot)) return;
    token = slot / job.top_k;
    if (job.prob != nullptr) p = job.prob[slot];
  }
  __device__ bool is_there() const { return token >= 0; }
};

/// The token of a number: those of several ranks in turns, so that near and far memory are read
/// side by side.
template <class Config>
__device__ int64_t token_of(const Job& job, int64_t number) {
  if constexpr (Config::kMemory != Memory::kRanks) return number;
  const auto each = uint32_t(job.rank_rows), ranks = uint32_t(job.token_count) / each;
  return int64_t(uint32_t(number) % ranks) * each + uint32_t(number) / ranks;
}

/// Whether a token of another rank has a row here.
__device__ inline bool is_needed(const Job& job, int64_t token) {
  int row = -1;
  for (int choice = int(threadIdx.x); choice < job.top_k; choice += kLanes)
    row = max(row, job.row_of[token * job.top_k + choice]);
  return __any_sync(~0u, row >= 0);
}

}  // namespace cadre::cuda::portable
