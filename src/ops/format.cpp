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
constexpr auto infos(TypeList<Rows...>) {
  return std::array{Rows::kInfo...};
}
constexpr auto kFormats = infos(formats::All{});

constexpr std::array kOptions = {
    FormatOption{"e5m2", "codes are e5m2, with more range and fewer digits, for gradients",
                 &FormatInfo::takes_e5m2},
    FormatOption{"2d", "one scale for block x block codes, which then serve both directions",
                 &FormatInfo::takes_square},
    FormatOption{"pow2", "fp32 scales are powers of two", &FormatInfo::takes_power_of_two},
    FormatOption{"fp32", "fp32 scales are free", &FormatInfo::takes_power_of_two},
    FormatOption{"floor", "e8m0 scales by the OCP rule: rounded down, the largest codes saturate",
                 &FormatInfo::takes_floor},
    FormatOption{"rht",
                 "the copy along rows is Hadamard-transformed; both operands of wgrad must be",
                 &FormatInfo::takes_hadamard},
    FormatOption{"sr", "codes are rounded stochastically, without bias",
                 &FormatInfo::takes_stochastic},
};

// When a format has an option, and how it gets it: one row an option, in the same order.
struct Meaning {
  bool (*holds)(const Format&, const FormatInfo&);
  void (*set)(Format&);
};

constexpr std::array<Meaning, kOptions.size()> kMeanings = {{
    {[](const Format& f, const FormatInfo&) { return f.element == DType::kE5m2; },
     [](Format& f) { f.element = DType::kE5m2; }},
    {[](const Format& f, const FormatInfo&) { return f.square; },
     [](Format& f) { f.square = true; }},
    {[](const Format& f, const FormatInfo& row) {
       return f.power_of_two && !row.power_of_two_default;
     },
     [](Format& f) { f.power_of_two = true; }},
    {[](const Format& f, const FormatInfo& row) {
       return !f.power_of_two && row.power_of_two_default;
     },
     [](Format& f) { f.power_of_two = false; }},
    {[](const Format& f, const FormatInfo&) { return f.floor_scale; },
     [](Format& f) { f.floor_scale = true; }},
    {[](const Format& f, const FormatInfo&) { return f.hadamard; },
     [](Format& f) { f.hadamard = true; }},
    {[](const Format& f, const FormatInfo&) { return f.stochastic; },
     [](Format& f) { f.stochastic = true; }},
}};

const FormatInfo& find_format(std::string_view name) {
  if (name == "fp32") name = "f32";
  if (name == "fp16") name = "f16";
  std::string known;
  for (const FormatInfo& row : kFormats) {
    if (row.name == name) return row;
    known.append(known.empty() ? "" : ", ").append(row.name);
  }
  throw InvalidArgument(text("format: name is '", name, "', must be one of ", known));
}

// The number of an option that a format takes.
size_t find_option(const FormatInfo& row, std::string_view word) {
  std::string known;
  for (size_t i = 0; i < kOptions.size(); ++i) {
    if (!(row.*kOptions[i].takes)) continue;
    if (kOptions[i].word == word) return i;
    known.append(known.empty() ? "" : ", ").append(kOptions[i].word);
  }
  require(!known.empty(), "format: option of ", row.name, " is '", word, "'; ", row.name,
          " takes no options");
  throw InvalidArgument(
      text("format: option of ", row.name, " is '", word, "', must be one of ", known));
}

}  // namespace

std::span<const FormatInfo> format_list() { return kFormats; }
std::span<const FormatOption> format_option_list() { return kOptions; }
const FormatInfo& info(FormatKind kind) {
  require(size_t(kind) < kFormats.size(), "format: kind is ", int(kind), ", must be 0 to ",
          kFormats.size() - 1);
  return kFormats[size_t(kind)];
}

Format format(FormatKind kind) {
  const FormatInfo& row = info(kind);
  return {.kind = kind, .element = row.element, .power_of_two = row.power_of_two_default};
}

bool is_plain(const Format& f) { return is_plain_float(info(f.kind).element); }

bool reads_source_twice(const Format& f) {
  return info(f.kind).has_expert_scale || info(f.kind).block == kWholeLine;
}

Format decoded_format(const Format& f) {
  if (is_plain(f)) return f;
  const FormatInfo& row = info(f.kind);
  const bool free_scales = row.block != 0 && row.scale == DType::kF32 && !f.power_of_two;
  return format(free_scales ? FormatKind::kF32 : FormatKind::kBf16);
}

std::string to_string(const Format& f) {
  const FormatInfo& row = info(f.kind);
  std::string words(row.name);
  char separator = ':';
  for (size_t i = 0; i < kOptions.size(); ++i) {
    if (!kMeanings[i].holds(f, row)) continue;
    words += text(separator, kOptions[i].word);
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
    const size_t found = find_option(row, words.substr(at + 1, length));
    const FormatOption& option = kOptions[found];
    require(std::find(given.begin(), given.end(), option.takes) == given.end(), "format: '", words,
            "' settles ", option.word, " twice; give it once");
    given.push_back(option.takes);
    kMeanings[found].set(f);
    at = next;
  }
  return f;
}

void require_legal(const Format& f) {
  const FormatInfo& row = info(f.kind);
  require(f.element == row.element || (row.takes_e5m2 && f.element == DType::kE5m2),
          "format: element of ", row.name, " is ", name(f.element), ", must be ", name(row.element),
          row.takes_e5m2 ? " or e5m2" : "");
  for (size_t i = 0; i < kOptions.size(); ++i)
    if (kMeanings[i].holds(f, row)) find_option(row, kOptions[i].word);
}

}  // namespace cadre
