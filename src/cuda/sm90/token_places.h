#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/token_order.h"

namespace cadre::cuda::sm90 {

constexpr int kPlaceBlocks = 128;  ///< into which the rows are cut

/// Which rows of tokens a batch is made of.
struct TokenRows {
  TokenOrder order;
  const int32_t *slot_of, *offsets;  ///< [R], [E + 1]
  int64_t rows;                      ///< R
  int experts;
};

/// Where they begin, of all rows that an expert has, whatever its offsets say; and of each block,
/// whether one of its rows has no token.
struct TokenPlaces {
  uint32_t *places, *lacks;  ///< [R], [kPlaceBlocks]
};

/// Zeroes `taken` too, if it is there.
void write_token_places(const TokenRows&, const TokenPlaces&, unsigned long long* taken,
                        cudaStream_t);

}  // namespace cadre::cuda::sm90
