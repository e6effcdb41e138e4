#pragma once
#include <string>
#include <vector>

#include "bench/mirror.h"
#include "bench/peer.h"

namespace cadre::bench {

/// Peers that work on the data of a mirrored case; their `run` enqueues on the accelerator's
/// stream.
struct DevicePeers {
  std::vector<Peer> list;
  std::string absent;  ///< which are missing, why, and what to do; empty if none is
};

/// "copy": a copy within the device that moves as many bytes as the case must.
DevicePeers device_copy_peer(const Work&, Accelerator&);

/// "cublas_dense": one cuBLAS product of equal work, all live rows times the first weight.
/// "cublas_graph": one cuBLAS product an expert that has rows, captured in a CUDA graph; it knows
/// the counts on the host. Both overwrite the output of the case.
DevicePeers device_peers(const GroupedGemmCase&, const Mirror&, Accelerator&);

template <class AnyCase>
DevicePeers device_peers(const AnyCase& c, const Mirror&, Accelerator& accelerator) {
  return device_copy_peer(work(c), accelerator);
}

}  // namespace cadre::bench
