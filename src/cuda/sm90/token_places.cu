#include "cuda/sm90/token_places.h"

#include "cuda/device/launch.h"
#include "schedule/expert_rows.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void token_places_kernel(const TokenRows rows, const TokenPlaces to,
                                    unsigned long long* taken) {
  begin_dependent();
  const int64_t each = (rows.rows + kPlaceBlocks - 1) / kPlaceBlocks, first = blockIdx.x * each;
  const int64_t used = schedule::rows_used(rows.offsets, rows.experts, rows.rows);
  const int64_t end = min(first + each, used);
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
