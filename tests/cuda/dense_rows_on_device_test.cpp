// Dense products on a GPU of Hopper: a row has the bits that it has in any other batch, whether
// blocks share its contraction or not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/error.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

/// The bits of y, row after row, for the first rows of x.
std::vector<uint32_t> run_on_gpu(const std::string& words, int64_t rows) {
  const Device device = cuda_devices()[0];
  const GroupedGemmProblem p =
      parse_grouped_gemm_problem(text("grouped_gemm fprop R=", rows, " ", words));
  GroupedGemmCase c = bench::make_case(p, bench::Draw{.seed = 7});
  const GroupedGemmPlan chosen = plan(p, device);
  EXPECT_EQ(chosen.name, "sm90_dense_rows");
  const auto accelerator = bench::open_accelerator(device);
  const bench::Mirror mirror(*c.buffers, *accelerator);
  run(chosen, mirror.moved(c.args), {}, accelerator->stream());
  mirror.fetch();
  std::vector<uint32_t> bits(size_t(p.rows * p.n));
  for (int64_t r = 0; r < p.rows; ++r)
    std::memcpy(&bits[size_t(r * p.n)],
                static_cast<const float*>(c.args.out.data) + r * c.args.out.stride[0],
                size_t(p.n) * sizeof(float));
  return bits;
}

class DenseRows : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty() || cuda_devices()[0].sm != 90)
      GTEST_SKIP() << "no GPU of Hopper here";
  }
};

// Tiles of many rows: on a GPU, whose many units have narrow ones else, and the wide ones late.
TEST_P(DenseRows, DoNotDependOnTheBatch) {
  const int64_t most = cuda_devices()[0].units > 100 ? 12600 : 2100;
  const std::vector<uint32_t> all = run_on_gpu(GetParam(), most);
  for (const int64_t rows : {1, 16, 33, 260, 500, 513, 1024, 1025, 1300, 6000}) {
    if (rows > most) break;
    const std::vector<uint32_t> some = run_on_gpu(GetParam(), rows);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << rows << " rows";
  }
}

// Stretches of several stages, of one, none at all, and of more than a ring has; two blocks of w's
// rows, whose last has one consumer with rows; a contraction that ends within a stage.
INSTANTIATE_TEST_SUITE_P(Rows, DenseRows,
                         testing::Values("N=136 K=840 E=1 format=bf16 out=f32 dense=yes",
                                         "N=128 K=200 E=1 format=f16 out=f32 dense=yes",
                                         "N=8 K=64 E=1 format=bf16 out=f32 dense=yes",
                                         "N=8 K=5000 E=1 format=bf16 out=f32 dense=yes"));

}  // namespace
}  // namespace cadre
