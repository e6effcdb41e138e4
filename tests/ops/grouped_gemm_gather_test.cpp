// Products whose rows are gathered: the bits of permute and the product one after the other, and
// sums in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cadre/permute.h"
#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;
using test::Counts;
using test::GemmCase;
using test::Tensor;

namespace {

const Counts kGaps{.rows = 64, .of = {0, 7, 0, 33, 1, 18, 0}};

GroupedGemmProblem problem(std::string_view words, const Counts& counts = kGaps) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

/// A product with arguments, and its rows in token order.
struct GatherCase {
  GemmCase product;  ///< of rows in expert order
  GroupedGemmProblem p;
  Tensor tokens;
  std::vector<int32_t> slots;
  Tensor z;
  std::vector<float> prob;

  GatherCase(const GroupedGemmProblem& of, Gather operand, const Counts& counts, int64_t count,
             int top_k)
      : product(of, counts, 1, {.lhs_gap = 3, .rhs_gap = 5, .out_gap = 7}), p(of) {
    p.gather = operand;
    p.tokens = count;
    p.top_k = top_k;
    const DType dtype = (operand == Gather::kLhs ? p.lhs : p.rhs).element;
    tokens = Tensor(dtype, {p.tokens, columns()}, {.row_gap = 3});
    std::mt19937 random(5);
    tokens.fill(random, -2, 2);
    slots.assign(size_t(p.rows), -1);
    for (int32_t& slot : slots) slot = int32_t(random() % unsigned(p.tokens * top_k));
    prob.assign(size_t(p.rows), 0.75f);
    z = Tensor(p.out, {p.rows, p.n});
  }

