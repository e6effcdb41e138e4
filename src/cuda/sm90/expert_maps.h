#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cadre::cuda::sm90 {

/// Writes one map an expert: `map` with the address that `pointers`, in device memory, has for it.
/// They are read when the kernel runs, so that a graph may be replayed with other pointers. On the
/// way `taken`, the count of tiles if there is one, becomes zero.
struct ExpertMaps {
  CUtensorMap* maps;
  unsigned long long* taken;
};
void write_expert_maps(const CUtensorMap& map, const void* const* pointers, int experts,
                       const ExpertMaps& to, cudaStream_t);

}  // namespace cadre::cuda::sm90
