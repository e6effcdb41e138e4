// The layout of codes and scales: shapes as the header states them, parts that do not overlap, and
// room for every block of every expert whatever the counts.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cadre/error.h"
#include "cadre/quantize.h"
#include "tests/judge/errors.h"

using namespace cadre;

namespace {

QuantizedShape rows_of(const char* format, Axis axis, int64_t rows, int64_t cols, int experts) {
  return {RowsKind::kRagged, rows, cols, experts, parse_format(format), axis};
}
QuantizedShape weights_of(const char* format, Axis axis, int64_t n, int64_t k, int experts) {
  return {RowsKind::kWeights, n, k, experts, parse_format(format), axis};
}
std::string words(const QuantizedShape& shape) {
  const QuantizedView q = quantized_view(shape, nullptr);
  return q.scales.rank == 0 ? to_string(q.codes)
                            : text(to_string(q.codes), " ", to_string(q.scales));
}

// Lengths near 2^31 and 2^63, every format and order: refused in words, or counted.
TEST(QuantizedView, OfAnySizesIsCountedOrRefused) {
  constexpr int64_t kOne = 1;
  constexpr int64_t kLengths[] = {-1,         0,          1,          130,        (kOne << 31) - 1,
                                  kOne << 31, kOne << 43, kOne << 44, kOne << 62, INT64_MAX};
  constexpr int kExperts[] = {INT32_MIN, 0, 1, 3, (1 << 24) - 1, 1 << 24, INT32_MAX};
  int counted = 0;
  for (const FormatInfo& row : format_list())
    for (const int64_t rows : kLengths)
      for (const int64_t cols : kLengths)
        for (const int experts : kExperts)
          for (int order = 0; order < 16; ++order) {
            QuantizedShape s{RowsKind(order & 1), rows, cols, experts, format(row.kind)};
            s.axis = Axis(order >> 1 & 1);
            s.codes_major = Major(order >> 2 & 1);
            s.scales_major = Major(order >> 3 & 1);
            const std::string why = test::invalid([&] {
              EXPECT_GE(quantized_bytes(s), 0);
              ++counted;
            });
            EXPECT_TRUE(why == "nothing was thrown" ||
                        why.find("and at most 2^44 elements") != why.npos)
                << why;
          }
  EXPECT_GT(counted, 1000);
}

TEST(QuantizedView, HasTheShapesOfTheHeader) {
  const Axis k = Axis::kAlongK, r = Axis::kAlongRows;
  EXPECT_EQ(words(rows_of("bf16", k, 70, 50, 3)), "bf16[70, 50]");
  EXPECT_EQ(words(rows_of("fp8_tensor:e5m2", r, 70, 50, 3)), "e5m2[70, 50]");
  EXPECT_EQ(words(rows_of("mxfp8", k, 70, 50, 3)), "e4m3[70, 50] e8m0[70, 2]");
  EXPECT_EQ(words(rows_of("mxfp8", r, 70, 50, 3)), "e4m3[70, 50] e8m0[5, 50]");
  EXPECT_EQ(words(rows_of("mxfp8:2d", r, 70, 50, 3)), "e4m3[70, 50] e8m0[5, 2]");
  EXPECT_EQ(words(rows_of("fp8_block", r, 300, 50, 3)), "e4m3[300, 50] f32[5, 50]");
  EXPECT_EQ(words(rows_of("nvfp4", k, 70, 50, 3)), "e2m1[70, 50] e4m3[70, 4]");
  EXPECT_EQ(words(rows_of("nvfp4:rht", k, 70, 50, 3)), "e2m1[70, 50] e4m3[70, 4]");
  EXPECT_EQ(words(rows_of("nvfp4:rht", r, 70, 50, 3)), "e2m1[112, 50] e4m3[7, 50]");
  EXPECT_EQ(words(weights_of("mxfp4", k, 70, 50, 3)), "e2m1[3, 70, 50] e8m0[3, 70, 2]");
  EXPECT_EQ(words(weights_of("mxfp4", r, 70, 50, 3)), "e2m1[3, 70, 50] e8m0[3, 3, 50]");
  EXPECT_EQ(words(weights_of("fp8_block:2d", r, 300, 50, 3)), "e4m3[3, 300, 50] f32[3, 3, 1]");
}

TEST(QuantizedView, StartsEveryRowOfNibblesAtAByte) {
  EXPECT_EQ(words(rows_of("nvfp4", Axis::kAlongK, 7, 5, 1)),
            "e2m1[7, 5] strides (6, 1) e4m3[7, 1]");
  EXPECT_EQ(words(weights_of("nvfp4", Axis::kAlongK, 7, 5, 2)),
            "e2m1[2, 7, 5] strides (42, 6, 1) e4m3[2, 7, 1]");
}

TEST(QuantizedView, ColumnsOfCodesLieAlongTheRowsOfTheSource) {
  QuantizedShape s = weights_of("mxfp8", Axis::kAlongRows, 70, 50, 3);
  s.codes_major = Major::kColumn;
  EXPECT_EQ(words(s), "e4m3[3, 70, 50] strides (3500, 1, 70) e8m0[3, 3, 50]");
  s = weights_of("nvfp4", Axis::kAlongRows, 7, 5, 2);  // every column starts at a byte
  s.codes_major = Major::kColumn;
  EXPECT_EQ(words(s), "e2m1[2, 7, 5] strides (40, 1, 8) e4m3[2, 1, 5]");
  EXPECT_EQ(quantized_bytes(s), 3 * 256);
}

TEST(QuantizedView, ColumnsOfScalesTakeMultiplesOf16Bytes) {
  const auto turned = [](QuantizedShape s) {
    s.scales_major = Major::kColumn;
    return s;
  };
  const Axis k = Axis::kAlongK, r = Axis::kAlongRows;
  EXPECT_EQ(words(turned(rows_of("fp8_block", k, 70, 300, 3))),
            "e4m3[70, 300] f32[70, 3] strides (1, 72)");
  EXPECT_EQ(words(turned(rows_of("fp8_block", k, 72, 300, 3))),
            "e4m3[72, 300] f32[72, 3] strides (1, 72)");
  EXPECT_EQ(words(turned(rows_of("mxfp8", k, 70, 50, 3))),
            "e4m3[70, 50] e8m0[70, 2] strides (1, 80)");
  EXPECT_EQ(words(turned(weights_of("nvfp4", k, 70, 50, 3))),
            "e2m1[3, 70, 50] e4m3[3, 70, 4] strides (320, 1, 80)");
  EXPECT_EQ(words(turned(weights_of("fp8_block:2d", r, 300, 500, 3))),
            "e4m3[3, 300, 500] f32[3, 3, 4] strides (16, 1, 4)");
  EXPECT_EQ(quantized_bytes(turned(rows_of("fp8_block", k, 70, 300, 3))), 21248 + 1024);
  EXPECT_EQ(quantized_bytes(turned(rows_of("fp8_block", k, 0, 300, 3))), 0);
}

/// Bytes from the first element to behind the last, in lines of whole pitches.
int64_t extent(const TensorView& v) {
  int64_t end = 0;
  for (int d = 0; d < v.rank; ++d) end = std::max(end, v[d] * v.stride[d]);
  return bytes_for(v.dtype, end);
}

void expect_parts_fit(const QuantizedShape& s) {
  alignas(256) static char buffer[1 << 16];
  const FormatInfo& row = info(s.format.kind);
  SCOPED_TRACE(text(row.name, s.codes_major == Major::kColumn ? " column codes" : "",
                    s.scales_major == Major::kColumn ? " column scales" : ""));
  const QuantizedView q = quantized_view(s, buffer);
  char* end = buffer;
  const auto take = [&](void* part, int64_t bytes) {
    EXPECT_GE(static_cast<char*>(part), end);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(part) % 256, 0u);
    end = static_cast<char*>(part) + bytes;
  };
  take(q.codes.data, extent(q.codes));
  EXPECT_EQ(q.scales.data != nullptr, row.block != 0);
  if (q.scales) take(q.scales.data, extent(q.scales));
  EXPECT_EQ(q.expert_scale != nullptr, row.has_expert_scale);
  if (q.expert_scale) take(q.expert_scale, 3 * 4);
  EXPECT_LE(end - buffer, quantized_bytes(s));
  EXPECT_LT(quantized_bytes(s) - (end - buffer), 256);
}

