#pragma once
#include <span>
#include <string>
#include <string_view>

#include "cadre/format.h"
#include "cadre/grouped_gemm.h"

#pragma GCC visibility push(default)
namespace cadre {

/// The formats of the two operands of one product. For fprop: x and w; dgrad: dy and w; wgrad: dy
/// and x. Both are quantised along that product's contraction.
struct OperandFormats {
  Format lhs{};  ///< x (fprop), dy (dgrad, wgrad)
  Format rhs{};  ///< w (fprop, dgrad), x (wgrad)

  bool operator==(const OperandFormats&) const = default;
};

/// Which format each of fprop, dgrad and wgrad uses for each operand. Unless it is pinned, the plan
/// of a layer may take fprop and dgrad of large products as they are, in 16 bits, where quantising
/// for them takes longer than they save; see docs/formats.md.
struct Recipe {
  OperandFormats fprop{}, dgrad{}, wgrad{};
  bool pinned = false;

  bool operator==(const Recipe&) const = default;
};

/// One named recipe of the list.
struct RecipeInfo {
  std::string_view name;  ///< "nvfp4"
  Recipe recipe;
  std::string_view summary;  ///< one line
};

/// All named recipes: f32, bf16, f16, fp8_tensor, fp8_block, mxfp8, nvfp4, mxfp4.
std::span<const RecipeInfo> recipe_list();

/// The formats of one pass.
const OperandFormats& formats_of(const Recipe&, Pass);

/// "mxfp8", or a named recipe with the passes that differ: "nvfp4,wgrad=bf16", or all spelled out:
/// "fprop=mxfp8*mxfp8:2d,dgrad=...,wgrad=..." (lhs*rhs); each may end with ",pinned".
std::string to_string(const Recipe&);

/// Inverse of `to_string`. A pass takes a recipe's name or `lhs*rhs`.
/// Errors    InvalidArgument listing the named recipes.
Recipe parse_recipe(std::string_view);

/// For recipes that were put together by hand: checks every format, and that a Hadamard transform
/// is on both operands of wgrad or nowhere.
/// Errors    InvalidArgument with the pass.
void require_legal(const Recipe&);

}  // namespace cadre
#pragma GCC visibility pop
