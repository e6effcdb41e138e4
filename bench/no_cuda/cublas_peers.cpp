// The symbols of bench/cuda/cublas_peers.cpp in a build without cuBLAS.
#include "bench/device_peer.h"

namespace cadre::bench {

DevicePeers device_peers(const GroupedGemmCase&, const Mirror&, Accelerator&) {
  return {{},
          "cublas_dense and cublas_graph are not here: this build found no cuBLAS; install its "
          "headers, then configure and build again"};
}

}  // namespace cadre::bench
