// A problem prints and parses back: random problems of every operation, and every parse error.
#include "ops/problem_text.h"

#include <gtest/gtest.h>

#include <set>

#include "cadre/grouped_mlp.h"
#include "cadre/operations.h"
#include "tests/judge/errors.h"
#include "tests/ops/random_problems.h"

using namespace cadre;
using test::Dice;

namespace {

constexpr int kProblems = 2000;

template <class Operation>
void prints_and_parses_back() {
  Dice dice(2718);
  std::set<std::string> seen;
  for (int i = 0; i < kProblems; ++i) {
    typename Operation::Problem p;
    test::draw(dice, p);
    const std::string words = to_string(p);
    EXPECT_EQ(Operation::parse(words), p) << words;
    EXPECT_EQ(to_string(Operation::parse(words)), words);
    seen.insert(words);
  }
  EXPECT_GT(seen.size(), size_t(kProblems) * 9 / 10) << "the generator repeats itself";
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "no error";
}

std::string gemm_error(std::string_view words) {
  return error_of([&] { parse_grouped_gemm_problem(words); });
}

std::string activation_error(std::string_view words) {
  return error_of([&] { parse_activation_problem(words); });
}

}  // namespace

TEST(ProblemText, EveryProblemOfEveryOperationParsesBack) {
  for_each(Operations{}, []<class Operation>() {
    SCOPED_TRACE(Operation::kText.name);
    prints_and_parses_back<Operation>();
  });
}

TEST(ProblemText, DefaultsAreLeftOut) {
  const GroupedGemmProblem p = {.rows = 8192, .n = 2048, .k = 4096, .experts = 64};
  EXPECT_EQ(to_string(p), "grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=bf16");
  EXPECT_EQ(to_string(OffsetsProblem{.rows = 8192, .experts = 64}),
            "offsets counts R=8192 E=64 index=i32");
}

TEST(ProblemText, FieldsComeInAnyOrderWithAnySpaces) {
  EXPECT_EQ(parse_grouped_gemm_problem("  grouped_gemm  K=4096\tE=64 fprop N=2048   R=8192 "),
            parse_grouped_gemm_problem("grouped_gemm fprop R=8192 N=2048 K=4096 E=64"));
}

TEST(ProblemText, TheFirstWordNamesTheOperation) {
  EXPECT_EQ(gemm_error("gemm fprop"), "problem: first word is 'gemm', must be 'grouped_gemm'");
  EXPECT_EQ(gemm_error(""), "problem: first word is '', must be 'grouped_gemm'");
}

TEST(ProblemText, BareWordsMustBeThereAndBeKnown) {
  EXPECT_EQ(gemm_error("grouped_gemm R=1"),
            "problem: grouped_gemm lacks its pass; write it behind the operation's name");
  EXPECT_EQ(gemm_error("grouped_gemm forward R=1"),
            "problem: pass is 'forward', must be one of fprop, dgrad, wgrad");
  EXPECT_EQ(gemm_error("grouped_gemm fprop twice R=1"),
            "problem: 'twice' is not name=value; write name=value [grouped_gemm]");
}

TEST(ProblemText, NumbersMustBeNumbers) {
  EXPECT_EQ(gemm_error("grouped_gemm fprop R=many"),
            "problem: R is 'many', must be a whole number");
  EXPECT_EQ(gemm_error("grouped_gemm fprop R="), "problem: R is '', must be a whole number");
  EXPECT_EQ(gemm_error("grouped_gemm fprop R=12x"), "problem: R is '12x', must be a whole number");
  EXPECT_EQ(gemm_error("grouped_gemm fprop R=99999999999999999999"),
            "problem: R is '99999999999999999999', must be a whole number");
  EXPECT_EQ(gemm_error("grouped_gemm fprop R=-1"), "problem: R is -1, must be 0 or more");
  EXPECT_EQ(gemm_error("grouped_gemm fprop E=4294967296"),
            "problem: E is 4294967296, must be below 2^31");
}

