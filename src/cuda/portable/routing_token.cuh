#pragma once
#include "activations/sigmoid.h"
#include "cuda/portable/routing_job.cuh"

// A token of routing, whose arrays are in shared memory, and its scores. A warp takes it: lane i
// has the experts i, i + 32, .... A sum over the experts is a tree over 64 partial sums, as on the
// CPU.
namespace cadre::cuda::portable {

constexpr int kTokenArrays = 6;  // each [E]

/// The arrays of the warp's token, in shared memory.
struct Token {
  const RoutingProblem& p;
  float *logit, *score, *q, *spare;
  float* dscore;  ///< of backward
  int32_t* chosen;

  __device__ Token(const RoutingProblem& problem, uint32_t* shared) : p(problem) {
    uint32_t* mine = shared + threadIdx.x / kLanes * kTokenArrays * p.experts;
    logit = reinterpret_cast<float*>(mine);
    score = logit + p.experts;
    q = score + p.experts;
    spare = q + p.experts;
    dscore = logit + 4 * p.experts;
    chosen = reinterpret_cast<int32_t*>(mine) + 5 * p.experts;
  }
  __device__ bool is_expert(int j) const { return chosen[j] >= 0 && chosen[j] < p.experts; }
};

__device__ inline int lane() { return int(threadIdx.x % kLanes); }
__device__ inline float lowest() { return -INFINITY; }

/// Unsigned numbers in the order of the floats, none of them 0; both zeros are one. Not for NaN.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 != 0 ? ~bits : bits | 0x8000'0000u;
}
__device__ inline float from_ordered(uint32_t number) {
  return __uint_as_float(number >> 31 != 0 ? number & 0x7fff'ffffu : ~number);
}

/// e^(l - max): equal infinities count as equal. Both ways are computed, so that it is no branch.
__device__ inline float weight(float logit, float max) {
  const float unequal = activations::exp_of_negative(logit - max);
  return logit == max ? 1.0f : unequal;
}

/// Calls work(i, e) with each expert of this lane, kSlots at most. Unrolled, so that what it has of
/// them can be in registers.
template <int kSlots, class Work>
__device__ void for_experts(int experts, Work&& work) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    if (const int e = lane() + i * kLanes; e < experts) work(i, e);
}

/// Numbers of this lane's experts: number i is of expert lane() + 32 i.
template <int kSlots>
struct OfExperts {
  float of[kSlots] = {};
};

/// The sum over the experts, of which those that do not exist have 0: two partial sums a lane, then
/// a tree of warp shuffles.
template <int kSlots>
__device__ float sum_of_experts(const OfExperts<kSlots>& values) {
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) (i % 2 == 0 ? low : high) += values.of[i];
  float sum = low + high;
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, step);
  return __shfl_sync(kAll, sum, 0);
}

/// Logits, -infinity for NaN and for no expert. All of them are read before one is looked at.
template <int kSlots>
__device__ OfExperts<kSlots> read_logits(const Matrix& logits, int64_t t, int experts) {
  uint32_t bits[kSlots] = {};
  for_experts<kSlots>(experts, [&](int i, int e) { bits[i] = element_bits(logits, {t, e}); });
  OfExperts<kSlots> logit;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const float x = element_of(bits[i], logits.dtype);
    logit.of[i] = lane() + i * kLanes >= experts || isnan(x) ? lowest() : x;
  }
  return logit;
}

/// The scores of a token's logits, 0 for no expert. Without branches, so that what is done for one
/// expert overlaps with what is done for the others.
template <int kSlots>
__device__ OfExperts<kSlots> scores_of(const OfExperts<kSlots>& logit, const RoutingProblem& p) {
  OfExperts<kSlots> score;
  if (p.score == RoutingScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) score.of[i] = activations::Sigmoid<float>(logit.of[i]).value;
    return score;
  }
  uint32_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) greatest = max(greatest, ordered(logit.of[i]));
  const float max = from_ordered(__reduce_max_sync(kAll, greatest));
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const float its_weight = weight(logit.of[i], max);
    score.of[i] = lane() + i * kLanes < p.experts ? its_weight : 0.0f;
  }
  const float sum = sum_of_experts(score);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) score.of[i] /= sum;
  return score;
}

template <int kSlots>
struct Scores {
  OfExperts<kSlots> logit, score;
};

/// Reads the token's logits; writes them and, if they are wanted, their scores to its arrays too.
template <int kSlots>
__device__ Scores<kSlots> find_scores(const Token& token, const Matrix& logits, int64_t t,
                                      bool wants_scores) {
  Scores<kSlots> found;
  found.logit = read_logits<kSlots>(logits, t, token.p.experts);
  if (wants_scores) found.score = scores_of(found.logit, token.p);
  for_experts<kSlots>(token.p.experts, [&](int i, int e) {
    token.logit[e] = found.logit.of[i];
    if (wants_scores) token.score[e] = found.score.of[i];
  });
  __syncwarp();
  return found;
}

}  // namespace cadre::cuda::portable
