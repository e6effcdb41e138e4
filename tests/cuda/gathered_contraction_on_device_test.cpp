// wgrad of rows that Hopper's kernel gathers from tokens: the bits of a copy of them and the kernel
// that reads it, whatever slots and offsets say; what it refuses.
#include "tests/cuda/gathered_case.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;
using test::outputs_of;
using test::Shape;
using test::spoil_slots;
using GatheredContraction = test::OnHopper;

constexpr std::string_view kName = "sm90_gathered_contraction";

GroupedGemmCase make(const Shape& shape) {
  return test::gathered_case("grouped_gemm wgrad ", shape);
}

void has_the_bits_of_a_copy(GroupedGemmCase got, GroupedGemmCase want) {
  EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "composed"), true) << to_string(got.problem);
}

// Experts without rows, of one, of a stage, one fewer and one more, and of more stages than places
// have room for.
const Shape kShapes[] = {
    {"R=450 N=136 K=328 E=7 gather=rhs T=150 top_k=3", {0, 63, 1, 64, 65, 129, 0}},
    {"R=450 N=136 K=328 E=7 gather=lhs T=225 top_k=2 accumulate=per_expert",
     {0, 63, 1, 64, 65, 129, 0}},
    {"R=880 N=72 K=200 E=3 gather=rhs T=110 top_k=8 format=f16 out=f16 accumulate=device "
     "discrete_out=yes unit_budget=2",
     {0, 641, 67}},
    {"R=880 N=200 K=72 E=3 gather=lhs T=880 format=f16 out=f16 alpha=yes discrete_out=yes "
     "unit_budget=2",
     {577, 1, 131}},
    {"R=300 N=264 K=8 E=4 gather=lhs T=150 top_k=2 alpha=yes accumulate=yes", {65, 0, 129, 64}},
    {"R=300 N=8 K=264 E=4 gather=rhs T=150 top_k=2 alpha=yes accumulate=yes discrete_out=yes",
     {65, 0, 129, 64}},
    {"R=300 N=128 K=256 E=2 gather=rhs T=300 format=f16 out=f16", {192, 100}},
    {"R=300 N=256 K=128 E=2 gather=lhs T=300", {192, 100}},
};

TEST_F(GatheredContraction, HasTheBitsOfACopy) {
  for (const Shape& shape : kShapes) has_the_bits_of_a_copy(make(shape), make(shape));
}

// An expert's only row is none; the tail has garbage.
TEST_F(GatheredContraction, OfSlotsThatAreNoneAddsNothing) {
  for (const Shape& shape : kShapes) {
    GroupedGemmCase got = make(shape), want = make(shape);
    spoil_slots(got), spoil_slots(want);
    has_the_bits_of_a_copy(std::move(got), std::move(want));
  }
}

// Of 128 words of the workspace one says so; the last that has rows has one.
TEST_F(GatheredContraction, OfOneSlotThatIsNoneAddsNothing) {
  const Shape shape{"R=385 N=64 K=64 E=2 gather=rhs T=193 top_k=2", {192, 193}};
  for (const int64_t row : {0, 4, 200, 381, 384}) {
    GroupedGemmCase got = make(shape), want = make(shape);
    for (GroupedGemmCase* c : {&got, &want}) test::slots_of(*c)[row] = -1;
    has_the_bits_of_a_copy(std::move(got), std::move(want));
  }
}

// NaN lies in the gaps.
TEST_F(GatheredContraction, ReadsNothingBetweenTokens) {
  for (const Shape& shape :
       {Shape{"R=150 N=136 K=72 E=2 gather=lhs T=75 top_k=2", {81, 60}, 8},
        Shape{"R=150 N=72 K=136 E=2 gather=rhs T=75 top_k=2 accumulate=yes", {81, 60}, 56},
        Shape{"R=150 N=64 K=128 E=2 gather=rhs T=150 discrete_out=yes", {81, 60}, 72}}) {
    const GroupedGemmCase c = make(shape);
    const bool of_dy = c.problem.gather == Gather::kLhs;
    EXPECT_EQ((of_dy ? c.args.lhs : c.args.rhs).codes.stride[0],
              (of_dy ? c.problem.n : c.problem.k) + shape.gap);
    has_the_bits_of_a_copy(make(shape), make(shape));
  }
}

