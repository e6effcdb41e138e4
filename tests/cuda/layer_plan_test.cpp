// Which layers have a plan on Hopper, what is said of the others, and that a layer refuses
// arguments before it launches anything. Needs no GPU: plans are values.
#include <gtest/gtest.h>

#include "cadre/moe.h"
#include "cadre/sequential.h"
#include "tests/judge/errors.h"
#include "tests/layers/mlp_case.h"
#include "tests/layers/row_case.h"

using namespace cadre;
using test::Counts;
using test::invalid;
using test::LinearCase;
using test::MlpCase;
using test::unsupported;

namespace {

const Counts kCounts{.rows = 20, .of = {7, 0, 11}};

test::MadeFor hopper() { return {parse_device("sm_90"), 8}; }

GroupedLinearProblem linear(std::string_view recipe) {
  GroupedLinearProblem p{.rows = 20, .n = 24, .k = 16, .experts = 3};
  p.recipe = parse_recipe(recipe);
  p.bias = true;
  return p;
}
GroupedMlpProblem mlp(std::string_view recipe) {
  GroupedMlpProblem p{.rows = 20, .hidden = 16, .features = 32, .experts = 3};
  p.recipe = parse_recipe(recipe);
  p.prob = p.bias1 = p.bias2 = p.bias2_scale = true;
  return p;
}

constexpr std::string_view kCodes = "sm90_fp8_rows";

std::string_view product(const GroupedLinearPlan& plan, std::string_view step) {
  return find_step<GroupedGemmPlan>(plan, step)->name;
}
/// "direct, quantized", the routes that came before.
std::string refused(const LayerPlan& plan) {
  std::string names;
  for (const Refusal& r : plan.refusals) names += text(names.empty() ? "" : ", ", r.name);
  return names;
}

TEST(LayerPlan, MultipliesCodesWhereItCan) {
  GroupedLinearProblem p = linear("fp8_block");
  p.n = 32;
  const GroupedLinearPlan made = plan(p, hopper().device);
  EXPECT_EQ(made.name, kCodes);
  EXPECT_EQ(refused(made), "direct, quantized");
  EXPECT_EQ(product(made, "multiply"), kCodes);
  EXPECT_EQ(product(made, "dx"), kCodes);
  EXPECT_EQ(product(made, "dw"), "sm90_ragged_contraction");
  const auto writes = [&](std::string_view step) -> const QuantizeProblem& {
    return find_step<QuantizePlan>(made, step)->problem;
  };
  EXPECT_EQ(writes("quantize x").along_k_scales_major, Major::kColumn);
  EXPECT_EQ(writes("quantize dy").along_k_scales_major, Major::kColumn);
  EXPECT_EQ(writes("quantize w again").along_rows_codes_major, Major::kColumn);
  p.n = 24;  // no contraction of dgrad
  const GroupedLinearPlan half = plan(p, hopper().device);
  EXPECT_EQ(half.name, kCodes);
  EXPECT_EQ(product(half, "multiply"), kCodes);
  EXPECT_EQ(product(half, "dx"), "sm90_ragged_rows");
  p.k = 24;
  const GroupedLinearPlan none = plan(p, hopper().device);
  EXPECT_EQ(none.name, "decoded");
  EXPECT_EQ(refused(none), "direct, quantized, sm90_fp8_rows");
  EXPECT_EQ(none.refusals.back().why, "it takes no product that others do not take");
}

/// Scales of experts have no order, so that fprop takes codes of the caller too.
TEST(LayerPlan, MultipliesCodesOfExperts) {
  GroupedLinearProblem p = linear("fp8_tensor");
  p.n = 32;
  const GroupedLinearPlan made = plan(p, hopper().device);
  EXPECT_EQ(made.name, kCodes);
  EXPECT_EQ(refused(made), "direct, quantized");
  EXPECT_EQ(product(made, "multiply"), kCodes);
  EXPECT_EQ(product(made, "dx"), kCodes);
  EXPECT_EQ(product(made, "dw"), "sm90_ragged_contraction");
  EXPECT_EQ(find_tensor(made, "dy along K")->shape.scales_major, Major::kRow);
  EXPECT_EQ(find_tensor(made, "w along K")->shape.codes_major, Major::kRow);
  EXPECT_EQ(find_tensor(made, "w along rows")->shape.codes_major, Major::kColumn);
  for (const char* step : {"y scales", "dx scales"})
    EXPECT_EQ(find_step<ScaleProduct>(made, step), nullptr) << step;
  EXPECT_NE(find_step<ScaleProduct>(made, "dw scales"), nullptr);
  GroupedLinearProblem given = p;
  given.options.quantized_x = true;
  EXPECT_EQ(product(plan(given, hopper().device), "multiply"), kCodes);
  const GroupedLinearPlan decoded = plan(p, hopper().device, "decoded");
  for (const char* step : {"multiply", "dx"})
    EXPECT_EQ(product(decoded, step), "sm90_ragged_rows") << step;
  p.n = 24;  // no contraction of dgrad
  const GroupedLinearPlan half = plan(p, hopper().device);
  EXPECT_EQ(half.name, kCodes);
  EXPECT_EQ(product(half, "multiply"), kCodes);
  EXPECT_EQ(product(half, "dx"), "sm90_ragged_rows");
  p.dgrad = p.wgrad = false;
  const GroupedLinearPlan forward = plan(p, hopper().device);
  EXPECT_EQ(forward.name, "quantized");
  EXPECT_EQ(product(forward, "multiply"), kCodes);
}

TEST(LayerPlan, ReadsCodesOfXThatLieAsItOrdersThem) {
  GroupedMlpProblem given{.rows = 4096, .hidden = 128, .features = 256, .experts = 4};
  given.recipe = parse_recipe("fp8_block,wgrad=bf16");
  given.given_x_along_k = true;
  const GroupedMlpPlan made = plan(given, hopper().device);
  EXPECT_EQ(made.name, "codes");
  EXPECT_EQ(product(made.fc1, "multiply"), kCodes);
  EXPECT_EQ(find_step<QuantizePlan>(made.fc1, "quantize x"), nullptr);
  EXPECT_EQ(find_tensor(made.fc1, "x along K")->shape.scales_major, Major::kColumn);
}

TEST(LayerPlan, DecodesCodesOfXThatTheCallerOrdered) {
  GroupedLinearProblem given = linear("fp8_block");
  given.n = 32;
  given.options.quantized_x = given.options.cache_weights = true;
  const GroupedLinearPlan made = plan(given, hopper().device);
  EXPECT_EQ(product(made, "multiply"), "sm90_ragged_rows");
  EXPECT_EQ(product(made, "dx"), kCodes);
  EXPECT_EQ(find_tensor(made, "x along K")->shape.scales_major, Major::kRow);
  const QuantizedShape& numbers = find_tensor(made, "w along K")->shape;
  const QuantizedShape& codes = find_tensor(made, "w along rows")->shape;
  EXPECT_TRUE(numbers.decoded && !codes.decoded);
  EXPECT_EQ(codes.codes_major, Major::kColumn);
  EXPECT_EQ(made.memory.weight_cache_bytes, quantized_bytes(numbers) + quantized_bytes(codes));
}

/// Other devices and recipes do not hear of the kernel's route, unless they ask for it.
TEST(LayerPlan, IsAsBeforeWhereNobodyMultipliesCodes) {
  for (const char* device : {"sm_80", "sm_100"}) {
    const GroupedLinearPlan made = plan(linear("fp8_block"), parse_device(device));
    EXPECT_EQ(made.name, "decoded") << device;
    EXPECT_EQ(refused(made), "direct, quantized") << device;
  }
  EXPECT_EQ(plan(linear("fp8_block"), this_cpu()).name, "quantized");
  const std::string why = "sm90_fp8_rows: it takes no product that others do not take";
  const auto named = [](const char* recipe, const Device& device) {
    return unsupported([&] { plan(linear(recipe), device, kCodes); });
  };
  for (const char* recipe : {"mxfp8", "bf16", "bf16,fprop=bf16*fp8_block:2d",
                             "fp8_tensor,fprop=fp8_tensor*mxfp8,dgrad=fp8_tensor*fp8_tensor:e5m2",
                             "fp8_block,fprop=fp8_block:2d*fp8_block:2d,dgrad=fp8_block*nvfp4",
                             "fp8_block,fprop=fp8_block*fp8_block,dgrad=fp8_block*fp8_block"})
    EXPECT_NE(named(recipe, hopper().device).find(why), std::string::npos) << recipe;
  for (const Device& device : {this_cpu(), parse_device("sm_80")})
    EXPECT_NE(named("fp8_block", device).find(why), std::string::npos) << to_string(device);
}

/// What wgrad reads in the same backward is decoded at once there too.
void expect_codes_within_layers(std::string_view recipe) {
  const auto expect_codes = [](const GroupedLinearPlan& made, bool waits) {
    EXPECT_EQ(made.name, kCodes);
    EXPECT_EQ(product(made, "multiply"), kCodes);
    EXPECT_EQ(product(made, "dx"), kCodes);
    EXPECT_EQ(find_step<DequantizePlan>(made, "decode dy along rows") != nullptr, waits);
  };
  for (const bool deferred : {false, true}) {
    GroupedMlpProblem p = mlp(recipe);
    p.options.deferred = deferred;
    const GroupedMlpPlan experts = plan(p, hopper().device);
    EXPECT_EQ(experts.name, recipe == "fp8_block" ? "codes" : "unfused");
    expect_codes(experts.fc1, deferred);
    expect_codes(experts.fc2, deferred);
    auto layer =
        parse_moe_problem(text("moe T=20 top_k=2 H=16 F=32 E=3 shared_F=64 recipe=", recipe));
    layer.options.deferred = deferred;
    const MoePlan whole = plan(layer, hopper().device);
    for (const GroupedMlpPlan* part : {&whole.mlp, &whole.shared}) {
      expect_codes(part->fc1, deferred);
      expect_codes(part->fc2, deferred);
    }
    const SequentialPlan row =
        plan(parse_sequential_problem(text("sequential | grouped_linear R=20 N=32 K=16 E=3 recipe=",
                                           recipe, " deferred=", deferred ? "yes" : "no")),
             hopper().device);
    expect_codes(std::get<GroupedLinearPlan>(row.row.at(0).plan), deferred);
  }
}

TEST(LayerPlan, MultipliesCodesWithinLayers) {
  expect_codes_within_layers("fp8_block");
  expect_codes_within_layers("fp8_tensor");
}

/// Where the activation writes codes, the linears quantise neither h nor dz.
struct BetweenSteps {
  bool h, dz;

