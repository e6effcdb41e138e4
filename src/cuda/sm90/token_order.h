#pragma once
#include <cstdint>

#include "cadre/host_device.h"

namespace cadre::cuda::sm90 {

constexpr uint32_t kNoPlace = ~0u;  ///< of a row that no token has

/// The order of tokens, of which a batch has a row for each slot token * top_k + choice.
struct TokenOrder {
  int top_k = 1, slots = 0;  ///< slots: T * top_k
  uint32_t token_units = 0;  ///< of sixteen bytes, from a token to the next

  /// Where the token of a slot begins, in units of sixteen bytes from the first one on.
  CADRE_HD uint32_t place_of(int slot) const {
    const bool is_there = slot >= 0 && slot < slots;
    return is_there ? uint32_t(slot) / uint32_t(top_k) * token_units : kNoPlace;
  }
};

/// A batch in the order of tokens, for kernels that copy its rows themselves.
struct TokenBatch {
  const void* tokens = nullptr;      ///< [T, D]
  TokenOrder order{};                ///< theirs
  const int32_t* slot_of = nullptr;  ///< [R]
};

}  // namespace cadre::cuda::sm90
