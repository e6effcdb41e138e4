#include "apps/train/number_text.h"

#include <charconv>
#include <cmath>

#include "cadre/error.h"

namespace cadre::train {

std::string fixed(double value, int digits) {
  char buffer[400];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, digits).ptr;
  return std::string(buffer, end);
}

std::string signed_percent(double ratio) {
  if (!std::isfinite(ratio)) return "-";
  const std::string digits = fixed(100 * ratio, 1);
  return text(digits[0] == '-' ? "" : "+", digits, " %");
}

std::string thousands(int64_t count) {
  std::string digits = std::to_string(count);
  for (auto at = std::ssize(digits) - 3; at > (count < 0 ? 1 : 0); at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string duration(double seconds) {
  const int64_t whole = std::llround(seconds);
  const auto two = [](int64_t n) { return text(n < 10 ? "0" : "", n); };
  if (whole < 3600) return text(whole / 60, ':', two(whole % 60));
  return text(whole / 3600, ':', two(whole / 60 % 60), ':', two(whole % 60));
}

}  // namespace cadre::train
