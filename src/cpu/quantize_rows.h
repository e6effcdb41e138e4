#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/clones.h"
#include "formats/hadamard.h"
#include "formats/list.h"
#include "formats/philox.h"

// Loops over one row, or a few rows of the same columns: the inner loops of quantising. Each is
// short and simple, so that it vectorises; all of them keep the bits of src/formats.
namespace cadre::cpu {

/// A row of a plain format as floats.
template <class Float>
CADRE_CLONES void load_row(const typename Float::Code* source, int64_t count, float* x) {
  for (int64_t j = 0; j < count; ++j) x[j] = Float::decode(source[j]);
}

/// amax[j] = the largest magnitude of column j, as bits.
CADRE_CLONES inline void column_amax(const float* x, int64_t pitch, int64_t rows, int64_t count,
                                     uint32_t* amax) {
  for (int64_t j = 0; j < count; ++j) amax[j] = formats::magnitude(x[j]);
  for (int64_t i = 1; i < rows; ++i)
    for (int64_t j = 0; j < count; ++j)
      amax[j] = std::max(amax[j], formats::magnitude(x[i * pitch + j]));
}

CADRE_CLONES inline uint32_t largest_of(const uint32_t* amax, int64_t count) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < count; ++j) largest = std::max(largest, amax[j]);
  return largest;
}

/// The largest of each block of columns, the last of which may be short. May overwrite `amax`.
template <int64_t kBlock>
CADRE_CLONES void block_amax(const uint32_t* amax, int64_t count, uint32_t* of_blocks) {
  const int64_t whole = count / kBlock;
  for (int64_t b = 0; b < whole; ++b) {
    uint32_t largest = 0;
    for (int64_t j = 0; j < kBlock; ++j) largest = std::max(largest, amax[b * kBlock + j]);
    of_blocks[b] = largest;
  }
  if (count % kBlock != 0) of_blocks[whole] = largest_of(amax + whole * kBlock, count % kBlock);
}

/// What the scales of an expert's blocks depend on beside their amaxes.
struct ScaleRule {
  formats::ExpertScale expert;
  formats::ScaleOptions options;
};

/// The scales of blocks with these amaxes.
template <class Row, class Element>
CADRE_CLONES void block_scales(const uint32_t* amax, int64_t count, const ScaleRule& rule,
                               typename Row::Scale::Code* codes, float* multipliers) {
  for (int64_t b = 0; b < count; ++b) {
    const auto scale =
        Row::template block_scale<Element>(formats::float_of(amax[b]), rule.expert, rule.options);
    codes[b] = scale.code;
    multipliers[b] = scale.multiplier;
  }
}

/// Codes of plain values.
template <class Element>
CADRE_CLONES void cast_row(const float* x, int64_t count, typename Element::Code* codes) {
  for (int64_t j = 0; j < count; ++j) codes[j] = Element::encode(x[j]);
}

/// How many codes are made before they are narrowed to bytes; narrowed one by one, the arithmetic
/// before would run in pieces of bytes too.
constexpr int64_t kWords = 256;

CADRE_CLONES inline void narrow(const uint32_t* words, int64_t count, uint8_t* codes) {
  for (int64_t j = 0; j < count; ++j) codes[j] = uint8_t(words[j]);
}

/// Codes of x * multiplier, one multiplier a column.
template <class Element>
CADRE_CLONES void encode_row(const float* x, const float* multipliers, int64_t count,
                             uint8_t* codes) {
  uint32_t words[kWords];
  for (int64_t first = 0; first < count; first += kWords) {
    const int64_t end = std::min(first + kWords, count);
    for (int64_t j = first; j < end; ++j)
      words[j - first] = Element::encode_word(formats::mul(x[j], multipliers[j]));
    narrow(words, end - first, codes + first);
  }
}

template <class Element>
CADRE_CLONES void encode_row_stochastic(const float* x, const float* multipliers,
                                        const uint16_t* random, int64_t count, uint8_t* codes) {
  uint32_t words[kWords];
  for (int64_t first = 0; first < count; first += kWords) {
    const int64_t end = std::min(first + kWords, count);
    for (int64_t j = first; j < end; ++j)
      words[j - first] =
          Element::encode_stochastic_word(formats::mul(x[j], multipliers[j]), random[j]);
    narrow(words, end - first, codes + first);
  }
}

/// Two codes a byte; a half-filled last byte has a zero above.
CADRE_CLONES inline void pack_row(const uint8_t* codes, int64_t count, uint8_t* bytes) {
  for (int64_t b = 0; b < count / 2; ++b)
    bytes[b] = formats::pack_nibbles(codes[2 * b], codes[2 * b + 1]);
  if (count % 2) bytes[count / 2] = formats::pack_nibbles(codes[count - 1], 0);
}

/// Where random bits are wanted: `count` columns of a row of an expert.
struct RandomSpan {
  uint32_t expert, row, col;
  int64_t count;
};

/// Random bits of one row, for codes along K; col is a multiple of 8. Fills whole draws.
CADRE_CLONES inline void random_row(const formats::StochasticBits& random, const RandomSpan& at,
                                    uint16_t* bits) {
  for (int64_t j = 0; j < at.count; j += 8) {
    const formats::PhiloxWords draw = random.draw(at.expert, at.row, at.col + uint32_t(j));
    for (uint32_t i = 0; i < 8; ++i) bits[j + i] = uint16_t(random.pick(draw, i));
  }
}

/// Random bits of eight rows from at.row on, a multiple of 8, for codes along rows.
CADRE_CLONES inline void random_rows(const formats::StochasticBits& random, const RandomSpan& at,
                                     uint16_t* bits, int64_t pitch) {
  for (int64_t j = 0; j < at.count; ++j) {
    const formats::PhiloxWords draw = random.draw(at.expert, at.col + uint32_t(j), at.row);
    for (uint32_t i = 0; i < 8; ++i) bits[i * pitch + j] = uint16_t(random.pick(draw, i));
  }
}

/// Sixteen rows transformed, columns side by side, in the order of additions of Hadamard16.
CADRE_CLONES inline void transform_rows(const float* x, int64_t pitch, int64_t count, float* y) {
  constexpr int64_t kPoints = formats::Hadamard16::kPoints, kColumns = 64;
  for (int64_t first = 0; first < count; first += kColumns) {
    const int64_t columns = std::min(kColumns, count - first);
    float v[kPoints][kColumns];
    for (int i = 0; i < kPoints; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const float value = x[i * pitch + first + j];
        v[i][j] = formats::Hadamard16::negative(i) ? -value : value;
      }
    for (int distance = 1; distance < kPoints; distance *= 2)
      for (int i = 0; i < kPoints; ++i) {
        if (i & distance) continue;
        for (int64_t j = 0; j < columns; ++j) {
          const float a = v[i][j], b = v[i + distance][j];
          v[i][j] = formats::add(a, b);
          v[i + distance][j] = formats::add(a, -b);
        }
      }
    for (int i = 0; i < kPoints; ++i)
      for (int64_t j = 0; j < columns; ++j)
        y[i * pitch + first + j] = formats::Hadamard16::finish(v[i][j]);
  }
}

}  // namespace cadre::cpu
