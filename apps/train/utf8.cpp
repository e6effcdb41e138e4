#include "apps/train/utf8.h"

#include <algorithm>

namespace cadre::train {

std::string printable(std::string_view bytes) {
  std::string shown;
  for (size_t at = 0; at < bytes.size();) {
    const size_t length = utf8_length(bytes, at);
    const auto byte = static_cast<uint8_t>(bytes[at]);
    const bool plain = length > 0 && (byte >= 32 || byte == '\n' || byte == '\t') && byte != 127;
    shown += plain ? bytes.substr(at, length) : "\xC2\xB7";
    at += std::max<size_t>(length, 1);
  }
  return shown;
}

}  // namespace cadre::train
