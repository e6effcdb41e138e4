// Quantising and dequantising on the GPU have the bits of the CPU's, tails and gaps included.
#include <cuda_runtime_api.h>

#include "tests/cuda/quantize_on_device.h"
#include "tests/judge/errors.h"
#include "tests/ops/quantize_gather.h"

namespace cadre {
namespace {

using test::choose;
using test::Counts;
using test::FormatPair;
using test::gpu;
using test::on_gpu;
using test::QuantizeCase;
using test::QuantizedCopy;
using test::Tensor;
using test::units_of_gpu;
using test::ValuesKind;

constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
/// Widths of wide chunks and of narrow ones, within one tile and of several.
constexpr int64_t kWidths[] = {8, 1, 136, 37, 264, 300};
const std::vector<FormatPair> kPairs = test::format_pairs(), kRaggedPairs = test::ragged_pairs();
using QuantizeOnDevice = test::OnDevice;

/// Equal bytes, but for the payload of a NaN in f32, which GPUs do not keep.
bool same_values(const Tensor& a, const Tensor& b) {
  if (a.bytes() == b.bytes()) return true;
  if (a.view().dtype != DType::kF32) return false;
  const auto words = [](const Tensor& t, size_t i) {
    float value = 0;
    std::memcpy(&value, t.bytes().data() + 4 * i, 4);
    return value;
  };
  for (size_t i = 0; i < a.bytes().size() / 4; ++i) {
    const float x = words(a, i), y = words(b, i);
    if (std::memcmp(&x, &y, 4) != 0 && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

void expect_same_values(const QuantizedCopy& copy, const std::vector<int32_t>& offsets, DType out,
                        int64_t gap) {
  const auto values = [&](const Device& device, auto&& at, auto&& list, auto&& go) {
    const DequantizePlan made = plan(DequantizeProblem{copy.shape, out}, device);
    Tensor tensor = test::values_like(copy, out, gap);
    DequantizeArgs args{.source = copy.view(at), .offsets = {}, .out = at(tensor)};
    if (copy.shape.kind == RowsKind::kRagged) args.offsets = {list(offsets), copy.shape.experts};
    go([&](Stream stream) { run(made, args, {}, stream); });
    return tensor;
  };
  const Tensor want = values(
      this_cpu(), [](const Tensor& t) { return t.view(); }, [](auto& list) { return list.data(); },
      [](auto&& work) { work(Stream{}); });
  test::Mirror mirror;
  const Tensor got = values(
      gpu(), [&](const Tensor& t) { return mirror.view(t); },
      [&](auto& list) { return mirror.data(list); }, [&](auto&& work) { mirror.replay(1, work); });
  ASSERT_TRUE(same_values(got, want))
      << to_string(DequantizeProblem{copy.shape, out}) << " gap " << gap;
}

/// Both copies back again.
void check_values(const QuantizeCase& c, const QuantizeCase::Out& copies, DType out, int64_t gap) {
  for (const QuantizedCopy* copy : {&copies.along_k, &copies.along_rows})
    if (copy->shape.rows != 0) expect_same_values(*copy, c.offsets, out, gap);
}

void check(QuantizeCase& c, const FormatPair& pair, unsigned seed) {
  choose(c, pair, seed);
  const QuantizeCase::Out want = c.run("cpu"), got = on_gpu(c);
  const std::string what = to_string(c.problem) + text(" gap ", c.gap);
  ASSERT_TRUE(got.along_k.codes.bytes() == want.along_k.codes.bytes()) << what;
  ASSERT_TRUE(got.along_k.scales.bytes() == want.along_k.scales.bytes()) << what;
  ASSERT_TRUE(got.along_rows.codes.bytes() == want.along_rows.codes.bytes()) << what;
  ASSERT_TRUE(got.along_rows.scales.bytes() == want.along_rows.scales.bytes()) << what;
  ASSERT_TRUE(got == want) << what << ", expert scales";
  check_values(c, want, kTypes[seed / 2 % 3], c.gap % 8 == 0 ? 8 : 3);
}

TEST_F(QuantizeOnDevice, OfRoutedRowsHasTheBitsOfTheCpu) {
  unsigned seed = 0;
  test::for_random_counts(test::sized(1344, 112), 11, [&](const Counts& counts) {
    ++seed;
    if (counts.experts() > 64 && seed % 8 != 0) return;
    std::mt19937 random(seed);
    const int64_t cols = kWidths[seed / 2 % std::size(kWidths)], gap = seed % 2 == 0 ? 8 : 5;
    QuantizeCase c = QuantizeCase::rows(counts, cols, kTypes[seed / 9 % 3], gap);
    c.gap = seed % 2 == 0 ? 8 : 6;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, seed % 5 == 0 ? kRaggedPairs[seed / 5 % 2] : kPairs[seed % kPairs.size()], seed);
  });
}

/// Blocks within rows, in wide chunks and along K alone, have a kernel of their own.
TEST_F(QuantizeOnDevice, AlongKAloneHasTheBitsOfTheCpu) {
  constexpr int64_t kWide[] = {8, 136, 264, 520, 768};
  std::mt19937 random(12);
  unsigned seed = 0;
  test::for_random_counts(test::sized(240, 48), 13, [&](const Counts& counts) {
    const char* words = test::kWithinRows[seed % std::size(test::kWithinRows)];
    QuantizeCase c =
        QuantizeCase::rows(counts, kWide[seed / 3 % std::size(kWide)], kTypes[seed % 3], 8);
    c.gap = seed % 4 == 3 ? 6 : 8;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, {words, ""}, 4 * seed++);
  });
}

/// Blocks of 32 along rows, or both ways, of bf16 in wide chunks have a kernel of their own: rows
/// that fill its parts, and others.
TEST_F(QuantizeOnDevice, ByWarpsHasTheBitsOfTheCpu) {
  constexpr int64_t kWide[] = {8, 24, 64, 136, 520};
  constexpr const char* kFormats[] = {"mxfp8", "mxfp8:e5m2", "mxfp8:floor", "mxfp4", "mxfp4:floor"};
  std::mt19937 random(16);
  unsigned seed = 0;
  const auto each = [&](QuantizeCase c) {
    const char* words = kFormats[seed % std::size(kFormats)];
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    c.formats(seed % 3 == 0 ? "" : words, words);
    c.gap = seed % 4 == 3 ? 6 : 8;  // whole words of codes, or not
    units_of_gpu = seed % 2 == 0 ? 1 : 0;
    ++seed;
    const QuantizeCase::Out want = c.run("cpu"), got = on_gpu(c);
    ASSERT_TRUE(got == want) << to_string(c.problem) << " gap " << c.gap;
    EXPECT_EQ(got.along_k.damage() + got.along_rows.damage(), "");
  };
  test::for_random_counts(test::sized(240, 60), 17, [&](const Counts& counts) {
    each(QuantizeCase::rows(counts, kWide[seed / 5 % std::size(kWide)], DType::kBf16, 8));
  });
  for (unsigned i = 0; i < test::sized(120u, 30u); ++i) {
    const int64_t rows = 1 + int64_t(random() % 90);
    each(QuantizeCase::weights({1 + i % 4, rows, kWide[i % std::size(kWide)]}, DType::kBf16, false,
                               8));
  }
  units_of_gpu = 0;
}

/// Where blocks have many tiles they take some side by side at once.
TEST_F(QuantizeOnDevice, OfWideStripsHasTheBitsOfTheCpu) {
  std::mt19937 random(14);
  units_of_gpu = 1;
  unsigned seed = 0;
  const auto each = [&](const FormatPair& pair) {
    const bool ragged = pair.along_rows.find("rht") != std::string::npos || seed % 2 == 0;
    const DType type = seed % 5 == 0 ? DType::kF32 : DType::kBf16;
    QuantizeCase c = ragged
                         ? QuantizeCase::rows({.rows = 420, .of = {5, 0, 250, 129}}, 1304, type, 8)
                         : QuantizeCase::weights({2, 300, 1304}, type, seed % 4 == 1, 8);
    c.gap = 8;
    fill_values(c, ValuesKind::kNormal, random);
    check(c, pair, 4 * seed++);
  };
  for (const char* words : {"mxfp8", "fp8_block", "fp8_block:2d", "mxfp8:2d", "nvfp4", "fp8_tensor",
                            "fp8_row", "mxfp4"})
    for (int i = 0; i < 2; ++i) each({words, words});
  for (const FormatPair& pair : kRaggedPairs) each(pair);
  units_of_gpu = 0;
}

/// More than one tile down, and blocks that no tile begins with.
TEST_F(QuantizeOnDevice, OfEveryFormatHasTheBitsOfTheCpu) {
  std::mt19937 random(1);
  unsigned seed = 0;
  const auto each = [&](const FormatPair& pair) {
    QuantizeCase c = QuantizeCase::rows({.rows = 300, .of = {5, 0, 150, 129}}, 144,
                                        kTypes[seed % 3], seed % 2 == 0 ? 8 : 5);
    c.gap = seed % 2 == 0 ? 8 : 6;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, pair, 4 * seed);
    ++seed;
  };
  for (const FormatPair& pair : kPairs) each(pair);
  for (const FormatPair& pair : kRaggedPairs) each(pair);
}

/// Tokens for one tile and for several, of wide chunks and of narrow ones.
TEST_F(QuantizeOnDevice, OfGatheredRowsHasTheBitsOfACopyOfThem) {
  unsigned seed = 0;
  const auto check_both = [&](const Counts& counts, const FormatPair& pair) {
    std::mt19937 random(++seed);
    const int64_t tokens = 1 + int64_t(random() % 90), cols = kWidths[seed % std::size(kWidths)];
    QuantizeCase c = QuantizeCase::rows({.rows = tokens, .of = {tokens}}, cols,
                                        kTypes[seed / 2 % 3], seed % 2 == 0 ? 8 : 5);
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    c = test::gathered(c, counts, 1 + int(seed % 3), random);
    c.formats(seed % 4 == 1 ? "" : pair.along_k, seed % 4 == 2 ? "" : pair.along_rows);
    if (seed % 8 >= 4)
      for (Major* order : test::orders_of(c)) *order = Major::kColumn;
    const QuantizeCase::Out want = test::permuted(c).run("cpu"), got = on_gpu(c);
    ASSERT_TRUE(got == want) << to_string(c.problem);
    EXPECT_EQ(got.along_k.damage() + got.along_rows.damage(), "");
  };
  for (const FormatPair& pair : kPairs) check_both({.rows = 300, .of = {5, 0, 150, 129}}, pair);
  for (const FormatPair& pair : kRaggedPairs) check_both({.rows = 300, .of = {0, 131, 150}}, pair);
  test::for_random_counts(test::sized(224, 56), 12, [&](const Counts& counts) {
    check_both(counts, kPairs[seed % kPairs.size()]);
  });
}

TEST_F(QuantizeOnDevice, OfWeightsHasTheBitsOfTheCpu) {
  std::mt19937 random(2);
  for (unsigned seed = 0; seed < test::sized(720u, 180u); ++seed) {
    const int64_t cols = kWidths[seed / 4 % std::size(kWidths)], gap = seed % 2 == 0 ? 8 : 5;
    const int64_t rows = seed % 8 == 7 ? 120 + int64_t(random() % 80) : 1 + int64_t(random() % 70);
    QuantizeCase c = QuantizeCase::weights({1 + seed % 3, rows, cols}, kTypes[seed / 9 % 3],
                                           seed / 2 % 2 == 0, gap);
    c.gap = seed % 2 == 0 ? 8 : 6;
    fill_values(c, ValuesKind(seed % test::kValuesKinds), random);
    check(c, kPairs[seed % kPairs.size()], seed);
  }
}

TEST_F(QuantizeOnDevice, LooksAtEveryDiscretePointer) {
  // Rows lie whole chunks apart, but the first matrix begins between two of them.
  const QuantizeProblem p = parse_quantize_problem(
      "quantize weights N=9 K=72 E=2 source=bf16 along_k=mxfp8 role=w discrete=yes");
  std::mt19937 random(3);
  Tensor source(DType::kBf16, {2, 9, 80});
  source.fill(random, -2, 2);
  const auto quantised = [&](const Device& device, TensorView from, auto&& list, auto&& at,
                             auto&& go) {
    const auto* first = static_cast<const uint16_t*>(from.data);
    const std::vector<const void*> pointers = {first + 3, first + 9 * 80};
    from.shape[2] = 72;
    from.data = nullptr;
    QuantizedCopy copy(copy_shape(p, Axis::kAlongK), 8);
    const QuantizeArgs args{
        .source = from, .discrete = list(pointers), .along_k = copy.view(at), .along_rows = {}};
    go([&](Stream stream) { run(plan(p, device), args, {}, stream); });
    return copy;
  };
  test::Mirror mirror;
  const QuantizedCopy got = quantised(
      test::first_gpu(), mirror.view(source), [&](auto& list) { return mirror.data(list); },
      [&](const Tensor& t) { return mirror.view(t); },
      [&](auto&& work) { mirror.replay(1, work); });
  const QuantizedCopy want = quantised(
      this_cpu(), source.view(), [](auto& list) { return list.data(); },
      [](const Tensor& t) { return t.view(); }, [](auto&& work) { work(Stream{}); });
  EXPECT_TRUE(got == want);
}

TEST_F(QuantizeOnDevice, ClampsBrokenOffsetsAsTheCpuDoes) {
  std::mt19937 random(6);
  QuantizeCase c = QuantizeCase::rows({.rows = 90, .of = {20, 30, 20, 20}}, 72, DType::kBf16);
  fill_values(c, ValuesKind::kNormal, random);
  unsigned seed = 0;
  for (const std::vector<int32_t>& broken : {std::vector<int32_t>{-7, 50, 12, 900, 60},
                                             {90, 80, 70, 60, 50},
                                             {5, 5, 1 << 30, -1, 90},
                                             {3, 20, 40, 60, 50},
                                             {-9, -8, -7, -6, -5}}) {
    c.offsets = broken;
    for (const char* words : {"mxfp8", "fp8_block:2d", "nvfp4:2d", "fp8_tensor", "fp8_row"})
      check(c, {words, words}, 4 * seed++);
    for (const FormatPair& pair : kRaggedPairs) check(c, pair, 4 * seed++);
    for (const char* words : test::kWithinRows) check(c, {words, ""}, 4 * seed++);
  }
}

TEST_F(QuantizeOnDevice, OfNothingIsLegal) {
  for (const FormatPair& pair : kPairs)
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{0, 33}, {7, 0}}) {
      QuantizeCase c = QuantizeCase::rows({.rows = rows, .of = {rows, 0}}, cols, DType::kBf16);
      check(c, pair, 0);
      check(c, {"mxfp8", ""}, 0);
      QuantizeCase flat = QuantizeCase::weights({2, rows, cols}, DType::kBf16);
      check(flat, pair, 0);
    }
}

