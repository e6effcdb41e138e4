#include "cpu/reference/quantize.h"

#include <algorithm>
#include <vector>

#include "cpu/load_store.h"
#include "cpu/quantized_expert.h"
#include "formats/hadamard.h"
#include "formats/list.h"
#include "formats/philox.h"

namespace cadre::cpu::reference {
namespace {

using formats::BlockScale;
using formats::ExpertScale;
using formats::Hadamard16;
using formats::ScaleOptions;
using formats::StochasticBits;

/// The values of one expert on their way to becoming codes.
struct Values {
  int64_t rows = 0, cols = 0;
  std::vector<float> at;

  Values(int64_t r, int64_t c) : rows(r), cols(c), at(size_t(r * c)) {}
  float& operator()(int64_t i, int64_t j) { return at[size_t(i * cols + j)]; }
};

/// Rows [row, row + rows) and columns likewise, cut off at the end of the matrix.
struct Region {
  int64_t row, col, row_end, col_end;

  template <class Work>
  void each(Work&& work) const {
    for (int64_t i = row; i < row_end; ++i)
      for (int64_t j = col; j < col_end; ++j) work(i, j);
  }
};

Values read_values(const ExpertSource& source) {
  Values x(source.rows, source.matrix[1]);
  Region{0, 0, x.rows, x.cols}.each([&](int64_t i, int64_t j) {
    const int64_t row = source.row(i);
    x(i, j) = row < 0 ? 0 : float(read(source.matrix, row, j));
  });
  return x;
}

/// Every sixteen rows transformed, column by column; rows beyond the last count as zero.
Values transformed(Values& x) {
  Values y(ceil_div(x.rows, Hadamard16::kPoints) * Hadamard16::kPoints, x.cols);
  for (int64_t row = 0; row < y.rows; row += Hadamard16::kPoints)
    for (int64_t j = 0; j < x.cols; ++j) {
      float v[Hadamard16::kPoints];
      for (int i = 0; i < Hadamard16::kPoints; ++i) v[i] = row + i < x.rows ? x(row + i, j) : 0;
      Hadamard16::apply(v);
      for (int i = 0; i < Hadamard16::kPoints; ++i) y(row + i, j) = v[i];
    }
  return y;
}

float amax(Values& x, const Region& region) {
  uint32_t largest = 0;
  region.each(
      [&](int64_t i, int64_t j) { largest = std::max(largest, formats::magnitude(x(i, j))); });
  return formats::float_of(largest);
}

template <class Code>
void store(const TensorView& matrix, int64_t i, int64_t j, Code code) {
  static_cast<Code*>(matrix.data)[offset_of(matrix, i, j)] = code;
}

/// The odd one of two nibbles comes second; a line's last half-filled byte has a zero above.
void store_nibble(const TensorView& matrix, int64_t i, int64_t j, uint8_t code) {
  const int64_t at = offset_of(matrix, i, j);
  uint8_t& byte = static_cast<uint8_t*>(matrix.data)[at / 2];
  byte = at % 2 ? formats::pack_nibbles(byte, code) : code;
}

/// One copy of one expert.
struct Copy {
  const Format& format;
  Axis axis;
  bool decoded;
  int expert;
  ScaleOptions options;
  StochasticBits random;
  QuantizedExpert out;
};

/// The sixteen random bits of element (i, j) of an expert.
uint32_t random_bits(const Copy& copy, int64_t i, int64_t j) {
  const bool along_k = copy.random.axis == Axis::kAlongK;
  const uint32_t line = uint32_t(along_k ? i : j), position = uint32_t(along_k ? j : i);
  return StochasticBits::pick(copy.random.draw(uint32_t(copy.expert), line, position), position);
}

template <class Row, class Element>
auto code_of(const Copy& copy, float x, int64_t i, int64_t j) {
  if constexpr (Row::kInfo.takes_stochastic)
    if (copy.format.stochastic) return Element::encode_stochastic(x, random_bits(copy, i, j));
  return Element::encode(x);
}

template <class Row, class Element>
void encode_block(const Copy& copy, Values& x, const Region& region,
                  const BlockScale<typename Row::Scale::Code>& scale) {
  region.each([&](int64_t i, int64_t j) {
    const float scaled = Row::kIsPlain ? x(i, j) : formats::mul(x(i, j), scale.multiplier);
    const auto code = code_of<Row, Element>(copy, scaled, i, j);
    if (copy.decoded)
      write(copy.out.codes, {i, j},
            formats::mul(Element::decode(code), Row::Scale::decode(scale.code)));
    else if constexpr (Element::kDType == DType::kE2m1)
      store_nibble(copy.out.codes, i, j, code);
    else
      store(copy.out.codes, i, j, code);
  });
}

template <class Row, class Element>
void encode_expert(const Copy& copy, Values& x) {
  const float largest = amax(x, {0, 0, x.rows, x.cols});
  const ExpertScale expert = Row::template expert_scale<Element>(largest, copy.options);
  if (Row::kInfo.has_expert_scale) *copy.out.expert_scale = expert.scale;

  const BlockExtent block = block_extent(copy.format, copy.axis, copy.out.codes);
  for (int64_t i = 0; i < x.rows; i += block.rows)
    for (int64_t j = 0; j < x.cols; j += block.cols) {
      const Region region{i, j, std::min(i + block.rows, x.rows), std::min(j + block.cols, x.cols)};
      const auto scale = Row::template block_scale<Element>(amax(x, region), expert, copy.options);
      if (Row::kInfo.block != 0 && !copy.decoded)
        store(copy.out.scales, i / block.rows, j / block.cols, scale.code);
      encode_block<Row, Element>(copy, x, region, scale);
    }
}

void quantize_copy(const QuantizeProblem& p, const QuantizeArgs& args, Axis axis) {
  const QuantizedShape shape = copy_shape(p, axis);
  const QuantizedView& view = axis == Axis::kAlongK ? args.along_k : args.along_rows;
  StochasticBits random{.role = p.role, .axis = shape.format.square ? Axis::kAlongK : axis};
  if (shape.format.stochastic) random.seed = args.rng[0], random.offset = args.rng[1];
  const auto options =
      formats::scale_options(shape.format, p.amax_eps, formats::largest_value(p.source));

  if (view.block_offsets != nullptr) write_block_offsets(shape, args.offsets, view.block_offsets);
  for_each_expert(shape, args.offsets, [&](int expert, schedule::ExpertRows rows) {
    const Copy copy{shape.format,
                    axis,
                    shape.decoded,
                    expert,
                    options,
                    random,
                    expert_of(shape, view, expert, rows)};
    Values x = read_values(source_of(p, args, expert, rows));
    if (is_transformed(shape.format, axis)) x = transformed(x);
    formats::visit(shape.format,
                   [&]<class Row, class Element>() { encode_expert<Row, Element>(copy, x); });
  });
}

}  // namespace

void quantize(const QuantizePlan& plan, const QuantizeArgs& args, Workspace, Stream) {
  if (plan.problem.along_k) quantize_copy(plan.problem, args, Axis::kAlongK);
  if (plan.problem.along_rows) quantize_copy(plan.problem, args, Axis::kAlongRows);
}

}  // namespace cadre::cpu::reference
