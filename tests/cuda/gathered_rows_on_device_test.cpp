// fprop, gated or plain, and dgrad of rows that Hopper's kernels gather from tokens: the bits of a
// copy of them and the kernel that reads it, whatever slots and offsets say; what they refuse.
#include "tests/cuda/gathered_case.h"
#include "tests/judge/errors.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;
using test::outputs_of;
using test::Shape;
using test::spoil_slots;
using GatheredRows = test::OnHopper;

constexpr std::string_view kName = "sm90_gathered_rows";

/// fprop, unless the words say dgrad.
GroupedGemmCase make(const Shape& shape) {
  const bool dgrad = std::string_view(shape.words).starts_with("dgrad");
  return test::gathered_case(dgrad ? "grouped_gemm gather=lhs " : "grouped_gemm fprop gather=lhs ",
                             shape);
}

// One warp's rows of a tile lack some and the other's do not; an expert's only row is none.
TEST_F(GatheredRows, OfSlotsThatAreNoneAreZero) {
  for (const Shape& shape :
       {Shape{"R=450 N=272 K=136 E=6 T=150 top_k=3 act=swiglu prob=yes z=yes bias=yes",
              {0, 201, 1, 0, 203, 0}},
        Shape{"R=450 N=112 K=128 E=4 T=225 top_k=2 act=geglu format=f16 out=f16 prob=yes "
              "layout=interleave1 z=yes discrete_rhs=yes tail=zero",
              {129, 0, 190, 64}},
        Shape{"R=300 N=320 K=64 E=3 T=300 act=clamped_swiglu layout=interleave32 bias=yes z=yes",
              {65, 130, 90}},
        Shape{"R=150 N=80 K=24 E=3 T=75 top_k=2 act=reglu prob=yes", {70, 0, 61}},
        Shape{"R=450 N=136 K=272 E=6 T=150 top_k=3", {0, 201, 1, 0, 203, 0}},
        Shape{"dgrad R=450 N=136 K=272 E=6 T=150 top_k=3", {0, 201, 1, 0, 203, 0}},
        Shape{"dgrad R=450 N=128 K=328 E=4 T=225 top_k=2 format=f16 out=f16 discrete_rhs=yes "
              "tail=zero",
              {129, 0, 190, 64}},
        Shape{"R=450 N=40 K=72 E=4 T=225 top_k=2 format=f16 out=f16 rhs_major=column",
              {129, 0, 190, 64}},
        Shape{"dgrad R=150 N=24 K=80 E=3 T=75 top_k=2 rhs_major=column", {70, 0, 61}}}) {
    GroupedGemmCase got = make(shape), want = make(shape);
    spoil_slots(got), spoil_slots(want);
    EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "composed"), true) << shape.words;
  }
}

// NaN lies in the gaps.
TEST_F(GatheredRows, ReadNothingBetweenTokens) {
  const char* words = "R=150 N=112 K=136 E=2 T=75 top_k=2 act=swiglu z=yes prob=yes bias=yes";
  for (const Shape& shape : {Shape{words, {81, 60}, 8}, Shape{words, {81, 60}, 56},
                             Shape{"R=150 N=112 K=64 E=2 T=150 act=reglu", {81, 60}, 72},
                             Shape{"dgrad R=150 N=64 K=112 E=2 T=150", {81, 60}, 72},
                             Shape{"R=150 N=112 K=136 E=2 T=75 top_k=2", {81, 60}, 8}}) {
    GroupedGemmCase got = make(shape), want = make(shape);
    EXPECT_EQ(got.args.lhs.codes.stride[0], got.args.lhs.codes[1] + shape.gap);
    EXPECT_EQ(outputs_of(got, kName) == outputs_of(want, "composed"), true) << shape.words;
  }
}

TEST_F(GatheredRows, OfBrokenOffsetsAreThoseOfACopy) {
  const Shape shape{"R=300 N=112 K=72 E=3 T=100 top_k=3 act=swiglu z=yes prob=yes",
                    {100, 100, 100}};
  const Shape gradient{"dgrad R=300 N=72 K=112 E=3 T=100 top_k=3", {100, 100, 100}};
  for (const std::vector<int32_t>& offsets : test::broken_offsets()) {
    test::has_the_bits_of_a_copy(make(shape), make(shape), offsets, kName, "sm90_gated_rows");
    test::has_the_bits_of_a_copy(make(gradient), make(gradient), offsets, kName,
                                 "sm90_ragged_rows");
  }
}

#ifdef CADRE_EMULATED
TEST_F(GatheredRows, ReadNeitherSlotsOfTheTailNorBehindTheLastToken) {
  test::reads_neither_slots_of_the_tail_nor_behind_the_last_token(
      make({"R=300 N=64 K=72 E=3 T=100 top_k=3 act=swiglu", {60, 129, 0}}), kName);
  test::reads_neither_slots_of_the_tail_nor_behind_the_last_token(
      make({"dgrad R=300 N=72 K=64 E=3 T=100 top_k=3", {60, 129, 0}}), kName);
}
#endif

