#pragma once
#include <cstdint>

#include "cadre/host_device.h"

// An exchange between ranks that read each other's memory, as a state machine: each rank writes
// what it has for the others into its own window, says so, waits until all have said so, reads
// theirs, and says that it has read. Flags are written by peers and polled at home:
//
//   word at home    written by    means
//   ready[p]        rank p        p's window holds what exchange `epoch` brings, and what that is
//   read[p]         rank p        p has read my window in exchange `epoch`
//
// A window is written again only when every peer has read it. A rank is at most one exchange ahead
// of any other, since it needs all others' flags of the same exchange; so a flag that is ahead says
// that its rank went through this one in step. Epochs wrap around; nothing is ever reset.
//
//   Memory   load_read(peer), load_ready(peer): acquire, at home
//            store_ready(peer, tag), store_read(peer, epoch): release, in the window of that peer
//            epoch(), set_epoch(epoch): of the last exchange begun, at home, only for this rank
//            write(): fills the own window   read(): reads all windows
namespace cadre::schedule {

/// An exchange and what it is: ranks that differ in the latter are out of step.
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

/// One rank's way through one exchange. Each step touches shared memory once.
class Exchange {
 public:
  enum class Step : uint8_t {
    kAwaitReaders,  ///< peers have read the window that is to be written
    kWrite,
    kSignal,
    kAwaitReady,
    kRead,
    kRelease,
    kDone,
    kOutOfStep,  ///< a peer is at another call
  };

  CADRE_HD constexpr Exchange(int rank, int ranks, uint32_t call)
      : rank_(rank), ranks_(ranks), tag_{0, call} {
    turn_to(Step::kAwaitReaders, Step::kWrite);
  }

  /// The same exchange from a step on, whose epoch is known once it has begun. For who goes through
  /// it in parts.
  CADRE_HD constexpr Exchange(int rank, int ranks, const ReadyTag& tag, Step from)
      : rank_(rank), ranks_(ranks), tag_(tag) {
    turn_to(from, from == Step::kAwaitReaders ? Step::kWrite : from);
  }

  CADRE_HD constexpr Step step() const { return step_; }
  CADRE_HD constexpr int peer() const { return peer_; }  ///< of this step

  /// Makes a step; false: it is still to wait.
  CADRE_HD_OF_EITHER template <class Memory>
  CADRE_HD constexpr bool advance(Memory&& memory) {
    switch (step_) {
      case Step::kAwaitReaders:
        if (!has_reached(memory.load_read(peer_), memory.epoch())) return false;
        to_next_peer(Step::kWrite);
        return true;
      case Step::kWrite:
        memory.write();
        tag_.epoch = memory.epoch() + 1;
        memory.set_epoch(tag_.epoch);
        turn_to(Step::kSignal, Step::kRead);
        return true;
      case Step::kSignal:
        memory.store_ready(peer_, tag_.word());
        to_next_peer(Step::kAwaitReady);
        return true;
      case Step::kAwaitReady:
        return await_ready(ReadyTag::of(memory.load_ready(peer_)));
      case Step::kRead:
        memory.read();
        turn_to(Step::kRelease, Step::kDone);
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
  /// A step for each peer; `alone` if there is none.
  CADRE_HD constexpr void turn_to(Step step, Step alone) {
    peer_ = rank_ == 0 ? 1 : 0;
    step_ = ranks_ == 1 ? alone : step;
  }
  CADRE_HD constexpr void to_next_peer(Step then) {
    peer_ += peer_ + 1 == rank_ ? 2 : 1;
    if (peer_ >= ranks_) turn_to(then, then);
  }

  int rank_, ranks_, peer_ = 0;
  ReadyTag tag_;
  Step step_ = Step::kAwaitReaders;
};

}  // namespace cadre::schedule
