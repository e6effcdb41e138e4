#pragma once
#include <algorithm>

#include "cuda/portable/routing_part.cuh"
#include "cuda/portable/routing_sort.cuh"

// The top_k experts of a token whose part of a warp has them in registers. A key is a rank without
// its last bits and an expert number in their place, so no two are equal. Each lane sorts its keys
// once; a choice is the greatest of their first ones. Where keys are too close to tell, the choice
// is made again by ranks, logits and numbers.
namespace cadre::cuda::portable {

/// What experts are ordered by, in the terms of cadre/routing.h. Ranks and logits are ordered().
struct Standing {
  uint32_t rank, logit;
  int expert;

  __device__ bool is_before(const Standing& other) const {
    if (rank != other.rank) return rank > other.rank;
    return logit != other.logit ? logit > other.logit : expert < other.expert;
  }
};

/// Turns scores, or logits of topk_softmax, into ranks; -infinity for NaN and for no expert.
template <class P>
__device__ void make_ranks(const RoutingJob& job, typename P::Numbers& plain) {
  if (job.bias != nullptr)
    for_slots<P>(job.p.experts, [&](int i, int e) { plain.of[i] += job.bias[e]; });
#pragma unroll
  for (int i = 0; i < P::kSlots; ++i)
    plain.of[i] = P::has(i, job.p.experts) ? fmaxf(plain.of[i], lowest()) : lowest();
}

/// Turns logits into scores, of which those of a softmax are not divided yet.
template <class P>
__device__ Softmax make_plain_scores(const RoutingProblem& p, typename P::Numbers& of_experts) {
  if (p.score != RoutingScore::kSigmoid) return make_weights<P>(of_experts, p.experts);
#pragma unroll
  for (int i = 0; i < P::kSlots; ++i)
    of_experts.of[i] = activations::Sigmoid<float>(of_experts.of[i]).value;
  return {};
}

/// The choice of this lane, by the definition of the order.
template <class P>
__device__ int choose_by_standing(const RoutingJob& job, int64_t t) {
  const auto logit = read_all_logits<P>(job.logits, t, job.p.experts);
  auto ranks = logit;
  if (job.p.score != RoutingScore::kTopKSoftmax) {
    const Softmax softmax = make_plain_scores<P>(job.p, ranks);
    if (job.p.score == RoutingScore::kSoftmax) divide<P>(ranks, softmax.sum);
  }
  make_ranks<P>(job, ranks);
  uint32_t rank[P::kSlots] = {};  // 0: taken, or no expert
  for_slots<P>(job.p.experts, [&](int i, int) { rank[i] = ordered(ranks.of[i]); });
  int mine = 0;
#pragma unroll 1
  for (int j = 0; j < job.p.top_k; ++j) {
    Standing best{0, 0, 0};
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) {
      const Standing here{rank[i], ordered(logit.of[i]), P::expert(i)};
      if (here.is_before(best)) best = here;
    }
#pragma unroll
    for (int step = P::kWidth / 2; step > 0; step /= 2) {
      const Standing other{__shfl_xor_sync(kAll, best.rank, step),
                           __shfl_xor_sync(kAll, best.logit, step),
                           __shfl_xor_sync(kAll, best.expert, step)};
      if (other.is_before(best)) best = other;
    }
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i)
      if (P::expert(i) == best.expert) rank[i] = 0;
    if (P::lane() == j) mine = best.expert;
  }
  return mine;
}

/// The keys of this lane.
template <class P>
struct Keys {
  static constexpr uint32_t kNumber = P::kExperts - 1;  ///< bits of the number, ascending for less
  /// How many keys are sorted. The last of them stands for those that are not, as a bound.
  static constexpr int kSorted = P::kSlots < 8 ? P::kSlots : 8;
  uint32_t of[P::kSlots];

  /// Ranks are ordered(). The part of the number that tells lanes apart comes with the sort.
  __device__ void set(int slot, uint32_t rank) {
    of[slot] = (rank & ~kNumber) | uint32_t((P::kSlots - 1 - slot) * P::kWidth);
  }
  static __device__ int expert_of(uint32_t key) { return int(kNumber - (key & kNumber)); }
  /// Whether the lesser key may be of an expert that comes first: ranks of others differ by more
  /// than 32 units in the last place, and so do their logits.
  static __device__ bool are_close(uint32_t key, uint32_t lesser) {
    return key - lesser < 2 * (kNumber + 1);
  }

  __device__ void sort_them() {
    sort<0, kSorted>(of);
    if constexpr (P::kSlots > kSorted) {
      sort<kSorted, kSorted>(of);
      keep_greater_half<kSorted>(of);
    }
#pragma unroll
    for (int i = 0; i < kSorted; ++i) of[i] |= uint32_t(P::kWidth - 1 - P::lane());
  }
  __device__ uint32_t greatest() const { return P::greatest(of[0]); }
  __device__ void take(uint32_t key) {
    const bool is_here = of[0] == key;
#pragma unroll
    for (int i = 0; i + 1 < kSorted; ++i) of[i] = is_here ? of[i + 1] : of[i];
    if constexpr (kSorted == P::kSlots) of[kSorted - 1] = is_here ? 0 : of[kSorted - 1];
  }
};

/// Whether equal logits and biases make it sure that two keys are in the order of the experts.
template <class P>
__device__ bool are_alike(const RoutingJob& job, int64_t t, uint32_t key, uint32_t other) {
  const int a = Keys<P>::expert_of(key), b = Keys<P>::expert_of(other);
  if (a == b || a >= job.p.experts || b >= job.p.experts) return false;
  const auto logit = [&](int e) {
    return logit_of(element_bits(job.logits, {t, e}), job.logits.dtype);
  };
  return logit(a) == logit(b) && (job.bias == nullptr || job.bias[a] == job.bias[b]);
}

/// Whether the choices, of which this lane has `mine`, and `last` is the last one, may be in
/// another order, or lack what is left in keys.
template <class P>
__device__ bool is_doubtful(const RoutingJob& job, int64_t t, Keys<P>& keys, uint32_t mine,
                            uint32_t last) {
  using K = Keys<P>;
  const uint32_t before = __shfl_up_sync(kAll, mine, 1, P::kWidth);
  const bool follows = P::lane() > 0 && P::lane() < job.p.top_k && K::are_close(before, mine);
  uint32_t next = keys.greatest();
  bool goes_on = K::are_close(last, next);
  if (!__any_sync(kAll, follows || goes_on)) return false;
  bool doubtful = follows && !are_alike<P>(job, t, before, mine);
  while (__any_sync(kAll, goes_on && !doubtful)) {  // all that could be as good as the last
    doubtful |= goes_on && !are_alike<P>(job, t, last, next);
    keys.take(next);
    last = next;
    next = keys.greatest();
    goes_on = goes_on && K::are_close(last, next);
  }
  return __any_sync(kAll, doubtful);
}

/// The choice of this lane by sorted keys.
template <class P>
__device__ int choose_by_keys(const RoutingJob& job, int64_t t, Keys<P>& keys) {
  uint32_t mine = 0, last = 0;
#pragma unroll 4
  for (int j = 0; j < job.p.top_k; ++j) {
    last = keys.greatest();
    keys.take(last);
    mine = P::lane() == j ? last : mine;
  }
  if (is_doubtful(job, t, keys, mine, last)) return choose_by_standing<P>(job, t);
  return Keys<P>::expert_of(mine);
}

}  // namespace cadre::cuda::portable
