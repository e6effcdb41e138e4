// What the host must know cannot be in a graph; blocks can.
#include <gtest/gtest.h>

#include <random>

#include "tests/judge/errors.h"
#include "tests/judge/machine_copy.h"
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

/// The DeviceError of some work; empty: none.
std::string thrown(auto&& work) {
  try {
    work();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return {};
}

/// What one rank sends to itself, by kernels alone: rows of 16-bit words, moved as they are.
class KernelEngine {
 public:
  explicit KernelEngine(test::Machine& machine) : machine_(machine), words_(machine.take(256)) {
    const std::array<int32_t, 3> words = {0, 0, 1};  // the slot of the one row; offsets
    machine.upload(words_, words.data(), sizeof words);
  }
  KernelEngine(const KernelEngine&) = delete;
  KernelEngine& operator=(const KernelEngine&) = delete;
  ~KernelEngine() { machine_.give_back(words_); }

  void operator()(std::span<const RankMessage> messages, Stream stream) const {
    auto* words = static_cast<int32_t*>(words_);
    for (const RankMessage& m : messages) {
      const PermuteProblem p{
          .tokens = 1, .rows = 1, .hidden = m.send_bytes / 2, .dtype = DType::kF16};
      cadre::run(cadre::plan(p, machine_.device()),
                 {.tokens = view(m.send, p.dtype, {1, p.hidden}),
                  .rows = view(m.receive, p.dtype, {1, p.hidden}),
                  .map = {.slot_of = words},
                  .offsets = {words + 1, 1}},
                 {}, stream);
    }
  }

 private:
  test::Machine& machine_;
  void* words_;
};

/// A rank's tensors on a machine. The experts leave rows as they are.
struct Case : test::CollectiveCase {
  test::OwnedWorkspace workspace;

  /// Random; some choose nobody, and of every third seed all choose someone.
  Case(const ExpertParallelPlan& plan, unsigned seed)
      : CollectiveCase(test::RankCase(plan.problem, plan.problem.tokens)),
        workspace(plan.workspace_bytes) {
    std::mt19937 random(seed);
    for (test::Tensor* t : {&x, &dout}) t->fill(random, -2, 2);
    prob.fill(random, 0, 1);
    const auto all = unsigned(p.experts);
    for (int32_t& e : experts)
      e = int32_t(seed % 3 == 2 ? random() % all : random() % (all + 4)) - (seed % 3 == 2 ? 0 : 4);
  }
  void for_pieces(auto&& visit) const {
    for (const test::Tensor* t : {&x, &prob, &dout})
      visit(test::piece("input", *t, test::Holds::kInput));
    visit(test::list_piece("experts", experts));
    for (const test::Tensor* t : {&rows, &row_prob, &out, &dy, &dx, &dprob})
      visit(test::piece("output", *t, test::Holds::kOutput));
    for (const std::vector<int32_t>* list :
         {&row_of, &slot_of, &leaving, &came_at, &row_at, &offsets, &verdict, &routed})
      visit(test::list_piece("map", *list, test::Holds::kOutput));
    visit(test::piece("workspace", workspace));
  }
  void launch(Collective& own, const test::MachineCopy& on, Stream stream) {
    const Workspace memory = on.moved(workspace);
    const CollectiveCollectArgs sums{rows.view(), out.view(), collective_map()};
    const CollectiveCollectBackwardArgs to_rows{dout.view(), dy.view(), collective_map()};
    CollectiveDispatchBackwardArgs to_tokens = collective_dispatch_backward_args();
    to_tokens.drows = dy.view(), to_tokens.drow_prob = row_prob.data<float>();
    dispatch(own, on.moved(collective_dispatch_args()), memory, stream);
    collect(own, on.moved(sums), memory, stream);
    collect_backward(own, on.moved(to_rows), memory, stream);
    dispatch_backward(own, on.moved(to_tokens), memory, stream);
  }
};

/// What a run and a replay of the same exchanges make.
struct Both {
  Case run, replayed;
  test::MachineCopy of_run, of_replayed;

  Both(test::Machine& machine, const ExpertParallelPlan& plan, unsigned seed)
      : run(plan, seed),
        replayed(plan, seed),
        of_run(machine, run),
        of_replayed(machine, replayed) {
    of_run.upload();
    of_replayed.upload();
  }
};

/// Exchanges in blocks are recorded once and replayed with other routing. Returns how many of these
/// overflowed.
int replay(test::Machine& machine, std::string_view words) {
  const ExpertParallelPlan made =
      plan(parse_expert_parallel_problem(text("expert_parallel T=24 top_k=3 H=320 E=5 ", words)),
           machine.device(), "collective");
  const KernelEngine engine(machine);
  Collective own(made, 0, std::cref(engine)), recorded(made, 0, std::cref(engine));
  std::vector<std::unique_ptr<Both>> cases;
  for (unsigned seed = 0; seed < 7; ++seed)
    cases.push_back(std::make_unique<Both>(machine, made, seed));
  Both& live = *cases.back();
  const auto graph =
      machine.record([&](Stream on) { live.replayed.launch(recorded, live.of_replayed, on); });
  int overflowed = 0;
  for (const auto& c : cases) {
    machine.run([&](Stream on) { c->run.launch(own, c->of_run, on); });
    c->of_run.fetch();
    live.of_replayed.upload_from(c->of_replayed);
    graph->replay();
    c->of_replayed.fetch_from(live.of_replayed);
    EXPECT_EQ(test::byte_difference(c->replayed, c->run) + c->of_replayed.damage(), "");
    const std::string error = thrown([&] { own.check(); });
    EXPECT_EQ(thrown([&] { recorded.check(); }), error);
    EXPECT_EQ(error.empty(), c->run.verdict[0] == 0);
    overflowed += c->run.verdict[0];
  }
  EXPECT_NE(test::byte_difference(cases[0]->run, cases[1]->run), "");
  return overflowed;
}

TEST(CollectiveBlocks, AreRecordedAndReplayedWithOtherRouting) {
  const auto machine = test::open_machine();
  if (machine == nullptr) GTEST_SKIP() << test::why_no_machine();
  EXPECT_EQ(replay(*machine, "block=72"), 0);
  EXPECT_EQ(replay(*machine, "block=60"), 2);  // of 72 rows
  EXPECT_EQ(replay(*machine, "block=60 overflow=drop"), 0);
}

/// What replays noted, the next dispatch that is not recorded throws.
TEST(CollectiveBlocks, OfAReplayOverflowIsAnErrorOfTheNextDispatch) {
  const auto machine = test::open_machine();
  if (machine == nullptr) GTEST_SKIP() << test::why_no_machine();
  const ExpertParallelPlan made =
      plan(parse_expert_parallel_problem("expert_parallel T=24 top_k=3 H=8 E=5 block=60"),
           machine->device(), "collective");
  const KernelEngine engine(*machine);
  Collective own(made, 0, std::cref(engine));
  Both few(*machine, made, 0), many(*machine, made, 2);
  const auto graph =
      machine->record([&](Stream on) { many.replayed.launch(own, many.of_replayed, on); });
  const auto error = [&] {
    return thrown([&] { machine->run([&](Stream on) { few.run.launch(own, few.of_run, on); }); });
  };
  const bool runs_at_once = machine->device().kind == DeviceKind::kCpu;  // as it is recorded
  if (!runs_at_once) graph->replay();
  EXPECT_EQ(error().substr(0, 38), "expert_parallel: rows of rank 0 are 72");
  EXPECT_EQ(error(), "");
}

}  // namespace
