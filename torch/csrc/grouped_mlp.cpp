// torch.ops.cadre.grouped_mlp and its backward; grouped_mlp_autograd.cpp differentiates it.
#include "grouped_mlp.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"

namespace cadre::door {
namespace {

const char* const kSchemas[] = {
    "grouped_mlp(Tensor x, Tensor offsets, Tensor? prob, Tensor[] weight1, Tensor[] bias1, "
    "Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale=None, *, Tensor? rng=None, "
    "bool[6] wants=[False, False, False, False, False, False], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0) -> (Tensor y, Tensor saved)",

    "grouped_mlp.out(Tensor x, Tensor offsets, Tensor? prob, Tensor[] weight1, Tensor[] bias1, "
    "Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale=None, *, Tensor? rng=None, "
    "bool[6] wants=[True, True, True, True, True, True], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0, bool zero_tail=False, "
    "Tensor(a!) y, Tensor(b!) saved) -> ()",

    "grouped_mlp_backward(Tensor dy, Tensor x, Tensor saved, Tensor offsets, Tensor? prob, "
    "Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale, *, "
    "Tensor? rng=None, bool[6] wants=[True, True, True, True, True, True], bool deferred=False, "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, int unit_budget=0) -> "
    "(Tensor dx, Tensor dprob, Tensor[] dweight1, Tensor[] dbias1, Tensor[] dweight2, "
    "Tensor[] dbias2, Tensor dbias2_scale, Tensor pending)",

    "grouped_mlp_backward.out(Tensor dy, Tensor x, Tensor saved, Tensor offsets, Tensor? prob, "
    "Tensor[] weight1, Tensor[] bias1, Tensor[] weight2, Tensor[] bias2, Tensor? bias2_scale, *, "
    "Tensor? rng=None, bool[6] wants=[True, True, True, True, True, True], "
    "str activation=\"swiglu\", str recipe=\"\", bool keep_h=False, int unit_budget=0, "
    "bool zero_tail=False, Tensor(a!)? dx, Tensor(b!)? dprob, Tensor(c!)[] dbias1, "
    "Tensor(d!)[] dbias2, Tensor(e!)? dbias2_scale, Tensor(f!) pending) -> ()",

    "grouped_mlp_wgrad(Tensor dy, Tensor x, Tensor saved, Tensor pending, Tensor offsets, "
    "Tensor? prob, Tensor[] weight1, Tensor[] weight2, *, "
    "bool[6] wants=[True, True, True, True, True, True], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0) -> "
    "(Tensor[] dweight1, Tensor[] dweight2)",

    "grouped_mlp_wgrad.out(Tensor dy, Tensor x, Tensor saved, Tensor pending, Tensor offsets, "
    "Tensor? prob, Tensor[] weight1, Tensor[] weight2, *, "
    "bool[6] wants=[True, True, True, True, True, True], str activation=\"swiglu\", "
    "str recipe=\"\", bool keep_h=False, int unit_budget=0, str accumulate=\"no\", "
    "Tensor? accumulate_flags=None, Tensor(a!)[] dweight1, Tensor(b!)[] dweight2) -> ()",

    "_grouped_mlp_rooms(int hidden, int features, int experts, ScalarType dtype, "
    "ScalarType weight_dtype, bool prob, bool[6] wants, str activation, str recipe, bool keep_h, "
    "str device) -> int[]",
};

/// A call on its device: every tensor as the core takes it.
class Mlp {
 public:
  Mlp(const MlpCall& call, const GroupedMlpProblem& problem)
      : call_(call),
        problem_(problem),
        here_(call.x),
        fc1(problem.parameters, tables_),
        fc2(problem.parameters, tables_) {
    fc1.read(call.weight1, call.bias1);
    fc2.read(call.weight2, call.bias2);
    args.offsets = offsets(call.offsets, call.x);
    args.x = view(call.x);
    args.prob = floats(call.prob, "prob");
    args.bias2_scale = floats(call.bias2_scale, "bias2_scale");
    if (call.rng) args.rng = random_state(*call.rng, call.x);
  }

