// The words of expert parallelism: problems, plans, and errors.
#include <gtest/gtest.h>

#include "cadre/expert_parallel.h"
#include "tests/judge/errors.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"
#include "tests/parallel/group.h"
#include "tests/parallel/rank_case.h"

using namespace cadre;
using Rank = test::RankCase;

namespace {

TEST(ExpertParallelProblem, PrintsAndParsesBack) {
  ExpertParallelProblem p{.tokens = 8192, .top_k = 8, .hidden = 7168, .experts = 128, .ranks = 2};
  p.rows = 131072;
  EXPECT_EQ(to_string(p),
            "expert_parallel T=8192 top_k=8 H=7168 E=128 ranks=2 R=131072 dtype=bf16");
  EXPECT_EQ(parse_expert_parallel_problem(to_string(p)), p);
  p.overflow = Overflow::kDrop;
  p.prob = false;
  p.tail = Tail::kZero;
  p.layer = 3;
  EXPECT_EQ(to_string(p),
            "expert_parallel T=8192 top_k=8 H=7168 E=128 ranks=2 R=131072 dtype=bf16 prob=no "
            "overflow=drop tail=zero layer=3");
  EXPECT_EQ(parse_expert_parallel_problem(to_string(p)), p);
  p.push = true;
  EXPECT_EQ(to_string(p),
            "expert_parallel T=8192 top_k=8 H=7168 E=128 ranks=2 R=131072 dtype=bf16 prob=no "
            "overflow=drop tail=zero push=yes layer=3");
  EXPECT_EQ(parse_expert_parallel_problem(to_string(p)), p);
}

TEST(ExpertParallelProblem, SaysTheFormatOfX) {
  ExpertParallelProblem p{.tokens = 4, .top_k = 2, .hidden = 256, .experts = 8, .ranks = 2};
  p.rows = 16;
  p.x = parse_format("fp8_block:e5m2");
  p.scales_major = Major::kColumn;
  EXPECT_EQ(to_string(p),
            "expert_parallel T=4 top_k=2 H=256 E=8 ranks=2 R=16 dtype=bf16 x=fp8_block:e5m2 "
            "scales_major=column");
  EXPECT_EQ(parse_expert_parallel_problem(to_string(p)), p);
}

TEST(ExpertParallelProblem, SaysWhatCrosses) {
  const ExpertParallelProblem p =
      parse_expert_parallel_problem("expert_parallel T=8 H=8 cross=token layer=2");
  EXPECT_EQ(p.cross, Crossing::kToken);
  EXPECT_EQ(to_string(p),
            "expert_parallel T=8 top_k=1 H=8 E=1 ranks=1 R=8 dtype=bf16 cross=token layer=2");
  EXPECT_TRUE(plan(p, this_cpu()).by_token);
  const std::string_view by_host =
      "expert_parallel T=8 top_k=1 H=8 E=1 ranks=4 R=16 dtype=bf16 cross=host host_ranks=2";
  EXPECT_EQ(to_string(parse_expert_parallel_problem(by_host)), by_host);
}

TEST(ExpertParallelProblem, SaysWhoseRowsASumIsOf) {
  const ExpertParallelProblem p = parse_expert_parallel_problem(
      "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=131072 sum=rank");
  EXPECT_EQ(p.sum, RowSum::kRank);
  EXPECT_EQ(to_string(p),
            "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=131072 dtype=bf16 sum=rank");
  const ExpertParallelPlan made = plan(p, this_cpu());
  EXPECT_FALSE(made.exact);
  EXPECT_TRUE(
      plan(parse_expert_parallel_problem("expert_parallel T=1 H=1 sum=rank"), this_cpu()).exact);
  EXPECT_EQ(explain(made),
            "route      window_sum_rank: every rank maps the memory of all\n"
            "window     354485248 bytes a rank: 66560 of flags, 1048576 of routing, 117440512 of "
            "tokens, 1048576 of gradients of probabilities, 234881024 of rows\n"
            "results    each rank sums its rows of a token, and at most 1 sums a token cross; "
            "out and dx have not the bits of one rank\n"
            "workspace  1052928 bytes, of dispatch and its backward\n"
            "rows       131072 a rank; 131072 are always enough, beyond them a step is NaN\n");
}

TEST(ExpertParallelProblem, HasRoomForTwoRanksWhereRIsLeftOut) {
  const auto rows = [](std::string_view words) {
    return parse_expert_parallel_problem(words).rows;
  };
  EXPECT_EQ(rows("expert_parallel T=5 top_k=3 ranks=1"), 15);
  EXPECT_EQ(rows("expert_parallel T=5 top_k=3 ranks=2"), 30);
  EXPECT_EQ(rows("expert_parallel T=5 top_k=3 ranks=4"), 30);
  EXPECT_EQ(rows("expert_parallel R=7 T=5 top_k=3 ranks=4"), 7);
  EXPECT_EQ(rows("expert_parallel R=0 T=5 top_k=3 ranks=4"), 0);
  EXPECT_EQ(rows("expert_parallel T=4611686018427387904 top_k=3 ranks=4"), 0);
}

TEST(ExpertParallelPlan, ExplainsItsMemory) {
  EXPECT_EQ(explain(plan(parse_expert_parallel_problem(
                             "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=131072"),
                         this_cpu())),
            "route      window: every rank maps the memory of all\n"
            "window     1998652416 bytes a rank: 66560 of flags, 1048576 of routing, 117440512 of "
            "tokens, 1048576 of gradients of probabilities, 1879048192 of rows\n"
            "workspace  1052928 bytes, of dispatch and its backward\n"
            "rows       131072 a rank; 131072 are always enough, beyond them a step is NaN\n");
  EXPECT_EQ(explain(plan(parse_expert_parallel_problem(
                             "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=70000 push=yes"),
                         this_cpu())),
            "route      window: every rank maps the memory of all\n"
            "window     1058341888 bytes a rank: 66560 of flags, 1048576 of routing, 117440512 of "
            "tokens, 262144 of gradients of probabilities, 939524096 of rows\n"
            "results    come row by row, from who makes them, to the places of choices\n"
            "workspace  1057024 bytes, of dispatch and its backward\n"
            "rows       70000 a rank; 131072 are always enough, beyond them a step is NaN\n");
}

TEST(ExpertParallelPlan, ExplainsWhatCrossesOfCodes) {
  const ExpertParallelPlan made =
      plan(parse_expert_parallel_problem(
               "expert_parallel T=8192 top_k=8 H=7168 E=16 ranks=2 R=131072 x=fp8_block"),
           this_cpu());
  EXPECT_EQ(explain(made),
            "route      window: every rank maps the memory of all\n"
            "window     1998652416 bytes a rank: 66560 of flags, 1048576 of routing, 117440512 of "
            "tokens, 1048576 of gradients of probabilities, 1879048192 of rows\n"
            "x          codes of fp8_block, made by the owner: 7168 bytes a token, and 224 of "
            "scales, cross once to each rank that needs it\n"
            "wgrad      has what these codes say of x, or x by a dispatch of numbers\n"
            "workspace  1052928 bytes, of dispatch and its backward\n"
            "rows       131072 a rank; 131072 are always enough, beyond them a step is NaN\n");
  EXPECT_EQ(made.window.scales, made.window.tokens + 8192 * 7168);
  // A window has room for codes and scales where these are more than numbers.
  const ExpertParallelPlan tiny = plan(
      parse_expert_parallel_problem("expert_parallel T=1 H=2 R=1 x=fp8_block prob=no"), this_cpu());
  EXPECT_EQ(tiny.window.drow_prob - tiny.window.tokens, 512);
}

/// Without the problem behind it.
template <class Work>
std::string error(Work&& work) {
  const std::string message = test::invalid(work);
  return message.substr(0, message.rfind(" ["));
}

std::string plan_error(std::string_view words) {
  return error([&] { plan(parse_expert_parallel_problem(words), this_cpu()); });
}

TEST(ExpertParallelErrors, OfProblems) {
  EXPECT_EQ(plan_error("expert_parallel T=1 H=0 R=1"),
            "expert_parallel: H is 0, must be 1 or more");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1 top_k=0"),
            "expert_parallel: top_k is 0, must be 1 or more");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1 E=0"),
            "expert_parallel: E is 0, must be 1 or more");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1 ranks=65"),
            "expert_parallel: ranks is 65, must be 1 to 64");
  EXPECT_EQ(plan_error("expert_parallel T=1073741824 H=1 R=1 ranks=2"),
            "expert_parallel: ranks * T * top_k is 2147483648, must be below 2^31; rows are "
            "numbered in int32");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1073741824 ranks=2"),
            "expert_parallel: ranks * R is 2147483648, must be below 2^31; rows are numbered in "
            "int32");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1 dtype=u8"),
            "expert_parallel: dtype is u8, must be f32, bf16 or f16");
  EXPECT_EQ(
      plan_error("expert_parallel T=1 H=64 R=1 x=nvfp4"),
      "expert_parallel: x is nvfp4, must be fp8_row, fp8_block or mxfp8, without 2d; codes of "
      "a byte whose scales are of one row");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=96 R=1 x=mxfp8"),
            "expert_parallel: H is 96, must be a multiple of 64 for mxfp8; codes and scales move "
            "two bytes at a time");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=64 R=1 x=mxfp8 scales_major=column"),
            "expert_parallel: scales_major is column, must be row for mxfp8; only fp32 scales lie "
            "in columns");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=64 R=1 scales_major=column"),
            "expert_parallel: scales_major is column, must be row; there is no x");
  EXPECT_EQ(plan_error("expert_parallel T=1 H=1 R=1 push=yes sum=rank"),
            "expert_parallel: push is yes, must be no; with sum=rank no rows travel");
  EXPECT_EQ(plan_error("expert_parallel T=524288 H=1 R=1 ranks=64 sum=rank"),
            "expert_parallel: ranks * ranks * T is 2147483648, must be below 2^31; rows are "
            "numbered in int32");
}

