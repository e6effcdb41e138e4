#pragma once

namespace cadre {

/// Where work is enqueued: a cudaStream_t, or null for the CPU and for CUDA's default stream. On
/// the CPU every run finishes before it returns.
struct Stream {
  void* handle = nullptr;
};

}  // namespace cadre
