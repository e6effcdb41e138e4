// What a grouped linear layer checks of its arguments, before anything is launched.
#include "cadre/wgrad_queue.h"
#include "layers/checks.h"
#include "layers/grouped_linear.h"

namespace cadre::layers {
namespace {

using enum linear::Tensor;

using LinearChecks = ops::Checks<GroupedLinearProblem>;

/// The steps of a phase that will run.
template <class Visit>
void for_steps(const LinearRun& linear, Phase phase, Visit&& visit) {
  for (const LayerStep& step : linear.plan.steps)
    if (step.phase == phase && !linear.skips(step)) visit(step);
}

/// What the steps of a phase read.
struct Needs {
  uint32_t tensors = 0;
  bool random = false;

  bool reads(int id) const { return (tensors >> id & 1) != 0; }
  bool reads_copy_of_w() const { return reads(kWAlongK) || reads(kWAlongRows); }
};

Needs needs(const LinearRun& linear, Phase phase) {
  Needs all;
  for_steps(linear, phase, [&](const LayerStep& step) {
    for (const int id : step.reads)
      if (id != kNone) all.tensors |= 1u << id;
    const auto* quantize = std::get_if<QuantizePlan>(&step.plan);
    all.random = all.random || (quantize != nullptr && draws(quantize->problem));
  });
  return all;
}

/// What the products of a phase ask of their arguments.
void check_products(const LinearRun& linear, Phase phase) {
  for_steps(linear, phase, [&](const LayerStep& step) {
    if (const auto* product = std::get_if<GroupedGemmPlan>(&step.plan))
      check(*product, arguments(linear, step, *product));
  });
}

/// From dimension `first` on.
bool same_strides(const TensorView& got, const TensorView& want, int first) {
  bool same = true;
  for (int d = first; d < want.rank; ++d)
    same = same && (want.shape[size_t(d)] == 1 || got.stride[size_t(d)] == want.stride[size_t(d)]);
  return same;
}

bool same_shape(const TensorView& got, const TensorView& want) {
  return got.dtype == want.dtype && got.rank == want.rank && got.shape == want.shape;
}

bool same_layout(const TensorView& got, const TensorView& want) {
  return same_shape(got, want) && same_strides(got, want, 0);
}

/// E pointers, or one packed view.
template <class Pointer>
struct Parameter {
  std::string_view name, table;  ///< literals: a run's checks format nothing
  bool discrete;
  const TensorView& packed;
  Pointer* pointers;
};
template <class Pointer>
Parameter(std::string_view, std::string_view, bool, const TensorView&, Pointer*)
    -> Parameter<Pointer>;

/// Discrete experts lie as `want` does, however far apart; a view that is there says the same.
template <class Pointer>
void check_pointers(const LinearChecks& checks, const Parameter<Pointer>& parameter,
                    const TensorView& want) {
  checks.holds(parameter.pointers != nullptr, parameter.table, " is null, must point to ",
               want.shape[0], " pointers; the problem says that ", parameter.name, " is discrete");
  checks.aligned(parameter.table, parameter.pointers, alignof(void*));
  const TensorView& got = parameter.packed;
  checks.holds(
      got.rank == 0 || (got.data == nullptr && same_shape(got, want) && same_strides(got, want, 1)),
      parameter.name, " is ", ops::Seen{got}, got.data != nullptr ? " with data" : "",
      ", must be empty, or ", ops::Seen{want}, " at null; the problem says that it is discrete");
}

void check_weights(const LinearChecks& checks, const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LinearParameters& own = linear.args.parameters;
  const Parameter w{"w", "discrete_w", p.parameters.discrete_weight, own.w, own.discrete_w};
  if (w.discrete) return check_pointers(checks, w, weight_layout(p, p.parameters.weight));
  if (p.parameters.weight_major == Major::kRow)
    return checks.view("w", own.w, p.parameters.weight, {p.experts, p.n, p.k});
  const TensorView want = weight_layout(p, p.parameters.weight);
  checks.holds(same_layout(own.w, want) && own.w.data != nullptr, "w is ", ops::Seen{own.w},
               own.w.data == nullptr ? " at null" : "", ", must be ", ops::Seen{want},
               "; the problem says weight_major=column");
}

void check_weight_gradients(const LinearChecks& checks, const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LinearParameters& own = linear.args.parameters;
  const Parameter dw{"dw", "discrete_dw", p.parameters.discrete_dw, own.dw, own.discrete_dw};
  const TensorView want = weight_layout(p, p.parameters.dw);
  if (dw.discrete) return check_pointers(checks, dw, want);
  checks.holds(same_layout(own.dw, want), "dw is ", ops::Seen{own.dw}, ", must be ",
               ops::Seen{want}, "; a gradient is written in place, so it has this very layout");
  checks.holds(own.dw.data != nullptr, "dw is null, must be ", ops::Seen{want});
}

/// The words of device memory that say where a gradient is added to.
struct Words {
  std::string_view what;
  Accumulate accumulate;
  const int32_t* words;
};
void check_accumulate(const LinearChecks& checks, const Words& given, int experts) {
  if (given.accumulate == Accumulate::kDevice)
    checks.present(given.what, given.words, 1, "one word decides");
  if (given.accumulate == Accumulate::kPerExpert)
    checks.present(given.what, given.words, experts, "every expert has its word");
}

void check_biases(const LinearChecks& checks, const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LinearParameters& own = linear.args.parameters;
  const Parameter bias{"bias", "discrete_bias", p.parameters.discrete_bias, own.bias,
                       own.discrete_bias};
  if (bias.discrete)
    return check_pointers(checks, bias, view(nullptr, p.parameters.bias, {p.experts, p.n}));
  checks.view("bias", own.bias, p.parameters.bias, {p.experts, p.n});
}

void check_bias_gradients(const LinearChecks& checks, const LinearRun& linear) {
  const GroupedLinearProblem& p = linear.plan.problem;
  if (!p.bias || p.return_bias || !p.dbias) return;
  const LinearParameters& own = linear.args.parameters;
  const Parameter dbias{"dbias", "discrete_dbias", p.parameters.discrete_bias, own.dbias,
                        own.discrete_dbias};
  if (dbias.discrete) {
    check_pointers(checks, dbias, view(nullptr, p.parameters.dbias, {p.experts, p.n}));
  } else {
    checks.view("dbias", own.dbias, p.parameters.dbias, {p.experts, p.n});
  }
  check_accumulate(checks, {"accumulate_bias", p.options.accumulate_bias, own.accumulate_bias},
                   p.experts);
  if (!p.bias_scale) return;
  check_biases(checks, linear);
  checks.present("bias_scale", linear.args.bias_scale, p.rows);
  checks.present("dbias_scale", linear.args.dbias_scale, p.rows);
}

void check_rng(const LinearChecks& checks, const uint64_t* rng, bool needed) {
  if (needed) checks.present("rng", rng, 2, "the recipe rounds stochastically");
}

/// What the parts of a given copy are called. Literals: a run's checks allocate nothing.
struct CopyNames {
  std::string_view codes, scales, expert_scale;
  const char* why;
};
constexpr const char* kXComes = "x comes quantised, in the format of the recipe";
constexpr CopyNames kNamesAlongK{"x_along_k.codes", "x_along_k.scales", "x_along_k.expert_scale",
                                 kXComes};
constexpr CopyNames kNamesAlongRows{"x_along_rows.codes", "x_along_rows.scales",
                                    "x_along_rows.expert_scale", kXComes};
constexpr CopyNames kNamesOfDy{"dy_along_k.codes", "dy_along_k.scales", "dy_along_k.expert_scale",
                               "its codes along K come with dy, in the format of the recipe"};
constexpr CopyNames kNamesOfW{"quantized_w.codes", "quantized_w.scales", "quantized_w.expert_scale",
                              "w comes quantised, in the format of the recipe"};

/// A part of a given copy, which may have none.
void check_part(const LinearChecks& checks, std::string_view name, const TensorView& got,
                const TensorView& want, const char* why) {
  if (want.rank == 0) return checks.absent(name, got, why);
  if (want.rank == 2)
    return checks.view(name, got, want.dtype, {want.shape[0], want.shape[1]}, why);
  checks.view(name, got, want.dtype, {want.shape[0], want.shape[1], want.shape[2]}, why);
}

void check_copy(const LinearChecks& checks, const CopyNames& names, const QuantizedShape& shape,
                const QuantizedView& got) {
  const QuantizedView want = quantized_view(shape, nullptr);
  check_part(checks, names.codes, got.codes, want.codes, names.why);
  checks.whole_bytes(names.codes, got.codes, Major::kRow);
  if (shape.scales_major == Major::kColumn && want.scales.rank == 2)
    checks.column_view(names.scales, got.scales, want.scales.dtype,
                       {want.scales.shape[0], want.scales.shape[1]});
  else
    check_part(checks, names.scales, got.scales, want.scales, names.why);
  if (info(shape.format.kind).has_expert_scale)
    checks.present(names.expert_scale, got.expert_scale, shape.experts, names.why);
  else
    checks.absent(names.expert_scale, got.expert_scale, names.why);
}

/// The copies that the caller made and the phase reads.
void check_copies(const LinearChecks& checks, const LinearRun& linear, const Needs& need) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const LayerOptions& options = p.options;
  if (options.quantized_w && need.reads(kWAlongK))
    check_copy(checks, kNamesOfW, linear.tensor(kWAlongK).shape,
               linear.args.parameters.quantized_w);
  if (p.given_dy_along_k && need.reads(kDyAlongK))
    check_copy(checks, kNamesOfDy, linear.tensor(kDyAlongK).shape, linear.args.dy_along_k);
  if ((options.quantized_x || p.given_x_along_k) && need.reads(kXAlongK))
    check_copy(checks, kNamesAlongK, linear.tensor(kXAlongK).shape, linear.args.x_along_k);
  if (options.quantized_x && need.reads(kXAlongRows))
    check_copy(checks, kNamesAlongRows, linear.tensor(kXAlongRows).shape, linear.args.x_along_rows);
}

void check_tokens(const LinearChecks& checks, const GroupedLinearArgs& args) {
  const GroupedLinearProblem& p = checks.problem();
  checks.view("tokens", args.tokens, p.dtype, {p.tokens, p.k}, "the problem says gather=yes");
  checks.present("slot_of", args.slot_of, p.rows, "the problem says gather=yes");
}

/// In the order of experts or of tokens.
void check_dy(const LinearChecks& checks, const GroupedLinearArgs& args, const char* why = "") {
  const GroupedLinearProblem& p = checks.problem();
  if (!p.gather_dy) return checks.view("dy", args.dy, p.dtype, {p.rows, p.n}, why);
  checks.view("dy", args.dy, p.dtype, {p.tokens, p.n}, "the problem says gather_dy=yes");
  checks.present("slot_of", args.slot_of, p.rows, "the problem says gather_dy=yes");
}

/// y or dx, and why its rows go to places; null if they lie in the order of experts.
struct Result {
  const char* name;
  const TensorView& rows;
  int64_t cols;
  const char* why_scattered;
};

void check_result(const LinearChecks& checks, const Result& result, const int32_t* place_of) {
  const GroupedLinearProblem& p = checks.problem();
  const auto& [name, rows, cols, why] = result;
  if (why == nullptr) return checks.view(name, rows, p.dtype, {p.rows, cols});
  const int64_t places = p.tokens * p.top_k;
  if (p.ranks == 1)
    checks.view(name, rows, p.dtype, {places, cols}, why);
  else
    checks.view(name, rows, p.dtype, {p.ranks, places, cols}, why);
  checks.present("place_of", place_of, p.rows, why);
}

void check_y(const LinearChecks& checks, const GroupedLinearArgs& args) {
  const GroupedLinearProblem& p = checks.problem();
  const char* why = p.scatter ? "the problem says scatter=yes" : nullptr;
  check_result(checks, {"y", args.y, activated_columns(p.n, p.activation), why}, args.place_of);
}

void check_dx(const LinearChecks& checks, const GroupedLinearArgs& args) {
  const GroupedLinearProblem& p = checks.problem();
  const char* why = p.scatter_dx ? "the problem says scatter_dx=yes" : nullptr;
  check_result(checks, {"dx", args.dx, p.k, why}, args.place_of);
}

/// What forward reads as x, in the order of experts or of tokens.
void check_input(const LinearChecks& checks, const LinearRun& linear, const Needs& need) {
  const GroupedLinearProblem& p = linear.plan.problem;
  const GroupedLinearArgs& args = linear.args;
  if (p.gather) return check_tokens(checks, args);
  checks.absent("tokens", args.tokens, "the problem says gather=no");
  if (!scatters(p)) checks.absent("place_of", args.place_of, "the problem says scatter=no");
  if (!p.gather_dy) checks.absent("slot_of", args.slot_of, "the problem says gather=no");
  const bool comes_as_codes = p.options.quantized_x || p.given_x_along_k;
  if (!comes_as_codes || need.reads(kX)) checks.view("x", args.x, p.dtype, {p.rows, p.k});
}

}  // namespace