TEST(ExpertParallelErrors, OfRoutes) {
  const ExpertParallelProblem p = parse_expert_parallel_problem("expert_parallel T=1 H=1 R=1");
  Device old = parse_device("sm_80");
  old.sm = 75;
  EXPECT_EQ(test::unsupported([&] { plan(p, old); }),
            text("expert_parallel: no route takes it on sm_75\n  few_tokens: takes sm_80 or newer\n"
                 "  window: takes sm_80 or newer\n  window_sum_rank: is for sum=rank [",
                 to_string(p), "]"));
  EXPECT_EQ(test::invalid([&] { plan(p, this_cpu(), "tree"); }),
            text("expert_parallel: there is no route 'tree', only few_tokens, window, "
                 "window_sum_rank and collective [",
                 to_string(p), "]"));
}

TEST(ExpertParallelErrors, OfFewTokens) {
  const Device gpu = parse_device("sm_90");
  const ExpertParallelProblem many =
      parse_expert_parallel_problem("expert_parallel T=257 top_k=8 H=64 E=513 ranks=2");
  EXPECT_EQ(test::unsupported([&] { plan(many, gpu, "few_tokens"); }),
            text("expert_parallel: no route takes it on ", to_string(gpu),
                 "\n  few_tokens: takes at most 4096 choices of all ranks, there are 4112 [",
                 to_string(many), "]"));
  const ExpertParallelProblem wide =
      parse_expert_parallel_problem("expert_parallel T=1 top_k=8 H=64 E=513 ranks=2");
  EXPECT_EQ(test::unsupported([&] { plan(wide, gpu, "few_tokens"); }),
            text("expert_parallel: no route takes it on ", to_string(gpu),
                 "\n  few_tokens: takes at most 1024 experts of all ranks, there are 1026 [",
                 to_string(wide), "]"));
  const ExpertParallelProblem sums =
      parse_expert_parallel_problem("expert_parallel T=1 H=64 ranks=2 sum=rank");
  EXPECT_EQ(plan(sums, this_cpu()).name, "window_sum_rank");
  for (const std::string_view route : {"few_tokens", "window"})
    EXPECT_EQ(test::unsupported([&] { plan(sums, gpu, route); }),
              text("expert_parallel: no route takes it on ", to_string(gpu), "\n  ", route,
                   ": sums no rows at home [", to_string(sums), "]"));
  EXPECT_EQ(test::unsupported([&] { plan(wide, this_cpu(), "few_tokens"); }),
            text("expert_parallel: no route takes it on ", to_string(this_cpu()),
                 "\n  few_tokens: is for GPUs [", to_string(wide), "]"));
}

