#pragma once
#include "cadre/format.h"
#include "formats/ieee.h"

namespace cadre::formats {

/// Four 32-bit words, in and out of the generator.
struct PhiloxWords {
  uint32_t word[4];

  constexpr bool operator==(const PhiloxWords&) const = default;
};

/// Philox 4x32-10: ten rounds of a keyed bijection of 128-bit counters.
/// Source    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
CADRE_HD constexpr PhiloxWords philox(PhiloxWords counter, uint64_t key) {
  constexpr uint64_t kMultiply0 = 0xD251'1F53u, kMultiply1 = 0xCD9E'8D57u;
  uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiply0 * counter.word[0];
    const uint64_t product1 = kMultiply1 * counter.word[2];
    counter = {{uint32_t(product1 >> 32) ^ counter.word[1] ^ key0, uint32_t(product1),
                uint32_t(product0 >> 32) ^ counter.word[3] ^ key1, uint32_t(product0)}};
    key0 += 0x9E37'79B9u;  // the golden ratio and the square root of three less one, in 32 bits
    key1 += 0xBB67'AE85u;
  }
  return counter;
}

/// The random bits of stochastic rounding: a pure function of the seed, the offset, whose tensor it
/// is, and the element's place within its expert; so a row's codes do not depend on other rows, nor
/// on who computes them.
///
///   along K      line = row within the expert,  position = column
///   along rows   line = column,                 position = row within the expert
///
/// Square blocks, whose codes serve both axes, count as along K; weights as rows of their expert.
/// With a Hadamard transform, position i of a block is the i-th transformed value. One draw serves
/// eight neighbouring positions, sixteen bits each:
///
///   key     = seed, its upper word xor the upper word of offset
///   counter = {position / 8, line, expert | role << 24 | along_rows << 31, lower word of offset}
///   bits    = word[(position % 8) / 2], its lower half where position is even
struct StochasticBits {
  static constexpr int kPositionsPerDraw = 8;

  uint64_t seed = 0, offset = 0;
  TensorRole role = TensorRole::kX;
  Axis axis = Axis::kAlongK;

  CADRE_HD constexpr PhiloxWords draw(uint32_t expert, uint32_t line, uint32_t position) const {
    const uint32_t who = expert | (uint32_t(role) << 24) | (uint32_t(axis) << 31);
    return philox({{position / kPositionsPerDraw, line, who, uint32_t(offset)}},
                  seed ^ (offset & 0xffff'ffff'0000'0000u));
  }
  /// The sixteen bits of one position out of its draw.
  CADRE_HD static constexpr uint32_t pick(const PhiloxWords& draw, uint32_t position) {
    return (draw.word[position % kPositionsPerDraw / 2] >> (16 * (position % 2))) & 0xffffu;
  }
};

}  // namespace cadre::formats
