#include "words.h"

#include <algorithm>
#include <sstream>
#include <string>

#include "door.h"

namespace cadre::door {

void require_names(const char* what, std::string_view words,
                   std::initializer_list<std::string_view> names) {
  if (words.find('=') == std::string_view::npos) return;
  std::string known;
  for (const std::string_view name : names) known += text(known.empty() ? "" : ", ", name);
  std::istringstream in{std::string(words)};
  for (std::string word; in >> word;) {
    const size_t end = word.find('=');
    if (end == std::string::npos) continue;
    const std::string_view name = std::string_view(word).substr(0, end);
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), name) != names.end(), what, " is '",
                      words, "', must be without ", name, "; it may name ",
                      known.empty() ? "nothing" : known);
  }
}

void require_activation_names(std::string_view words) {
  require_names("activation", words, {"layout", "limit", "alpha", "offset"});
}

}  // namespace cadre::door
