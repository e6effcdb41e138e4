#include "bench/cases/quantized.h"

namespace cadre::bench {

using DequantizeCase = Case<DequantizeProblem>;

template <>
DequantizeCase make_case(const DequantizeProblem& p, const Draw& draw) {
  auto c = new_case<DequantizeCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  const QuantizedShape& s = p.source;
  Rows rows;
  if (s.kind == RowsKind::kRagged) {
    rows = draw_rows(buffers, draw, s.rows, s.experts);
    c.offsets = rows.host;
    c.args.offsets = rows.offsets;
  }
  c.args.source = random_quantized(buffers, s, rows, seeds.next()).view;
  c.args.out = decoded_tensor(buffers, s, p.out);
  c.outputs.push_back({"out", c.args.out, c.args.out[0], Tail::kKeep, true});
  if (p.decoded && is_transformed(s.format, s.axis)) {
    const TensorView offsets = buffers.tensor(DType::kI32, {s.experts + 1});
    c.args.block_offsets = static_cast<int32_t*>(offsets.data);
    c.outputs.push_back({"block_offsets", offsets, s.experts + 1, Tail::kKeep, true});
  }
  return c;
}

template <>
int64_t shrink(DequantizeProblem& p) {
  const double experts = p.source.kind == RowsKind::kWeights ? p.source.experts : 1;
  scale(p.source.rows,
        affordable(p.source.rows, experts * double(p.source.cols), kElementsOfASecond), 128);
  return p.source.rows;
}

template <>
std::vector<Magnitude> magnitudes(const DequantizeCase& c) {
  return std::vector<Magnitude>(c.outputs.size());
}

template <>
Work work(const DequantizeCase& c) {
  const QuantizedShape& s = c.problem.source;
  const double share =
      s.kind == RowsKind::kRagged && s.rows ? double(c.offsets.back()) / double(s.rows) : 1.0;
  return {.flops = 0, .bytes = (double(quantized_bytes(s)) + bytes_of(c.args.out)) * share};
}

}  // namespace cadre::bench
