#include "cuda/portable/routing.h"

#include <algorithm>

#include "activations/sigmoid.h"
#include "cuda/device/chunk.h"
#include "cuda/portable/launch.h"

// scores = softmax or sigmoid of a token's logits; its top_k experts by rank, and their
// probabilities; backward the gradient of the logits. Formulas in cadre/routing.h.
//
// logits, dlogits [T, E]; scores, dscores [T, E]; experts, prob, dprob [T, top_k]. A warp takes a
// token, whose arrays are in shared memory: lane i has the experts i, i + 32, .... A sum over the
// experts is a tree over 64 partial sums, as on the CPU; a sum over the chosen is in their order.
namespace cadre::cuda::portable {
namespace {

constexpr int kMostExperts = 2000;  // arrays fit into 48 KiB, and a lane's experts into 64 bits
constexpr int kArrays = 6;          // of a token, each [E]
constexpr int kMostWarps = 4;
constexpr int64_t kMostBlocks = 1 << 20;
constexpr float kTiny = 1e-20f;  // keeps a sum of probabilities above 0
constexpr int kNone = 1 << 30;
constexpr unsigned kAll = ~0u;

/// The parameters of the kernels.
struct Job {
  RoutingProblem p;
  Matrix logits, dlogits;
  const float *bias, *dprob, *dscores;
  int32_t* experts;
  float *prob, *scores;
};

/// The arrays of the warp's token, in shared memory.
struct Token {
  const RoutingProblem& p;
  float *logit, *score, *q, *spare;
  uint32_t* rank;  ///< as ordered() numbers; backward has dscore there
  int32_t* chosen;

