// Grouped GEMM on a GPU where tiles begin and end: counts around the widest ones, outputs that are
// no multiple of a chunk, and every way in which a gradient meets what is there.
#include <gtest/gtest.h>

#include <numeric>

#include "bench/check.h"
#include "cadre/grouped_gemm.h"
#include "tests/cuda/gathered_case.h"

namespace cadre {
namespace {

using Counts = std::vector<int64_t>;

GroupedGemmProblem problem(Pass pass, DType out, const Counts& counts) {
  GroupedGemmProblem p;
  p.pass = pass;
  p.out = out;
  p.lhs = p.rhs = format(FormatKind::kBf16);
  p.experts = int(counts.size());
  p.rows = std::accumulate(counts.begin(), counts.end(), int64_t(0));
  return p;
}

void expect_good(const GroupedGemmProblem& p, const Counts& counts) {
  const Device device = cuda_devices()[0];
  bench::Draw draw;
  draw.seed = uint64_t(p.rows + p.n);
  draw.counts = counts;
  const bench::CheckReport report = bench::check(to_string(p), draw, {}, device);
  EXPECT_TRUE(report.good()) << report.fault << " by " << report.plan << " [" << to_string(p)
                             << "]";
}

TEST(GroupedGemmTilesOnDevice, RowsAroundTheWidestTiles) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const std::vector<Counts> all = {{255, 0, 256, 257}, {271, 1, 272, 273}, {287, 288, 289},
                                   {300, 0, 520},      {512, 513, 529},    {544, 545, 17},
                                   {575, 576, 577},    {864, 33}};
  constexpr int64_t kWidths[] = {8, 64, 72, 136, 200, 264};
  int turn = 0;
  for (const Counts& counts : all)
    for (const Pass pass : {Pass::kFprop, Pass::kDgrad}) {
      GroupedGemmProblem p = problem(pass, turn % 4 < 2 ? DType::kBf16 : DType::kF32, counts);
      p.n = kWidths[turn % 6], p.k = kWidths[(turn / 2 + 2) % 6];
      p.discrete_rhs = turn % 3 == 0;
      p.alpha = turn % 4 == 1;
      p.tail = turn % 5 == 0 ? Tail::kZero : Tail::kKeep;
      p.rows += turn % 2 * 40;
      p.unit_budget = turn % 3 == 1 ? 2 : 0;
      expect_good(p, counts);
      ++turn;
    }
}

TEST(GroupedGemmTilesOnDevice, GradientsMeetWhatIsThere) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  constexpr int64_t kCols[] = {8, 136, 160, 192, 200, 392};
  constexpr int64_t kRows[] = {64, 72, 136, 200, 264, 8, 128};
  const Counts counts = {0, 1, 65, 0, 130, 64, 200};
  int turn = 0;
  for (const int64_t cols : kCols)
    for (const Accumulate accumulate :
         {Accumulate::kNo, Accumulate::kYes, Accumulate::kDevice, Accumulate::kPerExpert}) {
      for (const DType out : {DType::kF32, DType::kBf16}) {
        GroupedGemmProblem p = problem(Pass::kWgrad, out, counts);
        p.n = kRows[turn % 7], p.k = cols;
        p.accumulate = accumulate;
        p.discrete_out = turn % 3 == 0;
        p.alpha = turn % 2 == 0;
        p.unit_budget = turn % 5 < 3 ? 2 : 0;
        expect_good(p, counts);
      }
      ++turn;
    }
}

TEST(GroupedGemmTilesOnDevice, GradientsOfManyRowsMeetItToo) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const Counts counts = {1600, 3, 1536, 1537};
  GroupedGemmProblem p = problem(Pass::kWgrad, DType::kF32, counts);
  p.n = 136, p.k = 232;
  p.accumulate = Accumulate::kYes;
  p.alpha = true;
  p.unit_budget = 2;
  expect_good(p, counts);
}

TEST(GroupedGemmTilesOnDevice, ASingleRowMayHaveAnyStride) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  for (const Pass pass : {Pass::kFprop, Pass::kDgrad, Pass::kWgrad})
    for (const int64_t rows : {0, 1}) {
      GroupedGemmProblem p = problem(pass, DType::kBf16, {rows, 0});
      p.n = 72, p.k = 136;
      bench::GroupedGemmCase want = bench::make_case(p, {}), got = bench::make_case(p, {});
      got.args.lhs.codes.stride[0] = 1;
      (pass == Pass::kWgrad ? got.args.rhs.codes : got.args.out).stride[0] = 1;
      EXPECT_TRUE(test::outputs_of(got, {}) == test::outputs_of(want, {})) << to_string(p);
    }
}

}  // namespace
}  // namespace cadre