TEST_F(QuantizeOnDevice, OfManyExpertsHasScalesForAll) {
  std::mt19937 random(8);
  QuantizeCase c = QuantizeCase::weights({600, 2, 3}, DType::kF32);
  fill_values(c, ValuesKind::kNormal, random);
  check(c, {"fp8_tensor", "fp8_tensor"}, 0);
}

TEST_F(QuantizeOnDevice, ReplaysWithTheSameBits) {
  std::mt19937 random(9);
  QuantizeCase c = QuantizeCase::rows({.rows = 200, .of = {90, 0, 100}}, 72, DType::kBf16);
  fill_values(c, ValuesKind::kHugeAmongTiny, random);
  for (const FormatPair& pair : kRaggedPairs) {
    c.formats(pair.along_k, pair.along_rows);
    EXPECT_TRUE(on_gpu(c, 2) == c.run("cpu"));
  }
}

/// A warp decodes eight rows and 256 columns at a time, or 64 and 32 where it turns them: full
/// parts and others, of every format, with whole words of codes and chunks of values or not.
TEST_F(QuantizeOnDevice, DecodesPartsThatAreNotFull) {
  std::mt19937 random(15);
  units_of_gpu = 1;
  unsigned seed = 0;
  const auto each = [&](QuantizeCase c, const FormatPair& pair) {
    fill_values(c, ValuesKind::kNormal, random);
    choose(c, pair, 4 * seed);
    for (const int64_t of_codes : {8, 6}) {
      c.gap = of_codes;
      const QuantizeCase::Out copies = c.run("cpu");
      for (const int64_t of_values : {8, 3}) check_values(c, copies, kTypes[seed++ % 3], of_values);
    }
  };
  const Counts counts{.rows = 90, .of = {5, 0, 8, 17, 0, 1, 33}};
  for (const int64_t cols : {264, 37}) {
    for (const FormatPair& pair : kPairs) {
      each(QuantizeCase::rows(counts, cols, DType::kBf16), pair);
      each(QuantizeCase::weights({3, 72, cols}, DType::kBf16), pair);
      each(QuantizeCase::weights({2, 67, cols}, DType::kBf16), pair);
    }
    for (const FormatPair& pair : kRaggedPairs)
      each(QuantizeCase::rows(counts, cols, DType::kBf16), pair);
  }
  units_of_gpu = 0;
}

