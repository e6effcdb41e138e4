// The words of experts whose rows travel by the caller's engine: plans, and errors.
#include <gtest/gtest.h>

#include "tests/judge/errors.h"
#include "tests/parallel/collective_case.h"

using namespace cadre;
using test::CollectiveCase;
using test::CollectiveGroup;

namespace {

constexpr std::string_view kRoute = "collective";

TEST(CollectivePlan, IsTakenByNameAlone) {
  const ExpertParallelProblem p =
      parse_expert_parallel_problem("expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=131072");
  EXPECT_EQ(plan(p, this_cpu()).name, "window");
  const ExpertParallelPlan made = plan(p, this_cpu(), kRoute);
  EXPECT_EQ(made.name, kRoute);
  EXPECT_TRUE(made.exact);
  EXPECT_EQ(
      explain(made),
      text("route      collective: rows travel by the caller's engine, between any hosts\n"
           "host       reads how many rows ranks exchange, once a dispatch; refuses capture\n"
           "workspace  ",
           made.workspace_bytes,
           " bytes, of each exchange\n"
           "tokens     cross once to each rank, and 4 bytes a choice; results for each choice\n"
           "rows       131072 a rank; 131072 are always enough, beyond them a step is NaN\n"));
  // Rows that leave and rows that come, each with whose it is, and little beside.
  const int64_t rows = int64_t(8192 * 8 + 131072) * (7168 * 2 + 4 + 4) + 2 * 8192 * 8 * 4;
  EXPECT_GE(made.workspace_bytes, rows);
  EXPECT_LE(made.workspace_bytes, rows + (1 << 20));
}

// Of the problem alone, so that ranks agree.
TEST(CollectivePlan, SaysWhatCrosses) {
  const auto line = [](std::string_view words) {
    const ExpertParallelPlan made =
        plan(parse_expert_parallel_problem(text("expert_parallel ", words)), this_cpu(), kRoute);
    const std::string lines = explain(made);
    const size_t begin = lines.find("tokens ");
    const std::string found = lines.substr(begin, lines.find('\n', begin) - begin);
    EXPECT_EQ(made.by_token, found.find(" cross once to each ") != std::string::npos);
    return found;
  };
  const std::string_view by_token =
                             "tokens     cross once to each rank, and 4 bytes a choice; results "
                             "for each choice",
                         by_choice = "tokens     cross for each choice",
                         saves_little =
                             "tokens     cross for each choice; once to each rank would save too "
                             "few bytes";
  // Of two choices at two ranks a third of a row less four bytes: 8 MiB are 2^23 / 28 choices.
  EXPECT_EQ(line("T=5000 top_k=2 H=48 E=4 ranks=2"), saves_little);
  EXPECT_EQ(line("T=149796 top_k=2 H=48 E=4 ranks=2"), saves_little);
  EXPECT_EQ(line("T=149797 top_k=2 H=48 E=4 ranks=2"), by_token);
  EXPECT_EQ(line("T=100000 top_k=1 H=4096 E=4 ranks=2"), saves_little);
  EXPECT_EQ(line("T=8192 top_k=2 H=4096 E=1 ranks=4096"), saves_little);
  EXPECT_EQ(line("T=8192 top_k=8 H=4096 E=4 ranks=64"), by_token);
  EXPECT_EQ(line("T=8192 top_k=8 H=4096 E=4 ranks=2 cross=choice"), by_choice);
  EXPECT_EQ(line("T=1 top_k=1 H=1 cross=token"), by_token);
  EXPECT_EQ(line("T=1 top_k=1 H=1 ranks=2 cross=host host_ranks=2"), by_token);
  EXPECT_EQ(line("T=1 top_k=1 H=1 ranks=2 cross=host host_ranks=1"), by_token);
  EXPECT_EQ(line("T=8 top_k=2 H=4 ranks=16 cross=host host_ranks=8"),
            "tokens     cross once to each of 2 hosts of 8 ranks, and there, in 2 more exchanges, "
            "once to each rank; with 8 bytes a choice; results for each choice");
  EXPECT_FALSE(plan(parse_expert_parallel_problem(
                        "expert_parallel T=8192 top_k=8 H=4096 E=4 ranks=2 block=65536"),
                    this_cpu(), kRoute)
                   .by_token);
}

TEST(CollectivePlan, OfBlocksSaysWhatTheyTake) {
  const ExpertParallelPlan made =
      plan(parse_expert_parallel_problem(
               "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=4 block=20000"),
           this_cpu(), kRoute);
  EXPECT_EQ(to_string(made.problem),
            "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=4 block=20000 R=80000 dtype=bf16");
  EXPECT_EQ(explain(made),
            text("route      collective: rows travel by the caller's engine, between any hosts\n"
                 "host       reads nothing, as messages have one size; a graph may have them\n"
                 "workspace  ",
                 made.workspace_bytes,
                 " bytes, of each exchange\n"
                 "blocks     20000 rows from a rank to each; 65536 are always enough\n"
                 "rows       80000 a rank; 262144 are always enough, beyond them a step is NaN\n"));
  // Blocks that leave and blocks that come, with an expert for each place, and little beside.
  const int64_t bytes = int64_t(2 * 80000) * (7168 * 2 + 4 + 4) + 8192 * 8 * 4;
  EXPECT_GE(made.workspace_bytes, bytes);
  EXPECT_LE(made.workspace_bytes, bytes + (1 << 20));
}

TEST(CollectivePlan, IsOfManyRanks) {
  const std::string_view words = "expert_parallel T=1 H=1 R=1 ranks=4096";
  EXPECT_EQ(plan(parse_expert_parallel_problem(words), this_cpu(), kRoute).name, kRoute);
}

/// Without the problem behind it.
template <class Work>
std::string error(Work&& work) {
  const std::string message = test::invalid(work);
  return message.substr(0, message.rfind(" ["));
}

TEST(CollectiveErrors, OfPlans) {
  const Device gpu = parse_device("sm_90");
  const auto refusal = [&](std::string_view words) {
    const ExpertParallelProblem p = parse_expert_parallel_problem(words);
    return test::unsupported([&] { plan(p, gpu, kRoute); });
  };
  const auto want = [&](std::string_view words, std::string_view why) {
    return text("expert_parallel: no route takes it on ", to_string(gpu), "\n  collective: ", why,
                " [", to_string(parse_expert_parallel_problem(words)), "]");
  };
  for (const auto& [words, why] : {std::pair("push=yes", "has no window to push into"),
                                   {"sum=rank", "sums no rows at home"},
                                   {"x=mxfp8", "moves no codes"}}) {
    const std::string problem = text("expert_parallel T=1 H=64 R=1 ", words);
    EXPECT_EQ(refusal(problem), want(problem, why));
  }
  EXPECT_EQ(error([&] {
              plan(parse_expert_parallel_problem("expert_parallel T=1 H=1 R=1 ranks=4097"), gpu,
                   kRoute);
            }),
            "expert_parallel: ranks is 4097, must be 1 to 4096");
}

TEST(CollectiveErrors, OfBlocks) {
  const auto refused = [](std::string_view words, std::string_view route) {
    return error([&] {
      plan(parse_expert_parallel_problem(text("expert_parallel T=1 H=1 ", words)), this_cpu(),
           route);
    });
  };
  const ExpertParallelProblem negative{.tokens = 1, .hidden = 1, .rows = 1, .block = -1};
  EXPECT_EQ(error([&] { plan(negative, this_cpu(), kRoute); }),
            "expert_parallel: block is -1, must be 0 or more");
  EXPECT_EQ(refused("block=2147483648 R=1", kRoute),
            "expert_parallel: block is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(refused("block=1073741824 ranks=2 R=1", kRoute),
            "expert_parallel: ranks * block is 2147483648, must be below 2^31; rows are numbered "
            "in int32");
  EXPECT_EQ(refused("block=1 cross=token", kRoute),
            "expert_parallel: cross is token, must be auto or choice; with block a row crosses for "
            "each choice");
  EXPECT_EQ(refused("block=1 cross=host host_ranks=1", kRoute),
            "expert_parallel: cross is host, must be auto or choice; with block a row crosses for "
            "each choice");
  const Device gpu = parse_device("sm_90");
  const auto by_window = [&](std::string_view words) {
    const ExpertParallelProblem p = parse_expert_parallel_problem(words);
    const std::string message = test::unsupported([&] { plan(p, gpu); });
    return message.substr(message.find('\n'), message.rfind(" [") - message.find('\n'));
  };
  EXPECT_EQ(by_window("expert_parallel T=1 H=1 block=1"),
            "\n  few_tokens: sends no blocks\n  window: sends no blocks\n"
            "  window_sum_rank: is for sum=rank");
  EXPECT_EQ(by_window("expert_parallel T=1 H=1 block=1 sum=rank"),
            "\n  few_tokens: sums no rows at home\n  window: sums no rows at home\n"
            "  window_sum_rank: sends no blocks");
  for (const std::string_view cross : {"choice", "host host_ranks=1"})
    EXPECT_EQ(by_window(text("expert_parallel T=1 H=1 cross=", cross)),
              "\n  few_tokens: reads a token once\n  window: reads a token once\n"
              "  window_sum_rank: is for sum=rank");
}

TEST(CollectiveErrors, OfHosts) {
  const auto refused = [](std::string_view words) {
    return error([&] {
      plan(parse_expert_parallel_problem(text("expert_parallel H=1 ranks=2 ", words)), this_cpu(),
           kRoute);
    });
  };
  EXPECT_EQ(refused("T=1 cross=host"),
            "expert_parallel: host_ranks is 0, must be 1 to ranks, 2; so many neighbours share a "
            "host");
  EXPECT_EQ(refused("T=1 cross=host host_ranks=3"),
            "expert_parallel: host_ranks is 3, must be 1 to ranks, 2; so many neighbours share a "
            "host");
  EXPECT_EQ(refused("T=1 cross=token host_ranks=2"),
            "expert_parallel: host_ranks is 2, must be 0; tokens cross by host where cross is "
            "host");
  const ExpertParallelProblem large{.tokens = 1 << 29,
                                    .hidden = 1 << 15,
                                    .ranks = 2,
                                    .rows = 1,
                                    .cross = Crossing::kHost,
                                    .host_ranks = 1};
  EXPECT_EQ(error([&] { plan(large, this_cpu(), kRoute); }),
            "expert_parallel: ranks * T * H is 1073741824 * 32768, must be at most 2^44; no tensor "
            "has more elements");
}

TEST(CollectiveErrors, OfRanksThatAreMade) {
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .ranks = 2, .rows = 12};
  const AllToAll engine = [](std::span<const RankMessage>, Stream) {};
  const ExpertParallelPlan made = plan(p, this_cpu(), kRoute), other = plan(p, this_cpu());
  EXPECT_EQ(error([&] { Collective(made, 2, engine); }), "collective: rank is 2, must be 0 to 1");
  EXPECT_EQ(error([&] { Collective(made, 0, nullptr); }),
            "collective: the engine is empty, must be a function; rows travel by it");
  EXPECT_EQ(error([&] { Collective(ExpertParallelPlan(), 0, engine); }),
            "collective: the plan is empty; make it with plan()");
  EXPECT_EQ(error([&] { Collective(other, 0, engine); }),
            "collective: the plan is by window, must be by collective; ask for it by name");
  EXPECT_EQ(error([&] {
              Window::create(made, 0,
                             [](const std::string&) { return std::vector<std::string>(); });
            }),
            "window: the plan is by collective, must be by a window; a Collective is made of it");
}

