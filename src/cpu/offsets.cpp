#include "cpu/offsets.h"

#include <algorithm>

namespace cadre::cpu {
namespace {

constexpr int64_t kSlotsOfPiece = 4096;  // fewer are not worth a thread
constexpr int64_t kMostPieces = 64;      // each costs E words of workspace

/// The choices, cut into equal pieces. How many there are does not depend on the threads.
struct Pieces {
  int64_t slots = 0;
  int count = 0;

  explicit Pieces(const OffsetsProblem& p)
      : slots(p.tokens * p.top_k),
        count(int(std::clamp<int64_t>(slots / kSlotsOfPiece, 1, kMostPieces))) {}
  int64_t first(int piece) const { return slots * piece / count; }
};

/// Adds up the rows of one expert after another, clamped to R.
class Sums {
 public:
  Sums(const OffsetsProblem& p, const OffsetsArgs& args) : rows_(p.rows), to_(args.offsets) {
    *to_ = 0;
  }
  void add(int64_t count) {
    if (count < 0) status_ |= kOffsetsDecreasing;
    if (count > rows_ - end_) status_ |= kOffsetsBeyondRows;
    end_ += std::clamp<int64_t>(count, 0, rows_ - end_);
    *++to_ = int32_t(end_);
  }
  int32_t status() const { return status_; }

 private:
  int64_t rows_;
  int32_t* to_;
  int64_t end_ = 0;
  int32_t status_ = kOffsetsGood;
};

template <class Index>
int32_t from_counts(const OffsetsProblem& p, const OffsetsArgs& args) {
  Sums sums(p, args);
  const auto* counts = static_cast<const Index*>(args.source);
  for (int e = 0; e < p.experts; ++e) sums.add(counts[e]);
  return sums.status();
}

template <class Index>
int32_t from_ends(const OffsetsProblem& p, const OffsetsArgs& args) {
  const auto* ends = static_cast<const Index*>(args.source);
  int32_t status = kOffsetsGood;
  int64_t highest = 0;
  args.offsets[0] = 0;
  for (int e = 0; e < p.experts; ++e) {
    if (ends[e] < (e == 0 ? 0 : ends[e - 1])) status |= kOffsetsDecreasing;
    highest = std::max<int64_t>(highest, ends[e]);
    args.offsets[e + 1] = int32_t(std::min(highest, p.rows));
  }
  return status | (highest > p.rows ? kOffsetsBeyondRows : 0);
}

/// Writes the map of one piece; `next[e]` is the row of expert e's next choice.
template <class Index>
void map_piece(const OffsetsProblem& p, const OffsetsArgs& args, int piece, int32_t* next) {
  const auto* experts = static_cast<const Index*>(args.source);
  const Pieces pieces(p);
  for (int64_t slot = pieces.first(piece); slot < pieces.first(piece + 1); ++slot) {
    const Index e = experts[slot];
    const bool known = e >= 0 && e < Index(p.experts);
    const int32_t row = known ? next[e]++ : -1;
    const bool kept = known && row < p.rows;
    if (args.map.row_of != nullptr) args.map.row_of[slot] = kept ? row : -1;
    if (args.map.slot_of != nullptr && kept) args.map.slot_of[row] = int32_t(slot);
    if (args.row_prob != nullptr && kept) args.row_prob[row] = args.prob[slot];
  }
}

/// A counting sort: each piece counts its choices, the counts become the first row of each expert
/// in each piece, and each piece deals out its rows.
template <class Index>
int32_t from_routing(const OffsetsProblem& p, const OffsetsArgs& args, int32_t* scratch) {
  const auto* experts = static_cast<const Index*>(args.source);
  const Pieces pieces(p);
  const auto words_of = [&](int piece) { return scratch + int64_t(piece) * p.experts; };
#pragma omp parallel for schedule(static) if (pieces.count > 1)
  for (int piece = 0; piece < pieces.count; ++piece) {
    int32_t* counts = words_of(piece);
    std::fill_n(counts, p.experts, 0);
    for (int64_t slot = pieces.first(piece); slot < pieces.first(piece + 1); ++slot)
      if (experts[slot] >= 0 && experts[slot] < Index(p.experts)) ++counts[experts[slot]];
  }

  Sums sums(p, args);
  int32_t row = 0;
  for (int e = 0; e < p.experts; ++e) {
    const int32_t first = row;
    for (int piece = 0; piece < pieces.count; ++piece) {
      const int32_t count = words_of(piece)[e];
      words_of(piece)[e] = row;
      row += count;
    }
    sums.add(row - first);
  }

#pragma omp parallel for schedule(static) if (pieces.count > 1)
  for (int piece = 0; piece < pieces.count; ++piece)
    map_piece<Index>(p, args, piece, words_of(piece));
  return sums.status();
}

template <class Index>
int32_t from_source(const OffsetsProblem& p, const OffsetsArgs& args, Workspace workspace) {
  switch (p.source) {
    case OffsetsSource::kCounts:
      return from_counts<Index>(p, args);
    case OffsetsSource::kEnds:
      return from_ends<Index>(p, args);
    default:
      return from_routing<Index>(p, args, static_cast<int32_t*>(workspace.data));
  }
}

}  // namespace

int64_t offsets_workspace_bytes(const OffsetsProblem& p, const Device&) {
  if (p.source != OffsetsSource::kRouting) return 0;
  return int64_t(Pieces(p).count) * p.experts * int64_t(sizeof(int32_t));
}

void offsets(const OffsetsPlan& plan, const OffsetsArgs& args, Workspace workspace, Stream) {
  const OffsetsProblem& p = plan.problem;
  const int32_t status = p.index == DType::kI32 ? from_source<int32_t>(p, args, workspace)
                                                : from_source<int64_t>(p, args, workspace);
  if (args.status != nullptr) *args.status = status;
}

}  // namespace cadre::cpu
