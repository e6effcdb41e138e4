// The addend c of fprop and dgrad on a GPU: it may be the output, and where beta is 0 nobody reads
// it. With the bits of a c that lies elsewhere, and of a problem without beta.
#include <gtest/gtest.h>

#include <cstring>

#include "bench/case.h"
#include "bench/mirror.h"
#include "cadre/error.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;

struct Sums {
  const char *words, *implementation;
  std::vector<int64_t> counts;
};

class Addend : public testing::TestWithParam<Sums> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
    const bool hopper = std::string_view(GetParam().implementation).starts_with("sm90");
    if (hopper && cuda_devices()[0].sm != 90) GTEST_SKIP() << "no GPU of Hopper here";
  }
};

GroupedGemmCase make(const Sums& sums) {
  const GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", sums.words));
  bench::Draw draw;
  draw.counts = sums.counts;
  return bench::make_case(p, draw);
}

using Rows = std::vector<std::vector<uint8_t>>;

char* row_of(const TensorView& v, int64_t r) {
  return static_cast<char*>(v.data) + bytes_for(v.dtype, r * v.stride[0]);
}

int64_t used_rows(const Sums& sums) {
  int64_t rows = 0;
  for (const int64_t count : sums.counts) rows += count;
  return rows;
}

/// The rows of experts that the implementation makes of the case.
Rows run_on_gpu(GroupedGemmCase& c, const GroupedGemmProblem& p, const Sums& sums) {
  const Device device = cuda_devices()[0];
  const GroupedGemmPlan chosen = plan(p, device, sums.implementation);
  const auto accelerator = bench::open_accelerator(device);
  const Workspace workspace = c.buffers->workspace(chosen.workspace_bytes);
  const bench::Mirror mirror(*c.buffers, *accelerator);
  run(chosen, mirror.moved(c.args), mirror.moved(workspace), accelerator->stream());
  mirror.fetch();
  Rows rows;
  const TensorView& out = c.args.out;
  for (int64_t r = 0; r < used_rows(sums); ++r)
    rows.emplace_back(row_of(out, r), row_of(out, r) + bytes_for(out.dtype, out.shape[1]));
  return rows;
}

TEST_P(Addend, MayBeTheOutput) {
  GroupedGemmCase apart = make(GetParam()), same = make(GetParam());
  const TensorView &c = same.args.c, &out = same.args.out;
  for (int64_t r = 0; r < used_rows(GetParam()); ++r)
    std::memcpy(row_of(out, r), row_of(c, r), size_t(bytes_for(c.dtype, c.shape[1])));
  same.args.c = out;
  const Rows want = run_on_gpu(apart, apart.problem, GetParam());
  EXPECT_TRUE(run_on_gpu(same, same.problem, GetParam()) == want);
}

TEST_P(Addend, TimesZeroIsNotRead) {
  GroupedGemmCase zero = make(GetParam()), none = make(GetParam());
  const TensorView& c = zero.args.c;
  for (int64_t r = 0; r < c.shape[0]; ++r)
    std::memset(row_of(c, r), 0xff, size_t(bytes_for(c.dtype, c.shape[1])));
  auto* beta = zero.buffers->array<float>(zero.problem.experts);
  for (int e = 0; e < zero.problem.experts; ++e) beta[e] = 0;
  zero.args.beta = beta;
  GroupedGemmProblem without = none.problem;
  without.beta = false;
  none.args.beta = nullptr;
  none.args.c = {};
  const Rows want = run_on_gpu(none, without, GetParam());
  EXPECT_TRUE(run_on_gpu(zero, zero.problem, GetParam()) == want);
}

// Tiles of all widths, consumers without rows, parts and widths that end within a box, more parts
// than buffers.
INSTANTIATE_TEST_SUITE_P(
    Rows, Addend,
    testing::Values(
        Sums{"fprop R=460 N=264 K=136 E=3 beta=yes", "sm90_ragged_rows", {201, 7, 240}},
        Sums{"dgrad R=460 N=136 K=264 E=3 beta=yes alpha=yes out=f32 unit_budget=2",
             "sm90_ragged_rows",
             {201, 7, 240}},
        Sums{"fprop R=90 N=40 K=72 E=3 beta=yes format=f16 out=f16 bias=yes",
             "sm90_ragged_rows",
             {33, 0, 50}},
        Sums{"fprop R=460 N=264 K=144 E=3 beta=yes format=fp8_tensor",
             "sm90_fp8_rows",
             {201, 7, 240}},
        Sums{"fprop R=460 N=264 K=144 E=3 beta=yes format=fp8_tensor out=f32",
             "sm90_fp8_rows",
             {201, 7, 240}},
        Sums{"fprop R=460 N=264 K=160 E=3 beta=yes x=bf16 w=mxfp4",
             "sm90_packed_rows",
             {201, 7, 240}},
        Sums{"fprop R=60 N=136 K=160 E=3 beta=yes x=bf16 w=mxfp8", "sm90_packed_rows", {33, 0, 22}},
        Sums{"fprop R=460 N=264 K=160 E=3 beta=yes x=bf16 w=nvfp4 out=f32",
             "sm90_packed_rows",
             {201, 7, 240}},
        Sums{"dgrad R=90 N=67 K=139 E=3 beta=yes", "cuda_ragged_rows", {33, 0, 50}}));

}  // namespace
}  // namespace cadre
