// Dequantisation against its formula, and that what was quantised comes back within half a step.
#include "cadre/dequantize.h"

#include <gtest/gtest.h>

#include "formats/list.h"
#include "tests/judge/errors.h"
#include "tests/judge/formats.h"
#include "tests/ops/quantize_case.h"

using namespace cadre;
using namespace cadre::test;

namespace {

/// Those whose codes are the nearest of their scales, which no value exceeds.
std::vector<std::string> rounding_formats() {
  return every_format(
      [](const Format& f) { return !f.stochastic && !f.hadamard && !f.floor_scale; });
}

template <class Code>
Code stored(const Tensor& tensor, int64_t row, int64_t col) {
  const TensorView v = tensor.view();
  const int64_t at = row * v.stride[v.rank - 2] + col;
  if (bits(v.dtype) != 4) return static_cast<const Code*>(v.data)[at];
  return Code(formats::nibble(static_cast<const uint8_t*>(v.data)[at / 2], at));
}

/// Element (i, j) of expert 0 of a copy: each product rounded to fp32, in the order of the header.
template <class Row, class Element>
float value_of(const QuantizedCopy& q, int64_t i, int64_t j) {
  const Format& f = q.shape.format;
  const int64_t block = Row::kInfo.block;
  const bool down = f.square || q.shape.axis == Axis::kAlongRows;
  const bool across = f.square || q.shape.axis == Axis::kAlongK;
  float value = Element::decode(stored<typename Element::Code>(q.codes, i, j));
  if constexpr (Row::kInfo.block != 0) {
    using Scale = typename Row::Scale;
    const auto code =
        stored<typename Scale::Code>(q.scales, down ? i / block : i, across ? j / block : j);
    value = float(double(value) * Scale::decode(code));
  }
  if (Row::kInfo.has_expert_scale)
    value = float(double(value) * q.expert_scale.template data<float>()[0]);
  return value;
}

void expect_formula(const QuantizedCopy& q, const Tensor& got, int64_t rows) {
  formats::visit(q.shape.format, [&]<class Row, class Element>() {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < q.shape.cols; ++j) {
        const double want = value_of<Row, Element>(q, i, j);
        const TensorView v = got.view();
        const double value = v.rank == 2 ? got.at(i, j) : got.at(0, i, j);
        Tensor rounded(v.dtype, {1});
        rounded.set({0}, want);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(value)) << i << ", " << j;
        } else {
          ASSERT_EQ(value, rounded.at(0)) << i << ", " << j;
        }
      }
  });
}

/// Bit for bit; in fp32 a NaN may be any NaN.
bool same_but_for_nan_payloads(const Tensor& a, const Tensor& b) {
  if (a.bytes().size() != b.bytes().size() || a.damage() != "" || b.damage() != "") return false;
  if (a.view().dtype != DType::kF32) return a.bytes() == b.bytes();
  for (size_t at = 0; at < a.bytes().size(); at += 4) {
    float x, y;
    std::memcpy(&x, &a.bytes()[at], 4);
    std::memcpy(&y, &b.bytes()[at], 4);
    if (formats::bits_of(x) != formats::bits_of(y) && !(std::isnan(x) && std::isnan(y)))
      return false;
  }
  return true;
}

TEST(Dequantize, MultipliesCodeScaleAndExpertScaleInThatOrder) {
  std::mt19937 random(1);
  int trial = 0;
  for (const std::string& words : rounding_formats())
    for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
      for (const DType out : {DType::kF32, DType::kBf16, DType::kF16})
        for (const bool weights : {false, true}) {
          const ValuesKind kind = ValuesKind(trial++ % kValuesKinds);
          QuantizeCase c = weights ? QuantizeCase::weights({1, 37, 133}, DType::kF32)
                                   : QuantizeCase::rows({.rows = 50, .of = {37}}, 133, DType::kF32);
          fill_values(c, kind, random);
          const bool k = axis == Axis::kAlongK;
          c.formats(k ? words : "", k ? "" : words);
          const QuantizeCase::Out made = c.run("cpu_reference");
          const QuantizedCopy& q = k ? made.along_k : made.along_rows;
          SCOPED_TRACE(text(to_string(c.problem), " out=", name(out)));
          const Tensor got = decoded(q, c.offsets, out, "cpu_reference");
          expect_formula(q, got, 37);
          EXPECT_EQ(got.damage(), "");
          if (!weights) {
            EXPECT_TRUE(got.untouched(37, 50)) << "the tail was written";
          }
          if (HasFailure()) return;
        }
}

