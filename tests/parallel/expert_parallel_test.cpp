// Ranks that are threads, each with a window of its own, against one rank that has all tokens and
// experts: the same bits of everything.
#include "cadre/expert_parallel.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"
#include "tests/parallel/group.h"
#include "tests/parallel/processes.h"
#include "tests/parallel/rank_case.h"
#include "tests/parallel/rank_difference.h"
#include "tests/parallel/rank_step.h"

using namespace cadre;
using test::difference;
using test::difference_of_places;
using test::Tensor;

namespace {

using Rank = test::RankCase;
using test::drop;
using test::on_one;
using test::random_ranks;
using test::step;

/// Moves codes, of a format that is drawn.
void move_codes(ExpertParallelProblem& p, std::mt19937& random) {
  constexpr std::array<std::string_view, 5> kFormats = {"mxfp8", "mxfp8:e5m2", "fp8_block",
                                                        "fp8_block:fp32", "fp8_row:e5m2"};
  p.x = parse_format(kFormats[random() % kFormats.size()]);
  const bool is_mxfp8 = p.x->kind == FormatKind::kMxfp8;
  p.hidden = is_mxfp8 ? int64_t(64 * (1 + random() % 2)) : int64_t(2 * (1 + random() % 70));
  p.scales_major = !is_mxfp8 && random() % 2 == 0 ? Major::kColumn : Major::kRow;
}

ExpertParallelProblem random_problem(int ranks, std::mt19937& random) {
  ExpertParallelProblem p = test::random_exchange(ranks, random);
  p.push = random() % 3 == 0;
  p.sum = !p.push && random() % 3 == 0 ? RowSum::kRank : RowSum::kChoice;
  if (random() % 3 == 0) move_codes(p, random);
  return p;
}

/// Routings of each problem: where threads are played, few.
#ifdef CADRE_EMULATED
constexpr int kRoutings = 5;
#else
constexpr int kRoutings = 30;
#endif

class RandomRoutings : public testing::TestWithParam<int> {};

// Every process draws what all have, runs its own part, and compares it with that of one rank.
TEST_P(RandomRoutings, HaveTheBitsOfOneRank) {
  for (const test::Ended& end :
       test::in_processes(GetParam(), [&](int rank, const std::string&folder) {
         std::mt19937 random(static_cast<unsigned>(GetParam()));
         const AllGather gather = all_gather_in(folder, rank, GetParam());
         for (int i = 0; i < 12; ++i) {
           const ExpertParallelProblem p = random_problem(GetParam(), random);
           // On a GPU all of these are of few tokens, and may go the other way too.
           const bool any = i % 3 != 0 || p.sum == RowSum::kRank;
           const ExpertParallelPlan made = plan(p, test::rank_device(), any ? "" : "window");
           Window window = Window::create(made, rank, gather);
           for (int again = 0; again < kRoutings; ++again) {
             std::vector<Rank> ranks = random_ranks(p, random);
             const Rank all = on_one(p, ranks);
             step(made, window, ranks[size_t(rank)], rank * p.experts);
             const Rank& own = ranks[size_t(rank)];
             std::string found = difference(p, rank, own, all);
             if (p.push) found += difference_of_places(p, own);
             if (!found.empty()) throw DeviceError(text(found, " ", to_string(p)));
           }
         }
       }))
    EXPECT_EQ(end.error + std::to_string(end.signal), "0");
}

INSTANTIATE_TEST_SUITE_P(Ranks, RandomRoutings, testing::Values(1, 2, 3, 4));

TEST(ExpertParallel, DropsWhatHasNoRoomAsOneRankWould) {
  const test::Threads one(1);  // since processes are forked later
  std::mt19937 random(7);
  int64_t dropped = 0;
  for (int i = 0; i < 60; ++i) {
    ExpertParallelProblem p{.tokens = 16, .top_k = 3, .hidden = 5, .experts = 3, .ranks = 3};
    p.rows = int64_t(random() % 60);
    p.overflow = Overflow::kDrop;
    p.push = i % 2 != 0;
    p.sum = i % 4 == 2 ? RowSum::kRank : RowSum::kChoice;
    if (i % 3 == 0) move_codes(p, random);
    const ExpertParallelPlan made = plan(p, test::rank_device());
    std::vector<Window> windows = test::windows_of(made);
    std::vector<Rank> ranks = random_ranks(p, random);
    for (const std::string& error : test::on_ranks(p.ranks, [&](int q) {
           step(made, windows[size_t(q)], ranks[size_t(q)], q * p.experts);
           windows[size_t(q)].check();
         }))
      ASSERT_EQ(error, "");
    for (const Rank& r : ranks) EXPECT_EQ(p.push ? difference_of_places(p, r) : "", "");
    const std::vector<int32_t> routed = ranks[0].routed;
    const int64_t now = drop(p, ranks);
    int64_t beyond = 0;
    for (const int32_t rows : routed) beyond += std::max<int64_t>(rows - p.rows, 0);
    EXPECT_EQ(now, beyond);
    const Rank all = on_one(p, ranks);
    for (int q = 0; q < p.ranks; ++q) EXPECT_EQ(difference(p, q, ranks[size_t(q)], all), "");
    dropped += now;
  }
  EXPECT_GT(dropped, 100);
}

struct Overflowing : testing::TestWithParam<RowSum> {};
INSTANTIATE_TEST_SUITE_P(Sums, Overflowing, testing::Values(RowSum::kChoice, RowSum::kRank));

TEST_P(Overflowing, IsNaNOnEveryRankAndAnErrorOfTheNextDispatch) {
  ExpertParallelProblem p{
      .tokens = 4, .top_k = 2, .hidden = 3, .experts = 2, .ranks = 2, .rows = 9};
  p.sum = GetParam();
  const ExpertParallelPlan made = plan(p, test::rank_device());
  std::vector<Window> windows = test::windows_of(made);
  std::mt19937 random(1);
  std::vector<Rank> ranks;
  for (int q = 0; q < 2; ++q) {
    Rank& r = ranks.emplace_back(p, 4);
    for (Tensor* t : {&r.x, &r.dout}) t->fill(random, -2, 2);
    r.prob.fill(random, 0, 1);
    r.experts = {2, 3, 2, 3, 2, 3, 2, q};  // 14 rows for rank 1, 2 for rank 0
  }
  const auto run = [&](int q) {
    for (Tensor* t : {&ranks[size_t(q)].out, &ranks[size_t(q)].dx, &ranks[size_t(q)].rows})
      t->fill(random, 1, 1);
    step(made, windows[size_t(q)], ranks[size_t(q)], 2 * q);
  };
  const std::string want =
      "expert_parallel: rows of rank 1 are 14, must be at most R, 9; that step is NaN on every "
      "rank; R = 14, or 1.75 times T * top_k, would have held them [" +
      to_string(p) + "]";
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, "");
  for (Rank& r : ranks) {
    EXPECT_EQ(r.verdict[0], 1);
    EXPECT_EQ(r.routed, (std::vector<int32_t>{2, 14}));
    for (const Tensor* t : {&r.rows, &r.row_prob, &r.out, &r.dy, &r.dx, &r.dprob})
      for (const double value : t->values()) EXPECT_TRUE(std::isnan(value));
  }
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, want);
  for (Rank& r : ranks) r.experts = {0, 1, 2, 3, 0, 1, 2, 3};
  for (const std::string& error : test::on_ranks(2, run)) EXPECT_EQ(error, "");
  EXPECT_FALSE(std::isnan(ranks[0].out.at(0, 0)));
  for (Rank& r : ranks) r.experts = {2, 3, 2, 3, 2, 3, 2, 3};
  test::on_ranks(2, run);
  for (const std::string& error : test::on_ranks(2, [&](int q) { windows[size_t(q)].check(); }))
    EXPECT_NE(error, "");
  for (Window& window : windows) EXPECT_NO_THROW(window.check());
}

