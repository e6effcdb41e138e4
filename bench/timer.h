#pragma once
#include <chrono>
#include <vector>

namespace cadre::bench {

/// What is reported of repeated times: interpolated between the sorted samples.
struct Quantiles {
  double p10 = 0, median = 0, p90 = 0;
};
Quantiles quantiles(std::vector<double> samples);

/// Wall-clock time of one call, in microseconds.
template <class Call>
double time_us(Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace cadre::bench
