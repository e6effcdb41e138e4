#pragma once
#include "cuda/device/magnitude.h"
#include "cuda/device/small_float.h"
#include "cuda/device/word.h"
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

/// The largest magnitude, as bits of an fp32, in one of a thread's blocks, whose words are folded
/// and which so many lanes share: of lane i that of block i, and so on. Words hold two blocks each
/// where they hold two numbers; then lanes send each other what they do not look at themselves.
template <DType kSource, int kLanesOfIt, int kBlocks>
__device__ uint32_t largest_of_block(const uint32_t (&folded)[kBlocks], unsigned lane) {
  static_assert(kBlocks <= kLanesOfIt && std::has_single_bit(unsigned(kBlocks)));
  using Magnitudes = LineMagnitudes<kSource>;
  constexpr int kInWord = std::min(Magnitudes::kInWord, kBlocks);
  uint32_t words[kBlocks / kInWord];
#pragma unroll
  for (int i = 0; i < kBlocks / kInWord; ++i)
    if constexpr (kInWord == 1)
      words[i] = folded[i];
    else
      words[i] = of_two<kSource>(folded[2 * i], folded[2 * i + 1]);
#pragma unroll
  for (int step = kBlocks / 2; step >= kInWord; step /= 2)
    for (int i = 0, apart = step / kInWord; i < apart; ++i) {
      const bool last = (lane & unsigned(step)) != 0;
      const uint32_t others = last ? words[i] : words[i + apart];
      words[i] =
          larger<kSource>(last ? words[i + apart] : words[i], __shfl_xor_sync(~0u, others, step));
    }
#pragma unroll
  for (int step = 1; step < kLanesOfIt; step *= 2)
    if (step < kInWord || step >= kBlocks)
      words[0] = larger<kSource>(words[0], __shfl_xor_sync(~0u, words[0], step));
  const auto half = [&](int i) { return Magnitudes::magnitude(words[0], i); };
  if constexpr (kBlocks == 1) return max(half(0), half(Magnitudes::kInWord - 1));
  return lane % kInWord == 0 ? half(0) : half(kInWord - 1);
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
  static constexpr bool kNibbles = EightCodes<Element>::kNibbles;

  using Code = typename Row::Scale::Code;

  Lines codes;
  uint8_t* scales;
  int64_t scale_row, scale_block;  ///< bytes from scale to scale, of rows and of blocks
  bool whole;                      ///< whether all chunks of codes are whole words
  formats::ScaleOptions options;

  explicit RowCodes(const QuantizeCopy& copy)
      : codes(copy.to.codes),
        scales(copy.to.scales.data),
        scale_row(copy.to.scales.columns ? int64_t(sizeof(Code)) : copy.to.scales.pitch),
        scale_block(copy.to.scales.columns ? copy.to.scales.pitch : int64_t(sizeof(Code))),
        whole((reinterpret_cast<uintptr_t>(codes.data) | uint64_t(codes.pitch)) %
                  sizeof(typename EightCodes<Element>::Word) ==
              0),
        options(copy.options) {}

  /// By all lanes of a warp, which have the same rows; chunks that are not there are zero. Of the
  /// lanes that share a block one makes the scale of each row. `at` says where chunk i begins, as
  /// ChunkColumn does, and whether all chunks of a thread lie in one block, which then has fewer
  /// lanes.
  template <DType kSource, int kRows, class At>
  __device__ void write(const Chunk (&chunks)[kRows], const At& at) const {
    constexpr int kInBlock = At::kTogether ? kRows : 1, kScales = kRows / kInBlock;
    constexpr int kLanesOfIt = kLanesOfBlock / kInBlock;
    const unsigned lane = threadIdx.x % kLanesOfIt;
    uint32_t blocks[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      LineMagnitudes<kSource> columns(chunks[i * kInBlock]);
#pragma unroll
      for (int k = 1; k < kInBlock; ++k) columns.add(chunks[i * kInBlock + k]);
      blocks[i] = columns.folded();
    }
    const uint32_t amax = largest_of_block<kSource, kLanesOfIt>(blocks, lane);
    const auto scale = Row::template block_scale<Element>(__uint_as_float(amax), {}, options);
    if (!kDecoded && int(lane) * kInBlock < __shfl_sync(~0u, at.rows, 0, kLanesOfIt))
      store_scale(at.place(int(lane) * kInBlock), scale.code);
    const float number = kDecoded ? Row::Scale::decode(scale.code) : 1.0f;
    const Place first = at.place(0);
    const int bits = kDecoded ? codes.bits : EightCodes<Element>::kBits;
    uint8_t* to = codes.data + first.row * codes.pitch + first.column * bits / 8;
    const int64_t step = at.step(codes.pitch, bits);
    const auto all_rows = [&](auto&& put) {
#pragma unroll
      for (int i = 0; i < kRows; ++i, to += step) {
        const float multiplier = __shfl_sync(~0u, scale.multiplier, i / kInBlock, kLanesOfIt);
        const float factor = kDecoded ? __shfl_sync(~0u, number, i / kInBlock, kLanesOfIt) : 1.0f;
        if (kDecoded && i >= at.rows) continue;
        float x[kChunk];
        decode(chunks[i], kSource, x);
        for (float& value : x) value = formats::mul(value, multiplier);
        put(i, EightCodes<Element>::of(x), factor);
      }
    };
    if constexpr (kDecoded)
      all_rows([&](int, const auto& eight, float factor) { store_numbers(to, eight, factor); });
    else if (whole)
      all_rows([&](int i, const auto& eight, float) { store_below(i, at.rows, to, eight.word); });
    else
      all_rows([&](int i, const auto& eight, float) {
        if (i < at.rows) store_bytes(to, eight.word);
      });
  }

 private:
  __device__ void store_scale(Place at, Code code) const {
    const auto block = int64_t(uint64_t(at.column) / Row::kInfo.block);
    *reinterpret_cast<Code*>(scales + at.row * scale_row + block * scale_block) = code;
  }
  /// A whole word by a predicated instruction, with no branch.
  __device__ static void store_below(int row, int rows, uint8_t* to, uint32_t word) {
    store_word_below(row, rows, to, word);
  }
  __device__ static void store_below(int row, int rows, uint8_t* to, uint64_t word) {
    store_words_below(row, rows, to, uint2{uint32_t(word), uint32_t(word >> 32)});
  }
  template <class Word>
  __device__ static void store_bytes(uint8_t* to, Word word) {
#pragma unroll
    for (unsigned i = 0; i < sizeof(word); ++i) to[i] = uint8_t(word >> 8 * i);
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
