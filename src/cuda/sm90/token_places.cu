#include "cuda/sm90/token_places.h"

#include "cuda/device/launch.h"
#include "schedule/expert_rows.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int kThreads = 256, kWarp = 32;

/// Where the last rows of all experts end, of a whole warp.
__device__ int64_t end_of_rows(const TokenRows& rows) {
  int end = 0;
  for (int e = int(threadIdx.x) % kWarp; e < rows.experts; e += kWarp)
    end = max(end, int(schedule::rows_of(rows.offsets, e, rows.rows).last));
  return __reduce_max_sync(~0u, end);
}

__global__ void token_places_kernel(const TokenRows rows, const TokenPlaces to,
                                    unsigned long long* taken) {
  begin_dependent();
  const int64_t each = (rows.rows + kPlaceBlocks - 1) / kPlaceBlocks, first = blockIdx.x * each;
  const int64_t all = end_of_rows(rows), end = min(first + each, all);
  bool lacks = false;
  for (int64_t row = first + threadIdx.x; row < end; row += kThreads) {
    const uint32_t place = rows.order.place_of(rows.slot_of[row]);
    to.places[row] = place;
    lacks = lacks || place == kNoPlace;
  }
  lacks = __syncthreads_or(lacks);
  if (threadIdx.x != 0) return;
  to.lacks[blockIdx.x] = lacks;
  if (blockIdx.x == 0 && taken != nullptr) *taken = 0;
}

}  // namespace

void write_token_places(const TokenRows& rows, const TokenPlaces& to, unsigned long long* taken,
                        cudaStream_t stream) {
  launch(token_places_kernel,
         {.blocks = kPlaceBlocks, .threads = kThreads, .stream = stream, .dependent = true}, rows,
         to, taken);
}

}  // namespace cadre::cuda::sm90
