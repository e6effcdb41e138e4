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
  std::vector<at::Tensor> weight;      ///< as the products read it
  std::vector<at::Tensor> parameters;  ///< whose gradient it is
  LinearWants wants{};
  std::string recipe;
  bool save_input = false;
  std::vector<at::Tensor> into;  ///< main_grad; none: .grad
  Accumulate accumulate = Accumulate::kNo;
  std::optional<at::Tensor> flags;      ///< see accumulate_words()
  std::vector<int64_t> versions{};      ///< of parameters, dy and x when backward ran
  std::optional<c10::Stream> stream{};  ///< that backward ran on; none on the CPU
};

/// What the copies of weights depend on besides the weights.
struct CacheKey {
  c10::Device device;
  at::ScalarType type;
  std::string recipe;
  bool dgrad;
  int64_t bytes;

  bool operator==(const CacheKey&) const = default;
};

/// Any thread may call: a backward in one, `run_next` in another.
class LinearMemory : public torch::CustomClassHolder {
 public:
  /// A number for operators, which take objects at the price of an exception thrown and caught.
  static int64_t id_of(const c10::intrusive_ptr<LinearMemory>&);
  /// Errors    ValueError for the number of none that lives.
  static c10::intrusive_ptr<LinearMemory> of(int64_t id);

  int64_t pending();
  void push(PendingWgrad);
  void discard();

  /// Computes the oldest pending gradient, into main_grad or as autograd adds to .grad, on the
  /// current stream. Errors    RuntimeError if a weight, dy or x changed since backward: the
  ///                           gradient stays pending then.
  void run_next();

  /// Memory for the copies, and whether they must be written: always where it is new.
  std::pair<at::Tensor, bool> cache(const CacheKey&, bool refresh, const at::Tensor& on);

 private:
  std::mutex mutex_;  ///< of all below; held for moments, never while products run
  std::deque<PendingWgrad> wgrads_;
  std::optional<CacheKey> key_;
  at::Tensor cache_;
};

}  // namespace cadre::door
