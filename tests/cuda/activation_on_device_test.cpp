// Activations on the GPU have the bits of the CPU's `cpu`, which tests/ops hold against the
// reference; dprob adds up the same terms in another order.
#include "cadre/activation.h"

#include "activations/glu_layout.h"
#include "activations/list.h"
#include "tests/cuda/mirror.h"
#include "tests/judge/close.h"
#include "tests/ops/activation_case.h"

namespace cadre {
namespace {

using test::Tensor;
using Case = test::ActivationCase;

void on_gpu(Case& c) {
  test::Mirror mirror;
  const ActivationPlan made = plan(c.p, test::first_gpu());
  EXPECT_EQ(made.name, "cuda_activation");
  const ActivationArgs given = c.args([&](const Tensor& t) { return mirror.view(t); },
                                      [&](auto& all) { return mirror.data(all); });
  mirror.replay(c.dz_is_z || c.h_is_dh ? 1 : 2,
                [&](Stream stream) { run(made, given, {}, stream); });
}

/// sum_f |dh act(z)| of one row.
double magnitude(const Case& c, int64_t r) {
  double sum = 0;
  activations::All::visit(c.p.kind, [&]<class Row>(Row) {
    for (int64_t f = 0; f < c.p.features; ++f) {
      const auto at = Row::kInfo.gated ? activations::glu_columns(c.p.layout, f, c.p.features)
                                       : activations::GluColumns{f, f};
      const double gate = c.z.at(r, at.gate), up = c.z.at(r, at.up);
      sum += std::abs(c.dh.at(r, f) * Row::forward(gate, up, c.p.constants));
    }
  });
  return sum * 1.0001;  // the terms themselves were rounded
}

void expect_dprob(const Case& got, const Case& want, const Case& before) {
  std::vector<double> bound;
  for (int64_t r = 0; r < got.p.rows; ++r) {
    const int64_t sums = got.p.features / 32 + got.p.features / 256 + 24;
    bound.push_back(r < got.offsets.back() ? test::gamma(sums, magnitude(before, r)) : 0.0);
  }
  EXPECT_EQ(test::difference(got.dprob.values(), want.dprob.values(), bound, 1), "")
      << to_string(got.p);
}

void check(const ActivationProblem& p, int64_t used, int64_t gap, unsigned seed) {
  const Case before(p, used, seed, gap);
  Case want = before;
  want.wants_h = seed % 5 != 0;
  want.wants_dprob = seed % 7 != 0;
  want.dz_is_z = p.backward && seed % 4 == 0;
  want.h_is_dh = p.backward && want.wants_h && seed % 3 == 0;
  Case got = want;
  want.on_cpu("cpu");
  on_gpu(got);
  EXPECT_EQ(got.h.bytes() == want.h.bytes(), true) << "h of " << to_string(p) << " gap=" << gap;
  EXPECT_EQ(got.dz.bytes() == want.dz.bytes(), true) << "dz of " << to_string(p) << " gap=" << gap;
  EXPECT_EQ(got.z.bytes() == want.z.bytes(), true) << "z of " << to_string(p) << " gap=" << gap;
  EXPECT_EQ(got.dh.bytes() == want.dh.bytes(), true) << "dh of " << to_string(p) << " gap=" << gap;
  expect_dprob(got, want, before);
  EXPECT_EQ(got.dprob.damage(), "");
}

struct ActivationOnDevice : testing::TestWithParam<ActivationInfo> {
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

TEST_P(ActivationOnDevice, HasTheBitsOfTheCpu) {
  constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16, kF16 = DType::kF16;
  constexpr std::pair<DType, DType> kTypes[] = {
      {kF32, kF32}, {kBf16, kBf16}, {kF16, kF16}, {kBf16, kF32}, {kF32, kF16}};
  unsigned seed = 1;
  for (GluLayout layout : {GluLayout::kConcat, GluLayout::kInterleave1, GluLayout::kInterleave32})
    for (int64_t features : {1, 7, 32, 96, 100, 256, 2080})
      for (const auto& [z, h] : kTypes)
        for (bool backward : {false, true})
          for (int64_t gap : {0, 3}) {
            if (layout == GluLayout::kInterleave32 && features % 32 != 0) continue;
            if (layout != GluLayout::kConcat && !GetParam().gated) continue;
            ActivationProblem p{.backward = backward,
                                .kind = GetParam().kind,
                                .layout = layout,
                                .rows = 11,
                                .features = features,
                                .experts = 3,
                                .z = z,
                                .h = h,
                                .prob = seed % 3 != 0,
                                .tail = seed / 2 % 2 == 0 ? Tail::kZero : Tail::kKeep};
            if (p.kind == ActivationKind::kClampedSwiGlu) p.constants = {4.5f, 1.25f, 0.5f};
            check(p, int64_t(seed % 12), gap, seed);  // from no rows to all
            ++seed;
          }
}

/// More rows than warps, so that each reads its next row ahead; the last of them in the tail.
TEST_P(ActivationOnDevice, OfManyRowsHasTheBitsOfTheCpu) {
  constexpr int kWarpsOfSm = 8 * 24;  // of all blocks, eight times as many as are resident
  const int64_t warps = int64_t(kWarpsOfSm) * test::first_gpu().units;
  unsigned seed = 3;
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32})
    for (const Tail tail : {Tail::kKeep, Tail::kZero}) {
      ActivationProblem p{.backward = true,
                          .kind = GetParam().kind,
                          .rows = 2 * warps + 5,
                          .features = 40,
                          .experts = 3,
                          .z = dtype,
                          .h = dtype,
                          .prob = true,
                          .tail = tail};
      if (p.kind == ActivationKind::kClampedSwiGlu) p.constants = {4.5f, 1.25f, 0.5f};
      check(p, p.rows - int64_t(seed), 0, seed);
      ++seed;
    }
}

TEST_P(ActivationOnDevice, OfAnyNumberHasTheBitsOfTheCpuOrIsNan) {
  const int64_t columns = GetParam().gated ? 2 : 1;
  for (bool backward : {false, true}) {
    const ActivationProblem p{.backward = backward,
                              .kind = GetParam().kind,
                              .rows = 512,
                              .features = 64,
                              .z = DType::kF32,
                              .h = DType::kF32,
                              .prob = true};
    Case want(p, p.rows, 0, 1);
    std::mt19937 random(2);
    for (int64_t i = 0; i < p.rows * p.features * columns; ++i)
      want.z.data<uint32_t>()[i] = uint32_t(random());  // all exponents, infinity and NaN too
    Case got = want;
    want.on_cpu("cpu");
    on_gpu(got);
    for (const auto& [g, w] : {std::pair(&got.h, &want.h), std::pair(&got.dz, &want.dz)})
      EXPECT_EQ(
          test::difference(g->values(), w->values(),
                           std::vector<double>(size_t(g->rows() * g->columns())), g->columns()),
          "")
          << to_string(p);
  }
}

TEST_P(ActivationOnDevice, OfNoRowsAndOfBrokenOffsets) {
  for (bool backward : {false, true})
    for (int32_t end : {-5, 0, 4, 9, 2147483647}) {
      ActivationProblem p{.backward = backward,
                          .kind = GetParam().kind,
                          .rows = end == 0 ? 0 : 5,
                          .features = 64,
                          .prob = true,
                          .tail = Tail::kZero};
      Case want(p, p.rows, 0, 3);
      want.offsets.back() = end;
      Case got = want;
      want.on_cpu("cpu");
      on_gpu(got);
      EXPECT_EQ(got.h.bytes() == want.h.bytes(), true) << to_string(p) << " end=" << end;
      EXPECT_EQ(got.dz.bytes() == want.dz.bytes(), true) << to_string(p) << " end=" << end;
    }
}

INSTANTIATE_TEST_SUITE_P(Activation, ActivationOnDevice, testing::ValuesIn(activation_list()),
                         [](const testing::TestParamInfo<ActivationInfo>& row) {
                           return std::string(row.param.name);
                         });

}  // namespace
}  // namespace cadre
