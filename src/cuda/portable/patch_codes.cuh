#pragma once
#include "cuda/device/small_float.h"
#include "cuda/portable/patch_scales.cuh"

// Codes of a patch of eight rows and eight columns, and where they go.
namespace cadre::cuda::portable {

/// The random bits of a patch's eight lines: rows along K, columns along rows.
class PatchBits {
 public:
  __device__ static PatchBits of(const TileCopy& of, const uint64_t* rng) {
    formats::StochasticBits bits = of.copy.random;
    bits.seed = rng[0], bits.offset = rng[1];
    const auto row = uint32_t(of.tile.row + of.at.row), col = uint32_t(of.tile.col + of.at.col);
    const bool along_k = bits.axis == Axis::kAlongK;
    return {bits.lines(uint32_t(of.tile.expert), along_k ? col : row), along_k ? row : col,
            uint32_t(of.copy.to.codes.bits) >> 31};
  }
  __device__ void draw(int line, int other, formats::PhiloxWords (&draws)[2]) const {
    lines_.draw({first_ + uint32_t(line), first_ + uint32_t(other)}, draws);
  }
  /// The multiplier of the line of a draw; so that neither its numbers are computed nor the next
  /// draws are begun before this one is made: all at once take too many registers.
  __device__ float follows(const formats::PhiloxWords& draw, float multiplier) {
    const uint32_t none = draw.word[3] & zero_;
    first_ += none;
    return __uint_as_float(__float_as_uint(multiplier) | none);
  }

 private:
  __device__ PatchBits(const formats::PhiloxLines& lines, uint32_t first, uint32_t zero)
      : lines_(lines), first_(first), zero_(zero) {}

  formats::PhiloxLines lines_;
  uint32_t first_;  ///< of the lines, within the expert
  uint32_t zero_;   ///< of which the compiler does not know it
};

/// As StochasticBits::pick.
__device__ inline RandomHalf half_of(const formats::PhiloxWords& draw, int position) {
  return {draw.word[position / 2], position % 2};
}

/// Eight numbers of a row before they become codes.
template <DType kSource, class Scale>
__device__ void scaled_row(const SourcePatch& patch, const Factors& multipliers, bool by_row, int i,
                           float (&x)[kChunk]) {
  const auto of = [&](int k) { return by_row ? multipliers.of_line[i] : multipliers.of_line[k]; };
  if constexpr (kSource == DType::kBf16 && Scale::kDType == DType::kE8m0) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) {
      const uint32_t pair = scaled_pair(word(patch.rows[i], k / 2), of(k), of(k + 1));
      const float2 both = pair_of(DType::kBf16, pair);
      x[k] = both.x, x[k + 1] = both.y;
    }
  } else {
    decode(patch.rows[i], kSource, x);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], of(k));
  }
}

/// Calls put(row, codes) for the rows of a patch.
template <DType kSource, class Scale, class Element>
__device__ void encode_rows(const SourcePatch& patch, const Factors& multipliers, bool by_row,
                            auto&& put) {
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    float x[kChunk];
    scaled_row<kSource, Scale>(patch, multipliers, by_row, i, x);
    put(i, EightCodes<Element>::of(x));
  }
}

/// The same with random bits, which eight of a line draw at once: of a row if scales are by row.
template <DType kSource, class Scale, class Element>
__device__ void encode_rows(const SourcePatch& patch, const Factors& multipliers, bool by_row,
                            PatchBits random, auto&& put) {
  if (!by_row) {
    RandomE2m1Codes rows[kPatchRows];
#pragma unroll
    for (int k = kChunk / 2 - 1; k >= 0; --k) {
      const int next = k + kChunk / 2;
      formats::PhiloxWords draws[2];
      random.draw(k, next, draws);
      const float multiplier = random.follows(draws[0], multipliers.of_line[k]);
      const float multiplier_of_next = random.follows(draws[1], multipliers.of_line[next]);
      const auto number = [&](int i, int at) {
        return formats::mul(element_of(patch.rows[i], kSource, at),
                            at == k ? multiplier : multiplier_of_next);
      };
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i)
        rows[i].add(number(i, k), half_of(draws[0], i), number(i, next), half_of(draws[1], i));
    }
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) put(i, EightCodes<Element>{rows[i].word()});
    return;
  }
#pragma unroll
  for (int pair = 0; pair < kPatchRows; pair += 2) {
    formats::PhiloxWords draws[2];
    random.draw(pair, pair + 1, draws);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = pair + n;
      Factors factors = multipliers;
      factors.of_line[i] = random.follows(draws[n], factors.of_line[i]);
      float x[kChunk];
      scaled_row<kSource, Scale>(patch, factors, by_row, i, x);
      RandomHalf halves[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) halves[k] = half_of(draws[n], k);
      put(i, EightCodes<Element>::of(x, halves));
    }
  }
}

