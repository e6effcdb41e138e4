#include "parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <bit>
#include <deque>

#include "arguments.h"

namespace cadre::door {

static bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

static bool without_gaps(const at::Tensor& t) {
  return t.is_contiguous() || (t.dim() == 2 && t.t().is_contiguous());
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
  for (const at::Tensor& one : list)
    TORCH_CHECK_VALUE(same_layout(one, first()), what, " of an expert is ", one.scalar_type(),
                      one.sizes(), " with strides ", one.strides(), " on ", one.device(),
                      ", must be as that of the first: ", first().scalar_type(), first().sizes(),
                      " with strides ", first().strides(), " on ", first().device());
  TORCH_CHECK_VALUE(!discrete || without_gaps(first()), what, " of an expert has shape ",
                    first().sizes(), " and strides ", first().strides(),
                    ", must lie without gaps; make it contiguous");
}

void require_like(at::TensorList made, at::TensorList given, const char* what) {
  TORCH_CHECK_VALUE(made.size() == given.size(), what, " has ", made.size(), " tensors, must have ",
                    given.size(), ", as many as the parameters");
  for (size_t i = 0; i < made.size(); ++i)
    TORCH_CHECK_VALUE(same_layout(made[i], given[i]), what, " is ", made[i].scalar_type(),
                      made[i].sizes(), " with strides ", made[i].strides(), " on ",
                      made[i].device(), ", must be as its parameter: ", given[i].scalar_type(),
                      given[i].sizes(), " with strides ", given[i].strides(), " on ",
                      given[i].device());
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

Major major_of(const at::Tensor& weight) {
  const int64_t d = weight.dim();
  const bool row = weight.stride(d - 1) == 1 && weight.stride(d - 2) >= weight.size(d - 1);
  return row || weight.stride(d - 2) != 1 ? Major::kRow : Major::kColumn;
}

int alignment(at::TensorList tensors) {
  uint64_t all = 16;
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || t.numel() == 0) continue;
    all |= reinterpret_cast<uint64_t>(t.data_ptr());
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.stride(d) != 1 && t.size(d) != 1) all |= uint64_t(t.stride(d) * t.element_size());
  }
  return int(uint64_t(1) << std::countr_zero(all));
}

void Tables::write(const at::Tensor& on, const Here& here) {
  if (addresses_.empty()) return;
  memory_ = at::empty({int64_t(addresses_.size())}, on.options().dtype(at::kLong));
  void* const data = memory_.data_ptr();
  write_pointers(addresses_, static_cast<const void**>(data), device(on), here.stream());
  for (const auto& tell : tell_) tell(static_cast<void**>(data));
}

void LinearTables::read(at::TensorList weight, at::TensorList bias) {
  if (layout_.discrete_weight)
    tables_.add(weight, own.discrete_w);
  else
    own.w = view(weight[0]);
  if (bias.empty()) return;
  if (layout_.discrete_bias)
    tables_.add(bias, own.discrete_bias);
  else
    own.bias = view(bias[0]);
}

void LinearTables::write_dw(at::TensorList dw) {
  if (dw.empty()) return;
  if (layout_.discrete_dw)
    tables_.add(dw, own.discrete_dw);
  else
    own.dw = view(dw[0]);
}

void LinearTables::write_dbias(at::TensorList dbias) {
  if (dbias.empty()) return;
  if (layout_.discrete_bias)
    tables_.add(dbias, own.discrete_dbias);
  else
    own.dbias = view(dbias[0]);
}

Recipe recipe_or_own(std::string_view recipe, const at::Tensor& x) {
  if (!recipe.empty()) return parse_recipe(recipe);
  const std::string_view own = name(element_type(x.scalar_type()));
  for (const RecipeInfo& info : recipe_list())
    if (info.name == own) return info.recipe;
  return parse_recipe(own);
}

bool wgrad_reads(const at::Tensor& x, std::string_view recipe) {
  return recipe.empty() || recipe_or_own(recipe, x).wgrad.rhs == recipe_or_own("", x).wgrad.rhs;
}

