// Layers in every recipe on a machine: outputs are the products of the numbers that the recipe's
// codes stand for, and how a layer runs changes no bit.
#include <gtest/gtest.h>

#include <optional>

#include "formats/bf16.h"
#include "tests/judge/close.h"
#include "tests/judge/on_machine.h"
#include "tests/layers/given_copies.h"
#include "tests/layers/layer_copy.h"
#include "tests/layers/linear_composition.h"
#include "tests/layers/mlp_case.h"
#include "tests/layers/random_layers.h"

using namespace cadre;
using test::byte_difference;
using test::Counts;
using test::first_difference;
using test::LayerCopy;
using test::LinearCase;
using test::LinearResult;
using test::MadeFor;
using test::MlpCase;

namespace {

constexpr int64_t kStep = 8;  // elements between rows, so that TMA takes them

const char* const kRecipes[] = {
    "fp8_tensor",
    "fp8_block",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "fp8_block,wgrad=bf16",
    "nvfp4,wgrad=bf16",
    "bf16,wgrad=fp8_tensor",
    "mxfp8,fprop=mxfp8*mxfp8:2d,dgrad=mxfp8:e5m2*mxfp8:2d",
    "fp8_block,fprop=fp8_block:2d*fp8_block:2d,wgrad=fp8_block*fp8_block:2d",
    "fp8_block,dgrad=fp8_block:fp32*fp8_block:2d+fp32",
    "bf16,fprop=bf16*nvfp4:2d,dgrad=bf16*mxfp8",
};

struct Recipes : test::OnMachine {
  MadeFor here() const { return {machine->device(), kStep}; }
  bool on_gpu() const { return machine->device().kind == DeviceKind::kCuda; }
  /// Where products of codes are summed in other bits than those of decoded operands.
  MadeFor decoding() const {
    MadeFor where = here();
    where.route = "decoded";
    return where;
  }
  bool multiplies_codes(const GroupedLinearProblem& p) const {
    return plan(p, machine->device()).name == "sm90_fp8_rows";
  }
  /// Codes of the caller's are not in these.
  bool has_own_orders(const GroupedLinearProblem& p) const {
    return multiplies_codes(p) && p.recipe.fprop.lhs.kind == FormatKind::kFp8Block;
  }

  /// A step on the machine, and everything back on the host.
  LinearCase stepped(const GroupedLinearProblem& p, const Counts& counts, unsigned seed) {
    return stepped(p, counts, seed, here());
  }
  LinearCase stepped(const GroupedLinearProblem& p, const Counts& counts, unsigned seed,
                     const MadeFor& where) {
    LinearCase c(p, counts, seed, where);
    step(c, seed % 2);
    return c;
  }
  template <class Case>
  void step(Case& c, bool by_queue = false) {
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream, by_queue); });
    copy.memory.fetch();
    EXPECT_EQ(copy.memory.damage() + c.damage(), "") << to_string(c.p());
  }
  /// Fills a tensor of the machine, which has no gaps, with NaN.
  void poison(const TensorView& v) {
    const int64_t bytes = bytes_for(v.dtype, elements(v));
    const std::vector<char> nans(size_t(bytes), '\xff');
    machine->upload(v.data, nans.data(), bytes);
  }
};

/// How many elements differ from the sums in double that were rounded once.
class Agreement {
 public:
  explicit Agreement(std::string what) : what_(std::move(what)) {}

  /// `most` bounds the sum of the magnitudes of an element's terms. Numbers of f32 are rounded to
  /// bf16 first.
  void add(const char* name, const std::vector<double>& got, const std::vector<double>& want,
           double most) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(want[i]) && std::isnan(got[i])) continue;
      const double a = rounded(got[i]), b = rounded(want[i]);
      ++all_;
      different_ += a != b;
      ASSERT_LE(std::abs(a - b), 2 * test::rounding(DType::kBf16, std::abs(b)) + 0x1p-21 * most)
          << name << " element " << i << " of " << what_;
    }
  }
  void expect_one_in_a_thousand() const { EXPECT_LE(different_ * 1000, all_) << what_; }

 private:
  static double rounded(double x) { return formats::Bf16::decode(formats::Bf16::encode(x)); }

  std::string what_;
  int64_t all_ = 0, different_ = 0;
};

const Counts kRowCounts[] = {{.rows = 75, .of = {17, 0, 33, 20}},
                             {.rows = 50, .of = {1, 0, 0, 40}},
                             {.rows = 33, .of = {0, 33}}};

