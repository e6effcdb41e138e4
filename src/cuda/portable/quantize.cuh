#pragma once
#include "cuda/portable/patch_scales.cuh"
#include "cuda/portable/quantize_rows.cuh"

// Codes and scales of routed rows or weights, along K, along rows, or both from one read.
//
// Persistent blocks take tiles of 128 x 128 elements, which hold whole blocks of every format; a
// thread takes a patch of eight rows and eight columns, in registers. Lanes that share a block find
// its amax by shuffles, warps that share one by shared memory. Rows that no expert owns are neither
// read nor written.
namespace cadre::cuda::portable {

/// The random bits of a patch.
struct PatchBits {
  formats::StochasticBits bits;
  uint32_t expert, row, col;

  __device__ PatchBits(const TileCopy& of, const uint64_t* rng)
      : bits(of.copy.random),
        expert(uint32_t(of.tile.expert)),
        row(uint32_t(of.tile.row + of.at.row)),
        col(uint32_t(of.tile.col + of.at.col)) {
    bits.seed = rng[0], bits.offset = rng[1];
  }
  /// Of one of its eight lines: rows along K, columns along rows.
  __device__ formats::PhiloxWords of_line(uint32_t line) const {
    return bits.axis == Axis::kAlongK ? bits.draw(expert, row + line, col)
                                      : bits.draw(expert, col + line, row);
  }
};

/// Eight numbers of a row before they become codes.
template <DType kSource>
__device__ void scaled_row(const SourcePatch& patch, const Factors& multipliers, bool by_row, int i,
                           float (&x)[kChunk]) {
  decode(patch.rows[i], kSource, x);
#pragma unroll
  for (int k = 0; k < kChunk; ++k)
    x[k] = formats::mul(x[k], by_row ? multipliers.of_line[i] : multipliers.of_line[k]);
}

/// Calls put(row, codes) for the rows of a patch.
template <DType kSource, class Element, class Put>
__device__ void encode_rows(const SourcePatch& patch, const Factors& multipliers, bool by_row,
                            Put&& put) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float x[kChunk];
    scaled_row<kSource>(patch, multipliers, by_row, i, x);
    put(i, EightCodes<Element>::of(x));
  }
}

/// The same with random bits, which eight of a line draw at once.
template <DType kSource, class Element, class Put>
__device__ void encode_rows(const SourcePatch& patch, const Factors& multipliers, bool by_row,
                            const PatchBits& random, Put&& put) {
  const bool down = random.bits.axis == Axis::kAlongRows;
  EightCodes<Element> rows[kPatchRows];
#pragma unroll
  for (int line = 0; line < kChunk; ++line) {
    const formats::PhiloxWords draw = random.of_line(uint32_t(line));
    const auto encode = [&](int i, int k, int position) {
      const float x = element_of(patch.rows[i], kSource, k);
      const float factor = by_row ? multipliers.of_line[i] : multipliers.of_line[k];
      rows[i].put(k, Element::encode_stochastic_word(formats::mul(x, factor),
                                                     random.bits.pick(draw, uint32_t(position))));
    };
    if (down) {
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) encode(i, line, i);
    } else {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) encode(line, k, k);
    }
  }
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) put(i, rows[i]);
}

/// Where the codes of a patch go, or its numbers.
struct PatchOut {
  uint8_t* first;
  int64_t pitch;
  bool columns;
  PatchPlace at;
  DType numbers;

  __device__ explicit PatchOut(const TileCopy& of) : at(of.at) {
    const Lines lines = of.copy.to.codes_of(of.tile);
    first = lines.at(of.tile.row + at.row, of.tile.col + at.col);
    pitch = lines.pitch;
    columns = lines.columns;
    numbers = lines.bits == 32 ? DType::kF32 : DType::kBf16;
  }
  /// Codes, line by line.
  template <class Element>
  __device__ void store_line(int i, const EightCodes<Element>& codes) const {
    if (i < (columns ? at.cols : at.rows))
      store_codes(first + i * pitch, codes, columns ? at.rows : at.cols);
  }
  /// Codes times scales, row by row.
  template <class Element>
  __device__ void store_row(int i, const EightCodes<Element>& codes, const Factors& scales,
                            bool by_row) const {
    if (i >= at.rows) return;
    float x[kChunk];
    decode_codes(codes, x);
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      x[k] = formats::mul(x[k], by_row ? scales.of_line[i] : scales.of_line[k]);
    const Chunk chunk = encode(x, numbers);
    Matrix out;
    out.data = reinterpret_cast<char*>(first);
    out.pitch = pitch;
    out.columns = at.cols;
    out.dtype = numbers;
    out.is_wide() ? store<true>(chunk, out, {i, 0}) : store<false>(chunk, out, {i, 0});
  }
};

/// One copy of a patch.
template <DType kSource, class Codes>
__device__ void quantize_patch(const QuantizeJob& job, QuantizeShared& shared, const TileCopy& of,
                               const SourcePatch& patch) {
  using Element = typename Codes::Element;
  const auto scales = ScalesOfPatch<kSource, Codes>{shared, of, patch}.scales();
  // What all elements have in common is taken row by row too.
  const bool by_row = !of.copy.to.down || of.copy.to.across;
  const auto encode_all = [&](auto&& put) {
    if constexpr (Codes::kStochastic)
      encode_rows<kSource, Element>(patch, scales.multipliers, by_row, PatchBits(of, job.rng), put);
    else
      encode_rows<kSource, Element>(patch, scales.multipliers, by_row, put);
  };
  const PatchOut out(of);
  if constexpr (Codes::kDecoded) {
    encode_all([&](int i, const EightCodes<Element>& codes) {
      out.store_row(i, codes, scales.numbers, by_row);
    });
  } else if (!out.columns) {
    encode_all([&](int i, const EightCodes<Element>& codes) { out.store_line(i, codes); });
  } else {
    EightCodes<Element> columns[kChunk];
    encode_all([&](int, const EightCodes<Element>& codes) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) columns[k].push(codes.get(k));
    });