/// Codes that quantising never writes are decoded too.
TEST_F(QuantizeOnDevice, DecodesEveryCodeAndScale) {
  std::mt19937 random(10);
  for (const FormatInfo& format : format_list()) {
    if (is_plain_float(format.element)) continue;
    QuantizedCopy copy({.kind = RowsKind::kWeights,
                        .rows = 64,
                        .cols = 256,
                        .experts = 1,
                        .format = cadre::format(format.kind)},
                       0);
    for (const Tensor* part : {&copy.codes, &copy.scales}) {
      const TensorView v = part->view();
      auto* bytes = static_cast<uint8_t*>(v.data);
      const int64_t end = part->bytes().empty() ? 0 : (v[1] - 1) * v.stride[1] + v[2];
      for (int64_t i = 0; i < bytes_for(v.dtype, end); ++i)
        if (v.dtype != DType::kF32) bytes[i] = uint8_t(i * 167);
    }
    if (format.kind == FormatKind::kFp8Block || format.kind == FormatKind::kFp8Row)
      copy.scales.fill(random, -4, 4);
    if (!copy.expert_scale.bytes().empty()) copy.expert_scale.data<float>()[0] = 0.37f;
    for (const DType out : kTypes) expect_same_values(copy, {}, out, 0);
  }
}

