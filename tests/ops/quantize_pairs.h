#pragma once
#include <string>
#include <vector>

#include "tests/judge/formats.h"
#include "tests/ops/quantize_case.h"

// What tests of quantising go through: formats of two copies, and orders of them.
namespace cadre::test {

/// Pairs of a copy along K and one along rows; every format and option is in each column.
struct FormatPair {
  std::string along_k, along_rows;
};

/// Every format beside itself, and pairs that share a pass.
inline std::vector<FormatPair> format_pairs() {
  std::vector<FormatPair> all = {{"f32", "bf16"},
                                 {"bf16", "f16"},
                                 {"f16", "f32"},
                                 {"fp8_tensor", "fp8_tensor:e5m2"},
                                 {"fp8_tensor:e5m2+pow2", "fp8_tensor:pow2"},
                                 {"fp8_row", "fp8_row"},
                                 {"fp8_row:e5m2+pow2", "fp8_row"},
                                 {"mxfp8", "fp8_row"},
                                 {"fp8_block:e5m2", "fp8_block:e5m2+fp32"},
                                 {"fp8_block:fp32", "fp8_block:2d"},
                                 {"fp8_block:2d", "fp8_block:2d+fp32"},
                                 {"mxfp8:e5m2", "mxfp8:e5m2+floor"},
                                 {"mxfp8:floor", "mxfp8:2d"},
                                 {"mxfp8:2d", "mxfp8:2d+floor"},
                                 {"nvfp4:2d+sr", "nvfp4:2d+sr"},
                                 {"mxfp8", "fp8_block"},  // blocks of different lengths
                                 {"fp8_block:2d", "nvfp4"}};
  for (const std::string& words : every_format([](const Format& f) { return !f.hadamard; }))
    all.push_back({words, words});
  return all;
}
/// Formats whose blocks lie within rows, and need no amax of an expert.
inline constexpr const char* kWithinRows[] = {"fp8_block", "fp8_block:e5m2", "fp8_block:fp32",
                                              "mxfp8",     "mxfp8:e5m2",     "mxfp8:floor",
                                              "mxfp4",     "mxfp4:floor"};
/// Pairs that only routed rows take.
inline std::vector<FormatPair> ragged_pairs() {
  return {{"nvfp4", "nvfp4:rht"}, {"nvfp4:sr", "nvfp4:rht+sr"}};
}

/// The fields of the case's problem that may say column.
inline std::vector<Major*> orders_of(QuantizeCase& c) {
  QuantizeProblem& p = c.problem;
  const auto has_scales = [](const std::optional<Format>& format) {
    return format && info(format->kind).block != 0;
  };
  const bool weights = !c.ragged();
  std::vector<Major*> orders;
  if (has_scales(p.along_k) && (weights || !p.along_k->square))
    orders.push_back(&p.along_k_scales_major);
  if (weights && p.along_rows && !is_plain(*p.along_rows))
    orders.push_back(&p.along_rows_codes_major);
  if (weights && has_scales(p.along_rows)) orders.push_back(&p.along_rows_scales_major);
  return orders;
}

}  // namespace cadre::test