  explicit BetweenSteps(const GroupedMlpPlan& made)
      : h(writes(made, "activation") && !quantises(made.fc2, "quantize x")),
        dz(writes(made, "activation backward") && !quantises(made.fc1, "quantize dy")) {}

 private:
  static bool writes(const GroupedMlpPlan& made, const char* step) {
    return find_step<ActivationPlan>(made, step)->name == "cuda_activation_codes";
  }
  static bool quantises(const GroupedLinearPlan& linear, const char* step) {
    return find_step<QuantizePlan>(linear, step) != nullptr;
  }
};

TEST(LayerPlan, QuantisesHAndDzInTheActivation) {
  GroupedMlpProblem p = mlp("fp8_block,wgrad=bf16");
  p.features = 128;
  p.hidden = 32;
  const GroupedMlpPlan made = plan(p, hopper().device);
  EXPECT_EQ(made.name, "codes");
  EXPECT_EQ(refused(made), "fused");
  const BetweenSteps both(made);
  EXPECT_TRUE(both.h && both.dz);
  const auto& activation = find_step<ActivationPlan>(made, "activation")->problem;
  EXPECT_EQ(activation.along_k_scales_major, Major::kColumn);
  EXPECT_EQ(product(made.fc2, "multiply"), kCodes);
  EXPECT_EQ(product(made.fc1, "dx"), kCodes);
  p.features = 96;  // a block of dz would have gates and ups
  const BetweenSteps one(plan(p, hopper().device));
  EXPECT_TRUE(one.h && !one.dz);
  p.layout = GluLayout::kInterleave32;
  const BetweenSteps interleaved(plan(p, hopper().device));
  EXPECT_TRUE(interleaved.h && interleaved.dz);
  p.recipe = parse_recipe("fp8_block");
  const BetweenSteps forward(plan(p, hopper().device));  // backward reads dz along rows too
  EXPECT_TRUE(forward.h && !forward.dz);
  p.keep_h = true;
  EXPECT_EQ(plan(p, hopper().device).name, "unfused");
  const auto layer =
      parse_moe_problem("moe T=20 top_k=2 H=32 F=128 E=3 shared_F=128 recipe=fp8_block,wgrad=bf16");
  const MoePlan whole = plan(layer, hopper().device);
  for (const GroupedMlpPlan* part : {&whole.mlp, &whole.shared}) {
    const BetweenSteps inside(*part);
    EXPECT_TRUE(inside.h && inside.dz);
  }
}

TEST(LayerPlan, SaysWhyTheActivationWritesNoCodes) {
  const std::string why =
      "codes: no product reads h or dz in codes along K alone that an activation writes";
  const auto named = [](const GroupedMlpProblem& p, const char* device) {
    return unsupported([&] { plan(p, parse_device(device), "codes"); });
  };
  EXPECT_NE(named(mlp("mxfp8"), "sm_90").find(why), std::string::npos);  // it is decoded
  EXPECT_NE(named(mlp("fp8_block"), "sm_80").find(why), std::string::npos);
  GroupedMlpProblem p = mlp("fp8_block,wgrad=bf16");
  p.dtype = DType::kF16;  // composed of the two
  EXPECT_NE(named(p, "sm_90").find(why), std::string::npos);
  EXPECT_EQ(plan(p, hopper().device).name, "unfused");
  p = mlp("bf16");
  p.activation = ActivationKind::kSilu;
  EXPECT_EQ(refused(plan(p, hopper().device)), "fused");  // no word of codes
}

TEST(LayerPlan, OfA16BitRecipeNamesTheKernels) {
  for (const char* recipe : {"bf16", "f16"})
    for (bool discrete : {false, true})
      for (Accumulate accumulate : {Accumulate::kNo, Accumulate::kYes, Accumulate::kPerExpert}) {
        GroupedLinearProblem p = linear(recipe);
        p.dtype = p.parameters.weight = p.recipe.fprop.rhs.element;
        p.parameters.dw = accumulate == Accumulate::kNo ? p.dtype : DType::kF32;
        p.parameters.discrete_weight = p.parameters.discrete_dw = discrete;
        p.options.accumulate = accumulate;
        const GroupedLinearPlan made = plan(p, hopper().device);
        EXPECT_EQ(made.name, "direct");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "multiply")->name, "sm90_ragged_rows");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dx")->name, "sm90_ragged_rows");
        EXPECT_EQ(find_step<GroupedGemmPlan>(made, "dw")->name, "sm90_ragged_contraction");
        EXPECT_EQ(find_step<BiasGradPlan>(made, "dbias")->name, "cuda_bias_grad");
        EXPECT_TRUE(made.exact);
      }
  const GroupedMlpPlan made = plan(mlp("bf16"), hopper().device);
  EXPECT_EQ(made.name, "fused");
  EXPECT_EQ(find_step<GroupedGemmPlan>(made.fc1, "multiply")->name, "sm90_gated_rows");
  EXPECT_EQ(find_step<ActivationPlan>(made, "activation backward")->name, "cuda_activation");
  EXPECT_EQ(plan(test::each_linear(test::mlp_row("bf16"),
                                   [](GroupedLinearProblem& l) {
                                     l.n = l.n == 10 ? 16 : l.n;
                                     l.k = l.k == 10 ? 16 : l.k;
                                   }),
                 hopper().device)
                .name,
            "grouped_mlp");
}

