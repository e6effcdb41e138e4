#pragma once
#include <cstdint>

// Tiles side by side that are taken at once.
namespace cadre::schedule {

/// How many of a line of tiles make a strip: `most` or fewer, so that no strip of the line is
/// narrower than the others by more than there are strips.
constexpr int64_t even_strip(int64_t tiles, int64_t most) {
  const int64_t strips = (tiles + most - 1) / most;
  return strips == 0 ? most : (tiles + strips - 1) / strips;
}

}  // namespace cadre::schedule
