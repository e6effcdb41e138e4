// The symbols of bench/cuda/facts.cpp in a build without CUDA: there is no device to ask.
#include "bench/facts.h"

namespace cadre::bench {

std::vector<Fact> measure_facts(const Device&) { return {}; }
std::vector<Fact> measure_link_facts(const Device&, const Device&) { return {}; }

}  // namespace cadre::bench
