#include "door.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace cadre::door {

void require_memory(const at::Tensor& t, const char* what) {
  if (!t.defined() || t.numel() == 0) return;
  TORCH_CHECK_VALUE(t.has_storage(), what, " has layout ", t.layout(),
                    ", must be dense; that of torch.vmap is not");
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const int64_t bytes = (last + 1) * int64_t(t.element_size());
  TORCH_CHECK_VALUE(bytes <= int64_t(t.storage().nbytes()), what, " has a storage of ",
                    t.storage().nbytes(), " bytes, must have ", bytes,
                    "; it was freed or shrunk (untyped_storage().resize_)");
}

TensorView view(const at::Tensor& t, const char* what) {
  TensorView v;
  if (!t.defined()) return v;
  TORCH_CHECK_VALUE(t.dim() <= TensorView::kMaxRank, what, " has ", t.dim(),
                    " dimensions, must have at most ", TensorView::kMaxRank);
  require_memory(t, what);
  v.data = t.data_ptr();
  v.dtype = element_type(t.scalar_type(), what);
  v.rank = int(t.dim());
  std::copy(t.sizes().begin(), t.sizes().end(), v.shape.begin());
  for_strides(t, [&](int64_t d, int64_t stride) { v.stride[size_t(d)] = stride; });
  return v;
}

template <class T>
static T* elements_of(const at::Tensor& t, at::ScalarType type, const char* what) {
  if (!t.defined()) return nullptr;
  require_type(t, type, what);
  require_memory(t, what);
  TORCH_CHECK_VALUE(t.is_contiguous(), what, " has strides ", t.strides(), ", must be contiguous");
  return static_cast<T*>(t.data_ptr());
}

float* floats(const at::Tensor& t, const char* what) {
  return elements_of<float>(t, at::kFloat, what);
}

int32_t* ints(const at::Tensor& t, const char* what) {
  return elements_of<int32_t>(t, at::kInt, what);
}

float* floats(const std::optional<at::Tensor>& t, const char* what) {
  return t ? floats(*t, what) : nullptr;
}

Offsets offsets(const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) >= 2, "offsets has shape ", t.sizes(),
                    ", must be [E + 1]");
  require_same_device(x, t, "offsets");
  return {ints(t, "offsets"), int(t.size(0) - 1)};
}

Device device(const at::Tensor& t) {
  if (t.is_cpu()) return this_cpu();
  static const std::vector<Device> devices = cuda_devices();
  const auto index = size_t(t.device().index());
  TORCH_CHECK_NOT_IMPLEMENTED(t.is_cuda() && index < devices.size(), "device is ", t.device(),
                              ", must be cpu or a CUDA device; this build of Cadre sees ",
                              devices.size(), " of these (python -m cadre doctor says more)");
  return devices[index];
}

void require_same_device(const at::Tensor& x, const at::Tensor& other, const char* what) {
  TORCH_CHECK_VALUE(!other.defined() || other.device() == x.device(), what, " is on ",
                    other.device(), ", must be on ", x.device());
}

TensorView view(const at::Tensor& t, const at::Tensor& x, const char* what) {
  require_same_device(x, t, what);
  return view(t, what);
}

Stream CurrentStream::stream() const {
  if (device_.is_cpu()) return {};
  const c10::impl::VirtualGuardImpl backend(device_.type());
  return {backend.getStreamNativeHandle(backend.getStream(device_))};
}

constexpr size_t kAlign = 256;  // torch's allocator of GPU memory gives 512

at::Tensor bytes(int64_t count, const at::Tensor& on) {
  const at::TensorOptions options = on.options().dtype(at::kByte);
  if (count == 0 || !on.is_cpu()) return at::empty({count}, options);
  const size_t whole = (size_t(count) + kAlign - 1) / kAlign * kAlign;
  void* data = std::aligned_alloc(kAlign, whole);
  TORCH_CHECK(data != nullptr, "out of memory: ", whole, " bytes");
  std::memset(data, 0, whole);
  return at::from_blob(
      data, {count}, [](void* p) { std::free(p); }, options);
}

Memory memory_of(const at::Tensor& t, const char* what) {
  require_memory(t, what);
  return t.defined() ? Memory{t.data_ptr(), t.numel()} : Memory{};
}

at::Tensor aligned(const at::Tensor& t, const char* what) {
  if (!t.defined()) return t;
  require_type(t, at::kByte, what);
  require_memory(t, what);
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % kAlign == 0 && t.is_contiguous()) return t;
  at::Tensor copy = bytes(t.numel(), t);
  copy.copy_(t);
  return copy;
}

void rethrow() {
  try {
    throw;
  } catch (const InvalidArgument& e) {
    C10_THROW_ERROR(ValueError, e.what());
  } catch (const Unsupported& e) {
    C10_THROW_ERROR(NotImplementedError, e.what());
  }
}

}  // namespace cadre::door