void check_forward(std::string_view op, const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const GroupedLinearProblem& p = plan.problem;
  const LinearChecks checks(op, p);
  const Needs need = needs(linear, Phase::kForward);
  checks.offsets(linear.args.offsets, p.experts);
  check_input(checks, linear, need);
  check_copies(checks, linear, need);
  check_y(checks, linear.args);
  if (need.reads(kW)) check_weights(checks, linear);
  if (p.bias && !p.return_bias) check_biases(checks, linear);
  if (p.bias_scale) checks.present("bias_scale", linear.args.bias_scale, p.rows);
  check_rng(checks, linear.args.rng, need.random);
  check_memory(checks, "saved", linear.places.saved, plan.memory.saved_bytes);
  check_memory(checks, "weight_cache", linear.places.weight_cache, plan.memory.weight_cache_bytes);
  check_products(linear, Phase::kForward);
}

void check_gradients(std::string_view op, const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const GroupedLinearProblem& p = plan.problem;
  const LinearChecks checks(op, p);
  const Needs need = needs(linear, Phase::kBackward);
  checks.offsets(linear.args.offsets, p.experts);
  if (!p.given_dy_along_k || need.reads(kDy)) check_dy(checks, linear.args);
  check_copies(checks, linear, need);
  if (p.dgrad) check_dx(checks, linear.args);
  if (need.reads(kW)) check_weights(checks, linear);
  const Needs again = needs(linear, Phase::kInputAgain);
  if (again.reads(kX)) checks.view("x", linear.args.x, p.dtype, {p.rows, p.k});
  if (again.reads(kTokens)) check_tokens(checks, linear.args);
  check_bias_gradients(checks, linear);
  check_rng(checks, linear.args.rng, need.random);
  check_memory(checks, "pending", linear.places.pending, plan.memory.pending_bytes);
  const bool cached = p.options.cache_weights && need.reads_copy_of_w();
  check_memory(checks, "weight_cache", linear.places.weight_cache,
               cached ? plan.memory.weight_cache_bytes : 0);
  check_products(linear, Phase::kBackward);
}

void check_wgrad(std::string_view op, const LinearRun& linear) {
  const GroupedLinearPlan& plan = linear.plan;
  const GroupedLinearProblem& p = plan.problem;
  if (!p.wgrad) return;
  const LinearChecks checks(op, p);
  const Needs need = needs(linear, Phase::kWgrad);
  checks.offsets(linear.args.offsets, p.experts);
  if (need.reads(kX))
    checks.view("x", linear.args.x, p.dtype, {p.rows, p.k}, "wgrad reads it as it is");
  if (need.reads(kTokens)) check_tokens(checks, linear.args);
  check_copies(checks, linear, need);
  if (need.reads(kDy)) check_dy(checks, linear.args, "wgrad reads it as it is");
  check_weight_gradients(checks, linear);
  check_accumulate(checks, {"accumulate", p.options.accumulate, linear.args.parameters.accumulate},
                   p.experts);
  check_memory(checks, "saved", linear.places.saved, plan.memory.saved_bytes);
  check_memory(checks, "pending", linear.places.pending, plan.memory.pending_bytes);
  check_products(linear, Phase::kWgrad);
}

}  // namespace cadre::layers
