#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bench/buffers.h"
#include "bench/ranks.h"
#include "cadre/collective.h"

namespace cadre::bench {

/// The engine of ranks that are processes: a mailbox for each in memory that all share, into which
/// it puts what it sends, and from which the others take it.
class Mailboxes {
 public:
  /// `bytes`: of what a rank sends at once, at most. Made before the ranks are started.
  Mailboxes(int ranks, int64_t bytes);

  /// Of a rank, which outlives it.
  /// Errors    DeviceError where more is sent than that, or another size than is received.
  AllToAll of(Rank&);

 private:
  /// What a rank sends: message i is bytes [ends[i], ends[i + 1]) of `data`.
  struct Mailbox {
    int64_t* ends;
    char* data;
  };
  void put(Rank&, std::span<const RankMessage>) const;
  void take(Rank&, std::span<const RankMessage>) const;

  int64_t bytes_;
  Buffers memory_{Buffers::ForProcesses{}};
  std::vector<Mailbox> boxes_;
};

}  // namespace cadre::bench
