// permute and combine of what lies in the memories of several ranks.
#include <gtest/gtest.h>

#include "cadre/permute.h"
#include "tests/judge/errors.h"
#include "tests/judge/tensor.h"
#include "tests/ops/permute_case.h"

using namespace cadre;
using test::Tensor;
using Case = test::PermuteCase;

namespace {

/// What lies in the memories of several ranks is read as if it lay in one, whatever lies between.
TEST(PermuteOfRanks, IsThatOfOneTensor) {
  constexpr int kRanks = 3;
  for (const PermutePass pass : {PermutePass::kPermute, PermutePass::kCombine,
                                 PermutePass::kPermuteBackward, PermutePass::kCombineBackward})
    for (const std::string_view name : {"cpu", "cpu_reference"}) {
      PermuteProblem one{.pass = pass, .tokens = 12, .top_k = 2, .rows = 30, .hidden = 5};
      one.experts = 4;
      one.dtype = DType::kBf16;
      one.prob = pass != PermutePass::kCombineBackward;
      one.addend = pass == PermutePass::kCombine;
      Case want(one, 3);
      want.launch(name);
      Case got(one, 3);
      PermuteProblem p = one;
      PermuteArgs args = got.args();
      TensorView& read = got.writes_rows() ? args.tokens : args.rows;
      Tensor apart(p.dtype, {kRanks * 20, p.hidden + 1});
      const int64_t count = read[0] / kRanks;
      for (int64_t i = 0; i < read[0]; ++i)
        for (int64_t h = 0; h < p.hidden; ++h)
          apart.set({i / count * 20 + i % count, h}, cpu::read(read, i, h));
      const int64_t step = apart.view().stride[0];
      read = view(apart.view().data, p.dtype, {kRanks, count, p.hidden}, {20 * step, step, 1});
      p.ranks = kRanks;
      (got.writes_rows() ? p.tokens : p.rows) = count;
      if (!got.writes_rows()) args.offsets = {};
      run(plan(p, this_cpu(), name), args, {}, {});
      EXPECT_EQ(got.outputs(), want.outputs()) << to_string(p);
    }
}

TEST(PermuteOfRanks, HasNoTailWhereItSums) {
  PermuteProblem p{.pass = PermutePass::kCombine, .tokens = 4, .top_k = 2, .rows = 8, .hidden = 3};
  p.dtype = DType::kF32;
  Case c(p, 1);
  p.ranks = 2;
  p.rows = 4;
  PermuteArgs args = c.args();
  args.rows = view(args.rows.data, p.dtype, {2, 4, 3});
  const std::string error = test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); });
  EXPECT_EQ(
      error.substr(0, error.rfind(" [")),
      "permute: offsets.data is given, must be null; rows of several ranks, or of E=0, have no "
      "tail");
}

}  // namespace