TEST(CollectiveErrors, OfAPlanThatIsNoWindows) {
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .rows = 6};
  std::vector<Window> windows = test::windows_of(plan(p, this_cpu()));
  const ExpertParallelPlan made = plan(p, this_cpu(), kRoute);
  test::RankCase r(p, 3);
  EXPECT_EQ(error([&] { dispatch(made, windows[0], r.dispatch_args(true), {}, {}); }),
            "dispatch: the plan is by collective, must be by a window; a Collective is made of it");
}

/// One rank, alone, for uses that are errors.
struct ArgumentErrors : testing::Test {
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .rows = 6};
  CollectiveGroup group{p};
  Collective& own = group.ranks[0];
  test::OwnedWorkspace workspace{own.plan().workspace_bytes};
  CollectiveCase r{test::RankCase(p, 3)};
};

TEST_F(ArgumentErrors, OfDispatch) {
  const auto dispatching = [&](auto&& spoil) {
    CollectiveDispatchArgs args = r.collective_dispatch_args();
    Workspace memory = workspace.get();
    spoil(args, memory);
    return error([&] { dispatch(own, args, memory, {}); });
  };
  using Args = CollectiveDispatchArgs;
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.x.shape[0] = 4; }),
            "dispatch: x has 4 rows, must have 0 to T, 3");
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.experts = nullptr; }),
            "dispatch: experts is null, must point to 6 elements");
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.prob = nullptr; }),
            "dispatch: prob is null, must point to 6 elements; the problem says prob=yes");
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.rows = r.dprob.view(); }),
            "dispatch: rows is f32[3, 2], must be bf16[6, 4]");
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.map.leaving = nullptr; }),
            "dispatch: map.leaving is null, must point to 2 elements; dispatch writes it");
  EXPECT_EQ(dispatching([&](Args& a, Workspace&) { a.map.counts = nullptr; }),
            "dispatch: map.counts is null, must point to 9 elements; dispatch writes it");
  EXPECT_EQ(dispatching([&](Args&, Workspace& w) { w.bytes = 0; }),
            text("dispatch: the workspace has 0 bytes, must have ", own.plan().workspace_bytes));
}

