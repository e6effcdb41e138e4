#include "cuda/portable/routing.h"

#include <algorithm>

#include "backend/row_map.h"
#include "cuda/portable/offsets.h"
#include "cuda/portable/routing_in_registers.cuh"
#include "cuda/portable/routing_in_shared.cuh"
#include "cuda/portable/row_map.cuh"

// scores = softmax or sigmoid of a token's logits; its top_k experts by rank, and their
// probabilities; backward the gradient of the logits. Formulas in cadre/routing.h.
//
// logits, dlogits [T, E]; scores, dscores [T, E]; experts, prob, dprob [T, top_k]. A way of routing
// says how many tokens a warp takes at once, and what it does with them. With map, few tokens are
// sorted by the warps that chose for them; of many, where a warp chooses again and again,
// offsets.cu sorts the choices.
namespace cadre::cuda::portable {
namespace {

constexpr int kMostExperts = 2000;  // whose arrays fit into 48 KiB, and whose ranks into registers
constexpr int kMostWarps = 4;
constexpr int64_t kMostBlocks = 1 << 20;

/// A grid-stride loop: calls work(token number) with every token of this thread. All threads of a
/// warp come as often; those beyond the tokens do what the last token's do, to the same bits.
template <class Way, class Work>
__device__ void for_tokens(int64_t tokens, Work&& work) {
  constexpr int kWidth = kLanes / Way::kTokens;
  const int64_t warps = blockDim.x / kLanes;
  const int64_t first = (blockIdx.x * warps + threadIdx.x / kLanes) * Way::kTokens;
  for (int64_t t = first; t < tokens; t += gridDim.x * warps * Way::kTokens)
    work(min(t + threadIdx.x % kLanes / kWidth, tokens - 1));
}

template <class Way>
__device__ void forward_all(const RoutingJob& job) {
  begin_dependent();
  for_tokens<Way>(job.p.tokens, [&](int64_t t) { Way::forward(job, dynamic_shared(), t); });
}

template <class Way>
__global__ void __launch_bounds__(kMostWarps* kLanes, Way::kBlocks)
    forward_kernel(const __grid_constant__ RoutingJob job) {
  forward_all<Way>(job);
}

/// Tokens once a warp. The counters of the map lie where the tokens' arrays were.
template <class Way>
__global__ void __launch_bounds__(Way::kMapWarps* kLanes, 1)
    forward_and_map_kernel(const __grid_constant__ RoutingJob job, const OffsetsJob map) {
  forward_all<Way>(job);
  __syncthreads();
  make_row_map<int32_t>(map, dynamic_shared());
}

template <class Way>
__global__ void __launch_bounds__(kMostWarps* kLanes, Way::kBlocks)
    backward_kernel(const __grid_constant__ RoutingJob job) {
  begin_dependent();
  for_tokens<Way>(job.p.tokens, [&](int64_t t) { Way::backward(job, dynamic_shared(), t); });
}

/// Calls visit.operator()<Way>() with the way that takes the problem.
template <class Visit>
auto with_way(const RoutingProblem& p, Visit&& visit) {
  const auto fits = [&](int experts, int top_k) {
    return p.experts <= experts && p.top_k <= top_k;
  };
  const bool in_groups = p.groups > 1 && !p.backward;
  if (in_groups || !fits(512, 32))
    return p.experts <= 256 ? visit.template operator()<RoutingInShared<8>>()
                            : visit.template operator()<RoutingInShared<64>>();
  const auto with_part = [&]<int kWidth, int kSlots>() {
    return p.experts == kWidth * kSlots
               ? visit.template operator()<RoutingInRegisters<Part<kWidth, kSlots, true>>>()
               : visit.template operator()<RoutingInRegisters<Part<kWidth, kSlots, false>>>();
  };
  if (fits(32, 8)) return with_part.template operator()<8, 4>();
  if (fits(64, 8)) return with_part.template operator()<8, 8>();
  if (fits(128, 8)) return with_part.template operator()<8, 16>();
  if (fits(256, 16)) return with_part.template operator()<16, 16>();
  return with_part.template operator()<32, 16>();
}

/// How a grid is cut into warps, each with its shared memory. With map one block takes all tokens
/// if it can: it has no other to wait for.
struct Blocks {
  int bytes, tokens;  ///< of a warp
  int warps;          ///< of a block
  int64_t count;

  explicit Blocks(const RoutingProblem& p) {
    int most = 0;
    with_way(p, [&]<class Way>() {
      bytes = Way::shared_bytes_of_warp(p);
      tokens = Way::kTokens;
      most = Way::kMapWarps;
    });
    const auto all = std::max<int64_t>(1, (p.tokens + tokens - 1) / tokens);
    const auto fit = [&](int64_t some) {
      return some * bytes <= kFreeSharedBytes &&
             (!p.map || row_map_bytes(int(some), p.experts) <= kFreeSharedBytes);
    };
    const bool in_one = p.map && all <= most && fit(all);
    warps = in_one ? int(all) : fit(kMostWarps) ? kMostWarps : 1;
    count = (all + warps - 1) / warps;
  }
  /// Whether all of them are resident at once.
  bool are_few(const Device& device) const { return count <= most_row_map_blocks(device); }
  Grid grid(Stream stream) const {
    return {.blocks = unsigned(std::min(count, kMostBlocks)),
            .threads = unsigned(warps * kLanes),
            .shared_bytes = warps * bytes,
            .stream = stream_of(stream),
            .dependent = true};
  }
};

void launch_with_map(const RoutingJob& job, const RoutingArgs& args, Workspace workspace,
                     Stream stream) {
  const Blocks blocks(job.p);
  const OffsetsJob map{.source = args.experts,
                       .offsets = args.offsets,
                       .row_of = args.map.row_of,
                       .slot_of = args.map.slot_of,
                       .status = nullptr,
                       .prob = args.prob,
                       .row_prob = args.row_prob,
                       .counts = static_cast<int32_t*>(workspace.data),
                       .rows = job.p.tokens * job.p.top_k,
                       .slots = job.p.tokens * job.p.top_k,
                       .run = blocks.tokens * job.p.top_k,
                       .experts = job.p.experts};
  Grid grid = blocks.grid(stream);
  grid.shared_bytes = std::max(grid.shared_bytes, row_map_bytes(blocks.warps, job.p.experts));
  grid.cooperative = blocks.count > 1;
  with_way(job.p, [&]<class Way>() { launch(forward_and_map_kernel<Way>, grid, job, map); });
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
  const RoutingJob job{.p = p,
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
  with_way(p, [&]<class Way>() {
    launch(p.backward ? backward_kernel<Way> : forward_kernel<Way>, blocks.grid(stream), job);
  });
  if (p.map) offsets(backend::row_map_plan(plan), backend::row_map_args(args), workspace, stream);
}

}  // namespace cadre::cuda::portable
