#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cadre::cuda::sm90 {

constexpr uint32_t kNoPlace = ~0u;  ///< of a row that no token has
constexpr int kPlaceBlocks = 128;   ///< into which the rows are cut

/// Which rows of tokens a batch is made of.
struct TokenRows {
  const int32_t *slot_of, *offsets;  ///< [R], token * top_k + choice; [E + 1]
  int64_t rows;                      ///< R
  int experts, top_k, slots;         ///< slots: T * top_k, what slot_of is below
  uint32_t token_units;              ///< of sixteen bytes, from a token to the next
};

/// Where they begin, in units of sixteen bytes from the first token on, of all rows that an expert
/// has, whatever its offsets say; and of each block, whether one of its rows has no token.
struct TokenPlaces {
  uint32_t *places, *lacks;  ///< [R], [kPlaceBlocks]
};

/// Zeroes `taken` too, if it is there.
void write_token_places(const TokenRows&, const TokenPlaces&, unsigned long long* taken,
                        cudaStream_t);

}  // namespace cadre::cuda::sm90
