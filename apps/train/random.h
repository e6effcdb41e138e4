#pragma once
#include <cmath>
#include <cstdint>
#include <numbers>

namespace cadre::train {

/// A random number is a pure function of its counter: no state to save, none to lose.
struct RandomCounter {
  uint64_t seed = 0, stream = 0, index = 0;
};

/// One round of splitmix64: a bijection of 64-bit words that scatters neighbours.
constexpr uint64_t scatter(uint64_t word) {
  word += 0x9E3779B97F4A7C15u;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

constexpr uint64_t random_word(RandomCounter at) {
  return scatter(scatter(scatter(at.seed) ^ at.stream) ^ at.index);
}

/// Uniform in [0, 1), 53 bits.
constexpr double random_uniform(RandomCounter at) {
  return static_cast<double>(random_word(at) >> 11) * 0x1p-53;
}

/// Normal with mean 0 and deviation 1, by the Box-Muller transform.
inline double random_normal(RandomCounter at) {
  const double radius = 1.0 - random_uniform({at.seed, at.stream, 2 * at.index});
  const double angle = random_uniform({at.seed, at.stream, 2 * at.index + 1});
  return std::sqrt(-2.0 * std::log(radius)) * std::cos(2.0 * std::numbers::pi * angle);
}

}  // namespace cadre::train
