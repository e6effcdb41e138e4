#include "cpu/reference/offsets.h"

#include <algorithm>

namespace cadre::cpu::reference {
namespace {

int64_t number(const OffsetsPlan& plan, const OffsetsArgs& args, int64_t i) {
  return plan.problem.index == DType::kI32 ? static_cast<const int32_t*>(args.source)[i]
                                           : static_cast<const int64_t*>(args.source)[i];
}

/// Writes offsets[e + 1], given where the rows of expert e would end; R at most.
void put(const OffsetsPlan& plan, const OffsetsArgs& args, int expert, int64_t end,
         int32_t& status) {
  if (end > plan.problem.rows) status |= kOffsetsBeyondRows;
  args.offsets[expert + 1] = int32_t(std::min(end, plan.problem.rows));
}

void from_counts(const OffsetsPlan& plan, const OffsetsArgs& args, int32_t& status) {
  for (int e = 0; e < plan.problem.experts; ++e) {
    const int64_t count = number(plan, args, e), room = plan.problem.rows - args.offsets[e];
    if (count < 0) status |= kOffsetsDecreasing;
    // One more than there is room for says as much as 2^63 - 1 would, and does not overflow.
    put(plan, args, e, args.offsets[e] + std::clamp<int64_t>(count, 0, room + 1), status);
  }
}

void from_ends(const OffsetsPlan& plan, const OffsetsArgs& args, int32_t& status) {
  for (int e = 0; e < plan.problem.experts; ++e) {
    const int64_t end = number(plan, args, e), before = e == 0 ? 0 : number(plan, args, e - 1);
    if (end < before) status |= kOffsetsDecreasing;
    put(plan, args, e, std::max<int64_t>(end, args.offsets[e]), status);
  }
}

void from_routing(const OffsetsPlan& plan, const OffsetsArgs& args, int32_t& status) {
  const OffsetsProblem& p = plan.problem;
  const int64_t slots = p.tokens * p.top_k;
  if (args.map.row_of != nullptr) std::fill_n(args.map.row_of, slots, -1);
  int64_t row = 0;
  for (int e = 0; e < p.experts; ++e) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (number(plan, args, slot) != e) continue;
      if (row < p.rows && args.map.row_of != nullptr) args.map.row_of[slot] = int32_t(row);
      if (row < p.rows && args.map.slot_of != nullptr) args.map.slot_of[row] = int32_t(slot);
      if (row < p.rows && args.row_prob != nullptr) args.row_prob[row] = args.prob[slot];
      ++row;
    }
    put(plan, args, e, row, status);
  }
}

}  // namespace

void offsets(const OffsetsPlan& plan, const OffsetsArgs& args, Workspace, Stream) {
  int32_t status = kOffsetsGood;
  args.offsets[0] = 0;
  switch (plan.problem.source) {
    case OffsetsSource::kCounts:
      from_counts(plan, args, status);
      break;
    case OffsetsSource::kEnds:
      from_ends(plan, args, status);
      break;
    case OffsetsSource::kRouting:
      from_routing(plan, args, status);
      break;
  }
  if (args.status != nullptr) *args.status = status;
}

}  // namespace cadre::cpu::reference
