#pragma once
#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/compare.h"

namespace cadre::bench {

/// Some elements of the answer of a grouped GEMM that is too large for the reference, summed on the
/// host in double from the operands, each with its bound, and some elements of the tail.
struct Sample {
  struct Element {
    int64_t index = 0;  ///< of the output, row-major
    double want = 0, bound = 0;
  };
  std::vector<Element> elements;
  std::vector<int64_t> tail;  ///< must be zero, or poison as it was
};

/// True where the operands are plain numbers, which is what a sample is summed from.
bool can_sample(const GroupedGemmProblem&);

/// Takes the old content of an output that is added to, so it comes before the run.
Sample draw_sample(const GroupedGemmCase&, int64_t count, uint64_t seed);

/// Compares what the output holds after the run.
Difference compare(const GroupedGemmCase&, const Sample&);

}  // namespace cadre::bench
