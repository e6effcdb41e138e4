// What warps and blocks quantise in registers, blocks of 16, 32 and 128 of bf16 in wide chunks, has
// the bits of the CPU's: codes and numbers, rows that lie there or are gathered.
#include "tests/cuda/quantize_on_device.h"
#include "tests/ops/quantize_gather.h"

namespace cadre {
namespace {

using test::Counts;
using test::FormatPair;
using test::QuantizeCase;
using test::units_of_gpu;
using test::ValuesKind;
using QuantizeByWarps = test::OnDevice;

/// Blocks whose amaxes have every size, from a scale of zero up: those of 16 columns, and those of
/// 16 rows of a column.
void fill_scales(QuantizeCase& c, std::mt19937& random) {
  const TensorView v = c.source.view();
  std::vector<int> of_column(size_t(c.problem.cols));
  std::normal_distribution<double> normal;
  for (int64_t r = 0; r < c.used_rows(); ++r) {
    int of_block = 0;
    for (int64_t j = 0; j < c.problem.cols; ++j) {
      if (r % 16 == 0) of_column[size_t(j)] = random() % 4 == 0 ? int(random() % 30) : 0;
      if (j % 16 == 0) of_block = random() % 4 == 0 ? int(random() % 30) : 0;
      const cpu::At at = c.ragged() ? cpu::At{r, j} : cpu::At{r / v[1], r % v[1], j};
      cpu::write(v, at, std::ldexp(normal(random), -of_block - of_column[size_t(j)]));
    }
  }
}

constexpr int64_t kWide[] = {8, 24, 256, 136, 520};

/// What becomes of a case whose source is filled, in any order that it takes; some or all of it as
/// numbers.
void check(QuantizeCase c, const FormatPair& pair, unsigned seed, bool mixed) {
  test::choose(c, pair, 4 * seed);
  QuantizeProblem& p = c.problem;
  p.along_k_decoded = p.along_k && (mixed ? seed % 2 == 1 : seed % 4 == 1);
  p.along_rows_decoded = p.along_rows && (mixed ? seed / 2 % 2 == 1 : seed % 4 == 1);
  if (p.along_k_decoded) p.along_k_scales_major = Major::kRow;
  if (p.along_rows_decoded) p.along_rows_codes_major = p.along_rows_scales_major = Major::kRow;
  constexpr int64_t kGaps[] = {8, 16, 16, 6, 8};  // whole words of codes, of 32 or 64 bits, or not
  c.gap = kGaps[seed % std::size(kGaps)];
  units_of_gpu = seed % 2 == 0 ? 1 : 0;
  const bool decoded = p.along_k_decoded || p.along_rows_decoded;
  const char* reference = decoded ? "cpu_reference" : "cpu";
  const QuantizeCase::Out want = (p.gather ? test::permuted(c) : c).run(reference),
                          got = test::on_gpu(c);
  units_of_gpu = 0;
  ASSERT_TRUE(got == want) << to_string(p) << " gap " << c.gap << " seed " << seed;
  EXPECT_EQ(got.along_k.damage() + got.along_rows.damage(), "");
}

/// Rows of tokens, of which there may be fewer than rows, or more.
QuantizeCase tokens_of(const Counts& counts, int64_t cols, unsigned seed, std::mt19937& random) {
  const int64_t tokens = 1 + int64_t(random() % 90);
  QuantizeCase c = QuantizeCase::rows({.rows = tokens, .of = {tokens}}, cols, DType::kBf16, 8);
  fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
  return test::gathered(c, counts, 1 + int(seed % 3), random);
}

TEST_F(QuantizeByWarps, BlocksOf16HaveTheBitsOfTheCpu) {
  const FormatPair kSixteens[] = {{"nvfp4", "nvfp4:rht"},
                                  {"", "nvfp4:rht"},
                                  {"nvfp4", "nvfp4"},
                                  {"nvfp4", ""},
                                  {"", "nvfp4"},
                                  {"nvfp4:sr", "nvfp4:rht+sr"},
                                  {"nvfp4:sr", "nvfp4:sr"},
                                  {"nvfp4:sr", ""},
                                  {"", "nvfp4:rht+sr"}};
  const FormatPair kOfWeights[] = {{"nvfp4", "nvfp4"},       {"nvfp4", ""},    {"", "nvfp4"},
                                   {"nvfp4:2d", "nvfp4:2d"}, {"nvfp4:2d", ""}, {"", "nvfp4:2d"}};
  std::mt19937 random(18);
  unsigned seed = 0;
  const auto each = [&](QuantizeCase c, const FormatPair& pair) {
    if (seed % 8 == 7)
      fill_scales(c, random);
    else
      fill_values(c, ValuesKind(seed % 8), random);
    check(c, pair, seed, seed / 16 % 2 == 1);
    ++seed;
  };
  test::for_random_counts(test::sized(480, 72), 19, [&](const Counts& counts) {
    each(QuantizeCase::rows(counts, kWide[seed / std::size(kSixteens) % std::size(kWide)],
                            DType::kBf16, 8),
         kSixteens[seed % std::size(kSixteens)]);
  });
  test::for_random_counts(test::sized(240, 36), 20, [&](const Counts& counts) {
    check(tokens_of(counts, kWide[seed / std::size(kSixteens) % std::size(kWide)], seed, random),
          kSixteens[seed % std::size(kSixteens)], seed, true);
    ++seed;
  });
  for (unsigned i = 0; i < test::sized(120u, 36u); ++i) {
    const int64_t rows = 1 + int64_t(random() % 50);
    each(QuantizeCase::weights({1 + i % 4, rows, kWide[i % std::size(kWide)]}, DType::kBf16, false,
                               8),
         kOfWeights[i / std::size(kWide) % std::size(kOfWeights)]);
  }
}

TEST_F(QuantizeByWarps, GatheredBlocksOf32HaveTheBitsOfTheCpu) {
  const FormatPair kPairs[] = {{"mxfp8", "mxfp8"},           {"", "mxfp8"}, {"mxfp8", ""},
                               {"mxfp8:e5m2", "mxfp8:e5m2"}, {"", "mxfp4"}, {"mxfp4", "mxfp4"}};
  std::mt19937 random(21);
  unsigned seed = 0;
  test::for_random_counts(test::sized(240, 36), 22, [&](const Counts& counts) {
    check(tokens_of(counts, kWide[seed / std::size(kPairs) % std::size(kWide)], seed, random),
          kPairs[seed % std::size(kPairs)], seed, true);
    ++seed;
  });
}

/// Of a tile of 128 rows some warps have all of their 16, some, or none.
TEST_F(QuantizeByWarps, BlocksOf128HaveTheBitsOfTheCpu) {
  const FormatPair kPairs[] = {{"fp8_block", "fp8_block"},
                               {"", "fp8_block"},
                               {"fp8_block:e5m2", "fp8_block:e5m2+fp32"},
                               {"fp8_block:fp32", "fp8_block"},
                               {"", "fp8_block:e5m2"}};
  constexpr int64_t kRows[] = {0, 1, 8, 15, 16, 17, 100, 127, 128, 129, 144, 260};
  constexpr int64_t kCols[] = {8, 120, 128, 136, 264, 272, 392};
  std::mt19937 random(23);
  for (unsigned seed = 0; seed < test::sized(300u, 60u); ++seed) {
    Counts counts{.rows = int64_t(random() % 3), .of = {}};  // in the tail
    for (int experts = 1 + int(random() % 5); experts > 0; --experts) {
      counts.of.push_back(kRows[random() % std::size(kRows)]);
      counts.rows += counts.of.back();
    }
    const int64_t cols = kCols[random() % std::size(kCols)];
    const bool gather = seed % 3 == 0;
    QuantizeCase c = gather ? tokens_of(counts, cols, seed, random)
                            : QuantizeCase::rows(counts, cols, DType::kBf16, 8);
    if (!gather) fill_values(c, ValuesKind(random() % test::kValuesKinds), random);
    check(c, kPairs[seed % std::size(kPairs)], unsigned(random() % 64), seed % 4 >= 2);
  }
}

/// Rows of turned codes are whole words where there is a multiple of eight of them.
TEST_F(QuantizeByWarps, SquaresOf128HaveTheBitsOfTheCpu) {
  const FormatPair kPairs[] = {{"fp8_block:2d", "fp8_block:2d"},
                               {"", "fp8_block:2d"},
                               {"fp8_block:2d", ""},
                               {"fp8_block:e5m2+2d", "fp8_block:e5m2+2d"},
                               {"fp8_block:2d+fp32", "fp8_block:2d+fp32"},
                               {"fp8_block:2d", "fp8_block:2d+fp32"}};
  constexpr int64_t kRows[] = {8, 120, 128, 136, 264, 130, 400},
                    kCols[] = {8, 120, 128, 136, 272, 392};
  std::mt19937 random(25);
  for (unsigned seed = 0; seed < test::sized(240u, 60u); ++seed) {
    const int64_t rows = kRows[random() % std::size(kRows)];
    const int64_t cols = kCols[random() % std::size(kCols)];
    QuantizeCase c =
        QuantizeCase::weights({1 + seed % 5, rows, cols}, DType::kBf16, seed % 6 == 5, 8);
    fill_values(c, ValuesKind(random() % test::kValuesKinds), random);
    check(c, kPairs[seed % std::size(kPairs)], unsigned(random() % 64), seed % 8 == 7);
  }
  // Codes of both ways, which differ.
  QuantizeCase c = QuantizeCase::weights({2, 136, 264}, DType::kBf16, false, 8);
  fill_values(c, ValuesKind::kNormal, random);
  c.gap = 8;
  c.formats("fp8_block:2d", "fp8_block:2d+fp32");
  c.problem.along_rows_codes_major = Major::kColumn;
  EXPECT_TRUE(test::on_gpu(c) == c.run("cpu"));
}

}  // namespace
}  // namespace cadre
