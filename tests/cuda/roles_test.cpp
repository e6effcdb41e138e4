// How a persistent block shares out its warps and registers.
#include "cuda/gemm/roles.h"

#include <gtest/gtest.h>

namespace cadre::cuda::gemm {
namespace {

constexpr Roles roles(int consumers, int consumer_registers, int producer_registers) {
  return {.consumers = consumers,
          .load_warps = 1,
          .store_warps = 1,
          .consumer_registers = consumer_registers,
          .producer_registers = producer_registers};
}

TEST(Roles, HaveNoMoreRegistersThanTheBlockBeginsWith) {
  // 384 threads begin with 168 registers each, although the SM has 65536: setmaxnreg waits for ever
  // for what is more than that.
  EXPECT_EQ(roles(2, 224, 56).first_registers(), 168);
  EXPECT_TRUE(roles(2, 224, 56).fits());
  EXPECT_TRUE(roles(2, 232, 40).fits());
  EXPECT_FALSE(roles(2, 232, 48).fits());
  EXPECT_TRUE(roles(3, 160, 32).fits());
  EXPECT_FALSE(roles(3, 168, 32).fits());
}

TEST(Roles, HaveRegistersInEights) {
  EXPECT_FALSE(roles(2, 220, 56).fits());
  EXPECT_FALSE(roles(2, 224, 52).fits());
}

}  // namespace
}  // namespace cadre::cuda::gemm