TEST(Dequantize, FastEqualsTheReference) {
  std::mt19937 random(4);
  int trial = 0;
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
    for (const std::string& words : rounding_formats())
      for (const DType out : {DType::kF32, DType::kBf16, DType::kF16})
        for (const bool weights : {false, true}) {
          const Counts counts =
              random_counts(random, CountsKind(trial % kCountsKinds), 1 + trial % 4, 60);
          const int64_t cols = trial % 5 == 0 ? 1100 : 1 + int64_t(random() % 300);
          QuantizeCase c = weights ? QuantizeCase::weights({2, 140, cols}, DType::kF32)
                                   : QuantizeCase::rows(counts, cols, DType::kF32);
          fill_values(c, ValuesKind(trial++ % kValuesKinds), random);
          const bool k = axis == Axis::kAlongK;
          const bool transform = !k && !weights && words == "nvfp4";
          c.formats(k ? words : "", k ? "" : transform ? "nvfp4:rht" : words);
          const QuantizeCase::Out made = c.run("cpu_reference");
          const QuantizedCopy& q = k ? made.along_k : made.along_rows;
          EXPECT_TRUE(same_but_for_nan_payloads(decoded(q, c.offsets, out, "cpu"),
                                                decoded(q, c.offsets, out, "cpu_reference")))
              << to_string(c.problem) << " out=" << name(out);
        }
}

/// Half a step of the element at `x`, relative to the largest that its scale covers; what rounding
/// to a code may cost.
double half_step(DType element, double x, double scale) {
  const int precision = element == DType::kE4m3 ? 4 : element == DType::kE5m2 ? 3 : 2;
  const double smallest = element == DType::kE4m3   ? 0x1p-9
                          : element == DType::kE5m2 ? 0x1p-16
                                                    : 0.5;
  return std::max(std::ldexp(std::abs(x), -precision), scale * smallest / 2) * (1 + 1e-5);
}

TEST(Dequantize, GivesBackNormalValuesWithinHalfAStep) {
  // Scales that round up, or are free, never saturate; the scale of each block is at most its amax
  // over the largest code, times two for powers of two, times 17/16 for an e4m3 scale.
  std::mt19937 random(2);
  for (const std::string& words : rounding_formats()) {
    const Format f = parse_format(words);
    if (is_plain(f)) continue;
    QuantizeCase c = QuantizeCase::rows({.rows = 60, .of = {37, 0, 20}}, 133, DType::kF32);
    fill_values(c, ValuesKind::kNormal, random);
    c.formats(words, "");
    const QuantizeCase::Out made = c.run("cpu_reference");
    const Tensor got = decoded(made.along_k, c.offsets, DType::kF32, "cpu_reference");
    double amax = 0;
    for (int64_t i = 0; i < 57; ++i)
      for (int64_t j = 0; j < 133; ++j) amax = std::max(amax, std::abs(c.source.at(i, j)));
    const double largest = f.element == DType::kE4m3 ? 448 : f.element == DType::kE5m2 ? 57344 : 6;
    const double scale = 2 * amax / largest;
    for (int64_t i = 0; i < 57; ++i)
      for (int64_t j = 0; j < 133; ++j) {
        const double x = c.source.at(i, j);
        // nvfp4's e4m3 block scale may fall short by 1/16: the largest codes then saturate.
        const double saturated = info(f.kind).kind == FormatKind::kNvfp4 ? std::abs(x) / 16 : 0;
        ASSERT_NEAR(got.at(i, j), x, half_step(f.element, x, scale) + saturated) << words;
      }
  }
}

