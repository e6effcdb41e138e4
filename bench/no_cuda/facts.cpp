// The symbol of bench/cuda/facts.cpp in a build without CUDA: there is no device to ask.
#include "bench/facts.h"

namespace cadre::bench {

std::vector<Fact> measure_facts(const Device&) { return {}; }

}  // namespace cadre::bench