/// Codes by a route; "" is that of few tokens on a GPU.
struct Codes : testing::TestWithParam<std::tuple<std::string_view, std::string_view>> {
  const ExpertParallelPlan made = plan(
      parse_expert_parallel_problem(text(
          "expert_parallel T=8 top_k=2 H=192 E=2 ranks=2 R=17 prob=no ", std::get<0>(GetParam()))),
      test::rank_device(), std::get<1>(GetParam()));
  const ExpertParallelProblem& p = made.problem;
  std::vector<Window> windows = test::windows_of(made);
  std::mt19937 random{3};
  std::vector<Rank> ranks;

  Codes() {
    for (int q = 0; q < 2; ++q)
      for (Tensor* t : {&ranks.emplace_back(p, 7 + q).x, &ranks[size_t(q)].dout})
        t->fill(random, -2, 2);
  }
};
INSTANTIATE_TEST_SUITE_P(Routes, Codes,
                         testing::Combine(testing::Values("x=mxfp8", "x=fp8_row tail=zero",
                                                          "x=fp8_block scales_major=column",
                                                          "x=mxfp8:e5m2 tail=zero"),
                                          testing::Values("", "window")));

TEST_P(Codes, AndScalesAreNaNWhereRowsOverflow) {
  for (const bool overflows : {false, true, false}) {
    for (Rank& r : ranks)
      for (size_t i = 0; i < r.experts.size(); ++i)
        r.experts[i] = overflows && i != 0 ? 3 : int32_t(i % 4);
    const auto errors =
        test::on_ranks(2, [&](int q) { step(made, windows[size_t(q)], ranks[size_t(q)], 2 * q); });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    for (const Rank& r : ranks) {
      EXPECT_EQ(r.verdict[0], int(overflows));
      EXPECT_EQ(test::all_bytes_are(0xff, r.codes_of_rows().codes, 0), overflows);
      EXPECT_EQ(test::all_bytes_are(0xff, r.codes_of_rows().scales, 0), overflows);
      EXPECT_EQ(std::isnan(r.rows.at(0, 0)), overflows);
      EXPECT_EQ(r.damage(), "");
    }
    if (!overflows) continue;
    const auto after = test::on_ranks(2, [&](int q) { windows[size_t(q)].check(); });
    for (const std::string& error : after) EXPECT_NE(error, "");
  }
}

