#include "cadre/device.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

TEST(NoCuda, ShowsNoDevice) { EXPECT_TRUE(cuda_devices().empty()); }

}  // namespace
}  // namespace cadre