TEST_F(Recipes, OfALinearAreTheProductsOfTheirNumbers) {
  constexpr int64_t kWidths[] = {8, 24, 40, 72, 136};  // nobody multiplies codes of these on GPUs
  const auto problems = unsigned(std::max(machine->draws(60), 3));
  for (const char* recipe : kRecipes) {
    Agreement agreement(recipe);
    for (unsigned seed = 0; seed < problems; ++seed) {
      const Counts& counts = kRowCounts[seed % std::size(kRowCounts)];
      GroupedLinearProblem p = test::random_linear(counts, seed, kWidths);
      p.recipe = parse_recipe(recipe);
      p.return_bias = false;
      p.wgrad = p.dgrad = true;
      if (seed % 4) p.dtype = p.parameters.weight = p.parameters.dw = DType::kBf16;
      p.options.amax_eps = seed % 2 ? 0.23f : 0;  // no scale is a power of two by chance
      const LinearCase got = stepped(p, counts, seed);
      LinearCase want(p, counts, seed);
      test::LinearComposition(want).run("cpu_reference");
      const LinearResult a(got), b(want);
      agreement.add("y", a.y, b.y, 4.0 * double(p.k));
      agreement.add("dx", a.dx, b.dx, 2.0 * double(p.n));
      agreement.add("dw", a.dw, b.dw, 2.0 * double(p.rows));
    }
    agreement.expect_one_in_a_thousand();
  }
}

/// Named recipes whose products Hopper has on its 8-bit tensor cores.
bool is_of_codes(const Recipe& recipe) {
  return recipe == parse_recipe("fp8_block") || recipe == parse_recipe("fp8_tensor");
}

/// A linear with gradients of everything, whose codes Hopper multiplies where it can.
GroupedLinearProblem linear_in(const char* recipe, int64_t rows, int experts) {
  GroupedLinearProblem p{.rows = rows, .n = 72, .k = 40, .experts = experts};
  p.recipe = parse_recipe(recipe);
  if (is_of_codes(p.recipe)) p.n = 144, p.k = 48;
  p.bias = true;
  p.parameters.dw = DType::kF32;
  p.options.accumulate = Accumulate::kPerExpert;
  return p;
}

TEST_F(Recipes, HowALinearRunsChangesNoBit) {
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  for (const char* recipe : kRecipes) {
    const GroupedLinearProblem p = linear_in(recipe, 75, 4);
    const LinearResult want(stepped(p, counts, 3));
    const auto all = unsigned(machine->draws(31));
    for (unsigned mask = 1; mask < 32; mask += 31 / std::min(all, 31u)) {
      GroupedLinearProblem other = p;
      other.options.deferred = mask & 1;
      other.options.save_input = (mask & 2) && !p.recipe.wgrad.rhs.stochastic;
      other.options.cache_weights = mask & 4;
      other.parameters.discrete_weight = mask & 8;
      other.parameters.discrete_dw = mask & 16;
      EXPECT_EQ(first_difference(LinearResult(stepped(other, counts, 3)), want), "")
          << to_string(other);
    }
  }
}

/// A linear whose x comes as codes.
struct GivenCase : LinearCase {
  test::GivenCopies copies;

  GivenCase(const GroupedLinearProblem& p, const Counts& c, unsigned seed, const MadeFor& where)
      : LinearCase(p, c, seed, where), copies(p.recipe, x, {offsets.data(), p.experts}) {}

  GroupedLinearArgs args() {
    GroupedLinearArgs a = LinearCase::args();
    a.x_along_k = copies.along_k;
    a.x_along_rows = copies.along_rows;
    return a;
  }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    LinearCase::for_pieces(visit);
    for (const test::OwnedWorkspace* w : {&copies.along_k_bytes, &copies.along_rows_bytes}) {
      test::Piece piece = test::piece("x as codes", *w);
      piece.holds = test::Holds::kInput;
      visit(piece);
    }
  }
};

TEST_F(Recipes, CodesOfTheCallerHaveTheBitsOfOwnOnes) {
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "nvfp4,wgrad=mxfp8",
                             "fp8_block,wgrad=bf16", "bf16,wgrad=mxfp8"})
    for (const bool deferred : {false, true}) {
      GroupedLinearProblem p = linear_in(recipe, 75, 4);
      p.options.deferred = p.options.cache_weights = deferred;
      LinearResult want(stepped(p, counts, 8));
      if (has_own_orders(p)) want.y = LinearResult(stepped(p, counts, 8, decoding())).y;
      p.options.quantized_x = true;
      GivenCase got(p, counts, 8, here());
      step(got);
      EXPECT_EQ(first_difference(LinearResult(got), want), "") << to_string(p);
    }
}

