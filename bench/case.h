#pragma once
#include <memory>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/draw.h"
#include "cadre/activation.h"
#include "cadre/bias_grad.h"
#include "cadre/dequantize.h"
#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/quantize.h"
#include "cadre/routing.h"

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
template <class Problem, class Args>
struct Case {
  Problem problem;
  Args args;
  std::vector<Output> outputs;
  std::vector<int32_t> offsets;  ///< [E + 1] on the host; empty for operations without rows
  std::unique_ptr<Buffers> buffers;
};

using ActivationCase = Case<ActivationProblem, ActivationArgs>;
using BiasGradCase = Case<BiasGradProblem, BiasGradArgs>;
using DequantizeCase = Case<DequantizeProblem, DequantizeArgs>;
using GroupedGemmCase = Case<GroupedGemmProblem, GroupedGemmArgs>;
using OffsetsCase = Case<OffsetsProblem, OffsetsArgs>;
using PermuteCase = Case<PermuteProblem, PermuteArgs>;
using QuantizeCase = Case<QuantizeProblem, QuantizeArgs>;
using RoutingCase = Case<RoutingProblem, RoutingArgs>;

ActivationCase make_case(const ActivationProblem&, const Draw&);
BiasGradCase make_case(const BiasGradProblem&, const Draw&);
DequantizeCase make_case(const DequantizeProblem&, const Draw&);
GroupedGemmCase make_case(const GroupedGemmProblem&, const Draw&);
OffsetsCase make_case(const OffsetsProblem&, const Draw&);
PermuteCase make_case(const PermuteProblem&, const Draw&);
QuantizeCase make_case(const QuantizeProblem&, const Draw&);
RoutingCase make_case(const RoutingProblem&, const Draw&);

/// Lowers the rows (or tokens), and nothing else, until the reference needs about a second.
/// Returns what is left of them.
int64_t shrink(ActivationProblem&);
int64_t shrink(BiasGradProblem&);
int64_t shrink(DequantizeProblem&);
int64_t shrink(GroupedGemmProblem&);
int64_t shrink(OffsetsProblem&);
int64_t shrink(PermuteProblem&);
int64_t shrink(QuantizeProblem&);
int64_t shrink(RoutingProblem&);

/// What the error of one output is measured by: the same sum over the sizes of its terms, and the
/// number of roundings on the way. bound = gamma(roundings) * size + one step of the output.
struct Magnitude {
  std::vector<float> sizes;  ///< of every element of the output, row-major; empty if exact
  int64_t roundings = 0;
};

/// One entry an output, in their order.
std::vector<Magnitude> magnitudes(const ActivationCase&);
std::vector<Magnitude> magnitudes(const BiasGradCase&);
std::vector<Magnitude> magnitudes(const DequantizeCase&);
std::vector<Magnitude> magnitudes(const GroupedGemmCase&);
std::vector<Magnitude> magnitudes(const OffsetsCase&);
std::vector<Magnitude> magnitudes(const PermuteCase&);
std::vector<Magnitude> magnitudes(const QuantizeCase&);
std::vector<Magnitude> magnitudes(const RoutingCase&);

/// What one run does at the least: bytes that must be read and written once, multiplications and
/// additions of products.
struct Work {
  double flops = 0;
  double bytes = 0;
};
Work work(const ActivationCase&);
Work work(const BiasGradCase&);
Work work(const DequantizeCase&);
Work work(const GroupedGemmCase&);
Work work(const OffsetsCase&);
Work work(const PermuteCase&);
Work work(const QuantizeCase&);
Work work(const RoutingCase&);

}  // namespace cadre::bench
