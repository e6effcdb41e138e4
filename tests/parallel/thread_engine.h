#pragma once
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#include "cadre/collective.h"

namespace cadre::test {

/// The engine of ranks that are threads and have one memory: each reads what the others send. Where
/// sizes differ it throws on all ranks, as none may wait for one that has thrown.
class ThreadEngine {
 public:
  explicit ThreadEngine(int ranks) : sent_(size_t(ranks)) {}

  AllToAll of(int rank) {
    return [this, rank](std::span<const RankMessage> messages, Stream) { run(rank, messages); };
  }
  /// What it has been given so far, by all ranks.
  int64_t bytes() const { return bytes_; }

 private:
  void run(int rank, std::span<const RankMessage> messages) {
    sent_[size_t(rank)] = messages;
    meet();
    bool fits = true;
    const size_t ranks = sent_.size();
    for (size_t i = 0; i < messages.size(); ++i) {
      const std::span<const RankMessage> peer = sent_[i % ranks];
      const size_t at = i / ranks * ranks + size_t(rank);
      fits = fits && at < peer.size() && peer[at].send_bytes == messages[i].receive_bytes;
      if (fits && messages[i].receive_bytes > 0)
        std::memcpy(messages[i].receive, peer[at].send, size_t(peer[at].send_bytes));
    }
    if (!meet(fits, messages)) throw DeviceError("a rank sends other bytes than another receives");
  }
  /// Waits for all ranks. Returns whether all messages so far fit.
  bool meet(bool fits = true, std::span<const RankMessage> messages = {}) {
    std::unique_lock lock(mutex_);
    for (const RankMessage& m : messages) bytes_ += m.send_bytes;
    fits_ = fits_ && fits;
    const size_t round = round_;
    if (++come_ == int(sent_.size())) {
      come_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return fits_;
  }

  std::vector<std::span<const RankMessage>> sent_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int come_ = 0;
  size_t round_ = 0;
  int64_t bytes_ = 0;
  bool fits_ = true;
};

}  // namespace cadre::test
