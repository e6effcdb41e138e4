#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace cadre::bench {

/// Rows of each expert under a host's bound R; the sum never exceeds R.
struct Counts {
  int64_t rows = 0;  ///< R
  std::vector<int64_t> of;

  int experts() const { return int(of.size()); }
  std::vector<int32_t> offsets() const {
    std::vector<int32_t> sums(of.size() + 1, 0);
    for (size_t e = 0; e < of.size(); ++e) sums[e + 1] = sums[e] + int32_t(of[e]);
    return sums;
  }
  int64_t used() const { return std::accumulate(of.begin(), of.end(), int64_t(0)); }
};

/// The shapes that routing takes, one of each kind in turn.
enum class CountsKind { kEven, kEmptyEnds, kMostEmpty, kAllInOne, kOneEach, kSkewed, kNoRows };
inline constexpr int kCountsKinds = 7;

/// Random counts of a kind, over `experts`, of about `mean` rows an expert. Every second draw has a
/// tail behind its rows.
inline Counts random_counts(std::mt19937& random, CountsKind kind, int experts, int64_t mean) {
  const auto below = [&](int64_t end) { return end <= 0 ? 0 : int64_t(random() % uint64_t(end)); };
  Counts counts{.rows = 0, .of = std::vector<int64_t>(size_t(experts), 0)};
  if (kind == CountsKind::kNoRows) return counts;
  for (int e = 0; e < experts; ++e) {
    int64_t& count = counts.of[size_t(e)];
    const bool end = e == 0 || e == experts - 1 || e == experts / 2;
    switch (kind) {
      case CountsKind::kEven:
        count = mean;
        break;
      case CountsKind::kEmptyEnds:
        count = end ? 0 : 1 + below(2 * mean);
        break;
      case CountsKind::kMostEmpty:
        count = below(5) == 0 ? below(4 * mean) : 0;
        break;
      case CountsKind::kOneEach:
        count = 1;
        break;
      case CountsKind::kSkewed:
        count = below(below(4 * mean));
        break;
      default:
        break;
    }
  }
  if (kind == CountsKind::kAllInOne) counts.of[size_t(below(experts))] = mean * experts;
  counts.rows = counts.used() + (below(2) == 0 ? 0 : 1 + below(2 * mean));
  return counts;
}

}  // namespace cadre::bench
