// One call of the module GroupedLinear with its gradient, for tensors that nobody traces: straight
// to the library, with what torch.ops.cadre.grouped_linear leaves out, since autograd alone does
// not do it: weight gradients that go into main_grad or are left for later, the caller's buffers,
// and copies of the weights that live on.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>

#include "arguments.h"
#include "autograd.h"
#include "linear_memory.h"

namespace cadre::door {
namespace {

const char* const kSchema =
    "_linear_step(Tensor x, Tensor splits, bool counted, Tensor[] weight, Tensor[] bias, "
    "Tensor? bias_scale, str recipe, bool save_input, bool? first_microbatch, "
    "bool into_main_grad, bool deferred, Tensor(a!)? out, Tensor(b!)? dgrad_out, Tensor? leaf, "
    "int memory) -> Tensor";

/// What a call has besides the operator's arguments, from forward to backward.
struct Special : torch::CustomClassHolder {
  std::vector<Tensor> parameters;  ///< the weights with their Python attributes
  bool into_main_grad = false, first_microbatch = false, deferred = false;
  Maybe out, dgrad_out;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> leaf;  ///< whose .grad dgrad_out becomes
  c10::intrusive_ptr<LinearMemory> memory;
};

/// What forward is called with besides x, the bias and its scale.
struct Given {
  const Tensor& offsets;
  TensorList weight;  ///< as the products read it
  LinearWants wants;
  Text recipe;
  bool save_input;
  Maybe rng, cache{};
  bool refresh = true;
  c10::intrusive_ptr<Special> special{};  ///< null: a call that the operator could have done

  LinearCall call(const Tensor& x, TensorList bias, const Maybe& bias_scale) const {
    return {x, offsets, weight, bias, bias_scale, rng, wants, recipe, save_input};
  }
};

// Who watches

/// Fake tensors, subclasses, transforms, and what is not what its memory says.
bool is_watched(const Tensor& t) {
  const c10::DispatchKeySet theirs({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                    c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                    c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper});
  return t.defined() && (t.key_set().has_any(theirs) || !(t.is_cpu() || t.is_cuda()));
}
bool is_watched(const Maybe& t) { return t && is_watched(*t); }
bool is_watched(TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& t) { return is_watched(t); });
}

/// What goes straight to the library without an operator in its place.
void require_plain(bool plain) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      plain,
      "GroupedLinear: a tensor is fake, a subclass or transformed, must be plain with main_grad, "
      "deferred gradients, out, dgrad_out or cached weights, which no operator has");
}

/// A copy of what is watched, if that helps: results of collectives are plain when they are there.
Tensor plain(const Tensor& t) {
  const Tensor copy = is_watched(t) ? t.clone().resolve_neg() : t;
  require_plain(!is_watched(copy));
  return copy;
}

/// Whether new tensors have no memory.
bool makes_fakes(const Tensor& like) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         is_watched(at::empty({0}, like.options()));
}

// Forward

/// A tensor that has that shape and no more.
Tensor shape_only(at::IntArrayRef shape, const Tensor& like) {
  return at::empty({1}, like.options()).expand(shape);
}

/// y, and what forward saves.
std::pair<Tensor, Tensor> forward(const LinearCall& call, const Given& g) {
  const Tensor& x = call.x;
  const Maybe out = g.special ? g.special->out : Maybe();
  GroupedLinearProblem problem = problem_of(call);
  problem.cache_weights = g.cache.has_value();
  problem.tail = out ? Tail::kKeep : Tail::kZero;
  const Tensor y = out ? *out : at::empty({problem.rows, problem.n}, x.options());
  problem.align = std::min(problem.align, alignment({y}));
  const int64_t kept = rooms(problem, device(x)).saved.of(problem.rows);
  const Tensor saved = kept > 0 ? bytes(kept, x) : Tensor();
  run_forward(call, problem, {y, saved, g.cache, g.refresh});
  if (g.cache && g.refresh) bump_versions(*g.cache);
  if (out) bump_versions(*out);
  return {y, saved};
}

// Backward

/// What Python says about main_grad of the weights (torch/cadre/main_grad.py).
struct MainGrads {
  std::vector<Tensor> into;
  Accumulate accumulate = Accumulate::kNo;
  Maybe flags;
  variable_list announced;  ///< what autograd gets
};