  template <class Direction>
  void run(Direction direction, int64_t LayerMemory::*workspace_bytes) {
    tables_.write(call_.x, here_);
    args.fc1 = fc1.own;
    args.fc2 = fc2.own;
    const GroupedMlpPlan& made = planned(problem_, device(call_.x));
    const Scratch scratch(made.memory.*workspace_bytes, call_.x);
    direction(made, args, scratch.workspace(), here_.stream());
  }

 private:
  const MlpCall& call_;
  const GroupedMlpProblem& problem_;
  const Here here_;
  Tables tables_;

 public:
  LinearTables fc1, fc2;
  GroupedMlpArgs args;
};

void run_forward(const MlpCall& call, const GroupedMlpProblem& problem, const Tensor& y,
                 const Tensor& saved) {
  Mlp mlp(call, problem);
  mlp.args.y = view(y, call.x, "y");
  require_same_device(call.x, saved, "saved");
  const Kept kept(saved);
  mlp.args.saved = kept.memory();
  mlp.run(kForward, &LayerMemory::forward_workspace_bytes);
}

std::tuple<Tensor, Tensor> grouped_mlp(const Tensor& x, const Tensor& offsets, const Maybe& prob,
                                       TensorList weight1, TensorList bias1, TensorList weight2,
                                       TensorList bias2, const Maybe& bias2_scale, const Maybe& rng,
                                       MlpWants wants, Text activation, Text recipe, bool keep_h,
                                       int64_t unit_budget) {
  return translated([&] {
    const Tensor rows = rows_of(x, "x");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.tail = Tail::kZero;
    const Tensor y = at::empty(rows.sizes(), rows.options());
    const Tensor saved = bytes(rooms(p, device(rows)).saved.of(p.rows), rows);
    run_forward(call, p, y, saved);
    return std::tuple(y, saved);
  });
}

void grouped_mlp_out(const Tensor& x, const Tensor& offsets, const Maybe& prob, TensorList weight1,
                     TensorList bias1, TensorList weight2, TensorList bias2,
                     const Maybe& bias2_scale, const Maybe& rng, MlpWants wants, Text activation,
                     Text recipe, bool keep_h, int64_t unit_budget, bool zero_tail, const Tensor& y,
                     const Tensor& saved) {
  translated([&] {
    const Tensor rows = rows_of(x, "x");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    p.align = std::min(p.align, alignment({y}));
    run_forward(call, p, y, saved);
    bump_versions({y, saved});
  });
}

/// Where backward writes; what is not wanted is empty.
struct MlpGradients {
  Tensor dx, dprob, dbias2_scale, pending;
  TensorList dw1{}, dbias1{}, dw2{}, dbias2{};
};

bool computes(const GroupedMlpProblem& p) {
  return p.dgrad || p.wgrad1 || p.wgrad2 || (p.prob && p.dprob) ||
         (p.dbias && (p.bias1 || p.bias2));
}

void run_backward(const MlpCall& call, const GroupedMlpProblem& p,
                  const std::pair<Tensor, Tensor>& dy_and_saved, const MlpGradients& out) {
  if (!computes(p)) return;
  Mlp mlp(call, p);
  const auto& [dy, saved] = dy_and_saved;
  mlp.args.dy = view(dy, call.x, "dy");
  require_same_device(call.x, saved, "saved");
  require_same_device(call.x, out.pending, "pending");
  mlp.args.saved = memory_of(saved);
  if (p.dgrad) mlp.args.dx = view(out.dx, call.x, "dx");
  if (p.prob && p.dprob) mlp.args.dprob = written_floats(out.dprob, {"dprob", {p.rows}, call.x});
  if (p.bias2 && p.dbias && p.bias2_scale)
    mlp.args.dbias2_scale = written_floats(out.dbias2_scale, {"dbias2_scale", {p.rows}, call.x});
  if (p.dbias) {
    require_like(out.dbias1, call.bias1, "dbias1");
    require_like(out.dbias2, call.bias2, "dbias2");
  }
  mlp.fc1.write_dbias(out.dbias1);
  mlp.fc2.write_dbias(out.dbias2);
  mlp.fc1.write_dw(out.dw1);
  mlp.fc2.write_dw(out.dw2);
  const Kept pending(out.pending);
  if (p.deferred) mlp.args.pending = pending.memory();
  mlp.run(kBackward, &LayerMemory::backward_workspace_bytes);
}

using List = std::vector<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, List, List, List, List, Tensor, Tensor>;

Gradients grouped_mlp_backward(const Tensor& dy, const Tensor& x, const Tensor& saved,
                               const Tensor& offsets, const Maybe& prob, TensorList weight1,
                               TensorList bias1, TensorList weight2, TensorList bias2,
                               const Maybe& bias2_scale, const Maybe& rng, MlpWants wants,
                               bool deferred, Text activation, Text recipe, bool keep_h,
                               int64_t unit_budget) {
  return translated([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.tail = Tail::kZero;
    p.deferred = deferred;
    p.align = std::min(p.align, alignment({drows}));
    const auto row_floats = [&](bool wanted) {
      return at::empty({wanted ? p.rows : 0}, rows.options().dtype(at::kFloat));
    };
    const auto like = [](bool wanted, TensorList list) {
      return wanted ? empty_like(list) : List();
    };
    Gradients out{at::empty(p.dgrad ? rows.sizes() : at::IntArrayRef{0}, rows.options()),
                  row_floats(p.prob && p.dprob),
                  like(p.wgrad1 && !deferred, weight1),
                  like(p.dbias, bias1),
                  like(p.wgrad2 && !deferred, weight2),
                  like(p.dbias, bias2),
                  row_floats(p.dbias && p.bias2_scale),
                  bytes(deferred ? rooms(p, device(rows)).pending.of(p.rows) : 0, rows)};
    const auto& [dx, dprob, dw1, dbias1, dw2, dbias2, dscale, pending] = out;
    run_backward(call, p, {drows, aligned(saved)},
                 {dx, dprob, dscale, pending, dw1, dbias1, dw2, dbias2});
    return out;
  });
}

void grouped_mlp_backward_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                              const Tensor& offsets, const Maybe& prob, TensorList weight1,
                              TensorList bias1, TensorList weight2, TensorList bias2,
                              const Maybe& bias2_scale, const Maybe& rng, MlpWants wants,
                              Text activation, Text recipe, bool keep_h, int64_t unit_budget,
                              bool zero_tail, const Maybe& dx, const Maybe& dprob,
                              TensorList dbias1, TensorList dbias2, const Maybe& dbias2_scale,
                              const Tensor& pending) {
  translated([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const MlpCall call{rows,        offsets, prob,  weight1,    bias1,  weight2, bias2,
                       bias2_scale, rng,     wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    p.deferred = true;
    p.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    const auto or_none = [](const Maybe& t) { return t.value_or(Tensor()); };
    p.align = std::min(p.align, alignment({drows, or_none(dx)}));
    run_backward(
        call, p, {drows, aligned(saved)},
        {or_none(dx), or_none(dprob), or_none(dbias2_scale), pending, {}, dbias1, {}, dbias2});
    bump_versions({or_none(dx), or_none(dprob), or_none(dbias2_scale), pending});
    bump_versions(dbias1);
    bump_versions(dbias2);
  });
}

void grouped_mlp_wgrad_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                           const Tensor& pending, const Tensor& offsets, const Maybe& prob,
                           TensorList weight1, TensorList weight2, MlpWants wants, Text activation,
                           Text recipe, bool keep_h, int64_t unit_budget, Text accumulate,
                           const Maybe& accumulate_flags, TensorList dweight1,
                           TensorList dweight2) {
  translated([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const MlpCall call{rows, offsets, prob,  weight1,    {},     weight2, {},
                       {},   {},      wants, activation, recipe, keep_h,  unit_budget};
    GroupedMlpProblem p = problem_of(call);
    const Parameters dw1(dweight1, "dweight1", offsets, 2), dw2(dweight2, "dweight2", offsets, 2);
    TORCH_CHECK_VALUE(dw1.dtype() == dw2.dtype() && dw1.discrete == dw2.discrete,
                      "dweight1 and dweight2 differ in dtype or in being packed, must not");
    p.deferred = true;
    p.accumulate = parse_accumulate(accumulate);
    p.parameters.dw = dw1.dtype();
    p.parameters.discrete_dw = dw1.discrete;
    p.align = std::min({p.align, alignment({drows}), alignment(dweight1), alignment(dweight2)});
    require_fits(dw1, weight1[0]);
    require_fits(dw2, weight2[0]);
    require_same_device(rows, saved, "saved");
    require_same_device(rows, pending, "pending");
    const Tensor kept = aligned(saved), left = aligned(pending);
    Mlp mlp(call, p);
    mlp.args.dy = view(drows, rows, "dy");
    mlp.args.saved = memory_of(kept);
    mlp.args.pending = memory_of(left);
    mlp.fc1.write_dw(dweight1);
    mlp.fc2.write_dw(dweight2);
    mlp.fc1.own.accumulate = mlp.fc2.own.accumulate =
        accumulate_words(accumulate_flags, p.accumulate, p.experts, rows);
    mlp.run(kWgrad, &LayerMemory::wgrad_workspace_bytes);
    bump_versions(dweight1);
    bump_versions(dweight2);
  });
}

