// The fast implementation against the reference, bit for bit: every format, both directions and
// both at once, all options, adversarial counts and values, any number of threads.
#include <gtest/gtest.h>
#include <omp.h>

#include "tests/judge/errors.h"
#include "tests/ops/quantize_pairs.h"

using namespace cadre;
using namespace cadre::test;

namespace {

constexpr DType kSources[] = {DType::kF32, DType::kBf16, DType::kF16};

const std::vector<FormatPair> kPairs = format_pairs(), kRaggedPairs = ragged_pairs();

void expect_equal(QuantizeCase& c) {
  SCOPED_TRACE(to_string(c.problem));
  const QuantizeCase::Out want = c.run("cpu_reference"), got = c.run("cpu");
  EXPECT_TRUE(got.along_k.codes.bytes() == want.along_k.codes.bytes()) << "codes along K";
  EXPECT_TRUE(got.along_k.scales.bytes() == want.along_k.scales.bytes()) << "scales along K";
  EXPECT_TRUE(got.along_rows.codes.bytes() == want.along_rows.codes.bytes()) << "codes along rows";
  EXPECT_TRUE(got.along_rows.scales.bytes() == want.along_rows.scales.bytes())
      << "scales along rows";
  EXPECT_TRUE(got == want) << "expert scales";
}

/// The pair together, then each of the two alone.
void expect_equal_each_way(QuantizeCase& c, const FormatPair& pair) {
  expect_equal(c.formats(pair.along_k, pair.along_rows));
  expect_equal(c.formats(pair.along_k, ""));
  expect_equal(c.formats("", pair.along_rows));
}

void expect_equal_on_rows(const FormatPair& pair, unsigned seed) {
  std::mt19937 random(seed);
  for (int trial = 0; trial < 2 * kCountsKinds; ++trial) {
    const Counts counts =
        random_counts(random, CountsKind(trial % kCountsKinds), 1 + trial % 5, 60);
    // Mostly odd widths; now and then several tiles.
    const int64_t cols =
        trial % 7 == 6 ? 1100 + int64_t(random() % 100) : 1 + int64_t(random() % 300);
    QuantizeCase c = QuantizeCase::rows(counts, cols, kSources[(trial + seed) % 3]);
    c.problem.role = TensorRole(trial % 5);
    fill_values(c, ValuesKind((trial + seed) % kValuesKinds), random);
    expect_equal_each_way(c, pair);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Quantize, EqualsTheReferenceOnRoutedRows) {
  unsigned seed = 1;
  for (const FormatPair& pair : kPairs) expect_equal_on_rows(pair, seed++);
  for (const FormatPair& pair : kRaggedPairs) expect_equal_on_rows(pair, seed++);
}

TEST(Quantize, EqualsTheReferenceOnWeights) {
  std::mt19937 random(2);
  int trial = 0;
  for (const FormatPair& pair : kPairs)
    for (int i = 0; i < 4; ++i, ++trial) {
      QuantizeCase c = QuantizeCase::weights(
          {1 + trial % 3, 1 + int64_t(random() % 290), 1 + int64_t(random() % 290)},
          kSources[trial % 3], trial % 2 == 1);
      fill_values(c, ValuesKind(trial % kValuesKinds), random);
      expect_equal_each_way(c, pair);
    }
}

TEST(Quantize, EqualsTheReferenceOnAdversarialCounts) {
  int trial = 0;
  for_random_counts(CADRE_RANDOM_COUNTS, 3, [&](const Counts& counts) {
    const FormatPair& pair = trial % 3 == 0 ? kRaggedPairs[size_t(trial) % std::size(kRaggedPairs)]
                                            : kPairs[size_t(trial) % std::size(kPairs)];
    std::mt19937 random(unsigned(trial) + 4);
    QuantizeCase c = QuantizeCase::rows(counts, 1 + int64_t(random() % 50), kSources[trial % 3]);
    fill_values(c, ValuesKind(trial % kValuesKinds), random);
    expect_equal(c.formats(pair.along_k, pair.along_rows));
    ++trial;
  });
}

TEST(Quantize, TensorsWithoutElementsAreLegal) {
  for (const FormatPair& pair : kPairs) {
    QuantizeCase none = QuantizeCase::rows({.rows = 0, .of = {0, 0}}, 33, DType::kBf16);
    expect_equal(none.formats(pair.along_k, pair.along_rows));
    QuantizeCase thin = QuantizeCase::rows({.rows = 7, .of = {3, 4}}, 0, DType::kBf16);
    expect_equal(thin.formats(pair.along_k, pair.along_rows));
    QuantizeCase flat = QuantizeCase::weights({2, 0, 33}, DType::kBf16);
    expect_equal(flat.formats(pair.along_k, pair.along_rows));
    // Expert scales of experts without values are 1, so that decoding and products stay finite.
    for (const QuantizeCase* c : {&none, &thin, &flat}) {
      const QuantizeCase::Out out = c->run("cpu");
      if (!out.along_k.view().expert_scale) continue;
      EXPECT_EQ(out.along_k.view().expert_scale[0], 1) << pair.along_k;
      EXPECT_EQ(out.along_k.view().expert_scale[1], 1) << pair.along_k;
    }
  }
}

TEST(Quantize, DoesNotDependOnTheNumberOfThreads) {
  std::mt19937 random(5);
  QuantizeCase c = QuantizeCase::rows({.rows = 400, .of = {100, 0, 250, 3}}, 700, DType::kBf16);
  fill_values(c, ValuesKind::kHugeAmongTiny, random);
  const int threads = omp_get_max_threads();
  for (const FormatPair& pair :
       {FormatPair{"nvfp4:sr", "nvfp4:rht+sr"}, FormatPair{"fp8_tensor", "mxfp8"}}) {
    c.formats(pair.along_k, pair.along_rows);
    const QuantizeCase::Out want = c.run("cpu_reference");
    for (const int count : {1, 2, 7}) {
      omp_set_num_threads(count);
      EXPECT_TRUE(c.run("cpu") == want) << count << " threads, " << to_string(c.problem);
    }
    omp_set_num_threads(threads);
  }
}

TEST(Quantize, ClampsBrokenOffsetsAsTheReferenceDoes) {
  std::mt19937 random(6);
  QuantizeCase c = QuantizeCase::rows({.rows = 90, .of = {20, 30, 20, 20}}, 70, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  for (const std::vector<int32_t>& broken :
       {std::vector<int32_t>{-7, 50, 12, 900, 60}, {90, 80, 70, 60, 50}, {5, 5, 1 << 30, -1, 90}}) {
    c.offsets = broken;
    for (const FormatPair& pair : kPairs) expect_equal(c.formats(pair.along_k, pair.along_rows));
    for (const FormatPair& pair : kRaggedPairs)
      expect_equal(c.formats(pair.along_k, pair.along_rows));
  }
}

/// Rows [first, last) of the codes of two copies.
bool same_rows(const QuantizedCopy& a, int64_t first_a, const QuantizedCopy& b, int64_t first_b,
               int64_t count) {
  const TensorView va = a.codes.view(), vb = b.codes.view();
  for (int64_t i = 0; i < count; ++i)
    if (std::memcmp(static_cast<char*>(va.data) + (first_a + i) * va.stride[0] * bits(va.dtype) / 8,
                    static_cast<char*>(vb.data) + (first_b + i) * vb.stride[0] * bits(vb.dtype) / 8,
                    size_t(bytes_for(va.dtype, va[1]))) != 0)
      return false;
  return true;
}

TEST(Quantize, AnExpertsCodesDoNotDependOnTheOthers) {
  std::mt19937 random(7);
  QuantizeCase many = QuantizeCase::rows({.rows = 130, .of = {41, 50, 29}}, 75, DType::kBf16);
  fill_values(many, ValuesKind::kHugeAmongTiny, random);
  QuantizeCase moved = QuantizeCase::rows({.rows = 60, .of = {3, 50, 0}}, 75, DType::kBf16);
  fill_values(moved, ValuesKind::kNan, random);
  for (int64_t i = 0; i < 50; ++i)
    for (int64_t j = 0; j < 75; ++j) moved.source.set({3 + i, j}, many.source.at(41 + i, j));
  for (const FormatPair& pair : kPairs) {
    const QuantizeCase::Out a = many.formats(pair.along_k, pair.along_rows).run("cpu");
    const QuantizeCase::Out b = moved.formats(pair.along_k, pair.along_rows).run("cpu");
    EXPECT_TRUE(same_rows(a.along_k, 41, b.along_k, 3, 50)) << pair.along_k;
    EXPECT_TRUE(same_rows(a.along_rows, 41, b.along_rows, 3, 50)) << pair.along_rows;
  }
  for (const FormatPair& pair : kRaggedPairs) {
    const QuantizeCase::Out a = many.formats(pair.along_k, pair.along_rows).run("cpu");
    const QuantizeCase::Out b = moved.formats(pair.along_k, pair.along_rows).run("cpu");
    const int64_t first_a = 16 * first_block(41, 1, 16), first_b = 16 * first_block(3, 1, 16);
    EXPECT_TRUE(same_rows(a.along_rows, first_a, b.along_rows, first_b, 64)) << pair.along_rows;
  }
}

TEST(Quantize, ARowsCodesAlongKDependOnItAloneWhereItsBlocksDo) {
  std::mt19937 random(8);
  QuantizeCase c = QuantizeCase::rows({.rows = 40, .of = {40}}, 75, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  for (const char* words : {"bf16", "fp8_block", "mxfp8", "mxfp4"}) {
    const QuantizeCase::Out before = c.formats(words, "").run("cpu");
    QuantizeCase other = c;
    for (int64_t i = 0; i < 40; ++i)
      for (int64_t j = 0; j < 75 && i != 17; ++j) other.source.set({i, j}, 1e3 * double(i + j));
    const QuantizeCase::Out after = other.run("cpu");
    EXPECT_TRUE(same_rows(before.along_k, 17, after.along_k, 17, 1)) << words;
    EXPECT_FALSE(same_rows(before.along_k, 16, after.along_k, 16, 1)) << words;
  }
}

TEST(Quantize, SquareCopiesServeBothDirections) {
  std::mt19937 random(9);
  QuantizeCase c = QuantizeCase::weights({2, 150, 140}, DType::kF32);
  fill_values(c, ValuesKind::kNormal, random);
  for (const char* words : {"fp8_block:2d", "mxfp8:2d", "nvfp4:2d", "nvfp4:2d+sr"}) {
    const QuantizeCase::Out out = c.formats(words, words).run("cpu");
    EXPECT_TRUE(out.along_k == out.along_rows) << words;
  }
}

TEST(Quantize, StochasticRoundingMovesWithSeedOffsetRoleAndDirection) {
  std::mt19937 random(10);
  QuantizeCase c = QuantizeCase::rows({.rows = 64, .of = {64}}, 64, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  c.formats("nvfp4:sr", "nvfp4:sr");
  const QuantizeCase::Out first = c.run("cpu");
  EXPECT_TRUE(first == c.run("cpu"));
  const auto moved = [&](auto change) {
    QuantizeCase other = c;
    change(other);
    const QuantizeCase::Out out = other.run("cpu");
    return !same_rows(first.along_k, 0, out.along_k, 0, 64) &&
           !same_rows(first.along_rows, 0, out.along_rows, 0, 64);
  };
  EXPECT_TRUE(moved([](QuantizeCase& o) { o.rng[0] ^= 1; }));
  EXPECT_TRUE(moved([](QuantizeCase& o) { o.rng[1] += 1; }));
  EXPECT_TRUE(moved([](QuantizeCase& o) { o.problem.role = TensorRole::kDz; }));
  EXPECT_FALSE(moved([](QuantizeCase&) {}));
}

TEST(Quantize, StochasticRoundingIsUnbiasedOverOffsets) {
  // One value between two codes: the mean over many offsets comes close to it.
  QuantizeCase c = QuantizeCase::rows({.rows = 1, .of = {1}}, 16, DType::kF32);
  for (int64_t j = 0; j < 16; ++j) c.source.set({0, j}, j == 0 ? 6 : 1.1);
  c.formats("nvfp4:sr", "");
  double sum = 0;
  const int draws = 2000;
  for (int i = 0; i < draws; ++i) {
    c.rng[1] = uint64_t(i);
    const Tensor values = decoded(c.run("cpu").along_k, c.offsets);
    for (int64_t j = 1; j < 16; ++j) sum += values.at(0, j);
  }
  // Codes 1 and 1.5: a standard deviation of 0.2 over sqrt(30000); five of them.
  EXPECT_NEAR(sum / (15 * draws), 1.1, 5 * 0.2 / std::sqrt(15.0 * draws));
}

}  // namespace
