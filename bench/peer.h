#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bench/case.h"

namespace cadre::bench {

/// Another way to do the work of a case, timed launch by launch beside ours. What it needs is made
/// beforehand and owned by the function; it lives no longer than its case.
struct Peer {
  std::string name;
  std::string what;  ///< one line
  std::function<void()> run;
};

/// "copy": a copy by all threads that moves as many bytes as the case must, for operations that
/// memory bounds.
std::vector<Peer> copy_peer(const Work&);

/// "onednn_dense": one dense oneDNN product of equal work, in the faster of bf16 and f32 that this
/// processor runs safely; f32 where an operand is no bf16 number.
std::vector<Peer> peers(const GroupedGemmCase&);

template <class AnyCase>
std::vector<Peer> peers(const AnyCase& c) {
  return copy_peer(work(c));
}

}  // namespace cadre::bench