TEST(LayerPlan, OfAQuantisedRecipeDecodesAndSaysWhyItMust) {
  for (const char* recipe : {"mxfp8", "nvfp4", "mxfp4"}) {
    const GroupedLinearPlan made = plan(linear(recipe), hopper().device);
    EXPECT_EQ(made.name, "decoded") << recipe;
    EXPECT_EQ(product(made, "multiply"), "sm90_ragged_rows");
    ASSERT_EQ(refused(made), "direct, quantized, sm90_fp8_rows");
    EXPECT_NE(made.refusals[1].why.find("no implementation on sm_90 for 'grouped_gemm "),
              std::string::npos)
        << made.refusals[1].why;
    EXPECT_EQ(plan(mlp(recipe), hopper().device).fc2.name, "decoded") << recipe;
  }
}

/// What a run of a layer with host memory says that a launch could not have got to.
template <class Case, class Change>
std::string said(const auto& problem, bool backwards, Change&& change) {
  Case c(problem, kCounts, 1, hopper());
  auto args = c.args();
  change(args);
  const test::OwnedWorkspace w(
      std::max(c.plan.memory.forward_workspace_bytes, c.plan.memory.backward_workspace_bytes));
  const std::string message = invalid([&] {
    if (backwards)
      backward(c.plan, args, w.get(), {});
    else
      forward(c.plan, args, w.get(), {});
  });
  EXPECT_EQ(c.damage(), "");
  return message.substr(0, message.find(" at "));
}