std::tuple<List, List> grouped_mlp_wgrad(const Tensor& dy, const Tensor& x, const Tensor& saved,
                                         const Tensor& pending, const Tensor& offsets,
                                         const Maybe& prob, TensorList weight1, TensorList weight2,
                                         MlpWants wants, Text activation, Text recipe, bool keep_h,
                                         int64_t unit_budget) {
  std::tuple<List, List> dw{empty_like(weight1), empty_like(weight2)};
  grouped_mlp_wgrad_out(dy, x, saved, pending, offsets, prob, weight1, weight2, wants, activation,
                        recipe, keep_h, unit_budget, "no", {}, std::get<0>(dw), std::get<1>(dw));
  return dw;
}

void want(GroupedMlpProblem& p, const MlpWants& wants) {
  p.dgrad = wants[kDx];
  p.dprob = wants[kDprob];
  p.wgrad1 = wants[kDw1];
  p.wgrad2 = wants[kDw2];
  p.dbias = wants[kDbias] || wants[kDbias2Scale];
}

/// Bytes of saved, and of saved a row, and of pending likewise.
std::vector<int64_t> grouped_mlp_rooms(int64_t hidden, int64_t features, int64_t experts,
                                       at::ScalarType dtype, at::ScalarType weight_dtype, bool prob,
                                       MlpWants wants, Text activation, Text recipe, bool keep_h,
                                       Text device) {
  return translated([&] {
    GroupedMlpProblem p = activated(activation);
    p.hidden = hidden;
    p.features = features;
    p.experts = int(experts);
    p.dtype = element_type(dtype);
    p.recipe = parse_recipe(recipe.empty() ? name(p.dtype) : recipe);
    p.parameters.weight = element_type(weight_dtype);
    p.prob = prob;
    p.keep_h = keep_h;
    p.deferred = true;
    want(p, wants);
    const Rooms r = rooms(p, parse_device(device));
    return std::vector<int64_t>{r.saved.begin, r.saved.row, r.pending.begin, r.pending.row};
  });
}

