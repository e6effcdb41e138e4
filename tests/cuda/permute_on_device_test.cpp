// All four passes on the GPU have the bits of the CPU's, and are the reference's within the bound.
#include "cadre/permute.h"

#include "bench/check.h"
#include "tests/cuda/mirror.h"
#include "tests/judge/close.h"
#include "tests/ops/permute_codes_case.h"

namespace cadre {
namespace {

using test::gamma;
using test::rounding;
using test::Tensor;

/// The row map of a random routing, in which some choices are dropped.
struct Routed {
  std::vector<int32_t> offsets, row_of, slot_of;

  Routed(const PermuteProblem& p, unsigned seed)
      : offsets(size_t(p.experts) + 1),
        row_of(size_t(p.tokens * p.top_k)),
        slot_of(size_t(p.rows), -1) {
    std::mt19937 random(seed);
    std::vector<int32_t> experts(row_of.size());
    for (int32_t& e : experts) e = int32_t(random() % unsigned(p.experts + 1)) - 1;
    const OffsetsProblem problem{.source = OffsetsSource::kRouting,
                                 .rows = p.rows,
                                 .experts = p.experts,
                                 .tokens = p.tokens,
                                 .top_k = p.top_k};
    run(plan(problem, this_cpu(), "cpu_reference"),
        {.source = experts.data(),
         .offsets = offsets.data(),
         .map = {.row_of = row_of.data(), .slot_of = slot_of.data()}},
        {}, {});
  }
};

/// One problem with its tensors, whose rows lie `gap` elements apart. What is read is random where
/// it may be read and NaN elsewhere; what is written is poison.
struct Case {
  PermuteProblem p;
  Routed routed;
  Tensor tokens, rows, y, addend, prob, row_prob, drow_prob, drow_scale, dprob;
  bool wants_dprob = true, wants_row_of = true, scaled = false;

  Case(const PermuteProblem& problem, int64_t gap, unsigned seed)
      : p(problem),
        routed(p, seed),
        tokens(p.dtype, {p.tokens, p.hidden}, {.row_gap = gap}),
        rows(p.dtype, {p.rows, p.hidden}, {.row_gap = gap}),
        y(p.dtype, {p.rows, p.hidden}, {.row_gap = 2 * gap}),
        addend(p.dtype, {p.tokens, p.hidden}, {.row_gap = gap}),
        prob(DType::kF32, {p.tokens, p.top_k}),
        row_prob(DType::kF32, {p.rows}),
        drow_prob(DType::kF32, {p.rows}),
        drow_scale(DType::kF32, {p.rows}),
        dprob(DType::kF32, {p.tokens, p.top_k}) {
    std::mt19937 random(seed);
    (by_row() ? tokens : rows).fill(random, -2, 2, 0, by_row() ? p.tokens : used());
    y.fill(random, -2, 2, 0, used());
    addend.fill(random, -2, 2);
    prob.fill(random, 0, 1);
    for (int64_t r = 0; r < used(); ++r) {
      drow_prob.set({r}, double(random() % 100) - 50);
      drow_scale.set({r}, double(random() % 100) / 64);
    }
    scaled = seed % 2;
  }
  bool by_row() const {
    return p.pass == PermutePass::kPermute || p.pass == PermutePass::kCombineBackward;
  }
  bool weighted() const {
    return p.prob && (p.pass == PermutePass::kCombine || p.pass == PermutePass::kCombineBackward);
  }
  int64_t used() const { return routed.offsets.back(); }
  /// Numbers in all that is read, for maps and offsets that lead anywhere.
  void fill(std::mt19937& random) {
    for (Tensor* t : {by_row() ? &tokens : &rows, &y, &prob, &drow_prob, &drow_scale})
      t->fill(random, -2, 2);
  }
  bool writes_dprob() const {
    return p.prob && (p.pass == PermutePass::kPermuteBackward ||
                      (p.pass == PermutePass::kCombineBackward && wants_dprob));
  }
  /// Whether what the pass writes has a NaN, whose bits differ between a GPU and a CPU.
  bool wrote_nan() const {
    const auto has_nan = [](const Tensor& t) {
      const std::vector<double> values = t.values();
      return std::any_of(values.begin(), values.end(), [](double v) { return std::isnan(v); });
    };
    return has_nan(by_row() ? rows : tokens) || (writes_dprob() && has_nan(dprob)) ||
           (p.pass == PermutePass::kPermute && p.prob && has_nan(row_prob));
  }

