// What is promised about bits: they depend neither on the run, nor on the threads, nor, for rows of
// y and dx, on anything but the row and its expert's weight.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/ops/grouped_gemm_case.h"

using namespace cadre;
using test::Counts;
using test::GemmCase;

namespace {

GroupedGemmProblem problem(std::string_view words, const Counts& counts) {
  GroupedGemmProblem p = parse_grouped_gemm_problem(words);
  p.rows = counts.rows;
  p.experts = counts.experts();
  return p;
}

TEST(GroupedGemmBits, DoNotDependOnTheRunOrTheThreads) {
  const Counts counts{.rows = 470, .of = {0, 70, 3, 300, 1, 64, 31}};
  for (const char* words :
       {"fprop N=300 K=130 format=f32", "fprop N=300 K=130 format=bf16",
        "dgrad N=300 K=330 format=f32", "dgrad N=300 K=330 format=mxfp8",
        "wgrad N=300 K=130 format=f32 out=f32", "wgrad N=140 K=1100 format=bf16 out=bf16",
        "fprop N=300 K=130 format=f32 rhs_major=column out_major=column"}) {
    GemmCase c(problem(text("grouped_gemm ", words), counts), counts, 1);
    for (std::string_view name : test::implementations(c.p)) {
      const auto once = c.run(name, 1);
      for (int threads : {1, 2, 3, 7})
        EXPECT_EQ(c.run(name, threads).out.bytes(), once.out.bytes())
            << name << ", " << words << " on " << threads << " threads";
    }
  }
}

// A batch as rows of a pool under experts of a pool.
struct Batch {
  std::vector<std::vector<int>> rows;  ///< of each expert, numbers in the pool
};

// Plain f32 or bf16 operands, random but the same for the same number in the pool.
class Pool {
 public:
  Pool(const GroupedGemmProblem& p, std::string_view implementation, int rows, int experts)
      : p_(p),
        implementation_(implementation),
        depth_(p.pass == Pass::kFprop ? p.k : p.n),
        cols_(p.pass == Pass::kFprop ? p.n : p.k),
        x_(p.lhs.element, {rows, depth_}),
        w_(p.rhs.element, {experts, p.n, p.k}) {
    std::mt19937 random(7);
    x_.fill(random, -1, 1);
    w_.fill(random, -1, 1);
  }

  /// The bits of every row of a batch, by row and expert, compared with those seen before.
  void expect_same(const Batch& batch, int threads) {
    int64_t count = 0;
    for (const auto& rows : batch.rows) count += int64_t(rows.size());
    GroupedGemmProblem p = p_;
    p.rows = count, p.experts = int(batch.rows.size());
    test::Tensor x(p.lhs.element, {p.rows, depth_}), y(p.out, {p.rows, cols_});
    std::vector<int32_t> offsets = {0};
    for (const auto& rows : batch.rows) {
      for (size_t i = 0; i < rows.size(); ++i)
        copy(row(x_, rows[i]), row(x, offsets.back() + int64_t(i)), depth_ * bits(p.lhs.element));
      offsets.push_back(offsets.back() + int32_t(rows.size()));
    }
    std::vector<const void*> weights;
    for (size_t e = 0; e < batch.rows.size(); ++e) weights.push_back(row(w_, int64_t(e) * p.n));
    p.discrete_rhs = true;
    run(p, {x.view(), y.view(), offsets.data(), weights.data()}, threads);
    for (size_t e = 0; e < batch.rows.size(); ++e)
      for (size_t i = 0; i < batch.rows[e].size(); ++i)
        expect_seen(batch.rows[e][i], int(e), row(y, offsets[e] + int64_t(i)));
  }

