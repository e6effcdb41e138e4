// One call of the module GroupedLinear with its gradient, for tensors that are not traced. It calls
// the library directly, and adds what torch.ops.cadre.grouped_linear cannot do, since autograd
// alone does not: weight gradients that go into main_grad or are computed later, the caller's
// buffers, and quantised weights that outlive the call.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "arguments.h"
#include "autograd.h"
#include "call_memory.h"
#include "linear_memory.h"
#include "main_grads.h"
#include "traced.h"

namespace cadre::door {
namespace {

const char* const kSchema =
    "_linear_step(Tensor x, Tensor splits, bool counted, Tensor[] weight, Tensor[] bias, "
    "Tensor? bias_scale, str recipe, bool save_input, bool? first_microbatch, "
    "bool into_main_grad, bool deferred, Tensor(a!)? out, Tensor(b!)? dgrad_out, Tensor? leaf, "
    "Tensor? memory) -> Tensor";

/// The options of the module that the operator lacks, from forward to backward.
struct ModuleOptions : torch::CustomClassHolder {
  std::vector<Tensor> parameters;  ///< the weights with their Python attributes
  bool into_main_grad = false, first_microbatch = false, deferred = false;
  Maybe out, dgrad_out;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> leaf;  ///< whose .grad dgrad_out becomes
  c10::intrusive_ptr<LinearMemory> memory;
};

/// What forward is called with besides x, the bias and its scale.
struct ForwardInputs {
  const Tensor& offsets;
  TensorList weight;  ///< as the products read it
  LinearWants wants;
  Text recipe;
  bool save_input;
  Maybe rng, cache{};
  std::optional<CopiesKey> to_keep{};           ///< the cache, once it is written
  c10::intrusive_ptr<ModuleOptions> options{};  ///< null: a call that the operator can do

  LinearCall call(const Tensor& x, TensorList bias, const Maybe& bias_scale) const {
    return {x, offsets, weight, bias, bias_scale, rng, wants, recipe, save_input};
  }
};

// Tensors that options take

/// Errors    NotImplementedError: no operator takes the options of the module.
void require_plain(bool plain) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      plain,
      "GroupedLinear: a tensor is fake, a subclass or transformed, must be plain with main_grad, "
      "deferred gradients, out, dgrad_out or cached weights, which no operator has");
}

/// The tensor, or a plain copy: the result of an asynchronous collective becomes plain when cloned.
Tensor plain(const Tensor& t) {
  const Tensor copy = needs_dispatcher(t) ? t.clone().resolve_neg() : t;
  require_plain(!needs_dispatcher(copy));
  return copy;
}

// Forward

/// A tensor that has that shape; its content nobody reads.
Tensor shape_only(at::IntArrayRef shape, const Tensor& like) {
  return at::empty({1}, like.options()).expand(shape);
}

/// Errors    ValueError where the caller's buffer is read as another tensor, too.
void require_apart(const LinearCall& call, const Tensor& out) {
  CallMemory memory;
  memory.writes(out, "out");
  memory.reads(call.x, "the input");
  memory.reads(call.offsets, "offsets");
  memory.reads(call.weight, "weight");
  memory.reads(call.bias, "bias");
  memory.reads(list_of(call.bias_scale), "bias_scale");
  memory.require_apart();
}

/// y, and what forward saves.
std::pair<Tensor, Tensor> forward(const LinearCall& call, const ForwardInputs& in) {
  const Tensor& x = call.x;
  const Maybe out = in.options ? in.options->out : Maybe();
  GroupedLinearProblem problem = problem_of(call);
  problem.options.cache_weights = in.cache.has_value();
  problem.options.tail = out ? Tail::kKeep : Tail::kZero;
  if (out) require_apart(call, *out);
  const Tensor y = out ? *out : at::empty({problem.rows, problem.n}, x.options());
  problem.options.align = std::min(problem.options.align, alignment({y}));
  const int64_t saved_bytes = memory_bounds(problem, device(x)).saved.bytes(problem.rows);
  const Tensor saved = saved_bytes > 0 ? bytes(saved_bytes, x) : Tensor();
  run_forward(call, problem, {y, saved, in.cache, in.to_keep.has_value()});
  if (in.to_keep) {
    bump_versions(*in.cache);
    in.options->memory->keep(*in.to_keep, *in.cache);
  }
  if (out) bump_versions(*out);
  return {y, saved};
}

// Backward

/// A leaf's .grad may be the buffer, which backward would overwrite and then add to itself.
void require_new_gradient(const ModuleOptions& s) {
  if (!s.leaf) return;
  const auto x = s.leaf->lock();
  const Tensor grad = x ? x->mutable_grad() : Tensor();
  const bool again = grad.defined() && grad.data_ptr() == s.dgrad_out->data_ptr();
  TORCH_CHECK(!again,
              "dgrad_out is x.grad since an earlier backward, must be another buffer; set "
              "x.grad = None where that gradient is done with");
}