TEST_F(GatheredContraction, OfBrokenOffsetsHasTheBitsOfACopy) {
  for (const char* words : {"R=300 N=136 K=72 E=3 gather=lhs T=100 top_k=3",
                            "R=300 N=72 K=136 E=3 gather=rhs T=100 top_k=3 accumulate=per_expert"})
    for (const std::vector<int32_t>& offsets : test::broken_offsets()) {
      const Shape shape{words, {100, 100, 100}};
      test::has_the_bits_of_a_copy(make(shape), make(shape), offsets, kName,
                                   "sm90_ragged_contraction");
    }
}

// In the stage where an expert ends, places of an earlier one lie behind its last row: of a token
// of NaN.
TEST_F(GatheredContraction, ReadsNoRowsBehindAnExpertsLast) {
  for (const char* words : {"R=300 N=72 K=64 E=3 gather=lhs T=300 unit_budget=2",
                            "R=300 N=64 K=136 E=3 gather=rhs T=300 unit_budget=2"})
    for (const int64_t rows : {61, 62, 63}) {
      const Shape shape{words, {64, rows, 0}};
      GroupedGemmCase got = make(shape), want = make(shape);
      for (GroupedGemmCase* c : {&got, &want}) {
        const TensorView& x = (c->problem.gather == Gather::kLhs ? c->args.lhs : c->args.rhs).codes;
        std::memset(x.data, 0xff, size_t(bytes_for(x.dtype, x[1])));
        int32_t* slot_of = test::slots_of(*c);
        for (int r = 0; r < c->offsets.back(); ++r)
          if (slot_of[r] == 0) slot_of[r] = 1;
        for (int r = 60; r < 64; ++r) slot_of[r] = 0;
      }
      has_the_bits_of_a_copy(std::move(got), std::move(want));
    }
}

// Places, what is lacking, and the count of tiles, which clusters of many experts take.
TEST_F(GatheredContraction, DoesNotReadWhatLayInTheWorkspace) {
  const std::vector<int64_t> many(20, 6);
  for (const Shape& shape :
       {kShapes[0], kShapes[2],
        Shape{"R=130 N=264 K=264 E=20 gather=lhs T=65 top_k=2 unit_budget=2", many},
        Shape{"R=130 N=264 K=264 E=20 gather=rhs T=65 top_k=2 unit_budget=2 discrete_out=yes",
              many}}) {
    GroupedGemmCase first = make(shape);
    const std::vector<uint8_t> want = outputs_of(first, kName);
    for (const int byte : {0, 0x77}) {
      GroupedGemmCase again = make(shape);
      EXPECT_EQ(outputs_of(again, kName, byte) == want, true) << shape.words << ", " << byte;
    }
  }
}

#ifdef CADRE_EMULATED
TEST_F(GatheredContraction, ReadsNeitherSlotsOfTheTailNorBehindTheLastToken) {
  for (const char* words : {"R=300 N=200 K=64 E=3 gather=lhs T=100 top_k=3",
                            "R=300 N=64 K=72 E=3 gather=rhs T=100 top_k=3"})
    for (const int64_t rows : {129, 128})
      test::reads_neither_slots_of_the_tail_nor_behind_the_last_token(make({words, {60, rows, 0}}),
                                                                      kName);
}
#endif

