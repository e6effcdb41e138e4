#pragma once
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>

namespace cadre::cli {

/// What a seed is: random problems are drawn from 32 bits. A sign and what does not fit would be
/// folded in silence.
inline CLI::Validator a_seed() {
  return CLI::Validator(
      [](const std::string& word) -> std::string {
        uint32_t seed = 0;
        const char* end = word.data() + word.size();
        const auto [stop, error] = std::from_chars(word.data(), end, seed);
        if (error == std::errc() && stop == end) return "";
        return "'" + word + "', must be a whole number from 0 to 4294967295";
      },
      "SEED");
}

}  // namespace cadre::cli
