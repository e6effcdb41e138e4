// How windows are made, and what becomes of them when a rank fails. Ranks are processes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <filesystem>

#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "parallel/exchange.h"
#include "tests/judge/errors.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"
#include "tests/parallel/group.h"
#include "tests/parallel/processes.h"

using namespace cadre;
using namespace std::chrono_literals;
using test::Ended;
using test::Tensor;

namespace {

constexpr std::string_view kWords =
    "expert_parallel T=4 top_k=2 H=3 E=2 ranks=2 R=16 dtype=f32 prob=no";

ExpertParallelPlan small_plan(std::string_view words = kWords) {
  return plan(parse_expert_parallel_problem(words), test::rank_device());
}

/// One rank's tensors for all four exchanges.
struct Step {
  ExpertParallelPlan plan = small_plan();
  Tensor x{DType::kF32, {4, 3}}, rows{DType::kF32, {16, 3}}, out{DType::kF32, {4, 3}};
  std::vector<int32_t> experts = {0, 1, 2, 3, 3, 2, 1, 0}, row_of = std::vector<int32_t>(8),
                       slot_of = std::vector<int32_t>(16), row_here = std::vector<int32_t>(16),
                       offsets = std::vector<int32_t>(3), verdict = {0};
  test::OwnedWorkspace workspace{plan.workspace_bytes};

  ExchangeMap map() {
    return {row_of.data(), slot_of.data(), row_here.data(), offsets.data(), verdict.data()};
  }
  void fill(double value) {
    for (int64_t t = 0; t < 4; ++t)
      for (int64_t h = 0; h < 3; ++h) x.set({t, h}, value), out.set({t, h}, -1);
    for (int64_t r = 0; r < 16; ++r) rows.set({r, 0}, -1);
  }
  void run(Window& window, int exchange) {
    if (exchange == 0)
      dispatch(plan, window,
               {.x = x.view(), .experts = experts.data(), .rows = rows.view(), .map = map()},
               workspace.get(), {});
    if (exchange == 1)
      collect(plan, window, {.y = rows.view(), .out = out.view(), .map = map()}, {});
    if (exchange == 2)
      collect_backward(plan, window, {.dout = x.view(), .dy = rows.view(), .map = map()}, {});
    if (exchange == 3)
      dispatch_backward(plan, window, {.drows = rows.view(), .dx = out.view(), .map = map()},
                        workspace.get(), {});
    window.check();  // a GPU's exchange returns before it has failed
  }
  const Tensor& output(int exchange) const { return exchange % 2 == 0 ? rows : out; }
};

void demand(bool good, std::string_view what) {
  if (!good) throw std::runtime_error(std::string(what));
}

TEST(Window, ServesProcesses) {
  for (const Ended& end : test::in_processes(2, [](int rank, const std::string&folder) {
         Window window = Window::create(small_plan(), rank, all_gather_in(folder, rank, 2));
         Step step;
         for (int round = 0; round < 50; ++round) {
           step.fill(10 * rank + round);
           for (int exchange = 0; exchange < 4; ++exchange) step.run(window, exchange);
           demand(step.out.at(0, 0) == 2.0 * (10 * rank + round), "another rank's rows");
         }
         window.check();
       }))
    EXPECT_EQ(end.error + std::to_string(end.signal), "0");
}

/// One rank's four exchanges, of which the other is killed before one. What the one that lives is
/// told is thrown: its outputs must be NaN, and a new window must work.
void lose_a_rank(Window& window, int killed_in, bool is_killed) {
  Step step;
  step.fill(1);
  for (int exchange = 0; exchange < 4; ++exchange) {
    if (is_killed && exchange == killed_in) std::raise(SIGKILL);
    try {
      step.run(window, exchange);
    } catch (const DeviceError&) {
      for (const double value : step.output(exchange).values())
        demand(std::isnan(value), "outputs are not NaN");
      test::windows_of(
          small_plan("expert_parallel T=4 top_k=2 H=3 E=4 ranks=1 R=16 dtype=f32 prob=no"));
      window.check();
    }
  }
}

TEST(Window, TellsWhichRankWasKilled) {
  constexpr std::array<std::string_view, 4> kNames = {"dispatch", "collect", "collect backward",
                                                      "dispatch backward"};
  // Ranks 2 i and 2 i + 1 are a pair of their own, since each waits for a while.
  const auto ended = test::in_processes(8, [](int process, const std::string& folder) {
    const std::string pair = text(folder, "/", process / 2);
    std::filesystem::create_directory(pair);
    Window window = Window::create(small_plan(), process % 2, all_gather_in(pair, process % 2, 2),
                                   {.limit = 6s});
    lose_a_rank(window, process / 2, process % 2 == 1);
  });
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(ended[2 * i].error,
              text("expert_parallel: rank 1 has not come to ", kNames[i], ", exchange ", i + 1,
                   ", within 6000 ms; the window is of no more use"));
    EXPECT_EQ(ended[2 * i + 1].signal, SIGKILL);
  }
}

