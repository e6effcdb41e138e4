#pragma once
#include <cstdint>

#include "parallel/rank_device.h"

// The words in which the four exchanges are written.
namespace cadre::parallel {

/// Goes through an exchange: `read` reads what all have brought.
template <class Read>
void run_exchange(const ExchangeJob& job, const Window::State& window, Stream stream, Read&& read) {
  try {
    window.check_failure();
    window.device->begin(window, job, stream);
    read();
    window.device->end(window, job, stream);
  } catch (...) {
    window.device->spoil(job);
    throw;
  }
}

/// All rows of a matrix, or those that are used, into a part of the own window.
BroughtRows brought(const TensorView& from, char* to, const int32_t* used = nullptr);

/// A list of 32-bit words.
template <class Word>
BroughtRows brought_list(const Word* from, int64_t count, char* to) {
  if (from == nullptr) return {};
  return {.from = from, .to = to, .row_bytes = sizeof(Word), .step = sizeof(Word), .rows = count};
}

Outcome outcome(const TensorView&);
Outcome outcome(float* data, int64_t count);

/// The same matrix of every rank as one tensor: [P, rows, columns].
TensorView of_ranks(const Window::State&, int64_t part, DType, int64_t rows, int64_t columns);

/// Of a map where rows are summed: one rank's rows end at the tail, those of several have no end.
Offsets offsets_of_sums(const ExpertParallelProblem&, const ExchangeMap&);

/// A plan for fewer tokens than its own.
PermutePlan with_tokens(const PermutePlan&, int64_t tokens);

}  // namespace cadre::parallel
