// A routing with map=yes makes what offsets make of its choices.
#include "cadre/routing.h"
#include "tests/judge/errors.h"
#include "tests/ops/offsets_case.h"

using namespace cadre;
using test::Tensor;

namespace {

struct Case {
  RoutingProblem p;
  Tensor logits, experts, prob;
  test::OffsetsOut out;

  explicit Case(const RoutingProblem& problem)
      : p(problem),
        logits(DType::kF32, {p.tokens, p.experts}),
        experts(DType::kI32, {p.tokens, p.top_k}),
        prob(DType::kF32, {p.tokens, p.top_k}),
        out(test::map_of(p)) {
    std::mt19937 random(1);
    logits.fill(random, -2, 2);
  }
  RoutingArgs args() const {
    RoutingArgs given{
        .logits = logits.view(), .experts = experts.data<int32_t>(), .prob = prob.data<float>()};
    if (!p.map) return given;
    given.offsets = out.offsets.data<int32_t>();
    given.map = {out.row_of.data<int32_t>(), out.slot_of.data<int32_t>()};
    if (p.row_prob) given.row_prob = out.row_prob.data<float>();
    return given;
  }
  void run_on_cpu(const RoutingArgs& given, std::string_view only = {}) const {
    const RoutingPlan made = plan(p, this_cpu(), only);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    run(made, given, workspace.get(), {});
  }
  test::OffsetsOut of_its_choices() const {
    const auto* first = experts.data<int32_t>();
    const std::vector<int32_t> chosen(first, first + p.tokens * p.top_k);
    return test::offsets_on_cpu(test::map_of(p), chosen, "cpu_reference");
  }
};

TEST(RoutingMap, IsThatOfOffsets) {
  for (const char* only : {"cpu", "cpu_reference"})
    for (int64_t tokens : {0, 1, 70, 3000}) {
      const Case c({.tokens = tokens, .experts = 37, .top_k = 3, .map = true});
      c.run_on_cpu(c.args(), only);
      EXPECT_TRUE(c.out.maps_like(c.of_its_choices())) << only << " " << to_string(c.p);
      EXPECT_EQ(c.out.damage(), "");
    }
}

TEST(RoutingMap, HasTheProbabilitiesOfItsRows) {
  for (const char* only : {"cpu", "cpu_reference"})
    for (int64_t tokens : {0, 1, 70, 3000}) {
      const Case c({.tokens = tokens, .experts = 37, .top_k = 3, .map = true, .row_prob = true});
      c.run_on_cpu(c.args(), only);
      EXPECT_TRUE(c.out.maps_like(c.of_its_choices())) << only << " " << to_string(c.p);
      EXPECT_EQ(c.out.offset_list().back(), 3 * tokens);
      EXPECT_TRUE(c.out.has_row_prob_of(c.prob)) << only << " " << to_string(c.p);
      EXPECT_EQ(c.out.damage(), "");
    }
}

TEST(RoutingMap, MayBeOffsetsAlone) {
  const Case c({.tokens = 9, .experts = 5, .top_k = 2, .map = true});
  RoutingArgs given = c.args();
  given.map = {};
  c.run_on_cpu(given);
  EXPECT_EQ(c.out.offset_list(), c.of_its_choices().offset_list());
  const test::OffsetsOut untouched(test::map_of(c.p));
  EXPECT_EQ(c.out.row_of.bytes(), untouched.row_of.bytes());
  EXPECT_EQ(c.out.slot_of.bytes(), untouched.slot_of.bytes());
}

/// The error of running a small problem after `spoil` changed its arguments.
template <class Spoil>
std::string error(bool map, Spoil&& spoil, bool row_prob = false) {
  const Case c({.tokens = 3, .experts = 4, .top_k = 2, .map = map, .row_prob = row_prob});
  RoutingArgs given = c.args();
  spoil(given, c.prob.data<int32_t>());
  const std::string message = test::invalid([&] { c.run_on_cpu(given); });
  return message.substr(0, message.rfind(" ["));
}

TEST(RoutingMap, IsGivenWhereTheProblemSaysSo) {
  EXPECT_EQ(error(true, [](RoutingArgs& a, int32_t*) { a.offsets = nullptr; }),
            "routing: offsets is null, must point to 5 elements; the problem says map=yes");
  EXPECT_EQ(error(false, [](RoutingArgs& a, int32_t* words) { a.offsets = words; }),
            "routing: offsets is given, must be null; the problem says map=no");
  EXPECT_EQ(error(false, [](RoutingArgs& a, int32_t* words) { a.map.row_of = words; }),
            "routing: map.row_of is given, must be null; the problem says map=no");
  EXPECT_EQ(error(false, [](RoutingArgs& a, int32_t* words) { a.map.slot_of = words; }),
            "routing: map.slot_of is given, must be null; the problem says map=no");
  const auto shifted = [](int32_t* words) {
    return reinterpret_cast<int32_t*>(reinterpret_cast<char*>(words) + 1);
  };
  EXPECT_NE(error(true, [&](RoutingArgs& a, int32_t* w) { a.map.row_of = shifted(w); })
                .find("routing: map.row_of is at "),
            std::string::npos);
  EXPECT_NE(error(true, [&](RoutingArgs& a, int32_t* w) { a.map.slot_of = shifted(w); })
                .find("routing: map.slot_of is at "),
            std::string::npos);
}

TEST(RoutingMap, TakesProbabilitiesOfRowsWhereTheProblemSaysSo) {
  EXPECT_EQ(error(
                true, [](RoutingArgs& a, int32_t*) { a.row_prob = nullptr; }, true),
            "routing: row_prob is null, must point to 6 elements; the problem says row_prob=yes");
  const auto give = [](RoutingArgs& a, int32_t*) { a.row_prob = a.prob; };
  for (bool map : {true, false})
    EXPECT_EQ(error(map, give),
              "routing: row_prob is given, must be null; the problem says row_prob=no");
  EXPECT_NE(error(
                true,
                [](RoutingArgs& a, int32_t*) {
                  a.row_prob = reinterpret_cast<float*>(reinterpret_cast<char*>(a.prob) + 2);
                },
                true)
                .find("routing: row_prob is at "),
            std::string::npos);
}

}  // namespace