TEST(Window, ThatFailedOnOneRankFailsOnAll) {
  std::vector<Window> windows = test::windows_of(small_plan(), {.limit = 200ms});
  const std::vector<std::string> first = test::on_ranks(1, [&](int rank) {
    Step step;
    step.run(windows[size_t(rank)], 0);
  });
  const std::string want =
      "expert_parallel: rank 1 has not come to dispatch, exchange 1, within 200 ms; the window is "
      "of no more use";
  EXPECT_EQ(first[0], want);
  for (const std::string& error : test::on_ranks(2, [&](int rank) {
         Step step;
         step.run(windows[size_t(rank)], 0);
       }))
    EXPECT_EQ(error, want);
}

TEST(Window, NamesRanksThatAreOutOfStep) {
  std::vector<Window> windows = test::windows_of(small_plan());
  const std::vector<std::string> errors = test::on_ranks(2, [&](int rank) {
    Step step;
    step.run(windows[size_t(rank)], rank);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find(" is at another exchange than "), std::string::npos) << error;
    EXPECT_NE(error.find("exchange 1; the window is of no more use"), std::string::npos) << error;
  }
}

TEST(Window, NamesLayersThatAreOutOfStep) {
  const ExpertParallelPlan other =
      small_plan("expert_parallel T=4 top_k=2 H=3 E=2 ranks=2 R=16 dtype=f32 prob=no layer=1");
  std::vector<Window> windows = test::windows_of(small_plan());
  const std::vector<std::string> errors = test::on_ranks(2, [&](int rank) {
    Step step;
    if (rank == 1) step.plan = other;
    step.run(windows[size_t(rank)], 0);
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find(" is at another exchange than dispatch"), std::string::npos) << error;
}

TEST(Window, NamesRanksThatWantOtherGradients) {
  std::vector<Window> windows = test::windows_of(small_plan());
  const std::vector<std::string> errors = test::on_ranks(2, [&](int rank) {
    Step step;
    Window& window = windows[size_t(rank)];
    for (int exchange = 0; exchange < 3; ++exchange) step.run(window, exchange);
    dispatch_backward(step.plan, window,
                      {.drows = step.rows.view(),
                       .dx = step.out.view(),
                       .map = step.map(),
                       .wants_dx = rank == 0},
                      step.workspace.get(), {});
    window.check();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find(" is at another exchange than dispatch backward, exchange 4"),
              std::string::npos)
        << error;
}

TEST(Window, KnowsTheRanksOfItsDevice) {
  for (Window& window : test::windows_of(small_plan())) EXPECT_EQ(window.state().ranks_here, 2);
}

TEST(Window, ThatFailedAwaitsNoReaders) {
  std::vector<Window> windows = test::windows_of(small_plan(), {.limit = 200ms});
  for (Window& window : windows) window.await_readers();  // nobody has read, nothing was there
  const std::vector<std::string> errors = test::on_ranks(1, [&](int rank) {
    Step step;
    EXPECT_THROW(step.run(windows[size_t(rank)], 0), DeviceError);
    windows[size_t(rank)].await_readers();
  });
  EXPECT_EQ(errors[0],
            "expert_parallel: rank 1 has not come to dispatch, exchange 1, within 200 ms; the "
            "window is of no more use");
}

TEST(Window, NamesAReaderThatDoesNotRead) {
  std::vector<Window> windows = test::windows_of(small_plan());
  for (const std::string& error : test::on_ranks(2, [&](int rank) {
         const Window::State& state = windows[size_t(rank)].state();
         const int32_t good = 0;
         const parallel::ExchangeJob job{.name = {parallel::ExchangeKind::kDispatch},
                                         .verdict = &good};
         state.device->begin(state, job, {});
         if (rank == 0) state.device->end(state, job, {});
       }))
    EXPECT_EQ(error, "");
  windows[0].state().limit = 200ms;
  const std::vector<std::string> errors = test::on_ranks(1, [&](int) {
    windows[0].await_readers();
    windows[0].check();
  });
  EXPECT_EQ(errors[0],
            "expert_parallel: rank 1 has not come to the next exchange, exchange 2, within 200 ms; "
            "the window is of no more use");
}

/// What Window::create throws on every rank.
template <class Make>
std::vector<std::string> errors_of(Make&& make) {
  return test::on_gathered_ranks(2, make);
}

TEST(WindowErrors, AreThoseOfEveryRank) {
  const ExpertParallelPlan made = small_plan();
  const ExpertParallelPlan other =
      small_plan("expert_parallel T=5 top_k=2 H=3 E=2 ranks=2 R=16 dtype=f32 prob=no");
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(rank == 0 ? made : other, rank, gather);
       }))
    EXPECT_EQ(error, text("window: the problem of rank 1 is ", to_string(other.problem),
                          ", must be that of rank 0: ", to_string(made.problem)));
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(made, rank, gather, {.limit = rank * 5ms});
       }))
    EXPECT_EQ(error, "window: the limit of rank 1 is 5 ms, must be that of rank 0: 0");
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(made, rank, gather, {.host = rank == 0 ? "here" : "there"});
       }))
    EXPECT_EQ(error,
              "window: rank 1 is on another host than rank 0 (there, here); windows are memory "
              "that all ranks can map");
  for (const std::string& error :
       errors_of([&](int rank, const AllGather&gather) { Window::create(made, 2 * rank, gather); }))
    EXPECT_EQ(error, "window: rank 1 failed: rank is 2, must be 0 to 1");
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(made, rank, gather, {.limit = rank * -1ms});
       }))
    EXPECT_EQ(error, "window: rank 1 failed: limit is -1 ms, must be 0 to 315360000000");
}

