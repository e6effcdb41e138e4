#include "cadre/grouped_gemm.h"

#include <algorithm>

#include "backend/walk.h"
#include "cadre/recipe.h"
#include "ops/dense_gemm.h"
#include "ops/gemm_activation.h"
#include "ops/gemm_gather.h"
#include "ops/matrix_layout.h"
#include "ops/problem_text.h"
#include "ops/quantized_checks.h"

namespace cadre {
namespace {

bool is_wgrad(const GroupedGemmProblem& p) { return p.pass == Pass::kWgrad; }

/// What a tensor and its parts are called in errors. Literals: a run's checks allocate nothing.
struct TensorNames {
  std::string_view itself, discrete;
  std::string_view scales = {}, discrete_scales = {}, expert_scale = {};
};
constexpr TensorNames kX{"x", "x.discrete", "x.scales", "x.discrete_scales", "x.expert_scale"};
constexpr TensorNames kW{"w", "w.discrete", "w.scales", "w.discrete_scales", "w.expert_scale"};
constexpr TensorNames kDy{"dy", "dy.discrete", "dy.scales", "dy.discrete_scales",
                          "dy.expert_scale"};

/// The names of one pass.
struct PassNames {
  TensorNames lhs, rhs, out;
};
constexpr PassNames kPassNames[] = {
    {kX, kW, {"y", "discrete_out"}},
    {kDy, kW, {"dx", "discrete_out"}},
    {kDy, kX, {"dw", "discrete_out"}},
};
const PassNames& names_of(Pass pass) { return kPassNames[size_t(pass)]; }

/// The named recipe whose pair of formats for the pass is this one; null if there is none.
const RecipeInfo* recipe_of(const GroupedGemmProblem& p) {
  const OperandFormats pair{p.lhs, p.rhs};
  for (const RecipeInfo& row : recipe_list())
    if (formats_of(row.recipe, p.pass) == pair) return &row;
  return nullptr;
}

void formats(ops::ProblemWriter& io, const GroupedGemmProblem& p) {
  const PassNames& names = names_of(p.pass);
  if (const RecipeInfo* row = recipe_of(p)) {
    io.always("format", row->recipe);
  } else {
    io.always(names.lhs.itself, p.lhs);
    io.always(names.rhs.itself, p.rhs);
  }
}

void formats(ops::WordsLook& io, const GroupedGemmProblem& p) {
  io.always("lhs", p.lhs);
  io.always("rhs", p.rhs);
}

void formats(ops::ProblemReader& io, GroupedGemmProblem& p) {
  const PassNames& names = names_of(p.pass);
  const std::string* both = io.find("format");
  const std::string* lhs = io.find(names.lhs.itself);
  const std::string* rhs = io.find(names.rhs.itself);
  require(both == nullptr || (lhs == nullptr && rhs == nullptr), "problem: format and ",
          (lhs ? names.lhs : names.rhs).itself,
          " are both given, must be one or the other [grouped_gemm]");
  if (both != nullptr) {
    const OperandFormats pair = formats_of(parse_recipe(*both), p.pass);
    p.lhs = pair.lhs;
    p.rhs = pair.rhs;
  }
  if (lhs != nullptr) p.lhs = parse_format(*lhs);
  if (rhs != nullptr) p.rhs = parse_format(*rhs);
}

}  // namespace

template <class Io, class Problem>
static void fields(Io& io, Problem& p) {
  const GroupedGemmProblem usual;
  io.word("pass", p.pass);
  io.always("R", p.rows);
  io.always("N", p.n);
  io.always("K", p.k);
  io.always("E", p.experts);
  formats(io, p);
  io.unless("out", p.out, usual.out);
  io.unless("lhs_major", p.lhs_major, usual.lhs_major);
  io.unless("rhs_major", p.rhs_major, usual.rhs_major);
  io.unless("out_major", p.out_major, usual.out_major);
  io.unless("discrete_rhs", p.discrete_rhs, usual.discrete_rhs);
  io.unless("discrete_out", p.discrete_out, usual.discrete_out);
  io.unless("alpha", p.alpha, usual.alpha);
  io.unless("beta", p.beta, usual.beta);
  io.unless("bias", p.bias, usual.bias);
  io.unless("discrete_bias", p.discrete_bias, usual.discrete_bias);
  io.unless("bias_scale", p.bias_scale, usual.bias_scale);
  io.unless("bias_dtype", p.bias_dtype, usual.bias_dtype);
  io.unless("accumulate", p.accumulate, usual.accumulate);
  io.unless("tail", p.tail, usual.tail);
  io.unless("gather", p.gather, usual.gather);
  io.unless("scatter", p.scatter, usual.scatter);
  io.unless("T", p.tokens, usual.tokens);
  io.unless("top_k", p.top_k, usual.top_k);
  io.unless("ranks", p.ranks, usual.ranks);
  io.unless("dense", p.dense, usual.dense);
  ops::activation_fields(io, p.activation);
  io.unless("unit_budget", p.unit_budget, usual.unit_budget);
  io.unless("align", p.align, usual.align);
  io.unless("lhs_scales_major", p.lhs_scales_major, usual.lhs_scales_major);
  io.unless("rhs_scales_major", p.rhs_scales_major, usual.rhs_scales_major);
}

namespace {

using ProblemChecks = ops::Checks<GroupedGemmProblem>;

/// A flag of the problem that only some passes have.
struct PassFlag {
  std::string_view name;
  bool GroupedGemmProblem::*flag;
  bool fprop, dgrad, wgrad;
  const char* why;
};
constexpr PassFlag kPassFlags[] = {
    {"discrete_rhs", &GroupedGemmProblem::discrete_rhs, true, true, false, "wgrad reads no weight"},
    {"discrete_out", &GroupedGemmProblem::discrete_out, false, false, true,
     "only wgrad writes one output per expert"},
    {"beta", &GroupedGemmProblem::beta, true, true, false, "wgrad has accumulate"},
    {"bias", &GroupedGemmProblem::bias, true, false, false, "only fprop adds a bias"},
};

void check_flags(const GroupedGemmProblem& p, const ProblemChecks& checks) {
  for (const PassFlag& row : kPassFlags) {
    const bool legal = p.pass == Pass::kFprop ? row.fprop : is_wgrad(p) ? row.wgrad : row.dgrad;
    checks.holds(legal || !(p.*row.flag), row.name, " is yes, must be no; ", row.why);
  }
  checks.holds(p.bias || !p.discrete_bias, "discrete_bias is yes, must be no; there is no bias");
  checks.holds(p.bias || !p.bias_scale, "bias_scale is yes, must be no; there is no bias");
  checks.holds(is_wgrad(p) || p.accumulate == Accumulate::kNo, "accumulate is ",
               ops::word_of(p.accumulate), ", must be no; only wgrad accumulates, use beta");
  checks.holds(!is_wgrad(p) || p.tail == Tail::kKeep, "tail is ", ops::word_of(p.tail),
               ", must be keep; dw has no rows of a tail");
}

void check_operand(const ops::CopyNames& names, const QuantizedShape& shape,
                   const ProblemChecks& checks) {
  require_legal(shape.format);
  if (!is_plain(shape.format)) ops::check_codes_major(checks, names.codes_major, shape);
  ops::check_scales_major(checks, names.scales_major, shape);
}

void check(const GroupedGemmProblem& p) {
  ops::require_words(p);
  const ProblemChecks checks("grouped_gemm", p);
  checks.at_least("R", p.rows, 0);
  checks.fits_int32("R", p.rows);
  checks.at_least("N", p.n, 1);
  checks.at_least("K", p.k, 1);
  checks.experts(p.experts);
  checks.countable("R * N", {p.rows, p.n});
  checks.countable("R * K", {p.rows, p.k});
  checks.countable("E * N * K", {p.experts, p.n, p.k});
  checks.at_least("unit_budget", p.unit_budget, 0);
  checks.alignment("align", p.align);
  check_operand({"lhs", "lhs_major", "lhs_scales_major"}, lhs_shape(p), checks);
  check_operand({"rhs", "rhs_major", "rhs_scales_major"}, rhs_shape(p), checks);
  checks.plain_float("out", p.out);
  checks.plain_float("bias_dtype", p.bias_dtype);
  check_flags(p, checks);
  ops::check_gather(p, checks);
  ops::check_scatter(p, checks);
  ops::check_activation(p, checks);
  ops::check_dense(p, checks);
  checks.holds(is_wgrad(p) || (!p.lhs.hadamard && !p.rhs.hadamard),
               "rht is yes, must be no; only wgrad's operands are transformed");
  checks.holds(!is_wgrad(p) || p.lhs.hadamard == p.rhs.hadamard, "rht is ",
               ops::word_of(p.lhs.hadamard), " for dy and ", ops::word_of(p.rhs.hadamard),
               " for x, must be the same; transforms cancel only in pairs");
}

/// A view, whose data is null where the experts are discrete, and their pointers.
struct Storage {
  const TensorView& view;
  const void* discrete = nullptr;
};

void check_storage(const TensorNames& names, const Storage& given, const ops::MatrixLayout& layout,
                   const ProblemChecks& checks) {
  const TensorView& v = given.view;
  const bool same = v.dtype == layout.dtype && v.rank == layout.rank &&
                    std::equal(v.shape.begin(), v.shape.begin() + v.rank, layout.shape.begin());
  checks.holds(same, names.itself, " is ", ops::Seen{v}, ", must be ", layout);
  checks.reachable(names.itself, v);
  checks.holds(ops::is_laid_out(v, layout.major, given.discrete != nullptr), names.itself, " is ",
               ops::Seen{v}, ", must be ", layout.major == Major::kRow ? "row" : "column",
               "-major with stride 1 inside and rows that do not overlap; copy it");
  checks.whole_bytes(names.itself, v, layout.major);
  const bool elsewhere = given.discrete != nullptr || elements(v) == 0;
  checks.holds(v.data != nullptr || elsewhere, names.itself, " is null, must be ", ops::Seen{v});
  checks.aligned(names.itself, v.data, bits(layout.dtype) / 8);
}

/// The pointers of discrete experts are there if the problem says so, and the data if not.
void check_discrete(const TensorNames& names, const Storage& given, bool discrete,
                    const ProblemChecks& checks) {
  if (discrete) {
    checks.holds(given.discrete != nullptr, names.discrete,
                 " is null, must point to the experts; the problem says discrete");
    checks.aligned(names.discrete, given.discrete, alignof(void*));
    checks.absent(names.itself, given.view, "its experts are discrete");
  } else {
    checks.absent(names.discrete, given.discrete, "the problem says packed");
  }
}

/// What the problem says of one operand.
struct OperandRule {
  const TensorNames& names;
  QuantizedShape shape;
  bool discrete = false;
};

void check_scales(const Operand& operand, const OperandRule& rule, const TensorView& like,
                  const ProblemChecks& checks) {
  const TensorNames names{rule.names.scales, rule.names.discrete_scales};
  if (like.rank == 0) {
    checks.absent(names.itself, operand.scales, "its format has no block scales");
    checks.absent(names.discrete, operand.discrete_scales, "its format has no block scales");
    return;
  }
  const Storage scales{operand.scales, operand.discrete_scales};
  check_discrete(names, scales, rule.discrete, checks);
  check_storage(names, scales, ops::layout_of(like, rule.shape.scales_major), checks);
}

void check(const Operand& operand, const OperandRule& rule, const ProblemChecks& checks) {
  const QuantizedView like = quantized_view(rule.shape, nullptr);
  const Storage codes{operand.codes, operand.discrete};
  check_discrete(rule.names, codes, rule.discrete, checks);
  check_storage(rule.names, codes, ops::layout_of(like.codes, rule.shape.codes_major), checks);
  check_scales(operand, rule, like.scales, checks);
  if (info(rule.shape.format.kind).has_expert_scale)
    checks.present(rule.names.expert_scale, operand.expert_scale, rule.shape.experts,
                   "its format has one per expert");
  else
    checks.absent(rule.names.expert_scale, operand.expert_scale, "its format has none");
}

/// An array that is there if the problem says so.
template <class Element>
void check_array(std::string_view what, const Element* given, int64_t count,
                 const ProblemChecks& checks) {
  if (count < 0)
    checks.absent(what, given, "the problem has none");
  else
    checks.present(what, given, count, "the problem asks for it");
}

void check_out(const GroupedGemmProblem& p, const GroupedGemmArgs& args,
               const ProblemChecks& checks) {
  const int64_t rows = p.scatter ? p.tokens * p.top_k : p.rows;
  const ops::MatrixLayout layout =
      is_wgrad(p)   ? ops::MatrixLayout{p.out, {p.experts, p.n, p.k}, 3, p.out_major}
      : p.ranks > 1 ? ops::MatrixLayout{p.out, {p.ranks, rows, out_columns(p)}, 3}
                    : ops::MatrixLayout{p.out, {rows, out_columns(p)}, 2, p.out_major};
  const TensorNames& names = names_of(p.pass).out;
  const Storage out{args.out, args.discrete_out};
  check_discrete(names, out, p.discrete_out, checks);
  check_storage(names, out, layout, checks);
  const ops::MatrixLayout sums =
      p.activation ? ops::MatrixLayout{p.out, {p.rows, p.n}, 2, p.out_major} : layout;  // before it
  if (p.beta)
    check_storage({"c", {}}, {args.c}, sums, checks);
  else
    checks.absent("c", args.c, "the problem has no beta");
}

void check_bias(const GroupedGemmProblem& p, const GroupedGemmArgs& args,
                const ProblemChecks& checks) {
  constexpr TensorNames kBias{"bias", "discrete_bias"};
  check_array("bias_scale", args.bias_scale, p.bias_scale ? p.rows : -1, checks);
  if (!p.bias) {
    checks.absent(kBias.itself, args.bias, "the problem has none");
    checks.absent(kBias.discrete, args.discrete_bias, "the problem has none");
    return;
  }
  const Storage bias{args.bias, args.discrete_bias};
  check_discrete(kBias, bias, p.discrete_bias, checks);
  check_storage(kBias, bias, {p.bias_dtype, {p.experts, p.n}}, checks);
}

/// How many words say whether to accumulate; -1: none.
int64_t accumulate_words(const GroupedGemmProblem& p) {
  if (p.accumulate == Accumulate::kDevice) return 1;
  return p.accumulate == Accumulate::kPerExpert ? p.experts : -1;
}

void check(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  const ProblemChecks checks("grouped_gemm", p);
  const PassNames& names = names_of(p.pass);
  check(args.lhs, {names.lhs, lhs_shape(p), false}, checks);
  check(args.rhs, {names.rhs, rhs_shape(p), p.discrete_rhs}, checks);
  ops::check_offsets(p, args.offsets, checks);
  check_out(p, args, checks);
  check_bias(p, args, checks);
  check_array("alpha", args.alpha, p.alpha ? p.experts : -1, checks);
  check_array("beta", args.beta, p.beta ? p.experts : -1, checks);
  check_array("accumulate", args.accumulate, accumulate_words(p), checks);
  check_array("slot_of", args.slot_of, p.gather != Gather::kNo ? p.rows : -1, checks);
  check_array("place_of", args.place_of, p.scatter ? p.rows : -1, checks);
  check_array("prob", args.prob, p.activation && p.activation->prob ? p.rows : -1, checks);
  if (p.activation && p.activation->keep_z)
    checks.view("z", args.z, p.out, {p.rows, p.n});
  else
    checks.absent("z", args.z, "the problem does not keep it");
}

}  // namespace

QuantizedShape lhs_shape(const GroupedGemmProblem& p) {
  return {.kind = RowsKind::kRagged,
          .rows = p.gather == Gather::kLhs ? p.tokens : p.rows,
          .cols = p.pass == Pass::kFprop ? p.k : p.n,
          .experts = p.experts,
          .format = p.lhs,
          .axis = is_wgrad(p) ? Axis::kAlongRows : Axis::kAlongK,
          .codes_major = p.lhs_major,
          .scales_major = p.lhs_scales_major};
}

QuantizedShape rhs_shape(const GroupedGemmProblem& p) {
  const int64_t rows = p.gather == Gather::kRhs ? p.tokens : p.rows;
  return {.kind = is_wgrad(p) ? RowsKind::kRagged : RowsKind::kWeights,
          .rows = is_wgrad(p) ? rows : p.n,
          .cols = p.k,
          .experts = p.experts,
          .format = p.rhs,
          .axis = p.pass == Pass::kFprop ? Axis::kAlongK : Axis::kAlongRows,
          .codes_major = p.rhs_major,
          .scales_major = p.rhs_scales_major};
}

std::string to_string(const GroupedGemmProblem& p) { return ops::write_problem("grouped_gemm", p); }

GroupedGemmProblem parse_grouped_gemm_problem(std::string_view words) {
  return ops::read_problem<GroupedGemmProblem>("grouped_gemm", words);
}

GroupedGemmPlan find(const GroupedGemmProblem& problem, const Device& device,
                     std::string_view only) {
  check(problem);
  return backend::find(problem, device, only);
}

GroupedGemmPlan plan(const GroupedGemmProblem& problem, const Device& device,
                     std::string_view only) {
  check(problem);
  return backend::choose(problem, device, only);
}

void check(const GroupedGemmPlan& plan, const GroupedGemmArgs& args) {
  check(plan.problem, args);
  backend::check(plan, args);
}

void run(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
         Stream stream) {
  check(plan, args);
  run_checked(plan, args, workspace, stream);
}

void run_checked(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                 Stream stream) {
  ops::launch_gemm(plan, args, workspace, stream);
}

}  // namespace cadre
