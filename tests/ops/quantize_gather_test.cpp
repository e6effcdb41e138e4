// Rows that are gathered have the codes and scales of permute and quantise one after the other.
#include "tests/ops/quantize_gather.h"

#include <gtest/gtest.h>

#include "tests/ops/quantize_pairs.h"

using namespace cadre;
using namespace cadre::test;

namespace {

constexpr DType kSources[] = {DType::kF32, DType::kBf16, DType::kF16};

std::vector<FormatPair> all_pairs() {
  std::vector<FormatPair> all = format_pairs();
  for (const FormatPair& pair : ragged_pairs()) all.push_back(pair);
  return all;
}

/// Tokens, and a batch of them.
QuantizeCase batch(const Counts& counts, int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t tokens = 1 + int64_t(random() % 40);
  QuantizeCase c = QuantizeCase::rows({.rows = tokens, .of = {tokens}}, cols, kSources[seed % 3]);
  fill_values(c, ValuesKind(seed % kValuesKinds), random);
  return gathered(c, counts, 1 + int(seed % 4), random);
}

/// By both implementations.
void expect_the_bits_of_rows(QuantizeCase c) {
  const QuantizeCase::Out want = permuted(c).run("cpu_reference");
  for (const char* name : {"cpu_reference", "cpu"}) {
    const QuantizeCase::Out got = c.run(name);
    EXPECT_TRUE(got == want) << name << ", " << to_string(c.problem);
    EXPECT_EQ(got.along_k.damage() + got.along_rows.damage() + c.source.damage(), "");
  }
}

TEST(QuantizeGather, HasTheBitsOfPermuteAndQuantiseInEveryFormat) {
  unsigned seed = 0;
  for (const FormatPair& pair : all_pairs()) {
    QuantizeCase c = batch({.rows = 190, .of = {5, 0, 37, 129, 0}}, 75, ++seed);
    expect_the_bits_of_rows(c.formats(pair.along_k, pair.along_rows));
    expect_the_bits_of_rows(c.formats(pair.along_k, ""));
    expect_the_bits_of_rows(c.formats("", pair.along_rows));
    for (Major* order : orders_of(c.formats(pair.along_k, pair.along_rows))) {
      *order = Major::kColumn;
      expect_the_bits_of_rows(c);
    }
  }
}

TEST(QuantizeGather, HasThemWithAnyCounts) {
  const std::vector<FormatPair> pairs = all_pairs();
  unsigned seed = 0;
  for_random_counts(300, 3, [&](const Counts& counts) {
    QuantizeCase c = batch(counts, 1 + seed * 31 % 150, seed);
    const FormatPair& pair = pairs[seed++ % pairs.size()];
    expect_the_bits_of_rows(c.formats(pair.along_k, pair.along_rows));
  });
}

TEST(QuantizeGather, HasThemWithBrokenOffsets) {
  const std::vector<FormatPair> pairs = all_pairs();
  unsigned seed = 0;
  for (const std::vector<int32_t>& broken :
       {std::vector<int32_t>{-7, 50, 12, 900, 60}, {90, 80, 70, 60, 50}, {5, 5, 1 << 30, -1, 90}})
    for (const FormatPair& pair : pairs) {
      QuantizeCase c = batch({.rows = 90, .of = {20, 30, 20, 20}}, 70, ++seed);
      QuantizeCase rows = permuted(c);
      c.offsets = rows.offsets = broken;
      const QuantizeCase::Out want = rows.formats(pair.along_k, pair.along_rows).run("cpu");
      EXPECT_TRUE(c.formats(pair.along_k, pair.along_rows).run("cpu") == want)
          << to_string(c.problem);
    }
}

TEST(QuantizeGather, HasThemInDecodedCopies) {
  QuantizeCase c = batch({.rows = 190, .of = {5, 0, 37, 129, 0}}, 75, 4);
  c.formats("nvfp4", "nvfp4:rht");
  c.problem.along_k_decoded = c.problem.along_rows_decoded = true;
  EXPECT_TRUE(c.run("cpu_reference") == permuted(c).run("cpu_reference"));
}

TEST(QuantizeGather, OfSlotsThatAreNoneIsOfZeros) {
  QuantizeCase c = batch({.rows = 20, .of = {4, 16}}, 33, 1);
  for (int32_t& slot : c.slots) slot = -1;
  for (const char* words : {"bf16", "fp8_tensor", "mxfp8", "nvfp4"}) {
    const Tensor values = decoded(c.formats(words, "").run("cpu").along_k, c.offsets);
    for (int64_t r = 0; r < 20; ++r)
      for (int64_t j = 0; j < 33; ++j) ASSERT_EQ(values.at(r, j), 0) << words;
  }
}

}  // namespace