/// Rows of other experts, and how many there are, change no bit of an expert's own.
TEST_F(Recipes, AnExpertsBitsDoNotDependOnTheOthers) {
  const Counts counts{.rows = 90, .of = {17, 20, 33, 20}};
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    const GroupedLinearProblem p = linear_in(recipe, 90, 4);
    const LinearResult one(stepped(p, counts, 4));
    LinearCase other(p, {.rows = 90, .of = {30, 7, 33, 20}}, 4, here());
    for (int64_t r = 0; r < 90; ++r) {  // rows of the third expert stay where they are
      if (r >= 37 && r < 70) continue;
      for (int64_t k = 0; k < p.k; ++k) other.x.set({r, k}, 900);
      for (int64_t n = 0; n < p.n; ++n) other.dy.set({r, n}, -300);
    }
    step(other);
    const LinearResult two(other);
    const auto same = [&](const std::vector<double>& a, const std::vector<double>& b, int64_t first,
                          int64_t last, const char* what) {
      const auto part = [&](const std::vector<double>& all) {
        return std::vector<double>(all.begin() + first, all.begin() + last);
      };
      EXPECT_EQ(first_difference(part(b), part(a)), "") << what << " in " << recipe;
    };
    same(one.y, two.y, 37 * p.n, 70 * p.n, "y");
    same(one.dx, two.dx, 37 * p.k, 70 * p.k, "dx");
    const int64_t each = p.n * p.k;
    if (parse_recipe(recipe).wgrad.lhs.stochastic) continue;
    same(one.dw, two.dw, 2 * each, 3 * each, "dw");
  }
}

/// A weight cache that is not refreshed is read as it is.
TEST_F(Recipes, CachedWeightsOutliveTheirTensor) {
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  for (const char* recipe : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"}) {
    GroupedLinearProblem p = linear_in(recipe, 75, 4);
    p.options.cache_weights = true;
    p.options.accumulate = Accumulate::kNo;
    LinearCase c(p, counts, 5, here());
    LayerCopy copy(*machine, c);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory.fetch();
    const LinearResult want(c);
    c.refresh_weights = false;
    const GroupedLinearArgs args = copy.memory.moved(c.args());
    poison(args.parameters.w);
    machine->run([&](Stream stream) { copy.step(stream); });
    copy.memory.fetch();
    EXPECT_EQ(first_difference(LinearResult(c), want), "") << recipe;
  }
}

TEST_F(Recipes, OfALinearReplayWithOtherData) {
  for (const char* recipe : {"mxfp8", "nvfp4", "fp8_tensor", "fp8_block"}) {
    GroupedLinearProblem p = linear_in(recipe, 75, 4);
    p.options.deferred = p.options.cache_weights = true;
    const Counts before{.rows = 75, .of = {17, 0, 33, 20}}, after{.rows = 75, .of = {0, 40, 1, 34}};
    LinearCase first(p, before, 6, here()), second(p, after, 7, here());
    const LinearCase want = stepped(p, after, 7);
    LayerCopy live(*machine, first), own(*machine, second);
    const auto graph = machine->record([&](Stream stream) { live.step(stream, false); });
    live.memory.upload_from(own.memory);
    graph->replay();
    own.memory.fetch_from(live.memory);
    EXPECT_EQ(byte_difference(second, want), "") << recipe;
  }
}

/// |got - want| of that of want.
double distance(const std::vector<double>& got, const std::vector<double>& want) {
  double apart = 0, all = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    apart += (got[i] - want[i]) * (got[i] - want[i]);
    all += want[i] * want[i];
  }
  return apart == 0 ? 0 : std::sqrt(apart / all);
}

/// Other orders of sums move a few codes of h and dz by a step, on any device.
TEST_F(Recipes, OfAnMlpAreNearThoseOfTheCpu) {
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  for (const RecipeInfo& row : recipe_list()) {
    GroupedMlpProblem p{.rows = 75, .hidden = 40, .features = 72, .experts = 4};
    p.recipe = row.recipe;
    if (is_of_codes(p.recipe)) p.hidden = 48, p.features = 80;
    p.prob = p.bias1 = p.bias2 = true;
    p.parameters.dw = DType::kF32;
    p.options.deferred = &row == &recipe_list().back();
    MlpCase want(p, counts, 9), got(p, counts, 9, here());
    want.step();
    step(got);
    const auto a = test::MlpResult(got).parts, b = test::MlpResult(want).parts;
    for (size_t i = 0; i < b.size(); ++i)
      EXPECT_LE(distance(a[i].second, b[i].second), 0x1p-6) << a[i].first << " in " << row.name;
  }
}

