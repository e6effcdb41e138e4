#pragma once

namespace cadre::train {

/// While it lives, the first SIGINT (Ctrl-C) or SIGTERM is noted instead of ending the program; a
/// second one ends it at once. A write past the file size limit becomes an error, not a signal.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// The signal that came, or 0.
  static int signal();
};

}  // namespace cadre::train
