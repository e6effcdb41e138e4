#pragma once
#include "cuda/portable/routing_choice.cuh"
#include "cuda/portable/routing_job.cuh"

// Routing of any problem: a warp takes a token, whose arrays are in shared memory
// (routing_token.cuh), and its choices (routing_choice.cuh). A sum over the chosen is in their
// order.
namespace cadre::cuda::portable {

/// Calls work(j) in the lane of choice j, for all of them. Mostly once: nothing is unrolled.
template <class Work>
__device__ void for_chosen(const RoutingProblem& p, Work&& work) {
#pragma unroll 1
  for (int j = lane(); j < p.top_k; j += kLanes) work(j);
}

/// start + of(0) + of(1) + ..., in this order: a lane has its own choice's, and eight numbers are
/// on their way to all lanes at once.
template <class Of>
__device__ float sum_of_chosen(const RoutingProblem& p, float start, Of&& of) {
  constexpr int kAtOnce = 8;
  static_assert(kLanes % kAtOnce == 0);
  float sum = start;
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    const int j = first / kLanes * kLanes + lane();
    const float mine = j < p.top_k ? of(j) : kNothing;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += __shfl_sync(kAll, mine, first % kLanes + i);
  }
  return sum;
}

/// The greatest logit of the chosen.
__device__ inline float greatest_of_chosen(const Token& token) {
  uint32_t greatest = ordered(lowest());
  for_chosen(token.p, [&](int j) {
    if (token.is_expert(j)) greatest = max(greatest, ordered(token.logit[token.chosen[j]]));
  });
  return from_ordered(__reduce_max_sync(kAll, greatest));
}

/// Writes q[j] of cadre/routing.h, 0 for what is no expert, each in the lane of its choice; returns
/// their sum if they are normalised.
__device__ inline float find_plain_prob(const Token& token) {
  const RoutingProblem& p = token.p;
  const auto q = [&](int j) { return token.q[j]; };
  if (p.score == RoutingScore::kTopKSoftmax) {
    const float max = greatest_of_chosen(token);
    for_chosen(p, [&](int j) {
      token.q[j] = token.is_expert(j) ? weight(token.logit[token.chosen[j]], max) : 0.0f;
    });
    const float sum = sum_of_chosen(p, 0, q);
    for_chosen(p, [&](int j) { token.q[j] = token.is_expert(j) ? token.q[j] / sum : 0.0f; });
  } else {
    for_chosen(
        p, [&](int j) { token.q[j] = token.is_expert(j) ? token.score[token.chosen[j]] : 0.0f; });
  }
  return p.normalize ? sum_of_chosen(p, kTiny, q) : 1.0f;
}

template <int kSlots>
__device__ void forward(const RoutingJob& job, const Token& token, int64_t t) {
  const RoutingProblem& p = job.p;
  const Scores<kSlots> found = find_scores<kSlots>(token, job.logits, t, job.wants_scores());
  choose(token, find_ranks(found, job.bias, p), job.experts + t * p.top_k);
  const float norm = find_plain_prob(token);
  for_chosen(p, [&](int j) { job.prob[t * p.top_k + j] = p.scale * (token.q[j] / norm); });
  for (int e = lane(); e < p.experts && job.scores != nullptr; e += kLanes)
    job.scores[t * p.experts + e] = token.score[e];
  __syncwarp();
}