// Nor do they wait for a rank whose device is none.
TEST(WindowErrors, OfADevice) {
  const ExpertParallelPlan made = small_plan();
  ExpertParallelPlan elsewhere = made;
  elsewhere.device = {.kind = DeviceKind::kCuda, .index = 99, .sm = 90};  // no machine has it
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(rank == 0 ? made : elsewhere, rank, gather);
       }))
    EXPECT_TRUE(error.starts_with("window: rank 1 failed: ")) << error;
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         const std::vector<void*> anywhere{nullptr, reinterpret_cast<void*>(int64_t{1} << 40)};
         Window::adopt(elsewhere, anywhere, rank, gather);
       }))
    EXPECT_TRUE(error.starts_with("window: rank 0 failed: ")) << error;
}

TEST(WindowErrors, OfUsesAlone) {
  const ExpertParallelPlan made = small_plan();
  EXPECT_EQ(test::invalid([&] { Window::create(made, 0, nullptr); }),
            "window: all_gather is empty, must be a function; by it ranks find each other");
  EXPECT_EQ(test::invalid([&] { Window::create(ExpertParallelPlan(), 0, nullptr); }).substr(0, 49),
            "window: the plan is empty; make it with plan() [e");
  const auto alone = small_plan("expert_parallel T=5 H=3 R=16 dtype=f32");
  EXPECT_EQ(test::invalid([&] {
              Window::create(alone, 0, [round = 0](const std::string& own) mutable {
                return std::vector<std::string>(round++ == 0, own);
              });
            }),
            "window: all_gather returned 0 strings, must be 1; one a rank");
  EXPECT_EQ(test::invalid([&] {
              Window::create(made, 0,
                             [](const std::string& own) { return std::vector<std::string>{own}; });
            }),
            "window: all_gather returned 1 strings, must be 2; one a rank");
}

TEST(WindowErrors, OfARankThatDoesNotMapTheOthers) {
  // It greets, and then leaves.
  const std::vector<std::string> errors = errors_of([&](int rank, const AllGather& gather) {
    int round = 0;
    Window::create(small_plan(), rank,
                   [&](const std::string& own) {
                     if (rank == 1 && ++round == 2) return gather("it was too tired");
                     return gather(own);
                   },
                   {.limit = 20s});
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error, "window: rank 1 failed: it was too tired");
}

TEST(WindowErrors, OfMemoryThatCannotBeMapped) {
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         Window::create(small_plan("expert_parallel T=536870912 top_k=1 H=32768 E=1 ranks=2 R=1 "
                                   "dtype=f32 prob=no"),
                        rank, gather, {.host = "a host\nof two lines"});
       }))
    EXPECT_TRUE(error.find(": window: cannot map the windows of all ranks: ") != error.npos ||
                error.find(" bytes of shared memory: ") != error.npos ||
                error.find(" bytes of memory of a GPU: ") != error.npos)
        << error;
}