TEST(QuantizedView, PartsAreAlignedDisjointAndWithinTheBuffer) {
  for (const FormatInfo& row : format_list())
    for (const RowsKind kind : {RowsKind::kRagged, RowsKind::kWeights})
      for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows})
        for (const Major codes : {Major::kRow, Major::kColumn})
          for (const Major scales : {Major::kRow, Major::kColumn})
            expect_parts_fit({kind, 70, 51, 3, format(row.kind), axis, codes, scales});
}

TEST(QuantizedView, BlocksAlongRowsOfAllExpertsFitAndDoNotOverlap) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const int experts = 1 + int(random() % 9);
    const int64_t block = trial % 2 ? 16 : 128;
    std::vector<int64_t> counts(experts);
    int64_t total = 0;
    for (int64_t& count : counts) total += count = random() % 3 ? int64_t(random() % 300) : 0;
    const int64_t bound = total + int64_t(random() % 2) * int64_t(random() % 40);
    int64_t row = 0, free = 0, free_code_row = 0;
    const Format f = parse_format("nvfp4:rht");
    for (int e = 0; e < experts; ++e) {
      const int64_t first = first_block(row, e, block);
      ASSERT_GE(first, free);
      free = first + (counts[e] + block - 1) / block;
      const CodeRows codes = code_rows(f, Axis::kAlongRows, {row, counts[e]}, e);
      ASSERT_GE(codes.first, free_code_row);
      ASSERT_GE(codes.count, counts[e]);
      free_code_row = codes.first + codes.count;
      row += counts[e];
    }
    ASSERT_LE(free, first_block(bound, experts, block));
    ASSERT_LE(free_code_row, 16 * first_block(bound, experts, 16));
  }
}

TEST(QuantizedView, CodeRowsAreTheRowsUnlessTransformed) {
  const Format rht = parse_format("nvfp4:rht"), mx = parse_format("mxfp8");
  EXPECT_EQ(code_rows(mx, Axis::kAlongRows, {33, 7}, 2).first, 33);
  EXPECT_EQ(code_rows(rht, Axis::kAlongK, {33, 7}, 2).count, 7);
  EXPECT_EQ(code_rows(rht, Axis::kAlongRows, {33, 7}, 2).first, 16 * 4);
  EXPECT_EQ(code_rows(rht, Axis::kAlongRows, {33, 7}, 2).count, 16);
  EXPECT_EQ(code_rows(rht, Axis::kAlongRows, {33, 0}, 2).count, 0);
}

}  // namespace
