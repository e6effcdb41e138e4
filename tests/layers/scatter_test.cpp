// Layers whose results go to places: the rows of the layer whose results lie in expert
// order, and all else that it computes; what does not fit.
#include <gtest/gtest.h>

#include <cstring>

#include "bench/compare.h"
#include "bench/layer_case.h"
#include "cadre/error.h"
#include "cadre/sequential.h"
#include "tests/judge/errors.h"

namespace cadre {
namespace {

/// The same without.
template <class Problem>
Problem in_expert_order(Problem p) {
  p.scatter = false;
  if constexpr (requires { p.scatter_dx; }) p.scatter_dx = false;
  p.tokens = 0;
  p.top_k = p.ranks = 1;
  return p;
}

const char* row_at(const TensorView& v, int64_t rank, int64_t row) {
  const int64_t at = rank * v.stride[0] + row * v.stride[size_t(v.rank) - 2];
  return static_cast<const char*>(v.data) + bytes_for(v.dtype, at);
}

/// Places that do not have their rows.
template <class Problem>
int wrong_places(const Problem& p, const int32_t* place_of, int64_t live, const TensorView& got,
                 const TensorView& want) {
  const int64_t each = p.tokens * p.top_k, columns = want[1];
  int wrong = 0;
  for (int64_t r = 0; r < live; ++r)
    if (const int64_t place = place_of[r]; place >= 0 && place < p.ranks * each)
      wrong += std::memcmp(
                   row_at(got, p.ranks > 1 ? place / each : 0, p.ranks > 1 ? place % each : place),
                   row_at(want, 0, r), size_t(bytes_for(want.dtype, columns))) != 0;
  return wrong;
}

template <class Problem>
void has_the_rows_of(std::string_view words, const Problem& p) {
  bench::Draw draw;
  auto c = bench::make_layer_case(p, this_cpu(), draw);
  const auto plain = plan(in_expert_order(p), this_cpu());
  const TensorView y = c.buffers->tensor(p.dtype, {p.rows, c.args.y[c.args.y.rank - 1]});
  const TensorView dx = c.buffers->tensor(p.dtype, {p.rows, c.args.dx[c.args.dx.rank - 1]});
  bool is_y = true, is_dx = true;
  if constexpr (requires { p.scatter_dx; }) is_y = p.scatter, is_dx = p.scatter_dx;
  auto args = c.args;
  args.y = y, args.dx = dx, args.place_of = nullptr;
  const int64_t live = args.offsets.data[p.experts];
  ASSERT_GT(live, p.rows / 2);
  EXPECT_EQ(plain.memory.saved_bytes, c.plan.memory.saved_bytes);
  if (!is_y) c.args.y = y;
  if (!is_dx) c.args.dx = dx;
  forward(c.plan, c.args, c.workspace, {});
  backward(c.plan, c.args, c.workspace, {});
  std::vector<std::vector<std::byte>> made;
  for (const bench::Output& out : c.outputs)
    if (out.name != "y" && out.name != "dx") made.push_back(bench::snapshot(out));
  forward(plain, args, c.workspace, {});
  backward(plain, args, c.workspace, {});
  EXPECT_EQ(is_y ? wrong_places(p, c.args.place_of, live, c.args.y, y) : 0, 0) << words;
  EXPECT_EQ(is_dx ? wrong_places(p, c.args.place_of, live, c.args.dx, dx) : 0, 0) << words;
  size_t i = 0;
  for (const bench::Output& out : c.outputs) {
    if (out.name == "y" || out.name == "dx") continue;
    EXPECT_EQ(made[i++] == bench::snapshot(out), true) << out.name << ' ' << words;
  }
  EXPECT_TRUE(c.buffers->canaries_live());
}

TEST(Scatter, GivesTheRowsOfTheLayer) {
  for (const char* words :
       {"grouped_linear R=90 N=24 K=40 E=4 recipe=bf16 scatter=yes T=30 top_k=3",
        "grouped_linear R=90 N=24 K=40 E=4 recipe=bf16 scatter_dx=yes T=20 top_k=3 ranks=2",
        "grouped_linear R=90 N=32 K=64 E=4 recipe=mxfp8 bias=yes scatter=yes scatter_dx=yes T=20 "
        "top_k=3 ranks=2 tail=zero"})
    has_the_rows_of(words, parse_grouped_linear_problem(words));
  for (const char* words :
       {"grouped_mlp R=90 H=24 F=40 E=4 recipe=bf16 prob=yes scatter=yes T=30 top_k=3",
        "grouped_mlp R=90 H=64 F=32 E=4 act=silu recipe=mxfp8 bias1=yes bias2=yes scatter=yes T=20 "
        "top_k=3 ranks=2"})
    has_the_rows_of(words, parse_grouped_mlp_problem(words));
}

TEST(Scatter, SaysWhatDoesNotFit) {
  const auto error = [](auto&& work) {
    const std::string message = test::invalid(work);
    return message.substr(0, message.rfind(" ["));
  };
  const auto of_linear = [&](std::string_view words) {
    return error([&] {
      plan(parse_grouped_linear_problem(text("grouped_linear R=8 N=4 K=4 E=1 ", words)),
           this_cpu());
    });
  };
  const auto of_mlp = [&](std::string_view words) {
    return error([&] {
      plan(parse_grouped_mlp_problem(text("grouped_mlp R=8 H=4 F=4 E=1 ", words)), this_cpu());
    });
  };
  constexpr const char* kBoth =
      " is yes, must be no; T is of what is gathered or of what is scattered";
  EXPECT_EQ(of_linear("scatter_dx=yes gather=yes T=4"), text("grouped_linear: gather", kBoth));
  EXPECT_EQ(of_mlp("scatter=yes gather_dy=yes T=4"), text("grouped_mlp: gather_dy", kBoth));
  EXPECT_EQ(of_linear("ranks=2"), "grouped_linear: ranks is 2, must be 1; nothing is scattered");
  EXPECT_EQ(of_mlp("scatter=yes T=4 top_k=0"), "grouped_mlp: top_k is 0, must be 1 or more");
  EXPECT_EQ(
      error([&] {
        SequentialProblem row;
        row.ops = {parse_grouped_linear_problem("grouped_linear R=8 N=4 K=4 E=1 scatter=yes T=4")};
        plan(row, this_cpu());
      }),
      "sequential: scatter of op 0 is yes, must be no; a row has its rows in expert order");
}

TEST(Scatter, SaysWhichArgumentsDoNotFit) {
  const auto error = [](auto&& work) {
    const std::string message = test::invalid(work);
    return message.substr(0, message.rfind(" ["));
  };
  auto c = bench::make_layer_case(
      parse_grouped_linear_problem("grouped_linear R=8 N=4 K=6 E=1 scatter=yes scatter_dx=yes T=4 "
                                   "top_k=2 ranks=2"),
      this_cpu(), {});
  const TensorView y = c.args.y, dx = c.args.dx;
  c.args.y = view(y.data, DType::kBf16, {8, 4});
  EXPECT_EQ(error([&] { forward(c.plan, c.args, c.workspace, {}); }),
            "grouped_linear: y is bf16[8, 4], must be bf16[2, 8, 4]; the problem says scatter=yes");
  c.args.y = y;
  c.args.dx = view(dx.data, DType::kBf16, {8, 6});
  EXPECT_EQ(
      error([&] { backward(c.plan, c.args, c.workspace, {}); }),
      "grouped_linear: dx is bf16[8, 6], must be bf16[2, 8, 6]; the problem says scatter_dx=yes");
  c.args.place_of = nullptr;
  EXPECT_EQ(error([&] { forward(c.plan, c.args, c.workspace, {}); }),
            "grouped_linear: place_of is null, must point to 8 elements; the problem says "
            "scatter=yes");
}

}  // namespace
}  // namespace cadre
