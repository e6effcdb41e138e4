#pragma once
#include <string>
#include <vector>

#include "cadre/format.h"

namespace cadre::test {

/// Every format that `wanted(format)` takes, as words: alone, and with each option that makes
/// another format of it.
template <class Wanted>
std::vector<std::string> every_format(Wanted&& wanted) {
  std::vector<std::string> all;
  for (const FormatInfo& row : format_list()) {
    if (wanted(format(row.kind))) all.emplace_back(row.name);
    for (const FormatOption& option : format_option_list()) {
      if (!(row.*option.takes)) continue;
      const std::string words = std::string(row.name) + ":" + std::string(option.word);
      const Format f = parse_format(words);
      if (f != format(row.kind) && wanted(f)) all.push_back(words);
    }
  }
  return all;
}

}  // namespace cadre::test
