// Casts on the GPU, by quantize and by dequantize, have the bits of the CPU's.
#include "tests/cuda/mirror.h"
#include "tests/judge/errors.h"
#include "tests/ops/quantize_case.h"

namespace cadre {
namespace {

using test::Counts;
using test::QuantizeCase;
using test::QuantizedCopy;
using test::Tensor;
using test::ValuesKind;

constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
using CastOnDevice = test::OnDevice;

QuantizeCase::Out on_gpu(const QuantizeCase& c) {
  const QuantizePlan made = plan(c.problem, test::first_gpu());
  EXPECT_EQ(made.name, "cuda_cast");
  QuantizeCase::Out out = c.outputs();
  test::Mirror mirror;
  const QuantizeArgs args = c.args(
      out, [&](const Tensor& t) { return mirror.view(t); },
      [&](auto& list) { return mirror.data(list); });
  mirror.replay(1, [&](Stream stream) { run(made, args, {}, stream); });
  return out;
}

Tensor decoded_on_gpu(const QuantizedCopy& copy, const std::vector<int32_t>& offsets, DType out,
                      int64_t gap) {
  const DequantizePlan made = plan(DequantizeProblem{copy.shape, out}, test::first_gpu());
  EXPECT_EQ(made.name, "cuda_cast");
  Tensor values = test::values_like(copy, out, gap);
  test::Mirror mirror;
  const auto at = [&](const Tensor& t) { return mirror.view(t); };
  DequantizeArgs args{.source = copy.view(at), .offsets = {}, .out = at(values)};
  if (copy.shape.kind == RowsKind::kRagged)
    args.offsets = {mirror.data(offsets), copy.shape.experts};
  mirror.replay(1, [&](Stream stream) { run(made, args, {}, stream); });
  return values;
}

/// Along K, along rows, or both, each as one of three formats; then the first copy back again.
void check(QuantizeCase& c, unsigned seed) {
  const std::string_view names[] = {"f32", "bf16", "f16"};
  const std::string_view first = names[seed % 3], second = names[seed / 3 % 3];
  c.formats(seed % 4 == 1 ? "" : first, seed % 4 == 2 ? "" : second);
  const QuantizeCase::Out want = c.run("cpu");
  ASSERT_TRUE(on_gpu(c) == want) << to_string(c.problem) << " gap " << c.gap;

  const QuantizedCopy& copy = c.problem.along_k ? want.along_k : want.along_rows;
  const DType out = kTypes[seed / 2 % 3];
  const int64_t gap = c.gap % 8 == 0 ? 8 : 3;
  Tensor values = test::values_like(copy, out, gap);
  DequantizeArgs args{.source = copy.view(), .offsets = {}, .out = values.view()};
  if (c.ragged()) args.offsets = {c.offsets.data(), c.problem.experts};
  const DequantizePlan made = plan(DequantizeProblem{copy.shape, out}, this_cpu(), "cpu");
  run(made, args, {}, {});
  ASSERT_TRUE(decoded_on_gpu(copy, c.offsets, out, gap).bytes() == values.bytes())
      << to_string(made.problem) << " gap " << gap;
}

/// Widths of wide chunks and of narrow ones, of one segment and of several.
constexpr int64_t kWidths[] = {8, 1, 264, 37, 1032, 2049};

TEST_F(CastOnDevice, OfRoutedRowsHasTheBitsOfTheCpu) {
  unsigned seed = 0;
  test::for_random_counts(168, 11, [&](const Counts& counts) {
    ++seed;
    if (counts.experts() > 64 && seed % 4 != 0) return;
    std::mt19937 random(seed);
    const int64_t cols = kWidths[seed / 2 % std::size(kWidths)], gap = seed % 2 == 0 ? 8 : 5;
    QuantizeCase c = QuantizeCase::rows(counts, cols, kTypes[seed / 9 % 3], gap);
    c.gap = seed % 2 == 0 ? 8 : 6;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, seed);
  });
}

TEST_F(CastOnDevice, OfWeightsHasTheBitsOfTheCpu) {
  std::mt19937 random(2);
  for (unsigned seed = 0; seed < 144; ++seed) {
    const int64_t cols = kWidths[seed / 4 % std::size(kWidths)], gap = seed % 2 == 0 ? 8 : 5;
    QuantizeCase c = QuantizeCase::weights({1 + seed % 3, 1 + int64_t(random() % 40), cols},
                                           kTypes[seed / 9 % 3], seed / 2 % 2 == 0, gap);
    c.gap = seed % 2 == 0 ? 8 : 6;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, seed);
  }
}

TEST_F(CastOnDevice, LooksAtEveryDiscretePointer) {
  // Rows lie whole chunks apart, but the first matrix begins between two of them; rows of 70
  // columns end between two.
  for (const int64_t cols : {72, 70}) {
    const QuantizeProblem p = parse_quantize_problem(
        text("quantize weights N=9 K=", cols, " E=2 source=bf16 along_k=f32 role=w discrete=yes"));
    std::mt19937 random(3);
    Tensor source(DType::kBf16, {2, 9, 80});
    source.fill(random, -2, 2);
    QuantizedCopy got({p.kind, p.rows, p.cols, p.experts, *p.along_k, Axis::kAlongK}, 80 - cols);
    test::Mirror mirror;
    TensorView from = mirror.view(source);
    const auto* first = static_cast<const uint16_t*>(from.data);
    const std::vector<const void*> pointers = {first + 3, first + 9 * 80};
    from.shape[2] = cols;
    from.data = nullptr;
    const QuantizeArgs args{.source = from,
                            .discrete = mirror.data(pointers),
                            .along_k = got.view([&](const Tensor& t) { return mirror.view(t); }),
                            .along_rows = {}};
    mirror.replay(1, [&](Stream stream) { run(plan(p, test::first_gpu()), args, {}, stream); });
    for (int64_t i = 0; i < 2 * 9 * cols; ++i) {
      const int64_t e = i / (9 * cols), row = i / cols % 9, col = i % cols;
      ASSERT_EQ(got.codes.at(e, row, col), source.at(e, row, col + (e == 0 ? 3 : 0))) << i;
    }
    EXPECT_EQ(got.damage(), "");
  }
}