/// One rank, alone, for uses that are errors.
struct ArgumentErrors : testing::Test {
  const ExpertParallelProblem p{.tokens = 3, .top_k = 2, .hidden = 4, .rows = 6};
  const ExpertParallelPlan made = plan(p, this_cpu());
  std::vector<Window> windows = test::windows_of(made);
  test::OwnedWorkspace workspace{made.workspace_bytes};
  Rank r{p, 3};
};

TEST_F(ArgumentErrors, OfDispatch) {
  const auto dispatching = [&](auto&& spoil) {
    DispatchArgs args = r.dispatch_args(true);
    Workspace memory = workspace.get();
    spoil(args, memory);
    return error([&] { dispatch(made, windows[0], args, memory, {}); });
  };
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.x.shape[0] = 4; }),
            "dispatch: x has 4 rows, must have 0 to T, 3");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.x.shape[0] = -1; }),
            "dispatch: x has -1 rows, must have 0 to T, 3");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.x = r.dprob.view(); }),
            "dispatch: x is f32[3, 2], must be bf16[3, 4]");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.experts = nullptr; }),
            "dispatch: experts is null, must point to 6 elements");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.prob = nullptr; }),
            "dispatch: prob is null, must point to 6 elements; the problem says prob=yes");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.map.offsets = nullptr; }),
            "dispatch: map.offsets is null, must point to 2 elements; dispatch writes it");
  EXPECT_EQ(dispatching([&](DispatchArgs& a, Workspace&) { a.map.verdict = nullptr; }),
            "dispatch: map.verdict is null, must point to 1 element; dispatch writes it");
  EXPECT_EQ(dispatching([&](DispatchArgs&, Workspace& w) { w.bytes = 0; }),
            text("dispatch: the workspace has 0 bytes, must have ", made.workspace_bytes));
  ExpertParallelProblem plain = p;
  plain.prob = false;
  EXPECT_EQ(error([&] {
              dispatch(plan(plain, this_cpu()), windows[0], r.dispatch_args(true), workspace.get(),
                       {});
            }),
            "dispatch: prob is given, must be null; the problem says prob=no");
}

