#include "apps/train/engine.h"
#include "tests/judge/errors.h"

namespace cadre::train {
namespace {

TEST(NoCuda, HasNoEngineForAGpu) {
  EXPECT_EQ(test::unsupported([] { open_engine(parse_device("sm_90")); }),
            "train: this build has no CUDA backend; configure with the preset cuda, or give "
            "--device cpu");
}

}  // namespace
}  // namespace cadre::train
