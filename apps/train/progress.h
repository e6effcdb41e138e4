#pragma once
#include <chrono>
#include <iosfwd>
#include <string>
#include <string_view>

namespace cadre::train {

/// Where a run stands.
struct RunStatus {
  std::string_view recipe;
  int64_t step = 0, steps = 1;
  double loss = 0;  ///< nats per byte, averaged over the last steps
  double rows_per_second = 0;
  double seconds_left = 0;
};

/// What a terminal can show.
struct Terminal {
  bool present = false;
  int columns = 80;
  bool utf8 = false;
};

/// Standard output as a terminal, as the system describes it.
Terminal this_terminal();

/// One line that fits the columns: a bar, loss, bits per byte, rows per second, time left.
std::string progress_bar(const RunStatus&, const Terminal&);

/// The same as a plain line.
std::string progress_line(const RunStatus&);

/// Shows where a run stands: on a terminal one line drawn over itself, elsewhere ten plain lines.
/// Nothing is shown where it is not due.
class Progress {
 public:
  Progress(std::ostream& out, const Terminal& terminal) : out_(out), terminal_(terminal) {}

  /// Whether a line would be shown after this step; to find out what it says may take time.
  bool due(int64_t step, int64_t steps) const;
  void show(const RunStatus&);
  /// Takes the bar away, so that other text can follow.
  void clear();

 private:
  std::ostream& out_;
  Terminal terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace cadre::train
