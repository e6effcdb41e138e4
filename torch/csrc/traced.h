#pragma once
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

#include "door.h"

// Which tensors need torch's dispatcher.
namespace cadre::door {

/// Fake tensors, subclasses, transforms, and lazy negation and zeros: their memory does not hold
/// their values, or something else must see the operation.
inline bool needs_dispatcher(const Tensor& t) {
  const c10::DispatchKeySet theirs({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                    c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                    c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper});
  return t.defined() && (t.key_set().has_any(theirs) || !(t.is_cpu() || t.is_cuda()));
}
inline bool needs_dispatcher(const Maybe& t) { return t && needs_dispatcher(*t); }
inline bool needs_dispatcher(TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& t) { return needs_dispatcher(t); });
}

/// Whether new tensors are fake: they have no memory.
inline bool new_tensors_are_fake(const Tensor& like) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         needs_dispatcher(at::empty({0}, like.options()));
}

}  // namespace cadre::door
