// What Hopper's products make of offsets that decrease: the bits of every run, whatever lies in the
// workspace, and a tail of zeros that no expert writes, as on the CPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cuda/gathered_case.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

constexpr int64_t kRows = 96;

GroupedGemmCase case_of(std::string_view words, const std::vector<int32_t>& offsets) {
  GroupedGemmCase c = bench::make_case(
      parse_grouped_gemm_problem(text("grouped_gemm ", words, " E=3 R=", kRows, " tail=zero")),
      {.seed = 7});
  std::copy(offsets.begin(), offsets.end(), const_cast<int32_t*>(c.args.offsets.data));
  return c;
}

/// Of each row of all outputs, whether it is zero.
std::vector<bool> zeros_of(const GroupedGemmCase& c) {
  std::vector<bool> zeros;
  for (const bench::Output& o : c.outputs)
    for (int64_t r = 0; r < o.view[0]; ++r) {
      const auto* row =
          static_cast<const char*>(o.view.data) + bytes_for(o.view.dtype, r * o.view.stride[0]);
      const int64_t bytes = bytes_for(o.view.dtype, o.view.rank == 1 ? 1 : o.view[1]);
      zeros.push_back(std::all_of(row, row + bytes, [](char byte) { return byte == 0; }));
    }
  return zeros;
}

class BrokenOffsets : public test::OnHopper {};

TEST_F(BrokenOffsets, HaveOneWriterOfARow) {
  const struct {
    const char *words, *name;
  } kProducts[] = {
      {"fprop N=512 K=64 format=bf16", "sm90_ragged_rows"},
      {"dgrad N=64 K=512 format=bf16", "sm90_ragged_rows"},
      {"fprop N=512 K=64 format=bf16 act=swiglu z=yes", "sm90_gated_rows"},
      {"fprop N=512 K=128 format=fp8_block lhs_scales_major=column", "sm90_fp8_rows"},
      {"fprop N=512 K=64 x=bf16 w=mxfp4", "sm90_packed_rows"},
      {"fprop N=4096 K=64 x=bf16 w=mxfp8", "sm90_packed_rows"},
      {"fprop N=72 K=24 format=f32 out=f32", "cuda_ragged_rows"},
  };
  const std::vector<int32_t> kOffsets[] = {
      {0, 96, 8, 40}, {0, 96, 96, 8}, {5, 3, 200, 90}, {0, 50, 20, -1}, {96, 8, 70, 64}};
  for (const auto& product : kProducts)
    for (const std::vector<int32_t>& offsets : kOffsets) {
      const std::string what = text(product.words, " ", testing::PrintToString(offsets));
      GroupedGemmCase got = case_of(product.words, offsets),
                      again = case_of(product.words, offsets);
      EXPECT_TRUE(test::outputs_of(got, product.name) ==
                  test::outputs_of(again, product.name, 0x3c))
          << what;
      GroupedGemmCase want = case_of(product.words, offsets);
      const GroupedGemmPlan reference =
          plan(want.problem, this_cpu(), want.problem.activation ? "composed" : "cpu_reference");
      run(reference, want.args, want.buffers->workspace(reference.workspace_bytes), {});
      EXPECT_EQ(zeros_of(got), zeros_of(want)) << what;
    }
}

}  // namespace
}  // namespace cadre