TEST_F(ArgumentErrors, OfCodes) {
  EXPECT_EQ(error([&] { windows[0].codes(made); }),
            "codes: x is no format, must be one; tokens are numbers");
  ExpertParallelProblem coded = p;
  coded.hidden = 6;
  coded.x = parse_format("fp8_block");
  const ExpertParallelPlan of_codes = plan(coded, this_cpu());
  std::vector<Window> there = test::windows_of(of_codes);
  const test::OwnedWorkspace memory(of_codes.workspace_bytes);
  Rank c(coded, 3);
  const auto dispatching = [&](auto&& spoil) {
    DispatchArgs args = c.code_args(true);
    spoil(args);
    return error([&] { dispatch(of_codes, there[0], args, memory.get(), {}); });
  };
  EXPECT_EQ(dispatching([](DispatchArgs& a) { a.x.shape[0] = 4; }),
            "dispatch: x has 4 rows, must have 0 to T, 3");
  EXPECT_EQ(dispatching([&](DispatchArgs& a) { a.x = c.x.view(); }),
            "dispatch: x is bf16[3, 6] strides (9, 1), must be e4m3[3, 6]");
  EXPECT_EQ(dispatching([](DispatchArgs& a) { a.x_scales = {}; }),
            "dispatch: x_scales is f32[], must be f32[3, 1]");
  EXPECT_EQ(dispatching([](DispatchArgs& a) { a.row_scales.shape[0] = 5; }),
            "dispatch: row_scales is f32[5, 1] strides (5, 1), must be f32[6, 1]");
  const std::string odd = dispatching([](DispatchArgs& a) { a.rows.stride[0] = 7; });
  EXPECT_EQ(odd.substr(0, odd.find(" at ")), "dispatch: rows is e4m3[6, 6] strides (7, 1)");
  EXPECT_EQ(odd.substr(odd.find(", must")),
            ", must have rows at even addresses; they move two bytes at a time");
  EXPECT_EQ(
      dispatching([&](DispatchArgs& a) { a.x_scales.data = there[0].codes(of_codes).codes.data; }),
      text("dispatch: x_scales is f32[3, 1] strides (3, 1), ", of_codes.window.tokens,
           " bytes into the window, must be contiguous, at ", of_codes.window.scales,
           "; or lie elsewhere"));
  EXPECT_EQ(dispatching([&](DispatchArgs& a) { a.rows.data = there[0].rows(of_codes).data; }),
            text("dispatch: rows is ", of_codes.window.rows,
                 " bytes into the window, must lie elsewhere; y lies there"));
  const auto of_numbers = [&](auto&& spoil) {
    DispatchArgs args = r.dispatch_args(true);
    spoil(args);
    return error([&] { dispatch(made, windows[0], args, workspace.get(), {}); });
  };
  EXPECT_EQ(of_numbers([&](DispatchArgs& a) { a.x_scales = c.x_scales.view(); }),
            "dispatch: x_scales is given, must be null; x is no format");
  EXPECT_EQ(of_numbers([&](DispatchArgs& a) { a.row_scales = c.row_scales.view(); }),
            "dispatch: row_scales is given, must be null; x is no format");
}

