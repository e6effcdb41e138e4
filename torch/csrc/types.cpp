#include "types.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace cadre::door {

[[noreturn]] static void wrong_type(at::ScalarType type, const char* what, const char* wanted) {
  TORCH_CHECK_TYPE(false, what, " is ", dtype_name(type), ", must be ", wanted);
}

std::string dtype_name(at::ScalarType type) {
  return c10::str("torch.", c10::getDtypeNames(type).first);
}

std::string described(const at::Tensor& t) {
  return c10::str(dtype_name(t.scalar_type()), t.sizes());
}

DType element_type(at::ScalarType type, const char* what) {
  switch (type) {
    case at::kFloat:
      return DType::kF32;
    case at::kBFloat16:
      return DType::kBf16;
    case at::kHalf:
      return DType::kF16;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    case at::kByte:
      return DType::kU8;
    case at::kFloat8_e4m3fn:
      return DType::kE4m3;
    case at::kFloat8_e5m2:
      return DType::kE5m2;
    case at::kFloat8_e8m0fnu:
      return DType::kE8m0;
    default:
      break;
  }
  wrong_type(type, what, "torch.float32, torch.bfloat16 or torch.float16");
}

at::ScalarType scalar_type(DType type) {
  switch (type) {
    case DType::kF32:
      return at::kFloat;
    case DType::kBf16:
      return at::kBFloat16;
    case DType::kF16:
      return at::kHalf;
    case DType::kI32:
      return at::kInt;
    case DType::kI64:
      return at::kLong;
    case DType::kE4m3:
      return at::kFloat8_e4m3fn;
    case DType::kE5m2:
      return at::kFloat8_e5m2;
    case DType::kE8m0:
      return at::kFloat8_e8m0fnu;
    case DType::kE2m1:
    case DType::kU8:
      break;
  }
  return at::kByte;  // two codes of four bits a byte
}

DType float_type(at::ScalarType type, const char* what) {
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf)
    wrong_type(type, what, "torch.float32, torch.bfloat16 or torch.float16");
  return element_type(type, what);
}

DType index_type(at::ScalarType type, const char* what) {
  if (type != at::kInt && type != at::kLong) wrong_type(type, what, "torch.int32 or torch.int64");
  return element_type(type, what);
}

void require_type(const at::Tensor& t, at::ScalarType type, const char* what) {
  if (t.scalar_type() != type) wrong_type(t.scalar_type(), what, dtype_name(type).c_str());
}

}  // namespace cadre::door
