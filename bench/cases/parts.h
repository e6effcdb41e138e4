#pragma once
#include <vector>

#include "bench/case.h"
#include "cadre/device.h"

// Pieces that the cases of several operations are made of.
namespace cadre::bench {

/// A case without arguments yet.
template <class AnyCase, class Problem>
AnyCase new_case(const Problem& problem, const Draw& draw) {
  return {.problem = problem,
          .args = {},
          .outputs = {},
          .offsets = {},
          .buffers = std::make_unique<Buffers>(draw.row_gap, draw.shift_bytes)};
}

/// Numbers that seed the tensors of one case: each tensor draws its own.
class Seeds {
 public:
  explicit Seeds(const Draw& draw) : next_(draw.seed * 1000) {}
  uint64_t next() { return next_++; }

 private:
  uint64_t next_;
};

/// A tensor whose first `live` entries hold normal numbers; the rest is NaN.
TensorView random_tensor(Buffers&, DType, std::initializer_list<int64_t> shape, int64_t live,
                         uint64_t seed);

/// `count` floats, of which the first `live` are normal numbers around `mean`, the rest NaN.
float* random_floats(Buffers&, int64_t count, int64_t live, uint64_t seed, float mean = 0);

/// A contiguous f32 copy of |view|, strides and all. NaN stays.
TensorView absolute(Buffers&, const TensorView&);
const float* absolute(Buffers&, const float*, int64_t count);

/// The elements of an f32 view, row-major.
std::vector<float> values_of(const TensorView&);

/// Plans for the CPU, runs with a workspace of its own.
template <class Problem, class Args>
void run_on_cpu(const Problem& problem, const Args& args, std::string_view only = {}) {
  const auto chosen = plan(problem, this_cpu(), only);
  Buffers buffers;
  run(chosen, args, buffers.workspace(chosen.workspace_bytes), Stream{});
}

/// E pointers that lie `stride_bytes` apart; null where `given` is false.
void** pointers(Buffers&, bool given, void* first, int64_t stride_bytes, int experts);

/// The words of the caller that say who adds to old content: none, one, or one an expert.
const int32_t* accumulate_words(Buffers&, Accumulate, int experts, uint64_t seed);
bool adds(Accumulate, const int32_t* words, int expert);

/// Fills the old content of a [E, ...] output where an expert adds to it.
void fill_old(const TensorView&, Accumulate, const int32_t* words, uint64_t seed);

/// |old content| as f32, zero where an expert does not add to it.
TensorView absolute_old(Buffers&, const TensorView&, Accumulate, const int32_t* words);

/// A row map and offsets from random choices of experts.
struct RandomMap {
  RowMap map;
  Rows rows;
};
RandomMap random_map(Buffers&, const Draw&, const OffsetsProblem&);

/// What the reference multiplies, or passes over, in about a second.
inline constexpr double kProductsOfASecond = 5e8, kElementsOfASecond = 1 << 23;

/// [R]: which slots of T tokens are the rows of a product or a layer that gathers them. The tokens
/// of every expert come in their order, once each while there are enough: those with the most
/// slots left, and chance among these, so that every slot has one row where R is T top_k.
struct Slots {
  int64_t rows, tokens;
  int top_k;
};
int32_t* random_slots(Buffers&, const Rows&, const Slots&, uint64_t seed);

/// [R]: where each row goes, or nowhere, as where ranks push results: of every expert the rows of a
/// rank come together, and lie together there.
struct Places {
  int64_t rows;
  int ranks;
  int64_t each;  ///< of a rank
};
int32_t* random_places(Buffers&, const Rows&, const Places&, uint64_t seed);

/// The rows of experts, copied from tokens as slots say.
void copy_rows(const TensorView& to, const TensorView& tokens, const int32_t* token_slots,
               const Slots&, int64_t live);

/// How much of `size` a budget allows, at a cost for each; at most 1.
double affordable(int64_t size, double cost_of_each, double budget);

/// size * share, but no less than min(size, least).
void scale(int64_t& size, double share, int64_t least = 1);

/// Bytes of a whole tensor, and of the part that live entries take.
double bytes_of(const TensorView&);
double live_bytes(const TensorView&, int64_t live);

}  // namespace cadre::bench
