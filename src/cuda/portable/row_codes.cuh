#pragma once
#include "cuda/device/magnitude.h"
#include "cuda/device/small_float.h"
#include "cuda/portable/quantize_job.h"

namespace cadre::cuda::portable {

/// Whether a format's blocks lie within the chunks of a warp's lanes, and need no amax from before.
template <class Row>
constexpr bool kHasRowCodes =
    Row::kInfo.block >= 4 * kChunk&& Row::kInfo.block != kWholeLine && !Row::kInfo.has_expert_scale;

/// The largest of so many neighbouring lanes.
template <int kLanesOfIt>
__device__ uint32_t largest_of_lanes(uint32_t value) {
  for (int step = 1; step < kLanesOfIt; step *= 2)
    value = max(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

/// Chunks of a thread that lie below each other: where the first begins, and how many rows there
/// are; 0 where the thread's columns are beyond the end.
struct ChunkColumn {
  static constexpr bool kTogether = false;  ///< each lies in a block of its own
  Place first;
  int rows;

  __device__ Place place(int i) const { return {first.row + i, first.column}; }
  /// Bytes from one to the next, of elements of so many bits.
  __device__ int64_t step(int64_t pitch, int) const { return pitch; }
};

/// Codes and scales of rows whose blocks lie within the rows, or with kDecoded the numbers of a
/// decoded copy: made from registers, of which neighbouring lanes have neighbouring chunks.
template <class Row, class Element, bool kDecoded>
struct RowCodes {
  static constexpr int kLanesOfBlock = Row::kInfo.block / kChunk;

  Lines codes, scales;
  formats::ScaleOptions options;

  explicit RowCodes(const QuantizeCopy& copy)
      : codes(copy.to.codes), scales(copy.to.scales), options(copy.options) {}

  /// By all lanes of a warp, which have the same rows; chunks that are not there are zero. Of the
  /// lanes that share a block one makes the scale of each row. `at` says where chunk i begins, as
  /// ChunkColumn does, and whether all chunks of a thread lie in one block, which then has fewer
  /// lanes.
  template <DType kSource, int kRows, class At>
  __device__ void write(const Chunk (&chunks)[kRows], const At& at) const {
    constexpr int kInBlock = At::kTogether ? kRows : 1, kScales = kRows / kInBlock;
    constexpr int kLanesOfIt = kLanesOfBlock / kInBlock;
    static_assert(kScales <= kLanesOfIt);
    const int lane = int(threadIdx.x) % kLanesOfIt;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      LineMagnitudes<kSource> columns(chunks[i * kInBlock]);
#pragma unroll
      for (int k = 1; k < kInBlock; ++k) columns.add(chunks[i * kInBlock + k]);
      const uint32_t largest = largest_of_lanes<kLanesOfIt>(columns.of_all());
      if (lane == i) amax = largest;
    }
    const auto scale = Row::template block_scale<Element>(__uint_as_float(amax), {}, options);
    if (!kDecoded && lane * kInBlock < __shfl_sync(~0u, at.rows, 0, kLanesOfIt))
      store_scale(at.place(lane * kInBlock), scale.code);
    const float number = kDecoded ? Row::Scale::decode(scale.code) : 1.0f;
    const Place first = at.place(0);
    const int bits = kDecoded ? codes.bits : EightCodes<Element>::kBits;
    uint8_t* to = codes.data + first.row * codes.pitch + first.column * bits / 8;
    const int64_t step = at.step(codes.pitch, bits);
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += step) {
      const float multiplier = __shfl_sync(~0u, scale.multiplier, i / kInBlock, kLanesOfIt);
      const float factor = kDecoded ? __shfl_sync(~0u, number, i / kInBlock, kLanesOfIt) : 1.0f;
      if (i >= at.rows) continue;
      float x[kChunk];
      decode(chunks[i], kSource, x);
      for (float& value : x) value = formats::mul(value, multiplier);
      const auto eight = EightCodes<Element>::of(x);
      if constexpr (kDecoded)
        store_numbers(to, eight, factor);
      else
        store_codes(to, eight, kChunk);
    }
  }

 private:
  __device__ void store_scale(Place at, typename Row::Scale::Code code) const {
    using Code = typename Row::Scale::Code;
    *reinterpret_cast<Code*>(scales.at(at.row, at.column / Row::kInfo.block)) = code;
  }
  __device__ void store_numbers(uint8_t* to, const EightCodes<Element>& eight, float factor) const {
    float x[kChunk];
    decode_codes(eight, x);
    for (float& value : x) value = formats::mul(value, factor);
    const bool f32 = codes.bits == 32;
    const Chunk chunk = encode(x, f32 ? DType::kF32 : DType::kBf16);
    reinterpret_cast<uint4*>(to)[0] = chunk.low;
    if (f32) reinterpret_cast<uint4*>(to)[1] = chunk.high;
  }
};

}  // namespace cadre::cuda::portable
