#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/activation.h"
#include "cadre/error.h"
#include "cadre/offsets.h"
#include "cadre/permute.h"
#include "cadre/quantize.h"
#include "cadre/recipe.h"
#include "cadre/routing.h"

// How problems print and parse back. An operation lists its fields once, in a function
//   template <class Io, class Problem> void fields(Io& io, Problem& p);
// which serves the writer, the reader, and who looks whether enumerators have words. `io.word` is a
// bare word behind the operation's name, `io.always` prints name=value, `io.unless` leaves a field
// out where it has its default.
namespace cadre::ops {

/// The words of an enum, in the order of its values.
template <class Enum>
struct Words;
template <>
struct Words<bool> {
  static constexpr std::array<std::string_view, 2> kList = {"no", "yes"};
};
template <>
struct Words<Pass> {
  static constexpr std::array<std::string_view, 3> kList = {"fprop", "dgrad", "wgrad"};
};
template <>
struct Words<Tail> {
  static constexpr std::array<std::string_view, 2> kList = {"keep", "zero"};
};
template <>
struct Words<Accumulate> {
  static constexpr std::array<std::string_view, 4> kList = {"no", "yes", "device", "per_expert"};
};
template <>
struct Words<Gather> {
  static constexpr std::array<std::string_view, 3> kList = {"no", "lhs", "rhs"};
};
template <>
struct Words<Major> {
  static constexpr std::array<std::string_view, 2> kList = {"row", "column"};
};
template <>
struct Words<OffsetsSource> {
  static constexpr std::array<std::string_view, 3> kList = {"counts", "ends", "routing"};
};
template <>
struct Words<RowsKind> {
  static constexpr std::array<std::string_view, 2> kList = {"rows", "weights"};
};
template <>
struct Words<Axis> {
  static constexpr std::array<std::string_view, 2> kList = {"along_k", "along_rows"};
};
template <>
struct Words<TensorRole> {
  static constexpr std::array<std::string_view, 5> kList = {"x", "w", "dy", "h", "dz"};
};
template <>
struct Words<GluLayout> {
  static constexpr std::array<std::string_view, 3> kList = {"concat", "interleave1",
                                                            "interleave32"};
};
template <>
struct Words<PermutePass> {
  static constexpr std::array<std::string_view, 4> kList = {"permute", "permute_backward",
                                                            "combine", "combine_backward"};
};
template <>
struct Words<RoutingScore> {
  static constexpr std::array<std::string_view, 3> kList = {"softmax", "topk_softmax", "sigmoid"};
};

enum class Direction : uint8_t { kForward, kBackward };
template <>
struct Words<Direction> {
  static constexpr std::array<std::string_view, 2> kList = {"forward", "backward"};
};

std::string word_of(int64_t);
std::string word_of(float);
std::string word_of(DType);
std::string word_of(const Format&);
std::string word_of(ActivationKind);
std::string word_of(const Recipe&);
inline std::string word_of(int value) { return word_of(int64_t(value)); }

template <class Enum>
requires requires { Words<Enum>::kList; }
std::string word_of(Enum value) {
  constexpr auto& kList = Words<Enum>::kList;
  if (size_t(value) >= kList.size()) return std::to_string(int(value));  // of who puts one together
  return std::string(kList[size_t(value)]);
}

void read_word(std::string_view name, std::string_view word, int64_t&);
void read_word(std::string_view name, std::string_view word, int&);
void read_word(std::string_view name, std::string_view word, float&);
void read_word(std::string_view name, std::string_view word, DType&);
void read_word(std::string_view name, std::string_view word, Format&);
void read_word(std::string_view name, std::string_view word, ActivationKind&);
void read_word(std::string_view name, std::string_view word, Recipe&);

template <class Enum>
requires requires { Words<Enum>::kList; }
void read_word(std::string_view name, std::string_view word, Enum& value) {
  std::string known;
  for (size_t i = 0; i < Words<Enum>::kList.size(); ++i) {
    if (word == Words<Enum>::kList[i]) return void(value = Enum(i));
    known += text(i ? ", " : "", Words<Enum>::kList[i]);
  }
  throw InvalidArgument(text("problem: ", name, " is '", word, "', must be one of ", known));
}

template <class Value>
std::string word_of(const std::optional<Value>& value) {
  return word_of(*value);
}
template <class Value>
void read_word(std::string_view name, std::string_view word, std::optional<Value>& value) {
  read_word(name, word, value.emplace());
}

/// Prints fields in the order in which they are named.
class ProblemWriter {
 public:
  explicit ProblemWriter(std::string_view operation) : text_(operation) {}