#ifndef CADRE_EMULATED  // whose memory is files too, but the driver says no more than a number
/// What one process throws that makes a window of one rank with so few more files.
std::string error_with_files(int more) {
  return test::in_processes(1,
                            [&](int, const std::string&) {
                              std::vector<int> held;
                              rlimit most{64, 64};
                              demand(setrlimit(RLIMIT_NOFILE, &most) == 0, "setrlimit");
                              for (int file = dup(0); file >= 0; file = dup(0))
                                held.push_back(file);
                              for (int i = 0; i < more; ++i) close(held[size_t(i)]);
                              test::ThreadGroup group(1);
                              Window::create(
                                  small_plan("expert_parallel T=1 top_k=1 H=1 E=1 ranks=1 R=1"), 0,
                                  group.all_gather(0), {.host = "here"});
                            })[0]
      .error;
}

TEST(WindowErrors, OfFilesThatCannotBeOpened) {
  EXPECT_EQ(error_with_files(0),
            "window: rank 0 failed: window: cannot make 69632 bytes of shared memory: Too many "
            "open files");
  EXPECT_EQ(error_with_files(1),
            "window: rank 0 failed: window: cannot make a socket: Too many open files");
  EXPECT_EQ(error_with_files(2), "");
}
#endif

// A rank whose offer has the address of nobody, and one that comes under another's number.
TEST(WindowErrors, OfRanksThatCannotBeReached) {
  const auto with_address = [&](const std::string& words, std::string_view address) {
    const size_t last = words.rfind('\n', words.size() - 2);
    return words.substr(0, last + 1) + std::string(address) + "\n";
  };
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         int round = 0;
         Window::create(small_plan(), rank,
                        [&](const std::string& own) {
                          const bool lies = rank == 1 && ++round == 1;
                          return gather(lies ? with_address(own, "cadre-nowhere") : own);
                        },
                        {.limit = 300ms});
       }))
    EXPECT_EQ(error,
              "window: rank 0 failed: window: cannot reach a rank's socket: Connection refused");
}

TEST(WindowErrors, OfRanksThatDoNotComeInTime) {
  // Rank 1 gathers as if it made a window, and makes none.
  for (const std::string& error : errors_of([&](int rank, const AllGather&gather) {
         if (rank == 0) return void(Window::create(small_plan(), 0, gather, {.limit = 300ms}));
         Window::create(small_plan(), 1,
                        [&](const std::string& own) -> std::vector<std::string> {
                          gather(own);
                          throw DeviceError(gather("")[0]);
                        },
                        {.limit = 300ms});
       }))
    EXPECT_NE(error.find("window: 1 of 2 ranks have not come in time"), std::string::npos) << error;
}

TEST(WindowErrors, OfGathersByFolder) {
  EXPECT_EQ(test::invalid([] { all_gather_in("x", 2, 2); }), "window: rank is 2, must be 0 to 1");
  EXPECT_EQ(test::invalid([] { all_gather_in("x", -1, 2); }), "window: rank is -1, must be 0 to 1");
  EXPECT_EQ(test::invalid([] { all_gather_in("x", 0, 0); }),
            "window: ranks are 0, must be 1 or more");
  EXPECT_EQ(test::invalid([] { all_gather_in("", 0, 1); }),
            "window: the folder is '', must be a path");
  EXPECT_EQ(test::invalid([] { all_gather_in("x", 0, 1, -1ms); }),
            "limit is -1 ms, must be 0 to 315360000000");
}

TEST(WindowErrors, OfFolders) {
  const std::string folder =
      (std::filesystem::temp_directory_path() / text("cadre-folder-", getpid())).string();
  const auto error = [&](int rank, const std::string& where) -> std::string {
    try {
      all_gather_in(where, rank, 2, 1ms)("words");
    } catch (const DeviceError& thrown) {
      return thrown.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(error(0, folder), text("window: cannot write to the folder '", folder, "'"));
  std::filesystem::create_directory(folder);
  EXPECT_EQ(error(0, folder),
            text("window: rank 1 has not come to the folder '", folder, "' within 1 ms"));
  EXPECT_EQ(error(0, folder),
            text("window: the folder '", folder, "' holds 0.0 of another group; take a new one"));
  std::filesystem::remove_all(folder);
}

}  // namespace
