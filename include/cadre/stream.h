#pragma once

#pragma GCC visibility push(default)
namespace cadre {

/// Where work is enqueued: a cudaStream_t, or null for the CPU and for CUDA's default stream. On
/// the CPU every run finishes before it returns.
struct Stream {
  void* handle = nullptr;
};

}  // namespace cadre
#pragma GCC visibility pop
