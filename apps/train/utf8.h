#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cadre::train {

/// Length of the UTF-8 sequence that starts at `at`; 0 where none does: a stray or missing
/// continuation, an overlong form, a surrogate, or a code point past U+10FFFF.
constexpr size_t utf8_length(std::string_view bytes, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  const size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || at + length > bytes.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  const uint8_t second = byte(at + 1);
  const bool bad = (lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
                   (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F);
  return bad ? 0 : length;
}

/// The bytes as UTF-8 for a terminal or a page: control characters other than line feed and tab,
/// and bytes that break UTF-8, become a middle dot.
std::string printable(std::string_view);

}  // namespace cadre::train