#ifndef CADRE_EMULATED
/// Zeroed memory of the GPU.
class DeviceMemory {
 public:
  ~DeviceMemory() {
    for (void* data : taken_) cudaFree(data);
  }
  void* take(int64_t bytes) {
    taken_.push_back(nullptr);
    cuda::check(cudaMalloc(&taken_.back(), size_t(bytes)), "allocate");
    cuda::check(cudaMemset(taken_.back(), 0, size_t(bytes)), "clear");
    return taken_.back();
  }

 private:
  std::vector<void*> taken_;
};

void copy(void* to, const void* from, int64_t bytes) {
  cuda::check(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyDefault), "copy");
}

/// The last expert's rows lie beyond 2^31 elements of the source and of the codes.
TEST_F(QuantizeOnDevice, BeyondTwoToThe31Elements) {
  constexpr int64_t kCols = 4096, kRows = (int64_t(1) << 31) / kCols + 300, kLast = 200;
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < size_t(16) << 30) GTEST_SKIP() << "needs 16 GiB";
  std::mt19937 random(11);
  QuantizeCase last = QuantizeCase::rows({.rows = kLast, .of = {kLast}}, kCols, DType::kBf16, 0);
  last.gap = 0;
  fill_values(last, ValuesKind::kNormal, random);
  const QuantizeCase::Out want = last.formats("mxfp8", "mxfp8").run("cpu");

  const QuantizeProblem p = parse_quantize_problem(text(
      "quantize rows R=", kRows, " C=", kCols, " E=2 source=bf16 along_k=mxfp8 along_rows=mxfp8"));
  DeviceMemory memory;
  auto* source = static_cast<uint16_t*>(memory.take(kRows * kCols * 2));
  copy(source + (kRows - kLast) * kCols, last.source.view().data, kLast * kCols * 2);
  const std::vector<int32_t> ends = {0, int32_t(kRows - kLast), int32_t(kRows)};
  auto* offsets = static_cast<int32_t*>(memory.take(12));
  copy(offsets, ends.data(), 12);
  QuantizeArgs args{.source = view(source, DType::kBf16, {kRows, kCols}), .offsets = {offsets, 2}};
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows}) {
    const QuantizedShape shape = copy_shape(p, axis);
    (axis == Axis::kAlongK ? args.along_k : args.along_rows) =
        quantized_view(shape, memory.take(quantized_bytes(shape)));
  }
  run(plan(p, test::first_gpu()), args, {}, {});

  std::vector<uint8_t> codes(kLast * kCols);
  for (const bool along_k : {true, false}) {
    const QuantizedView& got = along_k ? args.along_k : args.along_rows;
    copy(codes.data(), static_cast<uint8_t*>(got.codes.data) + (kRows - kLast) * kCols,
         kLast * kCols);
    const QuantizedCopy& of = along_k ? want.along_k : want.along_rows;
    EXPECT_EQ(std::memcmp(codes.data(), of.codes.view().data, codes.size()), 0)
        << (along_k ? "along K" : "along rows");
  }
}
#endif

