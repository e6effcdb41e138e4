#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parameters.h"
#include "traced.h"

// What the autograd functions of the door share.
namespace cadre::door {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The operation of that name and signature, through the dispatcher, so that fake tensors and
/// tracers see it.
template <class Signature>
auto op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

inline bool requires_grad(const at::Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& t) { return t && requires_grad(*t); }
inline bool requires_grad(at::TensorList list) {
  for (const at::Tensor& t : list)
    if (requires_grad(t)) return true;
  return false;
}

inline at::TensorList list_of(const std::optional<at::Tensor>& t) {
  return t ? at::TensorList(*t) : at::TensorList();
}

/// For calls that autograd does not see. Errors    NotImplementedError for a tensor with a tangent
///           of forward-mode differentiation, which would be lost.
inline void refuse_tangents(
    std::initializer_list<std::pair<const char*, at::TensorList>> arguments) {
  for (const auto& [what, list] : arguments)
    for (const at::Tensor& t : list)
      TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t._fw_grad(0).defined(), what,
                                  " has a tangent, must have none; there is no forward-mode "
                                  "differentiation (jvp, jacfwd) here, so take "
                                  "torch.autograd.grad or backward");
}

/// A node, owned as this torch owns its nodes: by shared_ptr, or since 2.12 by intrusive_ptr.
template <class Node, class Owner = decltype(torch::autograd::Edge::function), class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_constructible_v<Owner, std::shared_ptr<Node>>)
    return std::make_shared<Node>(std::forward<Args>(args)...);
  else
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
}

/// Errors    ValueError for a batch of gradients: torch has no loop over operators that have lists.
inline void refuse_batches(const variable_list& dout) {
  for (const at::Tensor& d : dout)
    TORCH_CHECK_VALUE(!d.defined() || !d.key_set().has(c10::DispatchKey::Batched),
                      "the gradient of a result is a batch, as is_grads_batched makes it, must be "
                      "one tensor; take gradients one after another");
}

/// What backward returns where it has no derivative of its own. Where autograd records, whoever
/// differentiates these gradients, by whatever forward or backward were given, meets an error.
inline variable_list without_second_derivatives(const char* what, const variable_list& dout,
                                                variable_list gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  torch::autograd::edge_list inputs = torch::autograd::collect_next_edges(dout);
  if (const auto node = torch::autograd::get_current_node())
    inputs.insert(inputs.end(), node->next_edges().begin(), node->next_edges().end());
  const auto refusal = make_node<torch::autograd::Error>(
      std::string(what) + " has no second derivatives", std::move(inputs));
  for (at::Tensor& g : gradients) {
    if (!g.defined()) continue;
    g = g.detach();
    torch::autograd::set_history(g, refusal);
  }
  return gradients;
}

/// The gradient, if there is one.
inline Maybe maybe(const at::Tensor& t) { return t.defined() ? Maybe(t) : std::nullopt; }

/// Reads what joined() put into the one list of tensors that autograd saves, in the same order.
class SavedTensors {
 public:
  explicit SavedTensors(variable_list all) : all_(std::move(all)) {}

  at::Tensor next() { return all_[at_++]; }
  std::optional<at::Tensor> next_optional() {
    at::Tensor t = next();
    return t.defined() ? std::optional(t) : std::nullopt;
  }
  std::vector<at::Tensor> next_list(int64_t count) {
    const auto from = all_.begin() + int64_t(at_);
    at_ += size_t(count);
    return {from, from + count};
  }

 private:
  variable_list all_;
  size_t at_ = 0;
};

template <class... Parts>
variable_list joined(const Parts&... parts) {
  variable_list all;
  const auto add = [&all](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_same_v<Part, at::Tensor>)
      all.push_back(part);
    else if constexpr (std::is_same_v<Part, std::optional<at::Tensor>>)
      all.push_back(part.value_or(at::Tensor()));
    else
      all.insert(all.end(), part.begin(), part.end());
  };
  (add(parts), ...);
  return all;
}

/// Flags as bits of one integer, which autograd saves faster than a list, and back.
template <size_t kCount>
int64_t bits_of(const std::array<bool, kCount>& flags) {
  int64_t bits = 0;
  for (size_t i = 0; i < kCount; ++i) bits |= int64_t(flags[i]) << i;
  return bits;
}
template <size_t kCount>
void read_bits(int64_t bits, std::array<bool, kCount>& flags) {
  for (size_t i = 0; i < kCount; ++i) flags[i] = bits >> i & 1;
}

