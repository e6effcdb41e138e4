#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "apps/train/buffer.h"
#include "apps/train/settings.h"

namespace cadre::train {

/// What a network reads in one call: filled on the host, sent to the engine in one piece.
class Batch {
 public:
  Batch(Engine&, const Settings&, int64_t rows);

  std::span<uint64_t> rng();     ///< [blocks, 2]: seed and offset of each block's rounding
  std::span<uint8_t> windows();  ///< [T, W], nearest byte first
  std::span<uint8_t> targets();  ///< [T]
  void send();                   ///< what follows may change the host's side

  const uint64_t* sent_rng() const { return reinterpret_cast<const uint64_t*>(sent_.data()); }
  const uint8_t* sent_windows() const { return sent_.data() + windows_at_; }
  const uint8_t* sent_targets() const { return sent_.data() + targets_at_; }

 private:
  Engine& engine_;
  int64_t rows_;
  int64_t windows_at_, targets_at_;  ///< bytes from the start
  std::vector<uint64_t> host_;       ///< words, so that rng() is aligned
  Buffer<uint8_t> sent_;
};

}  // namespace cadre::train