MainGrads main_grads_of(const Special& s) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("cadre::_main_grads", "");
  torch::jit::Stack stack{s.parameters, s.first_microbatch};
  op.callBoxed(stack);
  MainGrads made{stack[0].toTensorVector(),
                 parse_accumulate(stack[1].toStringView()),
                 stack[2].toOptional<Tensor>(),
                 {}};
  for (const c10::IValue& stand_in : stack[3].toListRef())
    made.announced.push_back(stand_in.isNone() ? Tensor() : stand_in.toTensor());
  return made;
}

/// A leaf's .grad may be the buffer, which backward would overwrite and then add to itself.
void require_new_gradient(const Special& s) {
  if (!s.leaf) return;
  const auto x = s.leaf->lock();
  const Tensor grad = x ? x->mutable_grad() : Tensor();
  const bool again = grad.defined() && grad.data_ptr() == s.dgrad_out->data_ptr();
  TORCH_CHECK(!again,
              "dgrad_out is x.grad since an earlier backward, must be another buffer; set "
              "x.grad = None where that gradient is done with");
}

/// What backward has of forward.
struct FromForward {
  Tensor x, offsets, saved;  ///< no x where only its shape is read, no saved where it is empty
  Maybe bias_scale, rng, cache;
  std::vector<Tensor> weight, bias;
  LinearWants wants{};
  std::string recipe;
  bool save_input = false;
  c10::intrusive_ptr<Special> special;

  explicit FromForward(AutogradContext* ctx) {
    const std::vector<int64_t> numbers = ctx->saved_data["numbers"].toIntVector();
    read_bits(numbers[0], wants);
    save_input = numbers[1] != 0;
    recipe = ctx->saved_data["recipe"].toStringRef();
    const auto found = ctx->saved_data.find("special");
    if (found != ctx->saved_data.end())
      special = c10::static_intrusive_pointer_cast<Special>(found->second.toCapsule());
    Saved in(ctx->get_saved_variables());
    x = in.one(), offsets = in.one(), saved = in.one();
    bias_scale = in.maybe(), rng = in.maybe();
    weight = in.list(numbers[2]), bias = in.list(numbers[3]);
    if (special) cache = in.maybe();
  }
};

/// Where gradients of a special call go, found before autograd looks away.
struct Targets {
  Tensor dx;
  MainGrads main;
};

variable_list gradients_of(const FromForward& k, const Tensor& dy, const Targets& to) {
  const bool dx_wanted = k.wants[kWantsDx], dw_wanted = k.wants[kWantsDw];
  const bool into_main_grad = dw_wanted && k.special && k.special->into_main_grad;
  const std::vector<Tensor>& parameters = k.special ? k.special->parameters : k.weight;
  const std::array<int64_t, 2> shape{dy.size(0), k.weight[0].size(-1)};
  const Tensor x = k.x.defined() ? k.x : shape_only(shape, dy), saved = aligned(k.saved);
  const LinearCall call{x,     k.offsets, k.weight, k.bias,      k.bias_scale,
                        k.rng, k.wants,   k.recipe, k.save_input};
  GroupedLinearProblem p = problem_of(call);
  p.cache_weights = k.cache.has_value();
  p.deferred = dw_wanted && k.special && k.special->deferred;
  p.tail = to.dx.defined() ? Tail::kKeep : Tail::kZero;

  BackwardOut out;
  if (dx_wanted) out.dx = to.dx.defined() ? to.dx : at::empty(shape, dy.options());
  p.align = std::min(p.align, alignment({dy, out.dx}));
  std::vector<Tensor> dbias, dweight;
  if (p.bias && p.dbias) out.dbias = dbias = slices_like(k.bias);
  if (p.bias && p.dbias && k.bias_scale) out.dbias_scale = at::empty_like(*k.bias_scale);
  if (p.deferred) out.pending = bytes(rooms(p, device(dy)).pending.of(p.rows), dy);
  if (dw_wanted && !p.deferred) {
    out.dw = dweight = into_main_grad ? to.main.into : slices_like(parameters);
    plan_dw(p, call, out.dw, to.main.accumulate);
    out.accumulate = accumulate_words(to.main.flags, to.main.accumulate, p.experts, dy);
  }
  out.weight_cache = k.cache;
  run_backward(call, p, {dy, saved}, out);

  if (dx_wanted) bump_versions(to.dx);
  if (!p.deferred) bump_versions(to.main.into);
  if (p.deferred)
    k.special->memory->push({dy, x, saved, out.pending, k.offsets, k.weight, parameters, k.wants,
                             k.recipe, k.save_input, to.main.into, to.main.accumulate,
                             to.main.flags});
  if (into_main_grad || p.deferred) dweight = to.main.announced;
  dweight.resize(parameters.size());
  if (!k.wants[kWantsDbias]) dbias = {};
  dbias.resize(k.bias.size());
  return joined(out.dx, if_wanted(k.wants[kWantsDbiasScale], out.dbias_scale), dweight, dbias,
                Tensor());
}

