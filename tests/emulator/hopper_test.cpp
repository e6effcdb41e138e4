// The kernels of Hopper on the emulator: a few problems that reach every role, barrier and edge, in
// several orders of threads, copies and products.
#include <gtest/gtest.h>

#include "tests/emulator/any_order.h"

namespace cadre {
namespace {

constexpr unsigned kOrders = CADRE_ORDERS;

class Hopper : public testing::TestWithParam<const char*> {};

TEST_P(Hopper, AgreesWithTheReferenceInAnyOrder) {
  const bool wgrad = std::string_view(GetParam()).find("wgrad") != std::string_view::npos;
  test::agrees_in_any_order(GetParam(), wgrad ? "sm90_ragged_contraction" : "sm90_ragged_rows", {},
                            kOrders);
}

INSTANTIATE_TEST_SUITE_P(
    Problems, Hopper,
    testing::Values(
        // More rows an expert than a tile has, the last columns of w beyond the second block.
        "grouped_gemm fprop R=700 N=264 K=136 E=2 alpha=yes bias=yes bias_scale=yes tail=zero",
        // A consumer without rows, which lets all stages pass; tiles of one stage.
        "grouped_gemm dgrad R=122 N=56 K=280 E=12 discrete_rhs=yes",
        "grouped_gemm fprop R=90 N=40 K=520 E=3 format=f16 out=f32 beta=yes",
        "grouped_gemm wgrad R=300 N=136 K=328 E=5 accumulate=yes",
        "grouped_gemm wgrad R=260 N=264 K=136 E=4 out=f32 accumulate=device alpha=yes "
        "discrete_out=yes",
        // Fewer blocks than tiles; of the last one, one or both consumers have no columns.
        "grouped_gemm wgrad R=40 N=512 K=72 E=3 out=f32 accumulate=yes unit_budget=2",
        "grouped_gemm fprop R=600 N=264 K=72 E=3 out=f32 unit_budget=2",
        "grouped_gemm dgrad R=600 N=72 K=328 E=3 unit_budget=2",
        // So many stages that blocks count tiles.
        "grouped_gemm fprop R=90 N=264 K=264 E=11 unit_budget=2",
        "grouped_gemm dgrad R=122 N=264 K=280 E=12 discrete_rhs=yes unit_budget=2",
        "grouped_gemm wgrad R=160 N=264 K=328 E=16 accumulate=yes unit_budget=2"));

}  // namespace
}  // namespace cadre
