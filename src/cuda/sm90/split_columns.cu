#include "cuda/sm90/split_columns.h"

#include <algorithm>

#include "cuda/device/launch.h"
#include "schedule/expert_rows.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kSplitBytes = 2 * kSplitColumns;

/// Of four pairs of columns.
struct Halves {
  uint2 even, odd;
};
__device__ Halves halves_of(const uint4& pairs) {
  return {{__byte_perm(pairs.x, pairs.y, 0x5410), __byte_perm(pairs.z, pairs.w, 0x5410)},
          {__byte_perm(pairs.x, pairs.y, 0x7632), __byte_perm(pairs.z, pairs.w, 0x7632)}};
}

/// A thread copies sixteen columns at a time.
__global__ void split_columns_kernel(const SplitRows rows, unsigned long long* taken) {
  begin_dependent();
  if (blockIdx.x == 0 && threadIdx.x == 0 && taken != nullptr) *taken = 0;
  const int64_t of_row = rows.cols / kSplitColumns;
  const int64_t all = schedule::rows_used(rows.offsets, rows.experts, rows.rows) * of_row;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += int64_t(gridDim.x) * kThreads) {
    const auto* from = reinterpret_cast<const uint4*>(
        static_cast<const char*>(rows.from) + i / of_row * rows.step + i % of_row * kSplitBytes);
    auto* to = static_cast<uint4*>(rows.to) + 2 * i;
    const uint4 one = from[0], two = from[1];
    const Halves first = halves_of(one), second = halves_of(two);
    to[0] = {first.even.x, first.even.y, second.even.x, second.even.y};
    to[1] = {first.odd.x, first.odd.y, second.odd.x, second.odd.y};
  }
}

}  // namespace

void split_columns(const SplitRows& rows, int64_t most_blocks, unsigned long long* taken,
                   cudaStream_t stream) {
  const int64_t all = rows.rows * (rows.cols / kSplitColumns);
  const int64_t blocks = std::min((all + kThreads - 1) / kThreads, most_blocks);
  launch(split_columns_kernel,
         {.blocks = unsigned(blocks), .threads = kThreads, .stream = stream, .dependent = true},
         rows, taken);
}

}  // namespace cadre::cuda::sm90
