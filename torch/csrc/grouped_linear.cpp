// torch.ops.cadre.grouped_linear and its backward; grouped_linear_autograd.cpp differentiates it.
#include "grouped_linear.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"
#include "call_memory.h"

namespace cadre::door {
namespace {

const char* const kSchemas[] = {
    "grouped_linear(Tensor x, Tensor offsets, Tensor[] weight, Tensor[] bias, "
    "Tensor? bias_scale=None, *, Tensor? rng=None, bool[4] wants=[False, False, False, False], "
    "str recipe=\"\", bool save_input=False, int unit_budget=0) -> (Tensor y, Tensor saved)",

    "grouped_linear.out(Tensor x, Tensor offsets, Tensor[] weight, Tensor[] bias, "
    "Tensor? bias_scale=None, *, Tensor? rng=None, bool[4] wants=[True, True, True, True], "
    "str recipe=\"\", bool save_input=False, int unit_budget=0, bool refresh_weights=True, "
    "bool zero_tail=False, Tensor(a!) y, Tensor(b!) saved, Tensor(c!)? weight_cache) -> ()",

    "grouped_linear_backward(Tensor dy, Tensor x, Tensor saved, Tensor offsets, Tensor[] weight, "
    "Tensor[] bias, Tensor? bias_scale, *, Tensor? rng=None, "
    "bool[4] wants=[True, True, True, True], bool deferred=False, str recipe=\"\", "
    "bool save_input=False, int unit_budget=0, ScalarType? dweight_dtype=None) -> "
    "(Tensor dx, Tensor[] dweight, Tensor[] dbias, "
    "Tensor dbias_scale, Tensor pending)",

    "grouped_linear_backward.out(Tensor dy, Tensor x, Tensor saved, Tensor offsets, "
    "Tensor[] weight, Tensor[] bias, Tensor? bias_scale, *, Tensor? rng=None, "
    "bool[4] wants=[True, True, True, True], str recipe=\"\", bool save_input=False, "
    "int unit_budget=0, Tensor? weight_cache=None, bool zero_tail=False, Tensor(a!)? dx, "
    "Tensor(b!)[] dbias, Tensor(c!)? dbias_scale, Tensor(d!) pending) -> ()",

    "grouped_linear_wgrad.out(Tensor dy, Tensor x, Tensor saved, Tensor pending, Tensor offsets, "
    "Tensor[] weight, *, bool[4] wants=[True, True, True, True], str recipe=\"\", "
    "bool save_input=False, int unit_budget=0, str accumulate=\"no\", "
    "Tensor? accumulate_flags=None, Tensor(a!)[] dweight) -> ()",

    "_memory(Tensor on, int count) -> Tensor",
};

/// A call's tensors as the arguments that the library takes, and the stream to run on.
class LinearLaunch {
 public:
  LinearLaunch(const LinearCall& call, const GroupedLinearProblem& problem,
               const CurrentStream& current)
      : bindings(problem.parameters, tables_), call_(call), current_(current) {
    bindings.bind(call.weight, call.bias);
    args.offsets = offsets(call.offsets, call.x);
    args.x = view(call.x, "x");
    args.bias_scale = floats(call.bias_scale, "bias_scale");
    if (call.rng) args.rng = random_state(*call.rng, call.x);
  }

  template <class Direction>
  void run(Direction direction, const GroupedLinearPlan& plan, int64_t workspace_bytes) {
    tables_.write(call_.x, current_);
    args.parameters = bindings.parameters;
    const Scratch scratch(workspace_bytes, call_.x);
    direction(plan, args, scratch.workspace(), current_.stream());
  }

  LinearBindings bindings;
  GroupedLinearArgs args;

