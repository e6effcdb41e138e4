#include "backend/pointers.h"

#include <algorithm>

#include "cuda/portable/launch.h"

// Addresses are passed as a kernel parameter: 4 KiB, which every CUDA version allows, hold kMost.
namespace cadre::cuda {
namespace {

constexpr int kMost = 448;

struct Pointers {
  const void* of[kMost];
};

__global__ void write_pointers_kernel(const __grid_constant__ Pointers pointers, int count,
                                      const void** table) {
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) table[i] = pointers.of[i];
}

}  // namespace

void write_pointers(std::span<const void* const> pointers, const void** table, Stream stream) {
  for (size_t first = 0; first < pointers.size(); first += kMost) {
    const size_t count = std::min(pointers.size() - first, size_t(kMost));
    Pointers some{};
    std::copy_n(pointers.begin() + ptrdiff_t(first), count, some.of);
    launch(write_pointers_kernel, {1, 128, 0, portable::stream_of(stream)}, some, int(count),
           table + first);
  }
}

}  // namespace cadre::cuda