// Planning for a GPU works without one.
TEST(QuantizeOnDevicePlan, IsOfTheCastWhereBothCopiesAreOne) {
  const auto name_of = [](const std::string& formats) {
    return plan(parse_quantize_problem("quantize rows R=8 C=4 E=2 source=bf16 " + formats),
                parse_device("sm_90"))
        .name;
  };
  EXPECT_EQ(name_of("along_k=f32 along_rows=f16"), "cuda_cast");
  EXPECT_EQ(name_of("along_k=f32 along_rows=mxfp8"), "cuda_quantize");
  EXPECT_EQ(name_of("along_rows=nvfp4:rht"), "cuda_quantize");
}

TEST(QuantizeOnDevicePlan, RefusesOldGpus) {
  const auto refusal = [](auto problem) {
    const std::string words =
        test::unsupported([&] { plan(problem, {.kind = DeviceKind::kCuda, .sm = 75}); });
    return words.substr(words.rfind('\n') + 1);
  };
  EXPECT_EQ(refusal(parse_quantize_problem("quantize rows R=8 C=4 E=2 along_k=mxfp8")),
            "  cuda_quantize: needs sm_80 or later, has sm_75");
  EXPECT_EQ(refusal(parse_dequantize_problem("dequantize rows R=8 C=4 E=2 format=mxfp8")),
            "  cuda_dequantize: needs sm_80 or later, has sm_75");
}

