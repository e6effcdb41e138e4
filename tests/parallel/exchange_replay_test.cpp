// Exchanges that were recorded, replayed with other routing and other tokens.
#include <gtest/gtest.h>

#include <barrier>
#include <random>

#include "tests/judge/machine_copy.h"
#include "tests/parallel/group.h"
#include "tests/parallel/rank_case.h"

using namespace cadre;
using test::Holds;
using test::Machine;

namespace {

constexpr unsigned kRanks = 2, kRoutings = 6;

/// A rank's tensors. The experts leave rows as they are.
struct Case : test::RankCase {
  test::OwnedWorkspace workspace;

  /// Random; some tokens choose nobody.
  Case(const ExpertParallelPlan& plan, int64_t tokens, unsigned seed)
      : RankCase(plan.problem, tokens), workspace(plan.workspace_bytes) {
    std::mt19937 random(seed);
    for (test::Tensor* t : {&x, &dout}) t->fill(random, -2, 2);
    prob.fill(random, 0, 1);
    if (p.x) quantize_x();
    const auto choices = unsigned(plan.problem.ranks * plan.problem.experts + 1);
    for (int32_t& e : experts) e = int32_t(random() % choices) - 1;
  }
  void for_pieces(auto&& visit) const {
    for (const test::Tensor* t : {&x, &prob, &dout}) visit(test::piece("input", *t, Holds::kInput));
    if (p.x) {
      for (const test::Tensor* t : {&x_codes, &x_scales})
        visit(test::piece("codes", *t, Holds::kInput));
      for (const test::Tensor* t : {&row_codes, &row_scales})
        visit(test::piece("codes of rows", *t, Holds::kOutput));
    }
    visit(test::list_piece("experts", experts));
    for (const test::Tensor* t : {&rows, &row_prob, &out, &dy, &dx, &dprob})
      visit(test::piece("output", *t, Holds::kOutput));
    for (const std::vector<int32_t>* list :
         {&offsets, &row_of, &slot_of, &row_here, &routed, &verdict})
      visit(test::list_piece("map", *list, Holds::kOutput));
    visit(test::piece("workspace", workspace));
  }
  /// All four exchanges with the tensors of a machine.
  void launch(const ExpertParallelPlan& plan, Window& window, const test::MachineCopy& on,
              Stream stream) {
    const Workspace memory = on.moved(workspace);
    const CollectArgs sums{.y = rows.view(), .out = out.view(), .map = map()};
    const CollectBackwardArgs to_rows{.dout = dout.view(), .dy = dy.view(), .map = map()};
    const DispatchBackwardArgs to_tokens{.drows = dy.view(),
                                         .drow_prob = row_prob.data<float>(),
                                         .dx = dx.view(),
                                         .dprob = dprob.data<float>(),
                                         .map = map()};
    const DispatchArgs from = p.x ? code_args(true) : dispatch_args(true);
    dispatch(plan, window, on.moved(from), memory, stream);
    collect(plan, window, on.moved(sums), stream);
    collect_backward(plan, window, on.moved(to_rows), stream);
    dispatch_backward(plan, window, on.moved(to_tokens), memory, stream);
  }
};

/// What a run and a replay of the same exchanges make.
struct Both {
  Case run, replayed;
  test::MachineCopy of_run, of_replayed;

  Both(Machine& machine, const ExpertParallelPlan& plan, int64_t tokens, unsigned seed)
      : run(plan, tokens, seed),
        replayed(plan, tokens, seed),
        of_run(machine, run),
        of_replayed(machine, replayed) {
    of_run.upload();
    of_replayed.upload();
  }
};

/// Which exchanges: by the route that is planned or another, tokens of the second rank, and what
/// more the problem says.
struct Kind {
  std::string_view route;
  int64_t tokens;
  std::string_view words = "";
};

/// One rank: exchanges are recorded once, and replayed with other tensors.
void replay(const Kind& kind, int rank, const AllGather& gather, std::barrier<>& barrier) {
  const auto machine = test::open_machine(rank);
  const ExpertParallelPlan made =
      plan(parse_expert_parallel_problem(text(
               "expert_parallel T=24 top_k=3 H=320 E=3 ranks=2 R=40 overflow=drop", kind.words)),
           machine->device(), kind.route);
  const int64_t tokens = rank == 0 ? made.problem.tokens : kind.tokens;
  Window window = Window::create(made, rank, gather, {.limit = std::chrono::seconds(20)});
  std::vector<std::unique_ptr<Both>> cases;
  for (unsigned i = 0; i <= kRoutings; ++i)
    cases.push_back(std::make_unique<Both>(*machine, made, tokens, kRanks * i + unsigned(rank)));
  Both& live = *cases.back();
  for (const auto& c : cases) {
    machine->run([&](Stream on) { c->run.launch(made, window, c->of_run, on); });
    c->of_run.fetch();
  }
  // While a GPU's thread records, others must not take memory or make a graph. On the CPU the
  // exchanges run there and then.
  std::unique_ptr<test::Recorded> graph;
  const bool in_turns = made.device.kind != DeviceKind::kCpu;
  for (int turn = 0; turn < int(kRanks); ++turn) {
    barrier.arrive_and_wait();
    if (turn == (in_turns ? rank : 0))
      graph = machine->record(
          [&](Stream on) { live.replayed.launch(made, window, live.of_replayed, on); });
  }
  barrier.arrive_and_wait();
  for (const auto& c : cases) {
    live.of_replayed.upload_from(c->of_replayed);
    graph->replay();
    c->of_replayed.fetch_from(live.of_replayed);
    EXPECT_EQ(test::byte_difference(c->replayed, c->run) + c->of_replayed.damage(), "");
    EXPECT_GT(c->run.used(), 0);
    EXPECT_EQ(c->run.verdict[0], 0);
  }
  EXPECT_NE(test::byte_difference(cases[0]->run, cases[1]->run), "");
  barrier.arrive_and_wait();  // nobody's window ends while others read it
}

TEST(ExchangeReplay, HasTheBitsOfARun) {
  const auto machine = test::open_machine();
  if (machine == nullptr) GTEST_SKIP() << test::why_no_machine();
  if (machine->ranks() < int(kRanks)) GTEST_SKIP() << "fewer than two GPUs here";
  constexpr std::string_view kCodes = " x=fp8_block scales_major=column";
  for (const Kind& kind : {Kind{"", 24}, Kind{"", 17}, Kind{"", 0}, Kind{"window", 24},
                           Kind{"", 17, kCodes}, Kind{"window", 17, kCodes}}) {
    test::ThreadGroup group(kRanks);
    std::barrier<> barrier(kRanks);
    for (const std::string& error : test::on_ranks(kRanks, [&](int rank) {
           try {
             replay(kind, rank, group.all_gather(rank), barrier);
           } catch (...) {
             barrier.arrive_and_drop();
             throw;
           }
         }))
      EXPECT_EQ(error, "");
  }
}

}  // namespace
