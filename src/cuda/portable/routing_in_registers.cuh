#pragma once
#include "cuda/portable/routing_pick.cuh"

// Routing of few experts without groups: a part of a warp takes a token, and has what there is of
// each expert in registers. Lane j has choice j.
namespace cadre::cuda::portable {

/// What the lane of a choice found.
struct Chosen {
  int expert;
  float prob;
  bool is_choice;
};

template <class P>
struct RoutingInRegisters {
  static constexpr int kTokens = P::kTokens;                             ///< of a warp
  static constexpr int kBlocks = P::kSlots <= 8 ? 8 : P::kFull ? 6 : 5;  ///< of an SM, at least
  using Numbers = typename P::Numbers;

  /// Gradients of a token's experts, in shared memory; parts of a warp are in different banks.
  static constexpr int kGradients = P::kExperts + P::kWidth;
  static int shared_bytes_of_warp(const RoutingProblem& p) {
    return p.backward ? kTokens * kGradients * int(sizeof(float)) : 0;
  }
  static __device__ float* gradients(uint8_t* shared) {
    return reinterpret_cast<float*>(shared) + threadIdx.x / P::kWidth * kGradients;
  }

  static __device__ Chosen forward(const RoutingJob& job, uint8_t*, int64_t t) {
    const RoutingProblem& p = job.p;
    Softmax softmax;
    const int expert = choose(job, t, softmax);
    const Choice c = look_at_choice<P>(job, t, expert);
    const PlainProb prob = plain_prob<P>(p, c, softmax);
    if (!c.is_choice) return {};
    const float scaled = p.scale * (p.normalize ? prob.q / prob.norm : prob.q);
    job.experts[t * p.top_k + P::lane()] = expert;
    job.prob[t * p.top_k + P::lane()] = scaled;
    return {expert, scaled, true};
  }

  static __device__ void backward(const RoutingJob& job, uint8_t* shared, int64_t t) {
    const RoutingProblem& p = job.p;
    float* added = gradients(shared);
    const bool has_choice = P::lane() < p.top_k;
    const Choice c =
        look_at_choice<P>(job, t, has_choice ? job.experts[t * p.top_k + P::lane()] : -1);
    Numbers of = read_all_logits<P>(job.logits, t, p.experts);
    Softmax softmax;
    if (job.wants_scores() && p.score != RoutingScore::kSigmoid)
      softmax = make_weights<P>(of, p.experts);
    const float gradient = gradient_of_choice(job, t, c, plain_prob<P>(p, c, softmax));
    begin_gradients(job, t, added);
    add_chosen(c, gradient, added);
    make_gradients(job, t, added, softmax, of);
    store_gradients(job, t, of);
    __syncwarp();
  }

 private:
  /// The expert of this lane's choice. Writes the scores if they are wanted.
  static __device__ int choose(const RoutingJob& job, int64_t t, Softmax& softmax) {
    const RoutingProblem& p = job.p;
    const bool by_logit = p.score == RoutingScore::kTopKSoftmax;
    Numbers of = read_all_logits<P>(job.logits, t, p.experts);
    Keys<P> keys;
    if (by_logit) keys = keys_of_ranks(job, of);
    if (job.wants_scores()) {
      softmax = make_plain_scores<P>(p, of);
      const bool is_divided = job.scores != nullptr || job.bias != nullptr;
      if (is_divided && p.score != RoutingScore::kSigmoid) divide<P>(of, softmax.sum);
      if (job.scores != nullptr)
        for_slots<P>(p.experts, [&](int i, int e) { job.scores[t * p.experts + e] = of.of[i]; });
      if (!by_logit) keys = job.bias != nullptr ? keys_of_ranks(job, of) : keys_of_scores(of);
    }
    return choose_by_keys<P>(job, t, keys);
  }

  static __device__ Keys<P> keys_of_ranks(const RoutingJob& job, Numbers plain) {
    make_ranks<P>(job, plain);
    Keys<P> keys;
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) keys.set(i, ordered(plain.of[i]));
    keys.sort_them();
    return keys;
  }
  /// Without a bias scores are in the order of their ranks, divided or not, and none is negative.
  /// What is no expert has 0 and the highest numbers.
  static __device__ Keys<P> keys_of_scores(const Numbers& score) {
    Keys<P> keys;
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) keys.set(i, __float_as_uint(score.of[i]) | 0x8000'0000u);
    keys.sort_them();
    return keys;
  }

