#pragma once
#include <algorithm>
#include <type_traits>

#include "cuda/device/matrices.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/packed_codes.cuh"
#include "cuda/sm90/packed_rows.h"
#include "formats/e8m0.h"
#include "formats/small_float.h"

// The block scales of packed weights, as the bf16 factors of the codes' bits.
namespace cadre::cuda::sm90 {

/// The factors of two scales, whose codes are the halves of a word, as bf16 in those halves.
template <class Scale, int kUnitExponent>
struct ScalePairs;

template <int kUnitExponent>
struct ScalePairs<formats::E8m0, kUnitExponent> {
  /// Whether unit times scale is a number, of all four.
  __device__ static bool take_unit(uint32_t first, uint32_t second) {
    constexpr uint32_t kRest = 0x8000 - (255 - kUnitExponent);
    return ((__vmaxu2(first, second) + (kRest | kRest << 16)) & 0x8000'8000u) == 0;
  }
  __device__ static uint32_t with_unit(uint32_t both) {
    constexpr uint32_t kUnit = kUnitExponent << 7;
    return (both << 7) + (kUnit | kUnit << 16);
  }
  /// The exponent goes to its place; 0 is the subnormal half of the least power, 255 a NaN.
  __device__ static uint32_t alone(uint32_t both) {
    const uint32_t inner = ((both + 0x0001'0001u) & 0x00fe'00feu) + 0x00fe'00feu;
    return (both << 7) | (~inner & 0x0100'0100u) >> 2;
  }
};

template <int kUnitExponent>
struct ScalePairs<formats::E4m3, kUnitExponent> {
  __device__ static bool take_unit(uint32_t first, uint32_t second) {
    constexpr uint32_t kLeast = (255 - kUnitExponent) << 7, kRest = 0x8000 - kLeast;
    const uint32_t most = __vmaxu2(alone(first) & 0x7fff'7fffu, alone(second) & 0x7fff'7fffu);
    return ((most + (kRest | kRest << 16)) & 0x8000'8000u) == 0;
  }
  __device__ static uint32_t with_unit(uint32_t both) {
    return mul_bf16(alone(both), pair_of_units<kUnitExponent>());
  }
  __device__ static uint32_t alone(uint32_t both) {
    using Bits = CodeBits<DType::kE4m3>;
    uint32_t largest = 0, placed = Bits::placed(both << 8, largest);
    Bits::put_nan(placed);
    return mul_bf16(placed, Bits::unit());
  }
};

/// The scales of the two rows of w that a thread decodes. In rounds of some parts of 64 codes four
/// lanes read some of each row each, a round before they are needed, and show them to each other.
/// A round is a stage, or some where they are short. kExact: codes become numbers by a table, and
/// factors are the scales alone; else they are times the unit, unless that is no number for one of
/// the warp's, and then codes take the unit first.
template <class Format, int kParts, bool kExact>
class PackedFactors {
 public:
  static constexpr int kBlock = Format::kInfo.block;
  static constexpr int kMany = kPackedDepth / kBlock;  ///< of a row of a part
  static_assert(kMany == 2 || kMany == 4);

  __device__ explicit PackedFactors(const PackedScales& scales) : scales_(scales) {}

  /// Starts to read those of a consumer's rows of a tile.
  __device__ void begin(const TileRecord& tile, int consumer) {
    expert_ = scales_.of(tile.expert);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows behind the last one have its scales
      const int row = tile.row + kConsumerRows * consumer + ThreadPlace::mine().row + 8 * i;
      const int last = tile.row_limit - 1;
      rows_[i] = scales_.row_at(row < last ? row : last);
    }
    next_ = int(threadIdx.x) % 4 * kOfLane;
    read();
  }

  /// Before that part is decoded, by a whole warp: part of a stage that begins with part `first`.
  __device__ void next_part(int first, int part) {
    const int of_round = (kRound == kParts ? part : first + part) % kRound;
    if (part == 0 && of_round == 0) {
      take();
      read();
    }
    const int lane = int(threadIdx.x) % kWarp / 4 * 4 + of_round * kMany / kOfLane;
#pragma unroll
    for (int i = 0; i < 2 * kShown; ++i)
      shown_.words[i / kShown][i % kShown] = __shfl_sync(
          0xffffffff, mine_[i / kShown][i % kShown % kWords], lane + i % kShown / kWords);
  }
  /// Of a part, of both rows: two in a word.
  struct OfPart {
    uint32_t words[2][kMany / 2];

    __device__ uint32_t pair(int row, int block) const {
      const uint32_t both = words[row][block / 2];
      return block % 2 == 0 ? twice<0>(both) : twice<1>(both);
    }
  };
  __device__ OfPart of_part() const { return shown_; }
  /// Whether codes take the unit and then the factor.
  __device__ bool in_two_steps() const { return in_two_steps_; }

 private:
  using Scale = typename Format::Scale;
  using Pairs = ScalePairs<Scale, CodeBits<Format::kInfo.element>::kUnitExponent>;
  static constexpr int kOfLane = std::max(2, kParts* kMany / 4);  ///< of a row, in a round
  static constexpr int kRound = 4 * kOfLane / kMany;              ///< parts
  static constexpr int kWords = kOfLane / 2;                      ///< of factors of a lane
  static constexpr int kShown = kMany / 2;                        ///< of a row of a part
  static_assert(kOfLane <= 4 && kRound % kParts == 0);

  /// This lane's scales of the next round. Behind a row's last ones are those again: there, codes
  /// are zero.
  __device__ void read() {
    using Word = std::conditional_t<kOfLane == 4, uint32_t, uint16_t>;
    if (scales_.col_step == 1 && scales_.together >= kOfLane) {
      const int last = scales_.cols - kOfLane;
      const int at = next_ < last ? next_ : last;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        read_[row] = *reinterpret_cast<const Word*>(expert_ + (rows_[row] + at));
    } else {
      read_[0] = read_apart(0);
      read_[1] = read_apart(1);
    }
    next_ += 4 * kOfLane;
  }
  __device__ uint32_t read_apart(int row) const {
    const int last = scales_.cols - 1;
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = next_ + i < last ? next_ + i : last;
      const char* from = expert_ + rows_[row] + int64_t(at) * scales_.col_step;
      all |= uint32_t(*reinterpret_cast<const uint8_t*>(from)) << 8 * i;
    }
    return all;
  }
  __device__ void take() {
    uint32_t both[2][kWords];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      both[row][0] = __byte_perm(read_[row], 0, 0x4140);
      if (kWords == 2) both[row][kWords - 1] = __byte_perm(read_[row], 0, 0x4342);
    }
    if constexpr (!kExact) {
      bool fits = true;
#pragma unroll
      for (int i = 0; i < kWords; ++i) fits = fits && Pairs::take_unit(both[0][i], both[1][i]);
      in_two_steps_ = __any_sync(0xffffffff, !fits) != 0;
    }
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i)
      mine_[i / kWords][i % kWords] = Pairs::with_unit(both[i / kWords][i % kWords]);
    if (!kExact && !in_two_steps_) return;
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i)
      mine_[i / kWords][i % kWords] = Pairs::alone(both[i / kWords][i % kWords]);
  }

  const PackedScales& scales_;
  const char* expert_ = nullptr;
  int64_t rows_[2];           ///< bytes from there
  int next_ = 0;              ///< column of scales
  uint32_t read_[2];          ///< codes of this lane for the next round
  uint32_t mine_[2][kWords];  ///< this lane's factors for this round, as bf16
  OfPart shown_{};            ///< those of this part
  bool in_two_steps_ = false;
};

}  // namespace cadre::cuda::sm90
