#include "bench/contest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace cadre::bench {
namespace {

using Copies = std::vector<std::vector<Peer>>;
using Samples = std::vector<std::vector<double>>;  // [contestant][launch]

// Calls `time(contestant, its number)` for launches that alternate.
template <class Time>
void alternate(const Copies& copies, int repeat, Time&& time) {
  for (const auto& contestants : copies)
    for (const Peer& contestant : contestants) contestant.run();
  size_t launch = 0;
  for (int i = 0; i < repeat; ++i)
    for (size_t j = 0; j < copies[0].size(); ++j) time(copies[launch++ % copies.size()][j], j);
}

Samples time_launches(const Copies& copies, int repeat) {
  Samples samples(copies[0].size());
  alternate(copies, repeat,
            [&](const Peer& peer, size_t j) { samples[j].push_back(time_us(peer.run)); });
  return samples;
}

// The host runs ahead of the device by the launches before the first mark.
Samples time_launches(const Copies& copies, int repeat, Accelerator& accelerator) {
  Samples samples(copies[0].size());
  bool first = true;
  alternate(copies, repeat, [&](const Peer& peer, size_t) {
    if (first) accelerator.mark();
    first = false;
    peer.run();
    accelerator.mark();
  });
  const std::vector<double> us = accelerator.us_between_marks();
  for (size_t i = 0; i < us.size(); ++i) samples[i % samples.size()].push_back(us[i]);
  return samples;
}

// One turn at the least, however slow the host is.
void load(const Copies& copies, double seconds, Accelerator& accelerator) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    for (const Peer& contestant : copies[0]) contestant.run();
    accelerator.us_between_marks();
  } while (Clock::now() < until);
}

std::vector<Timing> summarise(const std::vector<Peer>& contestants, const Samples& samples) {
  std::vector<Timing> timings;
  for (size_t j = 0; j < samples.size(); ++j) {
    std::vector<double> speeds;
    for (size_t i = 0; i < samples[j].size(); ++i) speeds.push_back(samples[j][i] / samples[0][i]);
    Timing& t = timings.emplace_back();
    t.name = contestants[j].name;
    t.what = contestants[j].what;
    t.us = quantiles(samples[j]);
    t.speed = quantiles(speeds).median;
  }
  return timings;
}

// The clock is read while the last launches are in flight.
void add_energy(const Copies& copies, size_t j, double seconds, Accelerator& accelerator,
                Timing& timing) {
  const auto before = accelerator.power();
  if (!before) return;
  const auto launches =
      int64_t(std::clamp(seconds * 1e6 / std::max(timing.us.median, 1.0), 1.0, 1e6));
  accelerator.mark();
  for (int64_t i = 0; i < launches; ++i) copies[size_t(i) % copies.size()][j].run();
  accelerator.mark();
  const auto during = accelerator.power();
  const std::vector<double> us = accelerator.us_between_marks();
  const auto after = accelerator.power();
  if (!during || !after) return;
  const double joules = after->joules - before->joules;
  timing.joules = joules / double(launches);
  timing.watts = joules * 1e6 / std::max(std::accumulate(us.begin(), us.end(), 0.0), 1.0);
  timing.sm_mhz = during->sm_mhz;
}

}  // namespace

std::vector<Timing> contest(const Copies& copies, const ContestOptions& options,
                            Accelerator* accelerator) {
  if (accelerator == nullptr) return summarise(copies[0], time_launches(copies, options.repeat));
  if (options.load_s > 0) load(copies, options.load_s, *accelerator);
  auto timings = summarise(copies[0], time_launches(copies, options.repeat, *accelerator));
  if (options.load_s > 0)
    for (size_t j = 0; j < timings.size(); ++j)
      add_energy(copies, j, options.load_s / 2, *accelerator, timings[j]);
  return timings;
}

}  // namespace cadre::bench