  /// What this lane's choice adds to the gradient of its score, or of its logit for topk_softmax.
  static __device__ float gradient_of_choice(const RoutingJob& job, int64_t t, const Choice& c,
                                             const PlainProb& prob) {
    const RoutingProblem& p = job.p;
    const float dprob = c.is_choice ? job.dprob[t * p.top_k + P::lane()] : 0.0f;
    float through_norm = 0;
    if (p.normalize)
      through_norm =
          sum_over_chosen<P>(p.top_k, 0, c.is_expert ? dprob * prob.q / prob.norm : kNothing);
    const float scaled = p.scale * (dprob - through_norm);
    const float dq = p.normalize ? scaled / prob.norm : scaled;
    if (p.score != RoutingScore::kTopKSoftmax) return dq;
    const float mean = sum_over_chosen<P>(p.top_k, 0, c.is_expert ? dq * prob.q : kNothing);
    return prob.q * (dq - mean);
  }

  /// The gradients that those of the chosen are added to.
  static __device__ void begin_gradients(const RoutingJob& job, int64_t t, float* added) {
    const bool of_scores = job.p.score != RoutingScore::kTopKSoftmax && job.dscores != nullptr;
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) added[P::expert(i)] = 0;
    if (of_scores)
      for_slots<P>(job.p.experts,
                   [&](int, int e) { added[e] = job.dscores[t * job.p.experts + e]; });
    __syncwarp();
  }

  /// An expert that was chosen twice gets one after the other.
  static __device__ void add_chosen(const Choice& c, float gradient, float* added) {
    const int token = int(threadIdx.x % kLanes) / P::kWidth;
    const int id = c.is_expert ? token * P::kExperts + c.expert : -1 - int(threadIdx.x % kLanes);
    const unsigned same = __match_any_sync(kAll, id);
    if (__all_sync(kAll, (same & (same - 1)) == 0)) {
      if (c.is_expert) added[c.expert] += gradient;
    } else {
#pragma unroll 1
      for (int turn = 0; turn < P::kWidth; ++turn) {
        if (P::lane() == turn && c.is_expert) added[c.expert] += gradient;
        __syncwarp();
      }
    }
    __syncwarp();
  }

  /// Turns logits, or the weights of a softmax, into the gradients of the logits.
  static __device__ void make_gradients(const RoutingJob& job, int64_t t, const float* added,
                                        Softmax softmax, Numbers& of) {
    const RoutingProblem& p = job.p;
    Numbers its;
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) its.of[i] = added[P::expert(i)];
    if (p.score == RoutingScore::kSigmoid) {
      pass_sigmoid(its, of);
    } else if (p.score == RoutingScore::kSoftmax) {
      divide<P>(of, softmax.sum);
      pass_softmax(its, Numbers{}, of);
    } else if (job.wants_scores()) {
      Numbers dscore;
      for_slots<P>(p.experts, [&](int i, int e) { dscore.of[i] = job.dscores[t * p.experts + e]; });
      divide<P>(of, softmax.sum);
      pass_softmax(dscore, its, of);
    } else {  // no score passes anything on
      of = its;
    }
  }

  static __device__ void pass_sigmoid(const Numbers& dscore, Numbers& of) {
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) {
      const activations::Sigmoid<float> s(of.of[i]);
      of.of[i] = 0.0f + dscore.of[i] * s.value * s.complement;
    }
  }

  /// `direct` comes past the scores.
  static __device__ void pass_softmax(const Numbers& dscore, const Numbers& direct, Numbers& of) {
    Numbers product;
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) product.of[i] = dscore.of[i] * of.of[i];
    const float mean = sum_over_experts<P>(product);
#pragma unroll
    for (int i = 0; i < P::kSlots; ++i) of.of[i] = direct.of[i] + of.of[i] * (dscore.of[i] - mean);
  }

  static __device__ void store_gradients(const RoutingJob& job, int64_t t, const Numbers& of) {
    with_dtype(job.dlogits.dtype, [&]<DType kDType>() {
      Matrix dlogits = job.dlogits;
      dlogits.dtype = kDType;
      for_slots<P>(job.p.experts, [&](int i, int e) { store_element(of.of[i], dlogits, {t, e}); });
    });
  }
};

}  // namespace cadre::cuda::portable
