#pragma once
#include <cuda_runtime_api.h>

#include <functional>

#include "tests/emulator/machine.h"

// The CUDA runtime of the emulator: the functions that src/cuda, bench/cuda and the tests call,
// with the host's memory as the device's. Streams are in order and done at once; a capture keeps
// what a stream was given, and a launch of its graph does it.
namespace cadre::emulator {

/// The device that it shows.
constexpr int kSm = 90, kUnits = 6, kSharedBytes = 227 << 10;

/// What the driver would say to a kernel of that shape.
cudaError_t check_shape(const GridShape&);

/// Does the work, or keeps it where the stream is being captured.
void enqueue(cudaStream_t, cudaGraphNodeType, std::function<void()> work);

}  // namespace cadre::emulator
