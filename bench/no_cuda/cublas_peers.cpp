// What needs cuBLAS, in a build without it.
#include "bench/device_peer.h"
#include "bench/facts.h"

namespace cadre::bench {

DevicePeers device_peers(const GroupedGemmCase&, const Mirror&, Accelerator&) {
  return {{},
          "cublas_dense and cublas_graph are not here: this build found no cuBLAS; install its "
          "headers, then configure and build again"};
}

void add_product_facts(Accelerator&, std::vector<Fact>&) {}

}  // namespace cadre::bench
