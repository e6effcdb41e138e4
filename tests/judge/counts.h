#pragma once
#include <algorithm>
#include <iterator>
#include <random>

#include "bench/counts.h"

namespace cadre::test {

using bench::Counts;
using bench::CountsKind;
using bench::kCountsKinds;
using bench::random_counts;

/// Calls `work` with `draws` random counts, over all kinds and all of these numbers of experts; few
/// rows where there are many experts, so that a test stays fast.
template <class Work>
void for_random_counts(int draws, unsigned seed, Work&& work) {
  constexpr int kExperts[] = {1, 2, 3, 8, 64, 128, 384, 1024};
  std::mt19937 random(seed);
  for (int i = 0; i < draws; ++i) {
    const int experts = kExperts[size_t(i / kCountsKinds) % std::size(kExperts)];
    const int64_t mean = 1 + int64_t(random() % uint64_t(std::max(2, 40 / experts)));
    work(random_counts(random, CountsKind(i % kCountsKinds), experts, mean));
  }
}

}  // namespace cadre::test
