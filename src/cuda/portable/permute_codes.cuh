#pragma once
#include <algorithm>

#include "cadre/permute.h"
#include "cuda/portable/permute_job.cuh"

// Rows of codes and their scales, moved by the kernels of permute.cu: codes two by two, as if they
// were bf16.
namespace cadre::cuda::portable {

/// The chunks of a thread in its segment of one token, and a word of the scales.
struct Segment {
  Chunk of[kRounds];
  uint32_t scale;
};

/// Whether rows are tokens times a probability, which codes never are.
template <class Config>
__device__ bool are_weighted(const Job& job) {
  if constexpr (requires { typename Config::Beside; }) return false;
  return job.weighted;
}

/// Which word of the scales this thread has; negative: none.
template <class Config>
__device__ int scale_word(const Job& job) {
  if constexpr (requires { typename Config::Beside; }) {
    const int here = int(threadIdx.x);
    const int word = int(segment_index()) * job.scales.words_of_segment + here;
    if (here < job.scales.words_of_segment && word < job.scales.words) return word;
  }
  return -1;
}

template <class Config>
__device__ uint32_t read_scale(const Job& job, int64_t token) {
  const int word = scale_word<Config>(job);
  if (word < 0) return 0;
  const ScalesJob& s = job.scales;
  const char* from = s.from + token * s.token_pitch;
  if constexpr (Config::kMemory == Memory::kRanks)
    from += uint32_t(token) / uint32_t(job.rank_rows) * s.rank_gap;
  return s.load(from, word);
}

template <class Config>
__device__ void write_scale(const Job& job, int64_t row, uint32_t scale) {
  const int word = scale_word<Config>(job);
  if (word >= 0) job.scales.store(row, word, scale);
}

/// The first rank's part of what several have; all of what one has.
inline TensorView one_rank(const TensorView& v) {
  if (v.rank == 2) return v;
  return view(v.data, v.dtype, {v.shape[1], v.shape[2]}, {v.stride[1], v.stride[2]});
}

/// Codes of a byte, two by two as if they were bf16: nobody looks at what they are.
inline TensorView in_pairs(TensorView codes) {
  codes.dtype = DType::kBf16;
  codes.shape[codes.rank - 1] /= 2;
  for (int d = 0; d + 1 < codes.rank; ++d) codes.stride[d] /= 2;
  return codes;
}

inline ScalesJob scales_job(const PermuteArgs& args, int64_t block) {
  const TensorView from = one_rank(args.token_scales), &to = args.row_scales;
  ScalesJob s{.from = static_cast<const char*>(from.data), .to = static_cast<char*>(to.data)};
  s.token_pitch = bytes_for(from.dtype, from.stride[0]);
  s.row_pitch = bytes_for(to.dtype, to.stride[0]);
  if (args.token_scales.rank == 3)
    s.rank_gap = bytes_for(from.dtype, args.token_scales.stride[0]) - from[0] * s.token_pitch;
  const int64_t bytes = bytes_for(to.dtype, to[1]);
  const auto all = reinterpret_cast<uintptr_t>(s.from) | reinterpret_cast<uintptr_t>(s.to) |
                   uintptr_t(s.token_pitch | s.row_pitch | s.rank_gap | bytes);
  s.word_bytes = all % 4 == 0 ? 4 : 2;
  s.words = int(bytes / s.word_bytes);
  s.row_step = to.dtype == DType::kF32 ? bytes_for(to.dtype, to.stride[1]) : s.word_bytes;
  const int64_t of_segment = 2 * kRounds * kRound / block * bits(to.dtype) / 8;
  s.words_of_segment = std::max(1, int(of_segment / s.word_bytes));
  return s;
}

}  // namespace cadre::cuda::portable
