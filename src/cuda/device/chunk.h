#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "cadre/host_device.h"
#include "cadre/tensor.h"

// Rows of f32, bf16 or f16 in device memory, read and written in chunks of eight elements. Wide
// chunks move 16 bytes at a time, coalesced where the threads of a warp take neighbours; any others
// move element by element, and end where the row does. The dtype is looked at when a kernel runs;
// all threads take the same way.
namespace cadre::cuda {

constexpr int kChunk = 8;  // elements

/// A matrix whose last dimension has stride 1.
struct Matrix {
  char* data = nullptr;
  int64_t pitch = 0;    ///< bytes from row to row
  int64_t columns = 0;  ///< elements of a row
  DType dtype = DType::kBf16;

  Matrix() = default;
  /// `of_none`: the dtype of no matrix, which says nothing of its own.
  Matrix(const TensorView& v, DType of_none)
      : data(static_cast<char*>(v.data)),
        pitch(v.stride[0] * (v.dtype == DType::kF32 ? 4 : 2)),
        columns(v.shape[1]),
        dtype(v.data == nullptr ? of_none : v.dtype) {}

  /// Whether all chunks of all rows are wide; true for no matrix at all.
  CADRE_HD bool is_wide() const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && pitch % 16 == 0 && columns % kChunk == 0;
  }
};

/// What chunks a kernel is compiled for: any, wide ones, or wide ones of one dtype, so that nothing
/// is spent on the others. It calls assume() with each matrix where no barrier stands before its
/// use: the compiler does not know it behind one.
struct AnyChunks {
  static constexpr bool kWide = false, kOneDType = false;
  __device__ static void assume(const Matrix&) {}
};
struct WideChunks {
  static constexpr bool kWide = true, kOneDType = false;
  __device__ static void assume(const Matrix&) {}
};
template <DType kDType>
struct WideChunksOf {
  static constexpr bool kWide = true, kOneDType = true;
  __device__ static void assume(const Matrix& m) { __builtin_assume(m.dtype == kDType); }
};

/// Calls visit() with what suits matrices that are all wide or not, and have these dtypes.
template <class Visit>
void visit_chunks(bool wide, std::initializer_list<DType> dtypes, Visit&& visit) {
  const auto all_are = [&](DType dtype) {
    return std::all_of(dtypes.begin(), dtypes.end(), [&](DType one) { return one == dtype; });
  };
  if (!wide)
    visit(AnyChunks());
  else if (all_are(DType::kBf16))
    visit(WideChunksOf<DType::kBf16>());
  else if (all_are(DType::kF16))
    visit(WideChunksOf<DType::kF16>());
  else
    visit(WideChunks());
}

/// Where a chunk begins.
struct Place {
  int64_t row, column;
};

__device__ inline char* address(const Matrix& m, Place at) {
  return m.data + at.row * m.pitch + at.column * (m.dtype == DType::kF32 ? 4 : 2);
}

/// Elements as they are stored, four words of bf16 or f16, eight of f32.
struct Chunk {
  uint4 low, high;
};

/// Element i of a chunk, as it is stored.
__device__ inline uint32_t word(const Chunk& chunk, int i) {
  const uint32_t words[8] = {chunk.low.x,  chunk.low.y,  chunk.low.z,  chunk.low.w,
                             chunk.high.x, chunk.high.y, chunk.high.z, chunk.high.w};
  return words[i];
}

/// Elements beyond the end of the row are zero.
template <bool kWide>
__device__ Chunk load(const Matrix& m, Place at) {
  Chunk chunk{};
  const char* from = address(m, at);
  if constexpr (kWide) {
    chunk.low = reinterpret_cast<const uint4*>(from)[0];
    if (m.dtype == DType::kF32) chunk.high = reinterpret_cast<const uint4*>(from)[1];
  } else {
    uint32_t words[8] = {};
    const int64_t count = m.columns - at.column;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count) continue;
      if (m.dtype == DType::kF32)
        words[i] = reinterpret_cast<const uint32_t*>(from)[i];
      else
        words[i / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(from)[i]) << (i % 2 * 16);
    }
    chunk.low = {words[0], words[1], words[2], words[3]};
    chunk.high = {words[4], words[5], words[6], words[7]};
  }
  return chunk;
}