 private:
  struct Views {
    TensorView x, y;
    const int32_t* offsets;
    const void* const* weights;
  };
  void run(const GroupedGemmProblem& p, const Views& views, int threads) {
    GroupedGemmArgs args;
    args.lhs.codes = views.x;
    args.rhs.codes = view(nullptr, p.rhs.element, {p.experts, p.n, p.k});
    args.rhs.discrete = views.weights;
    args.offsets = {views.offsets, p.experts};
    args.out = views.y;
    const auto chosen = plan(p, {.kind = DeviceKind::kCpu, .units = threads}, implementation_);
    const test::OwnedWorkspace workspace(chosen.workspace_bytes);
    cadre::run(chosen, args, workspace.get(), {});
  }
  static char* row(const test::Tensor& tensor, int64_t i) {
    const TensorView v = tensor.view();
    return static_cast<char*>(v.data) + bytes_for(v.dtype, i * v[v.rank - 1]);
  }
  static void copy(const char* from, char* to, int64_t count) {
    std::memcpy(to, from, size_t(count / 8));
  }
  void expect_seen(int number, int expert, const char* bytes) {
    const std::string now(bytes, size_t(bytes_for(p_.out, cols_)));
    const auto [seen, first] = seen_.try_emplace({number, expert}, now);
    EXPECT_EQ(seen->second, now) << "row " << number << " of expert " << expert << ", "
                                 << to_string(p_);
  }

  GroupedGemmProblem p_;
  std::string_view implementation_;
  int64_t depth_, cols_;
  test::Tensor x_, w_;
  std::map<std::pair<int, int>, std::string> seen_;
};

// The same forty rows alone, in front, behind, and among others, in tiles of every fill.
TEST(GroupedGemmBits, OfARowDoNotDependOnTheOthers) {
  constexpr int kRows = 200, kExperts = 3;
  for (const char* words :
       {"fprop N=90 K=300 format=f32", "fprop N=90 K=300 format=bf16",
        "dgrad N=530 K=90 format=f32", "dgrad N=300 K=300 format=bf16",
        "fprop N=64 K=17 format=f32 out=f32", "dgrad N=800 K=90 format=f32 out=f32",
        "fprop N=70 K=1300 format=bf16 out=f32"}) {
    const GroupedGemmProblem p = parse_grouped_gemm_problem(text("grouped_gemm ", words));
    for (std::string_view name : test::implementations(p)) {
      Pool pool(p, name, kRows, kExperts);
      std::mt19937 random(3);
      for (int draw = 0; draw < 40; ++draw) {
        Batch batch;
        batch.rows.resize(size_t(1 + draw % kExperts));
        const int most = draw < 20 ? 9 : 150;
        for (auto& rows : batch.rows)
          for (int i = int(random() % unsigned(most)); i >= 0; --i)
            rows.push_back(int(random() % 40));
        pool.expect_same(batch, 1 + draw % 3);
      }
    }
  }
}

// dw of an expert depends on its own rows only, wherever they stand in the batch.
TEST(GroupedGemmBits, OfAWeightGradientDoNotDependOnOtherExperts) {
  const GroupedGemmProblem one =
      problem("grouped_gemm wgrad N=70 K=90 format=f32 out=f32", {.rows = 300, .of = {300}});
  GemmCase alone(one, {.rows = 300, .of = {300}}, 1);
  const auto want = alone.run("cpu_onednn");
  for (const int64_t before : {1, 17, 200}) {
    test::Tensor dy(DType::kF32, {before + 320, 70}), x(DType::kF32, {before + 320, 90}),
        dw(DType::kF32, {3, 70, 90});
    std::mt19937 random(2);
    dy.fill(random, -1, 1), x.fill(random, -1, 1);
    alone.lhs().copy_to(dy.view(), before);
    alone.rhs().copy_to(x.view(), before);
    GroupedGemmProblem p = one;
    p.rows = before + 320, p.experts = 3;
    const std::vector<int32_t> offsets = {0, int32_t(before), int32_t(before) + 300,
                                          int32_t(before) + 320};
    GroupedGemmArgs args;
    args.lhs.codes = dy.view(), args.rhs.codes = x.view(), args.out = dw.view();
    args.offsets = {offsets.data(), 3};
    const auto chosen = plan(p, this_cpu(), "cpu_onednn");
    const test::OwnedWorkspace workspace(chosen.workspace_bytes);
    run(chosen, args, workspace.get(), {});
    EXPECT_EQ(std::memcmp(dw.data<float>() + 70 * 90, want.out.data<float>(), 70 * 90 * 4), 0);
  }
}

}  // namespace
