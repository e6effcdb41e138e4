#include "cuda/portable/routing.h"

#include <algorithm>

#include "activations/sigmoid.h"
#include "backend/row_map.h"
#include "cuda/portable/offsets.h"
#include "cuda/portable/routing_choice.cuh"
#include "cuda/portable/row_map.cuh"

// scores = softmax or sigmoid of a token's logits; its top_k experts by rank, and their
// probabilities; backward the gradient of the logits. Formulas in cadre/routing.h.
//
// logits, dlogits [T, E]; scores, dscores [T, E]; experts, prob, dprob [T, top_k]. A warp takes a
// token (routing_token.cuh) and its choices (routing_choice.cuh); a sum over the chosen is in their
// order. With map, few tokens are sorted by the warps that chose for them; of many, where a warp
// chooses for several, offsets.cu sorts the choices.
namespace cadre::cuda::portable {
namespace {

constexpr int kMostExperts = 2000;  // whose arrays fit into 48 KiB, and whose ranks into registers
constexpr int kMostWarps = 4;
constexpr int64_t kMostBlocks = 1 << 20;
constexpr float kTiny = 1e-20f;  // keeps a sum of probabilities above 0

/// Blocks an SM at least, so that kernels for few experts keep to registers for 40 tokens.
constexpr int least_blocks(int slots) { return slots <= 4 ? 10 : slots <= 8 ? 9 : 1; }

/// The parameters of the kernels.
struct Job {
  RoutingProblem p;
  Matrix logits, dlogits;
  const float *bias, *dprob, *dscores;
  int32_t* experts;
  float *prob, *scores;