TEST(ProblemText, NamesMustBeKnownAndGivenOnce) {
  EXPECT_EQ(gemm_error("grouped_gemm fprop R=1 R=2"), "problem: R is given twice; give it once");
  const std::string error = gemm_error("grouped_gemm fprop R=1 rows=2");
  EXPECT_EQ(error.find("problem: name is 'rows', must be one of "), 0u) << error;
  EXPECT_NE(error.find("R, N, K, E"), error.npos) << error;
}

TEST(ProblemText, FormatsTypesAndActivationsMustBeKnown) {
  EXPECT_EQ(gemm_error("grouped_gemm fprop out=fp7").find("dtype: name is 'fp7', must be one of"),
            0u);
  EXPECT_EQ(activation_error("activation sideways swiglu"),
            "problem: direction is 'sideways', must be one of forward, backward");
  EXPECT_EQ(activation_error("activation forward mish").find("activation: "), 0u)
      << activation_error("activation forward mish");
}

// Who gives one to another activation, be it the default, means that activation with constants.
TEST(ProblemText, ConstantsAreThoseOfOneActivation) {
  EXPECT_EQ(activation_error("activation forward swiglu limit=7"),
            "problem: limit is 7, must be absent; only clamped_swiglu has constants");
  EXPECT_EQ(activation_error("activation forward swiglu offset=1"),
            "problem: offset is 1, must be absent; only clamped_swiglu has constants");
  EXPECT_EQ(gemm_error("grouped_gemm fprop act_alpha=1.702 act=swiglu"),
            "problem: act_alpha is 1.702, must be absent; only clamped_swiglu has constants");
  EXPECT_EQ(error_of([] { parse_grouped_mlp_problem("grouped_mlp alpha=1.702 act=silu"); }),
            "problem: alpha is 1.702, must be absent; only clamped_swiglu has constants");
  const char* words = "activation forward clamped_swiglu R=1 F=1 E=1 z=bf16 h=bf16";
  EXPECT_EQ(to_string(parse_activation_problem(text(words, " limit=7"))), words);
}

// Of problems that were put together by hand.
template <class Problem, class Change>
std::string plan_error(Problem p, Change change) {
  change(p);
  return test::invalid([&] { plan(p, this_cpu()); });
}

TEST(ProblemText, EnumeratorsMustHaveAWord) {
  const auto said = [](const char* name, const char* rest) {
    return text("problem: ", name, " is number 9, must be 0 to ", rest);
  };
  EXPECT_EQ(plan_error(PermuteProblem{}, [](auto& p) { p.pass = PermutePass(9); }),
            said("pass", "3: permute to combine_backward"));
  EXPECT_EQ(plan_error(OffsetsProblem{}, [](auto& p) { p.source = OffsetsSource(9); }),
            said("source", "2: counts to routing"));
  EXPECT_EQ(plan_error(RoutingProblem{}, [](auto& p) { p.score = RoutingScore(9); }),
            said("score", "2: softmax to sigmoid"));
  EXPECT_EQ(plan_error(ActivationProblem{}, [](auto& p) { p.kind = ActivationKind(99); }),
            text("activation: kind is 99, must be 0 to ", activation_list().size() - 1));
  EXPECT_EQ(plan_error(ActivationProblem{}, [](auto& p) { p.tail = Tail(9); }),
            said("tail", "1: keep to zero"));
  EXPECT_EQ(plan_error(QuantizeProblem{},
                       [](auto& p) {
                         p.along_k = format(FormatKind::kMxfp8);
                         p.along_k->kind = FormatKind(77);
                       }),
            text("format: kind is 77, must be 0 to ", format_list().size() - 1));
  EXPECT_EQ(plan_error(QuantizeProblem{}, [](auto& p) { p.kind = RowsKind(9); }),
            said("kind", "1: rows to weights"));
  EXPECT_EQ(plan_error(GroupedMlpProblem{}, [](auto& p) { p.layout = GluLayout(9); }),
            said("layout", "2: concat to interleave32"));
  EXPECT_EQ(test::invalid([] { formats_of(Recipe{}, Pass(9)); }),
            "recipe: pass is 9, must be 0 to 2");
}
