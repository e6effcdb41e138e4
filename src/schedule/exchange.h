#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// An exchange between ranks that read each other's memory, as a state machine: each rank writes
// what it has for the others into its own window and, small lists, into theirs, says so, waits
// until all have said so, reads, and says that it has read. Flags are written by peers and polled
// at home:
//
//   word at home    written by    means
//   ready[p]        rank p        p has written what exchange `epoch` brings, and what that is
//   read[p]         rank p        p has read what I wrote for exchange `epoch`
//
// What a rank has written is written over only when every peer has read it. A rank is at most one
// exchange ahead of any other, since it needs all others' flags of the same exchange; so a flag
// that is ahead says that its rank went through this one in step. Epochs wrap around; nothing is
// ever reset. A rank is a peer of its own, by which those that share its work learn of each other.
//
// Lists may come without the flag "ready": each word of theirs has its epoch beside it, in memory
// for nothing else, and who reads awaits each. They are written behind kWrite, as the rest is.
//
// Who shares it: peers may be gone through side by side, if all have come to kWrite before anything
// is written, and to kRead before anything is read. Of several blocks one leads; the others go from
// kAwaitReady to kRead; and the last one to have read goes on from there.
//
//   Memory   load_read(peer), load_ready(peer): acquire, at home
//            store_ready(peer, tag), store_read(peer, epoch): release, in the window of that peer
//            write(): fills the windows   read(): reads all windows
namespace cadre::schedule {

/// An exchange and what it is: ranks that differ in the latter are out of step. Or a word of a list
/// and its epoch.
struct ReadyTag {
  uint32_t epoch = 0, call = 0;

  CADRE_HD constexpr uint64_t word() const { return uint64_t(epoch) << 32 | call; }
  CADRE_HD static constexpr ReadyTag of(uint64_t word) {
    return {uint32_t(word >> 32), uint32_t(word)};
  }
};

/// Whether an epoch has been reached, however often they have wrapped around.
CADRE_HD constexpr bool has_reached(uint32_t seen, uint32_t epoch) {
  return int32_t(seen - epoch) >= 0;
}

enum class Readiness : uint8_t { kNotYet, kReady, kOutOfStep };

CADRE_HD constexpr Readiness readiness(ReadyTag seen, ReadyTag wanted) {
  if (!has_reached(seen.epoch, wanted.epoch)) return Readiness::kNotYet;
  const bool is_ahead = seen.epoch != wanted.epoch;
  return is_ahead || seen.call == wanted.call ? Readiness::kReady : Readiness::kOutOfStep;
}

/// One way through one exchange, past some of the peers in turn. Each step touches shared memory
/// once.
class Exchange {
 public:
  enum class Step : uint8_t {
    kAwaitReaders,  ///< peers have read what is to be written over
    kWrite,
    kSignal,
    kAwaitReady,
    kRead,
    kRelease,
    kDone,
    kOutOfStep,  ///< a peer is at another call
  };
  struct Peers {
    int first, count;
  };

  /// Of the epoch behind that of the last exchange.
  CADRE_HD constexpr Exchange(const Peers& peers, const ReadyTag& tag,
                              Step from = Step::kAwaitReaders)
      : peers_(peers), peer_(peers.first), tag_(tag), step_(from) {}

  CADRE_HD constexpr Step step() const { return step_; }
  CADRE_HD constexpr int peer() const { return peer_; }  ///< of this step
  CADRE_HD constexpr uint32_t epoch() const { return tag_.epoch; }

  /// Makes a step; false: it is still to wait.
  CADRE_HD_OF_EITHER template <class Memory>
  CADRE_HD constexpr bool advance(Memory&& memory) {
    switch (step_) {
      case Step::kAwaitReaders:
        if (!has_reached(memory.load_read(peer_), tag_.epoch - 1)) return false;
        to_next_peer(Step::kWrite);
        return true;
      case Step::kWrite:
        memory.write();
        step_ = Step::kSignal;
        return true;
      case Step::kSignal:
        memory.store_ready(peer_, tag_.word());
        to_next_peer(Step::kAwaitReady);
        return true;
      case Step::kAwaitReady:
        return await_ready(ReadyTag::of(memory.load_ready(peer_)));
      case Step::kRead:
        memory.read();
        step_ = Step::kRelease;
        return true;
      case Step::kRelease:
        memory.store_read(peer_, tag_.epoch);
        to_next_peer(Step::kDone);
        return true;
      default:
        return false;
    }
  }

 private:
  CADRE_HD constexpr bool await_ready(ReadyTag seen) {
    const Readiness is = readiness(seen, tag_);
    if (is == Readiness::kReady) to_next_peer(Step::kRead);
    if (is == Readiness::kOutOfStep) step_ = Step::kOutOfStep;
    return is != Readiness::kNotYet;
  }
  /// A step for each peer.
  CADRE_HD constexpr void to_next_peer(Step then) {
    if (++peer_ < peers_.first + peers_.count) return;
    peer_ = peers_.first;
    step_ = then;
  }

  Peers peers_;
  int peer_;
  ReadyTag tag_;
  Step step_;
};

}  // namespace cadre::schedule