// Views are looked at before anything is launched.
TEST(GatheredContractionPlan, TakesTokensThatLieIn36Bits) {
  constexpr int64_t kMost = int64_t(1) << 34;
  for (const auto& [gather, what] : {std::pair{"lhs", "dy"}, std::pair{"rhs", "x"}}) {
    const std::string words = text("R=9 N=64 K=64 E=3 T=2 gather=", gather);
    GroupedGemmCase c = make({words.c_str(), {3, 0, 5}});
    const auto message = [&](int64_t step) { return test::message_of_steps(c, kName, step); };
    EXPECT_EQ(message(72), "");
    EXPECT_EQ(message(kMost), "");
    EXPECT_EQ(message(kMost + 8),
              text("grouped_gemm: ", what,
                   " is bf16[2, 64] strides (17179869192, 1), must lie in 68719476736 bytes or "
                   "fewer; copy it [",
                   c.problem, "]"));
    EXPECT_NE(message(68).find(text(what, " is bf16[2, 64] strides (68, 1) at ")),
              std::string::npos);
    EXPECT_NE(message(68).find("must begin and step by multiples of 16 bytes"), std::string::npos);
  }
}

TEST(GatheredContractionPlan, SaysWhyTheKernelDoesNotTakeIt) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"wgrad N=64 K=16 gather=lhs T=5 top_k=2 alpha=yes accumulate=device discrete_out=yes", ""},
      {"wgrad N=64 K=16 gather=rhs T=5 accumulate=per_expert", ""},
      {"wgrad N=64 K=16", "takes rows that it gathers"},
      {"wgrad N=64 K=16 gather=lhs T=5 out=f32", "writes the type of its operands"},
      {"wgrad N=64 K=16 gather=rhs T=5 out=f16", "writes the type of its operands"},
      {"fprop N=64 K=16 gather=lhs T=5", "takes wgrad"},
      {"fprop N=64 K=16 gather=lhs T=5 act=swiglu", "takes wgrad"},
      {"dgrad N=64 K=16 gather=lhs T=5", "takes wgrad"},
      {"wgrad N=64 K=16 gather=lhs T=5 rhs_major=column", "takes a row-major x"},
      {"wgrad N=64 K=16 gather=rhs T=5 lhs_major=column", "takes a row-major batch and output"},
      {"wgrad N=64 K=16 gather=rhs T=5 out_major=column", "takes a row-major batch and output"},
      {"wgrad N=64 K=12 gather=rhs T=5", "takes N and K that are multiples of 8, as TMA does"},
      {"wgrad N=64 K=16 gather=rhs T=5 align=8",
       "takes addresses and strides of 16 bytes, as TMA does; align is 8"},
      {"wgrad N=64 K=16 gather=rhs T=5 unit_budget=1", "works in pairs of SMs; the budget is one"},
  };
  for (const auto& c : cases)
    EXPECT_EQ(test::refusal(text("grouped_gemm R=9 E=3 format=bf16 ", c.words), "sm_90", kName),
              c.why)
        << c.words;
  const auto why = [](std::string_view words, std::string_view device) {
    return test::refusal(text("grouped_gemm wgrad R=9 N=64 K=16 E=3 T=5 ", words), device, kName);
  };
  EXPECT_EQ(why("gather=lhs", "sm_100"), "is for sm_90, not sm_100");
  EXPECT_EQ(
      test::refusal("grouped_gemm wgrad R=1073741825 N=64 K=16 E=3 T=5 gather=lhs", "sm_90", kName),
      "takes R, N and K up to 1073741824");
  EXPECT_EQ(why("gather=rhs format=f32 out=f32", "sm_90"),
            "takes bf16 or f16 operands, both of the same type");
  EXPECT_EQ(why("gather=rhs dy=bf16 x=f16", "sm_90"),
            "takes bf16 or f16 operands, both of the same type");
}

// Whoever names none gets it.
TEST(GatheredContractionPlan, IsTaken) {
  for (const char* gather : {"lhs", "rhs"})
    EXPECT_EQ(plan(parse_grouped_gemm_problem(
                       text("grouped_gemm wgrad R=9 N=64 K=16 E=3 T=5 gather=", gather)),
                   parse_device("sm_90"))
                  .name,
              kName);
}

}  // namespace
}  // namespace cadre
