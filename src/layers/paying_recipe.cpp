#include "layers/paying_recipe.h"

#include <algorithm>
#include <array>

#include "cadre/error.h"
#include "layers/grouped_mlp.h"
#include "layers/linear_copies.h"
#include "layers/moe.h"

namespace cadre::layers {
namespace {

/// On an H200 quantise moves 3.4e12 bytes a second, and a product of codes takes 0.5 ms less for
/// 10^12 FLOP than one of bf16: `nvidia-h200-quantize.json` and
/// `nvidia-h200-grouped-gemm-fp8-torch.json` in bench/results.
constexpr double kFlopsOfByte = 590;
/// What has to be at stake: about 20 us.
constexpr double kLeastBytes = 64e6;

/// What codes of a pass save, and what quantising for it takes, both in bytes that a kernel moves
/// in that time.
struct Balance {
  double saves = 0, takes = 0;
};

double million(double number) { return double(int64_t(number / 1e6)); }

/// The passes of one layer, whose linears are added one by one.
class Passes {
 public:
  /// Weights that lie column-major are never copied: checks of the layer say so.
  Passes(const Recipe& recipe, const LayerOptions& options, DType dtype,
         const ParameterLayout& parameters, const Device& device)
      : recipe_(recipe),
        cached_(options.cache_weights),
        may_change_(!recipe.pinned && linear::is_hopper(device) && dtype == parameters.weight &&
                    parameters.weight_major == Major::kRow &&
                    (dtype == DType::kBf16 || dtype == DType::kF16) && !options.quantized_x &&
                    !options.quantized_w),
        plain_(format(dtype == DType::kBf16 ? FormatKind::kBf16 : FormatKind::kF16)),
        device_(device) {}

  bool may_change() const { return may_change_; }

  /// `written_dy`: somebody writes dy along K besides dy itself, and reads nothing for it.
  void add(const GroupedLinearProblem& p, bool written_dy) {
    const linear::DecodedPasses by = linear::passes_with_fp8_rows(p, device_);
    const double rows = double(p.rows), n = double(p.n), k = double(p.k), e = double(p.experts);
    const auto pass = [&](size_t at, bool wanted, std::string_view taken_by,
                          const OperandFormats& formats, double batch) {
      if (!wanted) return;
      taken_[at] = taken_[at] && !taken_by.empty();
      Balance& of = balances_[at];
      of.saves += std::max(2 * rows * n * k / kFlopsOfByte, cached_ ? e * n * k : 0);
      of.takes += batch + (cached_ ? 0 : e * n * k * bytes_to_make(formats.rhs));
    };
    pass(0, true, by.fprop_by, p.recipe.fprop, rows * k * bytes_to_make(p.recipe.fprop.lhs));
    pass(1, p.dgrad, by.dgrad_by, p.recipe.dgrad,
         rows * n * (written_dy ? 1 : bytes_to_make(p.recipe.dgrad.lhs)));
  }

  PayingRecipe take() const {
    PayingRecipe paying{recipe_, {}};
    constexpr std::array kNames = {std::string_view("codes in fprop"),
                                   std::string_view("codes in dgrad")};
    const std::array formats = {&paying.recipe.fprop, &paying.recipe.dgrad};
    for (size_t i = 0; i < formats.size(); ++i) {
      const Balance& of = balances_[i];
      if (!taken_[i] || of.takes - of.saves < kLeastBytes) continue;
      *formats[i] = {plain_, plain_};
      paying.refusals.push_back(
          {kNames[i], text("quantising takes as long as moving ", million(of.takes),
                           " MB, and products of codes save ", million(of.saves), "; ",
                           to_string(plain_), " is faster, or say recipe=...,pinned")});
    }
    return paying;
  }

 private:
  /// Bytes that quantise reads and writes of each element of 16 bits.
  static double bytes_to_make(const Format& f) { return reads_source_twice(f) ? 5 : 3; }

  const Recipe recipe_;
  const bool cached_, may_change_;
  const Format plain_;
  const Device& device_;
  bool taken_[2] = {true, true};
  Balance balances_[2];
};

}  // namespace

PayingRecipe paying_recipe(const GroupedLinearProblem& p, const Device& device) {
  Passes passes(p.recipe, p.options, p.dtype, p.parameters, device);
  if (!passes.may_change() || p.given_x_along_k || p.given_dy_along_k) return {p.recipe, {}};
  passes.add(p, false);
  return passes.take();
}

PayingRecipe paying_recipe(const GroupedMlpProblem& p, const Device& device) {
  Passes passes(p.recipe, p.options, p.dtype, p.parameters, device);
  if (!passes.may_change() || p.given_x_along_k) return {p.recipe, {}};
  GroupedLinearProblem one{.rows = p.rows, .experts = p.experts, .recipe = p.recipe};
  one.dtype = p.dtype;
  one.parameters = p.parameters;
  one.n = p.features;
  one.k = p.hidden;
  one.dgrad = p.dgrad;
  GroupedLinearProblem two = one;
  std::swap(two.n, two.k);
  two.dgrad = needs_dh(p);
  if (info(p.activation).gated) one.n *= 2;
  passes.add(one, true);
  passes.add(two, false);
  return passes.take();
}

PayingRecipe paying_recipe(const MoeProblem& p, const Device& device) {
  GroupedMlpProblem m{.rows = rows_of(p), .hidden = p.hidden, .features = p.features};
  m.experts = p.experts;
  m.activation = p.activation;
  m.recipe = p.recipe;
  m.dtype = p.dtype;
  m.parameters = p.parameters;
  m.prob = true;
  m.bias1 = p.bias1;
  m.dgrad = p.dgrad;
  m.wgrad1 = p.wgrad1;
  m.dbias = p.dbias;
  m.dprob = p.dlogits;
  m.options = p.options;
  return paying_recipe(m, device);
}

}  // namespace cadre::layers
