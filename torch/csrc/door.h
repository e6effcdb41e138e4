#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <cadre/cadre.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "types.h"

// What every file of the PyTorch door uses: tensor -> view, current stream -> Stream, memory from
// torch's allocator, exceptions that Python knows.
namespace cadre::door {

using at::Tensor;
using at::TensorList;
using Maybe = std::optional<at::Tensor>;
using Text = std::string_view;

// Where the memory of a tensor is handed on. `what` names the tensor in errors.

/// Errors    ValueError unless the storage of the tensor holds all its elements: it may have been
///           freed or shrunk since.
void require_memory(const at::Tensor&, const char* what);

/// Calls each(dimension, stride), from the last dimension to the first, with the strides that the
/// library is told. A dimension that steps nowhere may have any; it gets that of a tensor without
/// gaps.
template <class Each>
void for_strides(const at::Tensor& t, const Each& each) {
  int64_t behind = 1;  // all that lies within
  for (int64_t d = t.dim() - 1; d >= 0; --d) {
    const int64_t size = t.size(d), stride = size == 1 || t.numel() == 0 ? behind : t.stride(d);
    each(d, stride);
    behind = std::max(behind, std::max<int64_t>(size, 1) * stride);
  }
}

/// The tensor as it lies, strides and all. Errors    TypeError for a type that Cadre has no name
///           for; as require_memory().
TensorView view(const at::Tensor&, const char* what);

/// `data` as that type. Errors    TypeError for another; ValueError unless the tensor is
///           contiguous; as require_memory().
float* floats(const at::Tensor&, const char* what);
int32_t* ints(const at::Tensor&, const char* what);

/// Null for an optional that holds nothing, or an undefined tensor.
float* floats(const std::optional<at::Tensor>&, const char* what);

/// int32 [E + 1] on the device of `x`. Errors    ValueError.
Offsets offsets(const at::Tensor& offsets, const at::Tensor& x);

/// What a plan is made for: the CPU, or the GPU of the tensor.
Device device(const at::Tensor&);

/// Of a tensor beside `x`. Errors    ValueError naming the tensor that is elsewhere.
TensorView view(const at::Tensor&, const at::Tensor& x, const char* what);

/// Errors    ValueError naming the tensor that is elsewhere.
void require_same_device(const at::Tensor& x, const at::Tensor& other, const char* what);

/// The device of `x`, current while this lives, and torch's current stream there.
class CurrentStream {
 public:
  explicit CurrentStream(const at::Tensor& x) : guard_(x.device()), device_(x.device()) {}
  Stream stream() const;

 private:
  c10::DeviceGuard guard_;
  c10::Device device_;
};

/// Bytes on the device of `on`, from its first multiple of 256 on. On the CPU they begin as zero.
at::Tensor bytes(int64_t count, const at::Tensor& on);

/// The memory of such a tensor; none of an undefined one. Errors    as require_memory().
Memory memory_of(const at::Tensor& bytes, const char* what);

/// The tensor, or a copy that is aligned: hooks may have moved what forward saved.
/// Errors    as require_memory().
at::Tensor aligned(const at::Tensor& bytes, const char* what);

/// Memory that a run writes and a later run reads: the caller's tensor, or an aligned copy that is
/// copied back when this ends.
class AlignedOutput {
 public:
  AlignedOutput(const at::Tensor& out, const char* what)
      : out_(out), aligned_(aligned(out, what)) {}
  AlignedOutput(const AlignedOutput&) = delete;
  AlignedOutput& operator=(const AlignedOutput&) = delete;
  ~AlignedOutput() noexcept(false) {
    if (!aligned_.is_same(out_)) out_.copy_(aligned_);
  }
  Memory memory() const { return memory_of(aligned_, "memory"); }

 private:
  at::Tensor out_, aligned_;
};

/// Memory of one run.
class Scratch {
 public:
  Scratch(int64_t count, const at::Tensor& on) {
    if (count > 0) tensor_ = bytes(count, on);
  }
  Workspace workspace() const {
    const Memory memory = memory_of(tensor_, "workspace");
    return {memory.data, memory.bytes};
  }

 private:
  at::Tensor tensor_;
};

/// Calls `f`; an error of Cadre becomes ValueError or NotImplementedError.
[[noreturn]] void rethrow();
template <class F>
auto translate_errors(F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (...) {
    rethrow();
  }
}

/// The directions of a layer as function objects, since the functions are overloaded.
constexpr auto kForward = [](auto&&... args) { forward(args...); };
constexpr auto kBackward = [](auto&&... args) { backward(args...); };
constexpr auto kWgrad = [](auto&&... args) { wgrad(args...); };

/// Plans and runs an operation on the current stream of `on`.
template <class Problem, class Args>
void launch(const Problem& problem, const Args& args, const at::Tensor& on) {
  translate_errors([&] {
    const auto chosen = plan(problem, device(on));
    const CurrentStream current(on);
    const Scratch scratch(chosen.workspace_bytes, on);
    run(chosen, args, scratch.workspace(), current.stream());
  });
}

}  // namespace cadre::door