TEST_F(ArgumentErrors, OfMapsOfBlocks) {
  ExpertParallelProblem in_blocks = p;
  in_blocks.block = 5;
  CollectiveGroup of_blocks(in_blocks);
  CollectiveCase b(test::RankCase(in_blocks, 3));
  const test::OwnedWorkspace memory{of_blocks.plan.workspace_bytes};
  const auto dispatching = [&](Collective& to, CollectiveDispatchArgs args, auto&& spoil) {
    spoil(args.map);
    return error([&] { dispatch(to, args, memory.get(), {}); });
  };
  const auto of_map = [&](auto&& spoil) {
    return dispatching(of_blocks.ranks[0], b.collective_dispatch_args(), spoil);
  };
  EXPECT_EQ(of_map([](CollectiveMap& m) { m.verdict = nullptr; }),
            "dispatch: map.verdict is null, must point to 3 elements; dispatch writes it");
  EXPECT_EQ(of_map([](CollectiveMap& m) { m.slot_of = nullptr; }),
            "dispatch: map.slot_of is null, must point to 5 elements; dispatch writes it");
  EXPECT_EQ(of_map([](CollectiveMap& m) { m.row_at = nullptr; }),
            "dispatch: map.row_at is null, must point to 5 elements; dispatch writes it");
  EXPECT_EQ(of_map([&](CollectiveMap& m) { m.counts = r.counts.data(); }),
            "dispatch: map.counts is given, must be null; the host reads none with block");
  EXPECT_EQ(dispatching(own, r.collective_dispatch_args(),
                        [&](CollectiveMap& m) { m.verdict = b.verdict.data(); }),
            "dispatch: map.verdict is given, must be null; the problem has no block");
}