TEST_F(ArgumentErrors, OfTheOthers) {
  EXPECT_EQ(error([&] {
              collect(made, windows[0], {.y = r.x.view(), .out = r.out.view(), .map = r.map()}, {});
            }),
            "collect: y is bf16[3, 4] strides (7, 1), must be bf16[6, 4]");
  EXPECT_EQ(error([&] {
              collect_backward(made, windows[0], {.dout = r.dout.view(), .dy = r.dy.view()}, {});
            }),
            "collect backward: map.row_of is null, must point to 6 elements; dispatch writes it");
  EXPECT_EQ(error([&] {
              dispatch_backward(made, windows[0], r.dispatch_backward_args(false), workspace.get(),
                                {});
            }),
            "dispatch backward: drow_prob is null, must point to 6 elements; the problem says "
            "prob=yes");
}

TEST_F(ArgumentErrors, OfWhatIsPushed) {
  ExpertParallelProblem pushed = p;
  pushed.push = true;
  const ExpertParallelPlan to_places = plan(pushed, this_cpu());
  EXPECT_EQ(
      error([&] { collect(to_places, windows[0], {.out = r.out.view(), .map = r.map()}, {}); }),
      "collect: map.place_of is null, must point to 6 elements; the problem says push=yes");
  r.place_of.resize(6);
  EXPECT_EQ(error([&] {
              collect(made, windows[0], {.y = r.y.view(), .out = r.out.view(), .map = r.map()}, {});
            }),
            "collect: map.place_of is given, must be null; the problem says push=no");
  EXPECT_EQ(error([&] {
              collect(to_places, windows[0], {.y = r.y.view(), .out = r.out.view(), .map = r.map()},
                      {});
            }),
            "collect: y is given, must be null; the problem says push=yes");
  EXPECT_EQ(error([&] {
              dispatch_backward(to_places, windows[0], r.dispatch_backward_args(true),
                                workspace.get(), {});
            }),
            "dispatch backward: drows is given, must be null; the problem says push=yes");
  EXPECT_EQ(error([&] { windows[0].places(made); }),
            "places: push is no, must be yes; rows lie at home");
  EXPECT_EQ(error([&] { windows[0].rows(to_places); }),
            "rows: push is yes, must be no; places lie in the window");
  DispatchArgs args = r.dispatch_args(true);
  args.rows = windows[0].rows(made);
  EXPECT_EQ(error([&] { dispatch(to_places, windows[0], args, workspace.get(), {}); }),
            text("dispatch: rows is ", made.window.rows,
                 " bytes into the window, must lie elsewhere; places lie there"));
  EXPECT_EQ(to_string(windows[0].places(to_places)), "bf16[6, 4]");
}

