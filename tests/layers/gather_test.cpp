// Layers whose forward reads x in token order: the bits of the same layers with rows in expert
// order, and what they complain about.
#include <gtest/gtest.h>

#include "layers/explain.h"
#include "tests/judge/errors.h"
#include "tests/layers/mlp_case.h"

using namespace cadre;
using test::Counts;
using test::LinearCase;
using test::LinearResult;
using test::MlpCase;
using test::MlpResult;
using test::Tensor;

namespace {

constexpr int64_t kTokens = 23;
constexpr int kTopK = 3;
const Counts kCounts{.rows = 64, .of = {0, 7, 33, 0, 18}};

GroupedLinearProblem linear(std::string_view recipe = "bf16") {
  GroupedLinearProblem p{.rows = kCounts.rows, .n = 20, .k = 12, .experts = kCounts.experts()};
  p.recipe = parse_recipe(recipe);
  return p;
}
GroupedMlpProblem mlp(std::string_view recipe = "bf16") {
  GroupedMlpProblem p{.rows = kCounts.rows, .hidden = 12, .features = 16};
  p.experts = kCounts.experts();
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  return p;
}
template <class Problem>
Problem gathered(Problem p) {
  p.gather = true;
  p.tokens = kTokens;
  p.top_k = kTopK;
  return p;
}

/// Tokens, and which of them every row is.
struct Tokens {
  Tensor rows;
  std::vector<int32_t> slots;