TEST_F(ArgumentErrors, OfMapsByHost) {
  ExpertParallelProblem by_host = p;
  by_host.ranks = 3;
  by_host.cross = Crossing::kHost, by_host.host_ranks = 2;
  CollectiveGroup of_hosts(by_host);
  CollectiveCase b(test::RankCase(by_host, 3));
  const test::OwnedWorkspace memory{of_hosts.plan.workspace_bytes};
  const auto dispatching = [&](Collective& to, CollectiveDispatchArgs args, auto&& spoil) {
    spoil(args.map);
    return error([&] { dispatch(to, args, memory.get(), {}); });
  };
  EXPECT_EQ(dispatching(of_hosts.ranks[0], b.collective_dispatch_args(),
                        [](CollectiveMap& m) { m.passing = nullptr; }),
            "dispatch: map.passing is null, must point to 24 elements; dispatch writes it");
  EXPECT_EQ(dispatching(of_hosts.ranks[0], b.collective_dispatch_args(),
                        [](CollectiveMap& m) { m.counts = nullptr; }),
            "dispatch: map.counts is null, must point to 49 elements; dispatch writes it");
  EXPECT_EQ(dispatching(own, r.collective_dispatch_args(),
                        [&](CollectiveMap& m) { m.passing = b.passing.data(); }),
            "dispatch: map.passing is given, must be null; tokens do not cross by host");
}

TEST_F(ArgumentErrors, OfACollectiveThatWasMoved) {
  const Collective taken = std::move(own);
  EXPECT_EQ(taken.rank(), 0);
  EXPECT_EQ(test::invalid([&] { own.check(); }),
            "collective: it was moved from; use the one to which it was moved");
}