  template <class Value>
  void word(std::string_view, const Value& value) {
    text_ += text(" ", word_of(value));
  }
  template <class Value>
  void always(std::string_view name, const Value& value) {
    text_ += text(" ", name, "=", word_of(value));
  }
  template <class Value>
  void unless(std::string_view name, const Value& value, const Value& usual) {
    if (!(value == usual)) always(name, value);
  }
  template <class Value>
  void only_where(bool, std::string_view name, const Value& value, const Value& usual,
                  const char*) {
    unless(name, value, usual);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// Reads fields in any order. Every field but the bare words may be absent and keeps its default.
class ProblemReader {
 public:
  /// Splits the words; the first must be `operation`.
  ProblemReader(std::string_view operation, std::string_view words);

  template <class Value>
  void word(std::string_view name, Value& value) {
    read_word(name, next_bare(name), value);
  }
  template <class Value>
  void always(std::string_view name, Value& value) {
    if (const std::string* word = find(name)) read_word(name, *word, value);
  }
  template <class Value>
  void unless(std::string_view name, Value& value, const Value&) {
    always(name, value);
  }
  /// A field that says something only where that holds, and is an error elsewhere, its default too.
  template <class Value>
  void only_where(bool holds, std::string_view name, Value& value, const Value&, const char* why) {
    const std::string* word = find(name);
    if (word == nullptr) return;
    if (!holds)
      throw InvalidArgument(text("problem: ", name, " is ", *word, ", must be absent; ", why));
    read_word(name, *word, value);
  }
  /// The value of a name that the fields do not list, such as `format=`; null if absent.
  const std::string* find(std::string_view name);
  /// Errors    InvalidArgument if a bare word or name=value was not asked for.
  void finish() const;

 private:
  std::string_view next_bare(std::string_view name);

  std::string operation_;
  std::vector<std::string> bare_;
  size_t bare_used_ = 0;
  struct Named {
    std::string name, value;
    bool used = false;
  };
  std::vector<Named> named_;
  std::vector<std::string> asked_;
};

/// The field of operations with a bool `backward`: the bare word forward or backward.
template <class Io, class Flag>
void direction(Io& io, Flag& backward) {
  Direction direction = backward ? Direction::kBackward : Direction::kForward;
  io.word("direction", direction);
  if constexpr (!std::is_const_v<Flag>) backward = direction == Direction::kBackward;
}

/// The constants of an activation, whose kind is read already.
template <class Io, class Constants>
void constant_fields(Io& io, ActivationKind kind, Constants& c, std::string_view alpha = "alpha") {
  const ActivationConstants usual;
  const bool has = kind == ActivationKind::kClampedSwiGlu;
  const char* why = "only clamped_swiglu has constants";
  io.only_where(has, "limit", c.limit, usual.limit, why);
  io.only_where(has, alpha, c.alpha, usual.alpha, why);
  io.only_where(has, "offset", c.offset, usual.offset, why);
}

/// A problem from its words, by its `fields`.
template <class Problem>
Problem read_problem(std::string_view operation, std::string_view words) {
  Problem p;
  ProblemReader reader(operation, words);
  fields(reader, p);
  reader.finish();
  return p;
}

template <class Problem>
std::string write_problem(std::string_view operation, const Problem& p) {
  ProblemWriter writer(operation);
  fields(writer, p);
  return writer.take();
}

/// Looks whether enumerators have words, and prints nothing.
class WordsLook {
 public:
  template <class Value>
  void word(std::string_view name, const Value& value) const {
    look(name, value);
  }
  template <class Value>
  void always(std::string_view name, const Value& value) const {
    look(name, value);
  }
  template <class Value>
  void unless(std::string_view name, const Value& value, const Value&) const {
    look(name, value);
  }
  template <class Value>
  void only_where(bool, std::string_view name, const Value& value, const Value&,
                  const char*) const {
    look(name, value);
  }

 private:
  template <class Value>
  static void look(std::string_view name, const Value& value) {
    if constexpr (requires { Words<Value>::kList; }) {
      constexpr auto& kList = Words<Value>::kList;
      require(size_t(value) < kList.size(), "problem: ", name, " is number ", int(value),
              ", must be 0 to ", kList.size() - 1, ": ", kList.front(), " to ", kList.back());
    } else if constexpr (std::is_same_v<Value, ActivationKind>) {
      static_cast<void>(info(value));
    } else if constexpr (std::is_same_v<Value, Format>) {
      static_cast<void>(info(value.kind));
    } else if constexpr (std::is_same_v<Value, Recipe>) {
      for (const Pass pass : {Pass::kFprop, Pass::kDgrad, Pass::kWgrad}) {
        look(name, formats_of(value, pass).lhs);
        look(name, formats_of(value, pass).rhs);
      }
    } else if constexpr (requires { value.has_value(); }) {
      if (value) look(name, *value);
    }
  }
};

/// Of a problem that was put together by hand, whose enumerators may be anything.
/// Errors    InvalidArgument if one has no word.
template <class Problem>
void require_words(const Problem& p) {
  WordsLook look;
  fields(look, p);
}

}  // namespace cadre::ops
