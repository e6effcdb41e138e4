#include "cpu/dequantize.h"

#include "cpu/clones.h"
#include "cpu/expert_tiles.h"
#include "cpu/load_store.h"
#include "cpu/turn.h"
#include "formats/list.h"

namespace cadre::cpu {
namespace {

using schedule::ExpertRows;

constexpr int64_t kTileRows = 16;  ///< within one block along rows, whatever its length
constexpr int64_t kTileCols = 1024;

/// What a thread keeps on its stack.
struct Scratch {
  alignas(64) float scale[kTileCols];    ///< of columns
  alignas(64) uint8_t codes[kTileCols];  ///< nibbles, unpacked
  /// What was column-major, as rows: codes, and scales, of which fp32 ones serve 128 codes or more.
  alignas(64) uint8_t row_codes[kTileRows * kTileCols];
  alignas(64) uint8_t row_scales[4 * kTileCols];
};

/// out = (code * scale of the column) * scale of the expert, rounded once more to the type of out.
template <class Element, class Out>
CADRE_CLONES void decode_row(const typename Element::Code* codes, const float* scale, float expert,
                             int64_t count, typename Out::Code* out) {
  for (int64_t j = 0; j < count; ++j)
    out[j] = Out::encode(formats::mul(formats::mul(Element::decode(codes[j]), scale[j]), expert));
}

template <class Stored, class Out>
CADRE_CLONES void cast_row(const typename Stored::Code* codes, int64_t count,
                           typename Out::Code* out) {
  for (int64_t j = 0; j < count; ++j) out[j] = Out::encode(Stored::decode(codes[j]));
}

CADRE_CLONES void unpack_row(const uint8_t* bytes, int64_t count, uint8_t* codes) {
  for (int64_t b = 0; b < count / 2; ++b) {
    codes[2 * b] = formats::nibble(bytes[b], 0);
    codes[2 * b + 1] = formats::nibble(bytes[b], 1);
  }
  if (count % 2) codes[count - 1] = formats::nibble(bytes[count / 2], 0);
}

/// A part of one expert, and what is written of it.
struct Piece {
  QuantizedExpert from;
  TensorView out;
  int64_t rows, cols;
};

/// The scale of each column of one row of a piece; ones for formats without block scales.
template <class Row>
void column_scales(const QuantizedShape& shape, const Piece& p, int64_t row, float* scale) {
  if constexpr (Row::kInfo.block == 0) {
    std::fill_n(scale, p.cols, 1.0f);
  } else {
    using Scale = typename Row::Scale;
    constexpr int64_t kBlock = Row::kInfo.block;
    const bool across = shape.format.square || shape.axis == Axis::kAlongK;
    const bool down = shape.format.square || shape.axis == Axis::kAlongRows;
    const auto* stored = row_data<Scale>(p.from.scales, down ? 0 : row);
    if (across) {
      for (int64_t j = 0; j < p.cols; j += kBlock)
        std::fill_n(scale + j, std::min(kBlock, p.cols - j), Scale::decode(stored[j / kBlock]));
    } else {
      for (int64_t j = 0; j < p.cols; ++j) scale[j] = Scale::decode(stored[j]);
    }
  }
}

template <class Element>
const typename Element::Code* codes_of(const Piece& p, int64_t row, Scratch& s) {
  if constexpr (Element::kDType == DType::kE2m1) {
    const int64_t at = row * p.from.codes.stride[0];
    unpack_row(static_cast<const uint8_t*>(p.from.codes.data) + at / 2, p.cols, s.codes);
    return s.codes;
  } else {
    return row_data<Element>(p.from.codes, row);
  }
}

template <class Row, class Element, class Out>
void decode_piece(const QuantizedShape& shape, const Piece& p, Scratch& s) {
  const bool down = shape.format.square || shape.axis == Axis::kAlongRows;
  const float expert = p.from.expert_scale == nullptr ? 1.0f : *p.from.expert_scale;
  for (int64_t row = 0; row < p.rows; ++row) {
    typename Out::Code* out = row_data<Out>(p.out, row);
    const typename Element::Code* codes = codes_of<Element>(p, row, s);
    if constexpr (Row::kIsPlain) {
      cast_row<Element, Out>(codes, p.cols, out);
    } else {
      const bool same_scales = down || Row::kInfo.block == 0;
      if (row == 0 || !same_scales) column_scales<Row>(shape, p, row, s.scale);
      decode_row<Element, Out>(codes, s.scale, expert, p.cols, out);
    }
  }
}

/// Codes and scales as rows: where they are, or turned.
QuantizedExpert as_rows(const QuantizedShape& shape, const QuantizedExpert& from, Scratch& s) {
  QuantizedExpert rows = from;
  if (shape.codes_major == Major::kColumn) {
    rows.codes =
        view(s.row_codes, from.codes.dtype, {from.codes[0], from.codes[1]}, {kTileCols, 1});
    turn_to_rows(from.codes, rows.codes);
  }
  if (shape.scales_major == Major::kColumn) {
    rows.scales = view(s.row_scales, from.scales.dtype, {from.scales[0], from.scales[1]});
    turn_to_rows(from.scales, rows.scales);
  }
  return rows;
}

}  // namespace

void dequantize(const DequantizePlan& plan, const DequantizeArgs& args, Workspace, Stream) {
  const QuantizedShape& shape = plan.problem.source;
  const QuantizedView target{.codes = args.out, .scales = {}, .block_offsets = args.block_offsets};
  if (args.block_offsets != nullptr) write_block_offsets(shape, args.offsets, args.block_offsets);
  const Grid grid{shape, args.offsets, kTileRows, kTileCols};
  for_each_tile(grid, [&](int expert, ExpertRows rows, int64_t row, int64_t col) {
    Scratch s;
    QuantizedExpert from = expert_of(shape, args.source, expert, rows);
    if (plan.problem.decoded) from.expert_scale = nullptr;
    const Window tile{row, col, std::min(kTileRows, from.codes[0] - row),
                      std::min(kTileCols, from.codes[1] - col)};
    const Piece piece{as_rows(shape, window_of(shape, from, tile), s),
                      window_of(expert_of(shape, target, expert, rows).codes, tile), tile.rows,
                      tile.cols};
    formats::visit(shape.format, [&]<class Row, class Element>() {
      visit_float(plan.problem.out,
                  [&]<class Out>(Out) { decode_piece<Row, Element, Out>(shape, piece, s); });
    });
  });
}

}  // namespace cadre::cpu
