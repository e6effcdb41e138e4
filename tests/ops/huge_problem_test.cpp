// Problems whose lengths or products of lengths are near 2^31 and 2^63, of every operation and
// layer: each has a plan whose sizes can be counted, or is refused in words.
#include <gtest/gtest.h>

#include <cctype>

#include "cadre/error.h"
#include "cadre/layers.h"
#include "cadre/operations.h"

using namespace cadre;

namespace {

constexpr int64_t kLengths[] = {(int64_t{1} << 24) - 1, (int64_t{1} << 31) - 1,
                                int64_t{1} << 31,       int64_t{1} << 32,
                                int64_t{1} << 43,       int64_t{1} << 55,
                                int64_t{1} << 61,       int64_t{1} << 62,
                                INT64_MAX - 1,          INT64_MAX};

/// Where a problem's text has a number, and how long it is.
struct Number {
  size_t at, length;
};

std::vector<Number> numbers_of(const std::string& problem) {
  std::vector<Number> found;
  for (size_t at = problem.find('='); at != problem.npos; at = problem.find('=', at + 1)) {
    const size_t end = std::min(problem.find(' ', at), problem.size());
    const size_t digits = problem.find_first_not_of("0123456789", at + 1);
    if (std::min(digits, problem.size()) == end) found.push_back({at + 1, end - at - 1});
  }
  return found;
}

std::string with(std::string problem, const Number& number, int64_t value) {
  return problem.replace(number.at, number.length, std::to_string(value));
}

void expect_countable(const Explanation& e) { EXPECT_GE(e.workspace_bytes, 0) << e.problem; }
void expect_countable(const LayerExplanation& e) {
  const LayerMemory& m = e.memory;
  for (const int64_t bytes :
       {m.forward_workspace_bytes, m.backward_workspace_bytes, m.wgrad_workspace_bytes,
        m.saved_bytes, m.pending_bytes, m.weight_cache_bytes})
    EXPECT_GE(bytes, 0) << e.problem;
  for (size_t at = e.steps.find(" -"); at != e.steps.npos; at = e.steps.find(" -", at + 1))
    EXPECT_FALSE(std::isdigit(e.steps[at + 2])) << e.problem << "\n" << e.steps;
}

template <class Info>
void explain(const Info& info, const std::string& problem) {
  for (const char* device : {"cpu", "sm_90"}) {
    try {
      expect_countable(info.explain(problem, parse_device(device)));
    } catch (const InvalidArgument&) {
    } catch (const Unsupported&) {
    }
  }
}

/// One number, and every two, made huge; the later one first, so that places stay.
template <class Info>
void explain_huge(const Info& info, const std::string& problem) {
  const std::vector<Number> numbers = numbers_of(problem);
  EXPECT_GE(numbers.size(), 2u) << problem;
  for (const Number& second : numbers)
    for (const int64_t value : kLengths) {
      const std::string one = with(problem, second, value);
      explain(info, one);
      for (const Number& first : numbers)
        for (const int64_t other : kLengths)
          if (first.at < second.at) explain(info, with(one, first, other));
    }
}

constexpr const char* kMore[] = {
    "grouped_gemm dgrad R=64 N=32 K=16 E=4",
    "grouped_gemm wgrad R=64 N=32 K=16 E=4",
    "grouped_gemm wgrad R=64 N=32 K=16 E=4 format=nvfp4",
    "grouped_gemm fprop R=64 N=32 K=16 E=4 format=mxfp8",
    "grouped_gemm fprop R=64 N=32 K=16 E=4 format=f32 out=f32",
};

}  // namespace

TEST(HugeProblem, IsPlannedOrRefused) {
  for (const OperationInfo& operation : operation_list()) {
    explain_huge(operation, std::string(operation.example));
    for (const char* problem : kMore)
      if (operation.name == "grouped_gemm") explain_huge(operation, problem);
  }
}

TEST(HugeProblem, OfALayerIsPlannedOrRefused) {
  for (const LayerInfo& layer : layer_list()) explain_huge(layer, std::string(layer.example));
}

TEST(HugeProblem, IsToldByItsLengths) {
  const auto error = [](const std::string& problem) -> std::string {
    try {
      plan(parse_grouped_gemm_problem(problem), this_cpu());
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(error("grouped_gemm fprop R=1 N=9223372036854775807 K=2 E=3")
                .find("R * N is 1 * 9223372036854775807, must be at most 2^44; no tensor "
                      "has more elements"),
            std::string::npos);
  EXPECT_NE(error("grouped_gemm fprop R=1 N=1 K=2 E=16777216").find("E is 16777216, must be below"),
            std::string::npos);
}