/// What forward saved for backward.
struct SavedForBackward {
  Tensor x, offsets, saved;  ///< no x where only its shape is read, no saved where it is empty
  Maybe bias_scale, rng, cache;
  std::vector<Tensor> weight, bias;
  LinearWants wants{};
  std::string recipe;
  bool save_input = false;
  c10::intrusive_ptr<ModuleOptions> options;

  explicit SavedForBackward(AutogradContext* ctx) {
    const std::vector<int64_t> numbers = ctx->saved_data["numbers"].toIntVector();
    read_bits(numbers[0], wants);
    save_input = numbers[1] != 0;
    recipe = ctx->saved_data["recipe"].toStringRef();
    const auto found = ctx->saved_data.find("options");
    if (found != ctx->saved_data.end())
      options = c10::static_intrusive_pointer_cast<ModuleOptions>(found->second.toCapsule());
    SavedTensors in(ctx->get_saved_variables());
    x = in.next(), offsets = in.next(), saved = in.next();
    bias_scale = in.next_optional(), rng = in.next_optional();
    weight = in.next_list(numbers[2]), bias = in.next_list(numbers[3]);
    if (options) cache = in.next_optional();
  }
};

/// The buffers that the module's options name, found while autograd still records.
struct GradientTargets {
  Tensor dx;
  MainGrads main;
};

/// Errors    ValueError where one of them is read or written as another tensor, too.
void require_apart(const SavedForBackward& in, const Tensor& dy, const GradientTargets& to) {
  CallMemory memory;
  memory.writes(to.dx, "dgrad_out");
  memory.writes(to.main.into, "main_grad");
  memory.reads(dy, "the gradient of the result");
  memory.reads(in.x, "the input, which the weights' gradient reads");
  memory.reads(in.offsets, "offsets");
  memory.reads(in.weight, "weight");
  memory.reads(in.bias, "bias");
  memory.reads(list_of(in.bias_scale), "bias_scale");
  memory.require_apart();
}

variable_list gradients_of(const SavedForBackward& in, const Tensor& dy,
                           const GradientTargets& to) {
  const bool dx_wanted = in.wants[kWantsDx], dw_wanted = in.wants[kWantsDw];
  const bool into_main_grad = dw_wanted && in.options && in.options->into_main_grad;
  const std::vector<Tensor>& parameters = in.options ? in.options->parameters : in.weight;
  const std::array<int64_t, 2> shape{dy.size(0), in.weight[0].size(-1)};
  const Tensor x = in.x.defined() ? in.x : shape_only(shape, dy),
               saved = aligned(in.saved, "saved");
  const LinearCall call{x,      in.offsets, in.weight, in.bias,      in.bias_scale,
                        in.rng, in.wants,   in.recipe, in.save_input};
  GroupedLinearProblem p = problem_of(call);
  p.options.cache_weights = in.cache.has_value();
  p.options.deferred = dw_wanted && in.options && in.options->deferred;
  p.options.tail = to.dx.defined() ? Tail::kKeep : Tail::kZero;

  BackwardOut out;
  if (dx_wanted) out.dx = to.dx.defined() ? to.dx : at::empty(shape, dy.options());
  p.options.align = std::min(p.options.align, alignment({dy, out.dx}));
  std::vector<Tensor> dbias, dweight;
  if (p.bias && p.dbias) out.dbias = dbias = slices_like(in.bias);
  if (p.bias && p.dbias && in.bias_scale) out.dbias_scale = at::empty_like(*in.bias_scale);
  if (p.options.deferred)
    out.pending = bytes(memory_bounds(p, device(dy)).pending.bytes(p.rows), dy);
  if (dw_wanted && !p.options.deferred) {
    out.dw = dweight = into_main_grad ? to.main.into : slices_like(parameters);
    plan_dw(p, call, out.dw, to.main.accumulate);
    out.accumulate = accumulate_words(to.main.flags, to.main.accumulate, p.experts, dy);
  }
  out.weight_cache = in.cache;
  run_backward(call, p, {dy, saved}, out);

  if (dx_wanted) bump_versions(to.dx);
  if (!p.options.deferred) bump_versions(to.main.into);
  if (p.options.deferred)
    in.options->memory->push({dy, x, saved, out.pending, in.offsets, in.weight, in.wants, in.recipe,
                              in.save_input, to.main.into, to.main.accumulate, to.main.flags},
                             parameters);
  if (into_main_grad || p.options.deferred) dweight = to.main.stand_ins;
  dweight.resize(parameters.size());
  if (!in.wants[kWantsDbias]) dbias = {};
  dbias.resize(in.bias.size());
  return joined(out.dx, if_wanted(in.wants[kWantsDbiasScale], out.dbias_scale), dweight, dbias,
                Tensor());
}