void require_alike(const Parameters& one, const Parameters& two, bool majors) {
  TORCH_CHECK_VALUE(one.discrete == two.discrete && one.dtype() == two.dtype(), two.what, " is ",
                    two.discrete ? "discrete " : "packed ", two.first().scalar_type(), ", must be ",
                    one.discrete ? "discrete " : "packed ", one.first().scalar_type(), " as ",
                    one.what);
  TORCH_CHECK_VALUE(!majors || major_of(one.first()) == major_of(two.first()), two.what,
                    " has strides ", two.first().strides(), ", must lie as ", one.what,
                    " with strides ", one.first().strides(), ": both transposed, or neither");
}

void add_biases(GroupedMlpProblem& p, const MlpCall& call) {
  p.bias1 = !call.bias1.empty();
  p.bias2 = !call.bias2.empty();
  if (!p.bias1 && !p.bias2) return;
  const Parameters one(p.bias1 ? call.bias1 : call.bias2, p.bias1 ? "bias1" : "bias2", call.offsets,
                       1);
  if (p.bias1 && p.bias2) require_alike(one, {call.bias2, "bias2", call.offsets, 1}, false);
  const auto require_width = [](at::TensorList bias, const char* what, int64_t width) {
    TORCH_CHECK_VALUE(bias.empty() || bias[0].size(-1) == width, what, " has shape ",
                      bias[0].sizes(), ", must end in ", width, ", the rows of an expert's weight");
  };
  require_width(call.bias1, "bias1", call.weight1[0].size(-2));
  require_width(call.bias2, "bias2", call.weight2[0].size(-2));
  for (at::TensorList bias : {call.bias1, call.bias2})
    if (!bias.empty()) require_same_device(call.x, bias[0], "bias");
  p.parameters.bias = p.parameters.dbias = one.dtype();
  p.parameters.discrete_bias = one.discrete;
  p.bias2_scale = p.bias2 && call.bias2_scale.has_value();
}

}  // namespace

