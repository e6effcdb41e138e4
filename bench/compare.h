#pragma once
#include <cstdint>
#include <string>

#include "bench/case.h"

namespace cadre::bench {

/// The outcome of comparing one output, or the worst of several.
struct Difference {
  double of_bound =
      0;  ///< the largest |got - want| / bound; infinite where one is NaN or bits differ
  std::string where;  ///< the worst element, in words; empty if there is none beyond its bound
  bool good() const { return of_bound <= 1; }
};

/// n roundings of relative size 2^-24: n u / (1 - n u).
double gamma(int64_t roundings);

/// What sums of 8-bit codes lose at most, in roundings of the sum of their terms' sizes, if an
/// adder keeps so many bits of fraction: 128 codes are added in four instructions, each of which
/// cuts off 32 products, what they are added to, and the sum. None where the adder is fp32's.
int64_t roundings_of_adder(int fraction_bits);

/// Bytes of an output and what else its buffer holds, before a run.
std::vector<std::byte> snapshot(const Output&);

/// Compares what an implementation wrote with what the reference wrote.
///   exact outputs     every byte is equal, those that nobody writes too
///   other outputs     live elements: |got - want| <= gamma(roundings) * size + one step at the
///                     larger of both; not finite only where `want` is the same; the tail and
///                     gaps hold what they held before, or zero if the problem says tail=zero
Difference compare(const Output& got, const Output& want, const Magnitude&,
                   const std::vector<std::byte>& before);

}  // namespace cadre::bench