  __device__ Token(const RoutingProblem& problem, uint32_t* shared) : p(problem) {
    uint32_t* mine = shared + threadIdx.x / kLanes * kArrays * p.experts;
    logit = reinterpret_cast<float*>(mine);
    score = logit + p.experts;
    q = score + p.experts;
    spare = q + p.experts;
    rank = mine + 4 * p.experts;
    chosen = reinterpret_cast<int32_t*>(mine) + 5 * p.experts;
  }
  __device__ bool is_expert(int j) const { return chosen[j] >= 0 && chosen[j] < p.experts; }
};

__device__ int lane() { return int(threadIdx.x % kLanes); }
__device__ float lowest() { return -INFINITY; }

/// Unsigned numbers in the order of the floats, none of them 0; both zeros are one. Not for NaN.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 != 0 ? ~bits : bits | 0x8000'0000u;
}
__device__ float from_ordered(uint32_t number) {
  return __uint_as_float(number >> 31 != 0 ? number & 0x7fff'ffffu : ~number);
}

/// e^(l - max): equal infinities count as equal.
__device__ float weight(float logit, float max) {
  return logit == max ? 1.0f : activations::exp_of_negative(logit - max);
}

/// The sum of value(e) over the experts: two partial sums a lane, then a tree of warp shuffles.
template <class Value>
__device__ float sum_of_experts(int experts, Value&& value) {
  float low = 0, high = 0;
  for (int e = lane(); e < experts; e += 2 * kLanes) {
    low += value(e);
    if (e + kLanes < experts) high += value(e + kLanes);
  }
  float sum = low + high;
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, step);
  return __shfl_sync(kAll, sum, 0);
}

__device__ float element(const Matrix& m, int64_t row, int column) {
  const char* at = address(m, {row, column});
  return m.dtype == DType::kF32 ? *reinterpret_cast<const float*>(at)
                                : pair_of(m.dtype, *reinterpret_cast<const uint16_t*>(at)).x;
}

__device__ void find_scores(const Token& token, const Matrix& logits, int64_t t) {
  const int experts = token.p.experts;
  uint32_t greatest = 0;
  for (int e = lane(); e < experts; e += kLanes) {
    const float logit = element(logits, t, e);
    token.logit[e] = isnan(logit) ? lowest() : logit;
    greatest = max(greatest, ordered(token.logit[e]));
  }
  if (token.p.score == RoutingScore::kSigmoid) {
    for (int e = lane(); e < experts; e += kLanes)
      token.score[e] = activations::Sigmoid<float>(token.logit[e]).value;
  } else {
    const float max = from_ordered(__reduce_max_sync(kAll, greatest));
    const float sum = sum_of_experts(
        experts, [&](int e) { return token.score[e] = weight(token.logit[e], max); });
    for (int e = lane(); e < experts; e += kLanes) token.score[e] /= sum;
  }
  __syncwarp();
}

__device__ void find_ranks(const Token& token, const float* bias) {
  const float* plain = token.p.score == RoutingScore::kTopKSoftmax ? token.logit : token.score;
  for (int e = lane(); e < token.p.experts; e += kLanes) {
    const float rank = plain[e] + (bias != nullptr ? bias[e] : 0.0f);
    token.rank[e] = ordered(isnan(rank) ? lowest() : rank);
  }
  __syncwarp();
}

/// The best of the experts [first, last) that this lane has not taken: the greatest rank, of those
/// the greatest logit, of those the lowest number. Bit i of `taken` is the lane's expert i.
__device__ int best(const Token& token, int first, int last, uint64_t taken) {
  uint32_t rank = 0, logit = 0;
  int found = kNone;
  for (int e = first / kLanes * kLanes + lane(); e < last; e += kLanes) {
    if (e < first || (taken >> (e / kLanes) & 1) != 0 || token.rank[e] < rank) continue;
    const uint32_t its_logit = ordered(token.logit[e]);
    if (token.rank[e] == rank && its_logit <= logit) continue;
    rank = token.rank[e], logit = its_logit, found = e;
  }
  const uint32_t top_rank = __reduce_max_sync(kAll, rank);
  if (rank != top_rank) logit = 0;
  const uint32_t top_logit = __reduce_max_sync(kAll, logit);
  return __reduce_min_sync(kAll, rank == top_rank && logit == top_logit ? found : kNone);
}

__device__ uint64_t bit_of(int expert) {
  return expert % kLanes == lane() ? uint64_t(1) << (expert / kLanes) : 0;
}

/// Bits of the lane's experts that no kept group has.
__device__ uint64_t outside_kept_groups(const Token& token) {
  const RoutingProblem& p = token.p;
  const int size = p.experts / p.groups;
  const int wanted = min(size, max(1, p.top_k / p.group_top_k));
  float *sums = token.spare, *kept = token.q;
  for (int g = 0; g < p.groups; ++g) {
    uint64_t taken = 0;
    float sum = 0;
    for (int i = 0; i < wanted; ++i) {
      const int e = best(token, g * size, (g + 1) * size, taken);
      taken |= bit_of(e);
      sum += from_ordered(token.rank[e]);
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
  uint64_t outside = 0;
  for (int e = lane(); e < p.experts; e += kLanes)
    if (kept[e / size] == 0) outside |= bit_of(e);
  __syncwarp();
  return outside;
}

__device__ void choose(const Token& token, int32_t* experts) {
  uint64_t taken = token.p.groups > 1 ? outside_kept_groups(token) : 0;
  for (int j = 0; j < token.p.top_k; ++j) {
    const int e = best(token, 0, token.p.experts, taken);
    taken |= bit_of(e);
    if (lane() == 0) experts[j] = token.chosen[j] = e;
  }
  __syncwarp();
}

/// Writes q[j] of cadre/routing.h, 0 for what is no expert; returns their sum if they are
/// normalised.
__device__ float find_plain_prob(const Token& token) {
  const RoutingProblem& p = token.p;
  const bool over_chosen = p.score == RoutingScore::kTopKSoftmax;
  float max = lowest(), sum = 0, norm = kTiny;
  for (int j = 0; j < p.top_k && over_chosen; ++j)
    if (token.is_expert(j)) max = fmaxf(max, token.logit[token.chosen[j]]);
  for (int j = lane(); j < p.top_k; j += kLanes) {
    const int e = token.is_expert(j) ? token.chosen[j] : -1;
    token.q[j] = e < 0 ? 0.0f : over_chosen ? weight(token.logit[e], max) : token.score[e];
  }
  __syncwarp();
  if (over_chosen) {
    for (int j = 0; j < p.top_k; ++j) sum += token.q[j];
    __syncwarp();
    for (int j = lane(); j < p.top_k; j += kLanes)
      token.q[j] = token.is_expert(j) ? token.q[j] / sum : 0.0f;
    __syncwarp();
  }
  for (int j = 0; j < p.top_k && p.normalize; ++j) norm += token.q[j];
  return p.normalize ? norm : 1.0f;
}

/// A grid-stride loop: calls work(token number) with every token of this warp.
template <class Work>
__device__ void for_tokens(int64_t tokens, Work&& work) {
  const int64_t warps = blockDim.x / kLanes;
  for (int64_t t = blockIdx.x * warps + threadIdx.x / kLanes; t < tokens; t += gridDim.x * warps)
    work(t);
}

__global__ void __launch_bounds__(kMostWarps* kLanes) forward_kernel(const Job job) {
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const RoutingProblem& p = job.p;
  const Token token(p, shared);
  for_tokens(p.tokens, [&](int64_t t) {
    find_scores(token, job.logits, t);
    find_ranks(token, job.bias);
    choose(token, job.experts + t * p.top_k);
    const float norm = find_plain_prob(token);
    for (int j = lane(); j < p.top_k; j += kLanes)
      job.prob[t * p.top_k + j] = p.scale * (token.q[j] / norm);
    for (int e = lane(); e < p.experts && job.scores != nullptr; e += kLanes)
      job.scores[t * p.experts + e] = token.score[e];
    __syncwarp();
  });
}

/// Adds the gradients of the chosen to dscore, or of topk_softmax to dlogit. Chosen experts may be
/// equal, so one lane adds.
__device__ void add_chosen(const Token& token, const float* dprob, float* dscore, float* dlogit) {
  const RoutingProblem& p = token.p;
  const float norm = find_plain_prob(token);
  float through_norm = 0, mean = 0;
  for (int j = 0; j < p.top_k && p.normalize; ++j)
    if (token.is_expert(j)) through_norm += dprob[j] * token.q[j] / norm;
  const auto dq = [&](int j) { return p.scale * (dprob[j] - through_norm) / norm; };
  for (int j = 0; j < p.top_k; ++j)
    if (token.is_expert(j)) mean += dq(j) * token.q[j];
  for (int j = 0; j < p.top_k && lane() == 0; ++j) {
    if (!token.is_expert(j)) continue;
    if (p.score == RoutingScore::kTopKSoftmax)
      dlogit[token.chosen[j]] += token.q[j] * (dq(j) - mean);
    else
      dscore[token.chosen[j]] += dq(j);
  }
  __syncwarp();
}

__device__ void store_gradient(const Job& job, int64_t t, int e, float value) {
  char* to = address(job.dlogits, {t, e});
  if (job.dlogits.dtype == DType::kF32)
    *reinterpret_cast<float*>(to) = value;
  else
    *reinterpret_cast<uint16_t*>(to) = uint16_t(bits_of_pair(job.dlogits.dtype, value, 0.0f));
}

__device__ void backward(const Job& job, const Token& token, int64_t t) {
  const RoutingProblem& p = job.p;
  auto *dscore = reinterpret_cast<float*>(token.rank), *dlogit = token.spare;
  find_scores(token, job.logits, t);
  for (int e = lane(); e < p.experts; e += kLanes) {
    dscore[e] = job.dscores != nullptr ? job.dscores[t * p.experts + e] : 0.0f;
    dlogit[e] = 0;
  }
  for (int j = lane(); j < p.top_k; j += kLanes) token.chosen[j] = job.experts[t * p.top_k + j];
  __syncwarp();
  add_chosen(token, job.dprob + t * p.top_k, dscore, dlogit);
  float mean = 0;
  if (p.score != RoutingScore::kSigmoid)
    mean = sum_of_experts(p.experts, [&](int e) { return dscore[e] * token.score[e]; });
  for (int e = lane(); e < p.experts; e += kLanes) {
    const activations::Sigmoid<float> s(token.logit[e]);
    const float through_score = p.score == RoutingScore::kSigmoid
                                    ? dscore[e] * s.value * s.complement
                                    : token.score[e] * (dscore[e] - mean);
    store_gradient(job, t, e, dlogit[e] + through_score);
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kMostWarps* kLanes) backward_kernel(const Job job) {
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const Token token(job.p, shared);
  for_tokens(job.p.tokens, [&](int64_t t) { backward(job, token, t); });
}

}  // namespace

std::string refuses_routing(const RoutingProblem& p, const Device& device) {
  if (p.experts > kMostExperts)
    return text("takes at most ", kMostExperts, " experts; those of a token are in shared memory");
  return needs_sm80(p, device);
}

void routing(const RoutingPlan& plan, const RoutingArgs& args, Workspace, Stream stream) {
  const RoutingProblem& p = plan.problem;
  if (p.tokens == 0) return;
  const Job job{.p = p,
                .logits = Matrix(args.logits),
                .dlogits = Matrix(args.dlogits),
                .bias = args.expert_bias,
                .dprob = args.dprob,
                .dscores = args.dscores,
                .experts = args.experts,
                .prob = args.prob,
                .scores = args.scores};
  const int bytes = kArrays * p.experts * int(sizeof(float));
  const int warps = bytes * kMostWarps <= 47 * 1024 ? kMostWarps : 1;  // of 48 KiB
  const int64_t blocks = (p.tokens + warps - 1) / warps;
  launch(p.backward ? backward_kernel : forward_kernel,
         {unsigned(std::min(blocks, kMostBlocks)), unsigned(warps * kLanes), warps * bytes,
          stream_of(stream)},
         job);
}

}  // namespace cadre::cuda::portable