#pragma unroll
    for (int k = 0; k < kChunk; ++k) out.store_line(k, columns[k]);
  }
}

/// What copies of one launch have in common, beside their format.
struct CodesKind {
  bool decoded, stochastic;
};
template <class OfRow, class OfElement, CodesKind kKind>
struct CodesOf {
  using Row = OfRow;
  using Element = OfElement;
  static constexpr bool kDecoded = kKind.decoded, kStochastic = kKind.stochastic;
};

template <class Row, class Element>
__device__ formats::ExpertScale expert_scale(const QuantizeCopy& copy, int expert) {
  const float amax = copy.amax == nullptr ? 0 : __uint_as_float(copy.amax[expert]);
  return Row::template expert_scale<Element>(amax, copy.options);
}

/// All copies of a tile; a transformed one is of bf16 numbers, and the last.
template <DType kSource, class Codes>
__device__ void quantize_tile(const QuantizeJob& job, QuantizeShared& shared,
                              const ExpertTile& tile, int column) {
  using Row = typename Codes::Row;
  const auto place = PatchOf<Row>::of_thread(column);
  SourcePatch patch = load_patch<kSource>(job, tile, PatchPlace(place, tile.rows, tile.cols));
#pragma unroll 1
  for (int i = 0; i < job.count; ++i) {
    const QuantizeCopy& copy = job.copies[i];
    const int rows = copy.to.rows_of(tile);
    const TileCopy of{copy,
                      tile,
                      expert_scale<Row, typename Codes::Element>(copy, tile.expert),
                      PatchPlace(place, rows, tile.cols),
                      rows,
                      tile.cols};
    if constexpr (Row::kInfo.takes_hadamard)
      if (copy.to.transformed) {
        transform<kSource, kLanesAcross<Row>>(patch);
        if constexpr (kSource != DType::kBf16) {
          quantize_patch<DType::kBf16, Codes>(job, shared, of, patch);
          continue;
        }
      }
    quantize_patch<kSource, Codes>(job, shared, of, patch);
  }
}

/// By a grid-stride loop.
template <class Row, class Element>
__device__ void store_expert_scales(const QuantizeJob& job, const QuantizeCopy& copy) {
#pragma unroll 1
  for (int64_t e = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x; e < job.of.experts;
       e += int64_t(gridDim.x) * kQuantizeThreads)
    copy.to.expert_scale[e] = expert_scale<Row, Element>(copy, int(e)).scale;
}

/// Blocks of an SM at once, as many as registers allow.
template <DType kSource, class Codes>
constexpr int quantize_blocks() {
  using Row = typename Codes::Row;
  constexpr bool wide = kSource == DType::kF32;
  constexpr bool nibbles = EightCodes<typename Codes::Element>::kNibbles;
  constexpr bool both_types = Row::kInfo.takes_hadamard && kSource != DType::kBf16;
  const bool many = Codes::kDecoded || nibbles || Row::kInfo.block == kTileSide;
  return Codes::kStochastic || both_types || (wide && many) ? 1 : 2;
}

template <DType kSource, class Codes>
__global__ void __launch_bounds__(kQuantizeThreads, quantize_blocks<kSource, Codes>())
    quantize_kernel(const __grid_constant__ QuantizeJob job) {
  auto& shared = *reinterpret_cast<QuantizeShared*>(dynamic_shared());
  for (int i = 0; i < job.count && Codes::Row::kInfo.has_expert_scale; ++i)
    store_expert_scales<typename Codes::Row, typename Codes::Element>(job, job.copies[i]);
  walk_tiles(job.of, shared.queue, [&](const ExpertTile& tile, int column) {
    quantize_tile<kSource, Codes>(job, shared, tile, column);
  });
}

template <class Codes>
void launch_tiles(const QuantizeJob& job, const QuantizeStream& on) {
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    on.launch_strips(quantize_kernel<kSource, Codes>,
                     {quantize_blocks<kSource, Codes>(), sizeof(QuantizeShared)}, job);
  });
}

/// Copies that have the same kind.
template <class Row, class Element>
void launch_quantize(const QuantizeJob& job, const QuantizeStream& on) {
  if constexpr (kHasRowCodes<Row>)
    if (takes_row_codes<Row>(job)) return launch_quantize_rows<Row, Element>(job, on);
  const auto with = [&]<bool kStochastic>() {
    job.copies[0].to.decoded
        ? launch_tiles<CodesOf<Row, Element, CodesKind{true, kStochastic}>>(job, on)
        : launch_tiles<CodesOf<Row, Element, CodesKind{false, kStochastic}>>(job, on);
  };
  if constexpr (Row::kInfo.takes_stochastic)
    if (job.copies[0].stochastic) return with.template operator()<true>();
  with.template operator()<false>();
}

}  // namespace cadre::cuda::portable
