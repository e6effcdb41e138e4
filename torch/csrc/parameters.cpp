#include "parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <bit>
#include <deque>

#include "arguments.h"
#include "words.h"

namespace cadre::door {

static bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

static bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  bool same = same_shape(a, b);
  for (int64_t d = 0; same && d < a.dim(); ++d)
    same = a.size(d) == 1 || a.stride(d) == b.stride(d);  // one element has no stride
  return same;
}

static bool without_gaps(const at::Tensor& t) {
  return t.is_contiguous() || (t.dim() == 2 && t.t().is_contiguous());
}

void require_alike(at::TensorList experts, const char* what) {
  const at::Tensor& first = experts[0];
  for (const at::Tensor& one : experts) {
    require_type(one, first.scalar_type(), what);
    require_memory(one, what);
    TORCH_CHECK_VALUE(same_layout(one, first), what, " of an expert is ", described(one),
                      " with strides ", one.strides(), " on ", one.device(),
                      ", must be as that of the first: ", described(first), " with strides ",
                      first.strides(), " on ", first.device(),
                      one.sizes() == first.sizes() ? "; contiguous() makes both lie alike" : "");
  }
}

Parameters::Parameters(at::TensorList list, const char* name, const at::Tensor& offsets, int dims)
    : tensors(list), what(name), experts(int(offsets.numel() - 1)), discrete(true) {
  TORCH_CHECK_VALUE(!list.empty(), what, " has no tensors, must have one or ", experts);
  discrete = first().dim() == dims;
  TORCH_CHECK_VALUE(discrete || first().dim() == dims + 1, what, " has shape ", first().sizes(),
                    ", must have ", dims, " dimensions for each expert or ", dims + 1, " for all");
  const size_t count = discrete ? size_t(experts) : 1;
  TORCH_CHECK_VALUE(list.size() == count, what, " has ", list.size(), " tensors, must have ", count,
                    "; offsets has ", experts + 1, " entries, one more than there are experts");
  TORCH_CHECK_VALUE(discrete || first().size(0) == experts, what, " has shape ", first().sizes(),
                    ", must have ", experts, " experts; offsets has one more entry");
  require_alike(list, what);
  TORCH_CHECK_VALUE(!discrete || without_gaps(first()), what, " of an expert has shape ",
                    first().sizes(), " and strides ", first().strides(),
                    ", must lie without gaps; make it contiguous");
}

void require_beside(const at::Tensor& x, at::TensorList parameters, const char* what) {
  for (const at::Tensor& t : parameters) {
    require_same_device(x, t, what);
    TORCH_CHECK_VALUE(!t.is_neg(), what,
                      " is a negated view, must be numbers as they lie with main_grad, deferred "
                      "gradients, out, dgrad_out or cached weights; give resolve_neg()");
  }
}

void require_like(at::TensorList gradients, at::TensorList parameters, const char* what) {
  TORCH_CHECK_VALUE(gradients.size() == parameters.size(), what, " has ", gradients.size(),
                    " tensors, must have ", parameters.size(), ", as many as the parameters");
  const bool is_packed = parameters.size() == 1 && parameters[0].dim() == 2;
  for (size_t i = 0; i < gradients.size(); ++i) {
    require_type(gradients[i], parameters[i].scalar_type(), what);
    TORCH_CHECK_VALUE(is_packed ? same_shape(gradients[i], parameters[i])
                                : same_layout(gradients[i], parameters[i]),
                      what, " is ", described(gradients[i]), " with strides ",
                      gradients[i].strides(), " on ", gradients[i].device(),
                      ", must be as its parameter: ", described(parameters[i]), " with strides ",
                      parameters[i].strides(), " on ", parameters[i].device());
    require_memory(gradients[i], what);
  }
}

const int32_t* accumulate_words(const std::optional<at::Tensor>& words, Accumulate mode,
                                int experts, const at::Tensor& x) {
  const bool reads = mode == Accumulate::kDevice || mode == Accumulate::kPerExpert;
  TORCH_CHECK_VALUE(reads || !words, "accumulate_flags is given, must be None; accumulate is ",
                    mode == Accumulate::kYes ? "yes" : "no");
  if (!words) return nullptr;
  const int64_t count = mode == Accumulate::kPerExpert ? experts : 1;
  return written_ints(*words, {"accumulate_flags", {count}, x});
}

std::optional<Major> order_of(const at::Tensor& t) {
  if (t.dim() < 2 || t.numel() == 0) return Major::kRow;
  const at::IntArrayRef size = t.sizes(), stride = t.strides();
  const size_t last = size.size() - 1;
  const auto lies = [&](size_t inner, size_t outer) {
    // What steps nowhere may have any stride.
    const int64_t step = size[outer] == 1 ? size[inner] : stride[outer];
    return (size[inner] == 1 || stride[inner] == 1) && step >= size[inner] &&
           (last == 1 || size[0] == 1 || stride[0] >= step * size[outer]);
  };
  if (lies(last, last - 1)) return Major::kRow;
  if (lies(last - 1, last)) return Major::kColumn;
  return std::nullopt;
}