  int64_t columns() const { return (p.gather == Gather::kLhs ? lhs_shape(p) : rhs_shape(p)).cols; }
  TensorView& operand(GroupedGemmArgs& args) const {
    return (p.gather == Gather::kLhs ? args.lhs : args.rhs).codes;
  }
  /// What the activation takes and leaves, if there is one.
  void add_activation(GroupedGemmArgs& args) {
    if (!p.activation) return;
    args.out.shape[1] = out_columns(p);
    z.poison();
    if (p.activation->keep_z) args.z = z.view();
    if (p.activation->prob) args.prob = prob.data();
  }
  /// Tokens and the map in place of rows.
  GemmCase::Result gathered() {
    const GroupedGemmPlan made = plan(p, this_cpu(), "composed");
    return product.run_by(made.workspace_bytes, [&](GroupedGemmArgs args, Workspace workspace) {
      operand(args) = tokens.view();
      args.slot_of = slots.data();
      add_activation(args);
      run(made, args, workspace, {});
    });
  }
  /// Rows that permute made before.
  GemmCase::Result permuted() {
    Tensor rows(tokens.view().dtype, {p.rows, columns()});
    const PermutePlan copy = plan({.tokens = p.tokens,
                                   .top_k = p.top_k,
                                   .rows = p.rows,
                                   .hidden = columns(),
                                   .experts = p.experts,
                                   .dtype = rows.view().dtype},
                                  this_cpu(), "cpu_reference");
    run(copy,
        {.tokens = tokens.view(),
         .rows = rows.view(),
         .map = {.slot_of = slots.data()},
         .offsets = {product.offsets.data(), p.experts}},
        {}, {});
    const GroupedGemmPlan made = plan(product.p, this_cpu());
    return product.run_by(made.workspace_bytes, [&](GroupedGemmArgs args, Workspace workspace) {
      operand(args) = rows.view();
      add_activation(args);
      run(made, args, workspace, {});
    });
  }
  /// Which bits differ.
  void expect_equal_bits() {
    const GemmCase::Result want = permuted();
    const test::Bytes want_z = z.bytes();
    const GemmCase::Result got = gathered();
    EXPECT_EQ(got.damage + z.damage() + tokens.damage(), "") << to_string(p);
    EXPECT_TRUE(got.out.bytes() == want.out.bytes()) << to_string(p);
    EXPECT_TRUE(z.bytes() == want_z) << to_string(p);
  }
};

void expect_equal_bits(const GroupedGemmProblem& p, const Counts& counts = kGaps) {
  for (const Gather operand : {Gather::kLhs, Gather::kRhs}) {
    if (operand == Gather::kRhs && p.pass != Pass::kWgrad) continue;
    GatherCase(p, operand, counts, 23, 3).expect_equal_bits();
  }
}

TEST(GroupedGemmGather, HasTheBitsOfPermuteAndTheProduct) {
  for (const char* words :
       {"fprop N=37 K=45 alpha=yes beta=yes", "fprop N=40 K=48 tail=zero discrete_rhs=yes",
        "fprop N=37 K=45 bias=yes bias_scale=yes out=f32", "fprop N=37 K=45 out_major=column",
        "fprop N=36 K=45 act=swiglu prob=yes z=yes tail=zero",
        "fprop N=36 K=45 act=geglu layout=interleave1 bias=yes discrete_bias=yes",
        "fprop N=37 K=45 act=relu prob=yes", "dgrad N=37 K=45 beta=yes tail=zero",
        "dgrad N=40 K=48 discrete_rhs=yes out=f32", "wgrad N=37 K=45 out=f32 alpha=yes",
        "wgrad N=40 K=48 discrete_out=yes accumulate=per_expert",
        "wgrad N=37 K=45 lhs_major=row out_major=column accumulate=yes"})
    expect_equal_bits(problem(words));
}

TEST(GroupedGemmGather, OfEveryPairOfPlainFormats) {
  for (const char* pass : {"fprop", "dgrad", "wgrad"})
    for (const FormatKind lhs : {FormatKind::kF32, FormatKind::kBf16, FormatKind::kF16})
      for (const FormatKind rhs : {FormatKind::kF32, FormatKind::kBf16, FormatKind::kF16}) {
        GroupedGemmProblem p = problem(text(pass, " N=24 K=45"));
        p.lhs = format(lhs), p.rhs = format(rhs);
        expect_equal_bits(p);
      }
}

TEST(GroupedGemmGather, TheOtherOperandMayBeQuantised) {
  expect_equal_bits(problem("fprop N=32 K=64 x=bf16 w=mxfp8"));
  expect_equal_bits(problem("dgrad N=32 K=64 dy=f16 w=nvfp4"));
  GatherCase(problem("wgrad N=32 K=64 dy=bf16 x=mxfp8"), Gather::kLhs, kGaps, 23, 3)
      .expect_equal_bits();
}

TEST(GroupedGemmGather, OfAnyCounts) {
  for (const Counts& counts :
       {Counts{.rows = 0, .of = {0, 0}}, Counts{.rows = 9, .of = {0, 0, 0}},
        Counts{.rows = 40, .of = {40}}, Counts{.rows = 41, .of = {0, 40, 0}}})
    for (const char* words : {"fprop N=24 K=40 act=swiglu z=yes prob=yes", "fprop N=37 K=45",
                              "dgrad N=37 K=45 tail=zero", "wgrad N=37 K=45 out=f32"})
      expect_equal_bits(problem(words, counts), counts);
}

// Nothing outside of the buffers is read or written, and slots that are none have rows of zeros.
TEST(GroupedGemmGather, OfBrokenOffsetsAndSlots) {
  const Counts counts{.rows = 40, .of = {10, 10, 10}};
  const std::vector<int32_t> kBroken[] = {{0, 10, 20, 41},      {0, 30, 10, 40},  {-5, 10, 20, 30},
                                          {0, 1 << 30, 20, 30}, {50, 60, 70, 80}, {0, 10, 20, -1}};
  for (const char* words : {"fprop N=24 K=40", "dgrad N=24 K=40 tail=zero", "wgrad N=24 K=40"})
    for (const std::vector<int32_t>& offsets : kBroken) {
      GatherCase c(problem(words, counts), Gather::kLhs, counts, 23, 3);
      c.product.offsets = offsets;
      c.product.fill_everything(2);
      c.expect_equal_bits();
    }
  GatherCase c(problem("fprop N=24 K=40", counts), Gather::kLhs, counts, 23, 3);
  c.slots[0] = -1, c.slots[11] = 23 * 3, c.slots[29] = INT32_MAX, c.slots[30] = INT32_MIN;
  c.expect_equal_bits();
  const GemmCase::Result got = c.gathered();
  for (const int64_t row : {0, 11, 29})
    for (int64_t j = 0; j < 24; ++j) EXPECT_EQ(c.product.at(got, row * 24 + j), 0);
}

// Every row is a token of its own, somewhere else.
TEST(GroupedGemmGather, IsTheSumOfProductsOfItsTokens) {
  for (const char* words : {"fprop N=37 K=45 format=f32 out=f32", "dgrad N=37 K=45 tail=zero",
                            "wgrad N=37 K=45 format=f16 out=f32"}) {
    GatherCase c(problem(words), Gather::kLhs, kGaps, kGaps.rows, 2);
    GroupedGemmArgs args;
    c.product.run_by(0, [&](const GroupedGemmArgs& given, Workspace) { args = given; });
    for (int64_t r = 0; r < kGaps.used(); ++r) {
      const int64_t token = (r * 27 + 5) % c.p.tokens;  // 27 and 64 have no common divisor
      c.slots[size_t(r)] = int32_t(token * 2 + r % 2);
      for (int64_t j = 0; j < c.columns(); ++j)
        c.tokens.set({token, j}, cpu::read(args.lhs.codes, r, j));
    }
    EXPECT_EQ(c.product.check(c.gathered()), "") << words;
  }
}

TEST(GroupedGemmGather, NamesWhatGathersAndWhoDoesNot) {
  const GroupedGemmPlan made =
      plan(parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=4 K=4 gather=lhs T=4 top_k=2"),
           this_cpu());
  EXPECT_EQ(made.name, "composed");
  EXPECT_EQ(made.refusals.size(), 5u);
  for (const Refusal& refusal : made.refusals)
    EXPECT_EQ(refusal.why, "gathers no rows") << refusal.name;
  EXPECT_EQ(made.workspace_bytes % 256, 0);
  EXPECT_GE(made.workspace_bytes, 256);
  const GroupedGemmPlan plain =
      find(parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=4 K=4"), this_cpu(), "composed");
  ASSERT_EQ(plain.refusals.size(), 1u);
  EXPECT_EQ(plain.refusals[0].why,
            "is for products with an activation, or of rows that are gathered");
}

}  // namespace
