// Philox against the published known answers, and that no two elements share their random bits.
#include "formats/philox.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

using namespace cadre;
using namespace cadre::formats;

namespace {

// Known answers of Random123, philox4x32 with ten rounds.
static_assert(philox({{0, 0, 0, 0}}, 0) ==
              PhiloxWords{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
static_assert(philox({{~0u, ~0u, ~0u, ~0u}}, ~0ull) ==
              PhiloxWords{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
static_assert(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0'a4093822ull) ==
              PhiloxWords{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});

TEST(Philox, GivesTheKnownAnswersAtRunTimeToo) {
  volatile uint32_t word = 0x243f6a88;
  const PhiloxWords got =
      philox({{word, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0'a4093822ull);
  EXPECT_EQ(got, (PhiloxWords{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}

TEST(PhiloxLines, DrawWhatTheirCountersDo) {
  const uint64_t key = 0x299f31d0'a4093822ull;
  const PhiloxLines lines({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, key);
  PhiloxWords got[2] = {};
  lines.draw({0x85a308d3, ~0u}, got);
  EXPECT_EQ(got[0], (PhiloxWords{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
  EXPECT_EQ(got[1], philox({{0x243f6a88, ~0u, 0x13198a2e, 0x03707344}}, key));
  const StochasticBits bits{.seed = key, .offset = 3ull << 40 | 7, .role = TensorRole::kDz};
  bits.lines(9, 77).draw({0, 1234}, got);
  EXPECT_EQ(got[0], bits.draw(9, 0, 77));
  EXPECT_EQ(got[1], bits.draw(9, 1234, 77));
}

TEST(StochasticBits, AreThoseOfTheDocumentedCounter) {
  const StochasticBits bits{.seed = 0x1111'2222'3333'4444ull,
                            .offset = 0x5555'6666'7777'8888ull,
                            .role = TensorRole::kDy,
                            .axis = Axis::kAlongRows};
  const PhiloxWords want = philox({{77 / 8, 1234, 9 | 2u << 24 | 1u << 31, 0x7777'8888}},
                                  (uint64_t(0x1111'2222u ^ 0x5555'6666u) << 32) | 0x3333'4444u);
  const PhiloxWords got = bits.draw(9, 1234, 77);
  EXPECT_EQ(got, want);
  EXPECT_EQ(StochasticBits::pick(got, 77), want.word[2] >> 16);  // 77 % 8 = 5: word 2, upper half
  EXPECT_EQ(StochasticBits::pick(got, 72), want.word[0] & 0xffffu);
  EXPECT_EQ(StochasticBits::pick(got, 79), want.word[3] >> 16);
}

TEST(StochasticBits, DifferForEverythingTheyDependOn) {
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> seen;
  int draws = 0;
  for (const uint64_t seed : {1ull, 2ull, 1ull << 40})
    for (const uint64_t offset : {0ull, 1ull, 1ull << 33})
      for (const TensorRole role : {TensorRole::kX, TensorRole::kDy, TensorRole::kDz})
        for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
          for (const uint32_t expert : {0u, 1u, 1023u})
            for (const uint32_t line : {0u, 1u, 70000u})
              for (const uint32_t position : {0u, 8u, 1u << 20}) {
                const PhiloxWords w =
                    StochasticBits{seed, offset, role, axis}.draw(expert, line, position);
                seen.insert({w.word[0], w.word[1], w.word[2], w.word[3]});
                ++draws;
              }
  EXPECT_EQ(int(seen.size()), draws);
}

TEST(StochasticBits, EightNeighboursShareADrawAndNoBits) {
  const StochasticBits bits{.seed = 5, .offset = 6};
  EXPECT_EQ(bits.draw(0, 3, 8), bits.draw(0, 3, 15));
  EXPECT_NE(bits.draw(0, 3, 8), bits.draw(0, 3, 16));
  const PhiloxWords words{{0x0001'0000, 0x0003'0002, 0x0005'0004, 0x0007'0006}};
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(StochasticBits::pick(words, i), i);
}

}  // namespace
