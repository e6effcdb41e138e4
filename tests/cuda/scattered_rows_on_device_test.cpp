// fprop and dgrad whose rows Hopper's kernel writes to places: the bits of the kernel that writes
// them one after another, whatever places and offsets say; what it refuses.
#include "tests/cuda/gathered_case.h"

namespace cadre {
namespace {

using bench::GroupedGemmCase;
using test::Shape;
using ScatteredRows = test::OnHopper;

constexpr std::string_view kName = "sm90_scattered_rows";

GroupedGemmCase make(const Shape& shape) {
  bench::Draw draw;
  draw.counts = shape.counts;
  draw.row_gap = shape.gap;
  return bench::make_case(parse_grouped_gemm_problem(text("grouped_gemm ", shape.words)), draw);
}

/// The bytes of all places and of what lies between them.
std::vector<uint8_t> written(GroupedGemmCase& c) {
  test::outputs_of(c, kName);
  const TensorView& out = c.args.out;
  const auto* first = static_cast<const uint8_t*>(out.data);
  return {first, first + bytes_for(out.dtype, out[0] * out.stride[0])};
}

/// What they must be: rows of the other kernel, copied.
std::vector<uint8_t> wanted(const Shape& shape, GroupedGemmCase c) {
  bench::Draw draw;
  draw.counts = shape.counts;
  draw.row_gap = shape.gap;
  GroupedGemmCase rows = bench::make_case(bench::without_gather(c.problem), draw);
  test::outputs_of(rows, "sm90_ragged_rows");
  bench::scatter_rows(rows, c);
  const auto* first = static_cast<const uint8_t*>(c.args.out.data);
  return {first, first + bytes_for(c.problem.out, c.args.out[0] * c.args.out.stride[0])};
}

// Experts of a few rows, of just over a tile, without any; columns that end within a box; ranks
// whose places are many or none.
TEST_F(ScatteredRows, AreTheRowsOfTheProductWhereTheirPlacesAre) {
  for (const Shape& shape :
       {Shape{"fprop R=450 N=136 K=272 E=6 scatter=yes T=150 top_k=3", {0, 201, 1, 0, 203, 0}},
        Shape{"fprop R=900 N=264 K=72 E=4 scatter=yes T=120 top_k=4 ranks=2", {257, 0, 300, 16}},
        Shape{"dgrad R=450 N=136 K=272 E=6 scatter=yes T=70 top_k=3 ranks=3",
              {0, 201, 1, 0, 203, 0}},
        Shape{"dgrad R=450 N=64 K=328 E=4 scatter=yes T=225 top_k=2 format=f16 out=f16 "
              "discrete_rhs=yes",
              {129, 0, 190, 64}},
        Shape{"fprop R=450 N=40 K=520 E=4 scatter=yes T=225 top_k=2 format=f16 out=f16 "
              "rhs_major=column",
              {129, 0, 190, 64}},
        Shape{"dgrad R=150 N=24 K=80 E=3 scatter=yes T=9 top_k=2 ranks=4 rhs_major=column",
              {70, 0, 61}},
        Shape{"fprop R=150 N=80 K=24 E=3 scatter=yes T=75 top_k=2 unit_budget=2", {70, 0, 61}, 8},
        Shape{"fprop R=150 N=80 K=24 E=3 scatter=yes T=0 top_k=2 ranks=2", {70, 0, 61}}}) {
    GroupedGemmCase got = make(shape);
    EXPECT_EQ(written(got) == wanted(shape, make(shape)), true) << shape.words;
  }
}

TEST_F(ScatteredRows, OfBrokenOffsetsAreWrittenNowhereElse) {
  const Shape shape{"fprop R=300 N=112 K=72 E=3 scatter=yes T=150 top_k=2", {100, 100, 100}};
  for (const std::vector<int32_t>& offsets : test::broken_offsets()) {
    GroupedGemmCase c = make(shape);
    std::copy(offsets.begin(), offsets.end(), const_cast<int32_t*>(c.args.offsets.data));
    written(c);
  }
}

TEST(ScatteredRowsPlan, SaysWhyTheKernelDoesNotTakeIt) {
  const auto why = [](std::string_view words) {
    return test::refusal(text("grouped_gemm fprop format=bf16 R=9 E=3 ", words), "sm_90", kName);
  };
  EXPECT_EQ(why("N=64 K=16 scatter=yes T=5 top_k=2 ranks=2 discrete_rhs=yes"), "");
  EXPECT_EQ(why("N=64 K=16 scatter=yes T=5 rhs_major=column"), "");
  EXPECT_EQ(why("N=64 K=16"), "takes rows that it scatters");
  EXPECT_EQ(why("N=64 K=16 scatter=yes T=5 alpha=yes"), "takes no alpha, beta, bias or bias_scale");
  EXPECT_EQ(why("N=64 K=16 scatter=yes T=5 bias=yes"), "takes no alpha, beta, bias or bias_scale");
  EXPECT_EQ(why("N=64 K=16 scatter=yes T=5 out=f32"), "writes the type of its operands");
  EXPECT_EQ(why("N=12 K=16 scatter=yes T=5"), "takes N and K that are multiples of 8, as TMA does");
  EXPECT_EQ(test::refusal("grouped_gemm fprop R=9 N=64 K=16 E=3 format=bf16 scatter=yes T=5",
                          "sm_100", kName),
            "is for sm_90, not sm_100");
}

}  // namespace
}  // namespace cadre
