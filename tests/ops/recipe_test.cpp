#include "cadre/recipe.h"

#include <gtest/gtest.h>

#include <vector>

#include "cadre/error.h"

using namespace cadre;

namespace {

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "no error";
}

std::string parse_error(std::string_view words) {
  return error_of([&] { parse_recipe(words); });
}

Recipe named(std::string_view name) { return parse_recipe(name); }

// docs/numerics.md, the table of recipes, spelled out.
struct Spelled {
  std::string_view name, fprop, dgrad, wgrad;
};
constexpr Spelled kTable[] = {
    {"f32", "f32*f32", "f32*f32", "f32*f32"},
    {"bf16", "bf16*bf16", "bf16*bf16", "bf16*bf16"},
    {"f16", "f16*f16", "f16*f16", "f16*f16"},
    {"fp8_tensor", "fp8_tensor*fp8_tensor", "fp8_tensor:e5m2*fp8_tensor",
     "fp8_tensor:e5m2*fp8_tensor"},
    {"fp8_block", "fp8_block*fp8_block:2d", "fp8_block*fp8_block:2d", "fp8_block*fp8_block"},
    {"mxfp8", "mxfp8*mxfp8", "mxfp8*mxfp8", "mxfp8*mxfp8"},
    {"nvfp4", "nvfp4*nvfp4:2d", "nvfp4:sr*nvfp4:2d", "nvfp4:rht+sr*nvfp4:rht"},
    {"mxfp4", "bf16*mxfp4", "bf16*mxfp4", "bf16*bf16"},
};

TEST(Recipe, NamedOnesAreTheTableOfTheNumericsPage) {
  ASSERT_EQ(recipe_list().size(), std::size(kTable));
  for (size_t i = 0; i < std::size(kTable); ++i) {
    const Spelled& row = kTable[i];
    EXPECT_EQ(recipe_list()[i].name, row.name);
    const std::string spelled =
        text("fprop=", row.fprop, ",dgrad=", row.dgrad, ",wgrad=", row.wgrad);
    EXPECT_EQ(parse_recipe(spelled), recipe_list()[i].recipe) << row.name;
    EXPECT_EQ(to_string(parse_recipe(spelled)), row.name);
    EXPECT_NO_THROW(require_legal(recipe_list()[i].recipe));
  }
}

TEST(Recipe, EveryMixOfPassesParsesBack) {
  for (const RecipeInfo& f : recipe_list())
    for (const RecipeInfo& d : recipe_list())
      for (const RecipeInfo& w : recipe_list()) {
        const Recipe mix{f.recipe.fprop, d.recipe.dgrad, w.recipe.wgrad};
        EXPECT_EQ(parse_recipe(to_string(mix)), mix) << to_string(mix);
      }
}

TEST(Recipe, PrintsTheNearestNameAndWhatDiffers) {
  Recipe r = named("nvfp4");
  r.wgrad = named("bf16").wgrad;
  EXPECT_EQ(to_string(r), "nvfp4,wgrad=bf16");
  EXPECT_EQ(parse_recipe("nvfp4,wgrad=bf16"), r);
  EXPECT_EQ(parse_recipe("nvfp4,wgrad=bf16*bf16"), r);
  EXPECT_EQ(to_string(parse_recipe("mxfp8,fprop=mxfp8*mxfp8:2d")), "mxfp8,fprop=mxfp8*mxfp8:2d");
  EXPECT_EQ(to_string(parse_recipe("dgrad=mxfp8,wgrad=f16*bf16,fprop=f32*nvfp4")),
            "mxfp8,fprop=f32*nvfp4,wgrad=f16*bf16");
  EXPECT_EQ(to_string(parse_recipe("fprop=f32*nvfp4,dgrad=f16*bf16,wgrad=bf16*f32")),
            "fprop=f32*nvfp4,dgrad=f16*bf16,wgrad=bf16*f32");
}

TEST(Recipe, MayBePinned) {
  const Recipe r = parse_recipe("fp8_block,pinned,wgrad=bf16");
  EXPECT_TRUE(r.pinned);
  EXPECT_EQ(to_string(r), "fp8_block,wgrad=bf16,pinned");
  EXPECT_EQ(parse_recipe(to_string(r)), r);
  EXPECT_NE(r, parse_recipe("fp8_block,wgrad=bf16"));
  EXPECT_EQ(parse_error("fp8_block,pinned,pinned"),
            "recipe: 'fp8_block,pinned,pinned' gives pinned twice; give it once");
  EXPECT_EQ(parse_error("pinned"),
            "recipe: name is 'pinned', must be one of f32, bf16, f16, fp8_tensor, fp8_block, "
            "mxfp8, nvfp4, mxfp4");
}

TEST(Recipe, FormatsOfNamesThePass) {
  const Recipe r = named("fp8_tensor");
  EXPECT_EQ(formats_of(r, Pass::kFprop), r.fprop);
  EXPECT_EQ(formats_of(r, Pass::kDgrad), r.dgrad);
  EXPECT_EQ(formats_of(r, Pass::kWgrad), r.wgrad);
  EXPECT_EQ(formats_of(r, Pass::kWgrad).lhs.element, DType::kE5m2);
}

TEST(Recipe, ErrorsSayWhatIsKnown) {
  const std::string names =
      "must be one of f32, bf16, f16, fp8_tensor, fp8_block, mxfp8, nvfp4, mxfp4";
  EXPECT_EQ(parse_error("fp6"), "recipe: name is 'fp6', " + names);
  EXPECT_EQ(parse_error(""), "recipe: name is '', " + names);
  EXPECT_EQ(parse_error("mxfp8,wgrad=fp6"), "recipe: name is 'fp6', " + names);
  EXPECT_EQ(
      parse_error("mxfp8,bf16"),
      "recipe: pass is 'bf16', must be one of fprop, dgrad, wgrad; write pass=formats, or pinned");
  EXPECT_EQ(parse_error("mxfp8,wgrad=bf16,wgrad=f16"),
            "recipe: 'mxfp8,wgrad=bf16,wgrad=f16' gives wgrad twice; give it once");
  EXPECT_EQ(parse_error("wgrad=bf16,fprop=f16"),
            "recipe: 'wgrad=bf16,fprop=f16' gives 2 passes, must be fprop, dgrad and wgrad; or "
            "begin with a named recipe");
  EXPECT_EQ(parse_error("mxfp8,wgrad=nvfp4:rht*nvfp4"),
            "recipe: wgrad is nvfp4:rht*nvfp4, must have rht on both operands or on none; the "
            "product is unchanged only then");
  EXPECT_EQ(parse_error("mxfp8,dgrad=nvfp4:rht*nvfp4:rht"),
            "recipe: dgrad is nvfp4:rht*nvfp4:rht, must be without rht; only wgrad's operands are "
            "transformed");
  EXPECT_NE(parse_error("mxfp8,wgrad=fp6*bf16").find("format: name is 'fp6'"), std::string::npos);
  EXPECT_NE(parse_error("mxfp8,").find("recipe: pass is ''"), std::string::npos);
}

TEST(Recipe, RefusesIllegalFormatsPutTogetherByHand) {
  Recipe r = named("bf16");
  r.dgrad.lhs.stochastic = true;
  EXPECT_NE(error_of([&] { require_legal(r); }), "no error");
}

}  // namespace
