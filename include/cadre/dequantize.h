#pragma once
#include <string>
#include <string_view>

#include "cadre/quantize.h"

#pragma GCC visibility push(default)
namespace cadre {

/// `dequantize rows R=8192 C=4096 E=64 format=mxfp8 axis=along_k out=bf16`,
/// `dequantize weights N=2048 K=4096 E=64 format=mxfp8 axis=along_rows out=f32 codes_major=column`.
struct DequantizeProblem {
  using Args = struct DequantizeArgs;
  static constexpr OperationText kOperation = {"dequantize", "values from codes and scales",
                                               "dequantize rows R=8192 C=4096 E=64 format=mxfp8"};

  QuantizedShape source;
  DType out = DType::kF32;  ///< f32, bf16 or f16
  bool decoded = false;  ///< out is as a decoded copy: the expert scale is left to who multiplies

  bool operator==(const DequantizeProblem&) const = default;
};

struct DequantizeArgs {
  QuantizedView source;
  Offsets offsets;  ///< routed rows only
  TensorView out;   ///< row-major [R, C] or [E, N, K], or as transformed blocks; written
  int32_t* block_offsets = nullptr;  ///< [E + 1], written: decoded and transformed only
};

using DequantizePlan = Plan<DequantizeProblem>;

/// Writes out = code * block scale * expert scale; decoded: code * block scale, where a decoded
/// copy of the same values has it.
///
/// Types     products in fp32 in that order, one rounding to `out`. A Hadamard transform is not
///           undone.
/// Rows      the tail is neither read nor written.
/// Errors    InvalidArgument for shapes, strides, and parts that the format has not.
/// Exact     equal bits on every device.
DequantizePlan plan(const DequantizeProblem&, const Device&, std::string_view only = {});
void run(const DequantizePlan&, const DequantizeArgs&, Workspace, Stream);

std::string to_string(const DequantizeProblem&);
DequantizeProblem parse_dequantize_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
