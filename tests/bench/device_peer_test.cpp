// Peers on an accelerator: the copy, and what is said where cuBLAS has no part.
#include "bench/device_peer.h"

#include <gtest/gtest.h>

#include "tests/bench/host_accelerator.h"

namespace cadre {
namespace {

TEST(DevicePeers, ACopyOwnsItsMemoryWhileItLives) {
  test::HostAccelerator accelerator;
  {
    const bench::DevicePeers peers =
        bench::device_copy_peer({.flops = 0, .bytes = 4096}, accelerator);
    ASSERT_EQ(peers.list.size(), 1u);
    EXPECT_EQ(peers.list[0].name, "copy");
    EXPECT_EQ(peers.list[0].what, "a copy of 2048 bytes");
    EXPECT_EQ(peers.absent, "");
    ASSERT_EQ(accelerator.taken.size(), 2u);
    peers.list[0].run();
  }
  EXPECT_TRUE(accelerator.taken.empty());
}

TEST(DevicePeers, AbsentOnesAreNamedWithTheReason) {
  for (const char* problem : {"grouped_gemm fprop R=8 N=32 K=32 E=2 format=mxfp8",
                              "grouped_gemm dgrad R=8 N=32 K=32 E=2 rhs_major=column"}) {
    const auto c = bench::make_case(parse_grouped_gemm_problem(problem), {});
    test::HostAccelerator accelerator;
    const bench::Mirror mirror(*c.buffers, accelerator);
    const bench::DevicePeers peers = bench::device_peers(c, mirror, accelerator);
    EXPECT_TRUE(peers.list.empty());
    EXPECT_EQ(peers.absent.find("cublas_dense and cublas_graph are not here: "), 0u)
        << peers.absent;
  }
}

TEST(DevicePeers, EveryOtherOperationRunsBesideACopy) {
  const auto c = bench::make_case(parse_offsets_problem("offsets counts R=64 E=4"), {});
  test::HostAccelerator accelerator;
  const bench::Mirror mirror(*c.buffers, accelerator);
  const bench::DevicePeers peers = bench::device_peers(c, mirror, accelerator);
  ASSERT_EQ(peers.list.size(), 1u);
  EXPECT_EQ(peers.list[0].name, "copy");
}

}  // namespace
}  // namespace cadre
