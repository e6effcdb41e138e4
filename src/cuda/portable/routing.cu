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

template <int kSlots>
__device__ void forward(const Job& job) {
  begin_dependent();
  const RoutingProblem& p = job.p;
  const Token token(p, reinterpret_cast<uint32_t*>(dynamic_shared()));
  for_tokens(p.tokens, [&](int64_t t) {
    const Scores<kSlots> found = find_scores<kSlots>(token, job.logits, t, job.wants_scores());
    choose(token, find_ranks(found, job.bias, p), job.experts + t * p.top_k);
    const float norm = find_plain_prob(token);
    for (int j = lane(); j < p.top_k; j += kLanes)
      job.prob[t * p.top_k + j] = p.scale * (token.q[j] / norm);
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

/// Adds the gradients of the chosen to the token's dscore, or of topk_softmax to dlogit. Chosen
/// experts may be equal, so one lane adds.
__device__ void add_chosen(const Token& token, const float* dprob, float* dlogit) {
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
      token.dscore[token.chosen[j]] += dq(j);
  }
  __syncwarp();
}

template <int kSlots>
__device__ void backward(const Job& job, const Token& token, int64_t t) {
  const RoutingProblem& p = job.p;
  float *dscore = token.dscore, *dlogit = token.spare;
  const bool wants_scores = job.wants_scores();
  find_scores<kSlots>(token, job.logits, t, wants_scores);
  for (int e = lane(); e < p.experts; e += kLanes) {
    if (wants_scores) dscore[e] = job.dscores != nullptr ? job.dscores[t * p.experts + e] : 0.0f;
    dlogit[e] = 0;
  }
  for (int j = lane(); j < p.top_k; j += kLanes) token.chosen[j] = job.experts[t * p.top_k + j];
  __syncwarp();
  add_chosen(token, job.dprob + t * p.top_k, dlogit);
  if (!wants_scores) {
    for (int e = lane(); e < p.experts; e += kLanes)
      store_element(dlogit[e] + 0.0f, job.dlogits, {t, e});  // no score passes anything on
    return __syncwarp();
  }
  OfExperts<kSlots> product;
  for_experts<kSlots>(p.experts, [&](int i, int e) { product.of[i] = dscore[e] * token.score[e]; });
  const float mean = sum_of_experts(product);
  for (int e = lane(); e < p.experts; e += kLanes) {
    const activations::Sigmoid<float> s(token.logit[e]);
    const float through_score = p.score == RoutingScore::kSigmoid
                                    ? dscore[e] * s.value * s.complement
                                    : token.score[e] * (dscore[e] - mean);
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