/// Sums of fewer bits, but of the same codes as of decoded operands.
TEST_F(Recipes, MultiplyCodesOnHopper) {
  if (machine->device().sm != 90) GTEST_SKIP() << "no GPU of Hopper here";
  const Counts counts{.rows = 75, .of = {17, 0, 33, 20}};
  for (const char* recipe : {"fp8_block", "fp8_tensor", "fp8_tensor,dgrad=fp8_tensor*fp8_tensor",
                             "fp8_block,dgrad=fp8_block:fp32*fp8_block:2d",
                             "fp8_block,dgrad=fp8_block:e5m2*fp8_block:2d,wgrad=bf16"}) {
    GroupedLinearProblem p = linear_in(recipe, 75, 4);
    p.n = 144, p.k = 272;
    ASSERT_TRUE(multiplies_codes(p));
    const LinearResult want(stepped(p, counts, 3, decoding()));
    std::optional<LinearResult> first;
    for (unsigned mask = 0; mask < 16; mask += 5) {
      p.options.deferred = mask & 1;
      p.options.cache_weights = mask & 2;
      p.parameters.discrete_weight = mask & 4;
      p.options.save_input = mask & 8;
      const LinearResult got(stepped(p, counts, 3));
      EXPECT_LE(distance(got.y, want.y), 0x1p-8);
      EXPECT_LE(distance(got.dx, want.dx), 0x1p-8);
      EXPECT_EQ(got.dw == want.dw, true);
      if (first) {
        EXPECT_EQ(first_difference(got, *first), "") << to_string(p);
      }
      first = got;
    }
  }
}

TEST_F(Recipes, SayHowTheirProductsRun) {
  const auto route = [&](const char* recipe) {
    return plan(linear_in(recipe, 4096, 8), machine->device()).name;
  };
  EXPECT_EQ(route("bf16"), "direct");
  EXPECT_EQ(route("nvfp4"), on_gpu() ? "decoded" : "quantized");
  if (machine->device().sm != 90) return;
  const GroupedLinearPlan made = plan(linear_in("nvfp4", 4096, 8), machine->device());
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "multiply")->name, "sm90_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dx")->name, "sm90_ragged_rows");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dw")->name, "sm90_ragged_contraction");
  EXPECT_EQ(route("fp8_block"), "sm90_fp8_rows");
  EXPECT_EQ(route("fp8_tensor"), "sm90_fp8_rows");
  const GroupedLinearPlan older = plan(linear_in("fp8_block", 4096, 8), parse_device("sm_80"));
  EXPECT_EQ(older.name, "decoded");
  EXPECT_EQ(older.refusals.size(), 2u);  // direct, quantized
}

TEST_F(Recipes, DecodeAtOnceWhatOneBackwardWritesAndReads) {
  GroupedMlpProblem p{.rows = 4096, .hidden = 64, .features = 128, .experts = 8};
  const auto decodes = [](const GroupedLinearPlan& linear, std::string_view step) {
    return find_step<DequantizePlan>(linear, step) != nullptr;
  };
  for (const auto& [recipe, deferred] :
       {std::pair("mxfp8", false), {"mxfp8", true}, {"fp8_block", false}, {"fp8_block", true}}) {
    p.recipe = parse_recipe(recipe);
    p.options.deferred = deferred;
    const GroupedMlpPlan made = plan(p, machine->device());
    const bool later = deferred && on_gpu();
    EXPECT_EQ(decodes(made.fc1, "decode dy along rows"), later);
    EXPECT_EQ(decodes(made.fc2, "decode dy along rows"), later);
    EXPECT_EQ(decodes(made.fc2, "decode x along rows"), later);     // h, quantised again
    EXPECT_EQ(decodes(made.fc1, "decode x along rows"), on_gpu());  // it was saved
  }
}

/// The kernels of bf16 want numbers, but what waits for backward is codes.
TEST_F(Recipes, KeepCodesFromForwardToBackward) {
  const GroupedLinearPlan made = plan(linear_in("mxfp8", 4096, 8), machine->device());
  EXPECT_LT(bytes_per_token(kept(made), 4096), 1.2 * 40);
  EXPECT_LT(made.memory.saved_bytes, 4096 * 40 * 6 / 5);
  GroupedLinearProblem deferred = linear_in("nvfp4", 4096, 8);
  deferred.options.deferred = true;
  EXPECT_LT(plan(deferred, machine->device()).memory.pending_bytes, 4096 * 72);
}

}  // namespace
