#include "arguments.h"

#include <ATen/ops/empty.h>

#include <limits>

namespace cadre::door {

void require(const at::Tensor& t, const Expected& expected) {
  require_same_device(expected.on, t, expected.what);
  TORCH_CHECK_VALUE(t.sizes() == expected.shape, expected.what, " has shape ", t.sizes(),
                    ", must be ", expected.shape);
  require_memory(t, expected.what);
}

at::Tensor read_floats(const std::optional<at::Tensor>& t, const Expected& expected) {
  if (!t || !t->defined()) return {};
  require(*t, expected);
  const at::Tensor dense = t->contiguous();
  floats(dense, expected.what);
  return dense;
}

at::Tensor read_ints(const at::Tensor& t, const Expected& expected) {
  require(t, expected);
  const at::Tensor dense = t.contiguous();
  ints(dense, expected.what);
  return dense;
}

float* written_floats(const at::Tensor& t, const Expected& expected) {
  require(t, expected);
  return floats(t, expected.what);
}

int32_t* written_ints(const at::Tensor& t, const Expected& expected) {
  require(t, expected);
  return ints(t, expected.what);
}

at::Tensor with_rows(const at::Tensor& t, const char* what) {
  if (!t.defined()) return t;
  require_memory(t, what);
  int64_t step = 1;
  for (int64_t d = t.dim() - 1; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    const bool good = d == t.dim() - 1 ? t.stride(d) == 1 : t.stride(d) >= step;
    // A tensor without elements counts as contiguous, whatever its strides.
    if (!good) return t.numel() == 0 ? at::empty(t.sizes(), t.options()) : t.contiguous();
    step = t.stride(d) * t.size(d);
  }
  return t;
}

int int_of(int64_t value, const char* what) {
  using Limits = std::numeric_limits<int>;
  TORCH_CHECK_VALUE(value >= Limits::min() && value <= Limits::max(), what, " is ", value,
                    ", must be below 2^31");
  return int(value);
}

const at::Tensor& written(const at::Tensor& t, const char* what, const at::Tensor& on) {
  require_same_device(on, t, what);
  bump_versions(t);
  return t;
}

const at::Tensor& written_like(const at::Tensor& t, const char* what, const at::Tensor& on) {
  require_type(t, on.scalar_type(), what);
  return written(t, what, on);
}

void bump_versions(TensorList list) {
  for (const Tensor& t : list)
    if (t.defined()) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace cadre::door
