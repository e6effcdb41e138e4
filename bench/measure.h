#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "bench/check.h"
#include "bench/contest.h"

namespace cadre::bench {

struct MeasureOptions {
  Draw draw{};
  std::string only{};    ///< this implementation, not the planned one
  std::string beside{};  ///< words such as "format=bf16": the same problem with them runs as a peer
  ContestOptions contest{};
  Device device = this_cpu();
};

struct Measurement {
  CheckReport check;  ///< of a case that the reference can afford; timings only if it is good
  int64_t checked_rows = 0;      ///< R of that case; of ranks T
  int64_t checked_elements = 0;  ///< of the output, where only some are; 0: all
  std::string absent_peers;      ///< which are missing, and why; may be empty
  std::string problem, plan;
  std::string call;  ///< of a layer: forward, step or 4 steps; of ranks: dispatch or collect
  double flops = 0, bytes = 0;  ///< of one launch; of a layer, those of its products
  int64_t kept_bytes = 0, workspace_bytes = 0;  ///< of a layer: until backward; the larger of both
  bool is_of_ranks = false;                     ///< then of an exchange, with what it moves:
  double delivered_bytes = 0;   ///< of all ranks: rows that an exchange brings to where they belong
  double crossed_bytes = 0;     ///< of these, those that come from another rank
  std::vector<Timing> timings;  ///< ours first
};

/// A problem's text with other words: `format=bf16` replaces what format= was, or is put behind.
std::string with_words(const std::string& problem, const std::string& words);

/// Finds out whether a problem can be measured before time is spent on others.
/// Errors    InvalidArgument and Unsupported from parsing and planning, and of the distribution.
void require_measurable(std::string_view problem, const MeasureOptions&);

/// Checks, then times beside peers, over copies of the case that together exceed the caches. On an
/// accelerator a grouped_gemm of plain formats is checked as it is timed, in some of its elements.
/// Errors    InvalidArgument and Unsupported from parsing and planning.
Measurement measure(std::string_view problem, const MeasureOptions&);

/// Times a layer beside its own products, in its recipe's formats and without activations:
/// "forward" is that of the layer with nothing to learn, beside its fprops; "step" forward and
/// backward, beside all products. Of weights that are quantised once for several calls forward
/// finds them so, a step quantises them, and of "4 steps", a third call, the first one does.
/// `beside` is one more peer. All run twice before, on the data that is timed: what they write
/// must be numbers, of the same bits both times, but for gradients that are added to what is there.
/// Errors    InvalidArgument and Unsupported from parsing and planning.
std::vector<Measurement> measure_layer(std::string_view problem, const MeasureOptions&);

}  // namespace cadre::bench