Major major_of(const at::Tensor& weight) { return order_of(weight).value_or(Major::kRow); }

int alignment(at::TensorList tensors) {
  uint64_t all = 16;
  for (const at::Tensor& t : tensors) {
    if (!t.defined()) continue;
    all |= reinterpret_cast<uint64_t>(t.data_ptr());
    for_strides(t, [&](int64_t, int64_t stride) {
      if (stride != 1) all |= uint64_t(stride * t.element_size());
    });
  }
  return int(uint64_t(1) << std::countr_zero(all));
}

void PointerTables::write(const at::Tensor& on, const CurrentStream& current) {
  if (addresses_.empty()) return;
  memory_ = at::empty({int64_t(addresses_.size())}, on.options().dtype(at::kLong));
  void* const data = memory_.data_ptr();
  write_pointers(addresses_, static_cast<const void**>(data), device(on), current.stream());
  for (const auto& set : setters_) set(static_cast<void**>(data));
}

void LinearBindings::bind(at::TensorList weight, at::TensorList bias) {
  if (layout_.discrete_weight)
    tables_.add(weight, parameters.discrete_w);
  else
    parameters.w = view(weight[0], "weight");
  if (bias.empty()) return;
  if (layout_.discrete_bias)
    tables_.add(bias, parameters.discrete_bias);
  else
    parameters.bias = view(bias[0], "bias");
}

void LinearBindings::bind_dw(at::TensorList dw) {
  if (dw.empty()) return;
  if (layout_.discrete_dw)
    tables_.add(dw, parameters.discrete_dw);
  else
    parameters.dw = view(dw[0], "dweight");
}

void LinearBindings::bind_dbias(at::TensorList dbias) {
  if (dbias.empty()) return;
  if (layout_.discrete_bias)
    tables_.add(dbias, parameters.discrete_dbias);
  else
    parameters.dbias = view(dbias[0], "dbias");
}

Recipe recipe_of(std::string_view words) {
  return translate_errors([&] { return parse_recipe(words); });
}

Recipe recipe_or_default(std::string_view recipe, const at::Tensor& x) {
  if (!recipe.empty()) return recipe_of(recipe);
  const std::string_view own = name(float_type(x.scalar_type(), "x"));
  for (const RecipeInfo& info : recipe_list())
    if (info.name == own) return info.recipe;
  return recipe_of(own);
}

bool wgrad_reads_x(const at::Tensor& x, std::string_view recipe) {
  return recipe.empty() ||
         recipe_or_default(recipe, x).wgrad.rhs == recipe_or_default("", x).wgrad.rhs;
}

bool backward_reads_tokens(const at::Tensor& x, std::string_view recipe, int64_t top_k,
                           bool shared) {
  MoeProblem p{.top_k = int(top_k), .recipe = recipe_or_default(recipe, x)};
  p.dtype = float_type(x.scalar_type(), "x");
  p.shared_features = int64_t(shared);
  return keeps_tokens(p);
}

bool is_random(const Recipe& recipe) {
  for (const OperandFormats& pass : {recipe.fprop, recipe.dgrad, recipe.wgrad})
    if (pass.lhs.stochastic || pass.rhs.stochastic) return true;
  return false;
}

const uint64_t* random_state(const at::Tensor& rng, const at::Tensor& x) {
  require_same_device(x, rng, "rng");
  require_type(rng, at::kLong, "rng");
  TORCH_CHECK_VALUE(rng.numel() == 2 && rng.is_contiguous(), "rng has shape ", rng.sizes(),
                    " and strides ", rng.strides(), ", must be [2] and contiguous");
  require_memory(rng, "rng");
  return static_cast<const uint64_t*>(rng.data_ptr());
}

Accumulate parse_accumulate(std::string_view word) {
  if (word == "no") return Accumulate::kNo;
  if (word == "yes") return Accumulate::kYes;
  if (word == "device") return Accumulate::kDevice;
  TORCH_CHECK_VALUE(word == "per_expert", "accumulate is '", word,
                    "', must be no, yes, device or per_expert");
  return Accumulate::kPerExpert;
}

void require_fits(const Parameters& gradients, const at::Tensor& weight) {
  const at::Tensor& dw = gradients.first();
  const at::IntArrayRef shape = weight.sizes().slice(weight.dim() - 2);
  const bool line = shape[0] == 1 || shape[1] == 1;  // lies in either order
  TORCH_CHECK_VALUE(dw.sizes().slice(dw.dim() - 2) == shape, gradients.what, " has shape ",
                    dw.sizes(), ", must end in ", shape, ", the shape of an expert's weight");
  TORCH_CHECK_VALUE(line || major_of(dw) == major_of(weight), gradients.what, " has strides ",
                    dw.strides(), ", must lie as its weight, with strides ", weight.strides(),
                    ": both transposed, or neither");
  require_same_device(weight, dw, gradients.what);
}