bool is_random(const Recipe& recipe) {
  for (const OperandFormats& pass : {recipe.fprop, recipe.dgrad, recipe.wgrad})
    if (pass.lhs.stochastic || pass.rhs.stochastic) return true;
  return false;
}

const uint64_t* random_state(const at::Tensor& rng, const at::Tensor& x) {
  require_same_device(x, rng, "rng");
  TORCH_CHECK_VALUE(rng.scalar_type() == at::kLong && rng.numel() == 2 && rng.is_contiguous(),
                    "rng is ", rng.scalar_type(), rng.sizes(), ", must be int64 [2]");
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

GroupedMlpProblem activated(std::string_view activation) {
  GroupedMlpProblem p;
  p.activation = parse_activation(activation.substr(0, activation.find(' ')));
  if (activation.find(' ') == std::string_view::npos) return p;
  return parse_grouped_mlp_problem(
      text("grouped_mlp R=0 H=1 F=1 E=1 recipe=bf16 act=", activation));
}

at::Tensor rows_of(const at::Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 2, what, " has shape ", x.sizes(),
                    ", must have two dimensions; flatten the leading ones");
  return x.contiguous();
}

std::vector<at::Tensor> empty_like(at::TensorList list) {
  std::vector<at::Tensor> made;
  made.reserve(list.size());
  for (const at::Tensor& t : list) made.push_back(at::empty_like(t));
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

/// Memory grows with the rows but for what is rounded up: by 256 bytes a part, and a block of
/// scales an expert, which no rows have too. So the slope between two counts of rows is no less
/// than any other's.
static Room room(int64_t none, int64_t many, int64_t rows) {
  constexpr int64_t kRounding = 4096;  // sixteen parts
  if (none == 0 && many == 0) return {};
  return {none + kRounding, (many - none + rows - 1) / rows};
}

template <class Problem>
static Rooms measured(Problem problem, const Device& device) {
  constexpr int64_t kRows = 1 << 16;
  problem.rows = 0;
  const LayerMemory none = plan(problem, device).memory;
  problem.rows = kRows;
  const LayerMemory many = plan(problem, device).memory;
  return {room(none.saved_bytes, many.saved_bytes, kRows),
          room(none.pending_bytes, many.pending_bytes, kRows)};
}

/// The last answers of a thread: a model has few layers of different shape.
template <class Problem, class Answer>
class Memo {
 public:
  template <class Ask>
  const Answer& get(const Problem& problem, const Device& device, Ask ask) {
    for (const Known& k : known_)
      if (k.problem == problem && k.device == device) return k.answer;
    if (known_.size() == kMost) known_.pop_front();
    known_.push_back({problem, device, ask(problem, device)});
    return known_.back().answer;
  }

 private:
  static constexpr size_t kMost = 32;
  struct Known {
    Problem problem;
    Device device;
    Answer answer;
  };
  std::deque<Known> known_;
};

template <class Problem>
static Rooms remembered(Problem problem, const Device& device) {
  static thread_local Memo<Problem, Rooms> memo;
  problem.rows = 0;
  problem.align = 16;
  return memo.get(problem, device, measured<Problem>);
}

template <class Plan, class Problem>
static const Plan& remembered_plan(const Problem& problem, const Device& device) {
  static thread_local Memo<Problem, Plan> memo;
  return memo.get(problem, device, [](const Problem& p, const Device& d) { return plan(p, d); });
}

const GroupedLinearPlan& planned(const GroupedLinearProblem& p, const Device& device) {
  return remembered_plan<GroupedLinearPlan>(p, device);
}
const GroupedMlpPlan& planned(const GroupedMlpProblem& p, const Device& device) {
  return remembered_plan<GroupedMlpPlan>(p, device);
}

Rooms rooms(const GroupedLinearProblem& p, const Device& device) { return remembered(p, device); }
Rooms rooms(const GroupedMlpProblem& p, const Device& device) { return remembered(p, device); }

}  // namespace cadre::door