 private:
  const LinearCall& call_;
  const CurrentStream& current_;
  PointerTables tables_;
};

}  // namespace

bool reads_x(const LinearCall& call) {
  return call.wants[kWantsDw] && (call.save_input || wgrad_reads_x(call.x, call.recipe));
}

void run_forward(const LinearCall& call, const GroupedLinearProblem& problem,
                 const ForwardOut& out) {
  const CurrentStream current(call.x);
  LinearLaunch linear(call, problem, current);
  require_type(out.y, call.x.scalar_type(), "y");
  linear.args.y = view(out.y, call.x, "y");
  require_same_device(call.x, out.saved, "saved");
  if (out.weight_cache) require_same_device(call.x, *out.weight_cache, "weight_cache");
  const AlignedOutput saved(out.saved, "saved");
  linear.args.saved = saved.memory();
  std::optional<AlignedOutput> cache;
  if (out.weight_cache)
    linear.args.weight_cache = cache.emplace(*out.weight_cache, "weight_cache").memory();
  linear.args.refresh_weights = out.refresh;
  const GroupedLinearPlan& plan = cached_plan(problem, device(call.x));
  linear.run(kForward, plan, plan.memory.forward_workspace_bytes);
}

void run_backward(const LinearCall& call, const GroupedLinearProblem& problem,
                  const std::pair<Tensor, Tensor>& dy_and_saved, const BackwardOut& out) {
  const CurrentStream current(call.x);
  LinearLaunch linear(call, problem, current);
  const auto& [dy, saved] = dy_and_saved;
  linear.args.dy = view(dy, call.x, "dy");
  require_same_device(call.x, saved, "saved");
  require_same_device(call.x, out.pending, "pending");
  if (out.weight_cache) require_same_device(call.x, *out.weight_cache, "weight_cache");
  linear.args.saved = memory_of(saved, "saved");
  if (problem.dgrad) {
    require_type(out.dx, call.x.scalar_type(), "dx");
    linear.args.dx = view(out.dx, call.x, "dx");
  }
  if (problem.bias && problem.dbias) {
    require_like(out.dbias, call.bias, "dbias");
    linear.bindings.bind_dbias(out.dbias);
    if (problem.bias_scale)
      linear.args.dbias_scale =
          written_floats(out.dbias_scale, {"dbias_scale", {problem.rows}, call.x});
  }
  const AlignedOutput pending(out.pending, "pending");
  if (problem.options.deferred)
    linear.args.pending = pending.memory();
  else if (problem.wgrad)
    linear.bindings.bind_dw(out.dw);
  linear.bindings.parameters.accumulate = out.accumulate;
  const Tensor cache = out.weight_cache ? aligned(*out.weight_cache, "weight_cache") : Tensor();
  if (out.weight_cache) linear.args.weight_cache = memory_of(cache, "weight_cache");
  const GroupedLinearPlan& plan = cached_plan(problem, device(call.x));
  if (!learns(plan)) return;
  linear.run(kBackward, plan, plan.memory.backward_workspace_bytes);
}

void plan_dw(GroupedLinearProblem& p, const LinearCall& call, TensorList dw,
             Accumulate accumulate) {
  const Parameters gradients(dw, "dweight", call.offsets, 2);
  require_fits(gradients, call.weight[0]);
  p.options.accumulate = accumulate;
  p.parameters.dw = gradients.dtype();
  p.parameters.discrete_dw = gradients.discrete;
  p.options.align = std::min(p.options.align, alignment(dw));
}

void run_wgrad(const WgradCall& call, const LinearCall& linear_call, Accumulate accumulate,
               TensorList dw) {
  GroupedLinearProblem p = problem_of(linear_call);
  p.options.deferred = true;
  p.options.align = std::min(p.options.align, alignment({call.dy}));
  plan_dw(p, linear_call, dw, accumulate);
  require_same_device(call.x, call.saved, "saved");
  require_same_device(call.x, call.pending, "pending");
  const CurrentStream current(call.x);
  LinearLaunch linear(linear_call, p, current);
  linear.args.dy = view(call.dy, call.x, "dy");
  linear.args.saved = memory_of(call.saved, "saved");
  linear.args.pending = memory_of(call.pending, "pending");
  linear.bindings.bind_dw(dw);
  linear.bindings.parameters.accumulate =
      accumulate_words(call.accumulate_flags, accumulate, p.experts, call.x);
  const GroupedLinearPlan& plan = cached_plan(p, device(call.x));
  linear.run(kWgrad, plan, plan.memory.wgrad_workspace_bytes);
}

namespace {

std::tuple<Tensor, Tensor> grouped_linear(const Tensor& x, const Tensor& offsets, TensorList weight,
                                          TensorList bias, const Maybe& bias_scale,
                                          const Maybe& rng, LinearWants wants, Text recipe,
                                          bool save_input, int64_t unit_budget) {
  return translate_errors([&] {
    const Tensor rows = rows_of(x, "x");
    const LinearCall call{rows, offsets, weight, bias,       bias_scale,
                          rng,  wants,   recipe, save_input, unit_budget};
    GroupedLinearProblem problem = problem_of(call);
    problem.options.tail = Tail::kZero;
    const Tensor y = at::empty({problem.rows, problem.n}, rows.options());
    const Tensor saved =
        bytes(memory_bounds(problem, device(rows)).saved.bytes(problem.rows), rows);
    run_forward(call, problem, {y, saved});
    return std::tuple(y, saved);
  });
}

void grouped_linear_out(const Tensor& x, const Tensor& offsets, TensorList weight, TensorList bias,
                        const Maybe& bias_scale, const Maybe& rng, LinearWants wants, Text recipe,
                        bool save_input, int64_t unit_budget, bool refresh_weights, bool zero_tail,
                        const Tensor& y, const Tensor& saved, const Maybe& weight_cache) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x");
    const LinearCall call{rows, offsets, weight, bias,       bias_scale,
                          rng,  wants,   recipe, save_input, unit_budget};
    GroupedLinearProblem problem = problem_of(call);
    problem.options.cache_weights = weight_cache.has_value();
    problem.options.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    problem.options.align = std::min(problem.options.align, alignment({y}));
    run_forward(call, problem, {y, saved, weight_cache, refresh_weights});
    bump_versions({y, saved});
    if (weight_cache && refresh_weights) bump_versions(*weight_cache);
  });
}

