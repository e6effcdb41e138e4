// Problems as `cadre check`, `bench` and `explain` take them. What was parsed prints to words that
// parse to the same, and every number in the words is the one that is printed.
#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/expert_parallel.h"
#include "cadre/grouped_linear.h"
#include "cadre/grouped_mlp.h"
#include "cadre/moe.h"
#include "cadre/operations.h"
#include "cadre/sequential.h"
#include "tests/fuzz/fuzz.h"

using namespace cadre;
using fuzz::accepted;
using fuzz::expect;

namespace {

constexpr size_t kStart = 7;  ///< letters that tell the names apart, or nearly

constexpr std::string_view kWhole[] = {"R",           "N",           "K",     "E",     "T",
                                       "C",           "H",           "F",     "top_k", "groups",
                                       "group_top_k", "unit_budget", "align", "ranks", "layer"};

/// The whole numbers of one operation's words, by name, without leading zeros. Minus zero is zero.
using Numbers = std::map<std::string, std::string>;

Numbers numbers_of(std::string_view words) {
  Numbers numbers;
  for (size_t at = 0; at < words.size();) {
    const size_t end = std::min(words.find_first_of(" \t", at), words.size());
    const std::string_view word = words.substr(at, end - at);
    const size_t equals = std::min(word.find('='), word.size());
    const std::string_view name = word.substr(0, equals);
    if (std::find(std::begin(kWhole), std::end(kWhole), name) != std::end(kWhole)) {
      const std::string_view digits = word.substr(std::min(equals + 1, word.size()));
      const size_t first = digits.find_first_not_of("-0");
      numbers[std::string(name)] = first == digits.npos ? "0" : digits.substr(first);
    }
    at = end + 1;
  }
  return numbers;
}

std::vector<std::string_view> parts_of(std::string_view words) {
  std::vector<std::string_view> parts;
  for (size_t at = 0; at <= words.size();) {
    const size_t end = std::min(words.find('|', at), words.size());
    parts.push_back(words.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

/// A number that is not printed is a default one, which has two digits at the most.
void expect_numbers(std::string_view words, std::string_view printed) {
  const auto given = parts_of(words), shown = parts_of(printed);
  expect(given.size() == shown.size(), words, " prints as ", printed);
  for (size_t i = 0; i < given.size(); ++i) {
    const Numbers of_print = numbers_of(shown[i]);
    for (const auto& [name, digits] : numbers_of(given[i])) {
      const auto found = of_print.find(name);
      const bool same = found == of_print.end() ? digits.size() <= 2 : found->second == digits;
      expect(same, name, " of ", words, " prints as ", printed);
    }
  }
}

template <class Problem>
void look_at(std::string_view words, Problem (*parse)(std::string_view)) {
  Problem problem;
  if (!accepted([&] { problem = parse(words); })) return;
  const std::string printed = to_string(problem);
  const bool parses = accepted([&] {
    const Problem again = parse(printed);
    expect(again == problem && to_string(again) == printed, words, " prints as ", printed);
  });
  expect(parses, words, " prints as ", printed, ", which is refused");
  expect_numbers(words, printed);
}

/// As the operation whose name begins as the words do: other parsers refuse the first word.
template <class... Each>
void look_at_operation(std::string_view words, std::string_view start, TypeList<Each...>) {
  const auto look = [&]<class One>(One) {
    if (start == One::kText.name.substr(0, kStart))
      look_at<typename One::Problem>(words, One::parse);
  };
  (look(Each{}), ...);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view words(reinterpret_cast<const char*>(data), size);
  const size_t first = std::min(words.find_first_not_of(" \t"), words.size());
  const std::string_view start = words.substr(first, kStart);
  if (start == "grouped") look_at(words, parse_grouped_linear_problem);
  if (start == "grouped") look_at(words, parse_grouped_mlp_problem);
  if (words.substr(first, 4) == "moe ") look_at(words, parse_moe_problem);
  if (start == "expert_") look_at(words, parse_expert_parallel_problem);
  if (start == "sequent") look_at(words, parse_sequential_problem);
  look_at_operation(words, start, Operations{});
  return 0;
}
