#pragma once
#include <cstdint>

#include "cadre/host_device.h"

namespace cadre::schedule {

/// Which tokens the rows of a batch are, where rows are gathered. Nobody can check slots before a
/// launch, since they live on the device; so readers go through this.
struct RowTokens {
  const int32_t* slot_of = nullptr;  ///< of each row; null: rows are not gathered
  uint32_t slots = 0;                ///< T * top_k
  uint32_t top_k = 1;

  CADRE_HD constexpr bool gather() const { return slot_of != nullptr; }
  /// The token of a row; -1: its slot is none, and it has zeros.
  CADRE_HD constexpr int token_of(int64_t row) const {
    const auto slot = uint32_t(slot_of[row]);
    return slot < slots ? int(slot / top_k) : -1;
  }
};

}  // namespace cadre::schedule
