#include "bench/peer.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cadre/error.h"

namespace cadre::bench {

namespace {

constexpr int64_t kPiece = 1 << 16;  // bytes that a thread copies at a time

}  // namespace

std::vector<Peer> copy_peer(const Work& work) {
  const auto bytes = int64_t(work.bytes / 2);  // half of them read, half of them written
  const auto buffers = std::make_shared<Buffers>();
  const char* from = buffers->array<char>(bytes);
  char* to = buffers->array<char>(bytes);
  return {{"copy", text("a copy of ", bytes, " bytes"), [buffers, from, to, bytes] {
#pragma omp parallel for
             for (int64_t at = 0; at < bytes; at += kPiece)
               std::memcpy(to + at, from + at, size_t(std::min(kPiece, bytes - at)));
           }}};
}

}  // namespace cadre::bench
