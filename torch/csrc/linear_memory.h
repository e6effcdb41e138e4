#pragma once
#include <c10/core/Stream.h>
#include <torch/custom_class.h>

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "grouped_linear.h"

// What a grouped linear layer remembers between its calls: weight gradients that backward left for
// later, and quantised copies of the weights.
namespace cadre::door {

/// A weight gradient that has everything it needs.
struct PendingWgrad {
  at::Tensor dy, x, saved, pending, offsets;
  std::vector<at::Tensor> weight;  ///< as the products read it; undefined: the parameter itself
  LinearWants wants{};
  std::string recipe;
  bool save_input = false;
  std::vector<at::Tensor> into;  ///< main_grad; none: .grad
  Accumulate accumulate = Accumulate::kNo;
  std::optional<at::Tensor> flags;  ///< see accumulate_words()
  /// Whose gradient it is. What Python hangs on a parameter may lead back to the layer, a cycle
  /// that nobody would see through here, so it is not kept alive.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters{};
  std::vector<int64_t> versions{};      ///< of parameters, dy, x, offsets when backward ran
  std::optional<c10::Stream> stream{};  ///< that backward ran on; none on the CPU
};

/// A number that changes with the bytes and strides of the weights, whoever wrote them: version
/// counters do not see what fused optimizers and `.data` write, nor what sharded training puts in
/// place of freed memory. None on a GPU, where it would take a wait.
std::optional<uint64_t> content_of(at::TensorList weight);

/// What copies of weights are made of.
struct CopiesKey {
  c10::Device device;
  at::ScalarType type;
  std::string recipe;
  bool dgrad;
  int64_t bytes;
  uint64_t content;

  bool operator==(const CopiesKey&) const = default;
};

/// Owned by the layer, and by what is under way through it. Any thread may call: a backward in one,
/// `run_next` in another.
class LinearMemory : public torch::CustomClassHolder {
 public:
  /// A tensor without elements that owns the memory: operators take tensors for nothing, objects at
  /// the price of an exception thrown and caught.
  static at::Tensor handle_of(const c10::intrusive_ptr<LinearMemory>&);
  /// Errors    ValueError for a tensor that is none.
  static c10::intrusive_ptr<LinearMemory> of(const std::optional<at::Tensor>& handle);

  int64_t pending();
  void push(PendingWgrad, at::TensorList parameters);
  void discard();

  /// Computes the oldest pending gradient, into main_grad or as autograd adds to .grad, on the
  /// current stream. Errors    RuntimeError if a weight, dy, x or offsets changed since backward,
  ///                           or a weight is gone: the gradient stays pending then.
  void run_next();

  /// The kept copies and false; or, where they are not of this content or are to be made anew,
  /// memory for others and true.
  std::pair<at::Tensor, bool> copies(const CopiesKey&, bool anew, const at::Tensor& on);

  /// Keeps copies that have been written.
  void keep(const CopiesKey&, const at::Tensor& copies);

 private:
  std::mutex mutex_;  ///< of all below; held for moments, never while products run
  std::deque<PendingWgrad> wgrads_;
  std::optional<CopiesKey> key_;
  at::Tensor copies_;
};

}  // namespace cadre::door