/// The gradients, or `count` undefined ones where none was computed.
inline variable_list or_none(const std::vector<at::Tensor>& gradients, int64_t count) {
  return gradients.empty() ? variable_list(size_t(count)) : variable_list(gradients);
}

/// The random state of a layer: the caller's, else drawn from torch's generator where the recipe
/// rounds stochastically.
inline std::optional<at::Tensor> given_or_drawn(const std::optional<at::Tensor>& given,
                                                std::string_view recipe, const at::Tensor& x) {
  if (given || recipe.empty() || !is_random(recipe_of(recipe))) return given;
  constexpr int64_t kMost = int64_t(1) << 62;
  return at::randint(kMost, {2}, x.options().dtype(at::kLong).requires_grad(false));
}

inline std::vector<at::Tensor> cast_for_autocast(at::ScalarType type, at::TensorList list,
                                                 c10::DeviceType device) {
  std::vector<at::Tensor> cast;
  cast.reserve(list.size());
  for (const at::Tensor& t : list) cast.push_back(at::autocast::cached_cast(type, t, device));
  return cast;
}

/// torch.autocast's copies of weights, where a layer multiplies these and the weights are
/// differentiated: their gradients are written in their own type, and not cast from the copies'.
struct WeightCopies {
  std::vector<at::Tensor> weight1, weight2{};
  std::optional<at::Tensor> shared1{}, shared2{};
};

inline std::vector<at::Tensor> detached(std::vector<at::Tensor> list) {
  for (at::Tensor& t : list) t = t.detach();
  return list;
}

/// Whether there are weights to differentiate that autocast copies. Within transforms of functions
/// autograd sees the copies alone.
inline bool differentiates_weights(at::ScalarType type, at::TensorList weight1,
                                   at::TensorList weight2 = {}) {
  const bool grad =
      at::GradMode::is_enabled() && (requires_grad(weight1) || requires_grad(weight2));
  return grad && weight1[0].scalar_type() != type &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

/// The type of weights' gradients, as backward keeps it: that of the copies where there are none.
inline int64_t type_number(at::TensorList weight, const WeightCopies* copies) {
  return copies == nullptr ? -1 : int64_t(weight[0].scalar_type());
}
inline std::optional<at::ScalarType> type_of(int64_t number) {
  return number < 0 ? std::nullopt : std::optional(at::ScalarType(number));
}

/// x where forward saved it, else a tensor of its shape whose content nobody reads.
inline at::Tensor x_or_its_shape(const at::Tensor& x, const at::Tensor& dy,
                                 const at::Tensor& weight) {
  return x.defined() ? x : dy.new_empty_symint({dy.sym_size(0), weight.sym_size(-1)});
}

/// A tensor of its own over the same memory, of which it is no view: where either is written in
/// place, autograd sees it of both; kept of what forward saved, backward sees whether anybody else
/// has that. The same one for tracers.
inline at::Tensor alias_of(const at::Tensor& t) {
  if (needs_dispatcher(t)) return t;
  return at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(t), true));
}

/// What must be in backward as it is in forward, if backward is to write into what forward saved:
/// the graph that work is recorded into, since a graph of backward alone may be replayed twice. -1
/// where somebody else may have it: a hook, or a tracer.
inline int64_t kept_in(const at::Tensor& saved) {
  const bool hooked = at::SavedTensorDefaultHooks::is_enabled() &&
                      at::SavedTensorDefaultHooks::get_hooks().has_value();
  if (hooked || needs_dispatcher(saved)) return -1;
  return int64_t(recorded_graph(device(saved), CurrentStream(saved).stream()));
}

/// Whether backward may write into what alias_of() gave in forward: nobody else has it, autograd
/// lets go of it after this backward, and no tracer looks on.
inline bool may_overwrite(const at::Tensor& saved, int64_t kept_in_forward) {
  return kept_in_forward >= 0 && !torch::autograd::get_current_graph_task_keep_graph() &&
         kept_in(saved) == kept_in_forward && saved.storage().use_count() == 1;
}

/// The bytes that forward saved, or none.
inline at::Tensor saved_or_empty(const at::Tensor& saved, const at::Tensor& dy) {
  return saved.defined() ? saved : at::empty({0}, dy.options().dtype(at::kByte));
}

/// An empty tensor means that there is no gradient.
inline at::Tensor if_wanted(bool wanted, const at::Tensor& t) { return wanted ? t : at::Tensor(); }

}  // namespace cadre::door