/// Codes of row i times scales.
template <class Element>
__device__ Chunk numbers_of(const EightCodes<Element>& codes, const Factors& scales, bool by_row,
                            int i, DType numbers) {
  float x[kChunk];
  decode_codes(codes, x);
#pragma unroll
  for (int k = 0; k < kChunk; ++k)
    x[k] = formats::mul(x[k], by_row ? scales.of_line[i] : scales.of_line[k]);
  return encode(x, numbers);
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
    first = lines.at(uint32_t(of.tile.row + at.row), uint32_t(of.tile.col + at.col));
    pitch = lines.pitch;
    columns = lines.columns;
    numbers = lines.bits == 32 ? DType::kF32 : DType::kBf16;
  }
  __device__ int lines() const { return columns ? at.cols : at.rows; }
  __device__ int in_line() const { return columns ? at.rows : at.cols; }
  /// Codes, line by line.
  template <class Element>
  __device__ void store_line(int i, const EightCodes<Element>& codes) const {
    if (i < lines()) store_codes(first + i * pitch, codes, in_line());
  }
  /// All of them: whole words by predicated instructions, with no branch for each.
  template <class Element>
  __device__ void store_lines(const EightCodes<Element> (&codes)[kChunk]) const {
    using Word = typename EightCodes<Element>::Word;
    uint8_t* to = first;
    if (in_line() >= kChunk &&
        (reinterpret_cast<uintptr_t>(to) | uint64_t(pitch)) % sizeof(Word) == 0) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i, to += pitch)
        if (i < lines()) *reinterpret_cast<Word*>(to) = codes[i].word;
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) store_line(i, codes[i]);
  }
  /// Codes times scales, row by row.
  template <class Element>
  __device__ void store_row(int i, const EightCodes<Element>& codes, const Factors& scales,
                            bool by_row) const {
    if (i >= at.rows) return;
    const Chunk chunk = numbers_of(codes, scales, by_row, i, numbers);
    Matrix out;
    out.data = reinterpret_cast<char*>(first);
    out.pitch = pitch;
    out.columns = at.cols;
    out.dtype = numbers;
    out.is_wide() ? store<true>(chunk, out, {i, 0}) : store<false>(chunk, out, {i, 0});
  }
};

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

/// The codes of a patch, or its numbers, with scales of rows or of columns.
template <DType kSource, class Codes>
__device__ void encode_patch(const QuantizeJob& job, const TileCopy& of, const SourcePatch& patch,
                             const LineScales<Codes::kDecoded>& scales, bool by_row) {
  using Element = typename Codes::Element;
  using Scale = typename Codes::Row::Scale;
  const auto encode_all = [&](auto&& put) {
    if constexpr (Codes::kStochastic)
      encode_rows<kSource, Scale, Element>(patch, scales.multipliers, by_row,
                                           PatchBits::of(of, job.rng), put);
    else
      encode_rows<kSource, Scale, Element>(patch, scales.multipliers, by_row, put);
  };
  if constexpr (Codes::kDecoded) {
    const PatchOut out(of);
    encode_all([&](int i, const EightCodes<Element>& codes) {
      out.store_row(i, codes, scales.numbers, by_row);
    });
  } else if constexpr (EightCodes<Element>::kNibbles) {
    EightCodes<Element> lines[kChunk];
    encode_all([&](int i, const EightCodes<Element>& codes) { lines[i] = codes; });
    const PatchOut out(of);
    if (out.columns) turn(lines);
    out.store_lines(lines);
  } else if (const PatchOut out(of); !out.columns) {
    encode_all([&](int i, const EightCodes<Element>& codes) { out.store_line(i, codes); });
  } else if constexpr (kSource != DType::kF32) {
    EightCodes<Element> lines[kChunk];
    encode_all([&](int i, const EightCodes<Element>& codes) { lines[i] = codes; });
    turn(lines);
    out.store_lines(lines);
  } else {  // lines beside the source take too many registers
    EightCodes<Element> columns[kChunk];
    encode_all([&](int, const EightCodes<Element>& codes) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) columns[k].push(codes.get(k));
    });
    out.store_lines(columns);
  }
}

/// By a grid-stride loop of blocks, whose threads have a number each.
template <class Row, class Element>
__device__ void store_expert_scales(const QuantizeJob& job, int64_t first, int64_t step) {
  for (int i = 0; i < job.count; ++i)
#pragma unroll 1
    for (int64_t e = first; e < job.of.experts; e += step)
      job.copies[i].to.expert_scale[e] = expert_scale<Row, Element>(job.copies[i], int(e)).scale;
}

}  // namespace cadre::cuda::portable
