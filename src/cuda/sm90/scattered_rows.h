#pragma once
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/token_order.h"

namespace cadre::cuda::sm90 {

/// Places of rows, in the memories of several ranks.
struct PlaceMemory {
  char* first = nullptr;                   ///< row of the first place
  uint32_t row_units = 0, rank_units = 0;  ///< of sixteen bytes, from one to the next
  int places = 0, all_places = 0;          ///< of a rank; of all

  /// Where a place begins, in units of sixteen bytes from the first one on.
  CADRE_HD uint32_t begin_of(int place) const {
    if (place < 0 || place >= all_places) return kNoPlace;
    const auto rank = unsigned(place) / unsigned(places), rest = unsigned(place) % unsigned(places);
    return rank * rank_units + rest * row_units;
  }
};

/// What the kernel of fprop and dgrad to places is launched with; TMA does not write y.
struct ScatteredRowsParams : RaggedRowsParams {
  PlaceMemory to{};
  const int32_t* place_of = nullptr;  ///< [R]
};

/// Which instance: how the weight lies, and the type of all tensors.
struct ScatteredRowsKind {
  bool k_major = true;  ///< rows of w run along the contraction, else across it
  DType type = DType::kBf16;
};

/// One instance, launched; instances/ has them, a file each.
template <ScatteredRowsKind kKind>
void launch_scattered_rows(const ScatteredRowsParams&, int blocks, cudaStream_t);

/// The instance of that kind, of bf16 or f16.
using LaunchScatteredRows = void (*)(const ScatteredRowsParams&, int blocks, cudaStream_t);
LaunchScatteredRows find_scattered_rows(const ScatteredRowsKind&);

}  // namespace cadre::cuda::sm90