LinearGradients grouped_linear_backward(const Tensor& dy, const Tensor& x, const Tensor& saved,
                                        const Tensor& offsets, TensorList weight, TensorList bias,
                                        const Maybe& bias_scale, const Maybe& rng,
                                        LinearWants wants, bool deferred, Text recipe,
                                        bool save_input, int64_t unit_budget,
                                        std::optional<at::ScalarType> dweight_dtype) {
  return translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const LinearCall call{rows, offsets, weight, bias,       bias_scale,
                          rng,  wants,   recipe, save_input, unit_budget};
    GroupedLinearProblem p = problem_of(call);
    if (dweight_dtype) p.parameters.dw = float_type(*dweight_dtype, "dweight");
    p.options.tail = Tail::kZero;
    p.options.deferred = deferred;
    p.options.align = std::min(p.options.align, alignment({drows}));
    const auto none = [&] { return at::empty({0}, rows.options()); };
    const bool has_dbias = p.bias && p.dbias;
    const int64_t pending = deferred ? memory_bounds(p, device(rows)).pending.bytes(p.rows) : 0;
    LinearGradients out{
        p.dgrad ? at::empty({p.rows, p.k}, rows.options()) : none(),
        p.wgrad && !deferred ? empty_like(weight, dweight_dtype) : std::vector<Tensor>(),
        has_dbias ? empty_like(bias) : std::vector<Tensor>(),
        at::empty({has_dbias && bias_scale ? p.rows : 0}, rows.options().dtype(at::kFloat)),
        bytes(pending, rows)};
    const auto& [dx, dw, dbias, dbias_scale, pending_out] = out;
    run_backward(call, p, {drows, aligned(saved, "saved")},
                 {dx, dbias_scale, pending_out, dw, dbias});
    return out;
  });
}

void grouped_linear_backward_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                                 const Tensor& offsets, TensorList weight, TensorList bias,
                                 const Maybe& bias_scale, const Maybe& rng, LinearWants wants,
                                 Text recipe, bool save_input, int64_t unit_budget,
                                 const Maybe& weight_cache, bool zero_tail, const Maybe& dx,
                                 TensorList dbias, const Maybe& dbias_scale,
                                 const Tensor& pending) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const LinearCall call{rows, offsets, weight, bias,       bias_scale,
                          rng,  wants,   recipe, save_input, unit_budget};
    GroupedLinearProblem p = problem_of(call);
    p.options.deferred = true;
    p.options.cache_weights = weight_cache.has_value();
    p.options.tail = zero_tail ? Tail::kZero : Tail::kKeep;
    p.options.align = std::min(p.options.align, alignment({drows, dx.value_or(Tensor())}));
    const BackwardOut out{dx.value_or(Tensor()), dbias_scale.value_or(Tensor()), pending, {}, dbias,
                          weight_cache};
    run_backward(call, p, {drows, aligned(saved, "saved")}, out);
    bump_versions({out.dx, out.dbias_scale, pending});
    bump_versions(dbias);
  });
}

void grouped_linear_wgrad_out(const Tensor& dy, const Tensor& x, const Tensor& saved,
                              const Tensor& pending, const Tensor& offsets, TensorList weight,
                              LinearWants wants, Text recipe, bool save_input, int64_t unit_budget,
                              Text accumulate, const Maybe& accumulate_flags, TensorList dweight) {
  translate_errors([&] {
    const Tensor rows = rows_of(x, "x"), drows = rows_of(dy, "dy");
    const LinearCall call{rows, offsets, weight, {},         {},
                          {},   wants,   recipe, save_input, unit_budget};
    run_wgrad({drows, rows, aligned(saved, "saved"), aligned(pending, "pending"), accumulate_flags},
              call, parse_accumulate(accumulate), dweight);
    bump_versions(dweight);
  });
}

