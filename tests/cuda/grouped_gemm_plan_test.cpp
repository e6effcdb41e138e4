// Which grouped GEMMs Hopper takes, and what it says of the others. Needs no GPU: plans are values,
// and arguments are checked before anything is launched.
#include <gtest/gtest.h>

#include "cadre/error.h"
#include "cadre/grouped_gemm.h"
#include "cadre/grouped_mlp.h"
#include "tests/judge/tensor.h"

namespace cadre {
namespace {

Device hopper() { return parse_device("sm_90"); }

/// Every refusal on the way to a plan, and what takes the problem in the end.
std::string plan_and_refusals(std::string_view words, const Device& device = hopper()) {
  std::string all;
  try {
    const auto chosen = plan(parse_grouped_gemm_problem(words), device);
    for (const Refusal& refusal : chosen.refusals)
      all += text(refusal.name, ": ", refusal.why, "\n");
    return all + text("taken by ", chosen.name);
  } catch (const Unsupported& error) {
    return error.what();
  }
}

TEST(GroupedGemmPlan, NamesTheKernel) {
  const auto name = [](std::string_view words) {
    return plan(parse_grouped_gemm_problem(words), hopper()).name;
  };
  EXPECT_EQ(name("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16"), "sm90_ragged_rows");
  EXPECT_EQ(name("grouped_gemm dgrad R=9 N=8 K=16 E=3 format=f16 out=f32"), "sm90_ragged_rows");
  EXPECT_EQ(name("grouped_gemm wgrad R=9 N=8 K=16 E=3 format=bf16"), "sm90_ragged_contraction");
  EXPECT_EQ(name("grouped_gemm wgrad R=9 N=8 K=16 E=3 format=bf16 align=32"),
            "sm90_ragged_contraction");
}

TEST(GroupedGemmPlan, IsFoundOrNotWithoutAnException) {
  const auto taken =
      find(parse_grouped_gemm_problem("grouped_gemm wgrad R=9 N=8 K=16 E=3 format=bf16"), hopper());
  EXPECT_EQ(taken.name, "sm90_ragged_contraction");
  EXPECT_EQ(taken.refusals.size(), 1u);
  const char* codes = "grouped_gemm fprop R=9 N=8 K=16 E=3 format=mxfp8";
  const auto refused = find(parse_grouped_gemm_problem(codes), hopper());
  EXPECT_EQ(refused.name, "");
  EXPECT_EQ(refused.entry, nullptr);
  std::string why = text("no implementation on sm_90 for '", codes, "':");
  for (const Refusal& refusal : refused.refusals)
    why += text("\n  ", refusal.name, ": ", refusal.why);
  EXPECT_EQ(plan_and_refusals(codes), why);
  EXPECT_EQ(refused.refusals.size(), 12u);
}

TEST(GroupedGemmPlan, SaysWhyHopperDoesNotTakeIt) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"fprop R=9 N=8 K=16 E=3 format=f32 out=f32", "takes bf16 or f16 operands"},
      {"fprop R=9 N=8 K=16 E=3 x=bf16 w=f16", "both of the same type"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 out=f16", "writes f32 or the type of its operands"},
      {"fprop R=9 N=9 K=16 E=3 format=bf16", "takes N and K that are multiples of 8"},
      {"fprop R=9 N=8 K=12 E=3 format=bf16", "takes N and K that are multiples of 8"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 align=8",
       "strides of 16 bytes, as TMA does; align is 8"},
      {"wgrad R=9 N=8 K=16 E=3 format=bf16 align=2",
       "strides of 16 bytes, as TMA does; align is 2"},
      {"fprop R=1073741825 N=8 K=16 E=3 format=bf16", "takes R, N and K up to 1073741824"},
      {"dgrad R=9 N=1073741832 K=16 E=3 format=bf16", "takes R, N and K up to 1073741824"},
      {"wgrad R=9 N=8 K=1073741832 E=3 format=bf16", "takes R, N and K up to 1073741824"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 lhs_major=column", "takes a row-major batch and output"},
      {"dgrad R=9 N=8 K=16 E=3 format=bf16 out_major=column", "takes a row-major batch and output"},
      {"wgrad R=9 N=8 K=16 E=3 format=bf16 rhs_major=column", "takes a row-major x"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 unit_budget=1", "works in pairs of SMs"},
      {"wgrad R=9 N=8 K=16 E=3 format=f32 out=f32", "sm90_ragged_rows: takes fprop and dgrad"},
      {"fprop R=9 N=8 K=16 E=3 format=f32 out=f32", "sm90_ragged_contraction: takes wgrad"},
  };
  for (const auto& c : cases) {
    const std::string all = plan_and_refusals(text("grouped_gemm ", c.words));
    const bool wgrad = c.words[0] == 'w';
    EXPECT_NE(all.find(c.why), std::string::npos) << c.words << "\n" << all;
    EXPECT_NE(all.find(wgrad ? "taken by cuda_ragged_contraction" : "taken by cuda_ragged_rows"),
              std::string::npos)
        << c.words << "\n"
        << all;
  }
}

TEST(GroupedGemmPlan, SaysWhoTakesDenseRows) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"dense=yes bias=yes", "takes no alpha, beta or bias"},
      {"dense=yes alpha=yes", "takes no alpha, beta or bias"},
      {"dense=yes rhs_major=column", "takes row-major tensors, no pointers"},
      {"dense=yes discrete_rhs=yes", "takes row-major tensors, no pointers"},
      {"dense=yes align=8", "takes K that are multiples of 8, and addresses and strides of 16"},
      {"dense=yes beta=yes", "takes no alpha, beta or bias"},
      {"dense=yes lhs_major=column", "takes row-major tensors, no pointers"},
      {"dense=yes out_major=column", "takes row-major tensors, no pointers"},
      {"dense=yes unit_budget=9", "has a block for each tile, and takes no budget"},
      {"dense=yes", "sm90_ragged_rows: takes rows of experts, which offsets tell apart"},
  };
  for (const auto& c : cases) {
    const std::string all =
        plan_and_refusals(text("grouped_gemm fprop R=9 N=8 K=16 format=bf16 out=f32 ", c.words));
    EXPECT_NE(all.find(c.why), std::string::npos) << c.words << "\n" << all;
    EXPECT_NE(all.find(std::string_view(c.words) == "dense=yes" ? "taken by sm90_dense_rows"
                                                                : "taken by cuda_ragged_rows"),
              std::string::npos)
        << all;
  }
  EXPECT_NE(plan_and_refusals("grouped_gemm fprop R=9 N=9 K=16 format=bf16 out=f32")
                .find("sm90_dense_rows: takes dense problems"),
            std::string::npos);
  EXPECT_NE(plan_and_refusals("grouped_gemm fprop R=9 N=9 K=12 format=bf16 out=f32 dense=yes")
                .find("takes K that are multiples of 8"),
            std::string::npos);
  EXPECT_NE(
      plan_and_refusals("grouped_gemm fprop R=1073741825 N=9 K=16 format=bf16 out=f32 dense=yes")
          .find("takes R and K up to 1073741824, N up to 8388480"),
      std::string::npos);
  EXPECT_NE(plan_and_refusals("grouped_gemm fprop R=9 N=9 K=16 format=bf16 dense=yes")
                .find("takes bf16 or f16 operands, both of the same type, to f32"),
            std::string::npos);
}

