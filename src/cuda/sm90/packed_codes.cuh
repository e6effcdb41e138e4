#pragma once
#include "cuda/device/matrices.h"
#include "cuda/device/mma.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/packed_rows.h"
#include "formats/small_float.h"

// From packed codes in shared memory to pairs of bf16 numbers in registers. The bits of a code are
// put where bf16 has sign, exponent and mantissa. That is its number over a power of two, the unit,
// subnormal codes too; so one multiplication by unit times scale decodes it, exactly where the
// result is a bf16 number, else rounded once. Or a table has the numbers of two four-bit codes.
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

  /// The codes that are the high bytes of the halves. `largest` becomes the largest magnitudes of
  /// the two numbers so far.
  __device__ static uint32_t placed(uint32_t both, uint32_t& largest) {
    const uint32_t magnitudes = both >> 4 & kMagnitudes;
    largest = __vmaxu2(largest, magnitudes);
    return (both & 0x8000'8000u) | magnitudes;
  }
  __device__ static bool has_nan(uint32_t largest) { return ((largest + kLast) & kBehind) != 0; }
  __device__ static void put_nan(uint32_t& pair) {
    pair |= (((pair & kMagnitudes) + kLast) & kBehind) / 0x0800 * 0x7fc0;
  }

 private:
  static constexpr uint32_t kMagnitudes = 0x07f0'07f0u;  // of a NaN: all ones
  static constexpr uint32_t kLast = 0x0010'0010u, kBehind = 0x0800'0800u;
};

/// A table of what a byte of two e2m1 codes says: the pair of their bf16 numbers. Each lane of a
/// warp has its own bank, so that lookups of different bytes do not wait for each other.
struct PairTable {
  alignas(16) uint4 pairs[256][16];  ///< for 32 lanes: 256 bytes a row, so that a byte permutation
                                     ///< makes the address; half of them are not used

  __device__ void fill() {
    for (int i = int(threadIdx.x); i < 256 * 8; i += int(blockDim.x)) {
      const uint32_t byte = uint32_t(i) / 8, pair = number(byte % 16) | number(byte / 16) << 16;
      pairs[byte][i % 8] = {pair, pair, pair, pair};
    }
  }
  /// `selects`: for PRMT of some bytes, and of the lane's own place: the byte, then the place.
  __device__ uint32_t look_up(uint32_t bytes, uint32_t selects) const {
    const uint32_t place = threadIdx.x % kWarp * 4;
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint8_t*>(pairs) +
                                              __byte_perm(bytes, place, selects));
  }
  __device__ static constexpr uint32_t select(int byte) { return 0x5504 | uint32_t(byte) << 4; }

 private:
  __device__ static uint32_t number(uint32_t code) {
    return formats::bits_of(formats::E2m1::decode(uint8_t(code))) >> 16;
  }
};
struct NoTable {
  __device__ void fill() {}
};

/// load() brings the codes of half a part, 32 of each row, and place() puts their bits, or numbers,
/// into the fragments of two steps of wgmma: eight registers. As the columns lie, what a thread has
/// of a row and of eight columns are two neighbours. Where those of x are split, it has four of
/// sixteen: the first and the third of them, and the other two, are its pairs.
template <DType kCode, Decoding kDecoding>
struct PackedCodes;

/// Words of four-bit codes, of each of which a thread has a byte.
struct WordsOfRows : CodeBits<DType::kE2m1> {
  static constexpr int kWords = 8;

  template <int kRowBytes>
  __device__ static void load(const uint8_t* rows, int half, uint32_t* words) {
    const uint8_t* from = rows + swizzled_rows<kRowBytes>(ThreadPlace::mine().row, half);
#pragma unroll
    for (int below = 0; below < 2; ++below) {  // rows eight apart are swizzled alike
      const uint4 all = *reinterpret_cast<const uint4*>(from + 8 * below * kRowBytes);
      words[4 * below] = all.x, words[4 * below + 1] = all.y;
      words[4 * below + 2] = all.z, words[4 * below + 3] = all.w;
    }
  }
};

/// Of two words at once. The halves of a word have a byte of each: codes of even and of odd columns
/// find their places by a product each, and then their neighbours.
template <>
struct PackedCodes<DType::kE2m1, Decoding::kPlain> : WordsOfRows {
  using Table = NoTable;

  __device__ static void place(const NoTable&, const uint32_t* words, uint32_t* to, uint32_t&) {
    constexpr uint32_t kPlaces = 0x81c0'81c0u;
    const uint32_t mine = 0x0400 + threadIdx.x % 4 * 0x0101;  // those bytes of two words
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = __byte_perm(words[2 * i], words[2 * i + 1], mine);
      const uint32_t even = (bytes & 0x000f'000fu) * 0x1040u & kPlaces;
      const uint32_t odd = (bytes & 0x00f0'00f0u) * 0x0104u & kPlaces;
      uint32_t* at = to + i % 2 * 4 + i / 2;
      at[0] = __byte_perm(even, odd, 0x5410), at[2] = __byte_perm(even, odd, 0x7632);
    }
  }
};

/// Numbers, and not over the unit.
template <>
struct PackedCodes<DType::kE2m1, Decoding::kTable> : WordsOfRows {
  using Table = PairTable;

  __device__ static void place(const PairTable& table, const uint32_t* words, uint32_t* to,
                               uint32_t&) {
    const uint32_t mine = PairTable::select(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i % 4 * 2 + i / 4] = table.look_up(words[i], mine);
  }
};

/// Read by pairs: wider words are read by all lanes that have codes in them, at their whole width.
template <>
struct PackedCodes<DType::kE4m3, Decoding::kPlain> : CodeBits<DType::kE4m3> {
  using Table = NoTable;
  static constexpr int kWords = 8;

  template <int kRowBytes>
  __device__ static void load(const uint8_t* rows, int half, uint32_t* words) {
    const uint8_t* mine = rows + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // rows eight apart, and eights of columns
      const uint8_t* from =
          mine + swizzled_rows<kRowBytes>(ThreadPlace::mine().row, 2 * half + i / 4);
      words[i] = *reinterpret_cast<const uint16_t*>(from + i % 2 * 8 * kRowBytes + i / 2 % 2 * 8);
    }
  }
  __device__ static void place(const NoTable&, const uint32_t* words, uint32_t* to,
                               uint32_t& largest) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      to[i] = placed(__byte_perm(words[i], 0, 0x1404), largest);  // as high bytes
  }
};

template <>
struct PackedCodes<DType::kE4m3, Decoding::kSplit> : CodeBits<DType::kE4m3> {
  using Table = NoTable;
  static constexpr int kWords = 4;

  template <int kRowBytes>
  __device__ static void load(const uint8_t* rows, int half, uint32_t* words) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    const Matrices all = ldmatrix(shared_address(
        rows + swizzled_rows<kRowBytes>(warp * 16 + lane % 16, 2 * half + lane / 16)));
    words[0] = all.a, words[1] = all.b, words[2] = all.c, words[3] = all.d;
  }
  __device__ static void place(const NoTable&, const uint32_t* words, uint32_t* to,
                               uint32_t& largest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t* at = to + 4 * (i / 2) + i % 2;
      at[0] = placed(words[i] << 8, largest), at[2] = placed(words[i], largest);
    }
  }
};

}  // namespace cadre::cuda::sm90