  /// Puts the tokens' rows into x.
  explicit Tokens(Tensor& x) : rows(x.view().dtype, {kTokens, x.columns()}, {.row_gap = 3}) {
    std::mt19937 random(5);
    rows.fill(random, -2, 2);
    for (int64_t r = 0; r < x.rows(); ++r) slots.push_back(int32_t(random() % (kTokens * kTopK)));
    for (int64_t r = 0; r < kCounts.used(); ++r)
      for (int64_t j = 0; j < x.columns(); ++j) x.set({r, j}, rows.at(slots[size_t(r)] / kTopK, j));
  }
};

bool keeps(const auto& plan, std::string_view name) { return layers::has_part(kept(plan), name); }

/// A step, of which forward has the tokens alone and backward, where it reads them, the rows alone,
/// or the tokens.
template <class Case>
void step(Case& c, const Tokens& tokens) {
  const auto give_tokens = [&](auto& a) {
    a.x = {};
    a.tokens = tokens.rows.view();
    a.slot_of = tokens.slots.data();
  };
  c.change_args = give_tokens;
  c.forward();
  if (!keeps(c.plan, "tokens"))
    c.change_args = [reads_x = keeps(c.plan, "x")](auto& a) {
      if (!reads_x) a.x = {};
    };
  if (c.learns()) c.backward();
  if (c.defers()) c.wgrad();
}

template <class Case, class Result, class Problem>
void expect_equal_bits(const Problem& p, bool gather_dw = false) {
  Problem of_tokens = gathered(p);
  of_tokens.gather_dw = gather_dw;
  Case want(p, kCounts, 1), got(of_tokens, kCounts, 1);
  const Tokens tokens(got.x);
  want.x = got.x;
  want.step();
  step(got, tokens);
  EXPECT_EQ(first_difference(Result(got), Result(want)), "") << to_string(p);
  EXPECT_EQ(got.damage() + tokens.rows.damage(), "") << to_string(p);
}

TEST(Gather, ALinearHasTheBitsOfRows) {
  for (const char* recipe : {"bf16", "f16", "f32"}) {
    GroupedLinearProblem p = linear(recipe);
    p.dtype = p.parameters.weight = p.recipe.fprop.lhs.element;
    expect_equal_bits<LinearCase, LinearResult>(p);
  }
  GroupedLinearProblem p = linear();
  p.bias = p.bias_scale = p.options.deferred = true;
  p.parameters.discrete_weight = p.parameters.discrete_bias = true;
  expect_equal_bits<LinearCase, LinearResult>(p);
  p.options.tail = Tail::kZero;
  p.wgrad = false;
  expect_equal_bits<LinearCase, LinearResult>(p);
  // A recipe may copy w and dy, whatever x is.
  expect_equal_bits<LinearCase, LinearResult>(linear("bf16,fprop=bf16*nvfp4:2d,dgrad=mxfp8"));
}

TEST(Gather, AnMlpHasTheBitsOfRows) {
  for (const char* recipe : {"bf16", "f16", "f32"}) {
    GroupedMlpProblem p = mlp(recipe);
    p.dtype = p.parameters.weight = p.recipe.fprop.lhs.element;
    expect_equal_bits<MlpCase, MlpResult>(p);
  }
  for (const auto change :
       {+[](GroupedMlpProblem& p) { p.keep_h = true; },
        +[](GroupedMlpProblem& p) { p.options.deferred = true; },
        +[](GroupedMlpProblem& p) { p.wgrad1 = p.dprob = false; },
        +[](GroupedMlpProblem& p) { p.activation = ActivationKind::kRelu; },
        +[](GroupedMlpProblem& p) { p.dgrad = p.wgrad1 = p.wgrad2 = p.dbias = p.dprob = false; }}) {
    GroupedMlpProblem p = mlp();
    change(p);
    expect_equal_bits<MlpCase, MlpResult>(p);
  }
}

TEST(Gather, DwOfTokensHasTheBitsOfRows) {
  for (const bool deferred : {false, true}) {
    GroupedLinearProblem one = linear("bf16,fprop=mxfp8");
    GroupedMlpProblem two = mlp();
    one.options.deferred = two.options.deferred = deferred;
    expect_equal_bits<LinearCase, LinearResult>(one, true);
    expect_equal_bits<MlpCase, MlpResult>(two, true);
  }
  GroupedMlpProblem p = gathered(mlp());
  p.gather_dw = true;
  const GroupedMlpPlan made = plan(p, this_cpu());
  EXPECT_FALSE(keeps(made, "x"));
  EXPECT_EQ(kept(made).at(0).name, "tokens");
  EXPECT_EQ(kept(made).at(0).bytes, kTokens * 12 * 2);
  EXPECT_EQ(kept(made).at(1).name, "slot_of");
  EXPECT_EQ(kept(made).at(1).bytes, kCounts.rows * 4);
  EXPECT_NE(explain(made).find("dy, tokens, slot_of -> dw\n"), std::string::npos);
}

/// Tokens of dy, whose rows are those of the layer that reads them in the order of experts.
template <class Case, class Result, class Problem>
void expect_equal_bits_of_dy(const Problem& p) {
  Problem of_tokens = p;
  of_tokens.gather_dy = true;
  of_tokens.tokens = kTokens;
  of_tokens.top_k = kTopK;
  Case want(p, kCounts, 1), got(of_tokens, kCounts, 1);
  const Tokens tokens(want.dy);
  want.step();
  got.change_args = [&](auto& a) {
    a.dy = tokens.rows.view();
    a.slot_of = tokens.slots.data();
  };
  got.step();
  EXPECT_EQ(first_difference(Result(got), Result(want)), "") << to_string(of_tokens);
  EXPECT_EQ(got.damage() + tokens.rows.damage(), "") << to_string(of_tokens);
}

TEST(Gather, DyOfTokensHasTheBitsOfRows) {
  GroupedMlpProblem usual = mlp();
  usual.bias2 = usual.bias2_scale = false;
  for (const bool deferred : {false, true}) {
    GroupedLinearProblem one = linear("bf16,fprop=mxfp8");
    GroupedMlpProblem two = usual;
    one.options.deferred = two.options.deferred = deferred;
    expect_equal_bits_of_dy<LinearCase, LinearResult>(one);
    expect_equal_bits_of_dy<MlpCase, MlpResult>(two);
  }
  for (const auto change :
       {+[](GroupedMlpProblem& p) { p.wgrad2 = false; },
        +[](GroupedMlpProblem& p) { p.dgrad = p.wgrad1 = p.bias1 = p.dprob = false; },
        +[](GroupedMlpProblem& p) { p.bias2 = p.bias2_scale = true, p.dbias = false; }}) {
    GroupedMlpProblem p = usual;
    change(p);
    expect_equal_bits_of_dy<MlpCase, MlpResult>(p);
  }
  usual.gather = usual.gather_dw = usual.gather_dy = true;
  usual.tokens = kTokens;
  usual.top_k = kTopK;
  const std::string words = explain(plan(usual, this_cpu()));
  for (const char* part :
       {"dy, w, slot_of -> dx\n", "dy, x, slot_of -> dw\n", "dy, tokens, slot_of -> dw\n"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  const auto times_kept = [](const auto& p) {
    const auto parts = kept(plan(p, this_cpu()));
    return std::count_if(parts.begin(), parts.end(),
                         [](const KeptPart& part) { return part.name == "slot_of"; });
  };
  EXPECT_EQ(times_kept(usual), 1);
  usual.gather_dw = false;
  EXPECT_EQ(times_kept(usual), 1);
  GroupedLinearProblem one = linear();
  one.gather_dy = true;
  one.tokens = kTokens;
  EXPECT_EQ(times_kept(one), 1);
  one.dgrad = one.wgrad = false;
  EXPECT_EQ(times_kept(one), 0);
  GroupedMlpProblem both = gathered(mlp("mxfp8,dgrad=bf16,wgrad=bf16*mxfp8"));
  both.gather_dy = both.options.save_input = true;
  both.bias2 = both.bias2_scale = false;
  EXPECT_EQ(times_kept(both), 1);
  EXPECT_EQ(times_kept(plan(both, this_cpu()).fc1.problem), 1);
}

constexpr const char* kQuantised[] = {
    "fp8_block", "fp8_block,wgrad=bf16",  "fp8_tensor",       "mxfp8", "mxfp8,wgrad=f32",
    "nvfp4",     "nvfp4,fprop=fp8_block", "bf16,wgrad=mxfp8", "f16"};

TEST(Gather, ALinearThatCopiesXHasTheBitsOfRows) {
  for (const char* recipe : kQuantised)
    for (const bool deferred : {false, true}) {
      GroupedLinearProblem p = linear(recipe);
      p.options.deferred = deferred;
      expect_equal_bits<LinearCase, LinearResult>(p);
      p.options.save_input = true;
      expect_equal_bits<LinearCase, LinearResult>(p);
      p.wgrad = false;
      expect_equal_bits<LinearCase, LinearResult>(p);
    }
  GroupedLinearProblem p = linear("nvfp4,wgrad=nvfp4*nvfp4:sr");
  expect_equal_bits<LinearCase, LinearResult>(p);
}

TEST(Gather, AnMlpThatCopiesXHasTheBitsOfRows) {
  for (const char* recipe : kQuantised)
    for (const auto change :
         {+[](GroupedMlpProblem&) {}, +[](GroupedMlpProblem& p) { p.options.deferred = true; },
          +[](GroupedMlpProblem& p) { p.options.save_input = true; },
          +[](GroupedMlpProblem& p) { p.options.cache_weights = true; },
          +[](GroupedMlpProblem& p) { p.wgrad1 = p.dprob = false; }}) {
      GroupedMlpProblem p = mlp(recipe);
      change(p);
      expect_equal_bits<MlpCase, MlpResult>(p);
    }
}

TEST(Gather, QuantisesTokens) {
  const auto steps_of = [](const char* recipe, bool save_input) {
    GroupedLinearProblem p = gathered(linear(recipe));
    p.options.save_input = save_input;
    return explain(plan(p, this_cpu()));
  };
  const auto expect_parts = [](const std::string& words, std::initializer_list<const char*> parts) {
    for (const char* part : parts)
      EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  };
  expect_parts(steps_of("mxfp8", false),
               {"quantize x: cpu  [quantize rows R=64 C=12 E=5 source=bf16 along_k=mxfp8 "
                "along_rows=mxfp8 role=x gather=yes T=23 top_k=3]",
                "tokens, slot_of -> x along K, x along rows",
                "[grouped_gemm fprop R=64 N=20 K=12 E=5 format=mxfp8]"});
  expect_parts(steps_of("mxfp8", true),
               {"along_k=mxfp8 role=x gather=yes T=23 top_k=3]", "tokens, slot_of -> x along K\n",
                "source=bf16 along_rows=mxfp8 role=x gather=yes T=23 top_k=3]",
                "tokens, slot_of -> x along rows"});
  expect_parts(steps_of("fp8_block,wgrad=bf16", false),
               {"along_k=fp8_block role=x gather=yes T=23 top_k=3]", "dy, x -> dw"});
}

TEST(Gather, IsPlannedForForwardAlone) {
  const GroupedMlpPlan made = plan(gathered(mlp()), this_cpu());
  const std::string words = explain(made);
  for (const char* part :
       {"prob=yes bias1=yes bias2=yes bias2_scale=yes gather=yes T=23 top_k=3",
        "tokens, slot_of -> z",
        "grouped_gemm fprop R=64 N=32 K=12 E=5 format=bf16 bias=yes gather=lhs T=23 top_k=3",
        "tokens, w, bias, slot_of -> y", "grouped_gemm wgrad R=64 N=32 K=12 E=5 format=bf16]",
        "not fused: is for GPUs"})
    EXPECT_NE(words.find(part), std::string::npos) << part << " in\n" << words;
  EXPECT_EQ(find_step<GroupedGemmPlan>(made.fc2, "multiply")->problem.gather, Gather::kNo);
}

template <class Problem, class Change>
std::string said(Problem p, Change change) {
  change(p);
  const std::string what = test::invalid([&] { plan(p, this_cpu()); });
  return what.substr(0, what.find(" [grouped_"));
}

TEST(Gather, SaysWhatIsWrongWithTheProblem) {
  const auto of_all = [](auto usual, const std::string& layer) {
    using P = decltype(usual);
    EXPECT_EQ(said(usual, [](P& p) { p.tokens = 9; }),
              layer + ": T is 9, must be 0; the problem says gather=no");
    EXPECT_EQ(said(usual, [](P& p) { p.top_k = 2; }),
              layer + ": top_k is 2, must be 1; the problem says gather=no");
    const P gathers = gathered(usual);
    EXPECT_EQ(said(gathers, [](P& p) { p.tokens = 0; }), layer + ": T is 0, must be 1 or more");
    EXPECT_EQ(said(gathers, [](P& p) { p.top_k = 0; }), layer + ": top_k is 0, must be 1 or more");
    EXPECT_EQ(said(gathers, [](P& p) { p.tokens = int64_t{1} << 31; }),
              layer + ": T is 2147483648, must be below 2^31; rows are numbered in int32");
    EXPECT_EQ(said(gathers, [](P& p) { p.tokens = int64_t{1} << 30, p.top_k = 2; }),
              layer + ": T * top_k is 2147483648, must be below 2^31; rows are numbered in int32");
    for (const char* recipe : {"mxfp8", "bf16,wgrad=mxfp8", "bf16"})
      EXPECT_EQ(said(gathers,
                     [&](P& p) {
                       p.recipe = parse_recipe(recipe);
                       p.options.quantized_x = true;
                     }),
                layer +
                    ": quantized_x is yes, must be no; tokens are quantised as they are "
                    "gathered");
  };
  of_all(linear(), "grouped_linear");
  of_all(mlp(), "grouped_mlp");
}

TEST(Gather, SaysWhyDyIsNotGathered) {
  const auto gathers_dy = [](auto p) {
    p.gather_dy = true;
    p.tokens = kTokens;
    return p;
  };
  GroupedMlpProblem two = mlp();
  two.bias2 = two.bias2_scale = false;
  const auto of_all = [&](auto usual, const std::string& layer) {
    using P = decltype(usual);
    const std::string must = layer + ": gather_dy is yes, must be no; ";
    EXPECT_EQ(said(usual, [](P& p) { p.tokens = 0; }), layer + ": T is 0, must be 1 or more");
    for (const char* recipe : {"mxfp8", "bf16,wgrad=mxfp8", "bf16,dgrad=f16"})
      EXPECT_EQ(said(usual, [&](P& p) { p.recipe = parse_recipe(recipe); }),
                must + "the recipe quantises dy");
    EXPECT_EQ(said(usual,
                   [](P& p) {
                     if constexpr (std::is_same_v<P, GroupedMlpProblem>)
                       p.bias2 = true;
                     else
                       p.bias = true;
                   }),
              must + "the bias's gradient is of rows in expert order");
  };
  of_all(gathers_dy(linear()), "grouped_linear");
  of_all(gathers_dy(two), "grouped_mlp");
  EXPECT_EQ(
      said(gathers_dy(linear()), [](GroupedLinearProblem& p) { p.gather = p.gather_dw = true; }),
      "grouped_linear: gather_dy is yes, must be no; gather_dw is yes, and wgrad gathers one "
      "operand");
}

TEST(Gather, SaysWhatIsWrongWithTokensOfDy) {
  using A = GroupedLinearArgs;
  GroupedLinearProblem p = linear();
  p.gather_dy = true;
  p.tokens = kTokens;
  p.top_k = kTopK;
  const auto says = [&](bool wgrad, auto change) {
    p.options.deferred = wgrad;
    LinearCase c(p, kCounts, 1);
    const Tokens tokens(c.dy);
    const auto give_tokens = [&](A& a) {
      a.dy = tokens.rows.view();
      a.slot_of = tokens.slots.data();
    };
    c.change_args = give_tokens;
    c.forward();
    if (wgrad) c.backward();
    c.change_args = [&](A& a) { give_tokens(a), change(a); };
    const std::string what = test::invalid([&] { wgrad ? c.wgrad() : c.backward(); });
    return what.substr(0, what.find(" [grouped_"));
  };
  for (const bool wgrad : {false, true}) {
    EXPECT_EQ(says(wgrad, [](A& a) { a.dy.shape[0] = kCounts.rows; }),
              "grouped_linear: dy is bf16[64, 20] strides (23, 1), must be bf16[23, 20]; the "
              "problem says gather_dy=yes");
    EXPECT_EQ(says(wgrad, [](A& a) { a.slot_of = nullptr; }),
              "grouped_linear: slot_of is null, must point to 64 elements; the problem says "
              "gather_dy=yes");
  }
}

TEST(Gather, SaysWhatIsWrongWithTheArguments) {
  const auto forward_says = [](const GroupedLinearProblem& p, auto change) {
    LinearCase c(p, kCounts, 1);
    c.change_args = change;
    const std::string what = test::invalid([&] { c.forward(); });
    EXPECT_TRUE(c.y.untouched(0, kCounts.rows)) << what;
    return what.substr(0, what.find(" [grouped_"));
  };
  using A = GroupedLinearArgs;
  const std::vector<int32_t> slots(size_t(kCounts.rows), 0);
  EXPECT_EQ(forward_says(linear(), [](A& a) { a.tokens = a.x; }),
            "grouped_linear: tokens is given, must be null; the problem says gather=no");
  EXPECT_EQ(forward_says(linear(), [&](A& a) { a.slot_of = slots.data(); }),
            "grouped_linear: slot_of is given, must be null; the problem says gather=no");
  EXPECT_EQ(forward_says(gathered(linear()), [&](A& a) { a.slot_of = slots.data(); }),
            "grouped_linear: tokens is f32[], must be bf16[23, 12]; the problem says gather=yes");
  EXPECT_EQ(forward_says(gathered(linear()),
                         [&](A& a) {
                           a.tokens = a.x;
                           a.tokens.shape[0] = kTokens;
                         }),
            "grouped_linear: slot_of is null, must point to 64 elements; the problem says "
            "gather=yes");
  GroupedLinearProblem p = gathered(linear());
  p.gather_dw = true;
  LinearCase c(p, kCounts, 1);
  const Tokens tokens(c.x);
  step(c, tokens);
  c.change_args = [&](A& a) { a.slot_of = slots.data(); };
  const std::string what = test::invalid([&] { c.backward(); });
  EXPECT_EQ(what.find("grouped_linear: tokens is f32[], must be bf16[23, 12]"), 0u) << what;
}

}  // namespace
