#include "layers/linear_copies.h"

#include "layers/grouped_linear.h"

namespace cadre::layers::linear {
namespace {

/// True if the copies along K and along rows hold the same codes and scales, so that one serves
/// both: square blocks, one scale per expert, or a plain cast; and nothing random.
bool same_copy(const Format& along_k, const Format& along_rows) {
  return along_k == along_rows && !along_k.hadamard && !along_k.stochastic &&
         (along_k.square || info(along_k.kind).block == 0);
}

/// One copy serves both if it is written in one form.
bool shares(const Copied& tensor, const Format& along_k, const Format& along_rows) {
  const Copy &k = tensor.along_k, &rows = tensor.along_rows;
  return k.is_there && rows.is_there && !tensor.given_along_k && same_copy(along_k, along_rows) &&
         k.decoded == rows.decoded && k.codes_major == rows.codes_major &&
         k.scales_major == rows.scales_major;
}

/// Other batches have no column-major scales, so that a problem which wants them is an error.
bool has_orders(const OperandFormats& of) {
  if (of.lhs.kind == FormatKind::kFp8Tensor) return of.rhs.kind == FormatKind::kFp8Tensor;
  return of.lhs.kind == FormatKind::kFp8Block && !of.lhs.square &&
         of.rhs.kind == FormatKind::kFp8Block;
}

/// How kFp8Rows wants scales of a batch to lie.
Major order_of_scales(const Format& format) {
  return info(format.kind).block != 0 ? Major::kColumn : Major::kRow;
}

}  // namespace

bool as_is(const Format& format, DType dtype) {
  return is_plain(format) && format.element == dtype;
}

Copies::Copies(const GroupedLinearProblem& p, const DecodedPasses& decoded)
    : x{kX, {kXAlongK, kXAlongKNumbers}, {kXAlongRows, kXAlongRowsNumbers}},
      w{kW, {kWAlongK, kWAlongKNumbers}, {kWAlongRows, kNone}},
      dy{kDy, {kDyAlongK, kNone}, {kDyAlongRows, kDyAlongRowsNumbers}} {
  const auto [fprop, dgrad, wgrad, pinned] = p.recipe;
  const LayerOptions& o = p.options;
  const auto copy = [](Copy& to, bool wanted, const Format& format, DType dtype) {
    to.is_there = wanted && !as_is(format, dtype);
  };
  // Numbers take more room than codes, so what outlives its phase stays codes.
  const auto decode = [](Copy& to, bool numbers, const Format& format, bool stays) {
    const bool wanted = numbers && to.is_there && !is_plain(format);
    (stays ? to.decodes : to.decoded) = wanted;
  };
  copy(x.along_k, true, fprop.lhs, p.dtype);
  copy(x.along_rows, p.wgrad, wgrad.rhs, p.dtype);
  copy(w.along_k, true, fprop.rhs, p.parameters.weight);
  copy(w.along_rows, p.dgrad, dgrad.rhs, p.parameters.weight);
  copy(dy.along_k, p.dgrad, dgrad.lhs, p.dtype);
  copy(dy.along_rows, p.wgrad, wgrad.lhs, p.dtype);
  x.given = o.quantized_x;
  w.given = o.quantized_w;
  x.given_along_k = p.given_x_along_k;
  dy.given_along_k = p.given_dy_along_k;
  decode(x.along_k, decoded.fprop, fprop.lhs, x.given || x.given_along_k);
  decode(x.along_rows, decoded.wgrad, wgrad.rhs, x.given || !o.save_input || decoded.wgrad_waits);
  decode(w.along_k, decoded.fprop, fprop.rhs, w.given);
  decode(w.along_rows, decoded.dgrad, dgrad.rhs, false);
  decode(dy.along_k, decoded.dgrad, dgrad.lhs, false);
  decode(dy.along_rows, decoded.wgrad, wgrad.lhs, decoded.wgrad_waits);
  if (!decoded.fprop_by.empty()) x.along_k.scales_major = order_of_scales(fprop.lhs);
  if (!decoded.dgrad_by.empty()) {
    dy.along_k.scales_major = order_of_scales(dgrad.lhs);
    w.along_rows.codes_major = Major::kColumn;
  }
  x.shared = !o.save_input && x.along_rows.is_there && shares(x, fprop.lhs, wgrad.rhs);
  w.shared = o.cache_weights && shares(w, fprop.rhs, dgrad.rhs);
  dy.shared = shares(dy, dgrad.lhs, wgrad.lhs);
}

static GroupedGemmProblem gathered(GroupedGemmProblem g, Gather operand,
                                   const GroupedLinearProblem& p) {
  g.gather = operand;
  g.tokens = p.tokens;
  g.top_k = p.top_k;
  return g;
}

/// It has no tail.
static GroupedGemmProblem scattered(GroupedGemmProblem g, const GroupedLinearProblem& p) {
  g.scatter = true;
  g.tokens = p.tokens;
  g.top_k = p.top_k;
  g.ranks = p.ranks;
  g.tail = Tail::kKeep;
  return g;
}

GroupedGemmProblem product(const GroupedLinearProblem& p, Pass pass, const DecodedPasses& decoded) {
  const auto [lhs, rhs] = formats_of(p.recipe, pass);
  GroupedGemmProblem g{.pass = pass, .rows = p.rows, .n = p.n, .k = p.k};
  g.experts = p.experts;
  g.lhs = lhs;
  g.rhs = rhs;
  g.unit_budget = p.options.unit_budget;
  g.align = p.options.align;
  if (decoded.of(pass)) {
    g.lhs = decoded_format(lhs);
    g.rhs = decoded_format(rhs);
    g.alpha = info(lhs.kind).has_expert_scale || info(rhs.kind).has_expert_scale;
    if (lhs.hadamard) g.rows = code_rows(true, {p.rows, 0}, p.experts).first;
  }
  if (pass == Pass::kWgrad) {
    g.out = p.parameters.dw;
    g.out_major = p.parameters.weight_major;
    g.discrete_out = p.parameters.discrete_dw;
    g.accumulate = p.options.accumulate;
    if (p.gather_dy) return gathered(g, Gather::kLhs, p);
    return p.gather_dw ? gathered(g, Gather::kRhs, p) : g;
  }
  const bool gathers = pass == Pass::kDgrad ? p.gather_dy : p.gather && as_is(lhs, p.dtype);
  if (gathers) g = gathered(g, Gather::kLhs, p);
  g.discrete_rhs = p.parameters.discrete_weight && as_is(rhs, p.parameters.weight);
  g.rhs_major = p.parameters.weight_major;
  g.out = p.dtype;
  g.tail = p.options.tail;
  if (pass == Pass::kDgrad ? p.scatter_dx : p.scatter) g = scattered(g, p);
  if (!decoded.by(pass).empty()) {
    g.lhs_scales_major = order_of_scales(lhs);
    if (pass == Pass::kDgrad) g.rhs_major = Major::kColumn;
  }
  return g;
}

DecodedPasses passes_to_decode(const GroupedLinearProblem& p, const Device& device) {
  const auto decodes = [&](bool wanted, Pass pass) {
    const auto [lhs, rhs] = formats_of(p.recipe, pass);
    if (!wanted || (is_plain(lhs) && is_plain(rhs))) return false;
    const std::string_view by = find(product(p, pass, {}), device).name;
    return by.empty() || by == kFp8Rows;
  };
  return {decodes(true, Pass::kFprop), decodes(p.dgrad, Pass::kDgrad),
          decodes(p.wgrad, Pass::kWgrad), p.options.deferred};
}

bool is_hopper(const Device& device) { return device.kind == DeviceKind::kCuda && device.sm == 90; }

DecodedPasses passes_with_fp8_rows(const GroupedLinearProblem& p, const Device& device) {
  DecodedPasses passes = passes_to_decode(p, device), ordered = passes;
  ordered.fprop_by = ordered.dgrad_by = kFp8Rows;
  ordered.fprop = ordered.dgrad = false;
  const auto take = [&](bool& decodes, std::string_view& by, Pass pass) {
    if (!decodes || !has_orders(formats_of(p.recipe, pass)) ||
        find(product(p, pass, ordered), device, kFp8Rows).name.empty())
      return;
    decodes = false;
    by = kFp8Rows;
  };
  // What the caller quantises has the usual order; no product of codes has an activation in it.
  const bool is_usual = order_of_scales(p.recipe.fprop.lhs) == Major::kRow;
  if (!p.activation && (is_usual || !p.options.quantized_x))
    take(passes.fprop, passes.fprop_by, Pass::kFprop);
  take(passes.dgrad, passes.dgrad_by, Pass::kDgrad);
  return passes;
}

DecodedPasses passes_with_packed_rows(const GroupedLinearProblem& p, const Device& device) {
  DecodedPasses passes = passes_to_decode(p, device), packed = passes;
  packed.fprop = false;
  packed.fprop_by = kPackedRows;
  if (passes.fprop && !find(product(p, Pass::kFprop, packed), device, kPackedRows).name.empty())
    passes = packed;
  return passes;
}

}  // namespace cadre::layers::linear