class LinearStep : public torch::autograd::Function<LinearStep> {
 public:
  /// The unnamed weights are there for autograd: `in.weight` is what the products read.
  static variable_list forward(AutogradContext* ctx, const Tensor& rows, const Maybe& bias_scale,
                               TensorList, TensorList bias, const ForwardInputs& in) {
    Tensor x, y, saved;
    bool saves_x = false;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      x = rows_of(rows, "x");
      const LinearCall call = in.call(x, bias, bias_scale);
      std::tie(y, saved) = door::forward(call, in);
      saves_x = reads_x(call);
    }
    // The same tensors as the operator saves: a checkpoint may run one where the other ran before.
    variable_list to_save =
        joined(if_wanted(saves_x, x), in.offsets, saved, bias_scale, in.rng, in.weight, bias);
    // An alias, so that the memory of copies says whether a backward waits for it.
    if (in.options) to_save.push_back(in.cache ? alias_of(*in.cache) : Tensor());
    ctx->save_for_backward(std::move(to_save));
    ctx->saved_data["numbers"] = std::vector<int64_t>{
        bits_of(in.wants), in.save_input, int64_t(in.weight.size()), int64_t(bias.size())};
    ctx->saved_data["recipe"] = std::string(in.recipe);
    if (!in.options) return {y};
    ctx->saved_data["options"] = c10::IValue::make_capsule(in.options);
    return {in.options->out ? y.detach() : y};  // autograd marks this, not the caller's buffer
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dout) {
    refuse_batches(dout);
    SavedForBackward saved(ctx);
    variable_list gradients = saved.options ? module_gradients(saved, plain(dout[0]))
                              : needs_dispatcher(dout[0])
                                  ? operator_gradients(saved, dout[0])
                                  : translate_errors([&] {
                                      const at::AutoDispatchBelowADInplaceOrView below;
                                      return gradients_of(saved, rows_of(dout[0], "dy"), {});
                                    });
    return without_second_derivatives("cadre.GroupedLinear", dout, std::move(gradients));
  }

 private:
  static variable_list module_gradients(SavedForBackward& saved, const Tensor& dout) {
    const ModuleOptions& s = *saved.options;
    require_new_gradient(s);
    const at::NoGradGuard no_grad;
    GradientTargets to;
    if (s.dgrad_out) to.dx = s.dgrad_out->detach();  // shares the buffer's version counter
    if (saved.wants[kWantsDw] && s.into_main_grad)
      to.main = main_grads_of(s.parameters, s.first_microbatch);
    const Tensor dy = rows_of(dout.detach(), "dy");
    if (saved.x.defined()) saved.x = saved.x.detach();  // what is pending keeps no graph alive
    if (s.dgrad_out || s.into_main_grad) require_apart(saved, dy, to);
    return translate_errors([&] {
      const at::AutoDispatchBelowADInplaceOrView below;
      return gradients_of(saved, dy, to);
    });
  }

  static variable_list operator_gradients(const SavedForBackward& in, const Tensor& dy) {
    const LinearGradients gradients =
        linear_backward_op(dy, x_or_its_shape(in.x, dy, in.weight[0]), saved_or_empty(in.saved, dy),
                           {Tensor(), in.offsets, in.weight, in.bias, in.bias_scale, in.rng,
                            in.wants, in.recipe, in.save_input});
    const auto& [dx, dw, dbias, dbias_scale, pending] = gradients;
    return joined(
        if_wanted(in.wants[kWantsDx], dx), if_wanted(in.wants[kWantsDbiasScale], dbias_scale),
        or_none(dw, int64_t(in.weight.size())), or_none(dbias, int64_t(in.bias.size())), Tensor());
  }
};

// The call

/// Tensors in autocast's type. The gradients of the weights have the weights' own type, which the
/// GEMM writes.
struct AutocastTensors {
  Tensor x;
  std::vector<Tensor> weight, bias;

  AutocastTensors(const Tensor& rows, TensorList weights, TensorList biases)
      : x(rows), weight(weights.vec()), bias(biases.vec()) {
    const c10::DeviceType on = rows.device().type();
    if (!at::autocast::is_autocast_enabled(on)) return;
    const at::ScalarType type = at::autocast::get_autocast_dtype(on);
    x = at::autocast::cached_cast(type, x, on);
    bias = cast_for_autocast(type, biases, on);
    weight = cast_for_autocast(type, weights, on);
    for (Tensor& w : weight) w = w.detach();
  }
};

bool copies_weights(Text recipe) {
  if (recipe.empty()) return false;
  const Recipe parsed = recipe_of(recipe);
  return !is_plain(parsed.fprop.rhs) || !is_plain(parsed.dgrad.rhs);
}

