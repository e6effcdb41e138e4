#include "cuda/sm90/expert_maps.h"

#include "cuda/device/launch.h"
#include "cuda/device/tma.h"

// One tensor map an expert, for the next kernel. A warp writes a map: each lane four bytes, then
// one lane puts the address in.
namespace cadre::cuda::sm90 {
namespace {

constexpr int kThreads = 128, kWarp = 32;

__global__ void expert_maps_kernel(const __grid_constant__ CUtensorMap map, ExpertAddresses from,
                                   int experts, ExpertMaps to) {
  begin_dependent();
  const int expert = int(blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp);
  const int lane = int(threadIdx.x) % kWarp;
  if (expert >= experts) return;
  CUtensorMap& mine = to.maps[expert];
  static_assert(sizeof(CUtensorMap) == kWarp * sizeof(uint32_t));
  reinterpret_cast<uint32_t*>(&mine)[lane] = reinterpret_cast<const uint32_t*>(&map)[lane];
  __syncwarp();
  if (lane != 0) return;
  replace_address(mine, from.of(expert));
  tensormap_release(mine);
  if (expert == 0 && to.taken != nullptr) *to.taken = 0;
}

}  // namespace

void write_expert_maps(const CUtensorMap& map, const ExpertAddresses& from, int experts,
                       const ExpertMaps& to, cudaStream_t stream) {
  constexpr int kWarps = kThreads / kWarp;
  const unsigned blocks = unsigned((experts + kWarps - 1) / kWarps);
  launch(expert_maps_kernel,
         {.blocks = blocks, .threads = kThreads, .stream = stream, .dependent = true}, map, from,
         experts, to);
}

}  // namespace cadre::cuda::sm90
