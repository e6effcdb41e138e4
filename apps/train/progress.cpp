#include "apps/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numbers>
#include <ostream>

#include "apps/train/number_text.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

constexpr int kLines = 10;
constexpr std::chrono::milliseconds kRedraw{100};

std::string figures(const RunStatus& s) {
  return text("loss ", fixed(s.loss, 3), "  ", fixed(s.loss / std::numbers::ln2, 3), " bits/byte  ",
              thousands(static_cast<int64_t>(s.rows_per_second)), " rows/s");
}

std::string repeated(std::string_view piece, int64_t times) {
  std::string all;
  for (int64_t i = 0; i < times; ++i) all += piece;
  return all;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view words = value;
    return words.find("UTF-8") != words.npos || words.find("utf8") != words.npos;
  }
  return false;
}

}  // namespace

Terminal this_terminal() {
  Terminal terminal;
  winsize size{};
  terminal.present = ::isatty(STDOUT_FILENO) == 1;
  if (terminal.present && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  terminal.utf8 = locale_is_utf8();
  return terminal;
}

std::string progress_line(const RunStatus& s) {
  return text(s.recipe, "  step ", s.step, "/", s.steps, "  ", figures(s), "  ",
              duration(s.seconds_left), " left");
}

std::string progress_bar(const RunStatus& s, const Terminal& terminal) {
  std::string head(s.recipe);
  head.resize(std::max<size_t>(head.size(), 10), ' ');
  const std::string tail =
      text(' ', s.step, '/', s.steps, "  ", figures(s), "  ", duration(s.seconds_left), " left");
  const auto used = static_cast<int64_t>(head.size() + tail.size());
  const int64_t room = terminal.columns - 1 - used;
  if (room < 4) return progress_line(s).substr(0, static_cast<size_t>(terminal.columns - 1));
  const int64_t full = std::min<int64_t>(room, 40), done = full * s.step / s.steps;
  return text(head, repeated(terminal.utf8 ? "█" : "#", done),
              repeated(terminal.utf8 ? "░" : ".", full - done), tail);
}

bool Progress::due(int64_t step, int64_t steps) const {
  if (!terminal_.present) return step * kLines / steps != (step - 1) * kLines / steps;
  return !drawn_ || step == steps || std::chrono::steady_clock::now() - last_ >= kRedraw;
}

void Progress::show(const RunStatus& s) {
  if (!due(s.step, s.steps)) return;
  if (!terminal_.present) {
    out_ << progress_line(s) << std::endl;
    return;
  }
  out_ << '\r' << progress_bar(s, terminal_) << "\x1b[K" << std::flush;
  drawn_ = true;
  last_ = std::chrono::steady_clock::now();
}

void Progress::clear() {
  if (drawn_) out_ << "\r\x1b[K" << std::flush;
  drawn_ = false;
}

}  // namespace cadre::train