/// Copies of the weights, if the recipe makes any; not on a GPU: nobody sees there whether they
/// hold, other streams read them early, and CUDA graphs write them when others have the memory.
void use_cache(ForwardInputs& in, const LinearCall& call, bool anew) {
  const std::optional<uint64_t> content = content_of(call.weight);
  if (!content) return;
  GroupedLinearProblem p = problem_of(call);
  p.options.cache_weights = true;
  const int64_t bytes = cached_plan(p, device(call.x)).memory.weight_cache_bytes;
  if (bytes == 0) return;
  const at::ScalarType type = call.weight[0].scalar_type();
  const CopiesKey key{call.x.device(), type, std::string(in.recipe), p.dgrad, bytes, *content};
  const auto [copies, write] = in.options->memory->copies(key, anew, call.x);
  in.cache = copies;
  if (write) in.to_keep = key;
}

/// Counts of rows become offsets, through the dispatcher, so that tracers see it.
Tensor offsets_of(const Tensor& counts, const Tensor& x) {
  static const auto call = op<Tensor(const Tensor&, c10::SymInt)>("cadre::_offsets");
  const at::AutoDispatchBelowADInplaceOrView below;
  return call.call(counts, x.sym_size(0));
}

Tensor run_step(const AutocastTensors& cast, const Maybe& bias_scale, TensorList weight,
                ForwardInputs& in, std::optional<bool> first_microbatch) {
  return translate_errors([&] {
    if (first_microbatch) use_cache(in, in.call(cast.x, cast.bias, bias_scale), *first_microbatch);
    if (in.wants == LinearWants{}) {
      refuse_tangents({{"x", cast.x},
                       {"weight", weight},
                       {"bias", cast.bias},
                       {"bias_scale", list_of(bias_scale)}});
      const at::AutoDispatchBelowADInplaceOrView below;
      const Tensor x = rows_of(cast.x, "x");
      return forward(in.call(x, cast.bias, bias_scale), in).first;
    }
    return LinearStep::apply(cast.x, bias_scale, weight, TensorList(cast.bias), in)[0];
  });
}

Tensor linear_step(const Tensor& x, const Tensor& splits, bool counted, TensorList weight,
                   TensorList bias, const Maybe& bias_scale, Text recipe, bool save_input,
                   std::optional<bool> first_microbatch, bool into_main_grad, bool deferred,
                   const Maybe& out, const Maybe& dgrad_out, const Maybe& leaf,
                   const Maybe& memory) {
  const Tensor offsets = counted ? offsets_of(splits, x) : splits;
  const bool cached = first_microbatch && copies_weights(recipe);
  const bool has_options = cached || into_main_grad || deferred || out || dgrad_out;
  const bool traced = needs_dispatcher(offsets) || needs_dispatcher(weight) ||
                      needs_dispatcher(bias) || needs_dispatcher(bias_scale) ||
                      needs_dispatcher(out) || needs_dispatcher(dgrad_out);
  const bool grad = at::GradMode::is_enabled();
  const LinearWants wants{grad && requires_grad(x), grad && requires_grad(weight),
                          grad && requires_grad(bias), grad && requires_grad(bias_scale)};
  if (!has_options) {
    if (traced || needs_dispatcher(x) || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        at::autocast::is_autocast_enabled(x.device().type()))
      return std::get<0>(
          linear_op({x, offsets, weight, bias, bias_scale, {}, {}, recipe, save_input}));
    ForwardInputs in{offsets, weight, wants, recipe, save_input, given_or_drawn({}, recipe, x)};
    return run_step({x, weight, bias}, bias_scale, weight, in, std::nullopt);
  }

  if (traced || needs_dispatcher(x)) {
    require_beside(x, weight, "weight");
    require_beside(x, bias, "bias");
  }
  const AutocastTensors cast(plain(x), weight, bias);
  require_plain(!traced && !new_tensors_are_fake(x));
  const auto options = c10::make_intrusive<ModuleOptions>();
  options->parameters = weight.vec();
  options->into_main_grad = into_main_grad;
  options->first_microbatch = first_microbatch.value_or(false);
  options->deferred = deferred;
  options->out = out;
  options->dgrad_out = dgrad_out;
  if (dgrad_out && leaf && leaf->is_leaf()) options->leaf.emplace(leaf->getIntrusivePtr());
  if (cached || deferred) options->memory = LinearMemory::of(memory);
  ForwardInputs in{offsets, cast.weight, wants,
                   recipe,  save_input,  given_or_drawn({}, recipe, cast.x)};
  in.options = options;
  return run_step(cast, bias_scale, weight, in, cached ? first_microbatch : std::nullopt);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) { m.def(kSchema); }
TORCH_LIBRARY_IMPL(cadre, CompositeImplicitAutograd, m) { m.impl("_linear_step", linear_step); }

}  // namespace cadre::door