/// Moves rows to other memory.
void move(TensorView& v, TensorView to) {
  to.shape[0] = v[0];
  for (int64_t t = 0; t < v[0]; ++t)
    std::memcpy(static_cast<char*>(to.data) + bytes_for(v.dtype, t * to.stride[0]),
                static_cast<char*>(v.data) + bytes_for(v.dtype, t * v.stride[0]),
                size_t(bytes_for(v.dtype, v[1])));
  v = to;
}

TEST_P(Codes, AreTakenWhereTheyLieInTheWindow) {
  for (Rank& r : ranks)
    for (int32_t& e : r.experts) e = int32_t(random() % 5) - 1;
  std::vector<test::Bytes> rows;
  for (const bool in_place : {false, true}) {
    const auto errors = test::on_ranks(2, [&](int q) {
      Rank& r = ranks[size_t(q)];
      r.quantize_x();
      DispatchArgs args = r.code_args(false);
      const QuantizedView place = windows[size_t(q)].codes(made);
      if (in_place) move(args.x, place.codes), move(args.x_scales, place.scales);
      r.row_codes.poison(), r.row_scales.poison();
      const test::OwnedWorkspace workspace(made.workspace_bytes);
      windows[size_t(q)].await_readers();
      dispatch(made, windows[size_t(q)], args, workspace.get(), {});
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    for (const Rank& r : ranks) {
      rows.push_back(r.row_codes.bytes());
      rows.push_back(r.row_scales.bytes());
      EXPECT_GT(r.used(), 0);
      const QuantizedView got = r.codes_of_rows();
      for (const TensorView& v : {got.codes, got.scales})
        EXPECT_TRUE(test::all_bytes_are(p.tail == Tail::kZero ? 0 : 0xff, v, r.used()));
      EXPECT_LT(r.used(), p.rows);
    }
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(rows[i], rows[i + 4]);
}

/// One of two ranks of a layer. Its tokens lie in its window, and choose the other rank's expert.
struct InPlace {
  explicit InPlace(std::string_view words)
      : plan(cadre::plan(parse_expert_parallel_problem(words), test::rank_device())),
        r(plan.problem, plan.problem.tokens),
        workspace(plan.workspace_bytes) {}

  ExpertParallelPlan plan;
  Rank r;
  test::OwnedWorkspace workspace;

  void fill(const TensorView& v, double value) const {
    for (int64_t i = 0; i < v[0]; ++i)
      for (int64_t h = 0; h < v[1]; ++h) cpu::write(v, {i, h}, value);
  }
  void dispatch(Window& window) {
    std::fill(r.experts.begin(), r.experts.end(), 1 - window.rank());
    DispatchArgs args = r.dispatch_args(false);
    args.x = window.tokens(plan);
    cadre::dispatch(plan, window, args, workspace.get(), {});
  }
  void expect(const Tensor& t, int64_t rows, double value) const {
    for (int64_t i = 0; i < rows; ++i)
      if (t.at(i, 0) != value || t.at(i, t.columns() - 1) != value)
        throw DeviceError(text("row ", i, " is ", t.at(i, 0), ", must be ", value));
  }
};

// Before something is written in place, the ranks that read what lay there must have done so.
TEST(ExpertParallel, AwaitsReadersBeforeTokensAreWrittenInPlace) {
  constexpr std::string_view kWords =
      "expert_parallel T=500 top_k=1 H=64 E=1 ranks=2 R=1000 dtype=f32 prob=no";
  constexpr std::string_view kOther =
      "expert_parallel T=1500 top_k=1 H=64 E=1 ranks=2 R=1500 dtype=f32 prob=no";
  std::vector<Window> windows = test::windows_of(InPlace(kOther).plan);
  const auto errors = test::on_ranks(2, [&](int q) {
    Window& window = windows[size_t(q)];
    InPlace layer(kWords), other(kOther);
    for (int step = 0; step < 6; ++step) {
      window.await_readers();
      layer.fill(window.tokens(layer.plan), step + q);
      layer.dispatch(window);
      layer.expect(layer.r.rows, 500, step + 1 - q);
      window.await_readers();  // the other layer's tokens lie on this one's
      other.fill(window.tokens(other.plan), step + 10 + q);
      other.dispatch(window);
      other.expect(other.r.rows, 1500, step + 11 - q);
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// A rank's sums of the next collect wait for those who read the last ones.
TEST(ExpertParallel, AwaitsReadersBeforeItSumsItsRows) {
  std::vector<Window> windows = test::windows_of(
      InPlace("expert_parallel T=500 top_k=1 H=64 E=1 ranks=2 R=1000 dtype=f32 prob=no sum=rank")
          .plan);
  const auto errors = test::on_ranks(2, [&](int q) {
    Window& window = windows[size_t(q)];
    InPlace layer(
        "expert_parallel T=500 top_k=1 H=64 E=1 ranks=2 R=1000 dtype=f32 prob=no sum=rank");
    layer.dispatch(window);
    for (int step = 0; step < 40; ++step) {
      layer.fill(layer.r.y.view(), step + 100 * q);
      collect(layer.plan, window,
              {.y = layer.r.y.view(), .out = layer.r.out.view(), .map = layer.r.map()}, {});
      layer.expect(layer.r.out, 500, step + 100 * (1 - q));
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(ExpertParallel, TakesTokensAndRowsThatLieInTheWindow) {
  const ExpertParallelProblem p{.tokens = 8,
                                .top_k = 2,
                                .hidden = 6,
                                .experts = 2,
                                .ranks = 2,
                                .rows = 32,
                                .dtype = DType::kF32};
  const ExpertParallelPlan made = plan(p, test::rank_device());
  std::vector<Window> windows = test::windows_of(made);
  std::mt19937 random(3);
  std::vector<Rank> ranks = random_ranks(p, random);
  std::vector<test::Bytes> out;
  for (const bool in_place : {false, true}) {
    const auto errors = test::on_ranks(2, [&](int q) {
      Rank& r = ranks[size_t(q)];
      Window& window = windows[size_t(q)];
      TensorView x = window.tokens(made), y = window.rows(made);
      x.shape[0] = r.tokens();
      DispatchArgs args = r.dispatch_args(true);
      if (in_place) args.x = x;
      for (int64_t t = 0; t < r.tokens() && in_place; ++t)
        for (int64_t h = 0; h < p.hidden; ++h) cpu::write(x, {t, h}, r.x.at(t, h));
      const test::OwnedWorkspace workspace(made.workspace_bytes);
      dispatch(made, window, args, workspace.get(), {});
      const TensorView to = in_place ? y : r.y.view();
      for (int64_t row = 0; row < r.used(); ++row)
        for (int64_t h = 0; h < p.hidden; ++h) cpu::write(to, {row, h}, 2 * r.rows.at(row, h));
      collect(made, window, {.y = to, .out = r.out.view(), .map = r.map()}, {});
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    for (const Rank& r : ranks) out.push_back(r.out.bytes());
  }
  for (size_t q = 0; q < 2; ++q) EXPECT_EQ(out[q], out[q + 2]);
}

}  // namespace
