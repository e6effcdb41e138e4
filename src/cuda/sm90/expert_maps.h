#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cadre/host_device.h"

namespace cadre::cuda::sm90 {

/// Where experts lie: at pointers in device memory, or so many bytes apart.
struct ExpertAddresses {
  const void* const* pointers;
  const char* first;
  int64_t step;

  CADRE_HD const void* of(int expert) const {
    return pointers != nullptr ? pointers[expert] : first + expert * step;
  }
};

/// Writes one map an expert: `map` with its address. Pointers are read when the kernel runs, so
/// that a graph may be replayed with others. On the way `taken`, the count of tiles if there is
/// one, becomes zero.
struct ExpertMaps {
  CUtensorMap* maps;
  unsigned long long* taken;
};
void write_expert_maps(const CUtensorMap& map, const ExpertAddresses&, int experts,
                       const ExpertMaps& to, cudaStream_t);

}  // namespace cadre::cuda::sm90
