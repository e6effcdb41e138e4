#pragma once
#include "door.h"

// Checks of tensors of which the library takes the address alone and so cannot see the length;
// copies of those with strides that it does not take; tensors that an operation writes.
namespace cadre::door {

/// What an argument must look like, and what it is called.
struct Expected {
  const char* what;
  at::IntArrayRef shape;
  const at::Tensor& on;  ///< whose device it must be on
};

/// Errors    ValueError unless the tensor has that shape and device.
void require(const at::Tensor&, const Expected&);

/// Numbers that the library reads as a plain array: the tensor, or a copy of it without gaps.
/// Undefined for an optional that holds nothing. Errors    ValueError for shape, type or device.
at::Tensor read_floats(const std::optional<at::Tensor>&, const Expected&);
at::Tensor read_ints(const at::Tensor&, const Expected&);

/// The same for arrays that an operation writes, without a copy.
float* written_floats(const at::Tensor&, const Expected&);
int32_t* written_ints(const at::Tensor&, const Expected&);

/// The tensor, or a copy of it where its last dimension has gaps or its rows overlap.
/// Errors    as require_memory().
at::Tensor with_rows(const at::Tensor&, const char* what);

/// The number as problems hold it. Errors    ValueError where it would be another one there.
int int_of(int64_t, const char* what);

/// Tells autograd that an operation has written these; undefined ones are passed over.
void bump_versions(at::TensorList);

/// Tells autograd that the operation writes this tensor, and that it must be on the device of `on`.
const at::Tensor& written(const at::Tensor&, const char* what, const at::Tensor& on);

/// The same of a tensor that must have the type of `on`, too. Errors    TypeError.
const at::Tensor& written_like(const at::Tensor&, const char* what, const at::Tensor& on);

}  // namespace cadre::door