  /// `view` and `list` say where tensors and lists are.
  template <class View, class List>
  PermuteArgs args(View&& view, List&& list) {
    const auto floats = [&](const Tensor& t) { return static_cast<float*>(view(t).data); };
    PermuteArgs given{.tokens = view(tokens),
                      .rows = view(rows),
                      .map = {list(routed.row_of), list(routed.slot_of)},
                      .offsets = {list(routed.offsets), p.experts}};
    if (p.addend) given.addend = view(addend);
    if (by_row() && !wants_row_of) given.map.row_of = nullptr;
    if (!p.prob) return given;
    if (p.pass != PermutePass::kPermuteBackward) given.prob = floats(prob);
    if (p.pass == PermutePass::kPermute) given.row_prob = floats(row_prob);
    if (p.pass == PermutePass::kPermuteBackward) given.drow_prob = floats(drow_prob);
    if (p.pass == PermutePass::kPermuteBackward && scaled) given.drow_scale = floats(drow_scale);
    if (p.pass == PermutePass::kPermuteBackward) given.dprob = floats(dprob);
    if (p.pass != PermutePass::kCombineBackward || !wants_dprob) return given;
    given.dprob = floats(dprob);
    given.y = view(y);
    return given;
  }
  void on_cpu(std::string_view only) {
    run(plan(p, this_cpu(), only),
        args([](const Tensor& t) { return t.view(); },
             [](std::vector<int32_t>& list) { return list.data(); }),
        {}, {});
  }
  void on_gpu() {
    test::Mirror mirror;
    const PermutePlan made = plan(p, test::first_gpu());
    EXPECT_EQ(made.name, "cuda_permute");
    const PermuteArgs given = args([&](const Tensor& t) { return mirror.view(t); },
                                   [&](std::vector<int32_t>& list) { return mirror.data(list); });
    mirror.replay(2, [&](Stream stream) { run(made, given, {}, stream); });
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor* t : {&tokens, &rows, &row_prob, &dprob})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }
};

/// What the reference wrote, and how far a result may be from it.
void expect_near(const Case& got, const Case& want) {
  const PermuteProblem& p = got.p;
  const Tensor &g = got.by_row() ? got.rows : got.tokens,
               &w = got.by_row() ? want.rows : want.tokens;
  std::vector<double> bound;
  const std::vector<double> values = w.values();
  for (size_t i = 0; i < values.size(); ++i) {
    const double most = 2.0 * p.top_k;  // |p x| is at most 2
    const double slack =
        got.by_row() ? gamma(1, std::abs(values[i])) : gamma(p.top_k + 2, most + 2 * p.addend);
    bound.push_back(slack + 2 * rounding(p.dtype, values[i]));
  }
  EXPECT_EQ(test::difference(g.values(), values, bound, p.hidden), "") << to_string(p);
  const std::vector<double> products(size_t(p.tokens * p.top_k),
                                     gamma(p.hidden / 256 + 10, 4.0 * double(p.hidden)));
  EXPECT_EQ(test::difference(got.dprob.values(), want.dprob.values(), products, p.top_k), "");
}

void check(const PermuteProblem& p, int64_t gap, unsigned seed) {
  Case got(p, gap, seed), fast(p, gap, seed), want(p, gap, seed);
  for (Case* c : {&got, &fast, &want}) {
    c->wants_dprob = seed % 4 != 3;
    c->wants_row_of = seed % 5 < 3 || (c->wants_dprob && p.pass == PermutePass::kCombineBackward);
  }
  got.on_gpu();
  fast.on_cpu("cpu");
  want.on_cpu("cpu_reference");
  EXPECT_EQ(got.outputs(), fast.outputs()) << to_string(p) << " gap=" << gap;
  expect_near(got, want);
}

bool writes_sums(PermutePass pass) {
  return pass == PermutePass::kCombine || pass == PermutePass::kPermuteBackward;
}

struct PermuteOnDevice : testing::TestWithParam<PermutePass> {
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

TEST_P(PermuteOnDevice, HasTheBitsOfTheCpu) {
  unsigned seed = 1;
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16})
    for (int64_t tokens : {0, 1, 13})
      for (int top_k : {1, 3, 9})
        for (int64_t hidden : {1, 64, 131, 256, 600, 2312})
          for (int64_t rows : {int64_t(0), tokens * top_k / 2, tokens * top_k + 4}) {
            const int64_t gap = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 0 : 8;
            const PermuteProblem p{.pass = GetParam(),
                                   .tokens = tokens,
                                   .top_k = top_k,
                                   .rows = rows,
                                   .hidden = hidden,
                                   .experts = int(1 + seed % 5),
                                   .dtype = dtype,
                                   .prob = seed % 5 != 0,
                                   .addend = seed / 4 % 2 == 0 && writes_sums(GetParam()),
                                   .tail = seed / 2 % 2 == 0 ? Tail::kKeep : Tail::kZero};
            check(p, gap, seed++);
          }
}