/// The view, four elements behind its place.
TensorView shifted(TensorView v) {
  v.data = static_cast<char*>(v.data) + bytes_for(v.dtype, 4);
  return v;
}

TEST(LayerPlan, RefusesAddressesOfAnyProductBeforeTheFirstOne) {
  EXPECT_EQ(said<MlpCase>(mlp("bf16"), false, [](GroupedMlpArgs& a) { a.y = shifted(a.y); }),
            "grouped_gemm: y is bf16[20, 16] strides (56, 1)");
  GroupedMlpProblem frozen = mlp("bf16");
  frozen.dgrad = frozen.wgrad1 = frozen.wgrad2 = frozen.dbias = frozen.dprob = false;
  const std::string no_z = said<MlpCase>(frozen, false, [](GroupedMlpArgs& a) { a.z = a.y; });
  EXPECT_EQ(no_z.substr(0, no_z.find(" [")),
            "grouped_mlp: z is given, must be null; the plan makes none; the route unfused does");
  EXPECT_EQ(said<MlpCase>(mlp("bf16"), true, [](GroupedMlpArgs& a) { a.dx = shifted(a.dx); }),
            "grouped_gemm: dx is bf16[20, 16] strides (72, 1)");
  EXPECT_EQ(
      said<MlpCase>(mlp("bf16"), true, [](GroupedMlpArgs& a) { a.fc1.dw = shifted(a.fc1.dw); }),
      "grouped_gemm: dw is bf16[3, 64, 16]");
  EXPECT_EQ(
      said<LinearCase>(linear("bf16"), true,
                       [](GroupedLinearArgs& a) { a.parameters.dw = shifted(a.parameters.dw); }),
      "grouped_gemm: dw is bf16[3, 24, 16]");
}