class LinearStep : public torch::autograd::Function<LinearStep> {
 public:
  /// The unnamed weights are there for autograd: `g.weight` is what the products read.
  static variable_list forward(AutogradContext* ctx, const Tensor& given_x, const Maybe& bias_scale,
                               TensorList, TensorList bias, const Given& g) {
    Tensor x, y, saved;
    bool keeps_x = false;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      x = given_x.contiguous();
      const LinearCall call = g.call(x, bias, bias_scale);
      std::tie(y, saved) = door::forward(call, g);
      keeps_x = reads_x(call);
    }
    // As the operator keeps them: a checkpoint may compute either again for the other.
    variable_list kept =
        joined(if_wanted(keeps_x, x), g.offsets, saved, bias_scale, g.rng, g.weight, bias);
    if (g.special) kept.push_back(g.cache.value_or(Tensor()));
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["numbers"] = std::vector<int64_t>{
        bits_of(g.wants), g.save_input, int64_t(g.weight.size()), int64_t(bias.size())};
    ctx->saved_data["recipe"] = std::string(g.recipe);
    if (!g.special) return {y};
    ctx->saved_data["special"] = c10::IValue::make_capsule(g.special);
    return {g.special->out ? y.detach() : y};  // autograd marks this, not the caller's buffer
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dout) {
    FromForward kept(ctx);
    variable_list gradients = kept.special ? special_gradients(kept, plain(dout[0]))
                              : is_watched(dout[0])
                                  ? operator_gradients(kept, dout[0])
                                  : translated([&] {
                                      const at::AutoDispatchBelowADInplaceOrView below;
                                      return gradients_of(kept, dout[0].contiguous(), {});
                                    });
    if (!at::GradMode::is_enabled()) return gradients;
    for (Tensor& g : gradients)
      if (g.defined()) g = g.detach().set_requires_grad(true);  // what is refused needs a history
    const auto refusal = std::make_shared<torch::autograd::DelayedError>(
        "cadre.GroupedLinear has no second derivatives", int64_t(gradients.size()));
    return (*refusal)(std::move(gradients));
  }

 private:
  static variable_list special_gradients(FromForward& kept, const Tensor& dout) {
    const Special& s = *kept.special;
    require_new_gradient(s);
    const at::NoGradGuard no_grad;
    Targets to;
    if (s.dgrad_out) to.dx = s.dgrad_out->detach();  // of one version with the buffer
    if (kept.wants[kWantsDw] && s.into_main_grad) to.main = main_grads_of(s);
    const Tensor dy = dout.detach().contiguous();
    if (kept.x.defined()) kept.x = kept.x.detach();  // what is pending holds no graph
    return translated([&] {
      const at::AutoDispatchBelowADInplaceOrView below;
      return gradients_of(kept, dy, to);
    });
  }

  static variable_list operator_gradients(const FromForward& k, const Tensor& dy) {
    const LinearGradients made =
        linear_backward_op(dy, kept_or_shape(k.x, dy, k.weight[0]), kept_or_empty(k.saved, dy),
                           {Tensor(), k.offsets, k.weight, k.bias, k.bias_scale, k.rng, k.wants,
                            k.recipe, k.save_input});
    const auto& [dx, dw, dbias, dbias_scale, pending] = made;
    return joined(
        if_wanted(k.wants[kWantsDx], dx), if_wanted(k.wants[kWantsDbiasScale], dbias_scale),
        or_none(dw, int64_t(k.weight.size())), or_none(dbias, int64_t(k.bias.size())), Tensor());
  }
};

// The call

