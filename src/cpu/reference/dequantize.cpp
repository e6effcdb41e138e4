#include "cpu/reference/dequantize.h"

#include "cpu/load_store.h"
#include "cpu/quantized_expert.h"
#include "formats/list.h"

namespace cadre::cpu::reference {
namespace {

template <class Element>
float decode(const TensorView& matrix, int64_t i, int64_t j) {
  const int64_t at = offset_of(matrix, i, j);
  if constexpr (Element::kDType == DType::kE2m1) {
    const uint8_t byte = static_cast<const uint8_t*>(matrix.data)[at / 2];
    return Element::decode(formats::nibble(byte, at));
  } else {
    return Element::decode(static_cast<const typename Element::Code*>(matrix.data)[at]);
  }
}

template <class Row, class Element>
void decode_expert(const QuantizedShape& shape, const QuantizedExpert& part,
                   const TensorView& out) {
  const BlockExtent block = block_extent(shape.format, shape.axis, part.codes);
  for (int64_t i = 0; i < part.codes[0]; ++i)
    for (int64_t j = 0; j < part.codes[1]; ++j) {
      float value = decode<Element>(part.codes, i, j);
      if constexpr (Row::kInfo.block != 0) {
        using Scale = typename Row::Scale;
        value = formats::mul(value, decode<Scale>(part.scales, i / block.rows, j / block.cols));
      }
      if (part.expert_scale != nullptr) value = formats::mul(value, *part.expert_scale);
      write(out, {i, j}, double(value));
    }
}

}  // namespace

void dequantize(const DequantizePlan& plan, const DequantizeArgs& args, Workspace, Stream) {
  const QuantizedShape& shape = plan.problem.source;
  const QuantizedView out{.codes = args.out, .scales = {}, .block_offsets = args.block_offsets};
  if (args.block_offsets != nullptr) write_block_offsets(shape, args.offsets, args.block_offsets);
  for_each_expert(shape, args.offsets, [&](int expert, schedule::ExpertRows rows) {
    QuantizedExpert part = expert_of(shape, args.source, expert, rows);
    if (plan.problem.decoded) part.expert_scale = nullptr;
    const TensorView target = expert_of(shape, out, expert, rows).codes;
    formats::visit(shape.format, [&]<class Row, class Element>() {
      decode_expert<Row, Element>(shape, part, target);
    });
  });
}

}  // namespace cadre::cpu::reference
