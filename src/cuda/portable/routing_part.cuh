#pragma once
#include "activations/sigmoid.h"
#include "cuda/portable/routing_job.cuh"
#include "cuda/portable/routing_token.cuh"
#include "formats/divisor.h"

// A token of routing in a part of a warp, whose lanes have the experts in registers, and its
// scores. Sums have the order of the CPU: a tree over 64 partial sums, whose first steps are within
// a lane.
namespace cadre::cuda::portable {

/// A part of so many lanes: lane i has the experts i, i + kWidth, ..., kSlots if it is full, at
/// most as many if not.
template <int kLanesOfToken, int kExpertsOfLane, bool kIsFull>
struct Part {
  static constexpr int kWidth = kLanesOfToken, kSlots = kExpertsOfLane;
  static constexpr bool kFull = kIsFull;
  static constexpr int kTokens = kLanes / kWidth;  ///< of a warp
  static constexpr int kExperts = kWidth * kSlots;
  using Numbers = OfExperts<kSlots>;

  static __device__ int lane() { return int(threadIdx.x % kWidth); }
  static __device__ int expert(int slot) { return lane() + slot * kWidth; }
  /// Whether a slot of this lane has an expert.
  static __device__ bool has(int slot, int experts) { return kFull || expert(slot) < experts; }

  /// What a lane of the part has.
  template <class Value>
  static __device__ Value from(Value value, int lane) {
    return __shfl_sync(kAll, value, lane, kWidth);
  }
  /// What join() makes of the values of all lanes, halves first.
  template <class Value, class Join>
  static __device__ Value joined(Value value, Join&& join) {
#pragma unroll
    for (int step = kWidth / 2; step > 0; step /= 2)
      value = join(value, __shfl_xor_sync(kAll, value, step));
    return value;
  }
  static __device__ uint32_t greatest(uint32_t value) {
    if constexpr (kWidth == kLanes)
      return __reduce_max_sync(kAll, value);
    else
      return joined(value, [](uint32_t a, uint32_t b) { return max(a, b); });
  }
  static __device__ float greatest(float value) {
    return joined(value, [](float a, float b) { return fmaxf(a, b); });
  }
};

/// Calls work(i, e) with each slot of this lane that has an expert.
template <class P, class Work>
__device__ void for_slots(int experts, Work&& work) {
#pragma unroll
  for (int i = 0; i < P::kSlots; ++i)
    if (P::has(i, experts)) work(i, P::expert(i));
}

/// The sum over the experts, in all lanes. Those that do not exist have 0.
template <class P>
__device__ float sum_over_experts(const typename P::Numbers& values) {
  constexpr int kPartials = 64 / P::kWidth < P::kSlots ? 64 / P::kWidth : P::kSlots;
  float sums[kPartials];
#pragma unroll
  for (int i = 0; i < P::kSlots; ++i)
    sums[i % kPartials] = i < kPartials ? values.of[i] : sums[i % kPartials] + values.of[i];
#pragma unroll
  for (int half = kPartials / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  const float sum = P::joined(sums[0], [](float a, float b) { return a + b; });
  return sum + 0.0f;  // sums begin at 0, so none is -0
}

/// Calls work.operator()<kDType>() with the dtype, which is then known where work is compiled.
template <class Work>
__device__ void with_dtype(DType dtype, Work&& work) {
  if (dtype == DType::kF32)
    work.template operator()<DType::kF32>();
  else if (dtype == DType::kBf16)
    work.template operator()<DType::kBf16>();
  else
    work.template operator()<DType::kF16>();
}

template <DType kDType>
using Stored = std::conditional_t<kDType == DType::kF32, uint32_t, uint16_t>;

template <DType kDType>
constexpr uint32_t kLowestBits = kDType == DType::kF32    ? 0xff80'0000u
                                 : kDType == DType::kBf16 ? 0xff80u
                                                          : 0xfc00u;

/// -infinity for NaN.
__device__ inline float logit_of(uint32_t bits, DType dtype) {
  return fmaxf(element_of(bits, dtype), lowest());
}

/// Logits, -infinity for no expert.
template <class P>
__device__ typename P::Numbers read_all_logits(const Matrix& logits, int64_t t, int experts) {
  typename P::Numbers logit;
  with_dtype(logits.dtype, [&]<DType kDType>() {
    const auto* row = reinterpret_cast<const Stored<kDType>*>(logits.data + t * logits.pitch);
    uint32_t bits[P::kSlots];
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) bits[i] = kLowestBits<kDType>;
    for_slots<P>(experts, [&](int i, int e) { bits[i] = row[e]; });
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) logit.of[i] = logit_of(bits[i], kDType);
  });
  return logit;
}

