#pragma once
#include <cstdint>

#include "parallel/rank_device.h"

// The words in which the four exchanges are written.
namespace cadre::parallel {

/// Goes through an exchange.
void run_exchange(const ExpertParallelPlan&, const Window::State&, const ExchangeJob&,
                  const ExchangeRead&, Stream);

/// All rows of a matrix, or those that are used, into a part of the own window.
BroughtRows brought(const TensorView& from, char* to, const int32_t* used = nullptr);

/// A list of 32-bit words, to its place in what every rank has of all: [P, each].
template <class Word>
BroughtRows brought_list(const Word* from, int64_t count, char* to) {
  return {.from = from,
          .to = to,
          .row_bytes = sizeof(Word),
          .step = sizeof(Word),
          .rows = count,
          .to_all = true};
}
/// That place, at home, in the part of a window that holds such lists.
char* list_of_rank(const Window::State&, int64_t part, int64_t each);
/// Those of all ranks.
template <class Word>
Word* list_at(const Window::State& window, int64_t part) {
  return reinterpret_cast<Word*>(window.of(window.rank) + part);
}

Outcome outcome(const TensorView&);
Outcome outcome(float* data, int64_t count);

/// The same matrix of every rank as one tensor: [P, rows, columns].
TensorView of_ranks(const Window::State&, int64_t part, DType, int64_t rows, int64_t columns);

/// Rows that a rank brings to a sum, unless who made them has pushed them.
BroughtRows results(const ExpertParallelPlan&, const Window::State&, const TensorView& from,
                    const int32_t* used);
/// Where rows lie that are summed.
TensorView summed_rows(const ExpertParallelPlan&, const Window::State&);

/// Of a map where rows are summed: one rank's rows end at the tail; those of several, and places,
/// have no end.
Offsets offsets_of_sums(const ExpertParallelProblem&, const ExchangeMap&);

/// Rows of this rank, and the tokens whose sums they become.
struct SummedRows {
  const TensorView &rows, &to;
  const ExchangeMap& map;
};
/// Sums of what lies in the windows, for the tokens of this rank; with sum=rank those of its rows
/// come before. `of` is a plan for so many tokens.
ExchangeRead read_of_sums(const ExpertParallelPlan&, const PermutePlan& of, const Window::State&,
                          const SummedRows&);

/// A plan for fewer tokens than its own, without what allocates.
template <class Problem>
Plan<Problem> with_tokens(const Plan<Problem>& plan, int64_t tokens) {
  Plan<Problem> fewer{};
  fewer.problem = plan.problem;
  fewer.problem.tokens = tokens;
  fewer.device = plan.device;
  fewer.name = plan.name;
  fewer.workspace_bytes = plan.workspace_bytes;
  fewer.entry = plan.entry;
  return fewer;
}

}  // namespace cadre::parallel
