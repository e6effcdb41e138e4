#include "cpu/quantize.h"

#include <atomic>

#include "cpu/expert_tiles.h"
#include "cpu/load_store.h"
#include "cpu/quantize_rows.h"
#include "cpu/quantized_expert.h"
#include "cpu/turn.h"
#include "formats/amaxes.h"

namespace cadre::cpu {
namespace {

using formats::Hadamard16;
using formats::ScaleOptions;
using formats::StochasticBits;
using schedule::ExpertRows;

constexpr int64_t kTileFloats = 1 << 15;  ///< the source tile and its transform fit in L2
constexpr int64_t kWidest = kTileFloats / 16;

/// What a thread keeps on its stack. Rows of x and y are Grid::width apart.
struct Scratch {
  alignas(64) float x[kTileFloats];    ///< the tile
  alignas(64) float y[kTileFloats];    ///< the tile transformed
  alignas(64) uint32_t amax[kWidest];  ///< of columns, then of blocks
  alignas(64) float block_multiplier[kWidest];
  alignas(64) float multiplier[kWidest];     ///< of columns
  alignas(64) uint8_t codes[kWidest];        ///< nibbles before they are packed
  alignas(64) uint16_t random[8 * kWidest];  ///< of eight rows
  /// What becomes column-major, as rows: the codes of a tile, and its scales, one byte for 16
  /// values at most.
  alignas(64) uint8_t row_codes[kTileFloats];
  alignas(64) uint8_t row_scales[kTileFloats / 16];
};

/// A part of one expert, as floats.
struct Piece {
  int expert;
  int64_t first;       ///< of the expert's rows in the batch; 0 for weights
  int64_t row, col;    ///< of its first element within the expert
  int64_t rows, cols;  ///< whole blocks, or up to the expert's end
  const float* x;
  int64_t pitch;
};

/// One wanted copy.
struct Copy {
  QuantizedShape shape;
  const QuantizedView* view;
  ScaleOptions options;
  StochasticBits random;
  uint32_t* amax = nullptr;  ///< [E], for formats with expert scales; or of all lines
  void (*encode)(const Copy&, const Piece&, const QuantizedExpert&, Scratch&) = nullptr;

