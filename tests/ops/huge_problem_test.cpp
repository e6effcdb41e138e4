// Problems whose lengths or products of lengths are near 2^31 and 2^63, of every operation and
// layer: each has a plan whose sizes can be counted, or is refused in words.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <new>

#include "bench/check.h"
#include "cadre/error.h"
#include "cadre/grouped_mlp.h"
#include "cadre/layers.h"
#include "cadre/moe.h"
#include "cadre/operations.h"
#include "cadre/sequential.h"
#include "tests/layers/random_layers.h"
#include "tests/ops/random_problems.h"

using namespace cadre;

/// The largest piece of memory that was taken so far.
static size_t largest = 0;

[[gnu::noinline]] void* operator new(size_t bytes) {
  largest = std::max(largest, bytes);
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

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
    "grouped_gemm wgrad R=64 N=32 K=16 E=4 gather=rhs T=32 top_k=2",
    "grouped_gemm fprop R=64 N=32 K=16 E=4 gather=lhs T=32 top_k=2 act=swiglu",
    "grouped_gemm wgrad R=64 N=32 K=16 E=4 format=nvfp4",
    "grouped_gemm fprop R=64 N=32 K=16 E=4 format=mxfp8",
    "grouped_gemm fprop R=64 N=32 K=16 E=4 format=f32 out=f32",
};

/// Problems drawn of each operation and layer, and how many of them were planned and run.
constexpr int kDraws = 1000, kLayerDraws = 200;
struct Tally {
  int planned = 0, ran = 0;
};

/// Those that are planned for, as they are and with very many units.
std::vector<Device> devices() {
  std::vector<Device> list = {this_cpu(), parse_device("sm_90"), this_cpu(), parse_device("sm_80")};
  list[2].units = list[3].units = 1 << 16;
  return list;
}

/// Plans on every device, with no memory of the problem's size. True if the CPU takes it.
template <class Problem>
bool is_planned(const Problem& problem) {
  bool on_cpu = false;
  largest = 0;
  for (const Device& device : devices()) {
    try {
      const auto chosen = plan(problem, device);
      if constexpr (requires { chosen.workspace_bytes; })
        expect_countable(Explanation{.problem = to_string(problem),
                                     .plan = {},
                                     .workspace_bytes = chosen.workspace_bytes,
                                     .refusals = {}});
      else
        expect_countable(LayerExplanation{
            .problem = to_string(problem), .memory = chosen.memory, .steps = explain(chosen)});
      on_cpu = on_cpu || device.kind == DeviceKind::kCpu;
    } catch (const InvalidArgument&) {
    } catch (const Unsupported&) {
    }
  }
  EXPECT_LT(largest, size_t{1} << 16) << to_string(problem);
  return on_cpu;
}

/// Whether every length in the words is small, and so the problem.
bool is_small(const std::string& words) {
  for (const Number& n : numbers_of(words))
    if (n.length > 2) return false;
  return true;
}

template <class Problem>
void draw_all(Tally& tally) {
  test::Dice dice(1963, true);
  for (int i = 0; i < kDraws; ++i) {
    Problem problem;
    test::draw(dice, problem);
    if (!is_planned(problem)) continue;
    ++tally.planned;
    const std::string words = to_string(problem);
    if (!is_small(words)) continue;
    ++tally.ran;
    const auto report = bench::check(words, {});
    EXPECT_TRUE(report.good()) << words << ": " << report.fault;
  }
}

constexpr int64_t kWidths[] = {8, 24, 32};

void draw_layer(test::Dice& dice, unsigned seed, GroupedLinearProblem& p) {
  p = test::random_linear({.rows = 8, .of = {3, 5}}, seed, kWidths);
  p.recipe = recipe_list()[seed % recipe_list().size()].recipe;
  for (int64_t* length : {&p.rows, &p.n, &p.k})
    if (dice.coin()) *length = dice.size();
  p.experts = dice.experts();
  p.options.unit_budget = dice.few(4);
  p.options.align = dice.align();
}

void draw_layer(test::Dice& dice, unsigned seed, GroupedMlpProblem& p) {
  p = test::plain_mlp({.rows = 8, .of = {3, 5}}, seed);
  for (int64_t* length : {&p.rows, &p.hidden, &p.features})
    if (dice.coin()) *length = dice.size();
  p.experts = dice.experts();
  p.options.unit_budget = dice.few(4);
}

void draw_layer(test::Dice& dice, unsigned seed, MoeProblem& p) {
  GroupedMlpProblem experts;
  draw_layer(dice, seed, experts);
  p = {.tokens = 8, .top_k = 1 + int(seed % 2), .hidden = experts.hidden};
  if (dice.coin()) p.tokens = dice.size();
  p.features = experts.features;
  p.experts = experts.experts;
  p.activation = experts.activation;
  p.recipe = experts.recipe;
  p.dtype = experts.dtype;
  p.keep_rows = dice.coin();
  if (dice.coin()) p.shared_features = dice.size();
  p.options = experts.options;
}

/// Neighbours agree, so that what is too large is seen by the ops or the row.
void draw_layer(test::Dice& dice, unsigned seed, SequentialProblem& p) {
  GroupedLinearProblem first, second;
  draw_layer(dice, seed, first);
  draw_layer(dice, seed + 1, second);
  ActivationProblem between{.kind = ActivationKind::kSilu};
  second.rows = between.rows = first.rows;
  second.experts = between.experts = first.experts;
  second.k = between.features = first.n;
  second.dtype = between.z = between.h = first.dtype;
  p = {{first, between, second}, dice.coin()};
}

template <class Problem>
void draw_layers(Tally& tally) {
  test::Dice dice(1977, true);
  for (unsigned i = 0; i < kLayerDraws; ++i) {
    Problem problem;
    draw_layer(dice, i, problem);
    tally.planned += is_planned(problem);
  }
}

}  // namespace

TEST(HugeProblem, DrawnIsPlannedOrRefusedAndRunsWhereSmall) {
  for_each(Operations{}, []<class Operation>() {
    SCOPED_TRACE(Operation::kText.name);
    Tally tally;
    draw_all<typename Operation::Problem>(tally);
    EXPECT_GE(tally.planned, tally.ran);
    EXPECT_GT(tally.ran, 1);
  });
}

TEST(HugeProblem, DrawnOfALayerIsPlannedOrRefused) {
  Tally tally;
  draw_layers<GroupedLinearProblem>(tally);
  EXPECT_GT(std::exchange(tally.planned, 0), 20);
  draw_layers<GroupedMlpProblem>(tally);
  EXPECT_GT(std::exchange(tally.planned, 0), 20);
  draw_layers<MoeProblem>(tally);
  EXPECT_GT(std::exchange(tally.planned, 0), 20);
  draw_layers<SequentialProblem>(tally);
  EXPECT_GT(tally.planned, 4);
}

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