/// Tensors in autocast's type. Gradients of the weights are in the weights' own, from the products.
struct Cast {
  Tensor x;
  std::vector<Tensor> weight, bias;

  Cast(const Tensor& given, TensorList weights, TensorList biases)
      : x(given), weight(weights.vec()), bias(biases.vec()) {
    const c10::DeviceType on = given.device().type();
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
  const Recipe words = parse_recipe(recipe);
  return !is_plain(words.fprop.rhs) || !is_plain(words.dgrad.rhs);
}

/// Memory for copies of the weights, where the recipe makes any.
void use_cache(Given& g, const LinearCall& call, bool refresh) {
  GroupedLinearProblem p = problem_of(call);
  p.cache_weights = true;
  const int64_t room = planned(p, device(call.x)).memory.weight_cache_bytes;
  if (room == 0) return;
  const CacheKey key{call.x.device(), call.weight[0].scalar_type(), std::string(g.recipe), p.dgrad,
                     room};
  std::tie(g.cache, g.refresh) = g.special->memory->cache(key, refresh, call.x);
}

/// Rows of each expert become offsets. Through the dispatcher, for those who watch.
Tensor offsets_of(const Tensor& counts, const Tensor& x) {
  static const auto call = op<Tensor(const Tensor&, c10::SymInt)>("cadre::_offsets");
  const at::AutoDispatchBelowADInplaceOrView below;
  return call.call(counts, x.sym_size(0));
}

Tensor run(const Cast& cast, const Maybe& bias_scale, TensorList weight, Given& given,
           std::optional<bool> refresh) {
  return translated([&] {
    if (refresh) use_cache(given, given.call(cast.x, cast.bias, bias_scale), *refresh);
    if (given.wants == LinearWants{}) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const Tensor x = cast.x.contiguous();
      return forward(given.call(x, cast.bias, bias_scale), given).first;
    }
    return LinearStep::apply(cast.x, bias_scale, weight, TensorList(cast.bias), given)[0];
  });
}

Tensor linear_step(const Tensor& x, const Tensor& splits, bool counted, TensorList weight,
                   TensorList bias, const Maybe& bias_scale, Text recipe, bool save_input,
                   std::optional<bool> first_microbatch, bool into_main_grad, bool deferred,
                   const Maybe& out, const Maybe& dgrad_out, const Maybe& leaf, int64_t memory) {
  const Tensor offsets = counted ? offsets_of(splits, x) : splits;
  const bool cached = first_microbatch && copies_weights(recipe);
  const bool special = cached || into_main_grad || deferred || out || dgrad_out;
  const bool watched = is_watched(offsets) || is_watched(weight) || is_watched(bias) ||
                       is_watched(bias_scale) || is_watched(out) || is_watched(dgrad_out);
  const bool grad = at::GradMode::is_enabled();
  const LinearWants wants{grad && learns(x), grad && learns(weight), grad && learns(bias),
                          grad && learns(bias_scale)};
  if (!special) {
    if (watched || is_watched(x) || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        at::autocast::is_autocast_enabled(x.device().type()))
      return std::get<0>(
          linear_op({x, offsets, weight, bias, bias_scale, {}, {}, recipe, save_input}));
    Given given{offsets, weight, wants, recipe, save_input, drawn({}, recipe, x)};
    return run({x, weight, bias}, bias_scale, weight, given, std::nullopt);
  }

  const Cast cast(plain(x), weight, bias);
  require_plain(!watched && !makes_fakes(x));
  const auto own = c10::make_intrusive<Special>();
  own->parameters = weight.vec();
  own->into_main_grad = into_main_grad;
  own->first_microbatch = first_microbatch.value_or(false);
  own->deferred = deferred;
  own->out = out;
  own->dgrad_out = dgrad_out;
  if (dgrad_out && leaf && leaf->is_leaf()) own->leaf.emplace(leaf->getIntrusivePtr());
  if (cached || deferred) own->memory = LinearMemory::of(memory);
  Given given{offsets, cast.weight, wants, recipe, save_input, drawn({}, recipe, cast.x)};
  given.special = own;
  return run(cast, bias_scale, weight, given, cached ? first_microbatch : std::nullopt);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) { m.def(kSchema); }
TORCH_LIBRARY_IMPL(cadre, CompositeImplicitAutograd, m) { m.impl("_linear_step", linear_step); }

}  // namespace cadre::door
