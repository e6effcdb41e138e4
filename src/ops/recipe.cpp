// The named recipes, and the text of any recipe.
#include "cadre/recipe.h"

#include <algorithm>
#include <array>
#include <vector>

#include "cadre/error.h"

namespace cadre {
namespace {

// A recipe of three kinds of tensors: activations, weights and gradients have one format in every
// product that reads them, up to the options of the copies along rows.
Recipe by_tensor(const Format& x, const Format& w, const Format& dy) {
  return {.fprop = {x, w}, .dgrad = {dy, w}, .wgrad = {dy, x}};
}

Recipe uniform(FormatKind kind) { return by_tensor(format(kind), format(kind), format(kind)); }

Format square(Format f) {
  f.square = true;
  return f;
}
Format transformed(Format f) {
  f.hadamard = true;
  return f;
}
Format stochastic(Format f) {
  f.stochastic = true;
  return f;
}

Recipe fp8_tensor() {
  const Format forward = format(FormatKind::kFp8Tensor);
  Format gradient = forward;
  gradient.element = DType::kE5m2;
  return by_tensor(forward, forward, gradient);
}

Recipe fp8_block() {
  const Format block = format(FormatKind::kFp8Block);
  return by_tensor(block, square(block), block);
}

Recipe nvfp4() {
  const Format x = format(FormatKind::kNvfp4);
  Recipe r = by_tensor(x, square(x), stochastic(x));
  r.wgrad = {transformed(stochastic(x)), transformed(x)};
  return r;
}

Recipe mxfp4() {
  Recipe r = uniform(FormatKind::kBf16);
  r.fprop.rhs = r.dgrad.rhs = format(FormatKind::kMxfp4);
  return r;
}

const std::vector<RecipeInfo>& recipes() {
  static const std::vector<RecipeInfo> kAll = {
      {"f32", uniform(FormatKind::kF32), "everything in fp32"},
      {"bf16", uniform(FormatKind::kBf16), "everything in bf16"},
      {"f16", uniform(FormatKind::kF16), "everything in fp16"},
      {"fp8_tensor", fp8_tensor(), "one scale per expert; e4m3 forward, e5m2 for gradients"},
      {"fp8_block", fp8_block(), "1 x 128 blocks; weights 128 x 128"},
      {"mxfp8", uniform(FormatKind::kMxfp8), "1 x 32 blocks with e8m0 scales"},
      {"nvfp4", nvfp4(),
       "1 x 16 blocks, weights 16 x 16; wgrad transformed, gradients rounded stochastically"},
      {"mxfp4", mxfp4(), "weights in 4 bits; activations, gradients and wgrad in bf16"},
  };
  return kAll;
}

struct PassRow {
  std::string_view name;
  OperandFormats Recipe::*formats;
};
constexpr std::string_view kPinned = "pinned";
constexpr std::array kPasses = {PassRow{"fprop", &Recipe::fprop}, PassRow{"dgrad", &Recipe::dgrad},
                                PassRow{"wgrad", &Recipe::wgrad}};

const RecipeInfo& find_recipe(std::string_view name) {
  std::string known;
  for (const RecipeInfo& row : recipes()) {
    if (row.name == name) return row;
    known += text(known.empty() ? "" : ", ", row.name);
  }
  throw InvalidArgument(text("recipe: name is '", name, "', must be one of ", known));
}

const PassRow& find_pass(std::string_view name) {
  for (const PassRow& row : kPasses)
    if (row.name == name) return row;
  throw InvalidArgument(
      text("recipe: pass is '", name,
           "', must be one of fprop, dgrad, wgrad; write pass=formats, or pinned"));
}

// The name of a recipe that has this pair in this pass, else lhs*rhs.
std::string pair_text(const OperandFormats& pair, const PassRow& pass) {
  for (const RecipeInfo& row : recipes())
    if (row.recipe.*pass.formats == pair) return std::string(row.name);
  return text(to_string(pair.lhs), "*", to_string(pair.rhs));
}

OperandFormats parse_pair(std::string_view words, const PassRow& pass) {
  const size_t star = words.find('*');
  if (star == words.npos) return find_recipe(words).recipe.*pass.formats;
  return {parse_format(words.substr(0, star)), parse_format(words.substr(star + 1))};
}

int passes_that_differ(const Recipe& a, const Recipe& b) {
  return int(std::count_if(kPasses.begin(), kPasses.end(), [&](const PassRow& pass) {
    return !(a.*pass.formats == b.*pass.formats);
  }));
}

}  // namespace

std::span<const RecipeInfo> recipe_list() { return recipes(); }

const OperandFormats& formats_of(const Recipe& recipe, Pass pass) {
  require(size_t(pass) < kPasses.size(), "recipe: pass is ", int(pass), ", must be 0 to ",
          kPasses.size() - 1);
  return recipe.*kPasses[size_t(pass)].formats;
}

std::string to_string(const Recipe& recipe) {
  const auto& all = recipes();
  const auto nearest =
      std::min_element(all.begin(), all.end(), [&](const RecipeInfo& a, const RecipeInfo& b) {
        return passes_that_differ(a.recipe, recipe) < passes_that_differ(b.recipe, recipe);
      });
  const bool spelled_out = passes_that_differ(nearest->recipe, recipe) == int(kPasses.size());
  std::string words(spelled_out ? "" : nearest->name);
  for (const PassRow& pass : kPasses) {
    const OperandFormats& pair = recipe.*pass.formats;
    if (!spelled_out && pair == nearest->recipe.*pass.formats) continue;
    words += text(words.empty() ? "" : ",", pass.name, "=", pair_text(pair, pass));
  }
  return words + (recipe.pinned ? text(",", kPinned) : "");
}

Recipe parse_recipe(std::string_view words) {
  Recipe recipe;
  std::vector<std::string_view> given;
  const std::string_view first = words.substr(0, words.find(','));
  const bool named = first.find('=') == first.npos;
  if (named) recipe = find_recipe(first).recipe;
  for (size_t at = named ? first.size() : 0; at < words.size();) {
    if (words[at] == ',') ++at;
    const std::string_view part = words.substr(at, words.find(',', at) - at);
    at += part.size();
    if (part == kPinned) {
      require(!recipe.pinned, "recipe: '", words, "' gives pinned twice; give it once");
      recipe.pinned = true;
      continue;
    }
    const size_t eq = std::min(part.find('='), part.size());
    const PassRow& pass = find_pass(part.substr(0, eq));
    require(std::find(given.begin(), given.end(), pass.name) == given.end(), "recipe: '", words,
            "' gives ", pass.name, " twice; give it once");
    given.push_back(pass.name);
    recipe.*pass.formats = parse_pair(part.substr(std::min(eq + 1, part.size())), pass);
  }
  require(named || given.size() == kPasses.size(), "recipe: '", words, "' gives ", given.size(),
          " passes, must be fprop, dgrad and wgrad; or begin with a named recipe");
  require_legal(recipe);
  return recipe;
}

void require_legal(const Recipe& recipe) {
  for (const PassRow& pass : kPasses) {
    const OperandFormats& pair = recipe.*pass.formats;
    require_legal(pair.lhs);
    require_legal(pair.rhs);
    require(pair.lhs.hadamard == pair.rhs.hadamard, "recipe: ", pass.name, " is ",
            to_string(pair.lhs), "*", to_string(pair.rhs),
            ", must have rht on both operands or on none; the product is unchanged only then");
    require(pass.name == "wgrad" || !pair.lhs.hadamard, "recipe: ", pass.name, " is ",
            to_string(pair.lhs), "*", to_string(pair.rhs),
            ", must be without rht; only wgrad's operands are transformed");
  }
}

}  // namespace cadre