  /// Whether anything is made of all scores: a softmax over the chosen asks for their logits alone.
  __device__ bool wants_scores() const {
    return p.score != RoutingScore::kTopKSoftmax || scores != nullptr || dscores != nullptr;
  }
};

/// Calls work(j) in the lane of choice j, for all of them. Mostly once: nothing is unrolled.
template <class Work>
__device__ void for_chosen(const RoutingProblem& p, Work&& work) {
#pragma unroll 1
  for (int j = lane(); j < p.top_k; j += kLanes) work(j);
}

constexpr float kNothing = -0.0f;  // changes no sum

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
__device__ float greatest_of_chosen(const Token& token) {
  uint32_t greatest = ordered(lowest());
  for_chosen(token.p, [&](int j) {
    if (token.is_expert(j)) greatest = max(greatest, ordered(token.logit[token.chosen[j]]));
  });
  return from_ordered(__reduce_max_sync(kAll, greatest));
}

/// Writes q[j] of cadre/routing.h, 0 for what is no expert, each in the lane of its choice; returns
/// their sum if they are normalised.
__device__ float find_plain_prob(const Token& token) {
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

/// A grid-stride loop: calls work(token number) with every token of this warp.
template <class Work>
__device__ void for_tokens(int64_t tokens, Work&& work) {
  const int64_t warps = blockDim.x / kLanes;
  for (int64_t t = blockIdx.x * warps + threadIdx.x / kLanes; t < tokens; t += gridDim.x * warps)
    work(t);
}

template <int kSlots>
__device__ void forward(const Job& job) {
  begin_dependent();
  const RoutingProblem& p = job.p;
  const Token token(p, reinterpret_cast<uint32_t*>(dynamic_shared()));
  for_tokens(p.tokens, [&](int64_t t) {
    const Scores<kSlots> found = find_scores<kSlots>(token, job.logits, t, job.wants_scores());
    choose(token, find_ranks(found, job.bias, p), job.experts + t * p.top_k);
    const float norm = find_plain_prob(token);
    for_chosen(p, [&](int j) { job.prob[t * p.top_k + j] = p.scale * (token.q[j] / norm); });
    for (int e = lane(); e < p.experts && job.scores != nullptr; e += kLanes)
      job.scores[t * p.experts + e] = token.score[e];
    __syncwarp();
  });
}

template <int kSlots>
__global__ void __launch_bounds__(kMostWarps* kLanes, least_blocks(kSlots))
    forward_kernel(const Job job) {
  forward<kSlots>(job);
}

/// A token a warp. The counters of the map lie where the tokens' arrays were.
template <int kSlots>
__global__ void __launch_bounds__(kMostWarps* kLanes, 1)
    forward_and_map_kernel(const Job job, const OffsetsJob map) {
  forward<kSlots>(job);
  __syncthreads();
  make_row_map<int32_t>(map, dynamic_shared());
}

/// Adds the gradients of the chosen to the token's dscore, or of topk_softmax to dlogit.
__device__ void add_chosen(const Token& token, const float* dprob, float* dlogit) {
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
__device__ void read_chosen_logits(const Job& job, const Token& token, int64_t t) {
  for_chosen(job.p, [&](int j) {
    if (!token.is_expert(j)) return;
    const int e = token.chosen[j];
    const float x = element_of(element_bits(job.logits, {t, e}), job.logits.dtype);
    token.logit[e] = isnan(x) ? lowest() : x;
  });
  __syncwarp();
}

template <int kSlots>
__device__ void backward(const Job& job, const Token& token, int64_t t) {
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

template <int kSlots>
__global__ void __launch_bounds__(kMostWarps* kLanes, least_blocks(kSlots))
    backward_kernel(const Job job) {
  begin_dependent();
  auto* shared = reinterpret_cast<uint32_t*>(dynamic_shared());
  const Token token(job.p, shared);
  for_tokens(job.p.tokens, [&](int64_t t) { backward<kSlots>(job, token, t); });
}

/// How a grid is cut into warps, each with its arrays in shared memory.
struct Blocks {
  int warps;  ///< of a block
  int64_t count;

  explicit Blocks(const RoutingProblem& p)
      : warps(bytes_of(p, kMostWarps) <= kFreeSharedBytes ? kMostWarps : 1),
        count(std::max<int64_t>(1, (p.tokens + warps - 1) / warps)) {}

  static int bytes_of(const RoutingProblem& p, int warps) {
    return warps * kTokenArrays * p.experts * int(sizeof(float));
  }
  /// Whether all of them are resident at once.
  bool are_few(const Device& device) const { return count <= most_row_map_blocks(device); }
  Grid grid(const RoutingProblem& p, Stream stream) const {
    return {.blocks = unsigned(std::min(count, kMostBlocks)),
            .threads = unsigned(warps * kLanes),
            .shared_bytes = bytes_of(p, warps),
            .stream = stream_of(stream),
            .dependent = true};
  }
};

/// Calls launch.operator()<kSlots>() with as many experts a lane as there are, or a few more.
template <class Launch>
void with_slots(int experts, Launch&& launch) {
  if (experts <= 4 * kLanes)
    launch.template operator()<4>();
  else if (experts <= 8 * kLanes)
    launch.template operator()<8>();
  else if (experts <= 16 * kLanes)
    launch.template operator()<16>();
  else
    launch.template operator()<64>();
}

void launch_with_map(const Job& job, const RoutingArgs& args, Workspace workspace, Stream stream) {
  const Blocks blocks(job.p);
  const OffsetsJob map{.source = args.experts,
                       .offsets = args.offsets,
                       .row_of = args.map.row_of,
                       .slot_of = args.map.slot_of,
                       .status = nullptr,
                       .counts = static_cast<int32_t*>(workspace.data),
                       .rows = job.p.tokens * job.p.top_k,
                       .slots = job.p.tokens * job.p.top_k,
                       .run = job.p.top_k,
                       .experts = job.p.experts};
  Grid grid = blocks.grid(job.p, stream);
  grid.shared_bytes = std::max(grid.shared_bytes, row_map_bytes(blocks.warps, job.p.experts));
  grid.cooperative = blocks.count > 1;
  with_slots(job.p.experts,
             [&]<int kSlots>() { launch(forward_and_map_kernel<kSlots>, grid, job, map); });
}

}  // namespace

std::string refuses_routing(const RoutingProblem& p, const Device& device) {
  if (p.experts > kMostExperts)
    return text("takes at most ", kMostExperts, " experts; those of a token are in shared memory");
  return needs_sm80(p, device);
}

int64_t routing_workspace_bytes(const RoutingProblem& p, const Device& device) {
  if (!p.map) return 0;
  const Blocks blocks(p);
  return blocks.are_few(device) ? row_map_workspace_bytes(blocks.count, p.experts)
                                : offsets_workspace_bytes(backend::row_map_problem(p), device);
}

void routing(const RoutingPlan& plan, const RoutingArgs& args, Workspace workspace, Stream stream) {
  const RoutingProblem& p = plan.problem;
  if (p.tokens == 0 && !p.map) return;
  const Job job{.p = p,
                .logits = Matrix(args.logits, p.logits),
                .dlogits = Matrix(args.dlogits, p.logits),
                .bias = args.expert_bias,
                .dprob = args.dprob,
                .dscores = args.dscores,
                .experts = args.experts,
                .prob = args.prob,
                .scores = args.scores};
  const Blocks blocks(p);
  if (p.map && blocks.are_few(plan.device)) return launch_with_map(job, args, workspace, stream);
  with_slots(p.experts, [&]<int kSlots>() {
    launch(p.backward ? backward_kernel<kSlots> : forward_kernel<kSlots>, blocks.grid(p, stream),
           job);
  });
  if (p.map) offsets(backend::row_map_plan(plan), backend::row_map_args(args), workspace, stream);
}

}  // namespace cadre::cuda::portable
