#pragma once
#include <ATen/core/Tensor.h>
#include <cadre/dtype.h>

#include <string>

// Types of elements: torch's, Cadre's, and which an argument may have. `what` names the argument.
namespace cadre::door {

/// As Python says it: "torch.float32".
std::string dtype_name(at::ScalarType);

/// Type and shape: "torch.float32[4, 8]".
std::string described(const at::Tensor&);

/// Errors    TypeError for a type that Cadre has no name for.
DType element_type(at::ScalarType, const char* what);
at::ScalarType scalar_type(DType);

/// Errors    TypeError unless it is fp32, bf16 or fp16.
DType float_type(at::ScalarType, const char* what);

/// Errors    TypeError unless it is int32 or int64.
DType index_type(at::ScalarType, const char* what);

/// Errors    TypeError unless the tensor has that type.
void require_type(const at::Tensor&, at::ScalarType, const char* what);

}  // namespace cadre::door