TEST(QuantizeOnDevicePlan, RefusesWhatIsACast) {
  const auto refusal = [](auto problem, int sm, std::string_view only) {
    const std::string words =
        test::unsupported([&] { plan(problem, {.kind = DeviceKind::kCuda, .sm = sm}, only); });
    return words.substr(words.rfind('\n') + 1);
  };
  const auto quantise = [&](const std::string& formats, int sm = 90) {
    const auto p = parse_quantize_problem("quantize rows R=8 C=4 E=2 " + formats);
    return refusal(p, sm, "cuda_quantize");
  };
  const auto dequantise = [&](std::string_view format, int sm = 90) {
    const auto p = parse_dequantize_problem(text("dequantize rows R=8 C=4 E=2 format=", format));
    return refusal(p, sm, "cuda_dequantize");
  };
  const std::string of_copies = "  cuda_quantize: no copy is quantised; cuda_cast takes it";
  for (const std::string format : {"f32", "bf16", "f16"}) {
    EXPECT_EQ(quantise("along_k=" + format), of_copies);
    EXPECT_EQ(quantise("along_rows=" + format), of_copies);
    EXPECT_EQ(quantise("along_k=bf16 along_rows=" + format), of_copies);
    EXPECT_EQ(dequantise(format),
              "  cuda_dequantize: the source is not quantised; cuda_cast takes it");
  }
  // Nor does the cast take it there.
  EXPECT_EQ(quantise("along_k=bf16", 75), "  cuda_quantize: needs sm_80 or later, has sm_75");
  EXPECT_EQ(dequantise("bf16", 75), "  cuda_dequantize: needs sm_80 or later, has sm_75");
}

}  // namespace
}  // namespace cadre
