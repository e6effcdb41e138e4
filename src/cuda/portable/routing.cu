#include "cuda/portable/routing.h"

#include <algorithm>

#include "backend/row_map.h"
#include "cuda/portable/offsets.h"
#include "cuda/portable/routing_few.cuh"
#include "cuda/portable/routing_in_shared.cuh"
#include "cuda/portable/row_map.cuh"

// scores = softmax or sigmoid of a token's logits; its top_k experts by rank, and their
// probabilities; backward the gradient of the logits. Formulas in cadre/routing.h.
//
// logits, dlogits [T, E]; scores, dscores [T, E]; experts, prob, dprob [T, top_k]. A way of routing
// says how many tokens a warp takes at once, and what it does with them. With map, few tokens are
// sorted by the warps that chose for them, in registers by bits, else by counters; of many, where a
// warp chooses again and again, offsets.cu sorts the choices.
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
__global__ void __launch_bounds__(kMostWarps* kLanes, 1)
    forward_and_map_kernel(const __grid_constant__ RoutingJob job, const OffsetsJob map) {
  forward_all<Way>(job);
  __syncthreads();
  make_row_map<int32_t>(map, dynamic_shared());
}

/// Tokens once a warp, in registers.
template <class Way>
__global__ void __launch_bounds__(Way::kMostWarps* kLanes, 1)
    forward_few_kernel(const __grid_constant__ RoutingJob job, const OffsetsJob map) {
  ChosenBy chosen_by(job.p, dynamic_shared());
  launch_dependents();
  chosen_by.clear();
  __syncthreads();
  wait_for_predecessors();
  route_few<Way>(job, map, chosen_by);
}

template <class Way>
__global__ void __launch_bounds__(kMostWarps* kLanes, Way::kBlocks)
    backward_kernel(const __grid_constant__ RoutingJob job) {
  begin_dependent();
  for_tokens<Way>(job.p.tokens, [&](int64_t t) { Way::backward(job, dynamic_shared(), t); });
}

bool is_in_registers(const RoutingProblem& p) {
  const bool in_groups = p.groups > 1 && !p.backward;
  return !in_groups && p.experts <= 512 && p.top_k <= kLanes;
}

/// Calls visit.operator()<Way>() with the way that takes the problem where it is not in registers.
template <class Visit>
auto with_way_in_shared(const RoutingProblem& p, Visit&& visit) {
  return p.experts <= 256 ? visit.template operator()<RoutingInShared<8>>()
                          : visit.template operator()<RoutingInShared<64>>();
}

/// The same with the way that takes it.
template <class Visit>
auto with_way(const RoutingProblem& p, Visit&& visit) {
  if (!is_in_registers(p)) return with_way_in_shared(p, visit);
  const auto fits = [&](int experts, int top_k) {
    return p.experts <= experts && p.top_k <= top_k;
  };
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

/// How a grid is cut into warps, each with its shared memory.
struct Blocks {
  int bytes, tokens;  ///< of a warp
  int warps;          ///< of a block
  int64_t count;

  explicit Blocks(const RoutingProblem& p) {
    with_way(p, [&]<class Way>() {
      bytes = Way::shared_bytes_of_warp(p);
      tokens = Way::kTokens;
    });
    const auto all = std::max<int64_t>(1, (p.tokens + tokens - 1) / tokens);
    const auto fit = [&](int64_t some) {
      return some * bytes <= kFreeSharedBytes &&
             (!p.map || row_map_bytes(int(some), p.experts) <= kFreeSharedBytes);
    };
    const int64_t most = std::min<int64_t>(all, kMostWarps);
    warps = p.map && fit(most) ? int(most) : fit(kMostWarps) ? kMostWarps : 1;
    count = (all + warps - 1) / warps;
  }
  Grid grid(Stream stream) const {
    return {.blocks = unsigned(std::min(count, kMostBlocks)),
            .threads = unsigned(warps * kLanes),
            .shared_bytes = warps * bytes,
            .stream = stream_of(stream),
            .dependent = true};
  }
};

/// Whether one launch takes them with their map, all of whose blocks are resident at once.
bool takes_few(const RoutingProblem& p, const Device& device) {
  const int most = most_row_map_blocks(device);
  if (!is_in_registers(p)) return Blocks(p).count <= most;
  return FewBlocks(p).count <= most && ChosenBy::bytes(p) <= kFreeSharedBytes;
}

OffsetsJob map_job(const RoutingJob& job, const RoutingArgs& args) {
  const int64_t slots = job.p.tokens * job.p.top_k;
  return {.source = args.experts,
          .offsets = args.offsets,
          .row_of = args.map.row_of,
          .slot_of = args.map.slot_of,
          .status = nullptr,
          .prob = args.prob,
          .row_prob = args.row_prob,
          .counts = nullptr,
          .rows = slots,
          .slots = slots,
          .run = 0,
          .experts = job.p.experts};
}

void launch_few(const RoutingJob& job, const OffsetsJob& map, Stream stream) {
  const FewBlocks blocks(job.p);
  const Grid grid{.blocks = unsigned(blocks.count),
                  .threads = unsigned(blocks.warps * kLanes),
                  .shared_bytes = int(ChosenBy::bytes(job.p)),
                  .stream = stream_of(stream),
                  .cooperative = blocks.count > 1,
                  .dependent = true};
  with_way_of_few(job.p, [&]<class Way>() { launch(forward_few_kernel<Way>, grid, job, map); });
}

void launch_in_shared(const RoutingJob& job, OffsetsJob map, Workspace workspace, Stream stream) {
  const Blocks blocks(job.p);
  map.counts = static_cast<int32_t*>(workspace.data);
  map.run = blocks.tokens * job.p.top_k;
  Grid grid = blocks.grid(stream);
  grid.shared_bytes = std::max(grid.shared_bytes, row_map_bytes(blocks.warps, job.p.experts));
  grid.cooperative = blocks.count > 1;
  with_way_in_shared(job.p,
                     [&]<class Way>() { launch(forward_and_map_kernel<Way>, grid, job, map); });
}

}  // namespace

std::string refuses_routing(const RoutingProblem& p, const Device& device) {
  if (p.experts > kMostExperts)
    return text("takes at most ", kMostExperts, " experts; those of a token are in shared memory");
  return needs_sm80(p, device);
}

int64_t routing_workspace_bytes(const RoutingProblem& p, const Device& device) {
  if (!p.map) return 0;
  if (!takes_few(p, device)) return offsets_workspace_bytes(backend::row_map_problem(p), device);
  return is_in_registers(p) ? 0 : row_map_workspace_bytes(Blocks(p).count, p.experts);
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
  if (p.map && takes_few(p, plan.device)) {
    const OffsetsJob map = map_job(job, args);
    return is_in_registers(p) ? launch_few(job, map, stream)
                              : launch_in_shared(job, map, workspace, stream);
  }
  const Blocks blocks(p);
  with_way(p, [&]<class Way>() {
    launch(p.backward ? backward_kernel<Way> : forward_kernel<Way>, blocks.grid(stream), job);
  });
  if (p.map) offsets(backend::row_map_plan(plan), backend::row_map_args(args), workspace, stream);
}

}  // namespace cadre::cuda::portable
