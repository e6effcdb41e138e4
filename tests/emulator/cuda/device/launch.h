#pragma once
#include <cuda_runtime.h>

#include <tuple>

#include "cuda/check.h"
#include "tests/emulator/runtime.h"

// The words of src/cuda/device/launch.h: a kernel runs when its stream comes to it, on the CPU.
namespace cadre::cuda {

struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;
  cudaStream_t stream = nullptr;
  int cluster = 1;
  bool cooperative = false;
  bool dependent = false;
};

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  // Blocks that run at once are one cluster here.
  const int blocks = int(grid.blocks.x * grid.blocks.y * grid.blocks.z);
  const emulator::GridShape shape{grid.blocks, grid.threads, grid.shared_bytes,
                                  grid.cooperative ? blocks : grid.cluster, grid.dependent};
  if (grid.cooperative && blocks > emulator::kUnits)
    check(cudaErrorCooperativeLaunchTooLarge, "launch a kernel");
  check(emulator::check_shape(shape), "launch a kernel");
  std::tuple<std::remove_const_t<Params>...> copies(args...);
  emulator::enqueue(grid.stream, cudaGraphNodeTypeKernel,
                    [=] { emulator::run_grid(shape, [&] { std::apply(kernel, copies); }); });
}

/// What is before a kernel is over when it starts here; that each thread waits is looked at.
inline void wait_for_predecessors() { emulator::self().has_waited = true; }
inline void launch_dependents() {}
inline void begin_dependent() { wait_for_predecessors(); }

inline uint8_t* dynamic_shared() { return emulator::self().block->shared; }

}  // namespace cadre::cuda