GroupedMlpProblem problem_with_activation(std::string_view activation) {
  GroupedMlpProblem p;
  p.activation = parse_activation(activation.substr(0, activation.find(' ')));
  if (activation.find(' ') == std::string_view::npos) return p;
  p = parse_grouped_mlp_problem(text("grouped_mlp R=0 H=1 F=1 E=1 recipe=bf16 act=", activation));
  require_activation_names(activation);
  return p;
}

at::Tensor rows_of(const at::Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 2, what, " has shape ", x.sizes(),
                    ", must have two dimensions; flatten the leading ones");
  require_memory(x, what);
  return x.contiguous();
}

std::vector<at::Tensor> empty_like(at::TensorList list, std::optional<at::ScalarType> type) {
  std::vector<at::Tensor> made;
  made.reserve(list.size());
  for (const at::Tensor& t : list)
    made.push_back(at::empty_like(t, t.options().dtype(type.value_or(t.scalar_type()))));
  return made;
}

std::vector<at::Tensor> slices_like(at::TensorList list) {
  if (list.size() == 1) return empty_like(list);
  constexpr int64_t kAligned = 256;  // elements
  const int64_t step = (list[0].numel() + kAligned - 1) / kAligned * kAligned;
  const at::Tensor all = at::empty({step * int64_t(list.size())}, list[0].options());
  std::vector<at::Tensor> made;
  made.reserve(list.size());
  for (const at::Tensor& t : list) {
    const int64_t begin = step * int64_t(made.size());
    made.push_back(at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(all.storage()), all.key_set(), all.dtype()));
    made.back().unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), begin);
  }
  return made;
}

/// Bytes grow linearly with the rows, except for what is rounded up: 256 bytes a part, and a block
/// of scales an expert, which zero rows have too. So no other pair of row counts has a steeper
/// slope than none and many.
static SizeBound bound_of(int64_t none, int64_t many, int64_t rows) {
  constexpr int64_t kRounding = 4096;  // sixteen parts
  if (none == 0 && many == 0) return {};
  return {none + kRounding, (many - none + rows - 1) / rows};
}

static int64_t& rows_in(GroupedLinearProblem& p) { return p.rows; }
static int64_t& rows_in(GroupedMlpProblem& p) { return p.rows; }
static int64_t& rows_in(MoeProblem& p) { return p.tokens; }

template <class Problem>
static MemoryBounds computed_bounds(Problem problem, const Device& device) {
  constexpr int64_t kRows = 1 << 16;
  rows_in(problem) = 0;
  const LayerMemory none = plan(problem, device).memory;
  rows_in(problem) = kRows;
  const LayerMemory many = plan(problem, device).memory;
  return {bound_of(none.saved_bytes, many.saved_bytes, kRows),
          bound_of(none.pending_bytes, many.pending_bytes, kRows)};
}

/// A cache of a thread's last results: a model has few layers of different shape.
template <class Problem, class Result>
class Cache {
 public:
  template <class Compute>
  const Result& get(const Problem& problem, const Device& device, Compute compute) {
    for (const Entry& e : entries_)
      if (e.problem == problem && e.device == device) return e.result;
    if (entries_.size() == kCapacity) entries_.pop_front();
    entries_.push_back({problem, device, compute(problem, device)});
    return entries_.back().result;
  }

 private:
  static constexpr size_t kCapacity = 32;
  struct Entry {
    Problem problem;
    Device device;
    Result result;
  };
  std::deque<Entry> entries_;
};

template <class Problem>
static MemoryBounds cached_bounds(const Problem& given, const Device& device) {
  static thread_local Cache<Problem, MemoryBounds> cache;
  Problem problem = given;
  rows_in(problem) = 0;
  problem.options.align = 16;
  try {
    return cache.get(problem, device, computed_bounds<Problem>);
  } catch (const std::exception&) {
    plan(given, device);  // whose error has the caller's rows
    throw;
  }
}

template <class Plan, class Problem>
static const Plan& cached_plan_of(const Problem& problem, const Device& device) {
  static thread_local Cache<Problem, Plan> cache;
  return cache.get(problem, device, [](const Problem& p, const Device& d) { return plan(p, d); });
}

const GroupedLinearPlan& cached_plan(const GroupedLinearProblem& p, const Device& device) {
  return cached_plan_of<GroupedLinearPlan>(p, device);
}
const GroupedMlpPlan& cached_plan(const GroupedMlpProblem& p, const Device& device) {
  return cached_plan_of<GroupedMlpPlan>(p, device);
}
const MoePlan& cached_plan(const MoeProblem& p, const Device& device) {
  return cached_plan_of<MoePlan>(p, device);
}

MemoryBounds memory_bounds(const GroupedLinearProblem& p, const Device& device) {
  return cached_bounds(p, device);
}
MemoryBounds memory_bounds(const GroupedMlpProblem& p, const Device& device) {
  return cached_bounds(p, device);
}
MemoryBounds memory_bounds(const MoeProblem& p, const Device& device) {
  return cached_bounds(p, device);
}

}  // namespace cadre::door
