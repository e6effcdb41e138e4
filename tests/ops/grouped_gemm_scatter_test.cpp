// Products whose rows are scattered: those of the product, each at its place, and nothing else.
#include <gtest/gtest.h>

#include <cstring>

#include "bench/case.h"
#include "bench/draw.h"
#include "cadre/error.h"
#include "tests/judge/errors.h"

namespace cadre {
namespace {

bench::GroupedGemmCase make(std::string_view words, const std::vector<int64_t>& counts) {
  bench::Draw draw;
  draw.counts = counts;
  return bench::make_case(parse_grouped_gemm_problem(text("grouped_gemm ", words)), draw);
}

std::vector<uint8_t> outputs_of(bench::GroupedGemmCase& c, std::string_view name) {
  const GroupedGemmPlan chosen = plan(c.problem, this_cpu(), name);
  run(chosen, c.args, c.buffers->workspace(chosen.workspace_bytes), {});
  const TensorView& out = c.args.out;
  const auto* first = static_cast<const uint8_t*>(out.data);
  return {first, first + bytes_for(out.dtype, out[0] * out.stride[0])};
}

TEST(GroupedGemmScatter, HasTheRowsOfTheProductAtTheirPlaces) {
  for (const char* words :
       {"fprop R=64 N=24 K=40 E=4 format=bf16 bias=yes alpha=yes scatter=yes T=16 top_k=4",
        "dgrad R=64 N=24 K=40 E=4 format=f32 out=f16 scatter=yes T=20 top_k=2 ranks=3",
        "fprop R=64 N=9 K=40 E=4 format=f16 out=f32 scatter=yes T=0 ranks=2",
        "fprop R=64 N=32 K=64 E=4 format=mxfp8 scatter=yes T=7 top_k=3 ranks=2"}) {
    bench::GroupedGemmCase got = make(words, {20, 0, 31, 8}), want = make(words, {20, 0, 31, 8});
    bench::GroupedGemmCase rows =
        make(to_string(bench::without_gather(got.problem)).substr(13), {20, 0, 31, 8});
    outputs_of(rows, "");
    bench::scatter_rows(rows, want);
    const TensorView& out = want.args.out;
    const auto* first = static_cast<const uint8_t*>(out.data);
    EXPECT_EQ(outputs_of(got, "cpu_scattered") ==
                  std::vector(first, first + bytes_for(out.dtype, out[0] * out.stride[0])),
              true)
        << words;
    EXPECT_TRUE(got.buffers->canaries_live());
  }
}

TEST(GroupedGemmScatter, OthersScatterNoRows) {
  const GroupedGemmPlan made =
      plan(parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=4 K=4 scatter=yes T=4 top_k=2"),
           this_cpu());
  EXPECT_EQ(made.name, "cpu_scattered");
  ASSERT_EQ(made.refusals.size(), 6u);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_EQ(made.refusals[i].why, "scatters no rows") << made.refusals[i].name;
  EXPECT_EQ(made.refusals[5].name, "composed");
  const GroupedGemmPlan plain = find(parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=4 K=4"),
                                     this_cpu(), "cpu_scattered");
  EXPECT_EQ(plain.refusals.at(0).why, "is for rows that are scattered");
}

TEST(GroupedGemmScatter, SaysWhatDoesNotFit) {
  const auto error = [](std::string_view words) {
    const std::string message = test::invalid(
        [&] { plan(parse_grouped_gemm_problem(text("grouped_gemm ", words)), this_cpu()); });
    return message.substr(0, message.rfind(" ["));
  };
  const struct {
    const char *words, *message;
  } cases[] = {
      {"wgrad R=8 N=4 K=4 scatter=yes T=4", "scatter is yes, must be no; dw has no rows of tokens"},
      {"fprop R=8 N=4 K=4 ranks=2", "ranks is 2, must be 1; nothing is scattered"},
      {"fprop R=8 N=4 K=4 T=2", "T is 2, must be 0; nothing is gathered or scattered"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 gather=lhs",
       "gather is given, must not be; what is gathered is not scattered too"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 act=relu",
       "act is given, must not be; what is scattered leaves as it is multiplied"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 beta=yes", "beta is given, must not be; c has no places"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 tail=zero",
       "tail is zero, must be keep; places without a row stay"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 out_major=column",
       "out_major is column, must be row; rows are scattered"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 ranks=0", "ranks is 0, must be 1 or more"},
      {"fprop R=8 N=4 K=4 scatter=yes T=4 ranks=32768", "ranks is 32768, must be below 32768"},
      {"fprop R=8 N=4 K=4 scatter=yes T=1073741824 ranks=2",
       "ranks * T * top_k is 2147483648, must be below 2^31; rows are numbered in int32"},
  };
  for (const auto& c : cases) EXPECT_EQ(error(c.words), text("grouped_gemm: ", c.message));
  GroupedGemmProblem p = parse_grouped_gemm_problem("grouped_gemm fprop R=8 N=4 K=4 scatter=yes");
  p.tokens = -1;
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu()); }).rfind("grouped_gemm: T is -1, must be", 0),
            0u);
}

TEST(GroupedGemmScatter, SaysWhichArgumentsDoNotFit) {
  bench::GroupedGemmCase c =
      make("fprop R=8 N=4 K=4 E=2 format=bf16 scatter=yes T=3 top_k=2 ranks=2", {3, 5});
  const GroupedGemmPlan made = plan(c.problem, this_cpu());
  const auto error = [&] {
    const std::string message = test::invalid([&] { check(made, c.args); });
    return message.substr(0, message.rfind(" ["));
  };
  check(made, c.args);
  const int32_t* places = std::exchange(c.args.place_of, nullptr);
  EXPECT_EQ(error(),
            "grouped_gemm: place_of is null, must point to 8 elements; the problem asks "
            "for it");
  c.args.place_of = places;
  c.args.out = view(c.args.out.data, DType::kBf16, {6, 4});
  EXPECT_EQ(error(), "grouped_gemm: y is bf16[6, 4], must be bf16[2, 6, 4]");
}

}  // namespace
}  // namespace cadre
