#pragma once
#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

// Numbers on the command line are decimal, as those of problems are.
namespace cadre::cli {

/// Whether all of a word is such a number.
template <class Number>
bool is_number(const std::string& word, Number& value) {
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  return error == std::errc() && stop == end;
}

/// What a seed is, for `transform`: random problems are drawn from 32 bits. A sign and what does
/// not fit would be folded in silence.
inline CLI::Validator a_seed() {
  return CLI::Validator(
      [](std::string& word) -> std::string {
        uint32_t seed = 0;
        if (!is_number(word, seed))
          return "'" + word + "', must be a whole number from 0 to 4294967295";
        word = std::to_string(seed);
        return "";
      },
      "SEED");
}

/// Has every number of a verb checked, and written in the one way that CLI11 takes for itself: it
/// has 010 for 8, 0x10 for 16, and takes nan.
inline void take_decimals(CLI::App& verb) {
  const auto takes = [](CLI::Option* option, const char* must, auto number) {
    option->transform(CLI::Validator(
        [must, number](std::string& word) mutable -> std::string {
          if (word.empty()) return "";  // refused by its name, later
          if (!is_number(word, number) || !std::isfinite(double(number)))
            return "'" + word + "', must be " + must;
          if (std::is_integral_v<decltype(number)>) word = std::to_string(number);
          return "";
        },
        ""));
  };
  for (CLI::Option* option : verb.get_options()) {
    const std::string type = option->get_type_name();
    if (type.find("SEED") != type.npos) continue;
    if (type.starts_with("INT")) takes(option, "a whole number", int64_t{0});
    if (type.starts_with("UINT")) takes(option, "a whole number, 0 or more", uint64_t{0});
    if (type.starts_with("FLOAT")) takes(option, "a number", 0.0);
  }
}

}  // namespace cadre::cli
