// The portable kernels of grouped_gemm on the emulator: a few problems that reach every kind of
// load, product and output, in several orders of threads and copies.
#include <gtest/gtest.h>

#include "tests/emulator/any_order.h"

namespace cadre {
namespace {

constexpr unsigned kOrders = CADRE_ORDERS;

class PortableGemm : public testing::TestWithParam<const char*> {};

TEST_P(PortableGemm, AgreesWithTheReferenceInAnyOrder) {
  const auto has = [](std::string_view word) {
    return std::string_view(GetParam()).find(word) != std::string_view::npos;
  };
  test::agrees_in_any_order(GetParam(),
                            has("gather=") ? "composed"
                            : has("wgrad") ? "cuda_ragged_contraction"
                                           : "cuda_ragged_rows",
                            {.live = 0.9}, kOrders);
}

INSTANTIATE_TEST_SUITE_P(
    Problems, PortableGemm,
    testing::Values(
        // Copies by hardware; more stages than a ring has, more tiles than blocks, one expert.
        "grouped_gemm fprop R=300 N=264 K=200 E=1 alpha=yes beta=yes unit_budget=2",
        // Copies of lines that end inside of sixteen bytes, from the second round on.
        "grouped_gemm fprop R=90 N=99 K=147 E=5 format=f16 out=f16 discrete_rhs=yes tail=zero",
        // The same across the contraction.
        "grouped_gemm dgrad R=90 N=67 K=139 E=3 beta=yes out=f32",
        "grouped_gemm wgrad R=300 N=139 K=35 E=3 accumulate=yes",
        // Element by element: in the order of memory, and across it.
        "grouped_gemm dgrad R=70 N=72 K=136 E=3 format=f16 out=f32 align=2",
        // Lines at multiples of sixteen bytes, from an address that is none.
        "grouped_gemm fprop R=50 N=51 K=139 E=2 align=2",
        "grouped_gemm fprop R=170 N=50 K=41 E=3 lhs_major=column rhs_major=column "
        "out_major=column out=f32 bias=yes bias_scale=yes tail=zero",
        "grouped_gemm wgrad R=90 N=41 K=23 E=12 lhs_major=column rhs_major=column "
        "out_major=column alpha=yes accumulate=per_expert discrete_out=yes",
        // fp32, and two types.
        "grouped_gemm fprop R=90 N=139 K=75 E=3 format=f32 out=f32 discrete_bias=yes bias=yes",
        "grouped_gemm dgrad R=90 N=75 K=139 E=3 format=f32 out=f32 align=4",
        "grouped_gemm dgrad R=50 N=33 K=20 E=3 dy=f16 w=bf16 out=f16",
        "grouped_gemm wgrad R=90 N=36 K=20 E=5 dy=f32 x=bf16 out=f32 accumulate=device",
        // Tokens whose rows are copied before.
        "grouped_gemm fprop R=90 N=40 K=75 E=5 gather=lhs T=30 top_k=3 act=swiglu prob=yes z=yes",
        "grouped_gemm wgrad R=90 N=40 K=72 E=5 gather=rhs T=45 top_k=2 out=f32 accumulate=yes",
        // No rows at all: dw is zero.
        "grouped_gemm wgrad R=0 N=36 K=20 E=5 alpha=yes out=f32"));

}  // namespace
}  // namespace cadre