/// Nothing beyond the end of the row is written.
template <bool kWide>
__device__ void store(const Chunk& chunk, const Matrix& m, Place at) {
  char* to = address(m, at);
  if constexpr (kWide) {
    reinterpret_cast<uint4*>(to)[0] = chunk.low;
    if (m.dtype == DType::kF32) reinterpret_cast<uint4*>(to)[1] = chunk.high;
  } else {
    const int64_t count = m.columns - at.column;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count) continue;
      if (m.dtype == DType::kF32)
        reinterpret_cast<uint32_t*>(to)[i] = word(chunk, i);
      else
        reinterpret_cast<uint16_t*>(to)[i] = uint16_t(word(chunk, i / 2) >> (i % 2 * 16));
    }
  }
}

__device__ inline float2 pair_of(DType dtype, uint32_t bits) {
  if (dtype == DType::kF16) {
    __half2_raw raw;
    raw.x = uint16_t(bits), raw.y = uint16_t(bits >> 16);
    return __half22float2(__half2(raw));
  }
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff'0000u)};
}

template <class Pair>
__device__ inline uint32_t word_of(const Pair& pair) {
  uint32_t word;
  static_assert(sizeof(pair) == sizeof(word));
  std::memcpy(&word, static_cast<const void*>(&pair), sizeof(word));
  return word;
}

/// Rounds to nearest even; any NaN becomes 0x7fff, as in src/formats.
__device__ inline uint32_t bits_of_pair(DType dtype, float x, float y) {
  // As a word: of halves the compiler would put each word together anew.
  return dtype == DType::kF16 ? word_of(__floats2half2_rn(x, y))
                              : word_of(__floats2bfloat162_rn(x, y));
}

__device__ inline void decode(const Chunk& chunk, DType dtype, float (&to)[kChunk]) {
  if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) to[i] = __uint_as_float(word(chunk, i));
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 pair = pair_of(dtype, word(chunk, i));
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

__device__ inline Chunk encode(const float (&from)[kChunk], DType dtype) {
  uint32_t words[8] = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (dtype == DType::kF32)
      words[i] = __float_as_uint(from[i]);
    else if (i % 2 == 0)
      words[i / 2] = bits_of_pair(dtype, from[i], from[i + 1]);
  return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

/// One element as it is stored; its number.
__device__ inline uint32_t element_bits(const Matrix& m, Place at) {
  const char* from = address(m, at);
  return m.dtype == DType::kF32 ? *reinterpret_cast<const uint32_t*>(from)
                                : *reinterpret_cast<const uint16_t*>(from);
}
__device__ inline float element_of(uint32_t bits, DType dtype) {
  return dtype == DType::kF32 ? __uint_as_float(bits) : pair_of(dtype, bits).x;
}
__device__ inline void store_element(float value, const Matrix& m, Place at) {
  char* to = address(m, at);
  if (m.dtype == DType::kF32)
    *reinterpret_cast<float*>(to) = value;
  else
    *reinterpret_cast<uint16_t*>(to) = uint16_t(bits_of_pair(m.dtype, value, 0.0f));
}

/// Sums that kThreads neighbouring threads hold, eight each: halves are added onto each other until
/// one is left, which the first thread has. For chunks that go round the threads this is what
/// cpu/lanes.h does with 8 * kThreads sums.
template <int kThreads>
__device__ float total(float (&sums)[kChunk]) {
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2)
    for (int i = 0; i < kChunk; ++i) sums[i] += __shfl_down_sync(~0u, sums[i], step, kThreads);
#pragma unroll
  for (int half = kChunk / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

}  // namespace cadre::cuda
