#pragma once
#include "cuda/device/matrices.h"
#include "cuda/device/mma.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/output.cuh"

// From packed codes in shared memory to pairs of bf16 numbers in registers. The bits of a code are
// put where bf16 has sign, exponent and mantissa. That is its number over a power of two, the unit,
// subnormal codes too; so one multiplication by unit times scale decodes it, exactly where the
// result is a bf16 number, else rounded once.
namespace cadre::cuda::sm90 {

/// Where sixteen bytes of a box lie whose rows have so many bytes.
template <int kRowBytes>
__device__ inline uint32_t swizzled_rows(int row, int sixteen) {
  if constexpr (kRowBytes == kAtomBytes)
    return swizzled(row, sixteen);
  else
    return kRowBytes == 64 ? swizzled_64(row, sixteen) : swizzled_32(row, sixteen);
}

/// Two powers of two, as bf16.
template <int kExponent>
__device__ inline uint32_t pair_of_units() {
  constexpr uint32_t kUnit = (kExponent + 127) << 7;
  return kUnit | kUnit << 16;
}

template <DType kCode>
struct CodeBits;

template <>
struct CodeBits<DType::kE2m1> {
  static constexpr int kUnitExponent = 126;
  __device__ static uint32_t unit() { return pair_of_units<kUnitExponent>(); }

  __device__ static bool has_nan(uint32_t) { return false; }
  __device__ static void put_nan(uint32_t&) {}
};

template <>
struct CodeBits<DType::kE4m3> {
  static constexpr int kUnitExponent = 120;
  __device__ static uint32_t unit() { return pair_of_units<kUnitExponent>(); }

  /// The codes that are the high bytes of the halves.
  __device__ static uint32_t placed(uint32_t both) {
    return (both & 0x8000'8000u) | (both >> 4 & kMagnitudes);
  }
  /// `largest` becomes the largest magnitudes of the two numbers so far.
  __device__ static void note(uint32_t pair, uint32_t& largest) {
    largest = __vmaxu2(largest, pair & kMagnitudes);
  }
  __device__ static bool has_nan(uint32_t largest) { return ((largest + kLast) & kBehind) != 0; }
  __device__ static void put_nan(uint32_t& pair) {
    pair |= (((pair & kMagnitudes) + kLast) & kBehind) / 0x0800 * 0x7fc0;
  }

 private:
  static constexpr uint32_t kMagnitudes = 0x07f0'07f0u;  // of a NaN: all ones
  static constexpr uint32_t kLast = 0x0010'0010u, kBehind = 0x0800'0800u;
};

/// read() puts the bits of half a part, 32 codes of each row, into the fragments of two steps of
/// wgmma: eight registers. With kSplit the columns of x are as split_columns.h says, and what a
/// thread has of a row and a step are four neighbouring codes: the first and the third, and the
/// other two, are its pairs.
template <DType kCode, bool kSplit>
struct PackedCodes;

template <>
struct PackedCodes<DType::kE2m1, false> : CodeBits<DType::kE2m1> {
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int half, uint32_t* to, uint32_t& /*largest*/) {
    const uint8_t* from = rows + swizzled_rows<kRowBytes>(ThreadPlace::mine().row, half);
    const uint32_t mine = 0x4440 | threadIdx.x % 4;  // that byte of a word, and zeros
#pragma unroll
    for (int below = 0; below < 2; ++below) {  // rows eight apart are swizzled alike
      const uint4 words = *reinterpret_cast<const uint4*>(from + 8 * below * kRowBytes);
      const uint32_t eights[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) to[2 * i + below] = placed(__byte_perm(eights[i], 0, mine));
    }
  }

 private:
  /// By products, since shifts and masks are done by the same part of an SM.
  __device__ static uint32_t placed(uint32_t byte) {
    return (byte * 0x0100'1000u & 0x8000'8000u) | (byte * 0x0004'0040u & 0x01c0'01c0u);
  }
};

template <>
struct PackedCodes<DType::kE2m1, true> : CodeBits<DType::kE2m1> {
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int half, uint32_t* to, uint32_t& /*largest*/) {
    const int lane = int(threadIdx.x) % 4;
    const uint32_t mine = lane % 2 == 0 ? 0x4140 : 0x4342;  // two bytes of a word, and zeros
    const uint8_t* from =
        rows + swizzled_rows<kRowBytes>(ThreadPlace::mine().row, half) + lane / 2 * 4;
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint32_t eight =
            *reinterpret_cast<const uint32_t*>(from + 8 * below * kRowBytes + 8 * step);
        place(__byte_perm(eight, 0, mine), to + 4 * step + below);
      }
  }

 private:
  /// Of two codes in each half. One product brings sign and magnitude of two codes to their places.
  __device__ static void place(uint32_t four, uint32_t* to) {
    constexpr uint32_t kPlaces = 0x81c0'81c0u;
    const uint32_t odd = four & 0x00f0'00f0u, even = subtract(four, odd);
    to[0] = even * 0x1040u & kPlaces;
    to[2] = odd * 0x0104u & kPlaces;
  }
};

template <>
struct PackedCodes<DType::kE4m3, false> : CodeBits<DType::kE4m3> {
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int half, uint32_t* to, uint32_t& largest) {
    const uint32_t lane = threadIdx.x % 4;
    const uint32_t mine =
        0x1000 * (2 * lane + 1) + 0x10 * (2 * lane);  // two of eight, as high bytes
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // steps, and rows eight apart
      const uint8_t* from =
          rows + swizzled_rows<kRowBytes>(ThreadPlace::mine().row, 2 * half + i / 2);
      const uint4 words = *reinterpret_cast<const uint4*>(from + 8 * (i % 2) * kRowBytes);
      uint32_t* at = to + 4 * (i / 2) + i % 2;
      at[0] = placed(__byte_perm(words.x, words.y, mine));
      at[2] = placed(__byte_perm(words.z, words.w, mine));
      note(at[0], largest), note(at[2], largest);
    }
  }
};

template <>
struct PackedCodes<DType::kE4m3, true> : CodeBits<DType::kE4m3> {
  template <int kRowBytes>
  __device__ static void read(const uint8_t* rows, int half, uint32_t* to, uint32_t& largest) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    const Matrices words = ldmatrix(shared_address(
        rows + swizzled_rows<kRowBytes>(warp * 16 + lane % 16, 2 * half + lane / 16)));
    place(words.a, to, largest);
    place(words.b, to + 1, largest);
    place(words.c, to + 4, largest);
    place(words.d, to + 5, largest);
  }

 private:
  __device__ static void place(uint32_t four, uint32_t* to, uint32_t& largest) {
    to[0] = placed(four << 8), to[2] = placed(four);
    note(to[0], largest), note(to[2], largest);
  }
};

}  // namespace cadre::cuda::sm90
