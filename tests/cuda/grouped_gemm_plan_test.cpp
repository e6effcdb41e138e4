// Which grouped GEMMs Hopper takes, and what it says of the others. Needs no GPU: plans are values,
// and arguments are checked before anything is launched.
#include <gtest/gtest.h>

#include "cadre/error.h"
#include "cadre/grouped_gemm.h"
#include "tests/judge/tensor.h"

namespace cadre {
namespace {

Device hopper() { return parse_device("sm_90"); }

/// Everything that is said when no implementation takes the problem.
std::string refusal(std::string_view words, const Device& device = hopper()) {
  try {
    return text("taken by ", plan(parse_grouped_gemm_problem(words), device).name);
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
}

TEST(GroupedGemmPlan, SaysWhyNot) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"fprop R=9 N=8 K=16 E=3 format=f32 out=f32", "takes bf16 or f16 operands"},
      {"fprop R=9 N=8 K=16 E=3 format=mxfp8", "takes bf16 or f16 operands"},
      {"fprop R=9 N=8 K=16 E=3 x=bf16 w=f16", "both of the same type"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 out=f16", "writes f32 or the type of its operands"},
      {"fprop R=9 N=9 K=16 E=3 format=bf16", "takes N and K that are multiples of 8"},
      {"fprop R=9 N=8 K=12 E=3 format=bf16", "takes N and K that are multiples of 8"},
      {"fprop R=1073741825 N=8 K=16 E=3 format=bf16", "takes R up to 1073741824"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 lhs_major=column", "takes a row-major batch and output"},
      {"dgrad R=9 N=8 K=16 E=3 format=bf16 out_major=column", "takes a row-major batch and output"},
      {"wgrad R=9 N=8 K=16 E=3 format=bf16 rhs_major=column", "takes a row-major x"},
      {"fprop R=9 N=8 K=16 E=3 format=bf16 unit_budget=1", "works in pairs of SMs"},
      {"wgrad R=9 N=8 K=16 E=3 format=f32 out=f32", "sm90_ragged_rows: takes fprop and dgrad"},
      {"fprop R=9 N=8 K=16 E=3 format=f32 out=f32", "sm90_ragged_contraction: takes wgrad"},
  };
  for (const auto& c : cases)
    EXPECT_NE(refusal(text("grouped_gemm ", c.words)).find(c.why), std::string::npos)
        << c.words << "\n"
        << refusal(text("grouped_gemm ", c.words));
  EXPECT_NE(refusal("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16", parse_device("sm_80"))
                .find("is for sm_90, not sm_80"),
            std::string::npos);
}

TEST(GroupedGemmPlan, AsksForRoomWhereExpertsAreDiscrete) {
  const auto bytes = [](std::string_view words) {
    return plan(parse_grouped_gemm_problem(words), hopper()).workspace_bytes;
  };
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16"), 0);
  EXPECT_EQ(bytes("grouped_gemm fprop R=9 N=8 K=16 E=3 format=bf16 discrete_rhs=yes"), 3 * 128);
  EXPECT_EQ(bytes("grouped_gemm wgrad R=9 N=8 K=16 E=3 format=bf16 discrete_out=yes"), 3 * 128);
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

TEST(GroupedGemmPlan, RefusesAddressesAndStepsThatTheCopyEngineCannotTake) {
  const std::string want = "must begin and step by multiples of 16 bytes, as the copy engine does";
  EXPECT_NE(run_message(4, 0).find(want), std::string::npos) << run_message(4, 0);
  EXPECT_NE(run_message(0, 4).find(want), std::string::npos) << run_message(0, 4);
}

}  // namespace
}  // namespace cadre
