// The kernels of Hopper on the emulator: a few problems that reach every role, barrier and edge, in
// several orders of threads, copies and products.
#include <gtest/gtest.h>

#include "tests/emulator/any_order.h"

namespace cadre {
namespace {

constexpr unsigned kOrders = CADRE_ORDERS;

class Hopper : public testing::TestWithParam<const char*> {};

TEST_P(Hopper, AgreesWithTheReferenceInAnyOrder) {
  const auto has = [](std::string_view word) {
    return std::string_view(GetParam()).find(word) != std::string_view::npos;
  };
  test::agrees_in_any_order(GetParam(),
                            has("wgrad") && has("gather=")  ? "sm90_gathered_contraction"
                            : has("wgrad")                  ? "sm90_ragged_contraction"
                            : has("gather=")                ? "sm90_gathered_rows"
                            : has("act=")                   ? "sm90_gated_rows"
                            : has("dense=yes")              ? "sm90_dense_rows"
                            : has("x=bf16") || has("mxfp4") ? "sm90_packed_rows"
                            : has("fp8")                    ? "sm90_fp8_rows"
                                                            : "sm90_ragged_rows",
                            {}, kOrders);
}

INSTANTIATE_TEST_SUITE_P(
    Problems, Hopper,
    testing::Values(
        // More rows an expert than a tile has, the last columns of w beyond the second block.
        "grouped_gemm fprop R=700 N=264 K=136 E=2 alpha=yes bias=yes bias_scale=yes tail=zero",
        // A consumer without rows, which lets all stages pass; tiles of one stage.
        "grouped_gemm dgrad R=122 N=56 K=280 E=12 discrete_rhs=yes",
        "grouped_gemm fprop R=160 N=40 K=520 E=3 format=f16 out=f32 beta=yes",
        // Few rows an expert, narrow tiles: several of an expert that has more, all orders of w.
        "grouped_gemm fprop R=300 N=264 K=712 E=7 beta=yes bias=yes unit_budget=2",
        "grouped_gemm dgrad R=90 N=200 K=72 E=3 format=f16 out=f32 tail=zero",
        // Output that consumers hold: more tiles than blocks, a consumer without rows, tiles of few
        // stages, narrow ones of many, an end within a tile.
        "grouped_gemm fprop R=700 N=264 K=136 E=2 tail=zero",
        "grouped_gemm fprop R=300 N=320 K=520 E=4 unit_budget=2",
        "grouped_gemm fprop R=160 N=40 K=1160 E=3 format=f16 out=f16",
        "grouped_gemm dgrad R=600 N=264 K=328 E=3 discrete_rhs=yes unit_budget=2",
        "grouped_gemm wgrad R=300 N=136 K=328 E=5 accumulate=yes",
        "grouped_gemm wgrad R=260 N=264 K=136 E=4 out=f32 accumulate=device alpha=yes "
        "discrete_out=yes",
        // Fewer blocks than tiles; of the last one, one or both consumers have no columns.
        "grouped_gemm wgrad R=40 N=512 K=72 E=3 out=f32 accumulate=yes unit_budget=2",
        "grouped_gemm fprop R=600 N=264 K=72 E=3 out=f32 unit_budget=2",
        "grouped_gemm dgrad R=600 N=72 K=328 E=3 unit_budget=2",
        // Gate and up in turns of eight: the last features beyond the second block, a consumer
        // without any, z kept and not, every layout, bias and probabilities.
        "grouped_gemm fprop R=700 N=272 K=136 E=2 act=swiglu prob=yes z=yes bias=yes tail=zero",
        "grouped_gemm fprop R=90 N=112 K=520 E=12 discrete_rhs=yes act=geglu format=f16 out=f16 "
        "layout=interleave1 z=yes",
        "grouped_gemm fprop R=300 N=320 K=72 E=5 act=clamped_swiglu layout=interleave32 z=yes",
        // Few rows an expert: two parts of a narrow tile, two tiles of an expert that has more.
        "grouped_gemm fprop R=190 N=272 K=136 E=4 act=swiglu prob=yes z=yes bias=yes tail=zero",
        "grouped_gemm fprop R=190 N=320 K=72 E=4 act=clamped_swiglu layout=interleave32 z=yes "
        "unit_budget=2",
        "grouped_gemm fprop R=600 N=528 K=72 E=3 act=reglu unit_budget=2 prob=yes",
        // Rows of tokens: tiles of one consumer, of one stage and of many, one tile beside another
        // and above it, a contraction that ends within a stage, every layout, bias, probabilities.
        "grouped_gemm fprop R=700 N=272 K=136 E=2 gather=lhs T=350 top_k=2 act=swiglu prob=yes "
        "z=yes bias=yes tail=zero",
        "grouped_gemm fprop R=90 N=112 K=520 E=12 gather=lhs T=90 discrete_rhs=yes act=geglu "
        "format=f16 out=f16 layout=interleave1 z=yes",
        "grouped_gemm fprop R=300 N=320 K=72 E=5 gather=lhs T=100 top_k=3 act=clamped_swiglu "
        "layout=interleave32 z=yes bias=yes",
        "grouped_gemm fprop R=600 N=528 K=64 E=3 gather=lhs T=300 top_k=2 act=reglu unit_budget=2 "
        "prob=yes",
        "grouped_gemm fprop R=130 N=320 K=136 E=36 gather=lhs T=65 top_k=2 act=swiglu z=yes",
        // And without an activation, w along the contraction and across it: held output, tiles of
        // fewer columns than a box of w has, more tiles than blocks.
        "grouped_gemm dgrad R=700 N=136 K=264 E=2 gather=lhs T=350 top_k=2 tail=zero",
        "grouped_gemm dgrad R=300 N=328 K=320 E=5 gather=lhs T=100 top_k=3 discrete_rhs=yes "
        "format=f16 out=f16 unit_budget=2",
        "grouped_gemm fprop R=90 N=40 K=520 E=12 gather=lhs T=90 discrete_rhs=yes",
        "grouped_gemm fprop R=600 N=528 K=64 E=3 gather=lhs T=300 top_k=2 unit_budget=2",
        "grouped_gemm dgrad R=130 N=136 K=72 E=36 gather=lhs T=65 top_k=2 rhs_major=column",
        // Gradients of rows of tokens: experts of no row, of one stage and of many, a consumer and
        // a block without columns, dw as it is summed and turned.
        "grouped_gemm wgrad R=300 N=136 K=328 E=5 gather=rhs T=150 top_k=2 accumulate=yes",
        "grouped_gemm wgrad R=300 N=136 K=328 E=5 gather=lhs T=100 top_k=3 accumulate=per_expert",
        "grouped_gemm wgrad R=260 N=264 K=72 E=24 gather=lhs T=130 top_k=2 format=f16 out=f16 "
        "alpha=yes discrete_out=yes",
        "grouped_gemm wgrad R=900 N=72 K=264 E=2 gather=rhs T=900 format=f16 out=f16 alpha=yes "
        "discrete_out=yes accumulate=device unit_budget=2",
        // Codes in blocks: batches that begin between multiples of four, powers of two as scales or
        // not, blocks along the contraction and of w's rows that are short.
        "grouped_gemm fprop R=500 N=264 K=272 E=2 format=fp8_block lhs_scales_major=column "
        "alpha=yes bias=yes bias_scale=yes tail=zero",
        "grouped_gemm dgrad R=122 N=144 K=328 E=12 format=fp8_block rhs_major=column "
        "lhs_scales_major=column discrete_rhs=yes",
        "grouped_gemm fprop R=90 N=72 K=144 E=3 x=fp8_block:fp32 w=fp8_block:2d+fp32 "
        "lhs_scales_major=column rhs_scales_major=column out=f32 beta=yes",
        "grouped_gemm dgrad R=300 N=128 K=512 E=5 dy=fp8_block:e5m2 w=fp8_block:2d "
        "rhs_major=column lhs_scales_major=column unit_budget=2",
        "grouped_gemm fprop R=90 N=264 K=528 E=11 format=fp8_block lhs_scales_major=column "
        "unit_budget=2",
        // Codes with one scale an expert: the same, and of gradients of e5m2.
        "grouped_gemm fprop R=500 N=264 K=272 E=2 format=fp8_tensor alpha=yes bias=yes "
        "bias_scale=yes tail=zero",
        "grouped_gemm dgrad R=122 N=144 K=328 E=12 format=fp8_tensor rhs_major=column "
        "discrete_rhs=yes",
        "grouped_gemm fprop R=90 N=72 K=144 E=3 x=fp8_tensor:pow2 w=fp8_tensor out=f32 beta=yes",
        "grouped_gemm dgrad R=300 N=128 K=512 E=5 format=fp8_tensor rhs_major=column out=f32 "
        "unit_budget=2",
        "grouped_gemm fprop R=45 N=8 K=16 E=1 format=fp8_tensor",
        // One scale a row and one a column.
        "grouped_gemm fprop R=500 N=264 K=272 E=2 x=fp8_row w=fp8_row alpha=yes bias=yes tail=zero",
        "grouped_gemm dgrad R=122 N=144 K=328 E=12 dy=fp8_row:e5m2 w=fp8_row rhs_major=column "
        "discrete_rhs=yes out=f32 beta=yes",
        // Packed weights: more stages than a round of scales has, a last one that is half full, few
        // rows and many.
        "grouped_gemm fprop R=300 N=264 K=416 E=2 format=mxfp4 alpha=yes bias=yes bias_scale=yes "
        "tail=zero",
        "grouped_gemm fprop R=122 N=56 K=352 E=12 x=bf16 w=nvfp4 discrete_rhs=yes alpha=yes",
        "grouped_gemm fprop R=90 N=40 K=592 E=3 x=bf16 w=mxfp8 out=f32 beta=yes",
        "grouped_gemm fprop R=300 N=264 K=96 E=2 x=bf16 w=nvfp4:2d out=f32 unit_budget=2",
        // One expert has all rows: blocks that share a contraction, some of them without any; a
        // block for each tile, which waits for its stages in rounds; stretches that do.
        "grouped_gemm fprop R=300 N=136 K=840 E=1 out=f32 dense=yes",
        "grouped_gemm fprop R=7 N=40 K=136 E=1 format=f16 out=f32 dense=yes",
        "grouped_gemm fprop R=1100 N=8 K=840 E=1 out=f32 dense=yes",
        "grouped_gemm fprop R=20 N=72 K=4680 E=1 out=f32 dense=yes",
        // More experts than a warp has lanes.
        "grouped_gemm fprop R=200 N=40 K=520 E=70 unit_budget=2",
        "grouped_gemm fprop R=90 N=40 K=72 E=100 discrete_rhs=yes",
        "grouped_gemm dgrad R=130 N=144 K=328 E=40 format=fp8_block rhs_major=column "
        "lhs_scales_major=column unit_budget=2",
        "grouped_gemm dgrad R=130 N=144 K=328 E=40 dy=fp8_tensor w=fp8_tensor rhs_major=column "
        "unit_budget=2",
        // So many stages that blocks count tiles.
        "grouped_gemm fprop R=90 N=264 K=264 E=11 unit_budget=2",
        "grouped_gemm dgrad R=122 N=264 K=280 E=12 discrete_rhs=yes unit_budget=2",
        "grouped_gemm wgrad R=160 N=264 K=328 E=16 accumulate=yes unit_budget=2"));

}  // namespace
}  // namespace cadre
