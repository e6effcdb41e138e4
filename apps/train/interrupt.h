#pragma once

namespace cadre::train {

/// While it lives, the first SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal closes; not where
/// nohup ignores it) is noted instead of ending the program; a second one ends it at once. So is
/// every SIGPIPE (the reader leaves). A write past the file size limit becomes an error.
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
