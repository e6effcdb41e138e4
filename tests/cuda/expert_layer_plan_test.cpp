// What the expert layer plans on Hopper: when it gathers, and what it keeps. Needs no GPU.
#include <gtest/gtest.h>

#include "cadre/moe.h"
#include "tests/judge/errors.h"

using namespace cadre;
using test::unsupported;

namespace {

Device hopper() { return parse_device("sm_90"); }

TEST(ExpertLayerPlan, SaysWhyItDoesNotGather) {
  const struct {
    const char *words, *why;
  } cases[] = {
      {"T=0 F=32 keep_rows=no", "is for one token or more"},
      {"T=20 F=32 keep_rows=no recipe=bf16,wgrad=mxfp8",
       "is for recipes that read x as it is, or quantise it for fprop"},
      {"T=20 F=32 keep_rows=no dtype=f16",
       "is for recipes that read x as it is, or quantise it for fprop"},
      {"T=20 F=32 recipe=fp8_block,wgrad=bf16",
       "keep_rows is yes, and dw of fc1 is of the rows, which forward does not write"},
      {"T=20 F=32", "keep_rows is yes, and dw of fc1 is of the rows, which forward does not write"},
      {"T=999 F=33 act=relu wgrad1=no",
       "fc1 would copy the rows; sm90_gathered_rows takes N and K that are multiples of 8"},
      {"T=999 F=33 act=relu keep_rows=no recipe=bf16,wgrad=mxfp8 wgrad1=no",
       "fc1 would copy the rows; sm90_gathered_rows takes N and K that are multiples of 8"},
  };
  for (const auto& c : cases) {
    const auto p = parse_moe_problem(text("moe top_k=2 H=16 E=3 ", c.words));
    const MoePlan made = plan(p, hopper());
    EXPECT_EQ(made.name, "permuted");
    ASSERT_EQ(made.refusals.at(0).name, "gathered");
    EXPECT_EQ(made.refusals.at(0).why.find(c.why), 0u) << made.refusals.at(0).why;
    EXPECT_NE(unsupported([&] { plan(p, hopper(), "gathered"); }).find(c.why), std::string::npos)
        << c.words;
  }
}

TEST(ExpertLayerPlan, GathersWhereThatIsFaster) {
  const auto made = [](const char* words, std::string_view only = {}) {
    return plan(parse_moe_problem(text("moe T=800 top_k=2 H=16 E=3 keep_rows=no ", words)),
                hopper(), only);
  };
  const MoePlan narrow = made("F=384");
  EXPECT_EQ(narrow.name, "gathered");
  EXPECT_EQ(find_step<GroupedGemmPlan>(narrow.mlp.fc1, "multiply")->name, "sm90_gathered_rows");
  EXPECT_EQ(find_step<PermutePlan>(narrow, "permute"), nullptr);
  EXPECT_TRUE(find_step<RoutingPlan>(narrow, "route")->problem.row_prob);
  const auto dw = [](const MoePlan& of) {
    return find_step<GroupedGemmPlan>(of.mlp.fc1, "dw")->name;
  };
  EXPECT_EQ(dw(narrow), "sm90_gathered_contraction");
  EXPECT_EQ(find_step<PermutePlan>(narrow, "permute again"), nullptr);
  // So is dout, unless a bias's gradient reads its rows; and fc1 where no activation is in it.
  const auto dy = [](const MoePlan& of, std::string_view step) {
    return find_step<GroupedGemmPlan>(of.mlp.fc2, step)->name;
  };
  EXPECT_EQ(dy(narrow, "dx"), "sm90_gathered_rows");
  EXPECT_EQ(dy(narrow, "dw"), "sm90_gathered_contraction");
  EXPECT_EQ(find_step<PermutePlan>(narrow, "combine backward"), nullptr);
  for (const MoePlan& rows :
       {made("F=384 bias2=yes"), made("F=384 dw=f32"), made("F=384 deferred=yes"),
        made("F=384 recipe=bf16,dgrad=mxfp8"), made("F=392", "gathered")}) {
    EXPECT_EQ(rows.name, "gathered");
    EXPECT_NE(find_step<PermutePlan>(rows, "combine backward"), nullptr);
  }
  EXPECT_EQ(dy(made("F=384 wgrad2=no"), "dx"), "sm90_gathered_rows");
  const MoePlan relu = made("F=384 act=relu");
  EXPECT_EQ(relu.mlp.name, "unfused");
  EXPECT_EQ(find_step<GroupedGemmPlan>(relu.mlp.fc1, "multiply")->name, "sm90_gathered_rows");
  // Deferred, dw may be planned with another type than backward was.
  for (const MoePlan& copies :
       {made("F=384 dw=f32"), made("F=384 deferred=yes"), made("F=392", "gathered")}) {
    EXPECT_EQ(copies.name, "gathered");
    EXPECT_EQ(dw(copies), "sm90_ragged_contraction");
    EXPECT_NE(find_step<PermutePlan>(copies, "permute again"), nullptr);
  }
  EXPECT_EQ(made("F=392").name, "permuted");
  EXPECT_EQ(made("F=392").refusals.at(0).why,
            "a product of 784 columns is slower than a copy and the plain product; the most is "
            "768, or name the route");
  EXPECT_EQ(made("F=392", "gathered").name, "gathered");
}

/// In recipes that quantise x, gathering for fc1 costs no product; dout's would.
TEST(ExpertLayerPlan, GathersDoutOfManyRows) {
  const auto gathers = [](const char* words) {
    const auto p = parse_moe_problem(text("moe top_k=2 H=16 E=3 keep_rows=no dw=bf16 ", words));
    const MoePlan made = plan(p, hopper());
    EXPECT_EQ(made.name, "gathered") << words;
    return made.mlp.problem.gather_dy;
  };
  EXPECT_TRUE(gathers("T=768 F=384 recipe=fp8_block,dgrad=bf16,wgrad=bf16"));
  EXPECT_FALSE(gathers("T=767 F=384 recipe=fp8_block,dgrad=bf16,wgrad=bf16"));
}

/// The door's forward does not know what its backward will be, nor where dout will lie.
TEST(ExpertLayerPlan, KeepsTheSameHoweverItsBackwardRuns) {
  const auto saved = [](const MoePlan& of) {
    std::string all;
    for (const LayerTensor& tensor : of.tensors)
      if (tensor.place == Place::kSaved)
        all += text(tensor.name, " at ", tensor.offset, ", ", tensor.layout.bytes, " bytes; ");
    return text(all, "of ", of.memory.saved_bytes, "; experts ", of.mlp.memory.saved_bytes);
  };
  for (unsigned wants = 1; wants < 16; ++wants) {
    auto p = parse_moe_problem("moe T=800 top_k=2 H=16 F=384 E=3 keep_rows=no dw=bf16");
    p.dgrad = (wants & 1) != 0, p.dlogits = (wants & 2) != 0;
    p.wgrad1 = (wants & 4) != 0, p.wgrad2 = (wants & 8) != 0;
    const std::string within = saved(plan(p, hopper()));
    p.options.deferred = true;
    EXPECT_EQ(saved(plan(p, hopper())), within) << to_string(p);
    p.options.deferred = false;
    p.options.align = 2;
    EXPECT_EQ(saved(plan(p, hopper())), within) << to_string(p);
  }
}

/// No width and no number of rows is against it.
TEST(ExpertLayerPlan, GathersWhatItQuantises) {
  const auto made = [](std::string_view words) {
    return plan(parse_moe_problem(text("moe T=20 top_k=2 H=16 F=512 E=3 recipe=", words)),
                hopper());
  };
  const struct {
    const char *words, *route, *quantises;
  } cases[] = {
      {"fp8_block", "sm90_fp8_rows",
       "along_k=fp8_block along_rows=fp8_block role=x gather=yes T=20 top_k=2 "
       "along_k_scales_major=column"},
      {"fp8_block,wgrad=bf16 keep_rows=no", "sm90_fp8_rows",
       "along_k=fp8_block role=x gather=yes T=20 top_k=2 along_k_scales_major=column"},
      {"fp8_tensor", "sm90_fp8_rows", "along_k=fp8_tensor role=x gather=yes T=20 top_k=2"},
      {"mxfp8", "decoded",
       "along_k=mxfp8 along_rows=mxfp8 role=x gather=yes T=20 top_k=2 along_k_decoded=yes"},
      {"nvfp4", "decoded",
       "along_k=nvfp4 along_rows=nvfp4:rht role=x gather=yes T=20 top_k=2 along_k_decoded=yes"}};
  for (const auto& c : cases) {
    const MoePlan layer = made(c.words);
    EXPECT_EQ(layer.name, "gathered") << c.words;
    EXPECT_EQ(layer.mlp.fc1.name, c.route);
    const std::string quantises = text(
        "quantize x: cuda_quantize  [quantize rows R=40 C=16 E=3 source=bf16 ", c.quantises, "]\n");
    EXPECT_NE(explain(layer).find(quantises), std::string::npos) << quantises << " in\n"
                                                                 << explain(layer);
    EXPECT_EQ(find_step<PermutePlan>(layer, "permute"), nullptr);
    EXPECT_EQ(find_step<PermutePlan>(layer, "permute again") != nullptr,
              layer.problem.recipe.wgrad == parse_recipe("bf16").wgrad);
  }
}

TEST(ExpertLayerPlan, NamesTheKernels) {
  const auto p = parse_moe_problem("moe T=20 top_k=2 H=16 F=32 E=3 recipe=bf16 bias2=yes");
  const MoePlan made = plan(p, hopper());
  for (const char* step : {"permute", "combine", "combine backward", "permute backward"})
    EXPECT_EQ(find_step<PermutePlan>(made, step)->name, "cuda_permute") << step;
  for (const char* step : {"route", "route backward"})
    EXPECT_EQ(find_step<RoutingPlan>(made, step)->name, "cuda_routing") << step;
  EXPECT_TRUE(find_step<RoutingPlan>(made, "route")->problem.map);
  EXPECT_EQ(find_step<GroupedGemmPlan>(made.mlp.fc1, "multiply")->name, "sm90_gated_rows");
  EXPECT_TRUE(made.exact);
  MoeProblem shares = p;
  shares.shared_features = 64;
  const MoePlan shared = plan(shares, hopper());
  EXPECT_EQ(find_step<OffsetsPlan>(shared, "shared offsets")->name, "cuda_offsets");
  EXPECT_EQ(find_step<PermutePlan>(shared, "combine")->name, "cuda_permute");
  EXPECT_EQ(find_step<GroupedGemmPlan>(shared.shared.fc1, "multiply")->name, "sm90_gated_rows");
}

}  // namespace
