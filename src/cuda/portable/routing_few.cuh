#pragma once
#include "cuda/device/grid.h"
#include "cuda/portable/routing_in_registers.cuh"
#include "cuda/portable/row_map.cuh"

// Routing of few tokens and its map. A warp takes one token, so that its lanes have few experts
// each and choices stay in registers, and of several blocks each has few warps: many on one
// SM wait for each other's instructions. Which tokens chose an expert is a bit of each; a token
// chooses an expert once, and rows of an expert are in the order of tokens, so that ranks are
// counts of bits. Each block finds them for all tokens, once all blocks have chosen.
namespace cadre::cuda::portable {

/// A lane has at most so many of the token's experts.
template <int kSlots>
struct RoutingOfFew : RoutingInRegisters<Part<kLanes, kSlots, false>> {
  static constexpr int kMostWarps = kSlots <= 8 ? 32 : 16;  ///< of a block
};

/// Calls visit.operator()<Way>() with the way that takes few tokens.
template <class Visit>
void with_way_of_few(const RoutingProblem& p, Visit&& visit) {
  if (p.experts > 256) return visit.template operator()<RoutingOfFew<16>>();
  if (p.experts > 128) return visit.template operator()<RoutingOfFew<8>>();
  visit.template operator()<RoutingOfFew<4>>();
}

/// Blocks and their warps, each of which takes one token. Blocks that meet in a barrier start
/// later, so that one takes as many tokens as it can.
struct FewBlocks {
  static constexpr int kWarps = 16;  ///< of each of several

  int warps = kWarps;
  int64_t count = 0;

  explicit FewBlocks(const RoutingProblem& p) {
    with_way_of_few(p, [&]<class Way>() {
      const auto parts_of = [](int64_t all, int64_t part) { return (all + part - 1) / part; };
      if (p.tokens <= Way::kMostWarps)  // and a thread for each expert, if the block may have it
        warps = int(
            std::min<int64_t>(std::max(p.tokens, parts_of(p.experts, kLanes)), Way::kMostWarps));
      count = std::max<int64_t>(1, parts_of(p.tokens, warps));
    });
  }
};

/// Who chose what, in shared memory.
struct ChosenBy {
  static constexpr int kWord = 32;

  int64_t (&partial)[kLanes];
  int32_t* begins;   ///< [E] first rows
  uint32_t* tokens;  ///< [words, E] a bit each
  int experts, words;

  __device__ ChosenBy(const RoutingProblem& p, uint8_t* memory)
      : partial(*reinterpret_cast<int64_t (*)[kLanes]>(memory)),
        begins(reinterpret_cast<int32_t*>(memory + sizeof(partial))),
        tokens(reinterpret_cast<uint32_t*>(begins + p.experts)),
        experts(p.experts),
        words(words_of(p.tokens)) {}

  static CADRE_HD int words_of(int64_t tokens) { return int((tokens + kWord - 1) / kWord); }
  static int64_t bytes(const RoutingProblem& p) {
    return int64_t(sizeof(partial)) + (1 + words_of(p.tokens)) * int64_t(p.experts) * 4;
  }
  __device__ void clear() {
    for (int i = int(threadIdx.x); i < words * experts; i += int(blockDim.x)) tokens[i] = 0;
  }
  __device__ void add(int token, int expert) {
    atomicOr(&tokens[token / kWord * experts + expert], 1u << token % kWord);
  }
  /// Tokens in the first words that chose the expert.
  __device__ int count(int expert, int first_words) const {
    int sum = 0;
#pragma unroll 4
    for (int i = 0; i < first_words; ++i) sum += __popc(tokens[i * experts + expert]);
    return sum;
  }
  /// Tokens before this one.
  __device__ int count_before(int token, int expert) const {
    const uint32_t last = tokens[token / kWord * experts + expert];
    return count(expert, token / kWord) + __popc(last & ((1u << token % kWord) - 1));
  }
};

/// The experts of all tokens, which other blocks wrote.
__device__ inline void read_choices(const RoutingJob& job, ChosenBy& chosen_by) {
  const int choices = int(job.p.tokens) * job.p.top_k;
  for (int slot = int(threadIdx.x); slot < choices; slot += int(blockDim.x))
    chosen_by.add(slot / job.p.top_k, job.experts[slot]);
}

/// Where experts begin and end.
__device__ inline void find_begins(const OffsetsAndMap& sorted, ChosenBy& chosen_by) {
  int64_t carry = 0;
  for (int first = 0; first < chosen_by.experts; first += int(blockDim.x)) {
    const int e = first + int(threadIdx.x);
    const bool is_expert = e < chosen_by.experts;
    const int count = is_expert ? chosen_by.count(e, chosen_by.words) : 0;
    const Scanned scanned = block_scan(count, chosen_by.partial, Sum{});
    if (is_expert) {
      chosen_by.begins[e] = int(carry + scanned.upto) - count;
      sorted.end_expert(e, carry + scanned.upto);
    }
    carry += scanned.all;
  }
  if (sorted.is_first && threadIdx.x == 0) sorted.job.offsets[0] = 0;
  __syncthreads();
}

template <class Way>
__device__ void route_few(const RoutingJob& job, const OffsetsJob& map, ChosenBy& chosen_by) {
  const int thread = int(blockIdx.x * blockDim.x + threadIdx.x), token = thread / kLanes;
  Chosen chosen{};
  if (token < job.p.tokens) chosen = Way::forward(job, nullptr, token);
  if (gridDim.x > 1) {
    grid_barrier();
    read_choices(job, chosen_by);
  } else if (chosen.is_choice) {
    chosen_by.add(token, chosen.expert);
  }
  __syncthreads();
  const OffsetsAndMap sorted{map, blockIdx.x == 0};
  find_begins(sorted, chosen_by);
  if (!chosen.is_choice) return;
  const int row = chosen_by.begins[chosen.expert] + chosen_by.count_before(token, chosen.expert);
  sorted.place(int64_t(token) * job.p.top_k + thread % kLanes, chosen.expert, row, chosen.prob);
}

}  // namespace cadre::cuda::portable
