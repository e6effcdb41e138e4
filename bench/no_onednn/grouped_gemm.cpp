// Without oneDNN (CADRE_ONEDNN=OFF) grouped_gemm has no peer on the CPU.
#include "bench/peer.h"

namespace cadre::bench {

std::vector<Peer> peers(const GroupedGemmCase&) { return {}; }

}  // namespace cadre::bench
