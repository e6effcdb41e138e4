// The list of number formats, and their text.
#include "cadre/format.h"

#include <algorithm>
#include <array>
#include <vector>

#include "cadre/error.h"
#include "formats/list.h"

namespace cadre {
namespace {

template <class... Rows>
constexpr auto infos(formats::TypeList<Rows...>) {
  return std::array{Rows::kInfo...};
}
constexpr auto kFormats = infos(formats::All{});

// A word behind the colon: which kinds take it, when a format has it, and how it gets it.
struct Option {
  std::string_view word;
  bool FormatInfo::*takes;
  bool (*holds)(const Format&, const FormatInfo&);
  void (*set)(Format&);
};

constexpr std::array kOptions = {
    Option{"e5m2", &FormatInfo::takes_e5m2,
           [](const Format& f, const FormatInfo&) { return f.element == DType::kE5m2; },
           [](Format& f) { f.element = DType::kE5m2; }},
    Option{"2d", &FormatInfo::takes_square,
           [](const Format& f, const FormatInfo&) { return f.square; },
           [](Format& f) { f.square = true; }},
    Option{"pow2", &FormatInfo::takes_power_of_two,
           [](const Format& f, const FormatInfo& row) {
             return f.power_of_two && !row.power_of_two_default;
           },
           [](Format& f) { f.power_of_two = true; }},
    Option{"fp32", &FormatInfo::takes_power_of_two,
           [](const Format& f, const FormatInfo& row) {
             return !f.power_of_two && row.power_of_two_default;
           },
           [](Format& f) { f.power_of_two = false; }},
    Option{"floor", &FormatInfo::takes_floor,
           [](const Format& f, const FormatInfo&) { return f.floor_scale; },
           [](Format& f) { f.floor_scale = true; }},
    Option{"rht", &FormatInfo::takes_hadamard,
           [](const Format& f, const FormatInfo&) { return f.hadamard; },
           [](Format& f) { f.hadamard = true; }},
    Option{"sr", &FormatInfo::takes_stochastic,
           [](const Format& f, const FormatInfo&) { return f.stochastic; },
           [](Format& f) { f.stochastic = true; }},
};

const FormatInfo& find_format(std::string_view name) {
  if (name == "fp32") name = "f32";
  if (name == "fp16") name = "f16";
  std::string known;
  for (const FormatInfo& row : kFormats) {
    if (row.name == name) return row;
    known += text(known.empty() ? "" : ", ", row.name);
  }
  throw InvalidArgument(text("format: name is '", name, "', must be one of ", known));
}

const Option& find_option(const FormatInfo& row, std::string_view word) {
  std::string known;
  for (const Option& option : kOptions) {
    if (!(row.*option.takes)) continue;
    if (option.word == word) return option;
    known += text(known.empty() ? "" : ", ", option.word);
  }
  require(!known.empty(), "format: option of ", row.name, " is '", word, "'; ", row.name,
          " takes no options");
  throw InvalidArgument(
      text("format: option of ", row.name, " is '", word, "', must be one of ", known));
}

}  // namespace

std::span<const FormatInfo> format_list() { return kFormats; }
const FormatInfo& info(FormatKind kind) { return kFormats[size_t(kind)]; }

Format format(FormatKind kind) {
  const FormatInfo& row = info(kind);
  return {.kind = kind, .element = row.element, .power_of_two = row.power_of_two_default};
}

bool is_plain(const Format& f) { return is_plain_float(info(f.kind).element); }

std::string to_string(const Format& f) {
  const FormatInfo& row = info(f.kind);
  std::string words(row.name);
  char separator = ':';
  for (const Option& option : kOptions) {
    if (!option.holds(f, row)) continue;
    words += text(separator, option.word);
    separator = '+';
  }
  return words;
}

Format parse_format(std::string_view words) {
  const size_t colon = words.find(':');
  const FormatInfo& row = find_format(words.substr(0, colon));
  Format f = format(row.kind);
  std::vector<bool FormatInfo::*> given;
  for (size_t at = colon; at != words.npos;) {
    const size_t next = words.find('+', at + 1);
    const size_t length = next == words.npos ? next : next - at - 1;
    const Option& option = find_option(row, words.substr(at + 1, length));
    require(std::find(given.begin(), given.end(), option.takes) == given.end(), "format: '", words,
            "' settles ", option.word, " twice; give it once");
    given.push_back(option.takes);
    option.set(f);
    at = next;
  }
  return f;
}

void require_legal(const Format& f) {
  const FormatInfo& row = info(f.kind);
  require(f.element == row.element || (row.takes_e5m2 && f.element == DType::kE5m2),
          "format: element of ", row.name, " is ", name(f.element), ", must be ", name(row.element),
          row.takes_e5m2 ? " or e5m2" : "");
  for (const Option& option : kOptions)
    if (option.holds(f, row)) find_option(row, option.word);
}

}  // namespace cadre