/// Where experts have many rows on average, a decoded copy is made.
TEST(LayerPlan, DecodesGivenWeightsForManyRows) {
  GroupedLinearProblem p = parse_grouped_linear_problem(
      "grouped_linear R=16387 N=144 K=96 E=4 recipe=mxfp4 dgrad=no wgrad=no quantized_w=yes");
  const Device hopper = parse_device("sm_90");
  EXPECT_EQ(plan(p, hopper).name, "sm90_packed_rows");
  EXPECT_EQ(plan(p, hopper).memory.forward_workspace_bytes, 0);
  p.rows = 16388;
  const GroupedLinearPlan decoded = plan(p, hopper);
  EXPECT_EQ(decoded.name, "decoded");
  EXPECT_EQ(find_step<DequantizePlan>(decoded, "decode w")->problem.out, DType::kBf16);
  EXPECT_EQ(decoded.refusals[2].why,
            "experts have 4097 rows in the mean, for which w is decoded in less time; the most is "
            "4096, or name the route");
  EXPECT_EQ(plan(p, hopper, "sm90_packed_rows").name, "sm90_packed_rows");
  p.recipe = parse_recipe("bf16,fprop=bf16*mxfp8");
  p.rows = 8195;
  EXPECT_EQ(plan(p, hopper).name, "sm90_packed_rows");
  p.rows = 8196;
  EXPECT_EQ(plan(p, hopper).name, "decoded");
  p.recipe = parse_recipe("fp8_block");
  EXPECT_NE(test::unsupported([&] {
              plan(p, hopper, "sm90_packed_rows");
            }).find("sm90_packed_rows: it does not take the product"),
            std::string::npos);
}

TEST(LayerPlan, OfGivenWeightsIsThatOfTheExperts) {
  MoeProblem p = parse_moe_problem(
      "moe T=64 top_k=4 H=96 F=64 E=8 recipe=mxfp4 quantized_w=yes dgrad=no dlogits=no wgrad1=no "
      "wgrad2=no dbias=no");
  EXPECT_EQ(parse_moe_problem(to_string(p)), p);
  const MoePlan made = plan(p, parse_device("sm_90"));
  EXPECT_EQ(made.mlp.fc1.name, "sm90_packed_rows");
  EXPECT_EQ(made.mlp.fc2.name, "sm90_packed_rows");
}

TEST(PermutePlan, OfSeveralRanksIsForAGpuToo) {
  const PermuteProblem p{.hidden = 1, .ranks = 2};
  EXPECT_EQ(plan(p, parse_device("sm_90")).name, "cuda_permute");
}

}  // namespace
