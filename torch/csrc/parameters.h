#pragma once
#include <ATen/core/Tensor.h>
#include <cadre/cadre.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "door.h"

// Weights and biases as torch has them: one packed tensor, or one tensor an expert.
namespace cadre::door {

/// A list of parameters, what it holds, and how many experts there are.
struct Parameters {
  at::TensorList tensors;
  const char* what;  ///< "weight", in errors
  int experts;
  bool discrete;  ///< one tensor an expert

  /// `dims` is what one expert's tensor has: 2 of weights, 1 of biases.
  /// Errors    ValueError unless there is one packed tensor or one an expert, all of one shape,
  ///           dtype, layout and device, and those of experts without gaps: the library knows only
  ///           where they begin.
  Parameters(at::TensorList, const char* what, const at::Tensor& offsets, int dims);

  const at::Tensor& first() const { return tensors.front(); }
  DType dtype() const { return float_type(first().scalar_type(), what); }
};

/// Errors    TypeError or ValueError unless all are alike in shape, dtype, layout and device: one
///           tensor an expert, of which an operation is told one address each and the rest once.
void require_alike(at::TensorList experts, const char* what);

/// Errors    ValueError for parameters on another device, such as "meta", and for negated views:
///           what no operator does reads them where they lie.
void require_beside(const at::Tensor& x, at::TensorList parameters, const char* what);

/// Errors    ValueError unless both lists have as many tensors, alike in shape, dtype, layout and
///           device: gradients of parameters, which `what` names.
void require_like(at::TensorList gradients, at::TensorList parameters, const char* what);

/// Errors    ValueError unless gradients have the shape of an expert's weight, lie in its order of
///           dimensions and are on its device.
void require_fits(const Parameters& gradients, const at::Tensor& weight);

/// The words that say where gradients are added to: one, or one an expert; null for the other
/// modes. Errors    ValueError.
const int32_t* accumulate_words(const std::optional<at::Tensor>&, Accumulate, int experts,
                                const at::Tensor& x);

/// How a matrix lies, or each of E: row if its last dimension has stride 1, column if the one
/// before has; none if neither has, or elements overlap.
std::optional<Major> order_of(const at::Tensor&);

/// Of the weight of a layer. Row where there is none: the library refuses its strides.
Major major_of(const at::Tensor& weight);

/// Bytes, 16 at most, of which the addresses and strides of all these tensors are multiples, as
/// view() has them: what a problem may promise.
int alignment(at::TensorList);

/// Device arrays of pointers, one for each list of discrete parameters, all written by one launch.
class PointerTables {
 public:
  /// After write(), `table` points to the addresses of these tensors.
  template <class Pointers>
  void add(at::TensorList tensors, Pointers& table) {
    const size_t begin = addresses_.size();
    for (const at::Tensor& t : tensors) addresses_.push_back(t.data_ptr());
    setters_.push_back([&table, begin](void** all) { table = all + begin; });
  }

  /// Writes on the current stream. The tables live as long as this.
  void write(const at::Tensor& on, const CurrentStream& current);

 private:
  std::vector<const void*> addresses_;
  std::vector<std::function<void(void**)>> setters_;
  at::Tensor memory_;
};

/// The parameters of a linear layer and their gradients as the library takes them: views of packed
/// tensors, pointer tables of discrete ones, which are set once the tables are written.
class LinearBindings {
 public:
  LinearBindings(const ParameterLayout& layout, PointerTables& tables)
      : layout_(layout), tables_(tables) {}

  void bind(at::TensorList weight, at::TensorList bias);
  void bind_dw(at::TensorList dw);
  void bind_dbias(at::TensorList dbias);

  LinearParameters parameters;

 private:
  const ParameterLayout& layout_;
  PointerTables& tables_;
};

/// The recipe of these words. Errors    ValueError, wherever it is called.
Recipe recipe_of(std::string_view words);

/// The recipe, or, where none is named, that of the tensor's own type.
Recipe recipe_or_default(std::string_view recipe, const at::Tensor& x);

/// Whether weight gradients read x itself. Where the recipe copies it, the copy is what is kept.
bool wgrad_reads_x(const at::Tensor& x, std::string_view recipe);
/// Whether backward of experts that keep no rows reads tokens: cadre::keeps_tokens.
bool backward_reads_tokens(const at::Tensor& x, std::string_view recipe, int64_t top_k,
                           bool shared = false);

/// Whether a copy of any operand rounds stochastically.
bool is_random(const Recipe&);

/// Seed and offset. Errors    TypeError or ValueError unless it is int64 [2] on the device of x.
const uint64_t* random_state(const at::Tensor& rng, const at::Tensor& x);

/// "no", "yes", "device" or "per_expert". Errors    ValueError.
Accumulate parse_accumulate(std::string_view);

/// "swiglu", "clamped_swiglu layout=interleave1 limit=7 alpha=1.702 offset=1": an MLP with that
/// activation. Errors    ValueError with the words it takes.
GroupedMlpProblem problem_with_activation(std::string_view activation);

/// x as rows: [R, C], contiguous. Errors    ValueError unless it has two dimensions.
at::Tensor rows_of(const at::Tensor& x, const char* what);

/// New tensors, each with the shape and strides of its like, and its type unless one is named.
std::vector<at::Tensor> empty_like(at::TensorList, std::optional<at::ScalarType> type = {});

/// The same as slices of one allocation, which the host makes faster. Not for results of operators:
/// their fake ones begin where their memory does.
std::vector<at::Tensor> slices_like(at::TensorList);

/// An upper bound in bytes, linear in the rows, or in the tokens of an expert layer, so that
/// torch.compile can reason about it with symbolic rows and without planning.
struct SizeBound {
  int64_t fixed = 0, per_row = 0;

  int64_t bytes(int64_t rows) const { return fixed + rows * per_row; }
};

/// Bounds of a layer's saved and pending memory, computed once for all numbers of rows.
struct MemoryBounds {
  SizeBound saved, pending;
};
MemoryBounds memory_bounds(const GroupedLinearProblem&, const Device&);
MemoryBounds memory_bounds(const GroupedMlpProblem&, const Device&);
MemoryBounds memory_bounds(const MoeProblem&, const Device&);

/// The same before anybody knows the rows, or tokens: errors say what their 0 means.
template <class Problem>
MemoryBounds memory_bounds_of_any_rows(const Problem& p, const Device& device) {
  const auto said = [](const std::exception& error) {
    return text(error.what(), "; 0 rows or tokens stand for any number of them");
  };
  try {
    return memory_bounds(p, device);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(said(error));
  } catch (const Unsupported& error) {
    throw Unsupported(said(error));
  }
}

/// The plan of a problem. Each thread caches its last plans, since planning takes microseconds, a
/// hundred and more of them where products are refused. The reference is valid until the thread's
/// next call.
const GroupedLinearPlan& cached_plan(const GroupedLinearProblem&, const Device&);
const GroupedMlpPlan& cached_plan(const GroupedMlpProblem&, const Device&);
const MoePlan& cached_plan(const MoeProblem&, const Device&);

}  // namespace cadre::door
