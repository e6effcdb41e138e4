// A build without NCCL says so.
#include <gtest/gtest.h>

#include "cadre/nccl.h"
#include "tests/judge/errors.h"

using namespace cadre;

TEST(NoNccl, IsSaid) {
  EXPECT_EQ(test::unsupported([] { nccl_all_to_all(nullptr); }),
            "nccl: this build has no NCCL; configure with -DCADRE_CUDA=ON -DCADRE_NCCL=ON");
}
