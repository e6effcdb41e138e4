#pragma once
#include <cstdint>

#include "cadre/dtype.h"

// Loops over consecutive elements: conversions, scales, transposes. Everything that grouped GEMM
// does to numbers beside oneDNN's products.
namespace cadre::cpu::gemm {

/// Codes of one dtype to floats, exactly. `first` counts elements from `codes`: two 4-bit codes
/// share a byte.
using DecodeLine = void (*)(const void* codes, int64_t first, int64_t count, float* to);
DecodeLine decode_line(DType);

/// Floats to a plain dtype, rounded once to nearest even.
using EncodeLine = void (*)(const float* from, int64_t count, void* to);
EncodeLine encode_line(DType);

/// Many lines, cut into columns of 64: element 64 c + j of line i goes to
/// to[c * column_step + 64 i + j].
struct Columns {
  int64_t lines, columns;
  int64_t line_bytes;   ///< from line to line
  int64_t column_step;  ///< floats from column to column
};
/// The same as decoding line by line, faster; null where there is no such way.
using DecodeColumns = void (*)(const void* codes, const Columns&, float* to);
DecodeColumns decode_columns(DType);

/// The same for an output that no cache will hold: past the caches where the processor can. Call
/// end_stream() on the same thread before another one reads it.
EncodeLine stream_line(DType);
void end_stream();

/// x[i] *= factor
void scale_line(float* x, int64_t count, float factor);

/// x[i] *= y[i]
void multiply_line(float* x, const float* y, int64_t count);

/// x[i] += factor * y[i], rounded twice.
void add_line(float* x, const float* y, int64_t count, float factor);

/// Floats that are bf16 numbers, to bf16.
void narrow_line(const float* from, int64_t count, uint16_t* to);

/// Two lines of floats that are bf16 numbers, as pairs (even[i], odd[i]) of bf16.
void pair_lines(const float* even, const float* odd, int64_t count, uint16_t* to);

/// Pairs (even[i], odd[i]) of bf16 codes.
void pair_codes(const uint16_t* even, const uint16_t* odd, int64_t count, uint16_t* to);

/// to[j * to_step + i] = from[i * from_step + j] for i, j < 16.
void transpose_16(const float* from, int64_t from_step, float* to, int64_t to_step);

}  // namespace cadre::cpu::gemm
