#pragma once
#include <memory>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/draw.h"
#include "cadre/operations.h"

namespace cadre::bench {

/// One tensor that an operation writes.
struct Output {
  std::string name;
  TensorView view;
  int64_t live = 0;         ///< entries of dimension 0 that are computed; the rest is tail
  Tail tail = Tail::kKeep;  ///< what must become of the tail
  bool exact = false;       ///< equals the reference bit for bit, unwritten bytes included
};

/// A problem with random arguments and the buffers that they point into. Tails of inputs hold NaN,
/// outputs are poisoned. The same problem and draw give the same bits.
template <class Problem>
struct Case {
  Problem problem;
  typename Problem::Args args;
  std::vector<Output> outputs;
  std::vector<int32_t> offsets;  ///< [E + 1] on the host; empty for operations without rows
  std::unique_ptr<Buffers> buffers;
};

using GroupedGemmCase = Case<GroupedGemmProblem>;

/// Whether it is a product with an activation, or an activation whose result is quantised, which
/// "composed" computes one after the other.
inline bool is_composed(const GroupedGemmProblem& p) { return p.activation.has_value(); }
inline bool is_composed(const ActivationProblem& p) { return p.along_k.has_value(); }
template <class Problem>
bool is_composed(const Problem&) {
  return false;
}

/// The same product of rows that lie in expert order, to rows that do.
inline GroupedGemmProblem without_gather(GroupedGemmProblem p) {
  p.gather = Gather::kNo;
  p.scatter = false;
  p.tokens = 0;
  p.top_k = p.ranks = 1;
  return p;
}

/// Copies rows of a product that scatters none to where another case scatters them.
void scatter_rows(const GroupedGemmCase& from, GroupedGemmCase& to);

/// Copies the rows that a case gathers, if it does, so that its product gathers none.
void permute_first(GroupedGemmCase&);

// What follows is written once an operation, as specialisations in bench/cases/<operation>.cpp. One
// that is missing does not link.

template <class Problem>
Case<Problem> make_case(const Problem&, const Draw&);

/// Lowers the rows (or tokens), and nothing else, until the reference needs about a second.
/// Returns what is left of them.
template <class Problem>
int64_t shrink(Problem&);

/// What the error of one output is measured by: the same sum over the sizes of its terms, and the
/// number of roundings on the way. bound = gamma(roundings) * size + one step of the output.
struct Magnitude {
  std::vector<float> sizes;  ///< of every element of the output, row-major; empty if exact
  int64_t roundings = 0;
};

/// One entry an output, in their order.
template <class Problem>
std::vector<Magnitude> magnitudes(const Case<Problem>&);

/// What one run does at the least: bytes that must be read and written once, multiplications and
/// additions of products.
struct Work {
  double flops = 0;
  double bytes = 0;
};
template <class Problem>
Work work(const Case<Problem>&);

}  // namespace cadre::bench
