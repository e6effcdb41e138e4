#include "cadre/activation.h"

#include <gtest/gtest.h>

#include "activations/glu_layout.h"
#include "activations/list.h"
#include "tests/judge/close.h"
#include "tests/judge/counts.h"
#include "tests/judge/errors.h"
#include "tests/judge/threads.h"
#include "tests/ops/activation_case.h"

using namespace cadre;
using test::gamma;
using test::rounding;
using test::Tensor;
using Case = test::ActivationCase;

namespace {

/// A function of one number by the same header, in double, and how much of it fp32 may lose.
struct Element {
  activations::Gradient<double> want;  ///< for dh = 1
  double value_error, dgate_error, dup_error;
};

/// The error of evaluating one element in fp32: some 16 roundings, and what rounding the argument
/// of e^x costs: that argument (at most 1.6 |x| + 0.08 |x|^3 or x^2) times its own roundings. The
/// terms count, not their sums: of f' = s + x s' they are at most |f'| + 2.
Element element(const ActivationProblem& p, double gate, double up) {
  Element e{};
  activations::All::visit(p.kind, [&]<class Row>(Row) {
    const double x = std::abs(gate);
    const int64_t operations = 16 + int64_t(10 * x + 2 * x * x + x * x * x);
    const double factor = info(p.kind).gated ? std::abs(up) + p.constants.offset : 1;
    e.want = Row::backward(gate, up, 1.0, p.constants);
    const auto plain = Row::backward(gate, 1.0, 1.0, p.constants);
    e.value_error = gamma(operations, std::abs(plain.value) * factor);
    e.dgate_error = gamma(operations, (std::abs(plain.dgate) + 2) * factor);
    e.dup_error = gamma(operations, std::abs(e.want.dup));
  });
  return e;
}

struct Bounds {
  std::vector<double> h, dz, dprob;
};

/// Bounds of |fast - reference| for every element, both rounded to their dtype once.
Bounds bounds(const Case& c, const Case& want) {
  const bool gated = info(c.p.kind).gated;
  Bounds b{std::vector<double>(size_t(c.used() * c.p.features)),
           std::vector<double>(size_t(c.used() * c.z.columns())),
           std::vector<double>(size_t(c.used()))};
  for (int64_t r = 0; r < c.used(); ++r) {
    const double prob = c.p.prob ? c.prob.at(r) : 1;
    double magnitude = 0, error = 0;
    for (int64_t f = 0; f < c.p.features; ++f) {
      const auto at = gated ? activations::glu_columns(c.p.layout, f, c.p.features)
                            : activations::GluColumns{f, f};
      const Element e = element(c.p, c.z.at(r, at.gate), c.z.at(r, at.up));
      const double dh = c.p.backward ? std::abs(c.dh.at(r, f)) : 0, scaled = dh * prob;
      b.h[size_t(r * c.p.features + f)] = prob * e.value_error +
                                          gamma(1, prob * std::abs(e.want.value)) +
                                          2 * rounding(c.p.h, want.h.at(r, f));
      const auto put = [&](int64_t column, double of_one, double value) {
        b.dz[size_t(r * c.z.columns() + column)] = scaled * of_one +
                                                   gamma(3, scaled * std::abs(value)) +
                                                   2 * rounding(c.p.z, want.dz.at(r, column));
      };
      if (c.p.backward) put(at.gate, e.dgate_error, e.want.dgate);
      if (c.p.backward && gated) put(at.up, e.dup_error, e.want.dup);
      magnitude += dh * std::abs(e.want.value);
      error += dh * e.value_error;
    }
    b.dprob[size_t(r)] = error + gamma(c.p.features / 32 + 8, magnitude + error);
  }
  return b;
}

std::vector<double> first_rows(const Tensor& t, int64_t rows) {
  std::vector<double> all = t.values();
  all.resize(size_t(rows * t.columns()));
  return all;
}

void expect_tail(const Case& c, const Tensor& t) {
  if (c.p.tail == Tail::kKeep) {
    EXPECT_TRUE(t.untouched(c.used(), t.rows())) << to_string(c.p);
    return;
  }
  for (int64_t r = c.used(); r < c.p.rows; ++r)
    for (int64_t column = 0; column < t.columns(); ++column)
      EXPECT_EQ(t.at(r, column), 0) << to_string(c.p);
}

void check(const ActivationProblem& p, int64_t used, unsigned seed) {
  Case want(p, used, seed), got(p, used, seed);
  want.on_cpu("cpu_reference");
  got.on_cpu("cpu");
  const Bounds b = bounds(got, want);
  const auto compare = [&](const Tensor& g, const Tensor& w, const std::vector<double>& bound) {
    const std::string seen =
        test::difference(first_rows(g, used), first_rows(w, used), bound, g.columns());
    EXPECT_EQ(seen, "") << to_string(p);
    expect_tail(got, g);
    expect_tail(want, w);
  };
  compare(got.h, want.h, b.h);
  if (!p.backward) return;
  compare(got.dz, want.dz, b.dz);
  if (!p.prob) return;
  std::vector<double> g, w;
  for (int64_t r = 0; r < used; ++r) g.push_back(got.dprob.at(r)), w.push_back(want.dprob.at(r));
  EXPECT_EQ(test::difference(g, w, b.dprob, 1), "") << to_string(p);
  for (int64_t r = used; r < p.rows; ++r)
    for (const Case* c : {&got, &want})
      EXPECT_TRUE(p.tail == Tail::kZero ? c->dprob.at(r) == 0 : std::isnan(c->dprob.at(r)));
}

struct EveryActivation : testing::TestWithParam<ActivationInfo> {};

TEST_P(EveryActivation, FastIsReferenceWithinTheBound) {
  constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16, kF16 = DType::kF16;
  constexpr std::pair<DType, DType> kTypes[] = {
      {kF32, kF32}, {kBf16, kBf16}, {kF16, kF16}, {kBf16, kF32}, {kF32, kF16}};
  unsigned seed = 1;
  for (GluLayout layout : {GluLayout::kConcat, GluLayout::kInterleave1, GluLayout::kInterleave32})
    for (int64_t features : {1, 7, 32, 96, 100})
      for (const auto& [z, h] : kTypes) {
        if (layout == GluLayout::kInterleave32 && features % 32 != 0) continue;
        if (layout != GluLayout::kConcat && !GetParam().gated) continue;
        ActivationProblem p{.kind = GetParam().kind,
                            .layout = layout,
                            .rows = 11,
                            .features = features,
                            .experts = 3,
                            .z = z,
                            .h = h};
        if (p.kind == ActivationKind::kClampedSwiGlu) p.constants = {4.5f, 1.25f, 0.5f};
        for (bool backward : {false, true}) {
          p.backward = backward;
          p.prob = seed % 3 != 0;
          p.tail = seed % 2 == 0 ? Tail::kZero : Tail::kKeep;
          check(p, int64_t(seed % 12), seed);  // from no rows to all
          ++seed;
        }
      }
}

TEST_P(EveryActivation, OfNoRowsDoesNothing) {
  for (bool backward : {false, true}) {
    const ActivationProblem p{
        .backward = backward, .kind = GetParam().kind, .rows = 0, .features = 32, .prob = true};
    check(p, 0, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(List, EveryActivation, testing::ValuesIn(activations::All::kInfo),
                         [](const auto& given) { return std::string(given.param.name); });

/// sum over h * dh by the reference, in f32: what backward differentiates.
double loss(const Case& c, const Tensor& z, const Tensor& prob) {
  Case probe = c;
  probe.p.backward = false;
  probe.z = z;
  probe.prob = prob;
  probe.clear();
  probe.on_cpu("cpu_reference");
  double sum = 0;
  for (int64_t r = 0; r < c.used(); ++r)
    for (int64_t f = 0; f < c.p.features; ++f) sum += probe.h.at(r, f) * c.dh.at(r, f);
  return sum;
}

TEST(Activation, GradientsAreTheLimitOfDifferences) {
  // Steps of 2^-8 in f32 tensors: h carries 24 bits, so a difference is good to 1e-4.
  const double step = 0x1p-8;
  for (GluLayout layout : {GluLayout::kConcat, GluLayout::kInterleave1, GluLayout::kInterleave32}) {
    const ActivationProblem p{.backward = true,
                              .layout = layout,
                              .rows = 2,
                              .features = 32,
                              .experts = 2,
                              .z = DType::kF32,
                              .h = DType::kF32,
                              .prob = true};
    Case c(p, 2, 5);
    c.on_cpu("cpu");
    for (int64_t column = 0; column < 64; ++column) {
      Tensor above = c.z, below = c.z;
      above.set({1, column}, c.z.at(1, column) + step);
      below.set({1, column}, c.z.at(1, column) - step);
      const double slope = (loss(c, above, c.prob) - loss(c, below, c.prob)) / (2 * step);
      EXPECT_NEAR(c.dz.at(1, column), slope, 2e-3) << column;
    }
    Tensor above = c.prob, below = c.prob;
    above.set({1}, c.prob.at(1) + step);
    below.set({1}, c.prob.at(1) - step);
    const double slope = (loss(c, c.z, above) - loss(c, c.z, below)) / (2 * step);
    EXPECT_NEAR(c.dprob.at(1), slope, 2e-2);
  }
}

TEST(Activation, BackwardLeavesOutWhatIsNotAskedFor) {
  const ActivationProblem p{.backward = true, .rows = 5, .features = 33, .prob = true};
  for (const char* name : {"cpu", "cpu_reference"}) {
    Case all(p, 4, 3), some(p, 4, 3);
    some.wants_h = some.wants_dprob = false;
    all.on_cpu(name);
    some.on_cpu(name);
    EXPECT_TRUE(some.h.untouched(0, 5));
    EXPECT_TRUE(std::isnan(some.dprob.at(0)));
    EXPECT_EQ(some.dz.bytes(), all.dz.bytes());
  }
}

TEST(Activation, GradientMayOverwriteItsInput) {
  for (ActivationKind kind : {ActivationKind::kSwiGlu, ActivationKind::kSilu})
    for (GluLayout layout : {GluLayout::kConcat, GluLayout::kInterleave1})
      for (const char* name : {"cpu", "cpu_reference"}) {
        if (kind == ActivationKind::kSilu && layout != GluLayout::kConcat) continue;
        const ActivationProblem p{
            .backward = true, .kind = kind, .layout = layout, .rows = 9, .features = 77};
        Case apart(p, 7, 3), over(p, 7, 3);
        over.dz_is_z = true;
        apart.on_cpu(name);
        over.on_cpu(name);
        for (int64_t r = 0; r < 7; ++r)
          for (int64_t c = 0; c < apart.z.columns(); ++c)
            ASSERT_EQ(over.z.at(r, c), apart.dz.at(r, c)) << to_string(p) << " on " << name;
      }
}

TEST(Activation, BackwardRecomputesTheBitsOfForward) {
  ActivationProblem p{.rows = 9, .features = 77, .h = DType::kF32, .prob = true};
  Case forward(p, 9, 4);
  forward.on_cpu("cpu");
  p.backward = true;
  Case backward(p, 9, 4);
  backward.on_cpu("cpu");
  EXPECT_EQ(backward.h.bytes(), forward.h.bytes());
}

TEST(Activation, DoesNotDependOnTheThreads) {
  const ActivationProblem p{.backward = true, .rows = 101, .features = 95, .prob = true};
  Case want(p, 99, 6);
  {
    const test::Threads one(1);
    want.on_cpu("cpu");
  }
  for (int threads : {2, 3, 5}) {
    const test::Threads set(threads);
    Case got(p, 99, 6);
    got.on_cpu("cpu");
    EXPECT_EQ(got.dz.bytes(), want.dz.bytes());
    EXPECT_EQ(got.h.bytes(), want.h.bytes());
    EXPECT_EQ(got.dprob.bytes(), want.dprob.bytes());
  }
}

TEST(Activation, RowsDoNotDependOnEachOther) {
  const ActivationProblem p{.rows = 8, .features = 40, .h = DType::kF32};
  Case all(p, 8, 7), one(p, 8, 7);
  all.on_cpu("cpu");
  one.offsets[1] = 1;
  one.on_cpu("cpu");
  for (int64_t f = 0; f < p.features; ++f) EXPECT_EQ(one.h.at(0, f), all.h.at(0, f));
}

TEST(Activation, BrokenOffsetsStayInside) {
  for (int32_t end : {-1, -2147483647, 6, 2147483647})
    for (const char* name : {"cpu", "cpu_reference"})
      for (Tail tail : {Tail::kKeep, Tail::kZero}) {
        Case c({.rows = 5, .features = 8, .tail = tail}, 5, 8);
        c.offsets[1] = end;
        c.on_cpu(name);  // sees its canaries
      }
}

TEST(ActivationList, NamesParseBack) {
  for (const ActivationInfo& row : activations::All::kInfo) {
    EXPECT_EQ(parse_activation(row.name), row.kind);
    EXPECT_EQ(&info(row.kind), &activation_list()[size_t(row.kind)]);
    EXPECT_FALSE(row.formula.empty());
  }
}

TEST(ActivationList, UnknownNamesListTheKnown) {
  EXPECT_EQ(test::invalid([] { parse_activation("swish"); }),
            "activation: name is 'swish', must be one of " + test::names(activation_list()));
  EXPECT_EQ(test::names(activation_list()).find("swiglu, geglu, geglu_tanh, reglu, "), 0u);
}

TEST(ActivationProblem, PrintsAndParsesBack) {
  ActivationProblem p{.rows = 8192, .features = 2048, .experts = 64, .prob = true};
  EXPECT_EQ(to_string(p), "activation forward swiglu R=8192 F=2048 E=64 z=bf16 h=bf16 prob=yes");
  EXPECT_EQ(parse_activation_problem(to_string(p)), p);
  p = {.backward = true,
       .kind = ActivationKind::kClampedSwiGlu,
       .constants = {.limit = 7.5f, .alpha = 1.1f, .offset = 0},
       .layout = GluLayout::kInterleave32,
       .rows = 5,
       .features = 64,
       .z = DType::kF32,
       .h = DType::kF16,
       .tail = Tail::kZero};
  EXPECT_EQ(to_string(p),
            "activation backward clamped_swiglu R=5 F=64 E=1 layout=interleave32 z=f32 h=f16 "
            "limit=7.5 alpha=1.1 offset=0 tail=zero");
  EXPECT_EQ(parse_activation_problem(to_string(p)), p);
}

std::string plan_error(std::string_view words) {
  return test::invalid([&] { plan(parse_activation_problem(words), this_cpu()); });
}

/// The message without the problem behind it.
std::string head(const std::string& message) { return message.substr(0, message.rfind(" [")); }

TEST(ActivationErrors, OfProblems) {
  EXPECT_EQ(plan_error("activation forward silu R=4 F=0"),
            "activation: F is 0, must be 1 or more [activation forward silu R=4 F=0 E=1 z=bf16 "
            "h=bf16]");
  EXPECT_EQ(head(plan_error("activation forward silu R=2147483648 F=1")),
            "activation: R is 2147483648, must be below 2^31; rows are numbered in int32");
  EXPECT_EQ(head(plan_error("activation forward silu R=4 F=4 E=0")),
            "activation: E is 0, must be 1 or more");
  EXPECT_EQ(head(plan_error("activation forward silu R=4 F=4 z=e4m3")),
            "activation: z is e4m3, must be f32, bf16 or f16");
  EXPECT_EQ(head(plan_error("activation forward silu R=4 F=4 h=i32")),
            "activation: h is i32, must be f32, bf16 or f16");
  EXPECT_EQ(head(plan_error("activation forward silu R=4 F=32 layout=interleave1")),
            "activation: layout is interleave1, must be concat; an ungated activation has one "
            "input");
  EXPECT_EQ(head(plan_error("activation forward swiglu R=4 F=33 layout=interleave32")),
            "activation: F is 33, must be a multiple of 32; layout interleave32 comes in blocks "
            "of 32");
  EXPECT_EQ(head(plan_error("activation forward swiglu R=4 F=4 limit=3")),
            "problem: limit is 3, must be absent; only clamped_swiglu has constants");
  EXPECT_EQ(head(test::invalid([] {
              ActivationProblem p{.kind = ActivationKind::kSwiGlu, .rows = 4, .features = 4};
              p.constants.limit = 3;
              plan(p, this_cpu());
            })),
            "activation: limit, alpha, offset are 3, 1.702, 1, must be the defaults; only "
            "clamped_swiglu has constants");
  EXPECT_EQ(head(plan_error("activation forward clamped_swiglu R=4 F=4 limit=0")),
            "activation: limit is 0, must be above 0 and finite");
  EXPECT_EQ(plan_error("activation sideways swiglu"),
            "problem: direction is 'sideways', must be one of forward, backward");
  ActivationProblem p{.rows = -1, .features = 4};
  EXPECT_EQ(head(test::invalid([&] { plan(p, this_cpu()); })),
            "activation: R is -1, must be 0 or more");
  p = {.kind = ActivationKind::kClampedSwiGlu, .rows = 1, .features = 4};
  p.constants.alpha = INFINITY;
  EXPECT_EQ(head(test::invalid([&] { plan(p, this_cpu()); })),
            "activation: alpha is inf, must be finite");
  p.constants = {.offset = NAN};
  EXPECT_EQ(head(test::invalid([&] { plan(p, this_cpu()); })),
            "activation: offset is nan, must be finite");
}

struct ActivationArgsErrors : testing::Test {
  float data[64] = {};
  int32_t offsets[2] = {0, 3};
  ActivationProblem p{.rows = 3, .features = 4, .z = DType::kF32, .h = DType::kF32, .prob = true};
  ActivationArgs args{.z = view(data, DType::kF32, {3, 8}),
                      .prob = data,
                      .offsets = {offsets, 1},
                      .h = view(data + 32, DType::kF32, {3, 4})};

  std::string error() {
    return head(test::invalid([&] { run(plan(p, this_cpu()), args, {}, {}); }));
  }
};

TEST_F(ActivationArgsErrors, Shapes) {
  args.z = view(data, DType::kF32, {3, 4});
  EXPECT_EQ(error(), "activation: z is f32[3, 4], must be f32[3, 8]; gate and up of every feature");
  args.z = view(data, DType::kBf16, {3, 8});
  EXPECT_EQ(error(),
            "activation: z is bf16[3, 8], must be f32[3, 8]; gate and up of every feature");
  p.kind = ActivationKind::kRelu;
  args.z = view(data, DType::kF32, {3, 8});
  EXPECT_EQ(error(), "activation: z is f32[3, 8], must be f32[3, 4]; one column a feature");
  args.z = view(data, DType::kF32, {12});
  EXPECT_EQ(error(), "activation: z is f32[12], must be f32[3, 4]; one column a feature");
}
TEST_F(ActivationArgsErrors, MissingViews) {
  args.h = view(nullptr, DType::kF32, {3, 4});
  EXPECT_EQ(error(), "activation: h is null, must be f32[3, 4]");
  args.h = {};
  EXPECT_EQ(error(), "activation: h is f32[], must be f32[3, 4]");
  p.backward = true;
  EXPECT_EQ(error(), "activation: dh is f32[], must be f32[3, 4]");
  args.dh = view(data, DType::kF32, {3, 4});
  EXPECT_EQ(error(), "activation: dz is f32[], must be f32[3, 8]; gate and up of every feature");
}
TEST_F(ActivationArgsErrors, StridesAndAlignment) {
  args.h = view(data, DType::kF32, {3, 4}, {1, 3});
  EXPECT_EQ(error(),
            "activation: h is f32[3, 4] strides (1, 3), must have rows of stride 1 that do not "
            "overlap; make it contiguous");
  args.h = view(data, DType::kF32, {3, 4}, {0, 1});
  EXPECT_EQ(error(),
            "activation: h is f32[3, 4] strides (0, 1), must have rows of stride 1 that do not "
            "overlap; make it contiguous");
  args.h = view(reinterpret_cast<char*>(data) + 2, DType::kF32, {3, 4});
  EXPECT_EQ(error(), text("activation: h is at ", args.h.data, ", must be aligned to 4 bytes"));
}
TEST_F(ActivationArgsErrors, Probabilities) {
  args.prob = nullptr;
  EXPECT_EQ(error(),
            "activation: prob is null, must point to 3 elements; the problem says prob=yes");
  p.prob = false;
  args.prob = data;
  EXPECT_EQ(error(), "activation: prob is given, must be null; the problem says prob=no");
  args.prob = nullptr;
  args.dprob = data;
  EXPECT_EQ(error(), "activation: dprob is given, must be null; the problem says prob=no");
}
TEST_F(ActivationArgsErrors, BackwardsArgumentsInForward) {
  args.dprob = data;
  EXPECT_EQ(error(), "activation: dprob is given, must be null; only backward writes it");
  args.dz = view(data, DType::kF32, {3, 8});
  EXPECT_EQ(error(), "activation: dz is given, must be null; only backward writes it");
  args.dh = view(data, DType::kF32, {3, 4});
  EXPECT_EQ(error(), "activation: dh is given, must be null; only backward reads it");
}
TEST_F(ActivationArgsErrors, OffsetsOfOtherExperts) {
  args.offsets.experts = 2;
  EXPECT_EQ(error(), "activation: offsets.experts is 2, must be 1; the experts of the problem");
  args.offsets = {nullptr, 1};
  EXPECT_EQ(error(), "activation: offsets.data is null, must point to 2 elements");
}

}  // namespace
