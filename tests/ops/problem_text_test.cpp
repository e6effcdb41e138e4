// A problem prints and parses back: random problems of every operation, and every parse error.
#include "ops/problem_text.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "cadre/operations.h"

using namespace cadre;

namespace {

constexpr int kProblems = 2000;

// Draws the fields of random problems.
class Dice {
 public:
  explicit Dice(uint64_t seed) : bits_(seed) {}

  int64_t below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(bits_);
  }
  int64_t size() { return below(5) == 0 ? below(int64_t(1) << 40) : below(10000); }
  int experts() { return 1 + int(below(1024)); }
  bool coin() { return below(2) == 1; }
  float number() {
    return below(3) == 0 ? std::ldexp(float(below(1 << 24)) - (1 << 23), int(below(200)) - 150)
                         : float(below(100)) / 8;
  }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[below(int64_t(list.size()))];
  }
  template <class Enum>
  Enum word() {
    return Enum(below(int64_t(ops::Words<Enum>::kList.size())));
  }
  DType plain() { return one_of({DType::kF32, DType::kBf16, DType::kF16}); }
  Format format() {
    const FormatInfo& row = format_list()[below(int64_t(format_list().size()))];
    Format f = cadre::format(row.kind);
    if (row.takes_e5m2 && coin()) f.element = DType::kE5m2;
    f.square = row.takes_square && coin();
    if (row.takes_power_of_two) f.power_of_two = coin();
    f.floor_scale = row.takes_floor && coin();
    f.hadamard = row.takes_hadamard && coin();
    f.stochastic = row.takes_stochastic && coin();
    return f;
  }

 private:
  std::mt19937_64 bits_;
};

void draw(Dice& dice, OffsetsProblem& p) {
  p.source = dice.word<OffsetsSource>();
  p.rows = dice.size();
  p.experts = dice.experts();
  if (p.source == OffsetsSource::kRouting) {
    p.tokens = dice.size();
    p.top_k = int(dice.below(9));
  }
  p.index = dice.one_of({DType::kI32, DType::kI64});
}

void draw(Dice& dice, RoutingProblem& p) {
  p = {.backward = dice.coin(),
       .score = dice.word<RoutingScore>(),
       .tokens = dice.size(),
       .experts = dice.experts(),
       .top_k = int(dice.below(9)),
       .logits = dice.plain(),
       .normalize = dice.coin(),
       .scale = dice.number(),
       .expert_bias = dice.coin(),
       .groups = int(dice.below(9)),
       .group_top_k = int(dice.below(9))};
}

void draw(Dice& dice, PermuteProblem& p) {
  p = {.pass = dice.word<PermutePass>(),
       .tokens = dice.size(),
       .top_k = int(dice.below(9)),
       .rows = dice.size(),
       .hidden = dice.size(),
       .experts = dice.experts(),
       .dtype = dice.plain(),
       .prob = dice.coin(),
       .tail = dice.word<Tail>()};
}

void draw(Dice& dice, QuantizeProblem& p) {
  p.kind = dice.word<RowsKind>();
  p.rows = dice.size();
  p.cols = dice.size();
  p.experts = dice.experts();
  p.source = dice.plain();
  const int64_t copies = 1 + dice.below(3);
  if (copies & 1) p.along_k = dice.format();
  if (copies & 2) p.along_rows = dice.format();
  p.role = dice.word<TensorRole>();
  p.amax_eps = dice.coin() ? 0 : std::abs(dice.number());
  p.discrete = p.kind == RowsKind::kWeights && dice.coin();
  p.along_k_scales_major = dice.word<Major>();
  p.along_rows_codes_major = dice.word<Major>();
  p.along_rows_scales_major = dice.word<Major>();
}

void draw(Dice& dice, DequantizeProblem& p) {
  p.source = {.kind = dice.word<RowsKind>(),
              .rows = dice.size(),
              .cols = dice.size(),
              .experts = dice.experts(),
              .format = dice.format(),
              .axis = dice.word<Axis>(),
              .codes_major = dice.word<Major>(),
              .scales_major = dice.word<Major>()};
  p.out = dice.plain();
}

void draw(Dice& dice, GroupedGemmProblem& p) {
  p.pass = dice.word<Pass>();
  p.rows = dice.size();
  p.n = dice.size();
  p.k = dice.size();
  p.experts = dice.experts();
  p.lhs = dice.format();
  p.rhs = dice.coin() ? p.lhs : dice.format();
  p.out = dice.plain();
  p.lhs_major = dice.word<Major>();
  p.rhs_major = dice.word<Major>();
  p.out_major = dice.word<Major>();
  for (bool GroupedGemmProblem::*flag :
       {&GroupedGemmProblem::discrete_rhs, &GroupedGemmProblem::discrete_out,
        &GroupedGemmProblem::alpha, &GroupedGemmProblem::beta, &GroupedGemmProblem::bias,
        &GroupedGemmProblem::discrete_bias, &GroupedGemmProblem::bias_scale})
    p.*flag = dice.coin();
  p.bias_dtype = dice.plain();
  p.accumulate = dice.word<Accumulate>();
  p.tail = dice.word<Tail>();
  p.unit_budget = int(dice.below(4));
  p.align = 1 << dice.below(6);
  p.lhs_scales_major = dice.word<Major>();
  p.rhs_scales_major = dice.word<Major>();
}

void draw(Dice& dice, ActivationProblem& p) {
  p.backward = dice.coin();
  p.kind = ActivationKind(dice.below(int64_t(activation_list().size())));
  if (p.kind == ActivationKind::kClampedSwiGlu)
    p.constants = {.limit = dice.number(), .alpha = dice.number(), .offset = dice.number()};
  if (info(p.kind).gated) p.layout = dice.word<GluLayout>();
  p.rows = dice.size();
  p.features = dice.size();
  p.experts = dice.experts();
  p.z = dice.plain();
  p.h = dice.plain();
  p.prob = dice.coin();
  p.tail = dice.word<Tail>();
}

void draw(Dice& dice, BiasGradProblem& p) {
  p = {.rows = dice.size(),
       .n = dice.size(),
       .experts = dice.experts(),
       .dy = dice.plain(),
       .dbias = dice.plain(),
       .discrete = dice.coin(),
       .bias_scale = dice.coin(),
       .bias = dice.plain(),
       .accumulate = dice.word<Accumulate>(),
       .tail = dice.word<Tail>()};
}

template <class Operation>
void prints_and_parses_back() {
  Dice dice(2718);
  std::set<std::string> seen;
  for (int i = 0; i < kProblems; ++i) {
    typename Operation::Problem p;
    draw(dice, p);
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
