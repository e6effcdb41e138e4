// The reference against the formulas, element by element: every code and scale is computed anew
// from its block's members and looked up where the header says it lies.
#include "cadre/quantize.h"

#include <gtest/gtest.h>

#include <map>

#include "formats/hadamard.h"
#include "formats/list.h"
#include "formats/philox.h"
#include "tests/judge/errors.h"
#include "tests/judge/formats.h"
#include "tests/ops/quantize_case.h"

using namespace cadre;
using namespace cadre::test;

namespace {

/// One expert's rows as floats.
struct Matrix {
  int64_t rows, cols;
  std::vector<float> at;

  float& operator()(int64_t i, int64_t j) { return at[size_t(i * cols + j)]; }
};

Matrix expert_rows(const QuantizeCase& c, int e, int64_t first, int64_t count) {
  Matrix x{count, c.problem.cols, std::vector<float>(size_t(count * c.problem.cols))};
  const int64_t which = c.problem.discrete ? c.problem.experts - 1 - e : e;
  const TensorView v = c.source.view();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < x.cols; ++j)
      x(i, j) = float(c.ragged() ? cpu::read(v, first + i, j)
                                 : cpu::read(v, c.problem.discrete ? which : e, i, j));
  return x;
}

Matrix transformed(Matrix& x) {
  Matrix y{(x.rows + 15) / 16 * 16, x.cols, {}};
  y.at.resize(size_t(y.rows * y.cols));
  for (int64_t i = 0; i < y.rows; i += 16)
    for (int64_t j = 0; j < y.cols; ++j) {
      float v[16];
      for (int64_t k = 0; k < 16; ++k) v[k] = i + k < x.rows ? x(i + k, j) : 0.0f;
      formats::Hadamard16::apply(v);
      for (int64_t k = 0; k < 16; ++k) y(i + k, j) = v[k];
    }
  return y;
}

float larger(float amax, float x) {
  return std::isnan(amax) || std::abs(x) <= amax ? amax : std::abs(x);  // takes a NaN
}

uint32_t as_bits(float x) { return formats::bits_of(x); }
uint32_t as_bits(uint16_t code) { return code; }
uint32_t as_bits(uint8_t code) { return code; }

/// Where the header says that codes and scales of an expert begin.
struct Place {
  int64_t code_row, scale_row;
};

template <class Row, class Element>
struct Model {
  using Scale = typename Row::Scale;
  const QuantizeCase& c;
  const QuantizedCopy& got;
  formats::ScaleOptions options;

  int64_t block() const { return Row::kInfo.block; }
  const Format& format() const { return got.shape.format; }
  bool down() const { return format().square || got.shape.axis == Axis::kAlongRows; }
  bool across() const { return format().square || got.shape.axis == Axis::kAlongK; }
  std::pair<int64_t, int64_t> block_of(int64_t i, int64_t j) const {
    if (block() == 0) return {0, 0};
    return {down() ? i / block() : i, across() ? j / block() : j};
  }

  uint32_t random_bits(int e, int64_t i, int64_t j) const {
    const bool along_k = format().square || got.shape.axis == Axis::kAlongK;
    const formats::StochasticBits bits{c.rng[0], c.rng[1], c.problem.role,
                                       along_k ? Axis::kAlongK : Axis::kAlongRows};
    const uint32_t line = uint32_t(along_k ? i : j), position = uint32_t(along_k ? j : i);
    return formats::StochasticBits::pick(bits.draw(uint32_t(e), line, position), position);
  }

  auto code(float x, float multiplier, int e, int64_t i, int64_t j) const {
    if constexpr (Row::kIsPlain) return Element::encode(x);
    if constexpr (Row::kInfo.takes_stochastic)
      if (format().stochastic)
        return Element::encode_stochastic(x * multiplier, random_bits(e, i, j));
    return Element::encode(x * multiplier);
  }

