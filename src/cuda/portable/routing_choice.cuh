#pragma once
#include "cuda/portable/routing_token.cuh"

// The top_k experts of a token by rank. Ranks are in registers; each choice is a reduction over the
// warp, and another one where ranks are equal.
namespace cadre::cuda::portable {

constexpr unsigned kNone = 1 << 30;  // no expert

/// The ranks of this lane's experts as ordered() numbers, 0 of what is taken or does not exist.
template <int kSlots>
struct Ranks {
  uint32_t of[kSlots] = {};

  __device__ void take(int expert) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (lane() + i * kLanes == expert) of[i] = 0;
  }
  /// Those of the experts [first, last).
  __device__ Ranks within(int first, int last) const {
    Ranks some;
    for_experts<kSlots>(last, [&](int i, int e) { some.of[i] = e < first ? 0 : of[i]; });
    return some;
  }
};

template <int kSlots>
__device__ Ranks<kSlots> find_ranks(const Scores<kSlots>& found, const float* bias,
                                    const RoutingProblem& p) {
  OfExperts<kSlots> added;
  if (bias != nullptr) for_experts<kSlots>(p.experts, [&](int i, int e) { added.of[i] = bias[e]; });
  Ranks<kSlots> ranks;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const bool by_logit = p.score == RoutingScore::kTopKSoftmax;
    const float rank = (by_logit ? found.logit.of[i] : found.score.of[i]) + added.of[i];
    const uint32_t number = ordered(isnan(rank) ? lowest() : rank);
    ranks.of[i] = lane() + i * kLanes < p.experts ? number : 0;
  }
  return ranks;
}

/// An expert and its rank.
struct Best {
  int expert;
  uint32_t rank;
};

/// The one expert that has this rank, of a whole warp; negative: there are more. By a bit for each
/// of a lane's experts, or, where these do not fit into a word, by their number.
template <int kSlots>
__device__ int only_one(const Ranks<kSlots>& ranks, uint32_t rank) {
  if constexpr (kSlots <= kLanes) {
    uint32_t slots = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) slots |= uint32_t(ranks.of[i] == rank) << i;
    const unsigned lanes = __ballot_sync(kAll, slots != 0);
    const int first = __ffs(int(lanes)) - 1;
    const uint32_t its = __shfl_sync(kAll, slots, first);
    const bool is_one = (lanes & (lanes - 1)) == 0 && (its & (its - 1)) == 0;
    return is_one ? first + kLanes * (__ffs(int(its)) - 1) : -1;
  } else {
    unsigned found = kNone, equals = 0;
#pragma unroll
    for (int i = kSlots - 1; i >= 0; --i) {
      found = ranks.of[i] == rank ? unsigned(lane() + i * kLanes) : found;
      equals += ranks.of[i] == rank;
    }
    return __reduce_add_sync(kAll, equals) == 1 ? int(__reduce_min_sync(kAll, found)) : -1;
  }
}

/// The best expert that is not taken: the greatest rank, of those the greatest logit, of those the
/// lowest number.
template <int kSlots>
__device__ Best best(const Token& token, const Ranks<kSlots>& ranks) {
  uint32_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) greatest = max(greatest, ranks.of[i]);
  const uint32_t top = __reduce_max_sync(kAll, greatest);
  if (const int one = only_one(ranks, top); one >= 0) return {one, top};
  unsigned found = kNone;
  uint32_t logit = 0;
  for_experts<kSlots>(token.p.experts, [&](int i, int e) {
    const uint32_t its_logit = ranks.of[i] == top ? ordered(token.logit[e]) : 0;
    if (its_logit > logit) logit = its_logit, found = unsigned(e);
  });
  const uint32_t top_logit = __reduce_max_sync(kAll, logit);
  return {int(__reduce_min_sync(kAll, logit == top_logit ? found : kNone)), top};
}

/// Takes the experts that no kept group has.
template <int kSlots>
__device__ void keep_groups(const Token& token, Ranks<kSlots>& ranks) {
  const RoutingProblem& p = token.p;
  const int size = p.experts / p.groups;
  const int wanted = min(size, max(1, p.top_k / p.group_top_k));
  float *sums = token.spare, *kept = token.q;
  for (int g = 0; g < p.groups; ++g) {
    Ranks<kSlots> group = ranks.within(g * size, (g + 1) * size);
    float sum = 0;
    for (int i = 0; i < wanted; ++i) {
      const Best one = best(token, group);
      group.take(one.expert);
      sum += from_ordered(one.rank);
    }
    if (lane() == 0) sums[g] = sum, kept[g] = 0;
  }
  __syncwarp();
  for (int taken = 0; taken < p.group_top_k; ++taken) {
    int found = -1;
    for (int g = 0; g < p.groups; ++g)
      if (kept[g] == 0 && (found < 0 || sums[g] > sums[found])) found = g;
    __syncwarp();
    if (lane() == 0) kept[found] = 1;
    __syncwarp();
  }
  for_experts<kSlots>(p.experts, [&](int i, int e) {
    if (kept[e / size] == 0) ranks.of[i] = 0;
  });
  __syncwarp();
}

/// Lane j has choice j of 32, and writes it.
template <int kSlots>
__device__ void choose(const Token& token, Ranks<kSlots> ranks, int32_t* experts) {
  if (token.p.groups > 1) keep_groups(token, ranks);
  for (int first = 0; first < token.p.top_k; first += kLanes) {
    const int count = min(kLanes, token.p.top_k - first);
    int mine = 0;
    for (int j = 0; j < count; ++j) {
      const int e = best(token, ranks).expert;
      ranks.take(e);
      if (lane() == j) mine = e;
    }
    if (lane() < count) experts[first + lane()] = token.chosen[first + lane()] = mine;
  }
  __syncwarp();
}

}  // namespace cadre::cuda::portable