TEST(GroupedGemmPlan, SaysWhyNoKernelComputesTheActivation) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"R=9 N=64 K=16 E=3 act=relu", "takes fprop with a gated activation"},
      {"R=9 N=64 K=16 E=3 act=swiglu alpha=yes", "takes no alpha, beta or bias_scale"},
      {"R=9 N=64 K=16 E=3 act=swiglu rhs_major=column", "takes a row-major w"},
      {"R=9 N=64 K=16 E=3 act=swiglu out=f32", "writes the type of its operands"},
      {"R=9 N=48 K=16 E=3 act=swiglu", "takes F that are multiples of 8, from 32 on"},
      {"R=9 N=72 K=16 E=3 act=swiglu", "takes F that are multiples of 8, from 32 on"},
      {"R=9 N=64 K=16 E=3 act=swiglu align=8", "strides of 16 bytes, as TMA does; align is 8"},
  };
  for (const auto& c : cases) {
    const std::string all = plan_and_refusals(text("grouped_gemm fprop format=bf16 ", c.words));
    EXPECT_NE(all.find(c.why), std::string::npos) << c.words << "\n" << all;
    EXPECT_NE(all.find("taken by composed"), std::string::npos) << c.words << "\n" << all;
  }
}

TEST(GroupedGemmPlan, SaysThatTheOtherKernelsComputeNoActivation) {
  const std::string all =
      plan_and_refusals("grouped_gemm fprop format=bf16 R=9 N=64 K=16 E=3 act=swiglu");
  EXPECT_NE(all.find("sm90_ragged_rows: computes no activation"), std::string::npos) << all;
  EXPECT_NE(all.find("taken by sm90_gated_rows"), std::string::npos) << all;
}

