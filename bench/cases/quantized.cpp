#include "bench/cases/quantized.h"

#include <algorithm>
#include <cmath>

namespace cadre::bench {

RandomQuantized random_quantized(Buffers& buffers, const QuantizedShape& shape, const Rows& rows,
                                 uint64_t seed) {
  Buffers scratch;
  QuantizeProblem problem{
      .kind = shape.kind, .rows = shape.rows, .cols = shape.cols, .experts = shape.experts};
  QuantizeArgs args;
  if (shape.kind == RowsKind::kRagged) {
    args.source =
        random_tensor(scratch, problem.source, {shape.rows, shape.cols}, rows.live(), seed);
    args.offsets = rows.offsets;
  } else {
    args.source = random_tensor(scratch, problem.source, {shape.experts, shape.rows, shape.cols},
                                shape.experts, seed);
  }
  RandomQuantized result;
  result.buffer = buffers.take(quantized_bytes(shape));
  result.view = quantized_view(shape, result.buffer);
  const bool along_k = shape.axis == Axis::kAlongK;
  (along_k ? problem.along_k : problem.along_rows) = shape.format;
  (along_k ? problem.along_k_scales_major : problem.along_rows_scales_major) = shape.scales_major;
  problem.along_rows_codes_major = shape.codes_major;
  (along_k ? args.along_k : args.along_rows) = result.view;
  const uint64_t rng[2] = {seed, 0};
  if (shape.format.stochastic) args.rng = rng;
  run_on_cpu(problem, args);
  return result;
}

TensorView decoded_tensor(Buffers& buffers, const QuantizedShape& shape, DType dtype) {
  const TensorView codes = quantized_view(shape, nullptr).codes;
  return codes.rank == 2 ? buffers.tensor(dtype, {codes[0], codes[1]})
                         : buffers.tensor(dtype, {codes[0], codes[1], codes[2]});
}

TensorView absolute_values(Buffers& buffers, const QuantizedShape& shape, const QuantizedView& view,
                           const Offsets& offsets) {
  const DequantizeProblem problem{.source = shape, .out = DType::kF32};
  const TensorView out = decoded_tensor(buffers, shape, problem.out);
  const bool ragged = shape.kind == RowsKind::kRagged;
  run_on_cpu(problem, DequantizeArgs{view, ragged ? offsets : Offsets(), out}, "cpu_reference");
  auto* data = static_cast<float*>(out.data);
  const bool gaps = is_transformed(shape.format, shape.axis);  // rows between the experts' blocks
  std::transform(data, data + elements(out), data,
                 [gaps](float x) { return gaps && std::isnan(x) ? 0 : std::abs(x); });
  return out;
}

}  // namespace cadre::bench
