#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>

#include "tests/emulator/machine.h"

// TMA: boxes of tensors, by tensor maps that the emulated driver encodes.
namespace cadre::emulator {

/// What an emulated CUtensorMap holds.
struct MapData {
  uint64_t base = 0;
  uint64_t step[4] = {};  ///< bytes, from dimension 1 on
  uint64_t extent[5] = {1, 1, 1, 1, 1};
  uint32_t box[5] = {1, 1, 1, 1, 1};
  uint32_t element_bytes = 0, is_float = 0, magic = 0;
  int swizzle = 0;  ///< bytes

  int row_bytes() const { return int(box[0] * element_bytes); }
  int bytes() const { return row_bytes() * int(box[1] * box[2] * box[3] * box[4]); }
};

MapData data_of(const CUtensorMap&);
CUtensorMap map_of(const MapData&);

using Coordinates = std::array<int, 5>;

/// Whom a load tells: the barrier of this block, and the blocks that it is for, a bit each.
struct Delivery {
  uint64_t* barrier;
  uint16_t blocks;
};
void start_load(void* to, const CUtensorMap&, const Coordinates&, const Delivery&);
void start_bulk_load(void* to, const void* from, uint32_t bytes, const Delivery&);
void start_store(const CUtensorMap&, const Coordinates&, const void* from, bool adds);
void tma_commit();
/// Until all but the youngest `left` groups have read shared memory, or written device memory too.
void tma_wait(int left, bool written);

}  // namespace cadre::emulator