  template <class Code>
  static Code stored(const Tensor& tensor, int64_t row, int64_t col) {
    const TensorView v = tensor.view();
    const int64_t at = (v.rank == 2 ? row * v.stride[0] : row * v.stride[1]) + col;
    if (bits(v.dtype) != 4) return static_cast<const Code*>(v.data)[at];
    return Code(formats::nibble(static_cast<const uint8_t*>(v.data)[at / 2], at));
  }

  void expect_expert(int e, Matrix& x, Place place) const {
    std::map<std::pair<int64_t, int64_t>, float> amax;
    float all = 0;
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < x.cols; ++j) {
        float& of_block = amax.try_emplace(block_of(i, j), 0.0f).first->second;
        of_block = larger(of_block, x(i, j));
        all = larger(all, x(i, j));
      }
    const auto expert = Row::template expert_scale<Element>(all, options);
    if (Row::kInfo.has_expert_scale) {
      ASSERT_EQ(got.expert_scale.template data<float>()[e], expert.scale);
    }
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < x.cols; ++j) {
        const auto [bi, bj] = block_of(i, j);
        const auto scale = Row::template block_scale<Element>(amax.at({bi, bj}), expert, options);
        ASSERT_EQ(as_bits(stored<typename Element::Code>(got.codes, place.code_row + i, j)),
                  as_bits(code(x(i, j), scale.multiplier, e, i, j)))
            << "code " << i << ", " << j << " of expert " << e << ", value " << x(i, j);
        if (block() != 0) {
          ASSERT_EQ(stored<typename Scale::Code>(got.scales, place.scale_row + bi, bj), scale.code)
              << "scale " << bi << ", " << bj << " of expert " << e;
        }
      }
  }

  void expect_all() const {
    const bool whole = format().hadamard && got.shape.axis == Axis::kAlongRows;
    for (int e = 0; e < c.problem.experts; ++e) {
      const int64_t first = c.ragged() ? c.offsets[size_t(e)] : 0;
      const int64_t count = c.ragged() ? c.offsets[size_t(e) + 1] - first : c.problem.rows;
      Matrix x = expert_rows(c, e, first, count);
      if (whole) x = transformed(x);
      Place place{whole ? 16 * (first / 16 + e) : first, first};
      if (down() && block() != 0) place.scale_row = first / block() + e;
      if (!c.ragged()) {  // in rows of the last dimension: all experts below one another
        place = {e * c.problem.rows, e * c.problem.rows};
        if (down() && block() != 0)
          place.scale_row = e * ((c.problem.rows + block() - 1) / block());
      }
      expect_expert(e, x, place);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
};

float largest_source(DType source) {
  return source == DType::kF32 ? 3.4028235e38f : source == DType::kF16 ? 65504.0f : 0x1.fep127f;
}

void expect_formulas(const QuantizeCase& c, const QuantizedCopy& got) {
  SCOPED_TRACE(to_string(c.problem));
  const Format& f = got.shape.format;
  const formats::ScaleOptions options{f.power_of_two, f.floor_scale, c.problem.amax_eps,
                                      largest_source(c.problem.source)};
  formats::visit(f, [&]<class Row, class Element>() {
    Model<Row, Element>{c, got, options}.expect_all();
  });
  EXPECT_EQ(got.damage(), "");
}

/// All formats as words, with every option that changes a code.
std::vector<std::string> all_formats(Axis axis, RowsKind kind) {
  const bool transforms = axis == Axis::kAlongRows && kind == RowsKind::kRagged;
  std::vector<std::string> all =
      every_format([&](const Format& f) { return transforms || !f.hadamard; });
  all.insert(all.end(), {"fp8_tensor:e5m2+pow2", "nvfp4:2d+sr"});
  if (transforms) all.emplace_back("nvfp4:rht+sr");
  return all;
}

constexpr DType kSources[] = {DType::kF32, DType::kBf16, DType::kF16};

TEST(QuantizeReference, RoutedRowsFollowTheFormulas) {
  std::mt19937 random(1);
  int trial = 0;
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
    for (const std::string& words : all_formats(axis, RowsKind::kRagged))
      for (int i = 0; i < 6; ++i, ++trial) {
        const Counts counts =
            random_counts(random, CountsKind(trial % kCountsKinds), 1 + trial % 4, 40);
        QuantizeCase c =
            QuantizeCase::rows(counts, 1 + int64_t(random() % 140), kSources[trial % 3]);
        c.problem.role = TensorRole(trial % 5);
        fill_values(c, ValuesKind(trial % kValuesKinds), random);
        const bool k = axis == Axis::kAlongK;
        c.formats(k ? words : "", k ? "" : words);
        const QuantizeCase::Out out = c.run("cpu_reference");
        expect_formulas(c, k ? out.along_k : out.along_rows);
        if (HasFailure()) return;
      }
}

TEST(QuantizeReference, WeightsFollowTheFormulas) {
  std::mt19937 random(2);
  int trial = 0;
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
    for (const std::string& words : all_formats(axis, RowsKind::kWeights))
      for (int i = 0; i < 3; ++i, ++trial) {
        QuantizeCase c = QuantizeCase::weights(
            {1 + trial % 3, 1 + int64_t(random() % 150), 1 + int64_t(random() % 150)},
            kSources[trial % 3], trial % 2 == 1);
        fill_values(c, ValuesKind(trial % kValuesKinds), random);
        const bool k = axis == Axis::kAlongK;
        c.formats(k ? words : "", k ? "" : words);
        const QuantizeCase::Out out = c.run("cpu_reference");
        expect_formulas(c, k ? out.along_k : out.along_rows);
        if (HasFailure()) return;
      }
}

TEST(QuantizeReference, EpsBoundsTheAmaxOfFp32Scales) {
  QuantizeCase c = QuantizeCase::rows({.rows = 5, .of = {2, 3}}, 130, DType::kF32);
  std::mt19937 random(3);
  fill_values(c, ValuesKind::kZeroBlocks, random);
  c.problem.amax_eps = 0.25f;
  c.formats("fp8_block:fp32", "fp8_tensor");
  const QuantizeCase::Out out = c.run("cpu_reference");
  expect_formulas(c, out.along_k);
  expect_formulas(c, out.along_rows);
}

TEST(QuantizeReference, WritesNothingThatNoBlockOwns) {
  std::mt19937 random(4);
  QuantizeCase c = QuantizeCase::rows({.rows = 100, .of = {0, 33, 1, 0, 31}}, 70, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  c.formats("mxfp8", "mxfp8");
  const QuantizeCase::Out out = c.run("cpu_reference");
  EXPECT_TRUE(out.along_k.codes.untouched(65, 100));
  EXPECT_TRUE(out.along_k.scales.untouched(65, 100));
  EXPECT_TRUE(out.along_rows.codes.untouched(65, 100));
  // Blocks of experts 1, 2 and 4: rows 0 / 32 + 1 and the next, 33 / 32 + 2, 34 / 32 + 4.
  for (int64_t row = 0; row < out.along_rows.scales.rows(); ++row) {
    const bool owned = row == 1 || row == 2 || row == 3 || row == 5;
    EXPECT_EQ(out.along_rows.scales.untouched(row, row + 1), !owned) << row;
  }
}

TEST(QuantizeReference, ClampsBrokenOffsets) {
  std::mt19937 random(5);
  QuantizeCase c = QuantizeCase::rows({.rows = 40, .of = {10, 10, 20}}, 33, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  c.formats("mxfp8", "nvfp4:rht");
  c.offsets = {-7, 30, 12, 900};
  const QuantizeCase::Out broken = c.run("cpu_reference");
  c.offsets = {0, 30, 30, 40};
  EXPECT_TRUE(broken == c.run("cpu_reference"));
  EXPECT_EQ(broken.along_rows.damage(), "");
}

}  // namespace
