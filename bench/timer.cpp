#include "bench/timer.h"

#include <algorithm>
#include <cmath>

#include "cadre/error.h"

namespace cadre::bench {

Quantiles quantiles(std::vector<double> samples) {
  require(!samples.empty(), "quantiles: there are no samples, must be 1 or more");
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const double place = share * double(samples.size() - 1);
    const auto below = size_t(place), above = size_t(std::ceil(place));
    return samples[below] + (samples[above] - samples[below]) * (place - double(below));
  };
  return {at(0.1), at(0.5), at(0.9)};
}

}  // namespace cadre::bench