/// Bounds of the bytes of saved and of pending, each fixed and per row, and the bytes of the weight
/// cache.
std::vector<int64_t> grouped_linear_memory_bounds(int64_t n, int64_t k, int64_t experts,
                                                  at::ScalarType dtype, at::ScalarType weight_dtype,
                                                  LinearWants wants, Text recipe, bool save_input,
                                                  Text device) {
  return translate_errors([&] {
    GroupedLinearProblem p{.n = n, .k = k, .experts = int(experts)};
    p.dtype = float_type(dtype, "x");
    p.recipe = parse_recipe(recipe.empty() ? name(p.dtype) : recipe);
    p.parameters.weight = float_type(weight_dtype, "weight");
    p.dgrad = wants[kWantsDx];
    p.wgrad = wants[kWantsDw];
    p.options.save_input = save_input;
    p.options.deferred = true;
    const MemoryBounds bounds = memory_bounds_of_any_rows(p, parse_device(device));
    p.options.cache_weights = true;
    const int64_t cache = plan(p, parse_device(device)).memory.weight_cache_bytes;
    return std::vector<int64_t>{bounds.saved.fixed, bounds.saved.per_row, bounds.pending.fixed,
                                bounds.pending.per_row, cache};
  });
}

}  // namespace

GroupedLinearProblem problem_of(const LinearCall& call) {
  const Parameters w(call.weight, "weight", call.offsets, 2);
  const Tensor& x = call.x;
  require_same_device(x, w.first(), "weight");
  GroupedLinearProblem p{.rows = x.size(0), .n = w.first().size(-2), .k = w.first().size(-1)};
  TORCH_CHECK_VALUE(x.size(1) == p.k, "x has shape ", x.sizes(), ", must be [R, ", p.k,
                    "]; weight has shape ", w.first().sizes());
  p.experts = w.experts;
  p.dtype = float_type(x.scalar_type(), "x");
  p.recipe = recipe_or_default(call.recipe, x);
  p.parameters.weight = p.parameters.dw = w.dtype();
  p.parameters.weight_major = major_of(w.first());
  p.parameters.discrete_weight = p.parameters.discrete_dw = w.discrete;
  p.bias = !call.bias.empty();
  p.options.align = std::min(alignment({x}), alignment(call.weight));
  p.dgrad = call.wants[kWantsDx];
  p.wgrad = call.wants[kWantsDw];
  p.dbias = call.wants[kWantsDbias] || call.wants[kWantsDbiasScale];
  p.options.save_input = call.save_input;
  p.options.unit_budget = int_of(call.unit_budget, "unit_budget");
  TORCH_CHECK_VALUE(p.bias || !call.bias_scale, "bias_scale is given, must be None; bias is empty");
  if (!p.bias) return p;
  const Parameters b(call.bias, "bias", call.offsets, 1);
  require_same_device(x, b.first(), "bias");
  TORCH_CHECK_VALUE(b.first().size(-1) == p.n, "bias has shape ", b.first().sizes(),
                    ", must end in ", p.n, ", the rows of an expert's weight");
  p.parameters.bias = p.parameters.dbias = b.dtype();
  p.parameters.discrete_bias = b.discrete;
  p.bias_scale = call.bias_scale.has_value();
  if (p.bias_scale) require(*call.bias_scale, {"bias_scale", {p.rows}, x});
  return p;
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  for (const char* schema : kSchemas) m.def(schema);
  m.def(
      "_grouped_linear_memory_bounds(int n, int k, int experts, ScalarType dtype, "
      "ScalarType weight_dtype, bool[4] wants, str recipe, bool save_input, str device) -> int[]",
      grouped_linear_memory_bounds);
}

static void implement(torch::Library& m) {
  m.impl(
      "_memory", +[](const Tensor& on, int64_t count) { return bytes(count, on); });
  m.impl("grouped_linear", grouped_linear);
  implement_out(m, "grouped_linear", grouped_linear_out);
  m.impl("grouped_linear_backward", grouped_linear_backward);
  implement_out(m, "grouped_linear_backward", grouped_linear_backward_out);
  implement_out(m, "grouped_linear_wgrad", grouped_linear_wgrad_out);
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