TEST_F(ArgumentErrors, OfTheOthers) {
  EXPECT_EQ(error([&] {
              collect(own, {.y = r.x.view(), .out = r.out.view(), .map = r.collective_map()},
                      workspace.get(), {});
            }),
            "collect: y is bf16[3, 4] strides (7, 1), must be bf16[6, 4]");
  EXPECT_EQ(error([&] {
              collect_backward(own, {.dout = r.dout.view(), .dy = r.dy.view()}, workspace.get(),
                               {});
            }),
            "collect backward: map.row_of is null, must point to 6 elements; dispatch writes it");
  CollectiveDispatchBackwardArgs args = r.collective_dispatch_backward_args();
  args.drow_prob = nullptr;
  EXPECT_EQ(error([&] { dispatch_backward(own, args, workspace.get(), {}); }),
            "dispatch backward: drow_prob is null, must point to 6 elements; the problem says "
            "prob=yes");
}

/// What each rank throws in a dispatch of its own problem and number.
std::vector<std::string> dispatched(const std::vector<ExpertParallelProblem>& problems,
                                    const std::vector<int>& numbers) {
  const int ranks = int(problems.size());
  test::ThreadEngine engine(ranks);
  return test::on_ranks(ranks, [&](int q) {
    const ExpertParallelPlan made = plan(problems[size_t(q)], this_cpu(), kRoute);
    Collective own(made, numbers[size_t(q)], engine.of(q));
    CollectiveCase r(test::RankCase(made.problem, 1));
    r.experts.assign(r.experts.size(), 0);
    const test::OwnedWorkspace workspace(made.workspace_bytes);
    dispatch(own, r.collective_dispatch_args(), workspace.get(), {});
  });
}

TEST(CollectiveErrors, OfRanksThatDiffer) {
  ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .ranks = 2, .rows = 12}, other = p;
  EXPECT_EQ(dispatched({p, p}, {0, 1}), (std::vector<std::string>{"", ""}));
  other.layer = 1;
  for (const std::string& words : dispatched({p, other}, {0, 1}))
    EXPECT_EQ(words.substr(0, words.find(';')),
              "dispatch: the problem of rank 1 is not that of rank 0, must be the same");
  EXPECT_NE(dispatched({p, other}, {0, 1})[1].find("layer=1"), std::string::npos);
  other = p;
  other.cross = Crossing::kToken;  // as where T decides that: what ranks say has one size
  for (const std::string& words : dispatched({p, other}, {0, 1}))
    EXPECT_EQ(words.substr(0, words.find(';')),
              "dispatch: the problem of rank 1 is not that of rank 0, must be the same");
  p.cross = other.cross = Crossing::kHost, p.host_ranks = 1, other.host_ranks = 2;
  for (const std::string& words : dispatched({p, other}, {0, 1}))
    EXPECT_EQ(words.substr(0, words.find(';')),
              "dispatch: the problem of rank 1 is not that of rank 0, must be the same");
  ExpertParallelProblem two = p, three = p;  // hosts are said in as many words as none
  two.ranks = three.ranks = 4, two.host_ranks = 2, three.host_ranks = 3;
  ExpertParallelProblem none = two;
  none.cross = Crossing::kToken, none.host_ranks = 0;
  for (const ExpertParallelProblem& one : {three, none})
    for (const std::string& words : dispatched({two, one, two, two}, {0, 1, 2, 3}))
      EXPECT_EQ(words.substr(0, words.find(';')),
                "dispatch: the problem of rank 1 is not that of rank 0, must be the same");
  for (const std::string& words : dispatched({p, p}, {1, 0}))
    EXPECT_EQ(words, text("dispatch: rank 0 of the engine says that it is rank 1, must be 0 [",
                          to_string(p), "]"));
}

TEST(CollectiveErrors, OfTheEngineAreThoseOfTheExchange) {
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .rows = 6};
  Collective own(plan(p, this_cpu(), kRoute), 0,
                 [](std::span<const RankMessage>, Stream) { throw DeviceError("no network"); });
  CollectiveCase r(test::RankCase(p, 3));
  const test::OwnedWorkspace workspace(own.plan().workspace_bytes);
  const auto errors = test::on_ranks(
      1, [&](int) { dispatch(own, r.collective_dispatch_args(), workspace.get(), {}); });
  EXPECT_EQ(errors[0], "no network");
}

}  // namespace