TEST_P(PermuteOnDevice, TakesMoreRowsThanAGridHolds) {
  check({.pass = GetParam(),
         .tokens = 300'000,
         .top_k = 2,
         .rows = 600'100,
         .hidden = 8,
         .experts = 3,
         .prob = true,
         .tail = Tail::kZero},
        0, 1);
}

TEST_P(PermuteOnDevice, OfBrokenMapsAndOffsetsIsTheReferences) {
  std::mt19937 random(9);
  for (int32_t end : {-1, 3, 9, 2147483647})
    for (unsigned seed = 0; seed < 8; ++seed) {
      const PermuteProblem p{.pass = GetParam(),
                             .tokens = 5,
                             .top_k = 2,
                             .rows = 8,
                             .hidden = seed % 2 == 0 ? 9 : 16,
                             .experts = 2,
                             .dtype = DType::kF32,
                             .prob = true,
                             .addend = seed / 2 % 2 == 0 && writes_sums(GetParam()),
                             .tail = Tail::kZero};
      Case got(p, 0, seed);
      got.fill(random);
      got.routed.offsets.back() = end;
      for (int32_t& row : got.routed.row_of) row = int32_t(random() % 12) - 2;
      for (int32_t& slot : got.routed.slot_of) slot = int32_t(random() % 14) - 2;
      got.wants_dprob = seed % 4 < 2;
      Case want = got;
      got.on_gpu();
      want.on_cpu("cpu");
      EXPECT_FALSE(want.wrote_nan()) << to_string(p) << " end=" << end;
      EXPECT_EQ(got.outputs(), want.outputs()) << to_string(p) << " end=" << end;
    }
}

// Rows that no offsets end; choices without a row.
TEST(RowsWithoutOffsetsOnDevice, AreSummedAsTheReferenceSumsThem) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  for (const char* words : {"permute combine T=70 top_k=9 R=500 H=136 E=0 prob=yes addend=yes",
                            "permute combine T=33 top_k=2 R=40 H=72 E=0 dtype=f32",
                            "permute permute_backward T=70 top_k=4 R=150 H=77 E=0 prob=yes"}) {
    const bench::CheckReport report = bench::check(words, {}, {}, cuda_devices()[0]);
    EXPECT_TRUE(report.good()) << report.fault << ' ' << words;
  }
}

// Codes and scales, with row_of and without.
TEST(CodesOnDevice, MoveAsOnTheCpu) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  for (const std::string_view words : test::kPermuteOfCodes)
    for (unsigned seed = 0; seed < 4; ++seed) {
      test::PermuteCodesCase got(words, seed / 2), want(words, seed / 2);
      got.has_row_of = seed % 2 == 0;
      run(plan(want.p, this_cpu()), want.args(), {}, {});
      test::Mirror mirror;
      const PermutePlan made = plan(got.p, test::first_gpu());
      const PermuteArgs given =
          got.args([&](const Tensor& t) { return mirror.view(t); },
                   [&](std::vector<int32_t>& list) { return mirror.data(list); });
      EXPECT_EQ(mirror.replay(2, [&](Stream stream) { run(made, given, {}, stream); }), 1u);
      EXPECT_EQ(got.outputs(), want.outputs()) << words << (got.has_row_of ? " row_of" : "");
    }
}

INSTANTIATE_TEST_SUITE_P(Permute, PermuteOnDevice,
                         testing::Values(PermutePass::kPermute, PermutePass::kPermuteBackward,
                                         PermutePass::kCombine, PermutePass::kCombineBackward));

}  // namespace
}  // namespace cadre
