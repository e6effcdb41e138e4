#include "ops/problem_text.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace cadre::ops {
namespace {

template <class Number>
Number read_number(std::string_view name, std::string_view word, std::string_view kind) {
  Number value{};
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  require(error == std::errc() && stop == end, "problem: ", name, " is '", word, "', must be ",
          kind);
  return value;
}

}  // namespace

std::string word_of(int64_t value) { return std::to_string(value); }
std::string word_of(DType value) { return std::string(name(value)); }
std::string word_of(const Format& value) { return to_string(value); }
std::string word_of(ActivationKind value) { return std::string(info(value).name); }
std::string word_of(const Recipe& value) { return to_string(value); }

std::string word_of(float value) {
  std::array<char, 32> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return std::string(buffer.data(), end);
}

void read_word(std::string_view name, std::string_view word, int64_t& value) {
  value = read_number<int64_t>(name, word, "a whole number");
  require(value >= 0, "problem: ", name, " is ", value, ", must be 0 or more");
}

void read_word(std::string_view name, std::string_view word, int& value) {
  int64_t wide = 0;
  read_word(name, word, wide);
  require(wide <= std::numeric_limits<int>::max(), "problem: ", name, " is ", wide,
          ", must be below 2^31");
  value = int(wide);
}

void read_word(std::string_view name, std::string_view word, float& value) {
  value = read_number<float>(name, word, "a number of fp32");
  require(std::isfinite(value), "problem: ", name, " is '", word, "', must be finite");
}

void read_word(std::string_view, std::string_view word, DType& value) { value = parse_dtype(word); }
void read_word(std::string_view, std::string_view word, Format& value) {
  value = parse_format(word);
}
void read_word(std::string_view, std::string_view word, ActivationKind& value) {
  value = parse_activation(word);
}
void read_word(std::string_view, std::string_view word, Recipe& value) {
  value = parse_recipe(word);
}

ProblemReader::ProblemReader(std::string_view operation, std::string_view words)
    : operation_(operation) {
  std::vector<std::string> parts;
  for (size_t at = words.find_first_not_of(" \t"); at != words.npos;
       at = words.find_first_not_of(" \t", at)) {
    const size_t end = std::min(words.find_first_of(" \t", at), words.size());
    parts.emplace_back(words.substr(at, end - at));
    at = end;
  }
  require(!parts.empty() && parts[0] == operation, "problem: first word is '",
          parts.empty() ? "" : parts[0], "', must be '", operation, "'");
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t eq = parts[i].find('=');
    if (eq == std::string::npos) {
      bare_.push_back(parts[i]);
      continue;
    }
    const std::string name = parts[i].substr(0, eq);
    for (const Named& other : named_)
      require(other.name != name, "problem: ", name, " is given twice; give it once");
    named_.push_back({name, parts[i].substr(eq + 1)});
  }
}

std::string_view ProblemReader::next_bare(std::string_view name) {
  require(bare_used_ < bare_.size(), "problem: ", operation_, " lacks its ", name,
          "; write it behind the operation's name");
  return bare_[bare_used_++];
}

const std::string* ProblemReader::find(std::string_view name) {
  asked_.emplace_back(name);
  for (Named& field : named_)
    if (field.name == name) {
      field.used = true;
      return &field.value;
    }
  return nullptr;
}

void ProblemReader::finish() const {
  require(bare_used_ == bare_.size(), "problem: '",
          bare_used_ < bare_.size() ? bare_[bare_used_] : "",
          "' is not name=value; write name=value [", operation_, "]");
  std::string known;
  for (const std::string& name : asked_) known += text(known.empty() ? "" : ", ", name);
  for (const Named& field : named_)
    require(field.used, "problem: name is '", field.name, "', must be one of ", known, " [",
            operation_, "]");
}

}  // namespace cadre::ops
