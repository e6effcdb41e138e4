#pragma once
#include "cuda/parallel/exchange.cuh"

// The routing of a dispatch of few tokens. Each word travels with the epoch of its exchange, in one
// store: it is there when its epoch is, so nobody waits for a fence, for what says that it was
// passed, and for a flag behind both. What the flags say of tokens they still say.
//
// That takes memory in which nothing else is ever written: there a word is of this exchange or of
// one before. It is of none behind, since it is written again only when all ranks have read it.
namespace cadre::cuda {

/// Of this rank: `own` choices, behind them up to `each` of nobody.
struct RoutingJob {
  const int32_t* experts;
  const float* prob;
  bool has_prob;
  int own, each;
  bool by_bits;    ///< how it is sorted: by ChoiceBits, else by counters
  int sort_bytes;  ///< of shared memory for that, before all that is kept there
};

/// The routing of all ranks in shared memory.
struct SharedRouting {
  int32_t* experts;  ///< [P, T, top_k]
  float* prob;       ///< the same; null: none
};

/// The routing of this rank. What is written first is on its way from the beginning.
class OwnRouting {
 public:
  __device__ explicit OwnRouting(const RoutingJob& job) : job_(job) { load(int(threadIdx.x)); }

  /// To all ranks, by all threads of a block.
  __device__ void write(const WindowTable& window, uint32_t epoch) {
    const int step = kAtOnce * int(blockDim.x);
    for (int first = int(threadIdx.x); first < job_.each; first += step, load(first))
      for (int p = 0; p < window.ranks; ++p)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          write_one(window, p, first + i * int(blockDim.x), i, epoch);
  }

 private:
  static constexpr int kAtOnce = 4;  // choices of a thread

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int choice = first + i * int(blockDim.x);
      experts_[i] = choice < job_.own ? job_.experts[choice] : -1;
      prob_[i] = job_.has_prob && choice < job_.own ? job_.prob[choice] : 0;
    }
  }
  __device__ void write_one(const WindowTable& window, int p, int choice, int i, uint32_t epoch) {
    if (choice >= job_.each) return;
    parallel::Control& at = window.control(p);
    const int slot = window.rank * job_.each + choice;
    const auto store = [&](uint64_t& word, uint32_t value) {
      store_relaxed_system(&word, schedule::ReadyTag{epoch, value}.word());
    };
    store(at.experts[slot], uint32_t(experts_[i]));
    if (job_.has_prob) store(at.prob[slot], __float_as_uint(prob_[i]));
  }

  const RoutingJob& job_;
  int32_t experts_[kAtOnce];
  float prob_[kAtOnce];
};

/// Words of the routing of all ranks as they come, some of which a thread waits for at once.
struct RoutingWords {
  static constexpr int kAtOnce = 8;
  uint64_t experts[kAtOnce], prob[kAtOnce];

  /// Of the slots `first`, `first` + `step` ... below `count`; one that is not there, or -1.
  __device__ int load(const WindowTable& window, bool has_prob, uint32_t epoch, int3 slots) {
    const parallel::Control& home = window.home();
    const auto [first, step, count] = slots;
    const uint64_t none = schedule::ReadyTag{epoch, 0}.word();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = first + i * step;
      experts[i] = slot < count ? load_relaxed_system(&home.experts[slot]) : none;
      prob[i] = slot < count && has_prob ? load_relaxed_system(&home.prob[slot]) : none;
    }
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (uint32_t(experts[i] >> 32) != epoch || uint32_t(prob[i] >> 32) != epoch)
        missing = first + i * step;
    return missing;
  }
};

/// The routing of all ranks into shared memory, by the warps of a block that have no peers; whether
/// all came.
__device__ inline bool await_routing(const WindowTable& window, const RoutingJob& job,
                                     uint32_t epoch, const SharedRouting& to) {
  const int others = Way::warps_of_peers(window) * portable::kLanes;
  const int first = int(threadIdx.x) - others, step = int(blockDim.x) - others;
  const int count = window.ranks * job.each;
  Waiting waiting(window, parallel::ExchangeKind::kDispatch, epoch, 4);
  RoutingWords words;
  for (int at = first; at < count; at += RoutingWords::kAtOnce * step) {
    for (int missing;
         (missing = words.load(window, to.prob != nullptr, epoch, {at, step, count})) >= 0;)
      if (waiting.gives_up(missing / job.each, false)) return false;
#pragma unroll
    for (int i = 0; i < RoutingWords::kAtOnce; ++i) {
      const int slot = at + i * step;
      if (slot >= count) continue;
      to.experts[slot] = int32_t(uint32_t(words.experts[i]));
      if (to.prob != nullptr) to.prob[slot] = __uint_as_float(uint32_t(words.prob[i]));
    }
  }
  return true;
}

}  // namespace cadre::cuda
