// What the host must know cannot be in a graph.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/judge/machine.h"
#include "tests/parallel/collective_case.h"

using namespace cadre;

namespace {

TEST(Collective, RefusesToBeRecorded) {
  const auto machine = test::open_machine();
  if (machine == nullptr) GTEST_SKIP() << test::why_no_machine();
  if (machine->device().kind == DeviceKind::kCpu) GTEST_SKIP() << "nothing is recorded here";
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .rows = 6};
  Collective own(plan(p, machine->device(), "collective"), 0,
                 [](std::span<const RankMessage>, Stream) { FAIL() << "rows were to travel"; });
  test::CollectiveCase r(test::RankCase(p, 3));
  const auto error = [&](auto&& exchange) {
    return test::invalid([&] { machine->record(exchange); });
  };
  const auto want = [&](std::string_view call) {
    return text(call, ": the stream is recorded into a graph, must run; the host reads how many ",
                "rows travel [", to_string(p), "]");
  };
  EXPECT_EQ(error([&](Stream on) { dispatch(own, r.collective_dispatch_args(), {}, on); }),
            want("dispatch"));
  EXPECT_EQ(error([&](Stream on) { collect(own, {}, {}, on); }), want("collect"));
  EXPECT_EQ(error([&](Stream on) { collect_backward(own, {}, {}, on); }), want("collect backward"));
  EXPECT_EQ(error([&](Stream on) { dispatch_backward(own, {}, {}, on); }),
            want("dispatch backward"));
}

}  // namespace