// Views are looked at before anything is launched.
TEST(GatheredRowsPlan, TakesTokensThatLieIn36Bits) {
  GroupedGemmCase c = make({"R=9 N=64 K=64 E=3 T=2 act=swiglu", {3, 0, 5}});
  const auto message = [&](int64_t step) { return test::message_of_steps(c, kName, step); };
  constexpr int64_t kMost = int64_t(1) << 34;
  EXPECT_EQ(message(72), "");
  EXPECT_EQ(message(kMost), "");
  EXPECT_EQ(message(kMost + 8),
            text("grouped_gemm: x is bf16[2, 64] strides (17179869192, 1), must lie in 68719476736 "
                 "bytes or fewer; copy it [",
                 c.problem, "]"));
  EXPECT_NE(message(68).find("must begin and step by multiples of 16 bytes"), std::string::npos);
  c = make({"dgrad R=9 N=64 K=64 E=3 T=2", {3, 0, 5}});
  EXPECT_EQ(message(kMost), "");
  EXPECT_NE(message(kMost + 8).find("dy is bf16[2, 64] strides (17179869192, 1), must lie in"),
            std::string::npos);
}

// Before the copy, or the product, that comes first.
TEST(GatheredRowsPlan, OfTwoOperationsAsksWhatBothDo) {
  for (const char* words : {"R=9 N=64 K=64 E=3 T=2 alpha=yes", "R=9 N=64 K=64 E=3 T=2 act=relu"}) {
    GroupedGemmCase c = make({words, {3, 0, 5}});
    const GroupedGemmPlan made = plan(c.problem, parse_device("sm_90"), "composed");
    check(made, c.args);
    c.args.rhs.codes.data = static_cast<char*>(c.args.rhs.codes.data) + 2;
    EXPECT_NE(test::invalid([&] { check(made, c.args); }).find("w is bf16[3, 64, 64] at "),
              std::string::npos);
  }
}

TEST(GatheredRowsPlan, SaysWhyTheKernelDoesNotTakeIt) {
  const auto why = [](std::string_view words, std::string_view device) {
    return test::refusal(words, device, kName);
  };
  const struct {
    const char *words, *why;
  } cases[] = {
      {"N=64 K=16 act=swiglu gather=lhs T=5 top_k=2 bias=yes tail=zero discrete_rhs=yes", ""},
      {"N=64 K=16 act=swiglu", "takes rows that it gathers"},
      {"N=64 K=16 gather=lhs T=5 rhs_major=column discrete_rhs=yes", ""},
      {"N=64 K=16 gather=lhs T=5 alpha=yes", "takes no alpha, beta, bias or bias_scale"},
      {"N=64 K=16 gather=lhs T=5 beta=yes", "takes no alpha, beta, bias or bias_scale"},
      {"N=64 K=16 gather=lhs T=5 bias=yes", "takes no alpha, beta, bias or bias_scale"},
      {"N=64 K=16 gather=lhs T=5 out=f32", "writes the type of its operands"},
      {"N=12 K=16 gather=lhs T=5", "takes N and K that are multiples of 8, as TMA does"},
      {"N=64 K=16 act=relu gather=lhs T=5", "takes fprop with a gated activation"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 alpha=yes", "takes no alpha, beta or bias_scale"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 rhs_major=column", "takes a row-major w"},
      {"N=64 K=16 act=swiglu gather=lhs T=5 out=f32", "writes the type of its operands"},
      {"N=48 K=16 act=swiglu gather=lhs T=5", "takes F that are multiples of 8, from 32 on"},
      {"N=64 K=12 act=swiglu gather=lhs T=5", "takes N and K that are multiples of 8, as TMA does"},
  };
  for (const auto& c : cases)
    EXPECT_EQ(why(text("grouped_gemm fprop format=bf16 R=9 E=3 ", c.words), "sm_90"), c.why)
        << c.words;
  EXPECT_EQ(why("grouped_gemm wgrad R=9 N=64 K=16 E=3 gather=rhs T=5", "sm_90"),
            "takes rows that it gathers");
  EXPECT_EQ(why("grouped_gemm wgrad R=9 N=64 K=16 E=3 gather=lhs T=5", "sm_90"),
            "takes fprop and dgrad");
  EXPECT_EQ(why("grouped_gemm dgrad R=9 N=64 K=16 E=3 format=bf16 gather=lhs T=5", "sm_90"), "");
  EXPECT_EQ(why(text("grouped_gemm fprop R=9 E=3 format=bf16 ", cases[0].words), "sm_100"),
            "is for sm_90, not sm_100");
}

}  // namespace
}  // namespace cadre