TEST(Dequantize, WritesTransformedBlocksWhole) {
  std::mt19937 random(3);
  QuantizeCase c = QuantizeCase::rows({.rows = 30, .of = {5, 0, 17}}, 9, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  c.formats("", "nvfp4:rht");
  const QuantizeCase::Out made = c.run("cpu_reference");
  const Tensor got = decoded(made.along_rows, c.offsets, DType::kF32, "cpu_reference");
  // R / 16 + E = 4 blocks of rows: expert 0 owns block 0, expert 2 blocks 2 and 3.
  ASSERT_EQ(got.rows(), 64);
  EXPECT_FALSE(got.untouched(0, 16));
  EXPECT_TRUE(got.untouched(16, 32));
  EXPECT_FALSE(got.untouched(32, 48));
  for (const int64_t row : {15, 63}) EXPECT_FALSE(got.untouched(row, row + 1)) << row;
}

TEST(Dequantize, ProblemsPrintAndParseBack) {
  for (const char* words :
       {"dequantize rows R=8192 C=4096 E=64 format=mxfp8 axis=along_k out=bf16",
        "dequantize weights N=2048 K=4096 E=64 format=fp8_block:2d axis=along_rows out=f32",
        "dequantize weights N=7 K=5 E=2 format=mxfp8 axis=along_rows out=f32 codes_major=column "
        "scales_major=column"})
    EXPECT_EQ(to_string(parse_dequantize_problem(words)), words);
}

TEST(Dequantize, OrdersThatNobodyReadsAreErrors) {
  const auto plan_error = [&](const std::string& words) {
    return invalid([&] { plan(parse_dequantize_problem(words), this_cpu()); });
  };
  const std::string along_k =
      "dequantize weights N=8 K=4 E=2 format=mxfp8 axis=along_k out=f32 codes_major=column";
  EXPECT_EQ(plan_error(along_k),
            "dequantize: codes_major is column, must be row for mxfp8; along K the contraction is "
            "innermost already [" +
                along_k + "]");
  const std::string plain =
      "dequantize weights N=8 K=4 E=2 format=f16 axis=along_rows out=f32 scales_major=column";
  EXPECT_EQ(plan_error(plain),
            "dequantize: scales_major is column, must be row for f16; it has no block scales [" +
                plain + "]");
}

TEST(Dequantize, BadProblemsAndArgumentsAreErrors) {
  const Device cpu = this_cpu();
  const auto plan_error = [&](const char* words) {
    return invalid([&] { plan(parse_dequantize_problem(words), cpu); });
  };
  EXPECT_EQ(plan_error("dequantize rows R=8 C=4 E=0 format=mxfp8 axis=along_k out=bf16"),
            "dequantize: E is 0, must be 1 or more "
            "[dequantize rows R=8 C=4 E=0 format=mxfp8 axis=along_k out=bf16]");
  EXPECT_EQ(plan_error("dequantize rows R=8 C=4 E=2 format=mxfp8 axis=along_k out=e4m3"),
            "dequantize: out is e4m3, must be f32, bf16 or f16 "
            "[dequantize rows R=8 C=4 E=2 format=mxfp8 axis=along_k out=e4m3]");

  DequantizeProblem decoded = parse_dequantize_problem("dequantize rows R=8 C=4 format=mxfp8");
  decoded.source.decoded = true;
  EXPECT_EQ(invalid([&] { plan(decoded, cpu); }).substr(0, 83),
            "dequantize: source.decoded is yes, must be no; what is decoded has no codes [dequan");

  const std::string words = "dequantize rows R=8 C=4 E=2 format=mxfp8 axis=along_k out=f32";
  const DequantizePlan made = plan(parse_dequantize_problem(words), cpu);
  const QuantizedCopy q(made.problem.source);
  Tensor out(DType::kF32, {8, 4});
  const int32_t offsets[] = {0, 3, 8};
  const DequantizeArgs good{.source = q.view(), .offsets = {offsets, 2}, .out = out.view()};
  const auto run_error = [&](DequantizeArgs args) {
    return invalid([&] { run(made, args, {}, {}); });
  };
  DequantizeArgs args = good;
  args.out = view(out.data<float>(), DType::kF32, {4, 8});
  EXPECT_EQ(run_error(args), "dequantize: out is f32[4, 8], must be f32[8, 4] [" + words + "]");
  args = good;
  args.source.scales = {};
  EXPECT_EQ(run_error(args),
            "dequantize: source.scales is f32[], must be e8m0[8, 1] [" + words + "]");
  args = good;
  args.offsets.data = nullptr;
  EXPECT_EQ(run_error(args),
            "dequantize: offsets.data is null, must point to 3 elements [" + words + "]");
  args = good;
  args.out.data = static_cast<char*>(args.out.data) + 1;
  EXPECT_NE(run_error(args).find("must be aligned to 4 bytes [" + words), std::string::npos);
}

}  // namespace
