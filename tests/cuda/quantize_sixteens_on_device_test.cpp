// Blocks of 16 of bf16, which have a kernel of their own on the GPU, have the bits of the CPU's.
#include "tests/cuda/quantize_on_device.h"

namespace cadre {
namespace {

using test::Counts;
using test::FormatPair;
using test::QuantizeCase;
using test::units_of_gpu;
using test::ValuesKind;
using QuantizeSixteens = test::OnDevice;

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

TEST_F(QuantizeSixteens, HaveTheBitsOfTheCpu) {
  constexpr int64_t kWide[] = {8, 24, 256, 136, 520};
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
    test::choose(c, pair, 4 * seed);
    c.gap = seed % 4 == 3 ? 6 : 8;  // whole words of codes, or not
    units_of_gpu = seed % 2 == 0 ? 1 : 0;
    ++seed;
    const QuantizeCase::Out want = c.run("cpu"), got = test::on_gpu(c);
    ASSERT_TRUE(got == want) << to_string(c.problem) << " gap " << c.gap << " seed " << seed;
    EXPECT_EQ(got.along_k.damage() + got.along_rows.damage(), "");
  };
  test::for_random_counts(test::sized(480, 120), 19, [&](const Counts& counts) {
    each(QuantizeCase::rows(counts, kWide[seed / std::size(kSixteens) % std::size(kWide)],
                            DType::kBf16, 8),
         kSixteens[seed % std::size(kSixteens)]);
  });
  for (unsigned i = 0; i < test::sized(120u, 36u); ++i) {
    const int64_t rows = 1 + int64_t(random() % 50);
    each(QuantizeCase::weights({1 + i % 4, rows, kWide[i % std::size(kWide)]}, DType::kBf16, false,
                               8),
         kOfWeights[i / std::size(kWide) % std::size(kOfWeights)]);
  }
  units_of_gpu = 0;
}

}  // namespace
}  // namespace cadre
