#pragma once
#include "cadre/permute.h"
#include "cuda/portable/permute_job.cuh"

// Rows of codes and their scales, moved by the kernels of permute.cu: codes two by two, as if they
// were bf16, scales as segments behind those of the codes.
namespace cadre::cuda::portable {

/// The chunks of a thread in its segment of one token, or a word in place of each.
struct Segment {
  Chunk of[kRounds];

  __device__ uint32_t& word(int i) { return of[i].low.x; }
  __device__ uint32_t word(int i) const { return of[i].low.x; }
};

/// Whether this warp has scales, and the first word of a thread, of which the next is a warp away.
template <class Config>
__device__ bool has_scales(const Job& job) {
  if constexpr (requires { typename Config::Beside; })
    return segment_index() >= job.scales.first_segment;
  else
    return false;
}
__device__ inline int first_scale(const ScalesJob& scales) {
  return (int(segment_index()) - scales.first_segment) * kRounds * kLanes + int(threadIdx.x);
}

template <class Config>
__device__ Segment read_scales(const Job& job, int64_t token) {
  const ScalesJob& s = job.scales;
  Segment words{};
  const char* from = s.from + token * s.token_pitch;
  if constexpr (Config::kMemory == Memory::kRanks)
    from += uint32_t(token) / uint32_t(job.rank_rows) * s.rank_gap;
  const int first = first_scale(s);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = first + i * kLanes;
    if (at >= s.words) continue;
    words.word(i) = s.word_bytes == 4 ? reinterpret_cast<const uint32_t*>(from)[at]
                                      : reinterpret_cast<const uint16_t*>(from)[at];
  }
  return words;
}

__device__ inline void write_scales(const ScalesJob& s, int64_t row, const Segment& words) {
  char* to = s.to + row * s.row_pitch;
  const int first = first_scale(s);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = first + i * kLanes;
    if (at >= s.words) continue;
    if (s.word_bytes == 4)
      *reinterpret_cast<uint32_t*>(to + at * s.row_step) = words.word(i);
    else
      *reinterpret_cast<uint16_t*>(to + at * s.row_step) = uint16_t(words.word(i));
  }
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

inline ScalesJob scales_job(const PermuteArgs& args, int64_t columns) {
  constexpr int64_t kSegment = kRounds * kRound;
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
  s.first_segment = int((columns + kSegment - 1) / kSegment);
  return s;
}

}  // namespace cadre::cuda::portable
