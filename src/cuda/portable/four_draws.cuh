#pragma once
#include "cuda/device/small_float.h"
#include "formats/philox.h"

// The random bits of a thread that has all of what a draw is for.
namespace cadre::cuda::portable {

/// Where the lines of a thread are: of an expert, at eight positions.
struct DrawPlace {
  uint32_t expert, position, first;  ///< first: a line, a multiple of how many there are
  uint32_t zero;                     ///< of which the compiler does not know it
};

/// Draws of four lines at a time. They wait for those before them: all at once take too many
/// registers.
class FourDraws {
 public:
  __device__ FourDraws(const formats::StochasticBits& bits, const DrawPlace& at)
      : lines_(bits.lines(at.expert, at.position)), first_(at.first), zero_(at.zero) {}

  /// Of line first + number, and the next three of that step.
  __device__ void draw(uint32_t number, uint32_t step) {
    uint32_t lines[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) lines[i] = first_ ^ (number + i * step);
    lines_.draw(lines, draws_);
    first_ ^= draws_[3].word[3] & zero_;
  }
  /// What line i of the four has at a position, as StochasticBits::pick.
  __device__ RandomHalf at(int i, int position) const {
    return {draws_[i].word[position / 2], position % 2};
  }

 private:
  formats::PhiloxLines lines_;
  uint32_t first_, zero_;
  formats::PhiloxWords draws_[4];
};

}  // namespace cadre::cuda::portable