TEST(GroupedGemmPlan, SaysWhichKernelsGatherNoRows) {
  const std::string all = plan_and_refusals(
      "grouped_gemm fprop format=bf16 R=9 N=64 K=16 E=3 gather=lhs T=5 top_k=2 act=relu");
  for (const char* name : {"sm90_ragged_rows", "sm90_gated_rows", "sm90_fp8_rows",
                           "sm90_packed_rows", "cuda_ragged_rows"})
    EXPECT_NE(all.find(text(name, ": gathers no rows")), std::string::npos) << all;
  EXPECT_NE(all.find("taken by composed"), std::string::npos) << all;
}

constexpr const char* kCodes = "grouped_gemm fprop R=9 N=8 K=16 E=3 format=fp8_block";

TEST(GroupedGemmPlan, SaysThatTheAdderOfCodesKeepsFewerBits) {
  const GroupedGemmPlan made =
      plan(parse_grouped_gemm_problem(text(kCodes, " lhs_scales_major=column")), hopper());
  EXPECT_EQ(made.name, "sm90_fp8_rows");
  EXPECT_TRUE(made.exact);
  EXPECT_EQ(made.fraction_bits, 13);
  const auto of_experts =
      parse_grouped_gemm_problem("grouped_gemm fprop R=9 N=8 K=16 E=3 format=fp8_tensor");
  EXPECT_EQ(plan(of_experts, hopper()).fraction_bits, 13);
  const auto activated = parse_grouped_gemm_problem(to_string(of_experts) + " act=relu");
  EXPECT_EQ(plan(activated, hopper()).name, "composed");
  EXPECT_EQ(plan(activated, hopper()).fraction_bits, 13);
}

TEST(GroupedGemmPlan, TakesWhatWasNotTimedByName) {
  const auto p = parse_grouped_gemm_problem("grouped_gemm fprop R=9 N=8 K=64 E=3 x=bf16 w=mxfp4");
  EXPECT_EQ(find(p, hopper()).name, "");
  const std::string all = plan_and_refusals(to_string(p));
  const char* why =
      "sm90_packed_rows: takes it where it is named; it is not known to be the fastest";
  EXPECT_NE(all.find(why), std::string::npos) << all;
  EXPECT_EQ(plan(p, hopper(), "sm90_packed_rows").name, "sm90_packed_rows");
}

