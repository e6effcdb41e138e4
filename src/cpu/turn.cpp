#include "cpu/turn.h"

#include <algorithm>
#include <cstdint>

#include "cadre/error.h"
#include "formats/small_float.h"

namespace cadre::cpu {
namespace {

/// Columns whose lines stay in L1 while rows go by, though all of them may fall in one set of it.
constexpr int64_t kBlock = 8;

/// to[j][i] = from[i][j]
template <class Code>
void turn(const TensorView& from, const TensorView& to) {
  const auto* source = static_cast<const Code*>(from.data);
  auto* target = static_cast<Code*>(to.data);
  for (int64_t first = 0; first < from[1]; first += kBlock)
    for (int64_t i = 0; i < from[0]; ++i)
      for (int64_t j = first; j < std::min(first + kBlock, from[1]); ++j)
        target[j * to.stride[1] + i] = source[i * from.stride[0] + j];
}

/// The same for nibbles, two rows at a time.
void turn_nibbles(const TensorView& from, const TensorView& to) {
  const auto* source = static_cast<const uint8_t*>(from.data);
  auto* target = static_cast<uint8_t*>(to.data);
  for (int64_t first = 0; first < from[1]; first += kBlock)
    for (int64_t i = 0; i < from[0]; i += 2) {
      const uint8_t* even = source + i * from.stride[0] / 2;
      const uint8_t* odd = i + 1 < from[0] ? even + from.stride[0] / 2 : nullptr;
      for (int64_t j = first; j < std::min(first + kBlock, from[1]); ++j)
        target[(j * to.stride[1] + i) / 2] = formats::pack_nibbles(
            formats::nibble(even[j / 2], j), odd == nullptr ? 0 : formats::nibble(odd[j / 2], j));
    }
}

}  // namespace

void turn_to_columns(const TensorView& from, const TensorView& to) {
  switch (bits(from.dtype)) {
    case 4:
      return turn_nibbles(from, to);
    case 8:
      return turn<uint8_t>(from, to);
    case 32:
      return turn<uint32_t>(from, to);
    default:
      throw InvalidArgument(
          text("cpu: dtype is ", name(from.dtype), ", must have 4, 8 or 32 bits"));
  }
}

}  // namespace cadre::cpu
