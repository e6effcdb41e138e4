// Both orders hold the same: every code and scale of a column-major copy is that of the row-major
// one, which quantize_test checks against the formulas; and its values too.
#include <gtest/gtest.h>
#include <omp.h>

#include "formats/small_float.h"
#include "tests/ops/quantize_pairs.h"

using namespace cadre;
using namespace cadre::test;

namespace {

constexpr const char* kImplementations[] = {"cpu", "cpu_reference"};
constexpr DType kSources[] = {DType::kF32, DType::kBf16, DType::kF16};
constexpr const char* kFormats[] = {
    "fp8_tensor",  "fp8_tensor:e5m2", "fp8_block",  "fp8_block:2d", "fp8_block:e5m2+fp32",
    "mxfp8",       "mxfp8:2d",        "nvfp4",      "nvfp4:2d",     "nvfp4:sr",
    "nvfp4:2d+sr", "mxfp4",           "mxfp4:floor"};

/// The bits of element [i, j] of expert e, as its strides say.
uint32_t bits_at(const TensorView& v, int64_t e, int64_t i, int64_t j) {
  const int64_t at =
      (v.rank == 3 ? e * v.stride[0] : 0) + i * v.stride[v.rank - 2] + j * v.stride[v.rank - 1];
  const auto* bytes = static_cast<const uint8_t*>(v.data);
  if (bits(v.dtype) == 4) return formats::nibble(bytes[at / 2], at);
  return bits(v.dtype) == 8 ? bytes[at] : static_cast<const uint32_t*>(v.data)[at];
}

void expect_same_bits(const TensorView& got, const TensorView& want, const char* what) {
  ASSERT_EQ(got.rank, want.rank);
  for (int d = 0; d < got.rank; ++d) ASSERT_EQ(got[d], want[d]) << what;
  for (int64_t e = 0; e < (got.rank == 3 ? got[0] : 1); ++e)
    for (int64_t i = 0; i < (got.rank == 0 ? 0 : got[got.rank - 2]); ++i)
      for (int64_t j = 0; j < got[got.rank - 1]; ++j)
        ASSERT_EQ(bits_at(got, e, i, j), bits_at(want, e, i, j))
            << what << " " << e << ", " << i << ", " << j;
}

void expect_same_copy(const QuantizedCopy& got, const QuantizedCopy& want) {
  const QuantizedView a = got.view(), b = want.view();
  expect_same_bits(a.codes, b.codes, "code");
  expect_same_bits(a.scales, b.scales, "scale");
  EXPECT_TRUE(got.expert_scale.bytes() == want.expert_scale.bytes());
  EXPECT_EQ(got.damage(), "");
}

/// The values of two copies, by both implementations and in every type.
void expect_same_values(const QuantizedCopy& got, const QuantizedCopy& want,
                        const std::vector<int32_t>& offsets) {
  for (const DType out : kSources) {
    const Tensor values = decoded(want, offsets, out, "cpu");
    for (const char* name : kImplementations)
      EXPECT_TRUE(decoded(got, offsets, out, name).bytes() == values.bytes()) << name;
  }
}

/// The case with all of its copies row-major, then in every other order that they take.
void expect_same_in_all_orders(QuantizeCase c, ValuesKind kind) {
  const QuantizeCase::Out want = c.run("cpu");
  const std::vector<Major*> orders = orders_of(c);
  for (int order = 1; order < 1 << orders.size(); ++order) {
    for (size_t i = 0; i < orders.size(); ++i)
      *orders[i] = order >> i & 1 ? Major::kColumn : Major::kRow;
    SCOPED_TRACE(to_string(c.problem));
    const QuantizeCase::Out got = c.run("cpu");
    EXPECT_TRUE(got == c.run("cpu_reference"));
    for (const auto copy : {&QuantizeCase::Out::along_k, &QuantizeCase::Out::along_rows}) {
      if ((got.*copy).codes.bytes().empty()) continue;
      expect_same_copy(got.*copy, want.*copy);
      if (kind != ValuesKind::kNan) expect_same_values(got.*copy, want.*copy, c.offsets);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(QuantizedMajor, WeightsOfEveryFormat) {
  std::mt19937 random(1);
  int trial = 0;
  for (const char* words : kFormats)
    for (int i = 0; i < 4; ++i, ++trial) {
      QuantizeCase c = QuantizeCase::weights(
          {1 + trial % 3, 1 + int64_t(random() % 150), 1 + int64_t(random() % 150)},
          kSources[trial % 3], trial % 2 == 1);
      const auto kind = ValuesKind(trial % kValuesKinds);
      fill_values(c, kind, random);
      expect_same_in_all_orders(c.formats(words, words), kind);
      if (HasFailure()) return;
    }
}

// Both sizes beyond a tile of each implementation, and no multiple of one.
TEST(QuantizedMajor, WeightsLargerThanAnyTile) {
  std::mt19937 random(2);
  for (const char* words : {"fp8_block:2d", "fp8_block", "nvfp4"}) {
    QuantizeCase c = QuantizeCase::weights({1, 275, 1091}, DType::kBf16);
    fill_values(c, ValuesKind::kNormal, random);
    expect_same_in_all_orders(c.formats("", words), ValuesKind::kNormal);
  }
}

TEST(QuantizedMajor, ScalesOfRoutedRowsAlongK) {
  std::mt19937 random(3);
  int trial = 0;
  for (const char* words : {"fp8_block", "fp8_block:e5m2+fp32", "mxfp8", "nvfp4", "mxfp4"})
    for (int i = 0; i < 2 * kCountsKinds; ++i, ++trial) {
      const Counts counts =
          random_counts(random, CountsKind(trial % kCountsKinds), 1 + trial % 5, 60);
      QuantizeCase c = QuantizeCase::rows(counts, 1 + int64_t(random() % 300), kSources[trial % 3]);
      const auto kind = ValuesKind(trial % kValuesKinds);
      fill_values(c, kind, random);
      expect_same_in_all_orders(c.formats(words, trial % 2 ? words : ""), kind);
      if (HasFailure()) return;
    }
}

TEST(QuantizedMajor, NothingIsWrittenOfTheTail) {
  std::mt19937 random(4);
  QuantizeCase c = QuantizeCase::rows({.rows = 50, .of = {7, 0, 24}}, 300, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  c.formats("fp8_block", "").problem.along_k_scales_major = Major::kColumn;
  for (const char* name : kImplementations) {
    const QuantizeCase::Out out = c.run(name);
    const TensorView scales = out.along_k.view().scales;
    for (int64_t i = 31; i < 50; ++i)
      for (int64_t j = 0; j < 3; ++j) EXPECT_EQ(bits_at(scales, 0, i, j), ~0u) << name << " " << i;
  }
}

TEST(QuantizedMajor, HalfFilledBytesOfAColumnHaveAZeroAbove) {
  QuantizeCase c = QuantizeCase::weights({2, 3, 5}, DType::kF32).formats("", "nvfp4");
  c.problem.along_rows_codes_major = Major::kColumn;
  for (int64_t e = 0; e < 2; ++e)
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 5; ++j) c.source.set({e, i, j}, -6);  // codes of all ones
  for (const char* name : kImplementations) {
    const QuantizeCase::Out out = c.run(name);
    const TensorView codes = out.along_rows.view().codes;
    const auto* bytes = static_cast<const uint8_t*>(codes.data);
    for (int64_t e = 0; e < 2; ++e)
      for (int64_t j = 0; j < 5; ++j) {
        const int64_t first = (e * codes.stride[0] + j * codes.stride[2]) / 2;
        EXPECT_EQ(bytes[first], 0xff) << name;
        EXPECT_EQ(bytes[first + 1], 0x0f) << name;
      }
  }
}

TEST(QuantizedMajor, DoesNotDependOnTheNumberOfThreads) {
  std::mt19937 random(5);
  QuantizeCase c = QuantizeCase::weights({3, 531, 700}, DType::kBf16).formats("", "nvfp4:2d");
  c.problem.along_rows_codes_major = c.problem.along_rows_scales_major = Major::kColumn;
  fill_values(c, ValuesKind::kHugeAmongTiny, random);
  const QuantizeCase::Out want = c.run("cpu_reference");
  const int threads = omp_get_max_threads();
  for (const int count : {1, 2, 7}) {
    omp_set_num_threads(count);
    EXPECT_TRUE(c.run("cpu") == want) << count << " threads";
  }
  omp_set_num_threads(threads);
}

TEST(QuantizedMajor, TensorsWithoutElementsAreLegal) {
  for (const char* words : {"fp8_block:2d", "nvfp4"})
    for (const std::array<int64_t, 3> shape : {std::array<int64_t, 3>{2, 0, 33}, {2, 33, 0}})
      expect_same_in_all_orders(QuantizeCase::weights(shape, DType::kBf16).formats(words, words),
                                ValuesKind::kNormal);
}

}  // namespace