/// Numbers of a token's softmax over all experts.
struct Softmax {
  float max = 0, sum = 1;
};

/// Turns logits into their weights, 0 for no expert. No branch for any of them: where the greatest
/// logit is finite, its own weight is e^0.
template <class P>
__device__ Softmax make_weights(typename P::Numbers& of_experts, int experts) {
  auto& of = of_experts.of;
  Softmax softmax{.max = of[0]};
#pragma unroll
  for (int i = 1; i < P::kSlots; ++i) softmax.max = fmaxf(softmax.max, of[i]);
  softmax.max = P::greatest(softmax.max);
  if (formats::is_finite(softmax.max)) {
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) of[i] = activations::exp_of_negative(of[i] - softmax.max);
  } else {
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i)
      of[i] = P::has(i, experts) && of[i] == softmax.max ? 1.0f : 0.0f;
  }
  softmax.sum = sum_over_experts<P>(of_experts);
  return softmax;
}

/// Divides weights by their sum, which is 1 or more.
template <class P>
__device__ void divide(typename P::Numbers& weights, float sum) {
  uint32_t least = ~0u;  // of the bits less one, so that 0 is no least
#pragma unroll
  for (int i = 0; i < P::kSlots; ++i) least = min(least, __float_as_uint(weights.of[i]) - 1);
  if (least < __float_as_uint(formats::Divisor::kLeastDividend) - 1) {
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) weights.of[i] /= sum;
  } else {
    const formats::Divisor divisor(sum);
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) weights.of[i] = divisor.quotient(weights.of[i]);
  }
}

/// start + value of lane 0 + value of lane 1 + ..., of the top_k lanes that have a choice; the
/// others have kNothing.
template <class P>
__device__ float sum_over_chosen(int top_k, float start, float value) {
  constexpr int kAtOnce = 8;
  float sum = start;
#pragma unroll
  for (int first = 0; first < P::kWidth; first += kAtOnce) {
    if (first > 0 && first >= top_k) break;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += P::from(value, first + i);
  }
  return sum;
}

/// What the lane of a choice has of it.
struct Choice {
  int expert;
  float logit;
  bool is_choice, is_expert;  ///< whether it is one of top_k; and names an expert
};

/// An expert number outside [0, E) is no expert; lanes beyond top_k have no choice.
template <class P>
__device__ Choice look_at_choice(const RoutingJob& job, int64_t t, int expert) {
  Choice c{expert, lowest(), P::lane() < job.p.top_k, false};
  c.is_expert = c.is_choice && expert >= 0 && expert < job.p.experts;
  if (c.is_expert) c.logit = logit_of(element_bits(job.logits, {t, expert}), job.logits.dtype);
  return c;
}

/// q[j] of cadre/routing.h, 0 for what is no expert, and their sum if they are normalised.
struct PlainProb {
  float q = 0, norm = 1;
};

template <class P>
__device__ PlainProb plain_prob(const RoutingProblem& p, const Choice& c, Softmax over) {
  const float none = c.is_choice ? 0.0f : kNothing;
  PlainProb prob;
  if (p.score == RoutingScore::kSigmoid) {
    prob.q = activations::Sigmoid<float>(c.logit).value;
  } else {
    const bool over_chosen = p.score == RoutingScore::kTopKSoftmax;
    if (over_chosen) over.max = P::greatest(c.logit);
    prob.q = weight(c.logit, over.max);
    if (over_chosen) over.sum = sum_over_chosen<P>(p.top_k, 0, c.is_expert ? prob.q : none);
    prob.q /= over.sum;
  }
  if (!c.is_expert) prob.q = 0;
  if (p.normalize) prob.norm = sum_over_chosen<P>(p.top_k, kTiny, c.is_choice ? prob.q : kNothing);
  return prob;
}

}  // namespace cadre::cuda::portable
