#pragma once
#include <ATen/core/Tensor.h>
#include <cadre/cadre.h>

#include <array>
#include <cstdint>
#include <functional>
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
  DType dtype() const { return element_type(first().scalar_type()); }
};

/// Errors    ValueError unless both lists have as many tensors, alike in shape, dtype, layout and
///           device: gradients of parameters, which `what` names.
void require_like(at::TensorList made, at::TensorList given, const char* what);

/// Errors    ValueError unless gradients have the shape of an expert's weight, lie in its order of
///           dimensions and are on its device.
void require_fits(const Parameters& gradients, const at::Tensor& weight);

/// The words that say where gradients are added to: one, or one an expert; null for the other
/// modes. Errors    ValueError.
const int32_t* accumulate_words(const std::optional<at::Tensor>&, Accumulate, int experts,
                                const at::Tensor& x);

/// Column if the last but one dimension has stride 1: a transposed view.
Major major_of(const at::Tensor& weight);

/// Bytes, 16 at most, of which addresses and strides of all these tensors are multiples.
int alignment(at::TensorList);

/// Addresses in memory of the device: tables of discrete parameters, all written by one launch.
class Tables {
 public:
  /// `table` will say where the addresses of these tensors are.
  template <class Pointers>
  void add(at::TensorList tensors, Pointers& table) {
    const size_t begin = addresses_.size();
    for (const at::Tensor& t : tensors) addresses_.push_back(t.data_ptr());
    tell_.push_back([&table, begin](void** all) { table = all + begin; });
  }

  /// On the stream of `here`. The tables live as long as this.
  void write(const at::Tensor& on, const Here& here);

 private:
  std::vector<const void*> addresses_;
  std::vector<std::function<void(void**)>> tell_;
  at::Tensor memory_;
};

/// The parameters of a linear layer and their gradients in the core's words, those of discrete ones
/// once the tables are written.
class LinearTables {
 public:
  LinearTables(const ParameterLayout& layout, Tables& tables) : layout_(layout), tables_(tables) {}

  void read(at::TensorList weight, at::TensorList bias);
  void write_dw(at::TensorList dw);
  void write_dbias(at::TensorList dbias);

  LinearParameters own;

 private:
  const ParameterLayout& layout_;
  Tables& tables_;
};

/// The recipe, or, where none is named, that of the tensor's own type.
Recipe recipe_or_own(std::string_view recipe, const at::Tensor& x);

/// Whether weight gradients read x itself. Where the recipe copies it, the copy is what is kept.
bool wgrad_reads(const at::Tensor& x, std::string_view recipe);

/// Whether a copy of any operand rounds stochastically.
bool is_random(const Recipe&);

/// Seed and offset. Errors    ValueError unless it is int64 [2] on the device of x.
const uint64_t* random_state(const at::Tensor& rng, const at::Tensor& x);

/// "no", "yes", "device" or "per_expert". Errors    ValueError.
Accumulate parse_accumulate(std::string_view);

/// "swiglu", "clamped_swiglu layout=interleave1 limit=7 alpha=1.702 offset=1": an MLP with that
/// activation. Errors    ValueError with the words it takes.
GroupedMlpProblem activated(std::string_view activation);

/// x as rows: [R, C], contiguous. Errors    ValueError unless it has two dimensions.
at::Tensor rows_of(const at::Tensor& x, const char* what);

/// A new tensor an expert, or one, each as the given one lies.
std::vector<at::Tensor> empty_like(at::TensorList);

/// The same as slices of one allocation, which the host makes faster. Not for results of operators:
/// their fake ones begin where their memory does.
std::vector<at::Tensor> slices_like(at::TensorList);

/// How much of a layer's memory so many rows take, at most: begin + rows * row. Linear, so that a
/// compiler can reason about it without planning.
struct Room {
  int64_t begin = 0, row = 0;

  int64_t of(int64_t rows) const { return begin + rows * row; }
};

/// The saved and the pending memory of a layer, planned once for each problem but for its rows.
struct Rooms {
  Room saved, pending;
};
Rooms rooms(const GroupedLinearProblem&, const Device&);
Rooms rooms(const GroupedMlpProblem&, const Device&);

/// The plan of a problem. A thread remembers the last ones, since planning takes microseconds: it
/// is good until the thread asks for the next.
const GroupedLinearPlan& planned(const GroupedLinearProblem&, const Device&);
const GroupedMlpPlan& planned(const GroupedMlpProblem&, const Device&);

}  // namespace cadre::door
