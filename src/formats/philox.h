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
struct Philox {
  static constexpr uint32_t kRounds = 10;
  static constexpr uint32_t kMultiply0 = 0xD251'1F53u, kMultiply1 = 0xCD9E'8D57u;

  uint64_t key;

  /// The words of the key in a round: the golden ratio and the square root of three less one, in
  /// 32 bits, are added in each.
  CADRE_HD constexpr uint32_t key0(uint32_t round) const {
    return uint32_t(key) + round * 0x9E37'79B9u;
  }
  CADRE_HD constexpr uint32_t key1(uint32_t round) const {
    return uint32_t(key >> 32) + round * 0xBB67'AE85u;
  }
  CADRE_HD constexpr PhiloxWords after(uint32_t round, const PhiloxWords& counter) const {
    const uint64_t product0 = wide_product(kMultiply0, counter.word[0]);
    const uint64_t product1 = wide_product(kMultiply1, counter.word[2]);
    return {{uint32_t(product1 >> 32) ^ counter.word[1] ^ key0(round), uint32_t(product1),
             uint32_t(product0 >> 32) ^ counter.word[3] ^ key1(round), uint32_t(product0)}};
  }
};

CADRE_HD constexpr PhiloxWords philox(PhiloxWords counter, uint64_t key) {
  for (uint32_t round = 0; round < Philox::kRounds; ++round)
    counter = Philox{key}.after(round, counter);
  return counter;
}

/// Philox of counters that differ in their second word alone, the line. It is in one word after the
/// first round and in two after the second; what is in the others is computed once for all lines.
class PhiloxLines {
 public:
  /// The second word of the counter is ignored.
  CADRE_HD constexpr PhiloxLines(const PhiloxWords& counter, uint64_t key) : philox_{key} {
    const PhiloxWords one =
        philox_.after(0, {{counter.word[0], 0, counter.word[2], counter.word[3]}});
    const PhiloxWords two = philox_.after(1, {{0, one.word[1], one.word[2], 0}});
    first_ = one.word[0];
    second_ = one.word[3] ^ philox_.key1(1);
    third_ = philox_.after(2, {{two.word[0], two.word[1], 0, 0}});
  }
  /// Draws of two lines side by side, which share what becomes of the key.
  CADRE_HD constexpr void draw(const uint32_t (&lines)[2], PhiloxWords (&to)[2]) const {
    for (int i = 0; i < 2; ++i) {
      const uint64_t product0 = wide_product(Philox::kMultiply0, first_ ^ lines[i]);
      const uint64_t product1 =
          wide_product(Philox::kMultiply1, uint32_t(product0 >> 32) ^ second_);
      to[i] = {{uint32_t(product1 >> 32) ^ third_.word[0], uint32_t(product1),
                uint32_t(product0) ^ third_.word[2], third_.word[3]}};
    }
    for (uint32_t round = 3; round < Philox::kRounds; ++round)
      for (PhiloxWords& words : to) words = philox_.after(round, words);
  }

 private:
  Philox philox_;
  uint32_t first_ = 0, second_ = 0;  ///< of the words that hold the line after one and two rounds
  PhiloxWords third_{};              ///< the words after three rounds, but for the line
};

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
    return philox(counter(expert, line, position), key());
  }
  /// Those of all lines at a position.
  CADRE_HD constexpr PhiloxLines lines(uint32_t expert, uint32_t position) const {
    return {counter(expert, 0, position), key()};
  }
  /// The sixteen bits of one position out of its draw.
  CADRE_HD static constexpr uint32_t pick(const PhiloxWords& draw, uint32_t position) {
    return (draw.word[position % kPositionsPerDraw / 2] >> (16 * (position % 2))) & 0xffffu;
  }

 private:
  CADRE_HD constexpr PhiloxWords counter(uint32_t expert, uint32_t line, uint32_t position) const {
    const uint32_t who = expert | (uint32_t(role) << 24) | (uint32_t(axis) << 31);
    return {{position / kPositionsPerDraw, line, who, uint32_t(offset)}};
  }
  CADRE_HD constexpr uint64_t key() const { return seed ^ (offset & 0xffff'ffff'0000'0000u); }
};

}  // namespace cadre::formats