/// Adds the gradients of the chosen to the token's dscore, or of topk_softmax to dlogit.
__device__ inline void add_chosen(const Token& token, const float* dprob, float* dlogit) {
  const RoutingProblem& p = token.p;
  const float norm = find_plain_prob(token);
  float through_norm = 0;
  if (p.normalize)
    through_norm = sum_of_chosen(
        p, 0, [&](int j) { return token.is_expert(j) ? dprob[j] * token.q[j] / norm : kNothing; });
  const auto dq = [&](int j) { return p.scale * (dprob[j] - through_norm) / norm; };
  const bool over_chosen = p.score == RoutingScore::kTopKSoftmax;
  float mean = 0;
  if (over_chosen)
    mean = sum_of_chosen(p, 0,
                         [&](int j) { return token.is_expert(j) ? dq(j) * token.q[j] : kNothing; });
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kLanes) {
    const int j = first + lane();
    const bool adds = j < p.top_k && token.is_expert(j);
    const int e = adds ? token.chosen[j] : -1 - lane();
    const auto add = [&] {
      if (!adds) return;
      if (over_chosen)
        dlogit[e] += token.q[j] * (dq(j) - mean);
      else
        token.dscore[e] += dq(j);
    };
    const unsigned same = __match_any_sync(kAll, e);
    if (__all_sync(kAll, (same & (same - 1)) == 0)) {
      add();
    } else {  // an expert was chosen twice: one after the other
#pragma unroll 1
      for (int turn = 0; turn < kLanes; ++turn) {
        if (lane() == turn) add();
        __syncwarp();
      }
    }
    __syncwarp();
  }
}

/// The logits of the chosen alone.
__device__ inline void read_chosen_logits(const RoutingJob& job, const Token& token, int64_t t) {
  for_chosen(job.p, [&](int j) {
    if (!token.is_expert(j)) return;
    const int e = token.chosen[j];
    const float x = element_of(element_bits(job.logits, {t, e}), job.logits.dtype);
    token.logit[e] = isnan(x) ? lowest() : x;
  });
  __syncwarp();
}

template <int kSlots>
__device__ void backward(const RoutingJob& job, const Token& token, int64_t t) {
  const RoutingProblem& p = job.p;
  float *dscore = token.dscore, *dlogit = token.spare;
  for_chosen(p, [&](int j) { token.chosen[j] = job.experts[t * p.top_k + j]; });
  for_experts<kSlots>(p.experts, [&](int, int e) { dlogit[e] = 0; });
  const float* dprob = job.dprob + t * p.top_k;
  if (!job.wants_scores()) {  // no score passes anything on
    read_chosen_logits(job, token, t);
    add_chosen(token, dprob, dlogit);
    for_experts<kSlots>(p.experts, [&](int, int e) {
      store_element(dlogit[e] + 0.0f, job.dlogits, {t, e});
    });
    return __syncwarp();
  }
  find_scores<kSlots>(token, job.logits, t, true);
  for_experts<kSlots>(p.experts, [&](int, int e) {
    dscore[e] = job.dscores != nullptr ? job.dscores[t * p.experts + e] : 0.0f;
  });
  __syncwarp();
  add_chosen(token, dprob, dlogit);
  OfExperts<kSlots> product;
  for_experts<kSlots>(p.experts, [&](int i, int e) { product.of[i] = dscore[e] * token.score[e]; });
  const float mean = sum_of_experts(product);
  const bool sigmoid = p.score == RoutingScore::kSigmoid;
  for (int e = lane(); e < p.experts; e += kLanes) {
    float through_score = 0;
    if (sigmoid) {
      const activations::Sigmoid<float> s(token.logit[e]);
      through_score = dscore[e] * s.value * s.complement;
    } else {
      through_score = token.score[e] * (dscore[e] - mean);
    }
    store_element(dlogit[e] + through_score, job.dlogits, {t, e});
  }
  __syncwarp();
}

/// With at most so many experts a lane.
template <int kSlots>
struct RoutingInShared {
  static constexpr int kTokens = 1;                    ///< of a warp
  static constexpr int kBlocks = kSlots <= 8 ? 9 : 1;  ///< of an SM, at least

  static int shared_bytes_of_warp(const RoutingProblem& p) {
    return kTokenArrays * p.experts * int(sizeof(float));
  }
  static __device__ Token token(const RoutingJob& job, uint8_t* shared) {
    return Token(job.p, reinterpret_cast<uint32_t*>(shared));
  }
  static __device__ void forward(const RoutingJob& job, uint8_t* shared, int64_t t) {
    portable::forward<kSlots>(job, token(job, shared), t);
  }
  static __device__ void backward(const RoutingJob& job, uint8_t* shared, int64_t t) {
    portable::backward<kSlots>(job, token(job, shared), t);
  }
};

}  // namespace cadre::cuda::portable