GroupedMlpProblem problem_of(const MlpCall& call) {
  const Parameters w1(call.weight1, "weight1", call.offsets, 2);
  const Parameters w2(call.weight2, "weight2", call.offsets, 2);
  require_alike(w1, w2, true);
  require_same_device(call.x, w1.first(), "weight1");
  require_same_device(call.x, w2.first(), "weight2");
  GroupedMlpProblem p = activated(call.activation);
  p.rows = call.x.size(0);
  p.hidden = w1.first().size(-1);
  p.features = w2.first().size(-1);
  const int64_t columns = info(p.activation).gated ? 2 * p.features : p.features;
  TORCH_CHECK_VALUE(call.x.size(1) == p.hidden && w2.first().size(-2) == p.hidden &&
                        w1.first().size(-2) == columns,
                    "x, weight1 and weight2 have shapes ", call.x.sizes(), ", ", w1.first().sizes(),
                    " and ", w2.first().sizes(), ", must end in [R, H], [", columns,
                    ", H] and [H, ", p.features, "]; ", info(p.activation).name, " is ",
                    info(p.activation).gated ? "gated" : "not gated");
  p.experts = w1.experts;
  p.recipe = recipe_or_own(call.recipe, call.x);
  p.dtype = element_type(call.x.scalar_type());
  p.parameters.weight = p.parameters.dw = w1.dtype();
  p.parameters.weight_major = major_of(w1.first());
  p.parameters.discrete_weight = p.parameters.discrete_dw = w1.discrete;
  p.prob = call.prob.has_value();
  p.keep_h = call.keep_h;
  p.unit_budget = int(call.unit_budget);
  p.align = std::min({alignment({call.x}), alignment(call.weight1), alignment(call.weight2)});
  add_biases(p, call);
  want(p, call.wants);
  if (call.prob) require(*call.prob, {"prob", {p.rows}, call.x});
  if (call.bias2_scale) require(*call.bias2_scale, {"bias2_scale", {p.rows}, call.x});
  return p;
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  for (const char* schema : kSchemas) m.def(schema);
  m.impl("_grouped_mlp_rooms", grouped_mlp_rooms);
}

static void implement(torch::Library& m) {
  m.impl("grouped_mlp", grouped_mlp);
  m.impl("grouped_mlp.out", grouped_mlp_out);
  m.impl("grouped_mlp_backward", grouped_mlp_backward);
  m.impl("grouped_mlp_backward.out", grouped_mlp_backward_out);
  m.impl("grouped_mlp_wgrad", grouped_mlp_wgrad);
  m.impl("grouped_mlp_wgrad.out", grouped_mlp_wgrad_out);
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
