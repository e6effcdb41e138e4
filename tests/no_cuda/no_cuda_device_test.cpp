#include "cadre/device.h"

#include <gtest/gtest.h>

#include "backend/poison.h"
#include "cadre/error.h"
#include "cadre/pointers.h"

namespace cadre {
namespace {

TEST(NoCuda, ShowsNoDevice) { EXPECT_TRUE(cuda_devices().empty()); }

TEST(NoCuda, WritesNoPointersOfAGpu) {
  EXPECT_THROW(write_pointers({}, nullptr, parse_device("sm_90"), {}), Unsupported);
}

TEST(NoCuda, PoisonsNoMemoryOfAGpu) { EXPECT_THROW(cuda::poison({}, {}), Unsupported); }

}  // namespace
}  // namespace cadre
