#pragma once
#include <cstdint>

namespace cadre::cuda::gemm {

/// A place in a ring of kLength slots, and the parity of the present round.
template <int kLength>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++at == kLength) at = 0, parity ^= 1;
  }
};

}  // namespace cadre::cuda::gemm