TEST_F(CastOnDevice, OfEveryCodeHasTheBitsOfTheCpu) {
  std::mt19937 random(4);
  for (const DType source : kTypes)
    for (unsigned seed = 0; seed < 12; ++seed) {
      QuantizeCase c = QuantizeCase::weights({1, 256, 256}, source, false, 0);
      c.gap = 0;
      for (int i = 0; i < 256 * 256; ++i)
        if (source == DType::kF32)
          c.source.data<uint32_t>()[i] = uint32_t(random());
        else
          c.source.data<uint16_t>()[i] = uint16_t(i);
      check(c, seed);
    }
}

TEST_F(CastOnDevice, ClampsBrokenOffsetsAsTheCpuDoes) {
  std::mt19937 random(6);
  QuantizeCase c = QuantizeCase::rows({.rows = 90, .of = {20, 30, 20, 20}}, 70, DType::kBf16);
  c.source.fill(random, -2, 2);
  unsigned seed = 0;
  for (const std::vector<int32_t>& broken : {std::vector<int32_t>{-7, 50, 12, 900, 60},
                                             {90, 80, 70, 60, 50},
                                             {5, 5, 1 << 30, -1, 90},
                                             {3, 20, 40, 60, 50},
                                             {-9, -8, -7, -6, -5}}) {
    c.offsets = broken;
    check(c, seed++);
  }
}

TEST_F(CastOnDevice, WritesNothingOfTheTail) {
  std::mt19937 random(7);
  for (const int64_t cols : {64, 33}) {
    QuantizeCase c = QuantizeCase::rows({.rows = 50, .of = {0, 9, 14}}, cols, DType::kF32, 8);
    fill_values(c, ValuesKind::kNormal, random);
    const QuantizeCase::Out out = on_gpu(c.formats("bf16", "f16"));
    for (const QuantizedCopy* copy : {&out.along_k, &out.along_rows}) {
      EXPECT_FALSE(copy->codes.untouched(22, 23));
      EXPECT_TRUE(copy->codes.untouched(23, 50));
      EXPECT_EQ(copy->damage(), "");
    }
  }
}

TEST_F(CastOnDevice, OfNothingIsLegal) {
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{0, 33}, {7, 0}}) {
    QuantizeCase c = QuantizeCase::rows({.rows = rows, .of = {rows, 0}}, cols, DType::kBf16);
    check(c, 0);
    QuantizeCase flat = QuantizeCase::weights({2, rows, cols}, DType::kBf16);
    check(flat, 0);
  }
}

TEST_F(CastOnDevice, OfMoreExpertsThanAGridHoldsWalks) {
  std::mt19937 random(8);
  QuantizeCase c = QuantizeCase::weights({1'030, 2, 3}, DType::kF32);
  fill_values(c, ValuesKind::kNormal, random);
  check(c, 1);
}

// Planning for a GPU works without one.
TEST(CastOnDevicePlan, RefusesWhatIsNoCast) {
  const auto refusal = [](auto problem, int sm) {
    const std::string words = test::unsupported(
        [&] { plan(problem, {.kind = DeviceKind::kCuda, .sm = sm}, "cuda_cast"); });
    return words.substr(words.rfind('\n') + 1);
  };
  const auto quantise = [](const std::string& formats) {
    return parse_quantize_problem("quantize rows R=8 C=4 E=2 source=bf16 " + formats + " role=x");
  };
  const auto dequantise = [](const std::string& format) {
    return parse_dequantize_problem("dequantize rows R=8 C=4 E=2 format=" + format +
                                    " axis=along_k out=f32");
  };
  const std::string only = ", and only f32, bf16 and f16 are casts";
  EXPECT_EQ(refusal(quantise("along_k=mxfp8"), 90), "  cuda_cast: along_k is mxfp8" + only);
  EXPECT_EQ(refusal(quantise("along_k=bf16 along_rows=nvfp4:2d"), 90),
            "  cuda_cast: along_rows is nvfp4:2d" + only);
  EXPECT_EQ(refusal(dequantise("fp8_tensor"), 90), "  cuda_cast: format is fp8_tensor" + only);
  EXPECT_EQ(refusal(quantise("along_k=bf16"), 75), "  cuda_cast: needs sm_80 or later, has sm_75");
  EXPECT_EQ(refusal(quantise("along_rows=f16"), 75),
            "  cuda_cast: needs sm_80 or later, has sm_75");
  EXPECT_EQ(refusal(dequantise("f32"), 75), "  cuda_cast: needs sm_80 or later, has sm_75");
}

}  // namespace
}  // namespace cadre