TEST(GroupedGemmPlan, TakesCodesOfExpertsAsTheyLie) {
  for (const char* words : {"fprop R=9 N=8 K=16 E=3 format=fp8_tensor discrete_rhs=yes out=f32",
                            "fprop R=9 N=8 K=16 E=3 x=fp8_tensor:e5m2+pow2 w=fp8_tensor beta=yes",
                            "dgrad R=9 N=16 K=8 E=3 format=fp8_tensor rhs_major=column tail=zero",
                            "fprop R=9 N=8 K=16 E=3 x=fp8_row w=fp8_row discrete_rhs=yes out=f32",
                            "dgrad R=9 N=16 K=8 E=3 dy=fp8_row:e5m2 w=fp8_row rhs_major=column"})
    EXPECT_EQ(plan(parse_grouped_gemm_problem(text("grouped_gemm ", words)), hopper()).name,
              "sm90_fp8_rows")
        << words;
}

TEST(GroupedGemmPlan, SaysWhyTheKernelOfCodesDoesNotTakeIt) {
  const char* good =
      "grouped_gemm dgrad R=9 N=16 K=8 E=3 format=fp8_block rhs_major=column "
      "lhs_scales_major=column";
  EXPECT_EQ(plan(parse_grouped_gemm_problem(good), hopper(), "sm90_fp8_rows").name,
            "sm90_fp8_rows");
  const struct {
    const char *words, *why;
  } cases[] = {
      {"wgrad R=9 N=16 K=16 E=3 format=fp8_block", "takes fprop and dgrad"},
      {"fprop R=9 N=16 K=16 E=3 format=mxfp8", "takes a batch in fp8_block and w in fp8_block:2d"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_block w=fp8_block",
       "and w in fp8_block:2d, or both in fp8_tensor or fp8_row; w of e4m3"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_tensor w=fp8_block:2d", "or both in fp8_tensor"},
      {"fprop R=9 N=16 K=16 E=3 x=bf16 w=fp8_tensor", "or both in fp8_tensor"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_tensor w=fp8_tensor:e5m2", "w of e4m3"},
      {"wgrad R=9 N=16 K=16 E=3 format=fp8_tensor", "takes fprop and dgrad"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_row w=fp8_tensor", "or both in fp8_tensor or fp8_row"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_tensor out=f16", "writes bf16 or f32"},
      {"dgrad R=9 N=16 K=16 E=3 format=fp8_tensor", "row-major of fprop, column-major of dgrad"},
      {"fprop R=9 N=16 K=8 E=3 format=fp8_tensor", "contracts multiples of 16"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_block w=fp8_block:e5m2+2d", "of e4m3"},
      {"fprop R=9 N=16 K=16 E=3 x=fp8_block:2d w=fp8_block:2d", "takes a batch in fp8_block and"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_block out=f16", "writes bf16 or f32"},
      {"fprop R=9 N=16 K=24 E=3 format=fp8_block", "contracts multiples of 16, to multiples of 8"},
      {"dgrad R=9 N=16 K=12 E=3 format=fp8_block", "contracts multiples of 16, to multiples of 8"},
      {"dgrad R=9 N=16 K=16 E=3 format=fp8_block", "row-major of fprop, column-major of dgrad"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_block", "takes column-major scales of the batch"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_block lhs_scales_major=column align=8", "align is 8"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_block lhs_scales_major=column unit_budget=1",
       "works in pairs of SMs"},
      {"fprop R=9 N=16 K=16 E=3 format=fp8_block act=relu", "computes no activation"},
  };
  for (const auto& c : cases) {
    const std::string all = plan_and_refusals(text("grouped_gemm ", c.words));
    const size_t at = all.find("sm90_fp8_rows: ");
    EXPECT_NE(all.find(c.why, at), std::string::npos) << c.words << "\n" << all;
  }
  EXPECT_NE(plan_and_refusals(kCodes, parse_device("sm_100")).find("is for sm_90, not sm_100"),
            std::string::npos);
}

TEST(GroupedGemmPlan, SaysWhyTheKernelOfPackedWeightsDoesNotTakeIt) {
  for (const char* words : {"N=8 K=32 E=3 format=mxfp4", "N=8 K=16 E=3 x=bf16 w=mxfp8:2d",
                            "N=8 K=32 E=3 x=bf16 w=nvfp4 out=f32 discrete_rhs=yes tail=zero"})
    EXPECT_EQ(plan(parse_grouped_gemm_problem(text("grouped_gemm fprop R=9 ", words)), hopper(),
                   "sm90_packed_rows")
                  .fraction_bits,
              23)
        << words;
  const struct {
    const char *words, *why;
  } cases[] = {
      {"dgrad R=9 N=32 K=32 E=3 format=mxfp4", "takes fprop"},
      {"fprop R=9 N=8 K=32 E=3 format=bf16 out=f16", "takes a bf16 batch and w in mxfp4"},
      {"fprop R=9 N=8 K=32 E=3 x=f16 w=mxfp4", "takes a bf16 batch and w in mxfp4"},
      {"fprop R=9 N=8 K=32 E=3 x=bf16 w=mxfp8:e5m2", "mxfp8 of e4m3"},
      {"fprop R=9 N=8 K=32 E=3 x=bf16 w=fp8_tensor", "takes a bf16 batch and w in mxfp4"},
      {"fprop R=9 N=8 K=32 E=3 format=mxfp4 out=f16", "writes bf16 or f32"},
      {"fprop R=9 N=8 K=48 E=3 format=mxfp4", "contracts multiples of 32, to multiples of 8"},
      {"fprop R=9 N=8 K=24 E=3 x=bf16 w=mxfp8", "contracts multiples of 16, to multiples of 8"},
      {"fprop R=9 N=12 K=32 E=3 format=mxfp4", "contracts multiples of 32, to multiples of 8"},
      {"fprop R=9 N=8 K=32 E=3 format=mxfp4 align=8", "align is 8"},
      {"fprop R=9 N=64 K=32 E=3 format=mxfp4 act=swiglu", "computes no activation"},
      {"fprop R=9 N=8 K=32 E=3 format=mxfp4", "takes it where it is named"},
  };
  for (const auto& c : cases) {
    const std::string all = plan_and_refusals(text("grouped_gemm ", c.words));
    const size_t at = all.find("sm90_packed_rows: ");
    EXPECT_NE(all.find(c.why, at), std::string::npos) << c.words << "\n" << all;
  }
  EXPECT_NE(
      plan_and_refusals("grouped_gemm fprop R=9 N=8 K=32 E=3 format=mxfp4", parse_device("sm_100"))
          .find("sm90_packed_rows: is for sm_90, not sm_100"),
      std::string::npos);
}

TEST(GroupedGemmPlan, RefusesCodesOfWeightsThatTmaDoesNotTake) {
  const auto p = parse_grouped_gemm_problem("grouped_gemm fprop R=9 N=8 K=32 E=2 format=mxfp4");
  const test::Tensor x(DType::kBf16, {9, 32}), w(DType::kE2m1, {2, 8, 64}), y(DType::kBf16, {9, 8}),
      scales(DType::kE8m0, {2, 8, 1}), offsets(DType::kI32, {3});
  GroupedGemmArgs args;
  args.lhs.codes = x.view();
  args.rhs.scales = scales.view();
  args.out = y.view();
  args.offsets = {offsets.data<int32_t>(), 2};
  const auto message = [&](int64_t row) {
    args.rhs.codes = view(w.data<uint8_t>(), DType::kE2m1, {2, 8, 32}, {8 * row, row, 1});
    try {
      check(plan(p, hopper(), "sm90_packed_rows"), args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(32), "");
  EXPECT_EQ(message(64), "");
  EXPECT_NE(message(48).find("w is e2m1[2, 8, 32]"), std::string::npos) << message(48);
  EXPECT_NE(message(48).find("must begin and step by multiples of 16 bytes"), std::string::npos);
}

TEST(GroupedGemmPlan, SaysWhyNobodyTakesIt) {
  const struct {
    const char *words, *device, *why;
  } cases[] = {
      {"fprop R=9 N=8 K=16 E=3 format=mxfp8", "sm_90", "sm90_ragged_rows: takes bf16 or f16"},
      {"fprop R=9 N=8 K=16 E=3 format=mxfp8", "sm_80",
       "cuda_ragged_rows: takes f32, bf16 or f16 operands"},
      {"wgrad R=9 N=8 K=16 E=3 x=bf16 dy=mxfp8", "sm_80",
       "cuda_ragged_contraction: takes f32, bf16 or f16 operands"},
      {"wgrad R=9 N=8 K=16 E=3 x=bf16 dy=mxfp8", "sm_80",
       "cuda_ragged_rows: takes fprop and dgrad"},
      {"dgrad R=9 N=8 K=16 E=3 format=mxfp8", "sm_80", "cuda_ragged_contraction: takes wgrad"},
  };
  for (const auto& c : cases) {
    const std::string all =
        plan_and_refusals(text("grouped_gemm ", c.words), parse_device(c.device));
    EXPECT_NE(all.find("no implementation on"), std::string::npos) << c.words << "\n" << all;
    EXPECT_NE(all.find(c.why), std::string::npos) << c.words << "\n" << all;
  }
  Device old = parse_device("sm_80");
  old.sm = 75;
  const char* words = "grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16";
  EXPECT_NE(plan_and_refusals(words, old).find("cuda_ragged_rows: needs sm_80 or later, has sm_75"),
            std::string::npos)
      << plan_and_refusals(words, old);
}

TEST(GroupedGemmPlan, HasAKernelOnEveryGpuFromAmpereOn) {
  for (const char* device : {"sm_80", "sm_100"})
    for (const char* words : {"fprop R=9 N=8 K=16 E=3 format=bf16",
                              "dgrad R=9 N=7 K=13 E=3 format=f16 rhs_major=column unit_budget=1",
                              "wgrad R=0 N=1 K=1 E=3 format=f32 align=4 accumulate=device"}) {
      const std::string all = plan_and_refusals(text("grouped_gemm ", words), parse_device(device));
      EXPECT_NE(all.find(text("is for sm_90, not ", device)), std::string::npos) << all;
      EXPECT_NE(all.find("taken by cuda_ragged_"), std::string::npos) << all;
    }
}

TEST(GroupedGemmPlan, GivesLayersOfAnyWidthAKernel) {
  const GroupedMlpPlan odd =
      plan(parse_grouped_mlp_problem("grouped_mlp R=99 H=37 F=13 E=3 act=swiglu"), hopper());
  EXPECT_EQ(find_step<GroupedGemmPlan>(odd.fc1, "multiply")->name, "cuda_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(odd.fc2, "dw")->name, "cuda_ragged_contraction");
  const GroupedMlpPlan misaligned = plan(
      parse_grouped_mlp_problem("grouped_mlp R=99 H=32 F=16 E=3 act=swiglu align=4"), hopper());
  EXPECT_EQ(find_step<GroupedGemmPlan>(misaligned.fc1, "multiply")->name, "cuda_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(misaligned.fc2, "dx")->name, "cuda_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(misaligned.fc2, "dw")->name, "cuda_ragged_contraction");
}

TEST(GroupedGemmPlan, AsksForRoomWhereExpertsAreDiscreteOrTilesAreMany) {
  const auto bytes = [](std::string_view words) {
    return plan(parse_grouped_gemm_problem(words), hopper()).workspace_bytes;
  };
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16"), 0);
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16 discrete_rhs=yes"), 3 * 128);
  EXPECT_EQ(bytes("grouped_gemm wgrad R=9 N=8 K=16 E=3 format=bf16 discrete_out=yes"), 3 * 128);
  EXPECT_EQ(bytes("grouped_gemm fprop R=65536 N=768 K=1024 E=3 format=bf16"), 128);
  EXPECT_EQ(bytes("grouped_gemm dgrad R=9 N=4096 K=4096 E=64 format=bf16 discrete_rhs=yes"),
            65 * 128);
  EXPECT_EQ(bytes("grouped_gemm wgrad R=9 N=4096 K=4096 E=64 format=bf16"), 128);
  EXPECT_EQ(bytes("grouped_gemm fprop R=8 N=1536 K=2048 E=128 format=bf16"), 0);
  EXPECT_EQ(bytes("grouped_gemm fprop R=64 N=1536 K=2048 E=128 format=bf16"), 128);
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=256 K=1024 E=3 format=bf16 unit_budget=2"), 0);
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=512 K=1024 E=3 format=bf16 unit_budget=2"), 128);
  const std::string_view codes = " E=3 format=fp8_block lhs_scales_major=column unit_budget=2";
  EXPECT_EQ(bytes(text("grouped_gemm fprop R=9 N=1152 K=384", codes)), 0);
  EXPECT_EQ(bytes(text("grouped_gemm fprop R=9 N=384 K=1408", codes)), 128);
  EXPECT_EQ(bytes(text("grouped_gemm fprop R=9 N=384 K=1408 discrete_rhs=yes", codes)), 4 * 128);
}

TEST(GroupedGemmPlan, AsksForRoomForACopyOfXBesidePackedWeights) {
  const auto bytes = [](std::string_view words) {
    const auto p = parse_grouped_gemm_problem(text("grouped_gemm fprop E=3 x=bf16 ", words));
    return plan(p, hopper(), "sm90_packed_rows").workspace_bytes;
  };
  EXPECT_EQ(bytes("R=9 N=8 K=32 w=mxfp8"), 640);
  EXPECT_EQ(bytes("R=9 N=8 K=48 w=mxfp8 discrete_rhs=yes"), 3 * 128 + 896);
  EXPECT_EQ(bytes("R=9 N=8 K=4096 w=mxfp8 unit_budget=2"), 9 * 2 * 4096 + 128);
  EXPECT_EQ(bytes("R=240 N=8 K=32 w=mxfp8"), 240 * 2 * 32);
  EXPECT_EQ(bytes("R=241 N=8 K=32 w=mxfp8"), 0);
  EXPECT_EQ(bytes("R=241 N=4096 K=32 w=mxfp8"), 241 * 2 * 32 + 64);
  EXPECT_EQ(bytes("R=241 N=4096 K=32 w=mxfp8 out=f32"), 0);
  EXPECT_EQ(bytes("R=9 N=8 K=32 w=mxfp8 out=f32"), 0);
  EXPECT_EQ(bytes("R=9 N=8 K=32 w=mxfp4"), 0);
  EXPECT_EQ(bytes("R=241 N=4096 K=32 w=nvfp4"), 0);
}

/// What run() says of an fprop whose x begins and steps like that.
std::string run_message(int64_t first, int64_t gap) {
  const auto p = parse_grouped_gemm_problem("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16");
  const test::Tensor x(DType::kBf16, {10, 16}, {gap}), w(DType::kBf16, {3, 8, 16}),
      y(DType::kBf16, {9, 8}), offsets(DType::kI32, {4});
  GroupedGemmArgs args;
  args.lhs.codes = view(x.data<uint16_t>() + first, DType::kBf16, {9, 16}, {16 + gap, 1});
  args.rhs.codes = w.view();
  args.out = y.view();
  args.offsets = {offsets.data<int32_t>(), 3};
  try {
    run(plan(p, hopper()), args, {}, {});
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const std::exception& error) {
    return text("later: ", error.what());
  }
  return "";
}

// Scales of rows are copied from multiples of 16 bytes on.

TEST(GroupedGemmPlan, RefusesScalesOfABatchThatNoBulkCopyTakes) {
  const auto p = parse_grouped_gemm_problem(text(kCodes, " lhs_scales_major=column"));
  const test::Tensor x(DType::kE4m3, {9, 16}), w(DType::kE4m3, {3, 8, 16}), y(DType::kBf16, {9, 8}),
      scales(DType::kF32, {24}), scales_of_w(DType::kF32, {3, 1, 1}), offsets(DType::kI32, {4});
  GroupedGemmArgs args;
  args.lhs.codes = x.view();
  args.rhs.codes = w.view();
  args.rhs.scales = scales_of_w.view();
  args.out = y.view();
  args.offsets = {offsets.data<int32_t>(), 3};
  const auto message = [&](int64_t first) {
    args.lhs.scales = view(scales.data<float>() + first, DType::kF32, {9, 1}, {1, 12});
    try {
      check(plan(p, hopper(), "sm90_fp8_rows"), args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(0), "");
  EXPECT_NE(message(2).find("x.scales is"), std::string::npos);
  EXPECT_NE(message(2).find("must begin and step by multiples of 16 bytes"), std::string::npos);
}

TEST(GroupedGemmPlan, RefusesDenseScalesOfOneRow) {
  const auto p = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=1 N=8 K=144 E=1 format=fp8_block lhs_scales_major=column");
  const test::Tensor x(DType::kE4m3, {1, 144}), w(DType::kE4m3, {1, 8, 144}),
      y(DType::kBf16, {1, 8}), scales(DType::kF32, {8}), scales_of_w(DType::kF32, {1, 1, 2}),
      offsets(DType::kI32, {2});
  GroupedGemmArgs args;
  args.lhs.codes = x.view();
  args.rhs.codes = w.view();
  args.rhs.scales = scales_of_w.view();
  args.out = y.view();
  args.offsets = {offsets.data<int32_t>(), 1};
  const auto message = [&](int64_t step) {
    args.lhs.scales = view(scales.data<float>(), DType::kF32, {1, 2}, {1, step});
    try {
      check(plan(p, hopper(), "sm90_fp8_rows"), args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(4), "");
  EXPECT_NE(message(1).find("x.scales is"), std::string::npos) << message(1);
}

TEST(GroupedGemmPlan, RefusesAddressesAndStepsThatTheProblemDidNotPromise) {
  const std::string want =
      "must begin and step by multiples of 16 bytes, as the problem promises; copy it, or plan "
      "with align=2 [";
  EXPECT_NE(run_message(4, 0).find(want), std::string::npos) << run_message(4, 0);
  EXPECT_NE(run_message(0, 4).find(want), std::string::npos) << run_message(0, 4);
}

TEST(GroupedGemmPlan, RefusesStepsOfDenseRowsButNotOfTheirOutput) {
  const auto p = parse_grouped_gemm_problem(
      "grouped_gemm fprop R=9 N=5 K=8 E=1 format=bf16 out=f32 dense=yes");
  const test::Tensor x(DType::kBf16, {9, 16}), w(DType::kBf16, {1, 5, 16}), y(DType::kF32, {9, 5});
  const auto message = [&](int64_t x_step, int64_t w_step) {
    GroupedGemmArgs args;
    args.lhs.codes = view(x.data<uint16_t>(), DType::kBf16, {9, 8}, {x_step, 1});
    args.rhs.codes = view(w.data<uint16_t>(), DType::kBf16, {1, 5, 8}, {5 * w_step, w_step, 1});
    args.out = y.view();
    try {
      check(plan(p, hopper(), "sm90_dense_rows"), args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(8, 16), "");
  EXPECT_NE(message(12, 8).find("x is bf16[9, 8] strides (12, 1)"), std::string::npos);
  EXPECT_NE(message(8, 12).find("w is bf16[1, 5, 8] strides (60, 12, 1)"), std::string::npos);
  EXPECT_NE(message(8, 12).find("must begin and step by multiples of 16"), std::string::npos);
}

}  // namespace
}  // namespace cadre