TEST_F(ArgumentErrors, OfSumsOfRanks) {
  ExpertParallelProblem summed = p;
  summed.sum = RowSum::kRank;
  const ExpertParallelPlan at_home = plan(summed, this_cpu());
  const auto collecting = [&](const ExpertParallelPlan& of, const TensorView& y) {
    return error(
        [&] { collect(of, windows[0], {.y = y, .out = r.out.view(), .map = r.map()}, {}); });
  };
  EXPECT_EQ(collecting(at_home, r.y.view()),
            "collect: map.sum_of is null, must point to 3 elements; the problem says sum=rank");
  r.sum_of.resize(3);
  EXPECT_EQ(collecting(made, r.y.view()),
            "collect: map.sum_of is given, must be null; the problem says sum=choice");
  const int64_t at = made.window.rows;
  EXPECT_EQ(
      collecting(at_home, windows[0].rows(made)),
      text("collect: y is ", at, " bytes into the window, must lie elsewhere; sums lie there"));
  EXPECT_EQ(error([&] { windows[0].rows(at_home); }),
            "rows: sum is rank, must be choice; sums lie in the window, no rows");
}

TEST_F(ArgumentErrors, OfWhatLiesInTheWindow) {
  TensorView x = windows[0].tokens(made), y = windows[0].rows(made);
  DispatchArgs args = r.dispatch_args(true);
  args.x = view(x.data, p.dtype, {2, 4}, {8, 1});
  EXPECT_EQ(error([&] { dispatch(made, windows[0], args, workspace.get(), {}); }),
            text("dispatch: x is bf16[2, 4] strides (8, 1), ", made.window.tokens,
                 " bytes into the window, must be contiguous, at ", made.window.tokens,
                 "; or lie elsewhere"));
  y.data = static_cast<char*>(y.data) + 2;
  EXPECT_EQ(
      error([&] { collect(made, windows[0], {.y = y, .out = r.out.view(), .map = r.map()}, {}); }),
      text("collect: y is bf16[6, 4], ", made.window.rows + 2,
           " bytes into the window, must be contiguous, at ", made.window.rows,
           "; or lie elsewhere"));
}

TEST_F(ArgumentErrors, OfWindows) {
  const ExpertParallelPlan larger =
      plan(ExpertParallelProblem{.tokens = 3000, .hidden = 4, .rows = 3000}, this_cpu());
  EXPECT_EQ(error([&] { collect(larger, windows[0], {.y = r.y.view(), .out = r.out.view()}, {}); }),
            text("collect: the window has ", windows[0].bytes(), " bytes a rank, must have ",
                 larger.window.bytes, "; make it for the largest plan"));
  for (const auto& [what, said] : {std::pair("tokens", error([&] { windows[0].tokens(larger); })),
                                   std::pair("rows", error([&] { windows[0].rows(larger); })),
                                   std::pair("codes", error([&] { windows[0].codes(larger); })),
                                   std::pair("places", error([&] { windows[0].places(larger); }))})
    EXPECT_EQ(said.find(text(what, ": the window has ")), 0u) << said;
  const ExpertParallelPlan two =
      plan(ExpertParallelProblem{.tokens = 3, .hidden = 4, .ranks = 2, .rows = 3}, this_cpu());
  EXPECT_EQ(error([&] { collect(two, windows[0], {.y = r.y.view(), .out = r.out.view()}, {}); }),
            "collect: the window is of 1 ranks, must be of 2");
  ExpertParallelPlan elsewhere = made, second = made;
  elsewhere.device = {.kind = DeviceKind::kCuda, .sm = 90};
  EXPECT_EQ(error([&] { dispatch(elsewhere, windows[0], r.dispatch_args(true), {}, {}); }),
            text("dispatch: the plan is for device 0, ", to_string(elsewhere.device),
                 ", must be for device 0, ", to_string(made.device), ", where the window is"));
  second.device.index = 1;
  const std::string said =
      error([&] { dispatch(second, windows[0], r.dispatch_args(true), {}, {}); });
  EXPECT_EQ(said.find("dispatch: the plan is for device 1, "), 0u) << said;
  Window taken = std::move(windows[0]);
  EXPECT_EQ(test::invalid([&] { windows[0].check(); }),
            "window: it was moved from; use the one to which it was moved");
  EXPECT_EQ(taken.rank(), 0);
  windows[0] = std::move(taken);
}

}  // namespace
