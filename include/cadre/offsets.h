#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/plan.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"

#pragma GCC visibility push(default)
namespace cadre {

/// Exclusive prefix sums of the rows of each expert: rows [data[e], data[e + 1]) belong to expert
/// e. In device memory; no entry point reads it on the host. Rows at or beyond data[experts] are
/// the tail. Rows before data[0], where that is above 0, are nobody's: what outputs hold there is
/// not said. Broken offsets (decreasing, negative, beyond R) are clamped by every reader, in a way
/// of its own, so that nothing outside the buffers is touched; what is computed then is not said.
struct Offsets {
  const int32_t* data = nullptr;  ///< [experts + 1]
  int experts = 0;                ///< E
};

/// Bits of the status word that `run` of offsets writes; the caller may read it later.
enum OffsetsStatus : int32_t {
  kOffsetsGood = 0,
  kOffsetsDecreasing = 1,  ///< a count is negative, or ends decrease
  kOffsetsBeyondRows = 2,  ///< the sum of the counts exceeds R; offsets were clamped to R
};

enum class OffsetsSource : uint8_t {
  kCounts,   ///< rows of each expert
  kEnds,     ///< inclusive prefix sums: offsets without the leading zero
  kRouting,  ///< the experts that each token chose
};

/// Builds offsets on the device: `offsets counts R=8192 E=64 index=i32`,
/// `offsets routing R=8192 E=64 T=4096 top_k=2 index=i32`.
struct OffsetsProblem {
  using Args = struct OffsetsArgs;
  static constexpr OperationText kOperation = {
      "offsets", "row ranges of the experts from counts, ends or routing",
      "offsets routing R=8192 E=64 T=4096 top_k=2"};

  OffsetsSource source = OffsetsSource::kCounts;
  int64_t rows = 0;           ///< R: bound on routed rows
  int experts = 1;            ///< E
  int64_t tokens = 0;         ///< T, routing only
  int top_k = 0;              ///< experts per token, routing only
  DType index = DType::kI32;  ///< type of the counts, ends or expert numbers: i32 or i64

  bool operator==(const OffsetsProblem&) const = default;
};

/// Where every routed row comes from and goes to. Rows of one expert are in token order.
struct RowMap {
  int32_t* row_of = nullptr;   ///< [T, top_k]: the row of that choice, -1 where it was dropped
  int32_t* slot_of = nullptr;  ///< [R]: t * top_k + choice of that row; the tail is not written
};

struct OffsetsArgs {
  const void* source = nullptr;  ///< counts [E], ends [E] or routing [T, top_k]
  int32_t* offsets = nullptr;    ///< [E + 1], written
  RowMap map{};                  ///< written, routing only; each part may be null
  const float* prob = nullptr;   ///< [T, top_k], routing only: read for row_prob
  float* row_prob = nullptr;     ///< [R]: prob[slot_of[row]], written, routing only; may be null
  int32_t* status = nullptr;     ///< one word of OffsetsStatus bits, written; may be null
};

using OffsetsPlan = Plan<OffsetsProblem>;

/// Makes `offsets` (and for routing the row map) from counts, ends or routing.
///
///   counts, routing   offsets[e + 1] = min(R, offsets[e] + max(0, counts[e])),  offsets[0] = 0
///   ends              offsets[e + 1] = min(R, max(offsets[e], ends[e])),        offsets[0] = 0
///
/// Shapes    counts, ends [E]   routing, prob [T, top_k]   offsets [E + 1]   row_of [T, top_k]
///           slot_of, row_prob [R].
/// Types     counts, ends and expert numbers int32 or int64; everything written is int32, but
///           row_prob, which is prob in another order, fp32.
/// Rows      An expert number outside [0, E) drops that choice, as do choices whose row would be R
///           or more; dropped choices have row_of = -1. Negative expert numbers are no error (they
///           mark tokens to drop); only counts and ends can be decreasing. The tail of row_prob is
///           not written.
/// Errors    InvalidArgument for sizes that do not fit int32, missing or surplus arguments. What
///           the counts themselves do wrong the status word says, since no host code reads them.
/// Exact     integer arithmetic; the map is the stable sort by expert.
OffsetsPlan plan(const OffsetsProblem&, const Device&, std::string_view only = {});
void run(const OffsetsPlan&, const OffsetsArgs&, Workspace, Stream);

std::string to_string(const OffsetsProblem&);
OffsetsProblem parse_offsets_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