  bool transformed() const { return is_transformed(shape.format, shape.axis); }
  bool has_lines() const { return formats::has_whole_lines(shape.format); }
  /// The amaxes of an expert's lines, from those at its first row and column on.
  uint32_t* lines_of(int expert, int64_t first, int64_t row, int64_t col) const {
    const int64_t others = expert * formats::lines_of(shape);
    if (shape.axis == Axis::kAlongRows) return amax + others + col;
    return amax + (shape.kind == RowsKind::kWeights ? others : first) + row;
  }
};

/// The scales of the blocks in some rows of a piece, stored; and the multiplier of each column of
/// these rows. `out` is, here and below, what the piece fills.
template <class Row, class Element>
void scale_blocks(const Copy& copy, const Piece& p, CodeRows rows, const QuantizedExpert& out,
                  Scratch& s) {
  using Scale = typename Row::Scale;
  constexpr int64_t kBlock = Row::kInfo.block;
  const bool across = copy.shape.format.square || copy.shape.axis == Axis::kAlongK;
  const bool down = copy.shape.format.square || copy.shape.axis == Axis::kAlongRows;
  const float amax = copy.amax != nullptr ? formats::float_of(copy.amax[p.expert]) : 0;
  const ScaleRule rule{Row::template expert_scale<Element>(amax, copy.options), copy.options};

  column_amax(p.x + rows.first * p.pitch, p.pitch, rows.count, p.cols, s.amax);
  const int64_t blocks = across ? ceil_div(p.cols, kBlock) : p.cols;
  const auto width = [&](int64_t b) { return std::min(kBlock, p.cols - b * kBlock); };
  if (across) block_amax<kBlock>(s.amax, p.cols, s.amax);

  block_scales<Row, Element>(s.amax, blocks, rule,
                             row_data<Scale>(out.scales, rows.first / (down ? kBlock : 1)),
                             across ? s.block_multiplier : s.multiplier);
  for (int64_t b = 0; across && b < blocks; ++b)
    std::fill_n(s.multiplier + b * kBlock, width(b), s.block_multiplier[b]);
}

/// The multiplier of each column of some rows of a piece, of lines whose amaxes are known: of one
/// row, or of all.
template <class Row, class Element>
void scale_lines(const Copy& copy, const Piece& p, int64_t row, Scratch& s) {
  const uint32_t* lines = copy.lines_of(p.expert, p.first, p.row + row, p.col);
  const ScaleRule rule{{}, copy.options};
  const bool down = copy.shape.axis == Axis::kAlongRows;
  block_scales<Row, Element>(lines, down ? p.cols : 1, rule, s.block_multiplier, s.multiplier);
  if (!down) std::fill_n(s.multiplier + 1, p.cols - 1, s.multiplier[0]);
}

/// The random bits of one row of a piece. Along rows, eight rows are drawn together.
const uint16_t* random_bits(const Copy& copy, const Piece& p, int64_t row, Scratch& s) {
  const uint32_t at = uint32_t(p.row + row);
  const RandomSpan span{uint32_t(p.expert), at, uint32_t(p.col), p.cols};
  if (copy.random.axis == Axis::kAlongK) {
    random_row(copy.random, span, s.random);
    return s.random;
  }
  if (at % 8 == 0) random_rows(copy.random, span, s.random, kWidest);
  return s.random + at % 8 * kWidest;
}

template <class Row, class Element>
void encode_codes(const Copy& copy, const Piece& p, int64_t row, const QuantizedExpert& out,
                  Scratch& s) {
  constexpr bool kNibbles = Element::kDType == DType::kE2m1;
  const float* x = p.x + row * p.pitch;
  uint8_t* target =
      static_cast<uint8_t*>(out.codes.data) + row * out.codes.stride[0] / (kNibbles ? 2 : 1);
  uint8_t* codes = kNibbles ? s.codes : target;
  if (Row::kInfo.takes_stochastic && copy.shape.format.stochastic)
    encode_row_stochastic<Element>(x, s.multiplier, random_bits(copy, p, row, s), p.cols, codes);
  else
    encode_row<Element>(x, s.multiplier, p.cols, codes);
  if (kNibbles) pack_row(codes, p.cols, target);
}

/// Writes codes and block scales of a piece.
template <class Row, class Element>
void encode_piece(const Copy& copy, const Piece& p, const QuantizedExpert& out, Scratch& s) {
  if constexpr (Row::kIsPlain) {
    for (int64_t i = 0; i < p.rows; ++i)
      cast_row<Element>(p.x + i * p.pitch, p.cols, row_data<Element>(out.codes, i));
  } else if constexpr (Row::kInfo.block == 0) {
    const float amax = formats::float_of(copy.amax[p.expert]);
    std::fill_n(s.multiplier, p.cols,
                Row::template expert_scale<Element>(amax, copy.options).encode);
    for (int64_t i = 0; i < p.rows; ++i) encode_codes<Row, Element>(copy, p, i, out, s);
  } else if constexpr (Row::kInfo.block == kWholeLine) {
    for (int64_t i = 0; i < p.rows; ++i) {
      if (i == 0 || copy.shape.axis == Axis::kAlongK) scale_lines<Row, Element>(copy, p, i, s);
      encode_codes<Row, Element>(copy, p, i, out, s);
    }
  } else {
    const bool down = copy.shape.format.square || copy.shape.axis == Axis::kAlongRows;
    const int64_t height = down ? Row::kInfo.block : 1;
    for (int64_t first = 0; first < p.rows; first += height) {
      const int64_t rows = std::min(height, p.rows - first);
      scale_blocks<Row, Element>(copy, p, {first, rows}, out, s);
      for (int64_t i = first; i < first + rows; ++i) encode_codes<Row, Element>(copy, p, i, out, s);
    }
  }
}

/// Encodes a piece of an expert; what is column-major is made as rows, and turned.
void encode(const Copy& copy, const Piece& p, const QuantizedExpert& expert, Scratch& s) {
  const QuantizedExpert out = window_of(copy.shape, expert, {p.row, p.col, p.rows, p.cols});
  QuantizedExpert rows = out;
  if (copy.shape.codes_major == Major::kColumn)
    rows.codes = view(s.row_codes, out.codes.dtype, {p.rows, p.cols}, {p.pitch, 1});
  const bool turns_scales = copy.shape.scales_major == Major::kColumn && !copy.has_lines();
  if (turns_scales)
    rows.scales = view(s.row_scales, out.scales.dtype, {out.scales[0], out.scales[1]});
  copy.encode(copy, p, rows, s);
  if (copy.shape.codes_major == Major::kColumn) turn_to_columns(rows.codes, out.codes);
  if (turns_scales) turn_to_columns(rows.scales, out.scales);
}

/// Reads a tile, with rows of zeros up to a multiple of sixteen behind it.
Piece load_piece(const ExpertSource& source, const Grid& grid, Piece p, float* x) {
  p.rows = std::min(grid.height, source.rows - p.row);
  p.cols = std::min(grid.width, source.matrix[1] - p.col);
  p.x = x;
  p.pitch = grid.width;
  visit_float(source.matrix.dtype, [&]<class Float>(Float) {
    for (int64_t i = 0; i < p.rows; ++i)
      if (const int64_t row = source.row(p.row + i); row >= 0)
        load_row<Float>(row_data<Float>(source.matrix, row) + p.col, p.cols, x + i * p.pitch);
      else
        std::fill_n(x + i * p.pitch, p.cols, 0.0f);
  });
  for (int64_t i = p.rows; i % Hadamard16::kPoints != 0; ++i)
    std::fill_n(x + i * p.pitch, p.cols, 0.0f);
  return p;
}

/// The piece as a copy sees it: itself, or its transform.
Piece seen_by(const Copy& copy, Piece p, float* y) {
  if (!copy.transformed()) return p;
  for (int64_t i = 0; i < p.rows; i += Hadamard16::kPoints)
    transform_rows(p.x + i * p.pitch, p.pitch, p.cols, y + i * p.pitch);
  p.rows = ceil_div(p.rows, Hadamard16::kPoints) * Hadamard16::kPoints;
  p.x = y;
  return p;
}

/// Raises an expert's amax; a maximum comes out the same in any order.
void raise(uint32_t& amax, uint32_t to) {
  std::atomic_ref<uint32_t> shared(amax);
  uint32_t seen = shared.load(std::memory_order_relaxed);
  while (seen < to && !shared.compare_exchange_weak(seen, to, std::memory_order_relaxed)) {
  }
}

/// Those of the lines that a piece has a part of.
void find_amaxes_of_lines(const Copy& copy, const Piece& p, Scratch& s) {
  uint32_t* lines = copy.lines_of(p.expert, p.first, p.row, p.col);
  if (copy.shape.axis == Axis::kAlongRows) {
    column_amax(p.x, p.pitch, p.rows, p.cols, s.amax);
    for (int64_t j = 0; j < p.cols; ++j) raise(lines[j], s.amax[j]);
    return;
  }
  for (int64_t i = 0; i < p.rows; ++i) {
    column_amax(p.x + i * p.pitch, p.pitch, 1, p.cols, s.amax);
    raise(lines[i], largest_of(s.amax, p.cols));
  }
}

void find_amax(const Copy& copy, const Piece& piece, Scratch& s) {
  if (copy.has_lines()) return find_amaxes_of_lines(copy, piece, s);
  const Piece p = seen_by(copy, piece, s.y);
  column_amax(p.x, p.pitch, p.rows, p.cols, s.amax);
  raise(copy.amax[p.expert], largest_of(s.amax, p.cols));
}

Copy copy_of(const QuantizeProblem& p, const QuantizeArgs& args, Axis axis, uint32_t*& workspace) {
  Copy copy{.shape = copy_shape(p, axis),
            .view = axis == Axis::kAlongK ? &args.along_k : &args.along_rows,
            .options = {},
            .random = {}};
  const Format& format = copy.shape.format;
  copy.options = formats::scale_options(format, p.amax_eps, formats::largest_value(p.source));
  copy.random = {.role = p.role, .axis = format.square ? Axis::kAlongK : axis};
  if (format.stochastic) copy.random.seed = args.rng[0], copy.random.offset = args.rng[1];
  formats::visit(format,
                 [&]<class Row, class Element>() { copy.encode = encode_piece<Row, Element>; });
  if (const int64_t amaxes = formats::amaxes_of(copy.shape); amaxes != 0) {
    copy.amax = workspace;
    workspace += amaxes;
    std::fill_n(copy.amax, amaxes, 0u);
  }
  return copy;
}

void store_expert_scales(const Copy& copy) {
  formats::visit(copy.shape.format, [&]<class Row, class Element>() {
    for (int e = 0; e < copy.shape.experts; ++e) {
      const float amax = formats::float_of(copy.amax[e]);
      copy.view->expert_scale[e] = Row::template expert_scale<Element>(amax, copy.options).scale;
    }
  });
}

/// Scales of lines that have codes.
void store_line_scales(const Copy& copy, const Offsets& offsets) {
  const bool down = copy.shape.axis == Axis::kAlongRows;
  for_each_expert(copy.shape, offsets, [&](int expert, ExpertRows rows) {
    const TensorView scales = expert_of(copy.shape, *copy.view, expert, rows).scales;
    const uint32_t* lines = copy.lines_of(expert, rows.first, 0, 0);
    const int64_t step = scales.stride[down ? 1 : 0];
    formats::visit(copy.shape.format, [&]<class Row, class Element>() {
      for (int64_t i = 0; elements(scales) != 0 && i < scales[down ? 1 : 0]; ++i) {
        const float amax = formats::float_of(lines[i]);
        const auto scale = Row::template block_scale<Element>(amax, {}, copy.options);
        static_cast<typename Row::Scale::Code*>(scales.data)[i * step] = scale.code;
      }
    });
  });
}

int64_t block_down(const Copy& copy) {
  if (copy.has_lines()) return 1;
  const bool down = copy.shape.format.square || copy.shape.axis == Axis::kAlongRows;
  return down ? info(copy.shape.format.kind).block : 1;
}

}  // namespace

std::string refuses_quantize(const QuantizeProblem& p, const Device&) {
  return p.along_k_decoded || p.along_rows_decoded ? "writes codes; products take them here" : "";
}

void quantize(const QuantizePlan& plan, const QuantizeArgs& args, Workspace workspace, Stream) {
  const QuantizeProblem& problem = plan.problem;
  Copy copies[2];
  int count = 0;
  bool amax_wanted = false;
  int64_t height = Hadamard16::kPoints;
  uint32_t* free = static_cast<uint32_t*>(workspace.data);
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows}) {
    if (!(axis == Axis::kAlongK ? problem.along_k : problem.along_rows)) continue;
    copies[count] = copy_of(problem, args, axis, free);
    height = std::max(height, block_down(copies[count]));
    amax_wanted |= copies[count++].amax != nullptr;
  }

  const Grid grid{copies[0].shape, args.offsets, height, kTileFloats / height};
  const auto load = [&](int expert, ExpertRows rows, int64_t row, int64_t col, Scratch& s) {
    Piece piece{};
    piece.expert = expert, piece.first = rows.first, piece.row = row, piece.col = col;
    return load_piece(source_of(problem, args, expert, rows), grid, piece, s.x);
  };
  if (amax_wanted)
    for_each_tile(grid, [&](int expert, ExpertRows rows, int64_t row, int64_t col) {
      Scratch s;
      const Piece piece = load(expert, rows, row, col, s);
      for (int i = 0; i < count; ++i)
        if (copies[i].amax != nullptr) find_amax(copies[i], piece, s);
    });
  for (int i = 0; i < count; ++i)
    if (copies[i].has_lines())
      store_line_scales(copies[i], args.offsets);
    else if (copies[i].amax != nullptr)
      store_expert_scales(copies[i]);
  for_each_tile(grid, [&](int expert, ExpertRows rows, int64_t row, int64_t col) {
    Scratch s;
    const Piece piece = load(expert, rows, row, col, s);
    for (int i = 0; i < count; ++i)
      encode(copies[i], seen_by(copies[i], piece, s.y),
             expert_of(copies[i].shape, *copies[i].view, expert, rows), s);
  });
}

int64_t quantize_workspace_bytes(const QuantizeProblem& p, const Device&) {
  const int64_t along_k = p.along_k ? formats::amaxes_of(copy_shape(p, Axis::kAlongK)) : 0;
  const int64_t along_rows = p.along_rows ? formats::amaxes_of(copy_shape(p, Axis::kAlongRows)) : 0;
  return (along_k + along_rows) * int64_t(sizeof(uint32_t));
}

}  // namespace cadre::cpu
