#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cadre::cuda::sm90 {

/// Columns that change places with each other alone: those of one step of wgmma, which adds their
/// products at once.
constexpr int kSplitColumns = 16;

/// Rows of 16-bit elements, and where they are copied to without gaps: of those sixteen the even
/// ones, then the odd ones. So a thread of wgmma has four neighbours, as two pairs.
struct SplitRows {
  const void* from;
  int64_t step;  ///< bytes, of `from`
  void* to;
  const int32_t* offsets;  ///< [experts + 1]: what is behind their rows is not read
  int experts;
  int64_t rows;
  int cols;
};

/// By so many blocks at most. Zeroes `taken` too, if it is there.
void split_columns(const SplitRows&, int64_t most_blocks, unsigned long long* taken, cudaStream_t);

}  // namespace cadre::cuda::sm90
