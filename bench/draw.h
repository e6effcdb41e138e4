#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "cadre/offsets.h"
#include "cadre/tensor.h"

namespace cadre::bench {

/// How the data of a case are drawn.
struct Draw {
  uint64_t seed = 1;
  std::string offsets = "uniform";  ///< see parse_distribution
  double live = 1;                  ///< share of the R rows that some expert owns; the rest is tail
  int64_t row_gap = 0;              ///< elements between the rows of plain tensors
  int64_t shift_bytes = 0;          ///< of tensors behind aligned addresses; at least an element
  bool counts_are_weights = false;  ///< draw rows in the proportions of a file, for another R
  std::vector<int64_t> counts{};    ///< [E] rows of each expert; empty: as `offsets` says
  bool raw_workspace = false;  ///< of a GPU: as allocated, not poisoned, for tools that watch it
};

/// How rows fall to experts: "uniform" (every row picks an expert), "zipf:1.2" (the i-th favourite
/// expert is chosen with weight i^-1.2), "gamma:1" (weights are drawn from a gamma distribution of
/// that shape), "onehot" (all rows to one expert), or a file of E counts.
struct Distribution {
  std::vector<double> weights;  ///< [E], of the draws
  std::vector<int64_t> counts;  ///< [E], from a file: no draws
};

/// Errors    InvalidArgument for unknown words, unreadable files, or files that do not hold E
///           counts.
Distribution parse_distribution(const std::string& words, int experts, uint64_t seed);

/// The rows of each expert, of `rows` rows in all.
/// Errors    InvalidArgument if given counts sum to more than `rows`.
std::vector<int64_t> draw_counts(const Draw&, int64_t rows, int experts);

/// In what proportions tokens choose their experts, [E].
/// Errors    as of parse_distribution, and InvalidArgument for counts that are all zero.
std::vector<double> draw_weights(const Draw&, int experts);

/// Routed rows of a case: offsets in its buffers, and what the host may know of them.
struct Rows {
  Offsets offsets;
  std::vector<int32_t> host;  ///< [E + 1]
  int64_t live() const { return host.back(); }
};
Rows draw_rows(Buffers&, const Draw&, int64_t rows, int experts);

/// The experts of each token, [tokens, top_k] row-major: distinct while there are enough experts;
/// -1 (dropped) for one in sixteen.
/// Errors    as of draw_weights.
std::vector<int64_t> draw_choices(const Draw&, int64_t tokens, int top_k, int experts);

/// A number that depends on its arguments only, near a standard normal distribution.
float normal(uint64_t seed, uint64_t index);

/// Fills [T, E] with a router's logits: a token's greatest top_k are draws without replacement, as
/// `offsets` says.
/// Errors    as of draw_weights.
void fill_logits(const TensorView&, const Draw&);

/// Fills the first `live` entries of dimension 0 with normal numbers times `scale`.
void fill_normal(const TensorView&, int64_t live, uint64_t seed, float scale = 1);

}  // namespace cadre::bench
